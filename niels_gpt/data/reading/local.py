"""Local files with the rows of a Hub dataset: find them, and assign them to splits.

Supported names are, for example, `train.jsonl.gz`, `train-00000-of-00002.parquet` and `validation/part.parquet`, also
in a sub-folder per config. Files without a split in their name belong to train.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from niels_gpt.system.files import expand_home
from niels_gpt.system.private_files import keep_private

VARIABLE = "NIELS_GPT_DATA"
"""Environment variable: a folder with one sub-folder per Hub id, or a YAML file with lines `id: path`."""
FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}
"""File suffix -> the `datasets` builder that reads it; .gz may follow, except for parquet."""
ROW_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
"""Suffixes of files with rows."""
_KNOWN = (*ROW_SUFFIXES, ".txt", ".txt.gz")
SPLITS = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation",
          "dev": "validation", "test": "test"}  # fmt: skip
"""Beginning of a file or folder name -> name of the split on the Hub."""


class DataUnavailable(OSError, ValueError):
    """A dataset can be read neither from the Hub nor from local files; the message has a remedy."""

    def __str__(self) -> str:
        return str(self.args[0])


_NOT_DATA = {"readme", "license", "licence", "notice", "changelog"}
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.")
_PART = re.compile(r"([a-z]+)(?:[-_.]?(?:\d+|of|part|shard|chunk))*(?:\.|$)", re.IGNORECASE)


def find_local(dataset_id: str, path: str | Path | None = None) -> Path | None:
    """Return the local path of a Hub dataset: `path`, or from NIELS_GPT_DATA; None if there is none.

    Raises DataUnavailable for a path that does not exist, or an invalid NIELS_GPT_DATA.
    """
    if path is not None:
        return _existing(expand_home(path), f"the local path for {dataset_id}")
    value = os.environ.get(VARIABLE)
    if not value:
        return None
    root = _existing(expand_home(value), VARIABLE)
    names = (dataset_id, dataset_id.rpartition("/")[2])
    if root.is_dir():
        return next((root / name for name in names if (root / name).exists()), None)
    paths = _read_map(root)
    mapped = next((paths[name] for name in names if name in paths), None)
    if mapped is None:
        return None
    return _existing(root.parent / expand_home(mapped), f"{dataset_id} in {root}")


def find_files(path: Path, config: str | None = None, *, only: frozenset[str] | None = None) -> dict[str, list[str]]:
    """Return {split: sorted files of one format}. In a folder, uses the sub-folder `config` if it exists.

    only: the files of the folder to choose from; None: all that are not hidden.
    If `path` is a file, it is returned under "" and serves any split.
    Raises DataUnavailable if there is no file of a known format, or if formats are mixed.
    """
    if not path.is_dir():
        if not path.is_file():
            raise DataUnavailable(f"{path} is neither a file nor a folder; write the rows to a regular file")
        keep_private([path])
        return {"": [str(path)]}
    folders = [path / part / config for part in ("", "data") if config] + [path]
    root = next(folder for folder in folders if folder.is_dir())
    if config and root == path:
        _check_config_folders(path, config)

    by_split: dict[str, list[str]] = {}
    names = list_files(root, _KNOWN, visible_only=True) if only is None else sorted(only)
    for name in names:
        file = Path(name)
        if file.stem.lower() not in _NOT_DATA and name.lower().endswith(_KNOWN):
            parents = (split_of(part) for part in reversed(file.relative_to(root).parts[:-1]))
            split = split_of(file.name) or next(filter(None, parents), None) or "train"
            by_split.setdefault(split, []).append(name)
    if not by_split:
        raise DataUnavailable(f"{root} has no data files; known formats are {', '.join(_KNOWN)}")
    kinds = sorted({suffix(Path(file)) for files in by_split.values() for file in files})
    if len({FORMATS[kind] for kind in kinds}) > 1:
        raise DataUnavailable(f"{root} mixes {' and '.join(kinds)} files; keep one format, or give one file")
    return by_split


def list_files(root: Path, suffixes: tuple[str, ...], *, visible_only: bool = False) -> list[str]:
    """Return the paths of all regular files below a folder with one of the suffixes, sorted as strings.

    `visible_only` skips hidden files and folders, and ignores the case of suffixes.
    What is made from private files stays private (`keep_private`). Raises OSError for a sub-folder that cannot be read.
    """

    def refuse(err: OSError) -> None:
        raise err  # os.walk would skip an unreadable folder silently

    paths = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        if visible_only:
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            names = [name for name in names if not name.startswith(".")]
        for name in names:
            path = os.path.join(folder, name)  # noqa: PTH118 (four times as fast as Path)
            if (name.lower() if visible_only else name).endswith(suffixes) and os.path.isfile(path):  # noqa: PTH113
                paths.append(path)
    keep_private((root, *paths))
    return sorted(paths)


def _check_config_folders(path: Path, config: str) -> None:
    """Raise DataUnavailable if a folder has a sub-folder per config, but none for this config."""
    base = path / "data" if (path / "data").is_dir() else path
    entries = [entry for entry in sorted(base.iterdir()) if not entry.name.startswith(".")]
    others = [entry.name for entry in entries if entry.is_dir() and split_of(entry.name) is None]
    if others and not any(entry.is_file() and suffix(entry) in FORMATS for entry in entries):
        raise DataUnavailable(
            f"{path} has no {config}; it has {', '.join(others)}: choose one, or give the path of its folder"
        )


def choose_split(files: dict[str, list[str]], split: str, where: Path | str) -> list[str]:
    """Return the files of a split. Raises DataUnavailable with the known splits."""
    if split in files or "" in files:
        return files.get(split) or files[""]
    raise DataUnavailable(f"{where} has no split {split!r}; it has {', '.join(sorted(files))}")


def builder(files: list[str]) -> str:
    """Return the `datasets` builder for these files. Raises DataUnavailable for an unknown format."""
    kind = suffix(Path(files[0]))
    if kind not in FORMATS:
        raise DataUnavailable(f"{files[0]}: unknown format; known formats are {', '.join(_KNOWN)}")
    return FORMATS[kind]


def suffix(file: Path) -> str:
    """Return the suffix of the format: .jsonl for both x.jsonl and x.jsonl.gz."""
    return (file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix).lower()


def split_of(name: str) -> str | None:
    """Return the split in the name of a file or folder: train.jsonl, val_2.txt; en-00000-of-00002.parquet is `en`.

    A book named `Test of Time.txt` belongs to no split.
    """
    shard = _SHARD.match(name)
    if shard:
        return SPLITS.get(shard[1].lower(), shard[1])
    part = _PART.match(name)
    return SPLITS.get(part[1].lower()) if part else None


def _existing(path: Path, what: str) -> Path:
    if not path.exists():
        raise DataUnavailable(f"{what} is {path}, but there is no such file or folder")
    return path


def _read_map(path: Path) -> dict[str, str]:
    import yaml

    try:
        paths = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        paths = None
    if not isinstance(paths, dict) or not all(isinstance(value, str) for value in paths.values()):
        raise DataUnavailable(f"{VARIABLE} is {path}: neither a folder nor a YAML file with lines `dataset id: path`")
    return {str(name): value for name, value in paths.items()}
