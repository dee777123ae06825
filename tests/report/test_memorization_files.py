"""The files of a memorization report, read back."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from niels_gpt.report.memorization_report import (
    memorization_page,
    write_documents_csv,
    write_report,
    write_windows_csv,
)
from tests.memorization.models import full_report, measured, measurement


def test_files_of_a_report(tmp_path: Path) -> None:
    write_report(tmp_path, full_report(), measured())
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == full_report()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "documents.csv", "report.html", "report.json", "windows.csv",
    ]  # fmt: skip
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == memorization_page(full_report())
    json.dumps(full_report(), allow_nan=False)  # valid JSON


def test_csv_of_documents(tmp_path: Path) -> None:
    write_documents_csv(tmp_path / "documents.csv", full_report())
    with (tmp_path / "documents.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["known", "with, errors", "control", "short"]
    for row, document in zip(rows, full_report()["documents"], strict=True):
        for key in ("tokens", "bytes", "windows", "mean_p", "median_p", "max_p", "mean_log_p", "nats_per_token"):
            assert float(row[key]) == document[key]
        assert row["control"] == str(document["control"])
        for key, count in document["over"].items():
            assert int(row[f"over_{key}"]) == count
        assert int(row["discoverable_1000_0.5"]) == document["discoverable"]["1000"]["0.5"]
        assert float(row["greedy_share"]) == document["greedy"]["share"]
        assert int(row["longest_run_tokens"]) == document["longest_run"]["tokens"]
        assert len(row) == 7 + 4 + 5 + 2 + 3 + 2 + 21


def test_csv_of_windows(tmp_path: Path) -> None:
    ones = [*measured(), measurement(np.arange(20), [0, 8], [-1.0, -2.0], name="not\udcff utf-8")]
    write_windows_csv(tmp_path / "windows.csv", ones)
    with (tmp_path / "windows.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(one.starts) for one in ones)
    [first, second] = rows[-2:]
    assert first == {
        "document": "not\\udcff utf-8",
        "control": "False",
        "start": "0",
        "end": "12",
        "log_p": "-1.0",
        "p": str(math.exp(-1)),
        "greedy_share": "",
        "greedy_run": "0",
    }
    assert (second["start"], second["end"]) == ("8", "20")
    known = [row for row in rows if row["document"] == "known"]
    assert [float(row["log_p"]) for row in known] == measured()[0].log_p.tolist()
    assert [float(row["greedy_share"]) for row in known] == measured()[0].greedy_share.tolist()
    assert [int(row["greedy_run"]) for row in known] == measured()[0].greedy_run.tolist()


def test_unknown_values_are_empty(tmp_path: Path) -> None:
    write_documents_csv(
        tmp_path / "d.csv", {"documents": [{"name": "a", "greedy": {"share": None, "text": "x"}, "windows": 0}]}
    )
    assert (tmp_path / "d.csv").read_text(encoding="utf-8") == "name,greedy_share,windows\na,,0\n"


@pytest.mark.parametrize("name", ["=cmd|'/c calc'!A1", "+1", "-1", "@SUM(A1)", "\t=1", "\n=1", "\r=1"])
def test_no_cell_begins_a_formula(tmp_path: Path, name: str) -> None:
    report = {"documents": [{"name": name, "log_p": -2.5, "plain": "a=b", "greedy": {"=x": 1}}]}
    write_documents_csv(tmp_path / "d.csv", report)
    with (tmp_path / "d.csv").open(encoding="utf-8", newline="") as file:
        header, cells = csv.reader(file)
    shown = f"'{name}" if name[0] != "\r" else "\\x0d=1"
    assert cells == [shown, "-2.5", "a=b", "1"]  # a negative number is a number
    assert header == ["name", "log_p", "plain", "greedy_=x"]
