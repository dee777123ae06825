"""docs/api.md: its script runs as it stands, and its table lists exactly the public names."""

import re
from pathlib import Path

import niels_gpt

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")


def test_script_trains_evaluates_and_chats(tmp_path, monkeypatch, capsys):
    (script,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(script.splitlines()) <= 40
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(script, "docs/api.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("40 steps") and "val_roam" in lines[0] and "val_chat" in lines[0]
    assert re.match(r"70 bytes, \d+\.\d\d bits per byte", lines[1])
    assert lines[2].startswith("# Notes on ")
    result, run, chat = names["result"], names["run"], names["chat"]
    assert result.step == 40 and run.step == result.best["step"]
    assert result.evals["val_roam"] < 4.5  # ln 256 is 5.55: it has learned something
    assert names["score"].bits_per_byte < 7
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant"]
    assert run.config.train.B == 8
    assert {"config.yaml", "metrics.jsonl", "checkpoints"} <= {
        path.name for path in (tmp_path / "runs/first").iterdir()
    }


def test_table_lists_the_public_names():
    table = PAGE.partition("## Public names")[2].partition("\n## ")[0]
    rows = [row.split("|")[2] for row in table.splitlines() if row.startswith("|")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(set(niels_gpt.__all__) - {"__version__"})
