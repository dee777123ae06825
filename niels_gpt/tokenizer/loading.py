"""Load a tokenizer: ours, or one of another project."""

from __future__ import annotations

from pathlib import Path

from niels_gpt.system.untrusted_files import is_untrusted_file, read_untrusted
from niels_gpt.tokenizer.foreign import FILES, JSON_FILE, MODEL_FILE, ForeignTokenizer, load_foreign
from niels_gpt.tokenizer.special import SPECIAL_TOKENS
from niels_gpt.tokenizer.subword import Tokenizer, load_subword
from niels_gpt.tokenizer.vocabulary_files import has_vocabulary_files


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
    """Whether a folder such as `tokenizer/` of a cache holds a tokenizer. Raises as `is_untrusted_file`."""
    named = (folder / "spm.model").is_file() or any(
        is_untrusted_file(folder / name) for name in (JSON_FILE, MODEL_FILE)
    )
    return named or has_vocabulary_files(folder)


def _is_ours(path: Path) -> bool:
    """Whether a SentencePiece file has our special tokens."""
    return SPECIAL_TOKENS[0].encode() in (read_untrusted(path, FILES[MODEL_FILE]) or b"")
