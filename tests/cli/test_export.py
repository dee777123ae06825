"""`niels-gpt export`: files, exit codes, refusals, and a disk that fills."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import resource
import shutil
import signal
import stat
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from niels_gpt.export import audit_gate, run_export
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import save_checkpoint
from niels_gpt.runs.loading import load_run
from tests.cli import call, error_of, reciting, snapshot
from tests.faults import killed_at

pytestmark = pytest.mark.usefixtures("elsewhere")
NOT_SAFE, NOT_JUDGED = 3, 4


@pytest.fixture(autouse=True)
def unchecked(monkeypatch, request):
    """Do not start transformers in each test; tests/export/test_self_check.py does."""
    monkeypatch.setattr(run_export, "check_folder_ids", lambda folder, tokenizer: None)


@pytest.fixture
def untrained(tmp_path):
    """A checkpoint that no text was trained on."""
    torch.manual_seed(0)
    model = GPT({"T": 32, "C": 32, "L": 1, "H": 2, "dropout": 0.0, "norm": "rmsnorm", "mlp": "swiglu"})
    save_checkpoint(tmp_path / "untrained.pt", model, None, 0, model.config)
    return tmp_path / "untrained.pt"


def test_a_run_on_tokens_becomes_a_folder_with_a_card(token_runs, tmp_path, capsys):
    run = token_runs / "runs/chat"
    assert call("export", "hf", run, "--out", "out", "--anyway") == 0
    text, errors = capsys.readouterr()
    assert "out: GPTNeoXForCausalLM" in text and "not audited" in errors
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "README.md",
        "SHA256SUMS",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    loaded = load_run(run, None, "cpu")
    peer, tokenizer = AutoModelForCausalLM.from_pretrained("out"), AutoTokenizer.from_pretrained("out")
    ids = tokenizer("Some words.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(peer(ids).logits, loaded.model(ids), atol=1e-4, rtol=0)
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert card.startswith("---\n") and "library_name: transformers" in card and "# out" in card
    assert "apply_chat_template" in card and "oasst1" in card and "Apache-2.0" in card
    assert "Best validation loss" in card and "niels-gpt train" not in card and "Not audited" in card
    assert str(token_runs) not in card


def test_gguf(token_runs, tmp_path, capsys):
    gguf = pytest.importorskip("gguf")
    assert call("export", "gguf", token_runs / "runs/chat", "--out", "new/m.gguf", "--type", "q8_0", "--anyway") == 0
    assert "m.gguf: gptneox" in capsys.readouterr().out
    fields = gguf.GGUFReader(tmp_path / "new/m.gguf").fields
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q8_0
    capsys.readouterr()
    assert call("export", "gguf", token_runs / "runs/chat", "--out", "m.gguf", "--type", "q2") == 1
    message = error_of(capsys)
    assert all(part in message for part in ("--type", "q4_0", "q2"))


def test_a_model_that_recites_is_refused(tmp_path, capsys):
    place = reciting.copy_to(tmp_path / "place")
    arguments = ["export", "hf", place / "run", "--out", "out"]
    assert call(*arguments) == NOT_JUDGED
    errors = capsys.readouterr().err
    assert errors.splitlines()[-1].startswith("error: ") and "roam" in errors and "--audit" in errors
    assert call(*arguments, "--audit") == NOT_SAFE
    text, errors = capsys.readouterr()
    assert "NOT SAFE TO PUBLISH" in text and "--anyway" in errors and not (tmp_path / "out").exists()
    assert call(*arguments) == NOT_SAFE  # the verdict is stored
    assert call("export", "gguf", place / "run", "--out", "m.gguf") == NOT_SAFE and not (tmp_path / "m.gguf").exists()
    capsys.readouterr()
    assert call(*arguments, "--anyway") == 0
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert "NOT SAFE: " in card and "of 2 documents" in card
    secret = json.loads((place / "run/export-audit/audit.json").read_text("utf-8"))["passages"][0]["suffix"]
    assert secret[:15] not in card


@pytest.fixture
def forgetful(tmp_path):
    """A folder with notes and a run that was trained on them for one step, and recites nothing."""
    place = tmp_path / "place"
    notes = reciting.write_notes(place / "notes")
    options = [*reciting.SPLICE, f"--roam={notes}", f"--set=data.cache_dir={place / 'streams'}", "--steps=1"]
    options.append("--set=train.warmup_steps=0")
    assert call("train", *options, "--run-dir", place / "run") == 0
    return place


def test_a_lenient_audit_does_not_clear_a_model(tmp_path, capsys):
    """Not even if it replaces one that says NOT SAFE."""
    place = reciting.copy_to(tmp_path / "place")
    audit = ["audit", place / "run", "--out", place / "run/audit"]
    assert call(*audit) == NOT_SAFE
    assert call(*audit, "--threshold", "0.9999") == 0
    capsys.readouterr()
    assert call("export", "hf", place / "run", "--out", "out") == NOT_JUDGED
    message = capsys.readouterr().err.splitlines()[-1]
    assert "0.9999 is above 0.001" in message and "niels-gpt audit" in message
    assert call("export", "hf", place / "run", "--out", "out", "--anyway") == 0
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert "Not audited" in card and "SAFE" not in card


@pytest.mark.parametrize(
    "audit", [["--notes", "place/notes"], [], ["--out", "elsewhere"], ["--out", "place/run/audit"]]
)
def test_an_audit_of_its_own_text_clears_a_model(forgetful, tmp_path, capsys, audit):
    assert call("export", "hf", forgetful / "run", "--out", "out") == NOT_JUDGED
    capsys.readouterr()
    assert call("audit", forgetful / "run", *audit) == 0
    assert "export will not" not in capsys.readouterr().out
    assert len([*(forgetful / "run").glob("*/audit.json")]) == 1
    assert call("export", "hf", forgetful / "run", "--out", "out") == 0
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert "SAFE: no passage" in card and "NOT SAFE" not in card


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--threshold", "0.5"], "0.5 is above 0.001"),
        (["--stride", "6"], "6 is above 5"),
        (["--window", "60"], "--window 60"),
        (["--prompt", "8"], "--prompt 8"),
        (["--notes", "other"], "note 0.md"),
    ],
)
def test_other_audits_say_that_they_do_not(forgetful, tmp_path, capsys, options, named):
    (tmp_path / "other").mkdir()
    for note in sorted((forgetful / "notes").iterdir())[1:]:  # all but one
        (tmp_path / "other" / note.name).write_bytes(note.read_bytes())
    capsys.readouterr()
    code = 4 if "other" in options else 0  # a part of what was trained on was not judged
    assert call("audit", forgetful / "run", *options, "--out", forgetful / "run/audit") == code
    [line] = [line for line in capsys.readouterr().out.splitlines() if "export will not accept" in line]
    assert named in line
    assert call("export", "hf", forgetful / "run", "--out", "out") == NOT_JUDGED
    assert named in error_of(capsys)


def test_an_audit_that_cannot_be_stored_warns(forgetful, capsys):
    (forgetful / "run/export-audit").write_text("a file in the place of the folder", encoding="utf-8")
    assert call("audit", forgetful / "run", "--json") == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["verdict"] == "SAFE"
    [line] = [line for line in told.err.splitlines() if line.startswith("warning: ")]
    assert str(forgetful / "run/export-audit") in line
    assert call("export", "hf", forgetful / "run", "--out", "out") == NOT_JUDGED


def test_an_import_of_an_uncleared_export_is_not_cleared_and_stays_private(tmp_path, capsys):
    place = reciting.copy_to(tmp_path / "place")
    assert call("export", "hf", place / "run", "--out", "out", "--anyway") == 0
    (tmp_path / "out").chmod(0o700)
    umask = os.umask(0o022)
    try:
        assert call("import", "hf", "out", "--run-dir", "again") == 0
    finally:
        os.umask(umask)
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (tmp_path / "again").rglob("*")} == {0}
    capsys.readouterr()
    assert call("export", "hf", "again", "--out", "laundered") == NOT_JUDGED
    assert "out" in error_of(capsys) and not (tmp_path / "laundered").exists()
    tune = ("--set=init_from=again", "--set=train.B=2", "--set=train.p_train={primer: 1.0}", "--device=cpu")
    primer = ("--primer=embedded", "--set=train.p_val={primer: 1.0}", "--set=output.sample_every=0")
    assert call("train", "--run-dir", "tuned", "--steps", "1", *tune, *primer) == 0
    assert audit_gate.check(load_run("tuned", None, "cpu")).private == ["out"]
    assert call("export", "hf", "tuned", "--out", "laundered") == NOT_JUDGED
    assert call("export", "hf", "again", "--out", "laundered", "--anyway") == 0
    assert json.loads((tmp_path / "laundered/config.json").read_text("utf-8"))["niels_gpt_private_text"] is True


def test_an_audit_of_later_notes_does_not_clear_the_private_text_of_the_base(tmp_path, capsys):
    place = reciting.copy_to(tmp_path / "place")
    assert call("export", "hf", place / "run", "--out", "recites", "--anyway") == 0
    later = reciting.write_notes(tmp_path / "later", first=1)
    shares = ("--set=train.p_train={roam: 1.0}", "--set=train.p_val={roam: 1.0}", "--set=data.roam_val_frac=0.25")
    tune = ("--set=init_from=hf:recites", "--set=train.B=2", "--set=output.sample_every=0", "--device=cpu", *shares)
    assert call("train", "--run-dir", "tuned", "--steps", "1", "--notes", later, *tune) == 0
    shutil.rmtree("recites")  # what it was is in the run
    capsys.readouterr()
    assert call("export", "hf", "tuned", "--out", "laundered", "--audit") == NOT_JUDGED
    assert "recites" in error_of(capsys) and not (tmp_path / "laundered").exists()
    assert call("export", "hf", "tuned", "--out", "laundered") == NOT_JUDGED
    assert call("export", "hf", "tuned", "--out", "laundered", "--anyway") == 0
    assert json.loads((tmp_path / "laundered/config.json").read_text("utf-8"))["niels_gpt_private_text"] is True


def test_the_card_of_an_imported_model_claims_nothing_about_its_data(untrained, tmp_path, capsys):
    assert call("export", "hf", untrained, "--out", "public") == 0
    assert call("import", "hf", "public", "--run-dir", "again") == 0
    assert call("export", "hf", "again", "--out", "out") == 0
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert "Not audited" in card and "public was trained on is not recorded" in card and "public text only" not in card


def test_a_modelfile_is_not_replaced(untrained, tmp_path, capsys):
    pytest.importorskip("gguf")
    (tmp_path / "Modelfile").write_text("FROM mine\n", encoding="utf-8")
    assert call("export", "gguf", untrained, "--out", "m.gguf", "--ollama") == 1
    message = error_of(capsys)
    assert "Modelfile" in message and "--overwrite" in message and not (tmp_path / "m.gguf").exists()
    assert (tmp_path / "Modelfile").read_text("utf-8") == "FROM mine\n"
    assert call("export", "gguf", untrained, "--out", "m.gguf", "--ollama", "--overwrite") == 0
    assert "m.gguf" in (tmp_path / "Modelfile").read_text("utf-8")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("answer", "code", "audited"), [("y\n", NOT_SAFE, True), ("\n", NOT_SAFE, True), ("n\n", NOT_JUDGED, False)]
)
def test_on_a_terminal_the_audit_is_offered(tmp_path, capsys, monkeypatch, answer, code, audited):
    place = reciting.copy_to(tmp_path / "place")
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert call("export", "hf", place / "run", "--out", "out") == code
    assert "Audit it now?" in capsys.readouterr().out
    assert (place / "run/export-audit/audit.json").is_file() is audited


def test_other_files_are_not_replaced(untrained, tmp_path, capsys):
    assert call("export", "hf", untrained, "--out", "out") == 0
    before = snapshot(tmp_path / "out")
    capsys.readouterr()
    assert call("export", "hf", untrained, "--out", "out") == 1
    assert "--overwrite" in error_of(capsys) and snapshot(tmp_path / "out") == before
    (tmp_path / "out/mine.txt").write_text("x", encoding="utf-8")
    assert call("export", "hf", untrained, "--out", "out", "--overwrite") == 1
    assert "mine.txt" in error_of(capsys) and (tmp_path / "out/mine.txt").read_text(encoding="utf-8") == "x"
    (tmp_path / "out/mine.txt").unlink()
    (tmp_path / "out/README.md").write_text("edited", encoding="utf-8")
    assert call("export", "hf", untrained, "--out", "out", "--overwrite") == 0
    assert snapshot(tmp_path / "out") == before
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.md").write_text("x", encoding="utf-8")
    capsys.readouterr()
    for arguments in (["hf", "--out", "notes"], ["gguf", "--out", "notes/a.md"], ["hf", "--out", "notes/a.md"]):
        assert call("export", arguments[0], untrained, *arguments[1:], "--overwrite") == 1
        assert "notes" in error_of(capsys)
    assert (tmp_path / "notes/a.md").read_text(encoding="utf-8") == "x"
    (tmp_path / "empty").mkdir()
    assert call("export", "hf", untrained, "--out", "empty") == 0
    pytest.importorskip("gguf")
    assert call("export", "gguf", untrained, "--out", "m.gguf") == 0
    assert call("export", "gguf", untrained, "--out", "m.gguf") == 1
    assert call("export", "gguf", untrained, "--out", "m.gguf", "--overwrite") == 0


def test_errors_are_one_line(untrained, tmp_path, capsys):
    model = GPT({"T": 32, "C": 32, "L": 1, "H": 2, "mlp": "swiglu"})
    save_checkpoint(tmp_path / "odd.pt", model, None, 0, model.config)
    for kind, out in (("hf", "out"), ("gguf", "m.gguf")):
        assert call("export", kind, "odd.pt", "--out", out) == 1
        message = error_of(capsys)
        assert "layernorm" in message and "swiglu" in message and not (tmp_path / out).exists()
        assert call("export", kind, "none.pt", "--out", out) == 1
        assert "none.pt" in error_of(capsys)


@contextlib.contextmanager
def files_of_at_most(size):
    """The system rejects writes beyond a file size, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize(("kind", "out"), [("hf", "out"), ("gguf", "m.gguf")])
@pytest.mark.parametrize("size", [0, 3_000, 20_000, 60_000])
def test_a_full_disk_leaves_nothing_or_the_earlier_export(untrained, tmp_path, capsys, kind, out, size):
    if kind == "gguf":
        pytest.importorskip("gguf")
    for arguments in ([], ["--overwrite"]):
        before = snapshot(tmp_path)
        with files_of_at_most(size):
            assert call("export", kind, untrained, "--out", out, *arguments) == 1
        assert "space" in error_of(capsys) and snapshot(tmp_path) == before
        if not arguments:
            assert call("export", kind, untrained, "--out", out) == 0
            capsys.readouterr()


def test_a_kill_at_any_moment_leaves_a_complete_export_or_none(untrained, tmp_path):
    from niels_gpt.export.audit_gate import Clearance
    from niels_gpt.export.run_export import export_hf

    loaded = load_run(untrained, None, "cpu")
    for number in itertools.count():
        out = tmp_path / "exports" / str(number) / "out"
        killed = killed_at(number, lambda out=out: export_hf(loaded, out, Clearance([], None)))
        if out.exists():
            AutoModelForCausalLM.from_pretrained(out)
            assert (out / "README.md").is_file()
        else:
            assert killed
        if not killed:
            break
    assert number > 10


def test_help_and_export_import_no_transformers(untrained, tmp_path):
    import subprocess

    program = (
        "import sys; from niels_gpt.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "sys.exit(sorted({'transformers', 'torch', 'datasets', 'matplotlib'} & sys.modules.keys()).__repr__())"
    )
    found = {}
    for words in (["export", "hf", "--help"], ["export", "hf", str(untrained), "--out", "out"]):
        done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=tmp_path)
        found[len(words)] = done.stderr.strip().splitlines()[-1]
    assert found == {3: "[]", 5: "['torch']"}


def test_the_help_names_the_exit_codes(capsys):
    for words in (["export", "hf"], ["export", "gguf"]):
        assert call(*words, "--help") == 0
        text = " ".join(capsys.readouterr().out.split())
        for code, verdict in ((NOT_SAFE, "NOT SAFE"), (NOT_JUDGED, "NOT JUDGED")):
            assert re.search(rf"\b{code}\b[^.;]*{verdict}", text), (words, text)
        assert "--anyway" in text and "--audit" in text
