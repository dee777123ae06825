"""`niels-gpt runs`; tests/runs/test_catalog.py tests what the commands print."""

import json
import os
import re

from niels_gpt.system.program import command
from tests.cli import call, error_of
from tests.runs.test_catalog import P_VAL, make_pipeline, make_run

EVALS = [(i, {"val_roam": 3.0 - i, "val_chat": 2.0}) for i in range(3)]


def make_runs(folder):
    make_run(folder / "runs" / "a", P_VAL, evals=EVALS, steps=10, checkpoints=["best.pt"])
    make_run(folder / "runs" / "b", P_VAL, "train.B=8", evals=EVALS)


def test_list_and_show(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call("runs", "list") == 0
    assert command("demo") in capsys.readouterr().out
    make_runs(tmp_path)
    make_run(tmp_path / "runs" / "bad")
    (tmp_path / "runs" / "bad" / "config.yaml").write_text("[", encoding="utf-8")
    assert call("runs", "list") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "finished" in lines["a"] and "3/10" in lines["b"] and "1.750" in lines["a"]
    assert call("runs", "list", "--json") == 0
    assert {run["name"]: run["state"] for run in json.loads(capsys.readouterr().out)}["bad"] == "damaged"
    assert call("runs", "show", "b") == 0
    shown = capsys.readouterr().out
    assert "train.B = 8" in shown and "--resume" in shown and "topics" not in shown
    taught = tmp_path / "runs" / "b" / "cache" / "topics.txt"
    taught.parent.mkdir()
    taught.write_text("ferns\n", encoding="utf-8")
    assert call("runs", "show", "b", "--json") == 0
    assert json.loads(capsys.readouterr().out)["topics"] == "runs/b/cache/topics.txt"
    assert call("runs", "show", "b") == 0
    assert "runs/b/cache/topics.txt" in capsys.readouterr().out
    assert call("runs", "show", "bad") == 0
    assert call("runs", "show", "c") == 1
    assert "no run c" in error_of(capsys)


def test_every_value_and_checkpoint_is_one_true_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs/a", r'output.sample_prompt="a\nb"', P_VAL, evals=EVALS, checkpoints=["best.pt"])
    os.link(run / "checkpoints/best.pt", run / "checkpoints/latest.pt")
    assert call("runs", "show", "a") == 0
    shown = capsys.readouterr().out
    assert r"output.sample_prompt = 'a\nb'  (default 'user: what is niels?\nassistant: ')" in shown
    assert "train.p_val = {roam: 0.25, primer: 0.75}  (default {wiki: 1.0})" in shown
    assert "best.pt  1kB" in shown and "latest.pt  same file as best.pt" in shown


def test_floats_are_printed_without_rounding_errors(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shares = "train.p_train={roam: 0.19999999999999996, primer: 0.8}"
    make_run(tmp_path / "runs/a", P_VAL, "train.min_lr=0.00015000000000000001", shares, evals=EVALS)
    make_run(tmp_path / "runs/b", P_VAL, "train.min_lr=1.25e-6", evals=EVALS)
    assert call("runs", "show", "a") == 0
    shown = capsys.readouterr().out
    assert "train.min_lr = 0.00015  " in shown and "train.p_train = {roam: 0.2, primer: 0.8}  " in shown
    assert call("runs", "compare", "a", "b") == 0
    assert re.search(r"train\.min_lr +0\.00015 +1\.25e-06\s", capsys.readouterr().out)


def test_the_first_command_of_a_pipeline_is_to_chat_with_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_pipeline(tmp_path / "runs/notes")
    (tmp_path / "notes/projects").mkdir(parents=True)  # the notes, in the same folder as runs/
    for name in ("notes", "runs/notes"):
        assert call("runs", "show", name) == 0
        shown = capsys.readouterr().out
        assert shown.count("  next ") == 1
        assert re.search(r"  next +(.*)", shown)[1] == command("chat", "runs/notes")
        assert command("generate", "runs/notes/pretrain", "The ") in shown
        assert command("chat", "runs/notes/pretrain") not in shown
    assert call("runs", "show", "notes/pretrain") == 0
    assert re.search(r"  next +(.*)", capsys.readouterr().out)[1].endswith("generate runs/notes/pretrain 'The '")


def test_compare_cuts_values_and_leaves_out_paths_inside_the_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("p", "q"):
        make_pipeline(tmp_path / "runs" / name)
    assert call("runs", "compare", "p/sft", "q/sft") == 0
    assert "equal, except for paths" in capsys.readouterr().out
    shares = ", ".join(f"source{i}: 0.05" for i in range(20))
    make_run(tmp_path / "runs/r", "task=sft", f"train.p_train={{{shares}}}", f"data.token_cache={tmp_path}/shared")
    assert call("runs", "compare", "p/sft", "r") == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    found = {row[0]: row[1].strip() for row in rows if len(row) == 2}
    assert found["data.token_cache"] == "shared"
    assert re.fullmatch(r"\{primer: 1.0\} +\{source0: 0.05, .*…", found["train.p_train"])


def test_compare(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_runs(tmp_path)
    assert call("runs", "compare", "a", "runs/b") == 0
    output = capsys.readouterr().out
    assert [line.split() for line in output.splitlines() if line.startswith("train.B")] == [["train.B", "32", "8"]]
    assert (tmp_path / "runs/compare-a-b.png").read_bytes().startswith(b"\x89PNG")
    assert call("runs", "compare", "a", "b", "--out", "x/y.png", "--json") == 0
    assert json.loads(capsys.readouterr().out)["config"] == {"train.B": [32, 8]}
    assert (tmp_path / "x/y.png").exists()
    assert call("runs", "compare", "a") == 1
    assert "two runs" in error_of(capsys)


def test_rm_asks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_runs(tmp_path)
    monkeypatch.setattr("typer.confirm", lambda text: False)
    assert call("runs", "rm", "a") == 1
    assert (tmp_path / "runs/a").exists()
    capsys.readouterr()
    assert call("runs", "rm", "a", "nothing", "--yes") == 1
    assert (tmp_path / "runs/a").exists()  # all or none
    capsys.readouterr()
    assert call("runs", "rm", "a", "b", "--yes") == 0
    assert "freed" in capsys.readouterr().out
    assert list((tmp_path / "runs").iterdir()) == []
