"""Speed of niels-gpt beside its peers: `python -m bench` (or `make bench`).

Each contender runs in a separate process. They take turns, one round each, and only ratios within a round are compared,
because the load of a machine changes all the time.
"""
