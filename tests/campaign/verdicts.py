"""Verdicts of cases, and the table of a campaign."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.campaign.processes import MEMORY, Outcome

GOOD = ("held", "noticed", "harmless")
"""held: the same result in spite of the fault. noticed: refused in one clear line, and right once the fault is gone.
harmless: what was damaged is not used by the command."""
COLUMNS = ("tried", *GOOD, "FAILED")


class Verdict(NamedTuple):
    """What became of a case."""

    result: str
    """One of GOOD, or `failed`."""
    case: str
    """What was done, in words."""
    reason: str = ""
    """Why it failed."""


def failed(case: str, reason: str) -> Verdict:
    return Verdict("failed", case, reason)


def unclear(outcome: Outcome, *, baseline: int = 0) -> str:
    """Return why the end of a command is not acceptable, whatever its result; empty if it is."""
    if outcome.hung:
        return f"hang: still running after {outcome.seconds:.0f} s"
    if "Traceback (most recent call last)" in outcome.err + outcome.out:
        return f"traceback: {_last_line(outcome.err)}"
    if outcome.code < 0:
        return f"crash: killed by signal {-outcome.code}: {_last_line(outcome.err)}"
    if outcome.memory > MEMORY + baseline:
        return f"memory: {outcome.memory / 2**30:.1f} GiB"
    if outcome.code not in (0, 3, 4) and not is_clear(outcome):
        return f"unclear: exit code {outcome.code} with {outcome.err[-400:]!r}"
    return ""


def is_clear(outcome: Outcome) -> bool:
    """Whether a nonzero exit has one clear line: `error: ...`, the usage, or a signal's own message."""
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(error|Error): \S", line)]
    if outcome.code in (130, 143, 129) or (outcome.code == 2 and "Usage: " in outcome.err):
        return True
    return len(errors) == 1 and len(errors[0].strip()) > len("error: ")


def refused(outcome: Outcome) -> bool:
    return outcome.code == 1 or outcome.code == 2


def reports_a_problem(outcome: Outcome) -> bool:
    """Whether a command reports that something is wrong: a warning, a `problem` in its output, or an exit code.

    The code is 3 (partly done) or 4 (an audit that could not read all text); undisturbed, all commands of the lab exit
    with 0.
    """
    return (
        outcome.code in (3, 4)
        or "warning: " in outcome.err
        or bool(re.search(r'"problem": "\w|damaged|not readable', outcome.out + outcome.err))
    )


def fell_back(outcome: Outcome) -> bool:
    """Whether a training warns that it runs without compiled kernels or with fewer threads: its weights are rounded
    otherwise."""
    pattern = r"^warning: (attention and GELU run in torch|using \d+ of \d+ threads)"
    return bool(re.search(pattern, outcome.err, re.MULTILINE))


def has_other_tokenizer(outcome: Outcome) -> bool:
    """Whether a build warns that a source was missing when it trained the tokenizer, which all later caches use."""
    return "warning: the tokenizer was trained without" in outcome.err


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"


def table(counts: dict[str, Counter[str]]) -> str:
    """Return the table of a campaign: a line per kind, and their sum."""
    names = [*counts, "all"]
    rows = [*counts.values(), sum(counts.values(), Counter())]
    width = max(len(name) for name in (*names, "kind"))
    lines = [f"{'kind':{width}}" + "".join(f"{column:>10}" for column in COLUMNS)]
    for name, row in zip(names, rows, strict=True):
        numbers = [sum(row.values()), *(row[good] for good in GOOD), row["failed"]]
        lines.append(f"{name:{width}}" + "".join(f"{number:>10,}" for number in numbers))
    return "\n".join(lines)


def count(verdicts: Iterable[tuple[str, str]]) -> dict[str, Counter[str]]:
    """Return {kind: Counter(result)} for pairs of kind and result."""
    counts: dict[str, Counter[str]] = {}
    for kind, result in verdicts:
        counts.setdefault(kind, Counter())[result] += 1
    return counts


def add_tables(paths: Iterable[Path]) -> dict[str, Counter[str]]:
    """Return the sum of the tables in files that --json wrote."""
    total: dict[str, Counter[str]] = {}
    for path in paths:
        for kind, row in json.loads(path.read_text(encoding="utf-8"))["counts"].items():
            total.setdefault(kind, Counter()).update(row)
    return total
