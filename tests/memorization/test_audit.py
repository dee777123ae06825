"""The audit of notes: verdicts, controls, and what is rejected."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
from unittest import mock

import numpy as np
import pytest
import torch

from niels_gpt.data.embedded import public_texts
from niels_gpt.memorization import audit as audit_module
from niels_gpt.memorization import extraction
from niels_gpt.memorization.audit import (
    CONTROL,
    NOT_JUDGED,
    NOT_SAFE,
    SAFE,
    AuditRequest,
    _plan,
    _sample,
    adapted_stride,
    audit_notes,
    audit_report,
    judge,
)
from niels_gpt.memorization.audit_input import CHAT, NOTE, AuditText
from niels_gpt.memorization.measure import Document, ExtractionSettings
from niels_gpt.memorization.membership import HELD_OUT, TRAINED, UNKNOWN
from niels_gpt.memorization.progress import no_count, no_progress
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import save_checkpoint
from niels_gpt.runs.loading import LoadedRun, load_run
from niels_gpt.tokenizer import load_tokenizer, private_pieces, train_tokenizer
from tests.cli import reciting
from tests.cli.reciting import PROMPT, WINDOW, naive_p, split, write_notes
from tests.memorization.models import BigramModel, measurement
from tests.tokenizer.test_private_pieces import NOTES, PHONE

SETTINGS = ExtractionSettings(WINDOW, PROMPT, stride=20, greedy=0)
NEW = "Something that is new to the model, and long enough for a window. " * 2

pytestmark = pytest.mark.usefixtures("workdir")


def audit(loaded, notes, **options):
    progress = options.pop("progress", no_progress)
    return audit_notes(loaded, AuditRequest(options.pop("settings", SETTINGS), notes, **options), progress=progress)


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
    assert verdict.verdict == NOT_JUDGED  # what it was trained on is not known
    assert (verdict.notes_audited, verdict.notes_exposed, verdict.windows_over, verdict.controls) == (8, 0, 0, 0)
    assert verdict.statuses == {UNKNOWN: 8} and verdict.control_max_log_p is None
    assert "untrained.pt" in verdict.unknown_because
    assert all(d["max_p"] < 1e-30 for d in verdict.documents)  # 24 bytes by chance


def measured_as(name, log_p, source=UNKNOWN):
    document = Document(name, np.arange(60), control=source in (HELD_OUT, CONTROL), source=source)
    return measurement(document.ids, list(range(len(log_p))), log_p, document=document, settings=SETTINGS)


def test_verdict_by_hand(loaded):
    """A window at the threshold counts; a control folder is not judged, a held-out note is."""
    measured = [
        measured_as("a", [math.log(0.25), -9.0, math.log(0.25) + 1e-9]),
        measured_as("b", [math.log(0.25) - 1e-9]),
        measured_as("c", [-3.0], HELD_OUT),
        measured_as("d", [-0.1, -0.2], CONTROL),
    ]
    request = AuditRequest(SETTINGS, threshold=0.25)
    options = {"unknown_because": "u", "too_short": ["s"]}
    verdict = judge(loaded, request, measured, **options)
    assert not verdict.safe
    assert (verdict.notes_audited, verdict.notes_exposed) == (3, 1)
    assert (verdict.windows, verdict.windows_over) == (5, 2)
    assert (verdict.controls, verdict.control_max_log_p) == (2, -0.1)
    assert [(d["name"], d["over"]) for d in verdict.documents] == [("d", 2), ("a", 2), ("b", 0), ("c", 0)]
    assert {p["document"] for p in verdict.passages} <= {"a", "b", "c"}
    assert judge(loaded, request, measured[1:], **options).safe
    assert not judge(loaded, dataclasses.replace(request, threshold=0.04), measured[2:], **options).safe


@pytest.mark.parametrize("threshold", [0, -0.5, 1.0001, math.nan])
def test_invalid_thresholds(threshold):
    with pytest.raises(ValueError, match=f"--threshold.*{threshold}"):
        AuditRequest(SETTINGS, threshold=threshold)
    for allowed in (1, 1e-300):
        AuditRequest(SETTINGS, threshold=allowed)


def test_learned_positions_are_audited_at_every_offset(workdir):
    """The largest P(z) over all offsets counts."""
    loaded = untrained(workdir, positions="learned", T=32)
    (workdir / "notes").mkdir()
    text = b"a note of a few words, longer than a window"
    (workdir / "notes/a.md").write_bytes(text)
    settings = ExtractionSettings(window=30, prompt=20, stride=7, greedy=0)
    verdict, _, _ = audit(loaded, workdir / "notes", settings=settings, threshold=0.5)
    best, after = -math.inf, b"\n\n" + text  # what precedes a document in training
    inner = [(start + 2, start + 22, start + 32) for start in {*range(0, len(text) - 29, 7), len(text) - 30}]
    for start, cut, end in [*inner, (0, 2, 12), (0, 9, 19), (0, 16, 26)]:
        ids = torch.tensor([list(after[start:end])])
        for offset in range(32 - (end - start) + 2):
            positions = torch.arange(offset, offset + end - start - 1)[None]
            with torch.no_grad():
                logs = loaded.model(ids[:, :-1], positions=positions)[0].double().log_softmax(-1)
            best = max(best, sum(logs[i - 1, ids[0, i]].item() for i in range(cut - start, end - start)))
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
    assert verdict.windows_over == 0 and verdict.control_max_log_p > math.log(0.001)


def test_held_out_notes_alone_are_judged(place, workdir, loaded):
    (workdir / "some").mkdir()
    for path in split(place / "notes")[1]:
        shutil.copy(path, workdir / "some")
    verdict, _, _ = audit(loaded, workdir / "some")
    assert verdict.windows_over == 0 and verdict.notes_audited == 2
    assert verdict.verdict == NOT_JUDGED and "6 documents of 8 are not in" in verdict.because[0]


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
    """The trained note in files of four kinds, beside a stray .md."""
    mine = workdir / "mine"
    mine.mkdir()
    (mine / "stray.md").write_text(NEW, encoding="utf-8")
    assert audit(loaded, mine).verdict.verdict == NOT_JUDGED
    names = ["recited.txt", "recited.MD", "recited.org", "rows.jsonl, row 0"]
    for name in names[:3]:
        shutil.copy(place / "notes" / trained[0], mine / name)
    known = (place / "notes" / trained[0]).read_text("utf-8")
    (mine / "rows.jsonl").write_text(json.dumps({"text": known}), encoding="utf-8")
    verdict = audit(loaded, mine, exact=False).verdict
    assert (verdict.verdict, verdict.safe, verdict.notes_audited) == (NOT_SAFE, False, 5)
    exposed = {d["name"]: d["status"] for d in verdict.documents if d["over"]}
    assert exposed == dict.fromkeys(names, TRAINED)


def test_text_that_was_not_read_is_not_judged(workdir, loaded):
    mine = workdir / "mine"
    mine.mkdir()
    (mine / "new.md").write_text(NEW, encoding="utf-8")
    (mine / "picture.png").write_bytes(bytes(range(256)))
    [own] = audit(loaded, mine).verdict.because
    assert "8 documents of 8 are not in" in own and "without --notes" in own
    (mine / "latin.md").write_bytes(b"caf\xe9 " * 20)
    verdict = audit(loaded, mine).verdict
    assert (verdict.verdict, verdict.safe) == (NOT_JUDGED, False)
    [line, _] = verdict.because
    assert "latin.md" in line and "--encoding-errors replace" in line
    assert audit(loaded, mine, encoding_errors="replace").verdict.because == [own]
    missing = {"latin.md": True, "picture.png": False, "the run's own data": True}
    assert {entry["name"]: entry["missing"] for entry in verdict.skipped} == missing
    assert verdict.read == {"note": 1} and verdict.bytes_read == len(NEW)


def test_a_folder_without_a_note_of_the_run_is_not_judged(place, workdir, trained):
    """The weights of a run whose notes cannot be recited; one of them was deleted since."""
    copy = reciting.copy_to(workdir / "copy")
    shutil.rmtree(copy / "whole", ignore_errors=True)
    shutil.copytree(copy / "notes", copy / "whole")
    run = load_run(copy / "run", None, "cpu")
    for weight in run.model.parameters():
        torch.nn.init.zeros_(weight)
    assert audit(run, copy / "whole").verdict.verdict == SAFE
    (copy / "whole" / trained[0]).unlink()
    verdict = audit(run, copy / "whole").verdict
    assert verdict.verdict == NOT_JUDGED and trained[0] in verdict.because[0]


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


# --- the edges of texts ---

KNOWN = b"abcdefghijklmnopqrstuvwxyz0123456789-+"
"""What the model knows; the first byte is as probable as any other."""
EDGES = ExtractionSettings(window=100, prompt=50, greedy=0)


def filler(number, seed):
    """Text that the model does not know."""
    return bytes(np.random.default_rng(seed).choice(list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ ,"), number).tolist())


def edge_audit(folder, texts, *, text=KNOWN, threshold=0.001, **options):
    """Audit notes with a model that continues every byte of `text` but the last."""
    folder.mkdir()
    for i, data in enumerate(texts):
        (folder / f"{i}.md").write_bytes(data)
    loaded = LoadedRun(BigramModel(text, **options), 7, folder.parent / "model.pt", None)
    return audit(loaded, folder, settings=EDGES, threshold=threshold, exact=False).verdict


@pytest.mark.parametrize("length", [17, 24, 38])
@pytest.mark.parametrize("positions", ["rope", "learned"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(0, 190), (190, 0), (0, 20), (20, 0), (0, 0), (190, 9), (5, 190)],
    ids=["header", "signature", "short header", "short signature", "whole", "line after it", "line before it"],
)
def test_a_header_or_signature_beside_unknown_text_is_found(workdir, length, positions, before, after):
    """P is at least that of its bytes after the first one, by hand: 0.9 each; a part of it has more."""
    known = KNOWN[:length]
    texts = [filler(before, i) + known + filler(after, i + 9) for i in range(2)]
    verdict = edge_audit(workdir / "notes", texts, p=0.9, positions=positions, T=110)
    assert (verdict.verdict, verdict.notes_exposed) == (NOT_SAFE, 2)
    best = verdict.passages[0]
    assert best["suffix"].encode() in known and best["p"] == pytest.approx(0.9 ** len(best["suffix"]), rel=1e-3)
    assert (
        len(best["suffix"]) >= min(length, 16) // 2
        and (best["note"], best["line"]) == ("0.md", 1)
        and best["also_in"] == ["1.md"]
    )


def test_a_header_that_begins_with_the_text_counts_as_a_whole(workdir):
    """After the separator, also where its bytes are less probable than those of a suffix at the threshold."""
    header = b"\n" + KNOWN[:20]
    verdict = edge_audit(workdir / "notes", [KNOWN[:20] + filler(190, 0)], text=header, p=0.75)
    assert verdict.verdict == NOT_SAFE and verdict.documents[0]["max_p"] == pytest.approx(0.75**16, rel=1e-3)
    assert verdict.passages[0]["prompt"] == "\n\n"
    assert edge_audit(workdir / "rare", [KNOWN[:20] + filler(190, 0)], text=header, p=0.6).verdict == NOT_JUDGED


def test_unknown_text_and_lines_of_dashes_are_no_passages(workdir):
    texts = [filler(300, 1), filler(40, 2), KNOWN[:14] + filler(190, 3), b"-" * 60 + filler(190, 4)]
    loaded = edge_audit(workdir / "notes", texts, p=0.9)
    assert loaded.verdict == NOT_JUDGED and loaded.passages == []
    dashes = BigramModel(b"-=", p=0.9)
    dashes.table[45], dashes.table[45, 45] = math.log(0.1 / 255), math.log(0.9)
    run = LoadedRun(dashes, 7, workdir / "model.pt", None)
    assert audit(run, workdir / "notes", settings=EDGES).verdict.windows_over <= 1  # 50 dashes in a row


@pytest.mark.parametrize(
    ("length", "stride", "kind"), [(300, 5, NOTE), (300, 400, NOTE), (101, 5, CHAT), (60, 5, NOTE)]
)
@pytest.mark.parametrize(("window", "prompt"), [(100, 50), (60, 50), (90, 20)])
def test_every_token_is_in_a_suffix(workdir, length, stride, kind, window, prompt):
    """Also with a stride longer than a suffix, and with a suffix shorter than the prompt."""
    loaded = LoadedRun(BigramModel(KNOWN), 7, workdir / "model.pt", None)
    settings = ExtractionSettings(window, prompt, min(stride, window - prompt), greedy=0)
    data = filler(length, 0) if kind == NOTE else b"user: " + filler(length - 40, 0) + b"\nassistant: " + filler(22, 1)
    text = AuditText("a", kind, np.frombuffer(data, dtype=np.uint8).astype(np.int64))
    covered = np.zeros(len(data), dtype=bool)
    for start, cut, end in _plan(text, TRAINED, settings, loaded).spans.tolist():
        covered[cut:end] = True
        assert start < cut < end <= len(data) and end - start <= 129
    assert covered.all()


def test_a_stride_is_at_most_a_suffix(place, loaded):
    settings = ExtractionSettings(WINDOW, PROMPT, stride=400, greedy=0)
    verdict = audit(loaded, place / "notes", settings=settings).verdict
    assert verdict.stride == WINDOW - PROMPT and verdict.verdict == NOT_SAFE


# --- secrets and the vocabulary ----------------------------------------------------------------------


def test_each_secret_is_recited_or_not(workdir):
    """P of its own bytes after the text before it; the secret itself is not in the verdict."""
    known, other = "4111 1111 1111 1111", "5555 5555 5555 4444"
    password = "xk7fq2zw9"  # its bytes differ
    text = f"{'A B C. ' * 20}\n\nmy card is {known}, and {other}.\npassword: {password}\n{'D E F. ' * 20}\n"
    verdict = edge_audit(workdir / "notes", [text.encode()], text=b" " + password.encode(), p=0.9)
    found = {(s["path"], s["line"], s["kind"]): s for s in verdict.secrets}
    assert [key for key, secret in found.items() if secret["recited"]] == [("0.md", 4, "Password")]
    assert found["0.md", 4, "Password"]["p"] == pytest.approx(0.9 ** len(password), rel=1e-3)
    assert len(verdict.secrets) == 3 and not any(s["recited"] for s in verdict.secrets if s["line"] == 3)
    assert verdict.verdict == NOT_SAFE and verdict.windows_over == 0
    assert not any(word in json.dumps(verdict.secrets) for word in (known, other, password))


def test_a_vocabulary_with_private_pieces_is_not_safe(workdir):
    """In a note that nothing recites; without the notes of the run, nothing is known of the other pieces."""
    notes = workdir / "notes"
    notes.mkdir()
    (notes / "a.md").write_text(NOTES[0], encoding="utf-8")
    for i, text in enumerate(NOTES[1:]):
        (notes / f"{i}.md").write_text(text, encoding="utf-8")
    judged = {}
    for name, dropped in (("learned", None), ("dropped", lambda new: private_pieces(new, NOTES, public_texts()))):
        with pytest.warns(UserWarning, match="useful pieces"):
            path = train_tokenizer(NOTES, workdir / name, vocab_size=600, dropped=dropped)
        tokenizer = load_tokenizer(path)
        model = GPT({"V": tokenizer.vocab_size, "T": 128, "C": 16, "L": 1, "H": 2, "dropout": 0.0}).eval()
        run = LoadedRun(model, 7, workdir / "model.pt", None, tokenizer)
        judged[name] = audit(run, notes, settings=EDGES).verdict
        assert judged[name].windows_over == 0
    pieces = {piece["piece"]: piece["notes"] for piece in judged["learned"].private_pieces}
    assert judged["learned"].verdict == NOT_SAFE and set(pieces.values()) == {1}
    assert any(PHONE in piece or piece in PHONE for piece in pieces)
    assert judged["dropped"].verdict == NOT_JUDGED and judged["dropped"].private_pieces == []


# --- short documents ---------------------------------------------------------------------------------


def test_short_documents_are_judged_as_a_whole(workdir):
    """A password of eight bytes: P of all of it after the separator of documents, by a naive product."""
    loaded = untrained(workdir)
    (workdir / "notes").mkdir()
    (workdir / "notes/password.md").write_text("hunter22", encoding="utf-8")
    (workdir / "notes/tiny.md").write_text("ok\n", encoding="utf-8")
    verdict = audit(loaded, workdir / "notes").verdict
    assert verdict.windows_over == 0 and verdict.too_short == ["tiny.md"] and verdict.notes_audited == 1
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
            yield stop if title == "auditing" else no_count

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
