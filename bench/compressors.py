"""What strong compressors need for held-out text after the training text: `python -m bench.compressors TRAIN HELD_OUT`.

Prints bits per byte, alone and primed, of xz and zstd and of the programs on the PATH: PPMd (`7zz` or `7z`, packages
7zip and p7zip-full) and `zpaq -m5`. The last ones take minutes for ten megabytes, so `eval` has only the first two.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from niels_gpt.evaluation.baselines import compressed_bits, compressors


def programs() -> dict[str, Callable[[bytes], int]]:
    """Return the compressors of the package and those on the PATH."""
    found = compressors()
    seven = shutil.which("7zz") or shutil.which("7z")
    if seven:
        found["PPMd"] = lambda data: _packed_size(data, seven, "a", "-m0=PPMd:o=16:mem=1g", "{}.7z", "{}")
    zpaq = shutil.which("zpaq")
    if zpaq:
        found["zpaq -m5"] = lambda data: _packed_size(data, zpaq, "a", "{}.zpaq", "{}", "-m5")
    return found


def _packed_size(data: bytes, *command: str) -> int:
    """Return the size of the archive that a command writes; {} in it is the file with the data."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "data")
        file.write_bytes(data)
        words = [word.format(file) for word in command]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder)
        return sum(path.stat().st_size for path in Path(folder).iterdir() if path != file)


def main(arguments: Sequence[str]) -> int:
    """Print a line per compressor."""
    if len(arguments) != 2:
        print("usage: python -m bench.compressors TRAIN HELD_OUT", file=sys.stderr)
        return 2
    train, held_out = (Path(name).read_bytes() for name in arguments)
    for name, size in programs().items():
        (bits,) = compressed_bits(held_out, train=train, using={name: size}).values()
        print(f"{name:9} alone {bits['alone']:.3f}  primed {bits['primed']:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
