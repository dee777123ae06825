import os
import pickle
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
from tests.cli import SMALL, call, data, error_of
from tests.training import write_texts

ROOT = Path(__file__).parents[2]
ROAM_ONLY = "--set 'train.p_train={roam: 1.0}' --set 'train.p_val={roam: 1.0}'"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NIELS_GPT_DEBUG", raising=False)


def test_help(capsys):
    assert call("--help") == 0
    shown = capsys.readouterr().out
    for command in ("demo", "train", "eval", "generate", "chat", "batch"):
        assert f"\n  {command} " in shown


@pytest.mark.parametrize(
    "command",
    [
        "memorize nowhere --out taken",
        "audit nowhere --notes nowhere --out taken",
        "tokenizer train nowhere --out taken/deeper",
        "splice study --config nowhere --out taken",
        "splice fit nowhere --html taken/page.html",
        "splice coverage --config nowhere --png .",
        "data stats nowhere --png .",
    ],
)
def test_where_a_result_cannot_go_is_said_before_any_work(capsys, command):
    """Before anything is read, even: none of what is to be worked on is there."""
    Path("taken").write_text("something", encoding="utf-8")
    assert call(*command.split()) == 1
    message = error_of(capsys)
    assert "taken is a file" in message or ". is a folder" in message
    assert f"{command.split()[-2]} " in f"{message} "
    assert Path("taken").read_text(encoding="utf-8") == "something"


def test_no_command_is_help(capsys):
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
def test_help_of_the_commands(capsys, command, options):
    assert call(*command, "--help") == 0
    shown = capsys.readouterr().out
    for option in options.split():
        assert option in shown


def test_version(capsys):
    assert call("--version") == 0
    assert capsys.readouterr().out == f"niels-gpt {niels_gpt.__version__}\n"


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "1000"), ("MIMALLOC_PURGE_DELAY", "-1")])
def test_what_torch_reads_when_it_loads_is_set_unless_the_user_did(capsys, monkeypatch, name, value):
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
    """`python -m niels_gpt` is the command; help needs none of the heavy imports."""
    code = (
        "import runpy, sys\nsys.argv = ['niels_gpt', '--help']\n"
        "try:\n    runpy.run_module('niels_gpt', run_name='__main__')\nexcept SystemExit as end:\n"
        "    assert not end.code\n"
        "assert not {'torch', 'datasets', 'matplotlib', 'numpy'} & set(sys.modules), 'heavy'"
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
def test_an_error_after_which_nothing_is_to_be_tidied_up(how, said):
    code = (
        "import atexit\nfrom niels_gpt.system.console import run_app\natexit.register(print, 'tidied up')\n"
        "class Failed(ValueError):\n    leave_at_once = True\n"
        f"def app(**_):\n    print('before')\n    {how}\n"
        "run_app(app, [], name='niels-gpt')"
    )
    done = in_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (1, "before\n", f"error: {said}\n")


def test_nobody_listens(tmp_path):
    """Standard output and errors closed by who started us."""
    command = [sys.executable, "-m", "niels_gpt", "--version"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        line = f"{shlex.join(command)} {closed}"
        assert subprocess.run(["sh", "-c", line], env=environment, cwd=tmp_path, capture_output=True).returncode == 0
    script = (
        "from niels_gpt.system.console import run_app\nfrom niels_gpt.training.progress import say\n"
        "run_app(lambda **_: say('a line'), [], name='niels-gpt')"
    )
    line = f"{shlex.join([sys.executable, '-c', script])} >&-"
    done = subprocess.run(["sh", "-c", line], env=environment, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_home_after_a_sign(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    seen = []
    words = ["--run-dir=~/x", "--set", "a=~/y", "--stop=a~/", "~/z"]
    run_app(lambda args, prog_name: seen.extend(args), words, name="niels-gpt")
    assert seen == ["--run-dir=/home/somebody/x", "--set", "a=~/y", "--stop=a~/", "~/z"]


# --- mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "mentioned"),
    [
        ("train --config none.yaml", "none.yaml"),
        ("train --resume", "--run-dir"),
        ("train --resume --run-dir none", "none"),
        ("train --set train.base_lrr=1", "train.base_lrr; did you mean base_lr?"),
        ("train --set trian.base_lr=1", "trian; did you mean train?"),
        ("train --set train.B=many", "train.B"),
        ("train --set train.B=2.5", "train.B"),
        ("train --set train.B=true", "train.B"),
        ("train --set train.B", "section.key=value"),
        ("train --set task=chess", "'bytes'"),
        ("train --set 'train.p_train={wiki: 0.5}'", "train.p_train must sum to 1"),
        ("train --set 'train.p_train={notes: 1.0}'", "'notes'"),
        ("train --set model.C=30", "model.C=30"),
        (f"train --steps 200 {ROAM_ONLY}", "warm-up of 200"),
        ("train --device tpu", "tpu"),
        ("train --encoding-errors ignore", "encoding_errors"),
        (f"train --roam none {ROAM_ONLY}", "none"),
        (f"train --primer none.txt {ROAM_ONLY.replace('roam', 'primer')}", "none.txt"),
        ("train --wiki none", "none"),
        ("eval", "no run in runs/"),
        ("eval --run none", "none is not a run"),
        ("eval --checkpoint none.pt", "none.pt"),
        ("generate hello", "no run in runs/"),
        ("generate hello --run none", "none"),
        ("chat --checkpoint none.pt", "none.pt"),
        ("batch show --step 1", "no run in runs/"),
        ("generate hello --top-p 2", "top_p"),
        ("generate hello --temperature -1", "temperature"),
        ("generate hello --top-k -3", "top_k"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(capsys, tmp_path, command, mentioned):
    assert call(*shlex.split(command)) == 1
    assert mentioned in error_of(capsys)
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


@pytest.mark.parametrize("command", ["generate hello", "chat", "eval"])
@pytest.mark.parametrize("kind", ["pickle", "torch", "text", "empty"])
def test_a_checkpoint_that_is_none(capsys, tmp_path, command, kind):
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


def test_a_seed_that_is_too_large(capsys, tmp_path):
    from niels_gpt.model.gpt import GPT
    from niels_gpt.runs.checkpoint import save_checkpoint

    model = GPT({"T": 8, "C": 4, "L": 1, "H": 1, "dropout": 0.0})
    save_checkpoint(tmp_path / "m.pt", model, None, 0, model.config)
    for seed in (2**64, 2**63, -1):
        assert call("generate", "hello", "--checkpoint", "m.pt", "--max-tokens", 2, "--seed", seed) == 2
        errors = capsys.readouterr().err
        assert "--seed" in errors
        assert str(2**63 - 1) in errors or seed < 0
    assert call("generate", "hello", "--checkpoint", "m.pt", "--max-tokens", 2, "--seed", 2**63 - 1) == 0


@pytest.mark.parametrize("command", ["generate hello", "chat"])
def test_a_text_that_is_too_long(capsys, command):
    assert call(*command.split(), "--checkpoint", "m.pt", "--max-tokens", 10**12) == 2
    errors = capsys.readouterr().err
    assert "--max-tokens" in errors
    assert "1000000" in errors


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
def test_an_empty_place_is_not_this_folder(capsys, tmp_path, command):
    words = shlex.split(command)
    option = next(word.rstrip("=") for word in words if word.startswith("--"))
    assert call(*words) == 1
    assert f"the value of {option} is empty" in error_of(capsys)
    assert not any(tmp_path.iterdir())


def test_a_value_may_be_empty_within_a_word(capsys, tmp_path):
    """`--set` has values of its own, and what follows -- are no options."""
    assert call("train", "--set=output.sample_prompt=a=", "--set", "output.keep=2", "--print-config") == 0
    assert "sample_prompt: a=" in capsys.readouterr().out
    assert call("generate", "--checkpoint", "none.pt", "--", "") == 1
    assert "the prompt is empty" in error_of(capsys)


def test_a_place_whose_name_is_of_another_encoding(capsys, tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    assert call("train", "--roam", os.fsdecode(b"caf\xe9"), "--print-config") == 1
    message = error_of(capsys)
    assert "data.roam is not utf-8, got 'caf\\udce9': rename the place" in message
    assert len(message) < 200


def test_another_model_for_a_resumed_run(capsys, tmp_path):
    texts = write_texts(tmp_path / "texts")
    assert call("train", *SMALL, *data(texts), "--steps", 1, "--run-dir", "out") == 0
    capsys.readouterr()
    assert call("train", "--run-dir", "out", "--resume", "--set", "model.C=32") == 1
    message = error_of(capsys).splitlines()[-1]
    assert "model.C was 16, is 32" in message
    assert "start a new run for another model" in message


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("NIELS_GPT_DEBUG", "1")
    with pytest.raises(ValueError, match=r"none\.yaml"):
        call("train", "--config", "none.yaml")


def test_an_error_of_the_system_is_one_line_too(capsys, monkeypatch):
    from niels_gpt.cli import train

    def full(**options):
        raise OSError(28, "cannot write x.pt: No space left on device")

    monkeypatch.setattr(train, "run_train", full)
    assert call("train") == 1
    assert error_of(capsys) == "cannot write x.pt: No space left on device"


@pytest.mark.parametrize("value", ["file", "file/below"])
def test_a_cache_folder_that_cannot_be_says_what_to_do(tmp_path, monkeypatch, capsys, value):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine", encoding="utf-8")
    assert call("train", "--wiki", "embedded", "--set", f"data.cache_dir={value}") == 1
    message = error_of(capsys)
    assert message.startswith(f"cannot write {value}: ")
    assert message.endswith("choose another path")


def test_a_file_that_may_not_be_read_says_what_to_do(capsys, monkeypatch):
    from niels_gpt.cli import train

    def unreadable(**options):
        raise PermissionError(13, "Permission denied", "notes/a.md")

    monkeypatch.setattr(train, "run_train", unreadable)
    assert call("train") == 1
    assert error_of(capsys).startswith("cannot open notes/a.md: Permission denied: ")


def test_ctrl_c_is_exit_code_130(capsys, monkeypatch):
    from niels_gpt.cli import train

    def interrupted(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run_train", interrupted)
    assert call("train") == 130
    assert "Traceback" not in capsys.readouterr().err


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


def test_what_is_set_beats_the_file_and_the_last_one_wins(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("train: {B: 8, seed: 5, warmup_steps: 0}\n", encoding="utf-8")
    text = printed(capsys, "--config", "c.yaml", "--set", "train.B=4", "--set", "train.B=2", "--steps", "9")
    (tmp_path / "d.yaml").write_text(text, encoding="utf-8")
    config = load_config(tmp_path / "d.yaml")
    assert (config.train.B, config.train.seed, config.train.total_steps) == (2, 5, 9)


def test_an_unknown_key_in_the_file_is_named_with_the_file(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("model: {droput: 0.1}\n", encoding="utf-8")
    assert call("train", "--config", "c.yaml") == 1
    message = error_of(capsys)
    assert "c.yaml" in message
    assert "model.droput; did you mean dropout?" in message
