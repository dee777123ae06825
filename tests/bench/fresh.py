"""A case whose rounds run in new processes, two at a time, and measure their unit themselves."""

import os

from bench.case import Case, Contender, Work


def work(quick):
    rounds = []
    return Work(lambda: rounds.append(0) or {"s": len(rounds), "process": os.getpid()}, measures=True, warm=False)


CASE = Case(
    "fresh",
    "s",
    (Contender("ours", work, role="ours", goals={"s": "≤ 1"}), Contender("peer", work)),
    rounds=3,
    starts=2,
    fresh=True,
)
