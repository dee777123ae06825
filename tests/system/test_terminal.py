"""Control characters are shown on a terminal, and kept in a pipe."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.file_proxy import FileProxy

from niels_gpt.system import progress, terminal
from niels_gpt.system.terminal import neutralize

EVIL = "a\x1b]0;title\x07b\x9b2Jc\u202ed\x7f\r\x08e"
SHOWN = "a\\x1b]0;title\\x07b\\x9b2Jc\\u202ed\\x7f\\x0d\\x08e"
NOTE = "".join(character for character in EVIL if character not in "\x07\x08\r")  # rich drops these itself
PACKAGE = Path(terminal.__file__).parents[1]
SGR = re.compile(r"\x1b\[[\d;]*m")


def on_terminal(*arguments, cwd, stdin=None):
    """What a command prints on a terminal (stdout and stderr), and its exit code."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "niels_gpt", *arguments],
        stdin=stdin or subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", "TERM": "xterm", "PYTHONPATH": str(PACKAGE.parent)},
    ) as process:
        os.close(theirs)
        printed = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # Linux: the other side is closed
                break
            if not chunk:
                break
            printed += chunk
    os.close(ours)
    return printed.decode("utf-8"), process.returncode


def test_controls_are_escaped_and_text_is_kept():
    assert neutralize(EVIL) == SHOWN
    assert neutralize("café\t\n\r\n日本 שלום \u200f👍") == "café\t\n\n日本 שלום \u200f👍"
    assert neutralize(neutralize(EVIL)) == SHOWN
    kept = [chr(code) for code in range(0xA0) if neutralize(chr(code)) == chr(code)]
    assert "".join(kept) == "\t\n" + "".join(map(chr, range(0x20, 0x7F)))


@pytest.fixture
def vault(tmp_path):
    folder = tmp_path / "vault"
    folder.mkdir()
    (tmp_path / "clean").mkdir()
    for parent in (folder, tmp_path / "clean"):
        (parent / "a.md").write_text(f"{NOTE}\n" * 3, encoding="utf-8")
    (folder / "\x1b[2Jevil.md").write_bytes(b"\xff\xfe not utf-8")
    return folder


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["data", "show", "clean"], neutralize(NOTE)),
        (["notes", "check", "vault"], "\\x1b[2Jevil.md"),
        (["data", "show", "\x1b[2Jnone.jsonl"], "\\x1b[2Jnone.jsonl"),
        (["data", "stats", "clean"], ""),
        (["config", "show", "\x1b[2J"], "\\x1b[2J"),
        (["data", "--\x1b[2J"], "\\x1b[2J"),  # printed by click
    ],
)
def test_commands_on_a_terminal(vault, arguments, shown):
    printed, _ = on_terminal(*arguments, cwd=vault.parent)
    assert shown in printed
    rest = SGR.sub("", printed).replace("\r\n", "\n")
    rest = re.sub(r"\r\x1b\[2K|\x1b\[2K|\x1b\[1A|\x1b\[\?25[lh]|\r", "", rest)  # rich: a status line
    assert neutralize(rest) == rest


def test_a_pipe_receives_every_character(vault):
    done = subprocess.run(
        [sys.executable, "-m", "niels_gpt", "data", "show", "clean"],
        capture_output=True,
        cwd=vault.parent,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        check=True,
    )
    assert NOTE in done.stdout.decode("utf-8")


class Terminal:
    """A stream that says that it is a terminal."""

    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
        return len(text)

    def isatty(self):
        return True

    def flush(self):
        pass


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_both_streams_are_replaced_and_restored(monkeypatch, name):
    stream = Terminal()
    monkeypatch.setattr(sys, name, stream)
    with terminal.neutralized_terminal():
        print(EVIL, file=getattr(sys, name))
        assert getattr(sys, name).encoding == "utf-8"
    assert stream.text == SHOWN + "\n" and getattr(sys, name) is stream


def test_a_progress_bar_of_tqdm_overwrites_its_line(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with terminal.neutralized_terminal():
        sys.stderr.write("\r 50%")
        sys.stderr.write("error: \r 50%")
    assert stream.text == "\r 50%error: \\x0d 50%"


def test_rich_keeps_its_own_sequences_only(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with terminal.neutralized_terminal():
        terminal.rich_console().print(EVIL, style="red", markup=False, highlight=False)
    assert "\x1b[31m" in stream.text and "a\\x1b]0;titleb" in stream.text  # rich drops \\x07 itself
    assert "\x1b]0" not in stream.text and "\u202e" not in stream.text


@pytest.mark.parametrize("display", [progress.status_line, progress.progress_bar])
def test_a_live_display_keeps_its_sequences_and_shows_those_of_the_text(monkeypatch, display):
    streams = {"stdout": Terminal(), "stderr": Terminal()}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with terminal.neutralized_terminal():
        with display("reading"):
            print("note: \x1b[31mred\x1b]8;;http://x\x1b\\link")
        assert not isinstance(sys.stderr, FileProxy)
    assert [getattr(sys, name) for name in streams] == list(streams.values())
    printed = streams["stdout"].text + streams["stderr"].text
    assert "reading" in printed and "\x1b[2K" in printed  # the line is erased, not written below the last one
    drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", printed)
    assert "\x1b" not in drawn  # only sequences that move, erase and color
    assert re.findall(r"\\x1b.*", drawn) == ["\\x1b[31mred\\x1b]8;;http://x\\x1b\\link"]


def test_no_other_console_of_rich_is_made():
    for path in PACKAGE.rglob("*.py"):
        made = re.findall(r"(?<![\w.])Console\(", path.read_text(encoding="utf-8"))
        assert not made, path
