"""Write a memorization report: JSON, CSV tables, and an HTML page."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.memorization.measure import Measurement
from niels_gpt.report.memorization_page import memorization_page
from niels_gpt.system import files
from niels_gpt.system.terminal import neutralize

_FORMULA = ("=", "+", "-", "@", "\t", "\n")


def write_report(folder: Path, report: dict[str, Any], measurements: Sequence[Measurement]) -> None:
    """Write report.json, documents.csv, windows.csv and report.html into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / "report.json", report)
    write_documents_csv(folder / "documents.csv", report)
    write_windows_csv(folder / "windows.csv", measurements)
    files.write_text(folder / "report.html", memorization_page(report))


def write_documents_csv(path: Path, report: dict[str, Any]) -> None:
    """Write one line per document with all its results; those of a dict get a column each, as in `over_0.5`."""
    rows = [dict(_flat(document)) for document in report["documents"]]
    _write_csv(path, list(rows[0]), [list(row.values()) for row in rows])


def write_windows_csv(path: Path, measurements: Sequence[Measurement]) -> None:
    """Write one line per window.

    `greedy_run` counts decoded tokens only; `greedy_share` is empty where the text ends before the decoded tokens. With
    a base there is `base_log_p`, empty where it was not measured.
    """
    header = ["document", "control", "start", "end", "log_p", "p", "greedy_share", "greedy_run"]
    rows = []
    compared = any(m.base_log_p is not None for m in measurements)
    header += ["base_log_p"] if compared else []
    for m in measurements:
        columns = [m.starts, m.starts + m.window, m.log_p, m.p, m.greedy_share, m.greedy_run]
        columns += [m.base_log_p] if m.base_log_p is not None else []
        for values in zip(*(column.tolist() for column in columns), strict=True):
            rows.append([m.document.name, m.document.control, *("" if v != v else v for v in values)])
    _write_csv(path, header, rows)


def _flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the entries of nested dicts with names joined by _; texts of passages are skipped."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}_")
        elif key != "text":
            yield f"{prefix}{key}", "" if value is None else value


def _cell(value: Any) -> Any:
    """Return a value as a cell that no spreadsheet executes: text that would begin a formula gets an apostrophe."""
    if not isinstance(value, str):
        return value
    text = neutralize(value)  # csv does not quote a \r, and spreadsheets skip one before a formula
    return f"'{text}" if text.startswith(_FORMULA) else text


def _write_csv(path: Path, header: list[str], rows: Iterable[list[Any]]) -> None:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([_cell(value) for value in row] for row in (header, *rows))
    # A file name that is not utf-8 keeps its escape.
    files.write_text(path, out.getvalue().encode("utf-8", errors="backslashreplace").decode("utf-8"))
