"""Speed of niels-gpt beside its peers: `python -m bench` (or `make bench`).

Every contender lives in a process of its own; they take turns, one round each at a time, and only ratios
within a round are compared, because the machine is never quiet.
"""
