"""The process of one contender: `python -m bench.worker CASE CONTENDER [--quick]`.

Answers every line on stdin with one round and one JSON line on stdout, and ends with stdin. The first line
on stdout comes unasked, after one round for warming up: {"amount", "gflop", "facts"}, or {"error"}.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from typing import IO, Any

from bench.case import Contender, load_case


def main(arguments: list[str]) -> None:
    """Serve rounds of `CASE CONTENDER [--quick]` until stdin ends."""
    quick = "--quick" in arguments
    case, name = [argument for argument in arguments if argument != "--quick"]
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not get between the replies
    serve(load_case(case)[name], quick, sys.stdin, replies)


def serve(contender: Contender, quick: bool, requests: IO[str], replies: IO[str]) -> None:
    """Build the contender, then one round and one reply per request; an error is a reply and the end."""

    def reply(**content: Any) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    if contender.needs and importlib.util.find_spec(contender.needs) is None:
        return reply(error="not installed")
    try:
        work = contender.build(quick)
        work.run()
        reply(amount=work.amount, gflop=work.gflop, facts=work.facts)
        for _ in requests:
            began = time.perf_counter()
            work.run()
            reply(seconds=time.perf_counter() - began)
    except Exception as err:  # reported in the table, so that one broken contender does not cost the others
        reply(error=f"failed: {type(err).__name__}: {err}")


if __name__ == "__main__":
    main(sys.argv[1:])
