"""The report of a run, whatever its state and its version."""

import dataclasses
import json
import lzma
import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.evaluation.baselines import references
from niels_gpt.report import run_report as run_report_module
from niels_gpt.report.document import html_page, markdown
from niels_gpt.report.run_report import pipeline_report, read_facts, reproduce_command, run_report, speed, thinned
from niels_gpt.runs.environment import Session, recorded_session
from niels_gpt.system import files
from niels_gpt.system.checked_json import write_checked_json
from tests.report.pages import read
from tests.report.test_document import rows_of
from tests.report.test_memorization_page import make_report
from tests.runs.test_catalog import P_VAL, make_pipeline, make_run

MACHINE = {
    "torch": "2.9.0",
    "python": "3.11.1",
    "device": "cpu",
    "devices": ["cpu: Abacus 1"],
    "threads": 3,
    "cores": 4,
}
ROW = {"source": "roam", "share": 1.0, "train": 1234, "held_out": 56, "unit": "B", "documents": 7}
EVALS = [(0, {"val_roam": 4.0, "val_chat": 3.0}), (2, {"val_roam": 2.0, "val_chat": 1.0})]


def record(run, outcome="finished", step=0, steps=3, **options):
    """Record a session of a run; outcome None: it was killed."""
    given = {"processes": 1, "machine": MACHINE, "data": [{**ROW, "path": "notes (cached)", "licence": "CC0"}]}
    with recorded_session(run, step=step, fingerprint={}, **{**given, **options}) as session:
        session.steps, session.outcome = steps, outcome
    if outcome is None:
        stored = json.loads((run / "environment.json").read_text(encoding="utf-8"))
        del stored["checksum"]
        stored["sessions"][-1] |= {"ended": None, "steps": None}
        (run / "environment.json").write_text(json.dumps(stored), encoding="utf-8")
    return run


def section(run, heading, **options):
    """Return a section of the report as Markdown; the page must have it, too."""
    document = run_report(read_facts(run), **options)
    assert heading in read(html_page(document)).texts("h2")
    text = markdown(document).split(f"## {heading}\n", 1)[1]
    return text.split("\n## ", 1)[0]


@pytest.fixture(autouse=True)
def compare(monkeypatch):
    """Stands for `references`, which takes seconds; it counts its calls."""
    compare = mock.Mock(side_effect=lambda stream, *, train, whole: {"unigram_bits": len(train) / 1000})
    monkeypatch.setattr(run_report_module, "references", compare)
    return compare


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "a", P_VAL, evals=EVALS)


def test_an_old_run_says_what_is_not_recorded(run):
    for heading in ("Data", "Speed and hardware", "Reproduce", "Environment"):
        assert "not recorded" in section(run, heading), heading
    assert "Stopped: 3 of 10 steps" in section(run, "Result")
    best = 0.25 * 2.0 + 0.75 * 1.0
    assert f"{best:.4f} nats per byte after 3 steps, {best / math.log(2):.3f} bits per byte" in section(run, "Result")


@pytest.mark.parametrize(
    ("outcome", "reason", "state"),
    [
        (None, "", "Killed"),
        ("stopped", "SIGTERM", "Stopped by SIGTERM"),
        ("diverged", "the loss became nan", "Diverged"),
        ("failed", "no space", "Failed"),
    ],
)
def test_how_a_run_ended(run, outcome, reason, state):
    record(run, outcome)
    stored = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    stored.pop("checksum", None)
    stored["sessions"][-1]["reason"] = reason
    (run / "environment.json").write_text(json.dumps(stored), encoding="utf-8")
    text = section(run, "Result")
    assert f"{state}: 3 of 10 steps" in text
    assert reason.lower() in text.lower()
    assert (outcome or "killed") in section(run, "Reproduce")


def test_a_run_that_is_training(run):
    record(run, None)
    record(run, None)
    with files.lock(run / "run.lock"):
        assert "Training: 3 of 10 steps" in section(run, "Result")
        assert [row[2] for row in rows_of(section(run, "Reproduce"))[2:]] == ["killed", "running"]


def test_a_run_without_steps(tmp_path):
    run = make_run(tmp_path / "a", steps=0)
    for heading in ("Result", "Curves", "Loss per source", "Samples over time", "Memorization"):
        assert "yet" in section(run, heading) or "Not measured" in section(run, heading), heading


def test_a_damaged_run_is_refused(run):
    (run / "config.yaml").write_text("[", encoding="utf-8")
    with pytest.raises(ValueError, match="not valid YAML"):
        read_facts(run)


def test_data_and_skipped_files(run):
    record(run)
    entries = [("a/", "hidden", 3), ("b.pdf", "not a note (.pdf)", 1), ("secret-name.doc", "not a note (.doc)", 1)]
    skipped = [dict(zip(("path", "reason", "files"), entry, strict=True)) for entry in entries]
    files.write_json(run / "skipped.json", {"roam": {"notes": 12, "summary": "", "skipped": skipped}})
    text = section(run, "Data")
    assert rows_of(text)[2] == ["roam", "100.0%", "1.23kB", "56B", "7", "CC0", "notes"]
    assert "12 files read; skipped 3 hidden, 2 not a note" in text
    assert "secret-name" not in text
    for damaged in ("{", "[]", '{"roam": 3}'):
        (run / "skipped.json").write_text(damaged, encoding="utf-8")
        assert "cannot be read" in section(run, "Data")


def test_notes_that_were_removed_but_trained_on(run):
    kept = {"secret-name.md": "deleted", "b.md": "deleted", "c.md": "not a note (.txt)"}
    write_checked_json(run / "notes.json", {"roam": {"kept": kept}})
    text = section(run, "Data")
    assert "--allow-data-change): 2 deleted, 1 not a note." in text and "secret-name" not in text
    write_checked_json(run / "notes.json", {"roam": {"files": {"a.md": "0"}}})
    assert "--allow-data-change" not in section(run, "Data")
    (run / "notes.json").write_text("{", encoding="utf-8")
    assert f"{run / 'notes.json'} is damaged" in section(run, "Data")


def test_losses_beside_what_needs_no_model(tmp_path, compare):
    """The references are those of the held-out text; here xz alone is computed from the stream itself."""
    from niels_gpt.config.yaml_file import load_config
    from niels_gpt.streams import load_streams
    from niels_gpt.training.tasks.byte_task import stream_config

    cache = f"data.cache_dir={tmp_path / 'cache'}"
    roam = ["train.p_train={roam: 1.0}", "train.p_val={roam: 1.0}", "data.roam=embedded", "model.T=64", cache]
    run = make_run(tmp_path / "a", *roam, evals=[(2, {"val_roam": 2.0})])
    compare.side_effect = references
    [streams] = load_streams(stream_config(load_config(run / "config.yaml")), T=64).values()
    data = streams["val"].data
    _, _, row = rows_of(section(run, "Loss per source"))
    packed = 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)
    counts = np.bincount(np.frombuffer(streams["train"].data, np.uint8), minlength=256) + 1
    unigram = -np.mean(np.log2(counts / counts.sum())[np.frombuffer(data, np.uint8)])
    assert row[:4] == ["val_roam", f"{len(data):,}", "2.000", f"{2.0 / math.log(2):.3f}"]
    assert row[-2:] == [f"{unigram:.3f}", "8.000"]
    alone = row[4 + len(row[4:-2]) // 2]  # the primed ones come first
    assert float(alone) == pytest.approx(packed, abs=0.005) and float(row[4]) < float(alone)


def test_what_needs_no_model_is_stored_with_the_run(tmp_path, compare):
    notes = tmp_path / "notes"
    notes.mkdir()
    for i in range(9):
        (notes / f"{i}.md").write_text(f"note {i} is about the number {i * i}. " * 9, encoding="utf-8")
    roam = ["train.p_train={roam: 1.0}", "train.p_val={roam: 1.0}", f"data.roam={notes}", "model.T=16"]
    run = make_run(tmp_path / "a", *roam, f"data.cache_dir={tmp_path / 'cache'}", evals=[(2, {"val_roam": 2.0})])
    first = section(run, "Loss per source")
    assert section(run, "Loss per source") == first and compare.call_count == 1
    (run / "references.json").write_text("{", encoding="utf-8")
    assert section(run, "Loss per source") == first and compare.call_count == 2
    for path in notes.iterdir():
        path.write_text(path.read_text(encoding="utf-8") + "more", encoding="utf-8")
    assert section(run, "Loss per source") != first and compare.call_count == 3


def test_losses_without_the_data(tmp_path):
    missing = ["train.p_train={roam: 1.0}", "train.p_val={roam: 1.0}", f"data.roam={tmp_path / 'gone'}"]
    run = make_run(tmp_path / "a", *missing, evals=[(2, {"val_roam": 2.0})])
    text = section(run, "Loss per source")
    assert rows_of(text)[2] == ["val_roam", "", "2.000", f"{2.0 / math.log(2):.3f}", "8.000"]
    assert "compressors and unigram are missing" in text and "gone" in text


def test_losses_of_a_chat_model_are_in_nats_only(tmp_path):
    run = make_run(tmp_path / "a", "task=sft", "model.V=512", evals=[(2, {"val_sft": 0.5, "val_dialogues": 0.25})])
    head, _, *rows = rows_of(section(run, "Loss per source"))
    assert (head, rows) == (["Held out", "nats"], [["val_sft", "0.500"], ["val_dialogues", "0.250"]])


def test_exact_scores_are_preferred(run):
    score = {"bytes": 1000, "tokens": 1000, "nats_per_token": 1.5, "bits_per_byte": 2.25, "perplexity": 4.0}
    scores = {
        "val_roam": {
            **score,
            "baselines": {"xz": {"alone": 3.5, "primed": 3.0}},
            "unigram_bits": 4.5,
            "uniform_bits": 8.0,
        }
    }
    files.write_json(run / "eval.json", {"step": 3, "scores": scores})
    row = rows_of(section(run, "Loss per source"))[2]
    assert row == ["val_roam", "1,000", "1.500", "2.250", "3.000", "3.500", "4.500", "8.000"]


def test_samples_are_text_and_few(run):
    (run / "samples").mkdir()
    for step in range(1, 31):  # the first sample is just not cut, the last one just is
        size = {1: 1500, 30: 1501}.get(step, 5000) - len("prompt <b>? ")
        (run / "samples" / f"step_{step:08d}.txt").write_bytes(b"prompt <b>\xff " + b"x" * size)
    document = run_report(read_facts(run))
    page = read(html_page(document))
    assert len([text for text in page.texts("details") if text.startswith("After")]) == 12
    assert all("prompt <b>" in text for text in page.texts("details")[:12])
    text = section(run, "Samples over time")
    assert "After 1 step:" in text and "After 30 steps:" in text and "12 of 30 samples" in text
    assert (text.count("x" * 1488), text.count("x" * 1488 + "…"), "x" * 1489 in text) == (12, 11, False)


def test_memorization_in_the_run_and_elsewhere(run, tmp_path):
    report = make_report()
    report["checkpoint"] = str(run / "checkpoints/best.pt")
    audit = {"verdict": "NOT SAFE", "threshold": 0.001, "step": 3, "windows": 40, "windows_over": 2, "checkpoint": ""}
    audit |= {"notes_exposed": 1, "notes_audited": 5, "interrupted": False}
    audit["checkpoint"] = str(run / "checkpoints/best.pt")
    assert "Not measured" in section(run, "Memorization")
    (run / "memorization").mkdir()
    files.write_json(run / "memorization/report.json", report)
    assert "word for word" in section(run, "Memorization")
    (tmp_path / "audit").mkdir()
    files.write_json(tmp_path / "audit/audit.json", audit)
    text = section(run, "Memorization", memorization=[tmp_path / "audit"])
    assert "NOT SAFE" in text and "2 passages of 1 document" in text
    for passage in report["passages"]:
        assert passage["suffix"] not in text
    audit["checkpoint"] = "/else/where/checkpoints/best.pt"
    files.write_json(tmp_path / "audit/audit.json", audit)
    assert "NOT SAFE" not in section(run, "Memorization", memorization=[tmp_path / "audit"])
    (run / "memorization/report.json").write_text("{}", encoding="utf-8")
    assert "Not measured" in section(run, "Memorization")


def test_environment_and_commands(run, monkeypatch):
    monkeypatch.setattr("niels_gpt.system.program._arguments", ("train", "--steps", "5"))
    record(run)
    record(run, step=3, steps=5, machine={**MACHINE, "torch": "2.10.0"})
    assert "niels-gpt train --steps 5" in section(run, "Reproduce")
    assert "torch: 2.9.0, then 2.10.0" in section(run, "Environment")
    assert "Abacus 1" in section(run, "Speed and hardware") and "3 of 4 cores" in section(run, "Speed and hardware")


def test_the_command_to_reproduce(run):
    facts = read_facts(record(run))
    again = run.with_name("a-again")
    config = f"--config {run}/config.yaml --run-dir {again}"
    assert reproduce_command(facts) == f"niels-gpt train {config} --device cpu --threads 3"
    session = dataclasses.replace(facts.environment.sessions[0], processes=4, machine={"device": "cuda"})
    facts.environment.sessions.append(session)
    ranks = "torchrun --nproc-per-node 4 -m niels_gpt"
    assert reproduce_command(facts) == f"{ranks} train {config} --device cuda"


def test_speed_leaves_the_first_steps_of_each_session_out(run):
    facts = read_facts(run)
    rates = [1.0] * 4 + [100.0] * 6 + [1.0] * 4 + [100.0] * 6
    lines = [{"step": i, "loss": 1.0, "tokens_per_s": rate} for i, rate in enumerate(rates)]
    sessions = [Session(step, "", None, "", 1, {}) for step in (0, 10)]
    environment = dataclasses.replace(read_facts(record(run)).environment, sessions=sessions)
    vars(facts).update(lines=lines, environment=environment)  # fields that are kept once they are read
    assert speed(facts) == 100.0
    vars(facts).update(lines=[])
    assert speed(facts) is None


def test_config_and_defaults(run):
    rows = rows_of(section(run, "Config"))
    assert ["train.total_steps", "10", "2000"] in rows
    assert "sample_prompt:" in section(run, "Config")


def test_a_pipeline_has_both_phases(tmp_path):
    folder = make_pipeline(tmp_path / "chat")
    document = pipeline_report(folder, [read_facts(folder / phase) for phase in ("pretrain", "sft")])
    page = read(html_page(document))
    assert page.texts("h2") == ["pretrain", "sft"]
    assert page.texts("h3").count("Config") == 2


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(4, 50))
def test_thinned_keeps_the_extremes(values, most):
    x, y = thinned(range(len(values)), values, most)
    assert len(x) <= max(most, 4)
    assert (min(y), max(y)) == (min(values), max(values))
    assert x == sorted(x) and all(values[i] == value for i, value in zip(x, y, strict=True))


def test_thinned_skips_missing_values():
    values = [math.nan if i % 3 else float(i) for i in range(100)]
    x, y = thinned(range(100), values, 10)
    assert len(x) == 10 and (min(y), max(y)) == (0.0, 99.0)
    assert all(math.isnan(value) for value in thinned(range(100), [math.nan] * 100, 10)[1])
