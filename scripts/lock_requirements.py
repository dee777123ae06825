"""Write requirements-locked.txt: every dependency with its version and the sha256 of its wheels.

    python -m scripts.lock_requirements [--output FILE]

pip chooses the versions (`pip install --dry-run --report`, within constraints.txt). PyPI lists the hashes of all wheels
of a version; the wheel that pip chose here is always included, so that a local build of torch is accepted too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from scripts.dependencies import own_requirements

ROOT = Path(__file__).parents[1]
LOCKED = ROOT / "requirements-locked.txt"
BUILD = ["hatchling", "editables"]
"""Builds this project without a download: `pip install --no-build-isolation`."""
INTERPRETERS = ("py3", "cp311", "cp312", "cp313")
PLATFORMS = ("any", "linux", "manylinux", "macosx")


def resolve(requirements: list[str]) -> dict[str, Any]:
    """Return pip's report of what it would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", str(report), "-c", str(ROOT / "constraints.txt"), "--only-binary", ":all:"]
        subprocess.run([*command, *requirements], check=True, stderr=subprocess.DEVNULL)
        resolved: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return resolved


def files_on_pypi(name: str, version: str) -> list[dict[str, Any]]:
    """Return PyPI's entries of the files of a version; empty if it does not have it."""
    with urllib.request.urlopen(f"https://pypi.org/pypi/{name}/json", timeout=30) as answer:
        files: list[dict[str, Any]] = json.load(answer)["releases"].get(version, [])
    return files


def is_supported(filename: str) -> bool:
    """Whether a file is a wheel for a Python and a platform that we support."""
    try:
        tags = parse_wheel_filename(filename)[3]
    except InvalidWheelFilename:  # an sdist
        return False
    return any(
        tag.platform.startswith(PLATFORMS) and (tag.abi == "abi3" or tag.interpreter in INTERPRETERS)
        and not tag.abi.endswith("t")
        for tag in tags
    )  # fmt: skip


def lock(report: dict[str, Any], files: Callable[[str, str], list[dict[str, Any]]] = files_on_pypi) -> str:
    """Return the text of the requirements file for a report of pip."""
    where = report["environment"]
    lines = [
        "# Written by `make lock`; do not edit. Use: make setup-locked",
        f"# Versions resolved for Python {where['python_version']} on {where['platform_system']} "
        f"{where['platform_machine']}, with a CPU build of torch.",
        "# Where pip asks for a package that is not listed (a CUDA build of torch), run `make lock` there.",
    ]
    for entry in sorted(report["install"], key=lambda entry: canonicalize_name(entry["metadata"]["name"])):
        name, version = canonicalize_name(entry["metadata"]["name"]), entry["metadata"]["version"]
        public = version.partition("+")[0]
        hashes = {entry["download_info"]["archive_info"]["hashes"]["sha256"]}
        for file in files(name, public):
            # pip prefers a wheel of the index to a local build, and the one for Linux requires CUDA packages.
            is_replaced = public != version and "linux" in file["filename"]
            if is_supported(file["filename"]) and not is_replaced:
                hashes.add(file["digests"]["sha256"])
        lines.append(f"{name}=={public} \\")
        lines.append(" \\\n".join(f"    --hash=sha256:{digest}" for digest in sorted(hashes)))
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the file."""
    parser = argparse.ArgumentParser(prog="lock_requirements", description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=LOCKED)
    options = parser.parse_args(arguments)
    try:
        text = lock(resolve([*own_requirements(), *BUILD]))
    except (OSError, subprocess.CalledProcessError) as err:
        print(f"error: cannot lock: {err}: connect to PyPI and try again", file=sys.stderr)
        return 1
    options.output.write_text(text, encoding="utf-8")
    print(f"{options.output}: {text.count('==')} dependencies, {text.count('--hash=')} hashes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
