"""The audit of notes: verdicts, controls, and what is rejected."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from unittest import mock

import numpy as np
import pytest
import torch

from niels_gpt.evaluation.exact import Score
from niels_gpt.memorization import audit as audit_module
from niels_gpt.memorization import extraction
from niels_gpt.memorization.audit import (
    NOT_JUDGED,
    NOT_SAFE,
    SAFE,
    _sample,
    adapted_stride,
    audit_notes,
    audit_report,
    check_threshold,
    judge,
)
from niels_gpt.memorization.audit_input import CHAT, AuditText
from niels_gpt.memorization.measure import Document, ExtractionSettings, Measurement
from niels_gpt.memorization.membership import HELD_OUT, TRAINED, UNKNOWN
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import save_checkpoint
from niels_gpt.runs.loading import load_run
from tests.cli import reciting
from tests.cli.reciting import PROMPT, WINDOW, naive_p, split, write_notes

SETTINGS = ExtractionSettings(WINDOW, PROMPT, stride=20, greedy=0)
NEW = "Something that is new to the model, and long enough for a window. " * 2

pytestmark = pytest.mark.usefixtures("workdir")


def audit(loaded, notes, **options):
    return audit_notes(loaded, notes, SETTINGS, **{"threshold": 0.001, **options})


def untrained(folder, **config):
    """Return an untrained model that is in no run."""
    torch.manual_seed(0)
    model = GPT({"V": 256, "T": 64, "C": 16, "L": 1, "H": 2, "dropout": 0.0, **config})
    save_checkpoint(folder / "untrained.pt", model, None, 7, model.config)
    return load_run(None, folder / "untrained.pt", "cpu")


# --- the verdict -------------------------------------------------------------------------------------


def test_a_model_that_recites_is_not_safe(place, loaded, trained):
    verdict, measured, _ = audit(loaded, place / "notes", passages=6)
    assert not verdict.safe
    assert (verdict.notes_audited, verdict.notes_exposed, verdict.controls) == (8, 2, 6)
    assert (verdict.unit, verdict.step, verdict.too_short) == ("byte", reciting.STEPS[-1], [])
    assert verdict.statuses == {TRAINED: 2, HELD_OUT: 6}
    assert [d["max_p"] for d in verdict.documents] == sorted((d["max_p"] for d in verdict.documents), reverse=True)
    for d in verdict.documents:
        assert d["status"] == (TRAINED if d["name"] in trained else HELD_OUT)
        assert d["max_p"] > 0.5 if d["name"] in trained else d["max_p"] < 1e-6
    assert 0 < verdict.windows_over <= sum(d["windows"] for d in verdict.documents if d["name"] in trained)
    assert len(verdict.passages) == 6
    for p in verdict.passages:
        window = (place / "notes" / p["document"]).read_bytes()[p["start"] : p["start"] + WINDOW]
        assert p["prompt"] + p["suffix"] == window.decode("utf-8", errors="replace")
        assert p["p"] == pytest.approx(naive_p(place / "run/checkpoints/best.pt", list(window), PROMPT), rel=1e-3)
    report = audit_report(loaded, measured, passages=25)
    assert len(report["documents"]) == 8 and "best.pt" in report["title"] and report["step"] == verdict.step
    assert 20 < len(report["passages"]) <= 25
    assert len(audit_report(loaded, measured, passages=1)["passages"]) == 20


def test_an_untrained_model_is_safe(place, workdir):
    verdict, _, _ = audit(untrained(workdir), place / "notes")
    assert verdict.safe
    assert (verdict.notes_audited, verdict.notes_exposed, verdict.windows_over, verdict.controls) == (8, 0, 0, 0)
    assert verdict.statuses == {UNKNOWN: 8} and verdict.control_max_log_p is None
    assert "untrained.pt" in verdict.unknown_because
    assert all(d["max_p"] < 1e-30 for d in verdict.documents)  # 24 bytes by chance


def measurement(name, log_p, *, control=False, source=UNKNOWN):
    n = len(log_p)
    return Measurement(
        document=Document(name, np.arange(60), control=control, source=source),
        settings=SETTINGS,
        bytes=60,
        starts=np.arange(n),
        window=WINDOW,
        prompt=PROMPT,
        log_p=np.array(log_p),
        score=Score(59, 1.0),
        greedy_prompt=0,
        greedy_share=np.full(n, np.nan),
        greedy_run=np.zeros(n, dtype=int),
        longest=(0, 0),
    )


def test_verdict_by_hand(loaded):
    """A window at the threshold counts; a control folder is not judged, a held-out note is."""
    measured = [
        measurement("a", [math.log(0.25), -9.0, math.log(0.25) + 1e-9]),
        measurement("b", [math.log(0.25) - 1e-9]),
        measurement("c", [-3.0], control=True, source=HELD_OUT),
        measurement("d", [-0.1, -0.2], control=True, source="control"),
    ]
    options = {"passages": 3, "notes": "n", "unknown_because": "u", "too_short": ["s"]}
    verdict = judge(measured, loaded, threshold=0.25, **options)
    assert not verdict.safe
    assert (verdict.notes_audited, verdict.notes_exposed) == (3, 1)
    assert (verdict.windows, verdict.windows_over) == (5, 2)
    assert (verdict.controls, verdict.control_max_log_p) == (2, -0.1)
    assert [(d["name"], d["over"]) for d in verdict.documents] == [("d", 2), ("a", 2), ("b", 0), ("c", 0)]
    assert {p["document"] for p in verdict.passages} <= {"a", "b", "c"}
    assert judge(measured[1:], loaded, threshold=0.25, **options).safe
    assert not judge(measured[2:], loaded, threshold=0.04, **options).safe


@pytest.mark.parametrize("threshold", [0, -0.5, 1.0001, math.nan])
def test_invalid_thresholds(threshold):
    with pytest.raises(ValueError, match=f"--threshold.*{threshold}"):
        check_threshold(threshold)
    check_threshold(1)
    check_threshold(1e-300)


def test_learned_positions_are_audited_at_every_offset(workdir):
    """The largest P(z) over all offsets counts."""
    loaded = untrained(workdir, positions="learned", T=32)
    (workdir / "notes").mkdir()
    text = b"a note of a few words, longer than a window"
    (workdir / "notes/a.md").write_bytes(text)
    settings = ExtractionSettings(window=30, prompt=20, stride=7, greedy=0)
    verdict, _, _ = audit_notes(loaded, workdir / "notes", settings, threshold=0.5)
    best = -math.inf
    for start in {*range(0, len(text) - 29, 7), len(text) - 30}:
        ids = torch.tensor([list(text[start : start + 30])])
        for offset in range(32 - 29 + 1):
            positions = torch.arange(offset, offset + 29)[None]
            with torch.no_grad():
                logs = loaded.model(ids[:, :-1], positions=positions)[0].double().log_softmax(-1)
            best = max(best, sum(logs[i - 1, ids[0, i]].item() for i in range(20, 30)))
    assert verdict.documents[0]["max_log_p"] == pytest.approx(best, abs=1e-3)


# --- controls ----------------------------------------------------------------------------------------


def test_control_folder(place, workdir, loaded, trained):
    write_notes(workdir / "others", first=1)
    shutil.copy(place / "notes" / trained[0], workdir / "others/known.md")
    verdict, _, skipped = audit(loaded, place / "notes", control=workdir / "others")
    assert skipped == ["known.md"]
    controls = [d for d in verdict.documents if d["status"] == "control"]
    assert [d["name"][:9] for d in controls] == ["control: "] * 8
    assert (verdict.notes_audited, verdict.notes_exposed, verdict.controls) == (8, 2, 6 + 8)
    for path in (workdir / "others").iterdir():
        if path.name != "known.md":
            path.unlink()
    with pytest.raises(ValueError, match=r"--control .*others.*trained on"):
        audit(loaded, place / "notes", control=workdir / "others")


def test_a_recited_control_does_not_change_the_verdict(place, workdir, loaded, trained):
    for name, data in (
        ("control", (place / "notes" / trained[0]).read_bytes() + b" And more."),  # another text: not trained on
        ("mine", NEW.encode()),
    ):
        (workdir / name).mkdir()
        (workdir / name / "a.md").write_bytes(data)
    verdict, _, _ = audit(loaded, workdir / "mine", control=workdir / "control")
    assert verdict.safe and verdict.control_max_log_p > math.log(0.001)


def test_held_out_notes_alone_are_judged(place, workdir, loaded):
    (workdir / "some").mkdir()
    for path in split(place / "notes")[1]:
        shutil.copy(path, workdir / "some")
    verdict, _, _ = audit(loaded, workdir / "some")
    assert verdict.safe and verdict.notes_audited == 2


def test_changes_to_the_folder_do_not_make_the_model_safe(workdir, trained):
    """Today the run would select other notes, but it still recites those of its training."""
    copy = reciting.copy_to(workdir / "copy")
    for name in trained:  # the order of names decides which notes are held out
        (copy / "notes" / name).rename(copy / "notes" / f"a {name}")
    verdict, _, _ = audit(load_run(copy / "run", None, "cpu"), copy / "notes")
    recited = [d for d in verdict.documents if d["max_p"] > 0.5]
    assert not verdict.safe and len(recited) == 2
    assert HELD_OUT not in {d["status"] for d in recited}


# --- three verdicts ----------------------------------------------------------------------------------


def test_a_recited_note_is_found_under_any_suffix(place, workdir, loaded, trained):
    """The trained note as .txt and as .MD, beside a stray .md."""
    mine = workdir / "mine"
    mine.mkdir()
    (mine / "stray.md").write_text(NEW, encoding="utf-8")
    assert audit(loaded, mine).verdict.verdict == SAFE
    for name in ("recited.txt", "recited.MD", "recited.org"):
        shutil.copy(place / "notes" / trained[0], mine / name)
        verdict = audit(loaded, mine, exact=False).verdict
        assert (verdict.verdict, verdict.safe, verdict.notes_audited) == (NOT_SAFE, False, 2)
        assert verdict.documents[0]["name"] == name and verdict.documents[0]["status"] == TRAINED
        (mine / name).unlink()
    known = (place / "notes" / trained[0]).read_text("utf-8")
    (mine / "rows.jsonl").write_text(json.dumps({"text": known}), encoding="utf-8")
    assert audit(loaded, mine).verdict.documents[0]["name"] == "rows.jsonl, row 0"
    assert audit(loaded, mine).verdict.verdict == NOT_SAFE


def test_text_that_was_not_read_is_not_judged(workdir, loaded):
    mine = workdir / "mine"
    mine.mkdir()
    (mine / "new.md").write_text(NEW, encoding="utf-8")
    (mine / "picture.png").write_bytes(bytes(range(256)))
    assert audit(loaded, mine).verdict.verdict == SAFE
    (mine / "latin.md").write_bytes(b"caf\xe9 " * 20)
    verdict = audit(loaded, mine).verdict
    assert (verdict.verdict, verdict.safe) == (NOT_JUDGED, False)
    [line] = verdict.because
    assert "latin.md" in line and "--encoding-errors replace" in line
    assert audit(loaded, mine, encoding_errors="replace").verdict.verdict == SAFE
    assert {entry["name"]: entry["missing"] for entry in verdict.skipped} == {"latin.md": True, "picture.png": False}
    assert verdict.read == {"note": 1} and verdict.bytes_read == len(NEW)


def test_the_data_of_the_run_is_the_default(loaded, trained):
    verdict = audit(loaded, None).verdict
    assert verdict.verdict == NOT_SAFE and verdict.notes == ""
    assert verdict.statuses == {TRAINED: 2, HELD_OUT: 6}
    assert {d["name"] for d in verdict.documents if d["status"] == TRAINED} == {f"roam: {name}" for name in trained}


def test_early_exit_changes_no_verdict_and_no_count(place, loaded):
    """P(z) of at least the floor is the same; the rest is bounded from above."""
    full, quick = (audit(loaded, place / "notes", exact=exact, passages=50).verdict for exact in (True, False))
    assert (full.floor, quick.floor) == (None, pytest.approx(1e-6))
    for field in ("verdict", "notes_exposed", "windows", "windows_over", "statuses"):
        assert getattr(full, field) == getattr(quick, field)
    exact = {d["name"]: d for d in full.documents}
    for d in quick.documents:
        if d["max_p"] >= quick.floor:
            assert d["max_log_p"] == pytest.approx(exact[d["name"]]["max_log_p"], abs=1e-4)
        else:
            assert quick.floor > d["max_p"] >= exact[d["name"]]["max_p"] * 0.999
    over = [p for p in full.passages if p["p"] >= quick.floor]
    assert [(p["document"], p["start"]) for p in quick.passages] == [(p["document"], p["start"]) for p in over]


def test_stride_adapts_to_the_size():
    settings = ExtractionSettings(window=100, prompt=50, greedy=0)
    sizes = {0: 5, 100_000: 5, 120_000: 5, 120_001: 6, 234_000: 10, 500_000: 21, 10**7: 25}
    for tokens, stride in sizes.items():
        assert adapted_stride([AuditText("a", "note", np.zeros(tokens, dtype=np.int64))], settings) == stride


def test_texts_within_a_window_do_not_change_the_stride():
    settings = ExtractionSettings(window=100, prompt=50, greedy=0)
    short = [AuditText(str(i), CHAT, np.zeros(100, dtype=np.int64)) for i in range(5_000)]
    long = AuditText("a", "note", np.zeros(130_000, dtype=np.int64))
    assert adapted_stride([*short, long], settings) == 6
    assert adapted_stride([*short, AuditText("b", CHAT, np.zeros(101, dtype=np.int64)), long], settings) == 6
    assert adapted_stride([long] * 2, settings) == 11


def test_a_sample_has_no_more_windows_than_asked_for():
    """At the largest stride, half a suffix; one text of each kind at least."""
    settings = ExtractionSettings(window=100, prompt=50, greedy=0)
    texts = [
        AuditText(f"{kind} {i}", kind, np.zeros(1000, dtype=np.int64)) for kind in ("note", CHAT) for i in range(40)
    ]
    for windows, kept in {24_000: 50, 2_000: 50, 1_999: 24, 500: 12, 1: 2}.items():
        chosen = _sample(texts, 25, windows * 25)
        assert len(chosen) == kept and {text.kind for text in chosen} == {"note", CHAT}
    assert adapted_stride(texts, settings, 16_000) == 5 and adapted_stride(texts, settings, 8_000) == 10


# --- short documents ---------------------------------------------------------------------------------


def test_short_documents_are_judged_as_a_whole(workdir):
    """A password of eight bytes: P of all of it after the separator of documents, by a naive product."""
    loaded = untrained(workdir)
    (workdir / "notes").mkdir()
    (workdir / "notes/password.md").write_text("hunter22", encoding="utf-8")
    (workdir / "notes/tiny.md").write_text("ok\n", encoding="utf-8")
    verdict = audit(loaded, workdir / "notes").verdict
    assert verdict.verdict == SAFE and verdict.too_short == ["tiny.md"] and verdict.notes_audited == 1
    p = naive_p(workdir / "untrained.pt", list(b"\n\nhunter22"), 2)
    assert verdict.documents[0]["max_p"] == pytest.approx(p, rel=1e-3)
    assert audit(loaded, workdir / "notes", threshold=p * 0.99).verdict.verdict == NOT_SAFE
    (workdir / "notes/password.md").unlink()
    with pytest.raises(ValueError, match="no text of at least 4 bytes"):
        audit(loaded, workdir / "notes")


@pytest.mark.parametrize("folder", ["empty", "none"])
def test_nothing_to_audit(workdir, loaded, folder):
    (workdir / "empty").mkdir()
    with pytest.raises((ValueError, OSError), match=folder):
        audit(loaded, workdir / folder)


# --- Ctrl-C ------------------------------------------------------------------------------------------


def test_ctrl_c_judges_what_was_measured(place, loaded, monkeypatch):
    monkeypatch.setattr(extraction, "CHUNK", 8)

    def bar(title):
        @contextlib.contextmanager
        def opened():
            yield stop if title == "auditing" else None

        return opened()

    def stop(done, total):
        if done >= 16:
            raise KeyboardInterrupt

    verdict, measured, _ = audit(loaded, place / "notes", progress=bar, threshold=1.0)
    assert verdict.interrupted and verdict.verdict == NOT_JUDGED
    assert verdict.windows == 16 < verdict.windows_planned and sum(len(m.log_p) for m in measured) == 16
    assert "16 of" in verdict.because[0]
    with pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(audit_module, "scan_rows", mock.Mock(side_effect=KeyboardInterrupt))
        audit(loaded, place / "notes")
