"""A Hugging Face tokenizer folder that stands for a SentencePiece vocabulary: its ids and their bytes.

Levanter takes the size of the model's vocabulary from a tokenizer, and the bytes of each id for its bits per byte. The
token caches of this project have a tokenizer of SentencePiece, and a conversion would not encode every text to the same
ids.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel


def write_id_tokenizer(folder: Path, token_bytes: Sequence[bytes | None], eos: int | None) -> None:
    """Write a tokenizer whose id i has the bytes `token_bytes[i]`; None: a special token, which has none.

    One of the ids must be the byte of a full stop: Levanter measures the bytes of an id behind one. `eos` is the id of
    the EOS token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, int] = {}
    special: dict[str, dict[str, object]] = {}
    for i, data in enumerate(token_bytes):
        name = _name(i, data, names)
        names[name] = i
        if data is None:
            special[str(i)] = {"content": name, "special": True}
    tokenizer = Tokenizer(WordLevel(names, unk_token="<0x2E>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": special,
    }
    if eos is not None:
        config["eos_token"] = next(name for name, i in names.items() if i == eos)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _name(i: int, data: bytes | None, taken: dict[str, int]) -> str:
    """The name of an id: <0x41> for the first id of a single byte, else its text. Names must differ."""
    if data is None:
        return f"<special {i}>"
    byte = f"<0x{data[0]:02X}>" if len(data) == 1 else ""
    return byte if byte and byte not in taken else data.decode("utf-8")


@functools.cache
def temporary_id_tokenizer(token_bytes: tuple[bytes | None, ...], eos: int | None) -> str:
    """The folder of such a tokenizer, which is deleted when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="niels-gpt-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_id_tokenizer(folder, token_bytes, eos)
    return str(folder)
