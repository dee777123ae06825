"""`niels-gpt runs`; tests/runs/test_catalog.py tests what the commands print."""

import json

from tests.cli import call, error_of
from tests.runs.test_catalog import P_VAL, make_run

EVALS = [(i, {"val_roam": 3.0 - i, "val_chat": 2.0}) for i in range(3)]


def make_runs(folder):
    make_run(folder / "runs" / "a", P_VAL, evals=EVALS, steps=10, checkpoints=["best.pt"])
    make_run(folder / "runs" / "b", P_VAL, "train.B=8", evals=EVALS)


def test_list_and_show(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call("runs", "list") == 0
    assert "no runs" in capsys.readouterr().out
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
    assert "train.B = 8" in shown and "--resume" in shown
    assert call("runs", "show", "bad") == 0
    assert call("runs", "show", "c") == 1
    assert "no run c" in error_of(capsys)


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
