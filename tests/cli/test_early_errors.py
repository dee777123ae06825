"""A path that does not exist is reported before torch is imported, which takes seconds."""

import json
import subprocess
import sys
import textwrap

COMMANDS = [
    ["audit", "nowhere"],
    ["research", "batch", "show", "nowhere", "--step", "0"],
    ["chat"],
    ["chat", "nowhere"],
    ["chat", "empty"],
    ["chat", "--no-such-option"],
    ["eval", "nowhere"],
    ["export", "gguf", "nowhere", "--out", "out.gguf"],
    ["export", "hf", "nowhere", "--out", "out"],
    ["generate", "nowhere", "text"],
    ["import", "hf", "/nowhere"],
    ["import", "hf", "empty", "--revision", "main"],
    ["research", "memorize", "nowhere"],
    ["notes", "nowhere"],
    ["notes", "check", "nowhere"],
    ["pipeline", "nowhere"],
    ["pipeline", "--config", "nowhere.yaml"],
    ["runs", "report", "nowhere"],
    ["runs", "show", "nowhere"],
    ["serve", "nowhere"],
    ["research", "splice", "select", "--config", "nowhere.yaml"],
    ["research", "trace", "text", "nowhere"],
    ["train", "nowhere.yaml"],
    ["train", "--config", "nowhere.yaml"],
]
SCRIPT = """
import contextlib, io, json, sys
from niels_gpt.cli.main import main

results = []
for words in json.loads(sys.argv[1]):
    errors = io.StringIO()
    code = 0
    with contextlib.redirect_stderr(errors):
        try:
            main(words)
        except SystemExit as end:
            code = end.code
    results.append([words, code, errors.getvalue(), "torch" in sys.modules])
print(json.dumps(results))
"""


def test_wrong_paths_are_reported_before_torch_is_imported(tmp_path):
    (tmp_path / "empty").mkdir()
    words = [sys.executable, "-c", textwrap.dedent(SCRIPT), json.dumps(COMMANDS)]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert [each[0] for each in found] == COMMANDS
    for command, code, error, with_torch in found:
        assert code in (1, 2) and "Traceback" not in error, (command, error)
        assert any(name in error for name in ("nowhere", "empty", "runs/", "--no-such-option")), (command, error)
        assert not with_torch, f"{command} imported torch before it failed"
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
