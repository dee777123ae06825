"""Read the memorization reports that `memorize` and `audit` left in a run, in parts that a page can load one by one."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.report.document import HeatKey, heat_bar, heat_spans
from niels_gpt.report.memorization_report import headline
from niels_gpt.runs.pipeline import pipeline_of
from niels_gpt.system.checked_json import parse_checked_json
from niels_gpt.system.private_files import keep_private

REPORT = "report.json"
LARGEST = 512 * 2**20
"""Reports of more bytes are not read."""
_DOCUMENT = {"name": str, "control": bool, "windows": int, "mean_p": float, "max_p": float, "nats_per_token": float}
"""Fields of a document of a report that a summary has."""
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


class ReportError(ValueError):
    """A report that cannot be read; the message is one line."""


def level_names() -> list[str]:
    """The meaning of the levels 0, 1, ... of a strip."""
    return list(HeatKey().names)


def find_reports(run: Path) -> dict[str, Path]:
    """Return {id: report.json} of the reports in a run, and of those on it in its pipeline; links are not followed."""
    pipeline = pipeline_of(run)
    found = {}
    for folder in (run, *([pipeline] if pipeline else [])):
        for path in sorted(folder.iterdir()):
            report = path / REPORT
            if not path.is_symlink() and report.is_file() and not report.is_symlink():
                name = os.fsencode(report.relative_to(run.parent))
                found[hashlib.sha256(name).hexdigest()[:16]] = report
    return found


class StoredReport:
    """One report.json in memory."""

    def __init__(self, path: Path) -> None:
        """Raises ReportError if it cannot be read."""
        keep_private([path])
        self.path = path
        try:
            if path.stat().st_size > LARGEST:
                raise ReportError(f"{path.parent.name}/{REPORT} is larger than {LARGEST >> 20} MiB")
            report = parse_checked_json(path.read_bytes())
            self.checkpoint_run = Path(report["checkpoint"]).parent.parent.name
            self.summary = _summary(path, report)
            self._strips = [(strip["text"], np.asarray(strip["p"], dtype=np.float64)) for strip in report["strips"]]
            if any(len(text) != len(p) for text, p in self._strips):
                raise ValueError("a strip needs one probability per character")
            self.summary["strips"] = [
                {
                    "document": str(strip["document"]),
                    "control": bool(strip["control"]),
                    "characters": len(text),
                    "bar": heat_bar(p).tolist(),
                }
                for strip, (text, p) in zip(report["strips"], self._strips, strict=True)
            ]
        except ReportError:
            raise
        except OSError as err:
            raise ReportError(f"{path.parent.name}/{REPORT} cannot be read: {err.strerror}") from None
        except _DAMAGED:
            raise ReportError(f"{path.parent.name}/{REPORT} is damaged, or not a memorization report") from None

    @property
    def strips(self) -> int:
        """The number of documents whose map is in the report."""
        return len(self._strips)

    def spans(self, strip: int, *, start: int, most: int) -> list[tuple[str, int, float, float]]:
        """Return (text, level, lowest and highest P(z)) of at most `most` characters of a strip from `start` on."""
        text, p = self._strips[strip]
        return list(heat_spans(text[start : start + most], np.nan_to_num(p[start : start + most])))


def _summary(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    return {
        "folder": path.parent.name,
        "title": str(report["title"] or "What was memorized"),
        "step": int(report["step"]),
        "unit": str(report["unit"]),
        "settings": {name: int(report["settings"][name]) for name in ("window", "prompt", "stride", "greedy")},
        "headline": headline(report),
        "documents": [
            {name: kind(d[name]) for name, kind in _DOCUMENT.items()} | {"memorized": int(d["over"]["0.5"])}
            for d in report["documents"]
        ],
    }
