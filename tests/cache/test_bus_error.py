"""A mapped file that is truncated: one line that names the file."""

import signal
import subprocess
import sys

import pytest

SETUP = """
import os, sys, faulthandler
from pathlib import Path
from niels_gpt.cache.mmap import MappedTokens
path = Path(sys.argv[1])
path.write_bytes(bytes(1 << 20))
file = MappedTokens(path)
"""
READ = "bytes(file.read(0, 1 << 20))"


def run(path, code):
    return subprocess.run([sys.executable, "-c", SETUP + code, path], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "read",
    [
        READ,
        "int(file.tokens.sum())",
        f"import threading; thread = threading.Thread(target=lambda: {READ}); thread.start(); thread.join()",
    ],
    ids=["bytes", "numpy", "thread"],
)
def test_truncated_file_is_named(tmp_path, read):
    done = run(tmp_path / "a.bin", f"os.truncate(path, 4096)\n{read}\nprint('read')")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        f"error: {tmp_path / 'a.bin'} was truncated while it was read: build the cache again, and resume\n"
    )


def test_other_bus_errors_reach_the_previous_handler(tmp_path):
    """faulthandler was enabled before; the truncated file is not ours."""
    code = """
import mmap
other = path.with_name("other")
other.write_bytes(bytes(1 << 16))
mapped = mmap.mmap(os.open(other, os.O_RDONLY), 1 << 16, access=mmap.ACCESS_READ)
os.truncate(other, 0)
bytes(mapped)
"""
    done = run(tmp_path / "a.bin", code)
    assert done.returncode == -signal.SIGBUS and done.stderr == ""
    script = "import faulthandler; faulthandler.enable()" + SETUP + code
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "a.bin"], capture_output=True, text=True)
    assert done.returncode == -signal.SIGBUS and "Bus error" in done.stderr
