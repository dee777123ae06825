"""`python -m bench [CASE ...] [--rounds N] [--json PATH] [--quick]`: a table, and JSON.

Exits with 1 where a contender failed; one that is not installed, or a missed target, is only reported.
"""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path

from rich.console import Console

from bench.case import NAMES
from bench.report import machine, table, write_json
from bench.runner import ROOT, Row, run_case


def main(arguments: list[str] | None = None) -> int:
    """Run the cases asked for, print the table, write the JSON; the exit code."""
    parser = argparse.ArgumentParser(prog="bench", description="Speed of niels-gpt beside its peers.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--rounds", type=int, help="rounds per contender (default 9, with --quick 2)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="default: bench/results/<date>.json")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that everything runs")
    options = parser.parse_args(arguments)
    rounds, quick = options.rounds or (2 if options.quick else 9), options.quick
    for name in options.cases:
        if name not in NAMES and "." not in name:  # with a dot: a module of your own
            parser.error(f"no case {name!r}; there are {', '.join(NAMES)}")

    path = options.json or ROOT / "bench" / "results" / f"{datetime.now():%Y-%m-%d-%H%M%S}.json"
    rows: list[Row] = []
    facts = machine()  # before the start: the load is that of others
    with Console(stderr=True).status("") as status:
        for name in options.cases or NAMES:
            rows += run_case(name, rounds=rounds, quick=quick, say=status.update)
            write_json(path, rows, rounds=rounds, quick=quick, machine=facts)  # each time: what is measured is kept
    Console().print(table(rows, quick=quick), f"written to {path}", soft_wrap=True)
    return 1 if any(row.error and row.error != "not installed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
