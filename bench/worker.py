"""The process of one contender: `python -m bench.worker CASE CONTENDER DEVICE [--quick]`.

Writes {"amount", "gflop", "facts"} when it is ready. Then it answers every line on stdin with one round: {"seconds"}
and whatever else the round measured, by unit. Each reply is one line of JSON. {"error"} is the last reply. The process
ends with stdin.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import IO, Any

from bench.case import Contender, Unavailable, load_case


def serve(contender: Contender, quick: bool, requests: IO[str], replies: IO[str]) -> None:
    """Build the contender, run one warm-up round, then run one round and send one reply per request."""

    def reply(**content: Any) -> None:
        print(json.dumps(content), file=replies, flush=True)

    try:
        work = contender.build(quick)
        if work.warm:
            work.run()
        reply(amount=work.amount, gflop=work.gflop, facts=work.facts)
        for _ in requests:
            began = time.perf_counter()
            measured = work.run()
            seconds = time.perf_counter() - began
            reply(**{"seconds": seconds, **(measured if work.measures and isinstance(measured, dict) else {})})
    except Unavailable as err:
        reply(error=f"not here: {err}")
    except Exception as err:  # reported in the table: one broken contender must not stop the others
        missing = isinstance(err, ModuleNotFoundError) and (err.name or "").partition(".")[0] == contender.package
        first = next(iter(str(err).splitlines()), "")[:300]
        reply(error="not installed" if missing else f"failed: {type(err).__name__}: {first}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and with it stdin
    case, name, device, *options = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries that print must not write between the replies
    found = next(contender for contender in load_case(case, device).contenders if contender.name == name)
    serve(found, "--quick" in options, sys.stdin, replies)
