"""The first hour of a person with notes, in a pseudo-terminal: a vault with everything that goes wrong, to a chat."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from niels_gpt.chat.transcript import DELIMITER
from niels_gpt.data import embedded

KEY = "AKIAIOSFODNN7EXAMPLQ"
PROGRAM = [sys.executable, "-m", "niels_gpt"]
pytestmark = pytest.mark.slow


class Terminal:
    """Runs commands in a pseudo-terminal, as a person would."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        self.env = {
            **os.environ,
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "COLUMNS": "300",
            "TERM": "xterm",
            "OMP_NUM_THREADS": "1",
        }

    def run(self, words, typed=(), *, interrupt_at: str | None = None, limit: float = 900.0) -> tuple[int, str]:
        """Return (exit code, output). `typed` are lines to type at the prompt `you>`."""
        main, side = pty.openpty()
        process = subprocess.Popen(
            words if isinstance(words, str) else list(map(str, words)),
            shell=isinstance(words, str),
            stdin=side,
            stdout=side,
            stderr=side,
            cwd=self.folder,
            env=self.env,
            start_new_session=True,
        )
        os.close(side)
        output, lines, end = b"", list(typed), time.monotonic() + limit
        answered = 0  # bytes of the output up to the last prompt that got a line
        try:
            while time.monotonic() < end:
                if select.select([main], [], [], 0.2)[0]:
                    try:
                        data = os.read(main, 65536)
                    except OSError:  # the program has closed the terminal
                        break
                    if not data:
                        break
                    output += data
                    if lines and b"you>" in output[answered:]:  # it may arrive in two pieces
                        os.write(main, lines.pop(0).encode() + b"\n")
                        answered = len(output)
                    if interrupt_at and interrupt_at.encode() in output:
                        os.killpg(process.pid, signal.SIGINT)
                        interrupt_at = None
                elif process.poll() is not None:
                    break
            code = process.wait(timeout=max(end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            pytest.fail(f"{words} still runs after {limit:g} s: {output[-2000:]!r}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            os.close(main)
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode("utf-8", "replace"))
        return code, re.sub(r"\r+\n?", "\n", text)


def make_vault(root: Path) -> None:
    """Write a vault with ordinary notes, and one of each thing that goes wrong."""
    root.mkdir(parents=True)
    for number in range(40):
        text = (
            f"# Garden bed {number}\n\n#garden #year{number}\n\nBed {number} has [[Tomatoes|tomatoes]] in row "
            f"{number % 7} and beans in row {number % 5}. Water it on day {number % 3}, and weed it every week.\n\n"
            f"```python\nrows = {number}\n```\n\n- [ ] buy seeds for bed {number}\n"
        )
        (root / f"bed {number}.md").write_text(text * 2, encoding="utf-8")
    (root / "UPPER.MD").write_text("# Shouting\n\nThis note has a suffix in capitals.\n" * 5, encoding="utf-8")
    (root / "plain.txt").write_text("A plain text about composting leaves in autumn.\n" * 5, encoding="utf-8")
    (root / "latin.md").write_bytes("# Caf\xe9\n\nna\xefve\n".encode("latin-1"))
    (root / "wide.md").write_text("# Wide\n\ntext", encoding="utf-16")
    (root / "empty.md").write_text("", encoding="utf-8")
    (root / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    (root / "keys.md").write_text(f"# Keys\n\nmy cloud key is {KEY}\n", encoding="utf-8")
    (root / "diary.md").write_text("---\nprivate: true\n---\n# Diary\n\nMoonlight secret.\n", encoding="utf-8")
    (root / "drafts").mkdir()
    (root / "drafts/idea.md").write_text("# Draft\n\nunfinished\n", encoding="utf-8")
    (root / ".nielsignore").write_text("drafts/\n", encoding="utf-8")
    for hidden in (".trash", ".obsidian", "node_modules"):
        (root / hidden).mkdir()
        (root / hidden / "gone.md").write_text("# Deleted\n\nZanzibar was deleted.\n" * 20, encoding="utf-8")
    (root / "broken.md").symlink_to(root / "nowhere.md")


@pytest.fixture
def hour(tmp_path):
    """A terminal in an empty folder, and a home with a vault and a small file of dialogues."""
    home, folder = tmp_path / "home", tmp_path / "work"
    folder.mkdir()
    make_vault(home / "notes")
    few = embedded.PRIMER.read_text(encoding="utf-8")[:60_000].rpartition(DELIMITER)[0]
    (home / "dialogues.txt").write_text(few, encoding="utf-8")
    return Terminal(folder, home), home


def test_from_a_vault_to_a_chat(hour):
    terminal, home = hour
    vault = home / "notes"

    code, output = terminal.run([*PROGRAM, "notes", "check", vault, "--respect-front-matter"])
    assert code == 0, output
    assert re.search(r"keys\.md:3 +\S", output)
    assert KEY not in output
    for skipped in (".trash", ".obsidian", "node_modules", "drafts", "diary.md", "empty.md", "latin.md", "wide.md"):
        assert skipped in output

    train = [*PROGRAM, "notes", vault, "--minutes", "0.2", "--run-dir", "runs/mine", "--respect-front-matter"]
    code, output = terminal.run([*train, "--primer", home / "dialogues.txt"])
    assert code == 0, output
    assert re.search(r"skipped .*\.trash", output)
    assert re.search(r"latin\.md", output) and re.search(r"wide\.md", output)  # named at the end
    assert re.search(r"^plan: .* weights", output, re.MULTILINE)
    assert re.search(r"^val_roam ", output, re.MULTILINE) and "xz" in output and "primed" in output
    assert re.search(r"^niels> \S", output, re.MULTILINE)
    assert "quick audit" in output

    run = terminal.folder / "runs/mine"
    assert sorted(path.name for path in terminal.folder.iterdir()) == ["runs"]  # nothing else was written
    trained = b"".join(path.read_bytes() for path in run.rglob("*.jsonl"))
    for absent in (b"Zanzibar", b"Moonlight", b"unfinished"):
        assert absent not in trained
    assert b"Zanzibar" not in (run / "cache/tokenizer/spm.model").read_bytes()
    record = json.loads((run / "cache/skipped.json").read_text(encoding="utf-8"))
    assert ".trash/" in json.dumps(record)

    commands = re.findall(r"^  (niels-gpt (?:chat|generate|audit) .*)$", output, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:  # as printed
        code, output = terminal.run(command, ["what is a token?", "/help", "/exit"])
        assert code in ((3, 4) if " audit " in command else (0,)), f"{command}\n{output}"  # latin.md was not judged
        if " audit " in command:
            assert re.search(r"dialogues .*of the package", output)
        if " chat " in command:
            assert "niels>" in output and "/reset" in output

    code, output = terminal.run([*PROGRAM, "generate", "runs/mine", "- [[", "--max-tokens", "5"])
    assert code == 0 and "- [[" in output
    code, output = terminal.run([*PROGRAM, "runs", "list"])
    assert code == 0 and "mine" in output


def test_ctrl_c_saves_and_says_how_to_go_on(hour):
    terminal, home = hour
    words = [*PROGRAM, "notes", home / "notes", "--minutes", "5", "--primer", home / "dialogues.txt"]
    code, output = terminal.run([*words, "--run-dir", "runs/mine"], interrupt_at="tok/s")
    assert code == 130, output
    resume = re.search(r"^  (\S.* notes \S.* --resume)$", output, re.MULTILINE)
    assert resume is not None and "--run-dir runs/mine" in resume[1]
