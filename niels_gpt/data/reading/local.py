"""Local files with the rows of a Hub dataset: where they lie, and which belongs to which split.

A folder may look as people keep such things: `train.jsonl.gz`, `train-00000-of-00002.parquet`,
`validation/part.parquet`, a sub-folder per config. Files that name no split are the training split.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from niels_gpt.system.files import expand_home

VARIABLE = "NIELS_GPT_DATA"
"""The environment variable: a folder with one sub-folder per Hub id, or a YAML file `id: path`."""
FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}
"""File suffix -> the `datasets` builder that reads it; .gz may follow, but for parquet."""
ROW_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
"""Files of rows; .txt files are texts."""
SPLITS = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation",
          "dev": "validation", "test": "test"}  # fmt: skip
"""What a file or folder name may begin with -> the Hub's name of the split."""


class DataUnavailable(OSError, ValueError):
    """A dataset can be had neither from the Hub nor from here; the message says what to do."""

    def __str__(self) -> str:
        return str(self.args[0])


_NOT_DATA = {"readme", "license", "licence", "notice", "changelog"}
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.")
_PART = re.compile(r"([a-z]+)(?:[-_.]?(?:\d+|of|part|shard|chunk))*(?:\.|$)", re.IGNORECASE)


def find_local(dataset_id: str, path: str | Path | None = None) -> Path | None:
    """Where the rows of a Hub id lie here: `path` if given, else what NIELS_GPT_DATA says; None: nowhere.

    Raises DataUnavailable for a path that does not exist, or a NIELS_GPT_DATA that cannot be used.
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
    places = _read_map(root)
    found = next((places[name] for name in names if name in places), None)
    if found is None:
        return None
    return _existing(root.parent / expand_home(found), f"{dataset_id} in {root}")


def find_files(path: Path, config: str | None = None) -> dict[str, list[str]]:
    """split -> its files, sorted, all of one format. Of a folder the sub-folder `config`, if it has one.

    A file that is named itself serves any split and stands under "", whatever it is called.

    Raises DataUnavailable where there is no file of a known format, or where formats are mixed.
    """
    if not path.is_dir():
        if not path.is_file():
            raise DataUnavailable(f"{path} is neither a file nor a folder; write the rows to a file first")
        return {"": [str(path)]}
    folders = [path / part / config for part in ("", "data") if config] + [path]
    root = next(folder for folder in folders if folder.is_dir())
    if config and root == path:
        _refuse_other_configs(path, config)

    found: dict[str, list[str]] = {}
    for name in list_files(root, (*ROW_SUFFIXES, ".txt", ".txt.gz"), visible_only=True):
        file = Path(name)
        if file.stem.lower() not in _NOT_DATA:
            parents = (split_of(part) for part in reversed(file.relative_to(root).parts[:-1]))
            split = split_of(file.name) or next(filter(None, parents), None) or "train"
            found.setdefault(split, []).append(name)
    if not found:
        raise DataUnavailable(f"{root} holds no data file; expected .parquet, .jsonl, .jsonl.gz or .txt")
    kinds = sorted({suffix(Path(file)) for files in found.values() for file in files})
    if len({FORMATS[kind] for kind in kinds}) > 1:
        raise DataUnavailable(f"{root} mixes {' and '.join(kinds)} files; keep one kind, or name the file itself")
    return found


def list_files(root: Path, suffixes: tuple[str, ...], *, visible_only: bool = False) -> list[str]:
    """The paths of all regular files with one of the suffixes below a folder, sorted as strings.

    `visible_only` passes over hidden files and folders, and takes .TXT for .txt.
    Raises OSError for a folder below that cannot be read.
    """

    def refuse(err: OSError) -> None:
        raise err  # os.walk would leave an unreadable folder out in silence

    paths = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        if visible_only:
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            names = [name for name in names if not name.startswith(".")]
        for name in names:
            path = os.path.join(folder, name)  # noqa: PTH118 (a quarter of the time of Path, per file)
            if (name.lower() if visible_only else name).endswith(suffixes) and os.path.isfile(path):  # noqa: PTH113
                paths.append(path)
    return sorted(paths)


def _refuse_other_configs(path: Path, config: str) -> None:
    """Raise DataUnavailable where a folder keeps its files in sub-folders by config, and this one is not there."""
    base = path / "data" if (path / "data").is_dir() else path
    entries = [entry for entry in sorted(base.iterdir()) if not entry.name.startswith(".")]
    others = [entry.name for entry in entries if entry.is_dir() and split_of(entry.name) is None]
    if others and not any(entry.is_file() and suffix(entry) in FORMATS for entry in entries):
        raise DataUnavailable(
            f"{path} has no {config}; it has {', '.join(others)}: choose one, or give its folder as the path"
        )


def choose_split(files: dict[str, list[str]], split: str, where: Path) -> list[str]:
    """The files of a split.

    Raises DataUnavailable that names the splits there are.
    """
    if split in files or "" in files:
        return files.get(split) or files[""]
    raise DataUnavailable(f"{where} has no split {split!r}; it has {', '.join(sorted(files))}")


def builder(files: list[str]) -> str:
    """The `datasets` builder that reads these files. Raises DataUnavailable for an unknown format."""
    kind = suffix(Path(files[0]))
    if kind not in FORMATS:
        raise DataUnavailable(f"{files[0]}: not a format that can be read; use .parquet, .jsonl, .jsonl.gz or .txt")
    return FORMATS[kind]


def suffix(file: Path) -> str:
    """The suffix that names the format: .jsonl for both x.jsonl and x.jsonl.gz."""
    return (file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix).lower()


def split_of(name: str) -> str | None:
    """The split that a file or folder is named for: `train.jsonl`, `val_2.txt`, `en-00000-of-00002.parquet` -> en.

    A book called `Test of Time.txt` is not for a split.
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
        places = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        places = None
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise DataUnavailable(f"{VARIABLE} is {path}: neither a folder nor a YAML file with lines `dataset id: path`")
    return {str(name): place for name, place in places.items()}
