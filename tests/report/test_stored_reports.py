"""Memorization reports of a run: which are found, their summaries and strips, and damage."""

import itertools
import json
import shutil

import numpy as np
import pytest

from niels_gpt.report.document import BAR_BINS, LEVELS
from niels_gpt.report.memorization_report import headline
from niels_gpt.report.stored_reports import ReportError, StoredReport, find_reports, level_names
from niels_gpt.system import files
from tests.report.test_memorization_page import make_report


def write(folder, report=None, **other):
    """Write a report.json whose checkpoint is in runs/a; return its path."""
    report = report or make_report()
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / "report.json", {**report, "checkpoint": "/home/x/runs/a/checkpoints/best.pt", **other})
    return folder / "report.json"


def strip(text, p):
    return {"document": "d", "control": False, "text": text, "p": p}


def test_reports_of_a_run_are_found_and_links_are_not(tmp_path):
    run = tmp_path / "runs" / "a"
    paths = [write(run / "memorization"), write(run / "audit")]
    (run / "samples").mkdir()
    (run / "linked").symlink_to(run / "audit")
    elsewhere = write(tmp_path / "elsewhere")
    (run / "trick").mkdir()
    (run / "trick" / "report.json").symlink_to(elsewhere)
    found = find_reports(run)
    assert sorted(found.values()) == sorted(paths)
    assert all(set(identifier) <= set("0123456789abcdef") for identifier in found)
    assert find_reports(run) == found


def test_reports_of_a_pipeline_belong_to_its_phases(tmp_path):
    for phase in ("pretrain", "sft"):
        (tmp_path / "p" / phase).mkdir(parents=True)
    (tmp_path / "p" / "pretrain.yaml").write_text("", encoding="utf-8")
    path = write(tmp_path / "p" / "audit", checkpoint="/x/p/sft/checkpoints/best.pt")
    assert list(find_reports(tmp_path / "p" / "sft").values()) == [path]
    assert StoredReport(path).checkpoint_run == "sft"


def test_summary(tmp_path):
    report = make_report()
    found = StoredReport(write(tmp_path / "m", report)).summary
    assert found["headline"] == headline(report) and found["folder"] == "m" and found["step"] == report["step"]
    for mine, theirs in zip(found["documents"], report["documents"], strict=True):
        assert mine["memorized"] == theirs["over"]["0.5"]
        assert {name: mine[name] for name in mine if name != "memorized"}.items() <= theirs.items()
    json.dumps(found, allow_nan=False)


def test_spans_join_to_the_text_and_have_the_levels_of_its_characters(tmp_path):
    rng = np.random.default_rng(0)
    text = "".join(rng.choice(list("abé€😀 <b>\n"), 2000))
    p = np.repeat(rng.choice([0.0, *LEVELS, 1.0], 400), 5).tolist()
    stored = StoredReport(write(tmp_path / "m", strips=[strip(text, p)]))
    joined, levels = "", []
    for start in range(0, 2000, 700):
        for piece, level, low, high in stored.spans(0, start=start, most=700):
            here = p[len(joined) : len(joined) + len(piece)]
            assert (low, high) == (min(here), max(here))
            joined += piece
            levels += [level] * len(piece)
    assert joined == text
    assert levels == [sum(value >= least for least in LEVELS) for value in p]
    about = stored.summary["strips"][0]
    edges = [i * 2000 // BAR_BINS for i in range(BAR_BINS)] + [2000]
    assert about["bar"] == [max(levels[a:b]) for a, b in itertools.pairwise(edges)]
    assert about["characters"] == 2000 and stored.strips == 1
    assert stored.spans(0, start=5000, most=700) == []
    assert len(level_names()) == len(LEVELS) + 1


def test_a_short_and_an_empty_strip(tmp_path):
    stored = StoredReport(write(tmp_path / "m", strips=[strip("ab", [0.95, None]), strip("", [])]))
    assert [about["bar"] for about in stored.summary["strips"]] == [[5, 0], []]
    assert stored.spans(0, start=0, most=10) == [("a", 5, 0.95, 0.95), ("b", 0, 0.0, 0.0)]
    assert stored.spans(1, start=0, most=10) == []


@pytest.mark.parametrize(
    "damage",
    [
        {"strips": [strip("abc", [0.5])]},
        {"strips": [strip("abc", "xyz")]},
        {"strips": 3},
        {"documents": [{}]},
        {"documents": None},
        {"checkpoint": None},
        {"settings": []},
    ],
)
def test_damaged_reports(tmp_path, damage):
    with pytest.raises(ReportError, match=r"m/report\.json is damaged"):
        StoredReport(write(tmp_path / "m", **damage))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 10**5])
def test_files_that_are_no_report(tmp_path, content):
    path = write(tmp_path / "m")
    path.write_bytes(content)
    with pytest.raises(ReportError, match=r"m/report\.json is damaged"):
        StoredReport(path)


def test_one_that_disappears(tmp_path):
    path = write(tmp_path / "m")
    shutil.rmtree(path.parent)
    with pytest.raises(ReportError, match="cannot be read"):
        StoredReport(path)
