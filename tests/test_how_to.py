"""Every shell block of the how-to pages runs as it is written, page by page, in a real shell, offline.

A home folder has notes (~/notes) and texts (~/books). The test changes two things: the port, and what is typed into
`niels-gpt chat`. A block that cannot run here has a comment with the reason before it: `<!-- not run: REASON -->`.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from niels_gpt.data import embedded
from tests.ports import free_ports

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
BLOCK = re.compile(r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
NOT_RUN = {"caches.md": 1, "change-the-model.md": 1, "public-models.md": 1, "publish.md": 1, "several-gpus.md": 1}
"""Blocks that need a network, an account or GPUs; a new one needs a very good reason."""
NAMED_PATH = re.compile(r"`((?:runs|cache|published)/[\w./-]+)`")
PROGRAM = f"""#!/bin/sh
if [ "$1" = chat ]; then
    printf 'hello\\n/exit\\n' | exec {sys.executable} -m niels_gpt "$@"
fi
exec {sys.executable} -m niels_gpt "$@"
"""


def shell_blocks(page: Path) -> list[re.Match[str]]:
    return [block for block in BLOCK.finditer(page.read_text(encoding="utf-8")) if block["language"] == "sh"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """The user's cache folder, which all pages share as they would on a machine."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def home(tmp_path) -> Path:
    """A home folder with notes, texts, and a folder with the programs."""
    notes = sorted(embedded.NOTES.glob("*.md"))[:24]
    for folder, suffix in (("notes", ".md"), ("books", ".txt")):
        (tmp_path / folder).mkdir()
        for note in notes:
            shutil.copy(note, tmp_path / folder / f"{note.stem}{suffix}")
    (tmp_path / "notes" / "work").mkdir()
    (tmp_path / "notes" / "work" / "plan.md").write_text("# Plan\n\nNot for the model.\n", encoding="utf-8")
    (tmp_path / "bin").mkdir()
    for name, text in (
        ("niels-gpt", PROGRAM),
        ("torchrun", f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n'),
        ("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'),
        ("pip", f'#!/bin/sh\nexec {sys.executable} -m pip "$@"\n'),
        ("hf", f'#!/bin/sh\nexec {sys.executable} -m huggingface_hub.cli.hf "$@"\n'),
    ):
        (tmp_path / "bin" / name).write_text(text, encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run_shell(script: str, home: Path, folder: Path, cache: Path) -> tuple[int, str]:
    """Return (exit code, output) of a bash script that ends at its first failing command, which is printed."""
    trap = "trap 'echo \"failed: $BASH_COMMAND\" >&2' ERR"
    process = subprocess.Popen(
        ["bash", "-c", f"set -euo pipefail\n{trap}\n{script}"],
        cwd=folder,
        env={
            **os.environ,
            "HOME": str(home),
            "XDG_CACHE_HOME": str(cache),
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "https_proxy": "http://127.0.0.1:9",  # nothing listens there: no command may need the network
            "http_proxy": "http://127.0.0.1:9",
            "no_proxy": "127.0.0.1,localhost",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=300)
        return process.returncode, output
    finally:
        with contextlib.suppress(ProcessLookupError):  # a server that a failed script has left
            os.killpg(process.pid, signal.SIGKILL)


def test_few_blocks_are_not_run_and_each_has_a_reason():
    skipped = {page.name: [block for block in shell_blocks(page) if block["reason"]] for page in PAGES}
    assert {name: len(blocks) for name, blocks in skipped.items() if blocks} == NOT_RUN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_all_commands_of_a_page_are_in_blocks_that_run(page):
    text = page.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(BLOCK.findall(text))
    assert {block["language"] for block in BLOCK.finditer(text)} == {"sh"}
    assert text.count("<!-- not run") == sum(bool(block["reason"]) for block in shell_blocks(page))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_shell_blocks_of_a_page_run(page, home, cache, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    script = "\n".join(block["text"] for block in shell_blocks(page) if not block["reason"])
    code, output = run_shell(script.replace("8000", str(free_ports(1)[0])), home, folder, cache)
    assert code == 0, f"{page.name}: exit code {code}\n{output[-3000:]}"
    assert "Traceback" not in output
    named = NAMED_PATH.findall(page.read_text(encoding="utf-8"))
    assert [path for path in named if not (folder / path).exists()] == []
