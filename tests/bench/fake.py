"""A case whose contenders do nothing, in separate processes."""

import os

from bench.case import Case, Contender, Unavailable, Work


def broken(quick):
    raise RuntimeError("no such luck")


def absent(quick):
    raise ModuleNotFoundError("No module named 'litgpt.gpt'", name="litgpt.gpt")


def unavailable(quick):
    raise Unavailable("no such processor")


def noisy(quick):
    return Work(lambda: os.write(1, b"a library says hello\n"), amount=2, facts={"quick": quick})


CASE = Case(
    "fake",
    "ms",
    (
        Contender("ours", noisy, role="ours", target=1.5),
        Contender("peer", lambda quick: Work(lambda: None)),
        Contender("broken", broken),
        Contender("absent", absent, package="litgpt"),
        Contender("unavailable", unavailable),
        Contender("dying", lambda quick: os._exit(3)),
    ),
)
