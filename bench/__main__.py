"""`python -m bench [CASE ...] [--device cuda] [--rounds N] [--json PATH] [--quick]`: print a table and write JSON.

The exit code is 1 if a contender failed. A contender that is not installed or cannot run here, and a missed target, are
only reported.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import datetime
from pathlib import Path

from rich.console import Console

from bench.case import NAMES, ON_CPU, ON_CUDA, load_case
from bench.peers import ROOT
from bench.report import machine, table, write_json
from bench.runner import Row, run_case


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen cases, print the table, write the JSON; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench", description="Speed of niels-gpt beside its peers.")
    listed = f"one of {', '.join(NAMES)}; default on a CPU: {', '.join(ON_CPU)}; on cuda: {', '.join(ON_CUDA)}"
    parser.add_argument("cases", nargs="*", metavar="CASE", help=listed)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    rounds = "rounds per contender (default: that of the case, usually 9; 2 with --quick)"
    parser.add_argument("--rounds", type=int, help=rounds)
    parser.add_argument("--json", type=Path, metavar="PATH", help="default: bench/results/<date>.json")
    parser.add_argument("--data", type=Path, metavar="PATH", help="the text of the case shakespeare")
    parser.add_argument("--note", default="", help="a remark stored with the result")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only shows that everything runs")
    options = parser.parse_args(arguments)
    for name in options.cases:
        if name not in NAMES and "." not in name:  # a dotted name is any module with a CASE
            parser.error(f"no case {name!r}; there are {', '.join(NAMES)}")
    if options.data is not None:
        os.environ["BENCH_DATA"] = str(options.data.resolve())  # for the processes of the contenders
    names = options.cases or (ON_CPU if options.device == "cpu" else ON_CUDA)
    try:
        facts = machine(options.device)  # before the start, so that the load is that of other programs
        for name in names:
            load_case(name, options.device)
    except ValueError as err:
        print(f"bench: {err}", file=sys.stderr)
        return 2

    path = options.json or ROOT / "bench" / "results" / f"{datetime.now():%Y-%m-%d-%H%M%S}.json"
    about = {"device": options.device, "rounds": options.rounds, "quick": options.quick, "note": options.note}
    rows: list[Row] = []
    with Console(stderr=True).status("") as status:
        for name in names:
            rows += run_case(name, rounds=options.rounds, quick=options.quick, device=options.device, say=status.update)
            write_json(path, rows, **about, machine=facts)  # after every case: an interrupted run keeps its results
    Console().print(table(rows, quick=options.quick), f"written to {path}", soft_wrap=True)
    return 1 if any(row.error and not row.error.startswith("not ") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
