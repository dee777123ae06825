"""The tokenizer in the folder of a public model."""

from __future__ import annotations

from niels_gpt.pretrained.model_folder import ModelFolder
from niels_gpt.system.untrusted_files import read_untrusted
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer, has_tokenizer, load_tokenizer
from niels_gpt.tokenizer.foreign import FILES, JSON_FILE
from niels_gpt.tokenizer.huggingface import is_byte_vocabulary, parse_tokenizer_json
from niels_gpt.tokenizer.limits import number_of_ids


def folder_tokenizer(opened: ModelFolder) -> AnyTokenizer | None:
    """The tokenizer in the folder of a model; None if there is none.

    Raises ValueError for one that is not supported, or that has more ids than the model.
    """
    if not has_tokenizer(opened.path):
        return None
    file, V = opened.path / JSON_FILE, opened.config.V
    data = read_untrusted(file, FILES[JSON_FILE])
    if data is not None:
        _check_size(number_of_ids(parse_tokenizer_json(data, str(file))), opened)  # a large one takes long to load
        if V == 256 and is_byte_vocabulary(data, str(file)):
            return ByteTokenizer()
    tokenizer = load_tokenizer(opened.path)
    _check_size(tokenizer.vocab_size, opened)
    return tokenizer


def _check_size(ids: int, opened: ModelFolder) -> None:
    if ids > opened.config.V:
        raise ValueError(
            f"the tokenizer of {opened.path} has {ids} ids, but the embedding only {opened.config.V}: this tokenizer "
            "does not belong to this model"
        )


def tokenizer_record(tokenizer: AnyTokenizer | None) -> dict[str, str]:
    """What a checkpoint records of the data of a model: the hash of its tokenizer; bytes have none."""
    return {} if tokenizer is None or tokenizer.sha256 is None else {"tokenizer": tokenizer.sha256}
