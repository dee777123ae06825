"""A case whose contenders do nothing, in processes of their own."""

import os

from bench.case import Case, Contender, NotHere, Work


def broken(quick):
    raise RuntimeError("no such luck")


def absent(quick):
    raise ModuleNotFoundError("No module named 'litgpt'", name="litgpt")


def elsewhere(quick):
    raise NotHere("no such processor")


def noisy(quick):
    return Work(lambda: os.write(1, b"a library says hello\n"), amount=2, facts={"quick": quick})


CASE = Case(
    "fake",
    "ms",
    (
        Contender("ours", noisy, role="ours", target=1.5),
        Contender("peer", lambda quick: Work(lambda: None)),
        Contender("broken", broken),
        Contender("absent", absent),
        Contender("elsewhere", elsewhere),
        Contender("dying", lambda quick: os._exit(3)),
    ),
)
