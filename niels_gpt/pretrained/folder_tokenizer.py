"""The tokenizer in the folder of a public model."""

from __future__ import annotations

from niels_gpt.pretrained.model_folder import ModelFolder
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer, load_tokenizer
from niels_gpt.tokenizer.huggingface import is_byte_vocabulary


def folder_tokenizer(opened: ModelFolder) -> AnyTokenizer | None:
    """The tokenizer in the folder of a model; None if there is none.

    Raises ValueError for one that is not supported, or that has more ids than the model.
    """
    if not any((opened.path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    if opened.config.V == 256 and is_byte_vocabulary(opened.path):
        return ByteTokenizer()
    tokenizer = load_tokenizer(opened.path)
    if tokenizer.vocab_size > opened.config.V:
        raise ValueError(
            f"the tokenizer of {opened.path} has {tokenizer.vocab_size} ids, but the embedding only {opened.config.V}: "
            "this tokenizer does not belong to this model"
        )
    return tokenizer


def tokenizer_record(tokenizer: AnyTokenizer | None) -> dict[str, str]:
    """What a checkpoint records of the data of a model: the hash of its tokenizer; bytes have none."""
    return {} if tokenizer is None or tokenizer.sha256 is None else {"tokenizer": tokenizer.sha256}
