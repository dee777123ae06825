"""Wikitext, from the Hugging Face Hub or from local files with the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPLITS = {"train": "train", "val": "validation", "test": "test"}
"""Our names and the Hub's."""
_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}


class WikitextMissing(ValueError):
    """Wikitext can be had neither from the Hub nor from the given place."""


def load_wikitext(
    *, path: str | Path | None = None, dataset_id: str = "wikitext", config: str = "wikitext-103-raw-v1"
) -> dict[str, list[str]]:
    """{"train", "val", "test"}: the texts of each split; rows that are empty or white space are dropped.

    `path` is a folder with train, validation (and test) files instead of the Hub.
    Raises WikitextMissing (a ValueError) that says what to do where neither can be had.
    """
    splits = _load_local(Path(path)) if path is not None else _load_hub(dataset_id, config)
    return {
        ours: [text for text in splits[hub]["text"] if text and not text.isspace()] if hub in splits else []
        for ours, hub in SPLITS.items()
    }


def _load_hub(dataset_id: str, config: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(dataset_id, config)
    except (
        OSError,
        RuntimeError,
    ) as err:  # datasets raises ConnectionError, FileNotFoundError, HfHubHTTPError
        reason = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise WikitextMissing(
            f"cannot load {dataset_id} ({config}) from the Hugging Face Hub: {reason}. "
            "Either connect to it, or use local text: --wiki FOLDER (train and validation files as "
            "parquet, jsonl or txt) or --wiki embedded"
        ) from err


def local_files(folder: Path) -> dict[str, list[str]]:
    """The data files of each Hub split in a folder, by their names (train*, validation* or val*, test*).

    Raises WikitextMissing if the folder is missing or holds no train and validation files.
    """
    if not folder.is_dir():
        raise WikitextMissing(f"no folder {folder} with wikitext files (train and validation, parquet, jsonl or txt)")
    found: dict[str, list[str]] = {}
    for file in sorted(folder.iterdir()):
        if _suffix(file) in _FORMATS:
            for hub in SPLITS.values():
                if file.name.startswith("val" if hub == "validation" else hub):
                    found.setdefault(hub, []).append(str(file))
    missing = [hub for hub in ("train", "validation") if hub not in found]
    if missing:
        raise WikitextMissing(
            f"{folder} has no {' and no '.join(missing)} file; expected e.g. train.parquet and "
            "validation.parquet (also .jsonl, .jsonl.gz, .txt)"
        )
    return found


def _load_local(folder: Path) -> Any:
    import datasets

    files = local_files(folder)
    kinds = {_FORMATS[_suffix(Path(f))] for names in files.values() for f in names}
    if len(kinds) > 1:
        raise ValueError(f"{folder} mixes {' and '.join(sorted(kinds))} files; keep one kind")
    try:
        return datasets.load_dataset(kinds.pop(), data_files=files)
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetGenerationError) as err:
        raise ValueError(f"cannot read the files in {folder}: {str(err).strip().splitlines()[0]}") from err


def _suffix(file: Path) -> str:
    """The suffix that names the format: .jsonl for both x.jsonl and x.jsonl.gz."""
    return file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix
