"""The fault campaign: disturbs every command (kills, power cuts, errors, flipped bits, bad input) and checks the result.

`python -m tests.campaign --minutes 5` or `make campaign`. Each case is a function of (seed, kind, number); a failure
prints the command that repeats it. pytest does not run the campaign, only the tests of its parts.
"""
