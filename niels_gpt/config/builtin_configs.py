"""The configs that come with the package, by name: `--config splice-one` works from any folder."""

from __future__ import annotations

import difflib
from pathlib import Path

FOLDER = Path(__file__).parent / "builtin"


def builtin_configs() -> dict[str, Path]:
    """Return {name: file} of the configs that come with the package."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def description(path: Path) -> str:
    """Return the first sentence of a config file: its first line, which is a comment."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip().rstrip(":")


def find_config(path: str | Path) -> Path:
    """Return the file of a config: a path, or the name of a built-in one. An existing file comes first.

    Raises ValueError for a path that does not exist, with the nearest name and all built-in ones.
    """
    path = Path(path)
    known = builtin_configs()
    if path.is_file() or (path.exists() and str(path) not in known):  # a folder is refused where it is read
        return path
    if str(path) in known:
        return known[str(path)]
    if path.stem in known:
        raise ValueError(f"no config file {path}; {path.stem} is built in: use its name, without folder and .yaml")
    near = difflib.get_close_matches(path.stem, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"no config file {path}; {hint}built-in configs: {', '.join(known)}")
