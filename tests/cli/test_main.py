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
from niels_gpt.cli import main, research
from niels_gpt.config import RunConfig, yaml_file
from niels_gpt.config.yaml_file import load_config
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
    titles = re.findall(r"^(\w+):$", shown, re.MULTILINE)
    assert titles == ["Options", "Start", "Train", "Look", "Research"]
    names = re.findall(r"^  ([a-z]+) {2,}\S", shown, re.MULTILINE)
    assert names[:2] == ["notes", "demo"] and names[-1] == "research" and len(names) == 18


@pytest.mark.parametrize(("sections", "path"), [(main.SECTIONS, ""), (research.SECTIONS, "research")])
def test_every_command_is_where_the_help_says(capsys, sections, path):
    for section in sections.values():
        for name, entry in section.items():
            assert len(entry.help) <= 60
            assert call(*path.split(), name, "--help") == 0
            assert f"Usage: niels-gpt {path} {name}".replace("  ", " ") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("former", "present"),
    [
        *main.MOVED.items(),
        ("cache inspect", "research inspect"),
        ("cache diff", "research diff"),
        ("data lint", "research lint"),
    ],
)
def test_a_former_name_works_and_is_not_listed(capsys, former, present):
    shown = []
    for name in (present, former):
        assert call(*name.split(), "--help") == 0
        shown.append(capsys.readouterr().out.partition("\n")[2])
    assert shown[0] == shown[1]
    *group, last = former.split()
    assert call(*group, "--help") == 0
    assert f"\n  {last} " not in capsys.readouterr().out


def test_a_former_name_is_hinted_at_last(capsys):
    assert call("clean", "--json") == 0
    assert re.fullmatch(r"`niels-gpt clean` is now `\S.* cache clean`\n", capsys.readouterr().err)
    assert call("cache", "inspect", "nowhere", "--at", "0") != 0
    assert "is now" not in capsys.readouterr().err


def test_a_misspelled_command_names_the_nearest(capsys):
    assert call("chatt") == 2 and "'chat'" in capsys.readouterr().err
    assert call("research", "trac") == 2 and "'trace'" in capsys.readouterr().err


def test_no_command_prints_help(capsys):
    """As an error, with exit code 2: on stderr, so that a script that forgot the command notices."""
    assert call("--help") == 0
    shown = capsys.readouterr().out
    assert call() == 2
    out, err = capsys.readouterr()
    assert (out, err.split()) == ("", shown.split())


def test_version(capsys):
    assert call("--version") == 0
    assert capsys.readouterr().out == f"niels-gpt {niels_gpt.__version__}\n"


def test_as_a_module_and_without_torch():
    """`python -m niels_gpt` is the command; --help needs no heavy import."""
    code = (
        "import runpy, sys\nsys.argv = ['niels_gpt', '--help']\n"
        "try:\n    runpy.run_module('niels_gpt', run_name='__main__')\nexcept SystemExit as end:\n"
        "    assert not end.code\n"
        "assert not {'torch', 'datasets', 'matplotlib', 'numpy', 'pydantic', 'rich.table'} & set(sys.modules), 'heavy'"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "Usage: niels-gpt" in done.stdout


def test_closed_standard_output_and_errors(tmp_path):
    """Closed by the parent process: what was to be printed is lost, which is a failure."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for closed, error in ((">&- 2>&-", b""), (">&-", b"error: stdout is closed\n")):
        line = f"{shlex.join([sys.executable, '-m', 'niels_gpt', '--version'])} {closed}"
        done = subprocess.run(["sh", "-c", line], env=environment, cwd=tmp_path, capture_output=True)
        assert (done.returncode, done.stderr) == (1, error)


# --- mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "facts"),
    [
        ("train --config none.yaml", "none.yaml"),
        ("train --resume", "runs/.*train RUN --resume"),
        ("train somewhere", "somewhere.*--resume.*--run-dir"),
        ("train a --run-dir b --resume", "a.*--run-dir b"),
        ("pipeline --resume", "runs/.*pipeline RUN --resume"),
        ("train --resume --run-dir none", "none"),
        ("train --set train.base_lrr=1", r"train\.base_lrr.*\bbase_lr\b"),
        ("train --set train.B", r"--set.*'train\.B'"),
        (f"train --steps 200 --set train.warmup_steps=300 {ROAM_ONLY}", r"200"),
        ("train --device tpu", "tpu"),
        ("train --encoding-errors ignore", "--encoding-errors must be .*strict.*replace.*skip.*, got 'ignore'"),
        (f"train --roam none {ROAM_ONLY}", "none"),
        (f"train --primer none.txt {ROAM_ONLY.replace('roam', 'primer')}", "none.txt"),
        ("train --wiki none", "none"),
        ("eval", r"runs/.*niels-gpt demo.*RUN"),
        ("eval --run none", r"none.*config\.yaml"),
        ("eval --checkpoint none.pt", "none.pt"),
        ("chat --checkpoint none.pt", "none.pt"),
        ("research batch show --step 1", "runs/"),
        ("generate hello --top-k -3", "top_k"),
        ("generate hello --stop ''", "stop"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(capsys, tmp_path, command, facts):
    assert call(*shlex.split(command)) == 1
    assert re.search(facts, error_of(capsys))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "command",
    [
        "fly",
        "train --fly",
        "train --steps many",
        "train --steps 0",
        "generate",
        "research batch show",
        "research batch show --step -1",
    ],
)
def test_wrong_usage_is_exit_code_2(capsys, command):
    assert call(*command.split()) == 2
    errors = capsys.readouterr().err
    assert "Usage: niels-gpt" in errors
    assert "Traceback" not in errors


class Evil:
    def __reduce__(self):
        return (Path("pwned").touch, ())


def test_a_checkpoint_runs_no_code(capsys, tmp_path):
    path = tmp_path / "bad.pt"
    path.write_bytes(pickle.dumps(Evil()))
    for command in (["generate", "hello"], ["chat"]):
        assert call(*command, "--checkpoint", path) == 1
        assert "bad.pt" in error_of(capsys)
        torch.save({"model": {}, "optimizer": None, "step": Evil(), "config": {}}, path)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("command", ["train --roam= --steps 1", "audit m.pt --notes ''", "data show roam --path ''"])
def test_an_empty_path_is_not_the_current_folder(capsys, tmp_path, command):
    words = shlex.split(command)
    option = next(word.rstrip("=") for word in words if word.startswith("--"))
    assert call(*words) == 1
    assert re.search(f"{option} is empty", error_of(capsys))
    assert not any(tmp_path.iterdir())


def test_ctrl_c(capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(yaml_file, "load_config", interrupt)
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
