"""docs/performance.md, made of kept results: `python -m bench.history [RESULT.json ...]`.

Results that are given are copied to bench/history/ first; then the page is written from all that lie there. Nothing in
it is written by hand, so it can always be made again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.report import number
from bench.runner import ROOT

KEPT, PAGE = ROOT / "bench" / "history", ROOT / "docs" / "performance.md"
HEAD = """# Performance

Made by `python -m bench.history` from the results in `bench/history/`, which `python -m bench` measured; do not edit.
Every contender has a process of its own, they take turns, and a number is the median of its rounds; the ratio is the
median of the rounds' ratios to the best peer, above 1 where ours is better. `nano` is a GPT as nanoGPT writes it
(`bench/nano.py`); GPT-2 and Llama are those of transformers. What each case measures, stands in its module in
`bench/cases/`. MFU is (6 N + 12 L C T) tokens/s over the vendor's peak.

```sh
make bench-peers && .venv-peers/bin/python -m bench CASE ... [--device cuda] --json result.json
python -m bench.history result.json
```
"""
COLUMNS = ("date", "case", "ours", "median", "peers", "ratio", "target", "")


def keep(path: Path) -> Path:
    """Copy a result to the kept ones, under its date and device. Raises ValueError for one of tiny sizes."""
    result = json.loads(path.read_text(encoding="utf-8"))
    if result.get("quick"):
        raise ValueError(f"{path} was measured with --quick: its numbers say nothing")
    day, clock = result["date"][:10], result["date"][11:19].replace(":", "")
    kept = KEPT / f"{day}-{clock}-{result.get('device', 'cpu')}.json"
    kept.parent.mkdir(exist_ok=True)
    shutil.copyfile(path, kept)
    return kept


def page(results: Sequence[dict[str, Any]]) -> str:
    """The page: per hardware the newest number of everything, then what it was before, then where it was measured."""
    parts = [HEAD]
    newest_first = sorted(results, key=lambda result: result["date"], reverse=True)
    for hardware in dict.fromkeys(map(_hardware, newest_first)):
        here = [result for result in newest_first if _hardware(result) == hardware]
        now: list[Sequence[str]] = []
        before: list[Sequence[str]] = []
        seen: set[tuple[str, str, str]] = set()
        for result in here:
            for row in (row for row in result["rows"] if row["role"] == "ours"):
                key = row["case"], row["contender"], row["unit"]
                (before if key in seen else now).append(_cells(result, row))
                seen.add(key)
        parts += [f"## {hardware}\n", _table(sorted(now, key=lambda cells: cells[1]))]  # stable: as measured within one
        if before:
            parts += ["### Before\n", _table(before)]
        parts += ["### Measured\n", "".join(f"- {_measured(result)}\n" for result in here)]
    return "\n".join(parts)


def _hardware(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"


def _cells(result: dict[str, Any], row: dict[str, Any]) -> Sequence[str]:
    """A row of ours, with its peers: those of its case and group, in its unit."""
    alike = [
        other
        for other in result["rows"]
        if other["role"] == "peer"
        and (other["case"], other["group"]) == (row["case"], row["group"])
        and (other["error"] or other["unit"] == row["unit"])
    ]
    peers = "; ".join(
        f"{other['contender'].partition(',')[0]} {_error(other) or number(other['median'])}" for other in alike
    )
    median = _error(row) if row["median"] is None else f"{number(row['median'])} {row['unit']}"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    verdict = {True: "met", False: "**missed**", None: ""}[row["met"]]
    return result["date"][:10], row["case"], row["contender"], median, peers, ratio, row["target"], verdict


def _error(row: dict[str, Any]) -> str:
    """What went wrong, without the particulars: "failed: ValueError"; else nothing."""
    return ":".join((row["error"] or "").split(":")[:2])


def _measured(result: dict[str, Any]) -> str:
    """One line: when, with what, how loaded the machine was before."""
    machine, date = result["machine"], result["date"][:16].replace("T", " ")
    packages = ("python", "torch", "transformers", "litgpt")
    versions = [f"{name} {machine[name]}" for name in packages if machine.get(name)]
    gpu = [f"CUDA {machine['cuda']}", f"{machine['cores']} cores"] if machine.get("gpu") else []
    load = [f"load before {machine['load'][0]:.1f}"] if machine.get("load") else []
    cases = ", ".join(dict.fromkeys(row["case"] for row in result["rows"]))
    note = f". {result['note']}" if result.get("note") else ""
    return f"{date}: {', '.join([*versions, *gpu, *load])} ({cases}){note}"


def _table(rows: Iterable[Sequence[str]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def main(arguments: Sequence[str]) -> int:
    """Keep the results, write the page; the exit code."""
    parser = argparse.ArgumentParser(prog="bench.history", description="Keep results, and write docs/performance.md.")
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULT.json", help="what `python -m bench` wrote")
    try:
        for path in parser.parse_args(arguments).results:
            print(f"kept as {keep(path)}")
    except (OSError, ValueError, KeyError) as err:
        print(f"bench.history: {err}", file=sys.stderr)
        return 2
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(KEPT.glob("*.json"))]
    PAGE.write_text(page(results), encoding="utf-8")
    print(f"{PAGE} from {len(results)} results")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
