"""Commands that a signal stops print how to resume them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from niels_gpt.cli.resumable import resumable

RESUME = "niels-gpt notes vault --resume"


def stopped(work: Callable[[], object]) -> int:
    with pytest.raises(SystemExit) as ended, resumable(lambda: RESUME):
        work()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_prints_how_to_resume(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr(signal, "SIG_IGN", None)  # also where the tests run in the background
    assert stopped(lambda: os.kill(os.getpid(), number)) == 128 + number
    out = capsys.readouterr().out
    assert number.name in out and f"\n  {RESUME}\n" in out
    assert signal.getsignal(number) is before


def test_other_exits_are_not_changed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="bad"), resumable(lambda: RESUME):
        raise ValueError("bad")
    with resumable(lambda: RESUME):
        pass
    assert capsys.readouterr().out == ""


SCRIPT = """
import os, signal, sys, time
from niels_gpt.cli.resumable import resumable
with resumable(lambda: "again"):
    try:
        print("begun", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        if sys.argv[1:] == ["slow"]:
            print("cleaning", flush=True)
            time.sleep(60)
        raise
"""


def start(*arguments: str, shell: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    if shell:  # without job control: the background job ignores SIGINT
        command = ["sh", "-c", 'exec 3<&0; "$@" <&3 & wait', "sh", *command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def test_a_second_signal_ends_a_process_that_does_not_stop() -> None:
    process = start("slow")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None and process.stdout.readline() == "cleaning\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_background_job_says_that_it_ignores_ctrl_c_and_stops_after_sigterm() -> None:
    process = start(shell=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    pid = int(line.split("`kill ")[1].split("`")[0])
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert "SIGTERM" in out and "again" in out and "SIGINT" not in out


DRAWING = """
import os, signal, sys
from niels_gpt.system.progress import status_line
from niels_gpt.cli.resumable import resumable
with resumable(lambda: "again"), status_line("measuring"):
    exec(compile("os.kill(os.getpid(), signal.SIGTERM)", "<frozen importlib._bootstrap>", "exec"))
"""


def test_a_signal_during_an_import_shows_the_cursor_again() -> None:
    ours, theirs = pytest.importorskip("pty").openpty()
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", DRAWING], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    printed = b""
    with contextlib.suppress(OSError):  # Linux: the other side is closed
        while chunk := os.read(ours, 65536):
            printed += chunk
    os.close(ours)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert b"\x1b[?25l" in printed and b"again" in printed
    assert printed.rindex(b"\x1b[?25h") > printed.rindex(b"\x1b[?25l")
