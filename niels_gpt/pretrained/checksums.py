"""SHA256SUMS of an exported model, which `import hf` verifies; `sha256sum -c SHA256SUMS` does, too."""

from __future__ import annotations

import re
from pathlib import Path

from niels_gpt.pretrained.find_model import WANTED
from niels_gpt.system import files
from niels_gpt.system.untrusted_files import is_untrusted_file, read_untrusted

SUMS_FILE = "SHA256SUMS"
MODEL_CARD = "README.md"
"""It is listed, but people edit it: an import does not verify it."""
_LINE = re.compile(r"([0-9a-f]{64}) [ *](\w[\w.-]*)")


def write_sums(folder: Path) -> None:
    """Write the sums of all files of a folder."""
    lines = [f"{files.sha256_file(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    files.write_text(folder / SUMS_FILE, "".join(lines))


def check_sums(folder: Path) -> None:
    """Raise ValueError if the folder has sums, and a file that they list differs or is missing.

    Files that an import does not need may be missing: a download of a repository leaves them out.
    """
    data = read_untrusted(folder / SUMS_FILE, 1 << 20)
    for line in (data or b"").decode("utf-8", "replace").splitlines():
        match = _LINE.fullmatch(line)
        if match is None or match[2] == MODEL_CARD:
            continue
        path = folder / match[2]
        if not is_untrusted_file(path):
            if path.name in WANTED:
                raise ValueError(f"{path}, which {SUMS_FILE} lists, is missing: copy the folder again")
        elif files.sha256_file(path) != match[1]:
            raise ValueError(
                f"{path} is damaged: its sha256 differs from {SUMS_FILE}; copy the folder again, or remove {SUMS_FILE} "
                "if you changed the file yourself"
            )
