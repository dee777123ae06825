"""Measuring a run at its checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

from niels_gpt.memorization import run
from niels_gpt.memorization.measure import ExtractionSettings, measure
from niels_gpt.memorization.run import measure_checkpoints, measure_run, report_folder
from niels_gpt.memorization.selection import SelectedDocuments, select_documents
from niels_gpt.runs.loading import load_run
from tests.cli.reciting import PROMPT, STEPS, WINDOW

SETTINGS = ExtractionSettings(WINDOW, PROMPT, stride=20, greedy=16)

pytestmark = pytest.mark.usefixtures("workdir")


@pytest.fixture(scope="module")
def selected(loaded):
    return select_documents(loaded)


@pytest.fixture(scope="module")
def result(loaded, selected):
    titles = []

    @contextlib.contextmanager
    def bar(title):
        titles.append(title)
        yield lambda done, total: None

    found = measure_run(loaded, selected, SETTINGS, passages=2, progress=bar)
    assert titles == ["measuring", *(f"step {step}" for step in STEPS)]
    return found


def test_report_of_a_run(place, loaded, selected, result):
    report = result.report
    assert report["title"] == "What run has memorized"
    assert (report["checkpoint"], report["step"]) == (str(place / "run/checkpoints/best.pt"), STEPS[-1])
    assert [d["name"] for d in report["documents"]] == [d.name for d in selected.documents]
    assert (len(report["passages"]), report["position_map"]) == (2, None)
    assert report["train_tokens"] == selected.train_tokens
    assert len(result.measurements) == len(selected.documents)
    assert report["documents"][0]["greedy"]["starts"] > 0


def test_memorization_grows_over_the_checkpoints(selected, result, trained):
    entries = result.report["checkpoints"]
    assert [entry["step"] for entry in entries] == list(STEPS)
    assert [entry["epochs"] for entry in entries] == [float(selected.epochs[step]) for step in STEPS]
    for d in result.report["documents"]:
        curve = [next(e for e in entry["documents"] if e["name"] == d["name"]) for entry in entries]
        assert curve[-1]["mean_log_p"] == pytest.approx(d["mean_log_p"])
        if d["name"] in trained:
            assert curve[0]["mean_p"] < curve[-1]["mean_p"] and d["mean_p"] > 0.4
        else:
            assert max(e["max_p"] for e in curve) < 1e-6


def test_checkpoints_are_measured_without_greedy_decoding(place, loaded, selected, monkeypatch):
    seen = []
    monkeypatch.setattr(run, "measure", lambda *args, **options: (seen.append(args[3]), measure(*args, **options))[1])
    some = SelectedDocuments(selected.documents[:1], epochs=np.array([0.0, 0.5]))
    entries = list(measure_checkpoints(loaded, some, SETTINGS))
    early = load_run(None, place / f"run/checkpoints/step_{STEPS[0]:08d}.pt", "cpu")
    [one] = measure(early.model, some.documents, early.tokenizer, SETTINGS)
    assert entries[0]["documents"][0]["mean_log_p"] == pytest.approx(float(one.log_p.mean()))
    assert seen == [dataclasses.replace(SETTINGS, greedy=0)] * 3
    assert [entry["epochs"] for entry in entries] == [0.5] * 3  # a run that was extended: the last known value


def test_without_curve_and_outside_a_run(place, workdir, loaded, selected):
    (workdir / "model.pt").write_bytes((place / "run/checkpoints/best.pt").read_bytes())
    outside = load_run(None, workdir / "model.pt", "cpu")
    some = SelectedDocuments(selected.documents[:1])
    report = measure_run(outside, some, SETTINGS).report
    assert (report["title"], report["checkpoints"]) == ("What model.pt has memorized", [])
    assert "train_tokens" not in report
    assert measure_run(loaded, some, SETTINGS, curve=False).report["checkpoints"] == []
    assert report_folder(loaded) == place / "run/memorization"
    assert report_folder(outside, "texts") == workdir / "texts"


def test_ctrl_c_keeps_what_is_measured(loaded, selected, monkeypatch):
    """The first document is complete; then Ctrl-C."""
    monkeypatch.setattr(run, "GROUP_WINDOWS", 1)
    calls = 0

    def interrupted_measure(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == stop:
            raise KeyboardInterrupt
        return measure(*arguments, **options)

    monkeypatch.setattr(run, "measure", interrupted_measure)
    stop = 2
    found = measure_run(loaded, selected, SETTINGS)
    assert [d["name"] for d in found.report["documents"]] == [selected.documents[0].name]
    assert found.report["checkpoints"] == [] and f"1 of {len(selected.documents)}" in found.interrupted
    assert found.report["interrupted"] == found.interrupted
    calls, stop = 0, len(selected.documents) + 2
    found = measure_run(loaded, selected, SETTINGS)
    assert len(found.report["documents"]) == len(selected.documents)
    assert len(found.report["checkpoints"]) == 1 and f"1 of {len(STEPS)} checkpoints" in found.interrupted
    calls, stop = 0, 1
    with pytest.raises(KeyboardInterrupt):
        measure_run(loaded, selected, SETTINGS)
