"""The fault campaign: disturbs every command, and checks that the result is right or the fault is reported.

`python -m tests.campaign --minutes 5` or `make test WHAT=campaign`. Each case is a function of (seed, kind, number); a
failure prints the command that repeats it. pytest does not run the campaign, only the tests of its parts.
"""
