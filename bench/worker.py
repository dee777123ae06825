"""The process of one contender: `python -m bench.worker CASE CONTENDER DEVICE [--quick]`.

Says {"amount", "gflop", "facts"} once it is ready, then answers every line on stdin with one round and its
{"seconds"}, beside what else the round has measured, by unit; JSON, a line each. {"error"} is the last it says. Ends
with stdin.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import IO, Any

from bench.case import Contender, NotHere, load_case

PEERS = ("transformers", "litgpt")


def serve(contender: Contender, quick: bool, requests: IO[str], replies: IO[str]) -> None:
    """Build the contender and run one round to warm up, then one round and one reply per request."""

    def reply(**content: Any) -> None:
        print(json.dumps(content), file=replies, flush=True)

    try:
        work = contender.build(quick)
        if work.warm:
            work.run()
        reply(amount=work.amount, gflop=work.gflop, facts=work.facts)
        for _ in requests:
            began = time.perf_counter()
            found = work.run()
            seconds = time.perf_counter() - began
            reply(**{"seconds": seconds, **(found if work.measures and isinstance(found, dict) else {})})
    except NotHere as err:
        reply(error=f"not here: {err}")
    except Exception as err:  # for the table: one broken contender must not cost the others
        missing = isinstance(err, ModuleNotFoundError) and err.name in PEERS
        first = next(iter(str(err).splitlines()), "")[:300]
        reply(error="not installed" if missing else f"failed: {type(err).__name__}: {first}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and with it stdin
    case, name, device, *options = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between the replies
    found = next(contender for contender in load_case(case, device).contenders if contender.name == name)
    serve(found, "--quick" in options, sys.stdin, replies)
