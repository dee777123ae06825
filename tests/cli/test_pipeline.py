"""`niels-gpt pipeline`: two phases, a best checkpoint for each, and resume from wherever it stopped."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal

import pytest
import torch
import yaml

from niels_gpt.config.yaml_file import config_from_dict, to_dict
from niels_gpt.data.source_paths import with_absolute_paths
from niels_gpt.report import curves
from niels_gpt.runs.folder import RunFolder
from niels_gpt.training.progress import Silent
from niels_gpt.training.tasks.base import eval_name
from tests import token_caches
from tests.cli import After, call, error_of, report_to, send, snapshot
from tests.training import metric_lines, same, weights_sha256

STEPS = {"pretrain": 10, "sft": 9}
FILE = """
data: {token_cache: cache}
pretrain:
  model: {preset: v0, T: 16, C: 16, L: 1, H: 2, dropout: 0.1}
  train: {total_steps: 10, warmup_steps: 1, B: 6, seed: 7, base_lr: 0.02, p_train: {fineweb_edu: 0.5, roam: 0.5}}
  output: {checkpoint_every: 4, eval_every: 3, eval_steps: 2, sample_tokens: 4}
sft:
  train: {total_steps: 9, warmup_steps: 1, B: 6, seed: 8, base_lr: 0.01}
  output: {checkpoint_every: 4, eval_every: 3, eval_steps: 2, sample_tokens: 4}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with caches under the default path, a config, a finished pipeline, whole/, and what it printed."""
    folder = tmp_path_factory.mktemp("pipeline")
    token_caches.copy_to(folder / "cache")
    (folder / "c.yaml").write_text(FILE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.chdir(folder)
        assert call("pipeline", "--config", "c.yaml", "--run-dir", "whole") == 0
    (folder / "printed.txt").write_text(printed.getvalue(), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def there(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr(curves, "plot_losses", lambda run: run.plot_path.touch())  # `whole` has its plots


def check_same(folder, whole):
    """Assert equal losses of every step, and equal weights, of both phases."""
    for phase in ("pretrain", "sft"):
        run, other = RunFolder(folder / phase), RunFolder(whole / phase)
        assert metric_lines(run.path) == metric_lines(other.path)
        assert weights_sha256(run.latest) == weights_sha256(other.latest)
        assert weights_sha256(run.best) == weights_sha256(other.best)
        assert same(torch.load(run.latest, weights_only=True), torch.load(other.latest, weights_only=True))


# --- both phases -------------------------------------------------------------------------------------


def test_each_phase_has_its_own_run_and_its_own_best_checkpoint(place):
    names = sorted(path.name for path in (place / "whole").iterdir() if not path.name.startswith("."))
    assert names == ["pretrain", "pretrain.yaml", "sft", "sft.yaml"]
    for phase, names in (("pretrain", ("fineweb_edu", "roam")), ("sft", ("dolly15k", "oasst1", "chat"))):
        run = RunFolder(place / "whole" / phase)
        assert run.read_config().task == phase
        assert run.tokenizer_path.read_bytes() == (place / "cache/tokenizer/spm.model").read_bytes()
        assert run.plot_path.read_bytes().startswith(b"\x89PNG")
        lines = metric_lines(run.path)
        assert [line["step"] for line in lines] == list(range(STEPS[phase]))
        evals = {line["step"] + 1: line["evals"] for line in lines if "evals" in line}
        for found in evals.values():
            assert set(found) == {*map(eval_name, names), f"val_{phase}", "val_pretrain"}
        best = torch.load(run.best, weights_only=True)
        assert best["step"] == min(evals, key=lambda step: evals[step][f"val_{phase}"])
        assert torch.load(run.latest, weights_only=True)["step"] == STEPS[phase]
        assert best["config"]["V"] == 404


def test_sft_starts_from_the_best_checkpoint_of_pretraining(place):
    """And not from the latest one: here the best comes earlier."""
    # The learning rate grows from 0 to 5, so that the end is worse than the beginning on every machine.
    options = ["pretrain.train.base_lr=0", "pretrain.train.min_lr=5", "sft.train.base_lr=0", "sft.train.min_lr=0"]
    assert call("pipeline", "--config", "c.yaml", "--run-dir", "early", *token_caches.options(options)) == 0
    first, second = RunFolder(place / "early/pretrain"), RunFolder(place / "early/sft")
    assert weights_sha256(first.best) != weights_sha256(first.latest)
    assert weights_sha256(second.latest) == weights_sha256(first.best)  # with learning rate 0 no weight changes


def test_what_is_printed(place, capsys):
    output = (place / "printed.txt").read_text(encoding="utf-8")
    assert "\x1b" not in output
    assert output.index("pretrain: into whole/pretrain") < output.index("sft: into whole/sft")
    assert re.search(r"^fineweb_edu +50\.0%", output, re.MULTILINE)
    assert re.search(r"^dolly15k +50\.0%", output, re.MULTILINE)
    before, after = (metric_lines(place / "whole" / phase)[-1]["evals"] for phase in ("pretrain", "sft"))
    losses = f"{before['val_pretrain']:.3f} after pretraining, {after['val_pretrain']:.3f} after SFT"
    assert f"val_pretrain: {losses}\nval_sft: {after['val_sft']:.3f}\n" in output
    for phase in ("pretrain", "sft"):
        assert f"best {phase} checkpoint: whole/{phase}/checkpoints/best.pt" in output
    commands = re.findall(r"niels-gpt (.*)", output.partition("next:")[2])
    assert [shlex.split(command)[0] for command in commands] == ["chat", "eval"]
    assert call(*shlex.split(commands[1]), "--limit", 50, "--json") == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == "whole/sft/checkpoints/best.pt"


def test_folders_are_named_after_the_config(place, capsys):
    (place / "runs/c").mkdir(parents=True)
    fast = token_caches.options(["pretrain.train.total_steps=2", "sft.train.total_steps=2"])
    assert call("pipeline", "--config", "c.yaml", *fast) == 0
    capsys.readouterr()
    assert call("eval", "--limit", 20, "--json") == 0  # the newest run is the last phase of the last pipeline
    output, errors = capsys.readouterr()
    assert errors == "using runs/c-2/sft\n"
    assert json.loads(output)["checkpoint"] == "runs/c-2/sft/checkpoints/best.pt"


def test_print_config(place, capsys):
    assert call("pipeline", "--config", "c.yaml", "--set", "sft.train.B=4", "--print-config") == 0
    output = capsys.readouterr().out
    parts = [part.partition("\n") for part in re.split(r"^# ", output, flags=re.MULTILINE)[1:]]
    found = {name: yaml.safe_load(text) for name, _, text in parts}
    assert list(found) == ["pretrain", "sft"]
    assert found["pretrain"]["model"] == found["sft"]["model"]
    assert found["pretrain"]["model"]["V"] == 404  # the tokenizer's
    assert (found["pretrain"]["train"]["B"], found["sft"]["train"]["B"]) == (6, 4)
    assert found["sft"]["data"]["retain"] == {"fineweb_edu": 0.5, "roam": 0.5}
    assert not (place / "runs" / "c-3").exists()
    for phase in ("pretrain", "sft"):
        stored = yaml.safe_load((place / "whole" / phase / "config.yaml").read_text(encoding="utf-8"))
        printed = found[phase] | {"init_from": stored["init_from"]}
        printed["train"]["B"] = 6
        printed = to_dict(with_absolute_paths(config_from_dict(printed)))
        del printed["splice"]
        assert stored == printed


@pytest.mark.parametrize("name", ["caches #2", "2024", "caches \N{GRINNING FACE}", "caches \x7f"])
def test_the_folder_of_caches_may_have_any_name(place, capsys, name):
    shutil.copytree(place / "cache/tokenizer", place / name / "tokenizer")
    assert call("pipeline", "--config", "c.yaml", "--token-cache", name, "--print-config") == 0, capsys.readouterr()
    for part in capsys.readouterr().out.split("# sft\n"):
        assert yaml.safe_load(part)["data"]["token_cache"] == name


# --- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["pretrain", "sft"])
def test_a_folder_that_holds_one_phase(place, tmp_path, capsys, phase):
    shutil.copytree(place / "whole" / phase, tmp_path / "half" / phase)
    before = snapshot(tmp_path / "half")
    assert call("pipeline", "--config", "c.yaml", "--run-dir", tmp_path / "half") == 1
    assert "--resume" in error_of(capsys)
    assert snapshot(tmp_path / "half") == before


def refused(capsys, folder, *arguments):
    """The message; nothing has been trained."""
    assert call("pipeline", *arguments, "--run-dir", folder) == 1
    assert not list(folder.rglob("metrics.jsonl")), "work had begun"
    return error_of(capsys)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sft.model.L=2", ["sft.model"]),
        ("data.token_cache=nowhere", ["nowhere", "niels-gpt cache build-all"]),
        ("pretrain.init_from=gone.pt", ["gone.pt"]),
        # mistakes in the second phase, before the first one has run
        ("sft.train.p_train={gone: 1.0}", ["gone", "dolly15k"]),
        ("sft.train.precision=tf32", ["tf32", "cpu"]),
    ],
)
def test_mistakes_are_reported_before_any_work(tmp_path, override, words, capsys):
    message = refused(capsys, tmp_path / "run", "--config", "c.yaml", "--set", override)
    for word in words:
        assert word in message


def test_verify_finds_damaged_caches_of_the_second_phase(tmp_path, capsys):
    root, file = token_caches.copy_to(tmp_path / "caches"), "sft/primer/train_tokens.bin"
    data = bytearray((root / file).read_bytes())
    data[10] ^= 1
    (root / file).write_bytes(data)
    given = ["--config", "c.yaml", "--token-cache", root, "--verify"]
    assert file in refused(capsys, tmp_path / "run", *given)


def test_options_that_do_not_go_together(tmp_path, capsys):
    assert call("pipeline", "--config", "c.yaml", "--resume-if-there") == 1
    assert "--run-dir" in error_of(capsys)
    assert call("pipeline", "--run-dir", tmp_path, "--resume") == 1
    assert str(tmp_path) in error_of(capsys)
    assert call("pipeline", "--run-dir", "whole", "--resume", "--set", "sft.train.B=2") == 1
    assert re.search("--set.*--config", error_of(capsys))


# --- resume ------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands in for SIGKILL: nothing after it runs."""


def die():
    raise Killed


def in_phase(monkeypatch, phase, step, action):
    """Let the action happen after a step of a phase, before anything of it is saved."""
    report_to(monkeypatch, *[Silent()] * (phase == "sft"), After(step, action))


def command_in(output):
    """Return the arguments of the command to resume."""
    (line,) = [line for line in output.splitlines() if line.strip().startswith("niels-gpt ")]
    program, *arguments = shlex.split(line)
    assert program == "niels-gpt"
    return arguments


@pytest.mark.parametrize(("phase", "number"), [("pretrain", signal.SIGTERM), ("sft", signal.SIGINT)])
def test_a_signal_saves_and_prints_how_to_resume(place, monkeypatch, capsys, phase, number):
    folder = f"a [{phase}] run"
    in_phase(monkeypatch, phase, 5, send(number))
    assert call("pipeline", "--config", "c.yaml", "--run-dir", folder) == 128 + number
    output, errors = capsys.readouterr()
    assert errors == ""
    assert number.name in output
    run = RunFolder(place / folder / phase)
    assert f"{folder}/{phase}/checkpoints/latest.pt after 6 steps" in output  # the step that had started is finished
    assert torch.load(run.latest, weights_only=True)["step"] == 6
    assert (place / folder / "sft").exists() == (phase == "sft")
    assert call(*command_in(output)) == 0
    output = capsys.readouterr().out
    assert (f"pretrain: {folder}/pretrain is finished" in output) == (phase == "sft")
    check_same(place / folder, place / "whole")


def test_the_command_to_resume_needs_none_of_the_options(place, monkeypatch, capsys, tmp_path):
    """Those of --set and --token-cache are stored; here they are all of c.yaml."""
    shutil.copytree(place / "cache", place / "other caches")
    tree = yaml.safe_load(FILE)
    sections = [(f"{phase}.{part}", value) for phase in ("pretrain", "sft") for part, value in tree[phase].items()]
    given = [word for key, value in sections for word in ("--set", f"{key}={json.dumps(value)}")]
    in_phase(monkeypatch, "pretrain", 1, send(signal.SIGTERM))
    assert call("pipeline", *given, "--token-cache", "other caches", "--run-dir", tmp_path / "a run") == 143
    assert call(*command_in(capsys.readouterr().out)) == 0, capsys.readouterr().err
    check_same(tmp_path / "a run", place / "whole")


@pytest.mark.parametrize("step", [STEPS["pretrain"] - 1, STEPS["pretrain"]])
def test_a_signal_during_the_last_step_of_pretraining_stops_the_pipeline(place, monkeypatch, step):
    """The second phase must not start. The signal comes before the last step, or while it is saved."""
    folder = f"last-{step}"
    in_phase(monkeypatch, "pretrain", step, send(signal.SIGTERM))
    code = call("pipeline", "--config", "c.yaml", "--run-dir", folder)
    assert torch.load(RunFolder(place / folder / "pretrain").latest, weights_only=True)["step"] == STEPS["pretrain"]
    assert code == 143
    assert not (place / folder / "sft").exists()
    assert call("pipeline", "--run-dir", folder, "--resume-if-there") == 0
    check_same(place / folder, place / "whole")


@pytest.mark.parametrize(("phase", "step"), [("pretrain", 10), ("sft", 2)])
def test_a_killed_pipeline_resumes_to_the_same_weights(place, monkeypatch, phase, step):
    """Killed after the last step of pretraining but before its checkpoint, and before the first one of SFT."""
    folder = f"killed-{phase}-{step}"
    in_phase(monkeypatch, phase, step, die)
    with pytest.raises(Killed):
        call("pipeline", "--config", "c.yaml", "--run-dir", folder)
    assert call("pipeline", "--config", "c.yaml", "--run-dir", folder, "--resume") == 0
    check_same(place / folder, place / "whole")


def test_a_finished_pipeline_is_not_changed(place, capsys):
    before = snapshot(place / "whole")
    assert call("pipeline", "--config", "c.yaml", "--run-dir", "whole", "--resume") == 0
    output = capsys.readouterr().out
    for phase in ("pretrain", "sft"):
        assert f"{phase}: whole/{phase} is finished" in output
        assert f"best {phase} checkpoint: whole/{phase}/checkpoints/best.pt" in output
    assert call("pipeline", "--config", "c.yaml", "--run-dir", "whole") == 1
    assert re.search("whole.*--resume", error_of(capsys))
    assert snapshot(place / "whole") == before


def test_resuming_with_another_config_is_refused(place, monkeypatch, capsys):
    in_phase(monkeypatch, "pretrain", 5, send(signal.SIGTERM))
    assert call("pipeline", "--config", "c.yaml", "--run-dir", "changed") == 143
    capsys.readouterr()
    before = snapshot(place / "changed")
    options = ["--config", "c.yaml", "--run-dir", "changed", "--resume", "--set", "pretrain.train.B=3"]
    assert call("pipeline", *options) == 1
    assert re.search(r"train\.B.* 6.* 3", error_of(capsys))
    assert snapshot(place / "changed") == before  # with the stored configs, which --resume alone reads


@pytest.mark.parametrize("phase", STEPS)
def test_a_phase_killed_after_its_last_checkpoint_gets_its_sample_and_its_plot(place, monkeypatch, phase):
    folder, step = f"unfinished-{phase}", STEPS[phase]
    run = RunFolder(place / folder / phase)
    shutil.copytree(place / "whole", place / folder)
    temporary = run.samples / f".{run.sample_path(step).name}.1.1.tmp"
    run.sample_path(step).rename(temporary)
    run.plot_path.unlink()
    drawn = []
    monkeypatch.setattr(curves, "plot_losses", drawn.append)
    assert call("pipeline", place / folder, "--resume") == 0
    assert run.sample_path(step).read_bytes() == RunFolder(place / "whole" / phase).sample_path(step).read_bytes()
    assert [other.path for other in drawn] == [run.path] and not temporary.exists()
    check_same(place / folder, place / "whole")


def test_a_plot_older_than_the_metrics_is_drawn_again_unless_the_phase_cannot_be_resumed(place, monkeypatch, capsys):
    shutil.copytree(place / "whole", place / "old-plot")
    run = RunFolder(place / "old-plot/sft")
    os.utime(run.plot_path, (1, 1))
    drawn = []
    monkeypatch.setattr(curves, "plot_losses", drawn.append)
    changed = ["--config", "c.yaml", "--set", "sft.train.base_lr=0.02"]
    assert call("pipeline", place / "old-plot", "--resume", *changed) == 0  # finished with its former config
    assert drawn == []
    assert call("pipeline", place / "old-plot", "--resume", "--config", "c.yaml") == 0
    assert [other.path for other in drawn] == [run.path]
