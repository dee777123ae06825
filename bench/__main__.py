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
from bench.report import table, write_json
from bench.runner import ROOT, run_case


def main(arguments: list[str] | None = None) -> int:
    """Run the cases asked for, print the table, write the JSON; the exit code."""
    parser = argparse.ArgumentParser(prog="bench", description="Speed of niels-gpt beside its peers.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"one or more of {', '.join(NAMES)}; default: all")
    parser.add_argument("--rounds", type=int, help="rounds per contender (default 9; with --quick 2)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="default: bench/results/<date>.json")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that everything runs")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.cases if name not in NAMES and "." not in name]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(NAMES)}")
    rounds = options.rounds if options.rounds is not None else 2 if options.quick else 9
    if rounds < 1:
        parser.error("--rounds must be at least 1")

    path = options.json or ROOT / "bench" / "results" / f"{datetime.now():%Y-%m-%d-%H%M%S}.json"
    rows = []
    with Console(stderr=True).status("starting") as status:
        for name in options.cases or NAMES:
            rows += run_case(name, rounds=rounds, quick=options.quick, say=status.update)
            write_json(path, rows, rounds=rounds, quick=options.quick)  # after every case: a late failure costs little
    console = Console()
    console.print(table(rows, quick=options.quick))
    console.print(f"written to {path}", soft_wrap=True)
    return 1 if any(row.error and row.error.startswith("failed") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
