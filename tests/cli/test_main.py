"""The command line as a whole: help, exit codes, one-line errors, and the config it resolves."""

import os
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import niels_gpt
from niels_gpt.config import RunConfig
from niels_gpt.config.yaml_file import load_config
from niels_gpt.system.console import run_app
from tests.cli import call, error_of

ROOT = Path(__file__).parents[2]
ROAM_ONLY = "--set 'train.p_train={roam: 1.0}' --set 'train.p_val={roam: 1.0}'"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NIELS_GPT_DEBUG", raising=False)


def test_help(capsys):
    assert call("--help") == 0
    shown = capsys.readouterr().out
    commands = "demo train pipeline eval generate chat memorize audit doctor batch data cache tokenizer splice"
    for command in commands.split():
        assert f"\n  {command} " in shown


def test_no_command_prints_help(capsys):
    call()
    assert "Usage: niels-gpt" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["train"], "--config --run-dir --steps --checkpoint-every --resume --set --print-config --encoding-errors"),
        (["eval"], "--run --checkpoint --stride --json"),
        (["generate"], "--max-tokens --temperature --top-k --top-p --min-p --stop --seed --json"),
        (["chat"], "--run --system --temperature"),
        (["demo"], "--steps --run-dir"),
        (["batch", "show"], "--run --step --json"),
    ],
)
def test_help_of_a_command_lists_its_options(capsys, command, options):
    assert call(*command, "--help") == 0
    shown = capsys.readouterr().out
    for option in options.split():
        assert option in shown


def test_version(capsys):
    assert call("--version") == 0
    assert capsys.readouterr().out == f"niels-gpt {niels_gpt.__version__}\n"


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "1000"), ("MIMALLOC_PURGE_DELAY", "-1")])
def test_variables_that_torch_reads_are_set_unless_the_user_set_them(capsys, monkeypatch, name, value):
    monkeypatch.setenv(name, "7")
    call("--version")
    assert os.environ[name] == "7"
    monkeypatch.delenv(name)
    call("--version")
    assert os.environ[name] == value


def in_python(code):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, encoding="utf-8")


def test_as_a_module_and_without_torch():
    """`python -m niels_gpt` is the command; --help needs no heavy import."""
    code = (
        "import runpy, sys\nsys.argv = ['niels_gpt', '--help']\n"
        "try:\n    runpy.run_module('niels_gpt', run_name='__main__')\nexcept SystemExit as end:\n"
        "    assert not end.code\n"
        "assert not {'torch', 'datasets', 'matplotlib', 'numpy', 'pydantic', 'rich.table'} & set(sys.modules), 'heavy'"
    )
    done = in_python(code)
    assert done.returncode == 0, done.stderr
    assert "Usage: niels-gpt" in done.stdout


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise Failed('cuda failed')", "cuda failed"),
        ("raise ValueError('rank 1: cuda failed') from Failed()", "rank 1: cuda failed"),
    ],
)
def test_an_error_that_skips_cleanup(how, said):
    code = (
        "import atexit\nfrom niels_gpt.system.console import run_app\natexit.register(print, 'cleaned up')\n"
        "class Failed(ValueError):\n    leave_at_once = True\n"
        f"def app(**_):\n    print('before')\n    {how}\n"
        "run_app(app, [], name='niels-gpt')"
    )
    done = in_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (1, "before\n", f"error: {said}\n")


def test_closed_standard_output_and_errors(tmp_path):
    """Closed by the parent process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = f"{shlex.join([sys.executable, '-m', 'niels_gpt', '--version'])} >&- 2>&-"
    assert subprocess.run(["sh", "-c", line], env=environment, cwd=tmp_path, capture_output=True).returncode == 0
    script = (
        "from niels_gpt.system.console import run_app\nfrom niels_gpt.training.progress import say\n"
        "run_app(lambda **_: say('a line'), [], name='niels-gpt')"
    )
    line = f"{shlex.join([sys.executable, '-c', script])} >&-"
    done = subprocess.run(["sh", "-c", line], env=environment, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_home_folder_after_an_equals_sign_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    seen = []
    words = ["--run-dir=~/x", "--set", "a=~/y", "--stop=a~/", "~/z"]
    run_app(lambda args, prog_name: seen.extend(args), words, name="niels-gpt")
    assert seen == ["--run-dir=/home/somebody/x", "--set", "a=~/y", "--stop=a~/", "~/z"]


# --- mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "facts"),
    [
        ("train --config none.yaml", "none.yaml"),
        ("train --resume", "--run-dir"),
        ("train --resume --run-dir none", "none"),
        ("train --set train.base_lrr=1", r"train\.base_lrr.*\bbase_lr\b"),
        ("train --set trian.base_lr=1", r"trian.*\btrain\b"),
        ("train --set train.B=many", "train.B"),
        ("train --set train.B=2.5", "train.B"),
        ("train --set train.B=true", "train.B"),
        ("train --set train.B", r"--set.*'train\.B'"),
        ("train --set task=chess", "'bytes'"),
        ("train --set 'train.p_train={wiki: 0.5}'", r"train\.p_train.* 1.*0\.5"),
        ("train --set 'train.p_train={notes: 1.0}'", "'notes'"),
        ("train --set model.C=30", "model.C=30"),
        (f"train --steps 200 {ROAM_ONLY}", r"200"),
        ("train --device tpu", "tpu"),
        ("train --encoding-errors ignore", "encoding_errors"),
        (f"train --roam none {ROAM_ONLY}", "none"),
        (f"train --primer none.txt {ROAM_ONLY.replace('roam', 'primer')}", "none.txt"),
        ("train --wiki none", "none"),
        ("eval", "runs/.*--run"),
        ("eval --run none", r"none.*config\.yaml"),
        ("eval --checkpoint none.pt", "none.pt"),
        ("generate hello", "runs/"),
        ("generate hello --run none", "none"),
        ("chat --checkpoint none.pt", "none.pt"),
        ("batch show --step 1", "runs/"),
        ("generate hello --top-p 2", "top_p"),
        ("generate hello --temperature -1", "temperature"),
        ("generate hello --top-k -3", "top_k"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(capsys, tmp_path, command, facts):
    assert call(*shlex.split(command)) == 1
    assert re.search(facts, error_of(capsys))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "command",
    ["fly", "train --fly", "train --steps many", "train --steps 0", "generate", "batch show", "batch show --step -1"],
)
def test_wrong_usage_is_exit_code_2(capsys, command):
    assert call(*command.split()) == 2
    errors = capsys.readouterr().err
    assert "Usage: niels-gpt" in errors
    assert "Traceback" not in errors


class Evil:
    def __reduce__(self):
        return (Path("pwned").touch, ())


@pytest.mark.parametrize(
    ("command", "kind"),
    [("generate hello", "pickle"), ("chat", "torch"), ("eval", "text"), ("generate hello", "empty")],
)
def test_a_file_that_is_not_a_checkpoint(capsys, tmp_path, command, kind):
    path = tmp_path / "bad.pt"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Evil()))
    elif kind == "torch":
        torch.save({"model": {}, "optimizer": None, "step": Evil(), "config": {}}, path)
    else:
        path.write_text("hello" if kind == "text" else "", encoding="utf-8")
    assert call(*command.split(), "--checkpoint", path) == 1
    assert "bad.pt" in error_of(capsys)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "command",
    [
        "train --roam ''",
        "train --roam= --steps 1",
        "train --run-dir ''",
        "train --config '' --steps 1",
        "demo --run-dir ''",
        "pipeline --token-cache ''",
        "eval --checkpoint=",
        "audit m.pt --notes ''",
        "memorize --text ''",
        "cache build roam --cache-dir ''",
        "data show roam --path ''",
    ],
)
def test_an_empty_path_is_not_the_current_folder(capsys, tmp_path, command):
    words = shlex.split(command)
    option = next(word.rstrip("=") for word in words if word.startswith("--"))
    assert call(*words) == 1
    assert re.search(f"{option} is empty", error_of(capsys))
    assert not any(tmp_path.iterdir())


def test_values_of_set_and_arguments_may_be_empty(capsys, tmp_path):
    """`--set` parses its own value, and words after -- are no options."""
    assert call("train", "--set=output.sample_prompt=a=", "--set", "output.keep=2", "--print-config") == 0
    assert "sample_prompt: a=" in capsys.readouterr().out
    assert call("generate", "--checkpoint", "none.pt", "--", "") == 1
    assert "the prompt is empty" in error_of(capsys)


def test_a_path_in_another_encoding(capsys, tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    assert call("train", "--roam", os.fsdecode(b"caf\xe9"), "--print-config") == 1
    message = error_of(capsys)
    assert re.search(r"data\.roam.*utf-8.*caf\\udce9.*rename", message)
    assert len(message) < 200


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("NIELS_GPT_DEBUG", "1")
    with pytest.raises(ValueError, match=r"none\.yaml"):
        call("train", "--config", "none.yaml")


@pytest.mark.parametrize(
    ("error", "code", "facts"),
    [
        (OSError(28, "cannot write x.pt: No space left on device"), 1, r"x\.pt.*No space left"),
        (PermissionError(13, "Permission denied", "notes/a.md"), 1, r"notes/a\.md.*Permission denied"),
        (ArithmeticError("loss is NaN"), 1, "loss is NaN"),
        (KeyboardInterrupt(), 130, None),
    ],
)
def test_errors_while_a_command_runs(capsys, monkeypatch, error, code, facts):
    from niels_gpt.config import yaml_file

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(yaml_file, "load_config", fail)
    assert call("train") == code
    if facts is None:
        assert "Traceback" not in capsys.readouterr().err
    else:
        assert re.search(facts, error_of(capsys))


@pytest.mark.parametrize("value", ["file", "file/below"])
def test_a_cache_folder_that_cannot_be_created(capsys, value):
    Path("file").write_text("mine", encoding="utf-8")
    assert call("train", "--wiki", "embedded", "--set", f"data.cache_dir={value}") == 1
    assert re.search(f"{value}.*file.*folder", error_of(capsys))


# --- the config --------------------------------------------------------------------------------------


def printed(capsys, *options):
    assert call("train", *options, "--print-config") == 0
    return capsys.readouterr().out


def test_print_config_shows_the_defaults_and_trains_nothing(capsys, tmp_path):
    text = printed(capsys)
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    assert load_config(tmp_path / "c.yaml") == RunConfig()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml"]


def test_print_config_round_trip(capsys, tmp_path):
    options = ["--set", "train.base_lr=1e-3", "--set", "train.p_train={roam: 0.5, wiki: 0.5}", "--steps", "300"]
    options += ["--checkpoint-every", "7", "--roam", "my notes", "--encoding-errors", "replace"]
    options += ["--set", "output.sample_prompt='#: é'"]
    text = printed(capsys, *options)
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    assert printed(capsys, "--config", "c.yaml") == text
    config = load_config(tmp_path / "c.yaml")
    assert (config.train.base_lr, config.train.total_steps, config.output.checkpoint_every) == (1e-3, 300, 7)
    assert config.train.p_train == {"roam": 0.5, "wiki": 0.5}
    assert (config.data.roam, config.data.encoding_errors) == ("my notes", "replace")
    assert config.output.sample_prompt == "#: é"


def test_set_beats_the_file_and_the_last_value_wins(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("train: {B: 8, seed: 5, warmup_steps: 0}\n", encoding="utf-8")
    text = printed(capsys, "--config", "c.yaml", "--set", "train.B=4", "--set", "train.B=2", "--steps", "9")
    (tmp_path / "d.yaml").write_text(text, encoding="utf-8")
    config = load_config(tmp_path / "d.yaml")
    assert (config.train.B, config.train.seed, config.train.total_steps) == (2, 5, 9)


def test_an_unknown_key_in_the_file_is_named_with_the_file(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("model: {droput: 0.1}\n", encoding="utf-8")
    assert call("train", "--config", "c.yaml") == 1
    assert re.search(r"c\.yaml.*model\.droput.*\bdropout\b", error_of(capsys))
