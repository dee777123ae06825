"""Load a tokenizer: ours, or one of another project."""

from __future__ import annotations

from pathlib import Path

from niels_gpt.tokenizer.foreign import JSON_FILE, MODEL_FILE, ForeignTokenizer, load_foreign
from niels_gpt.tokenizer.special import SPECIAL_TOKENS
from niels_gpt.tokenizer.subword import Tokenizer, load_subword


def load_tokenizer(model_path: str | Path) -> Tokenizer | ForeignTokenizer:
    """Load a tokenizer from `spm.model`, from `tokenizer.json`, or from the folder that contains one of them.

    A `tokenizer.model` is ours if it has our special tokens, else one of another project.
    Raises FileNotFoundError, or ValueError for a file that is damaged, is of a type that is not supported, or differs
    from the `meta.json` beside it.
    """
    path = Path(model_path)
    if path.is_dir():
        if (path / "spm.model").is_file() or not has_tokenizer(path):
            return load_subword(path / "spm.model")
        ours = not (path / JSON_FILE).is_file() and _is_ours(path / MODEL_FILE)
        return load_subword(path / MODEL_FILE) if ours else load_foreign(path)
    foreign = path.suffix == ".json" or (path.name == MODEL_FILE and not _is_ours(path))
    return load_foreign(path) if foreign and path.is_file() else load_subword(path)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder such as `tokenizer/` of a cache holds a tokenizer."""
    return any((folder / name).is_file() for name in ("spm.model", JSON_FILE, MODEL_FILE))


def _is_ours(path: Path) -> bool:
    """Whether a SentencePiece file has our special tokens."""
    return path.is_file() and SPECIAL_TOKENS[0].encode() in path.read_bytes()
