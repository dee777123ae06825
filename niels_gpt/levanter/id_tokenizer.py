"""A Hugging Face tokenizer folder that stands for a vocabulary of another kind: its size and its EOS, without text.

Levanter takes the size of the model's vocabulary from a tokenizer. The token caches of this project have one of
SentencePiece, and a conversion would not encode every text to the same ids.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel


def write_id_tokenizer(folder: Path, size: int, eos: int | None) -> None:
    """Write a tokenizer of `size` ids, named <0>, <1>, ...; `eos` is the id of its EOS token."""
    folder.mkdir(parents=True, exist_ok=True)
    Tokenizer(WordLevel({f"<{i}>": i for i in range(size)}, unk_token="<0>")).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if eos is not None:
        config["eos_token"] = f"<{eos}>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


@functools.cache
def temporary_id_tokenizer(size: int, eos: int | None) -> str:
    """The folder of such a tokenizer, which is deleted when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="niels-gpt-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_id_tokenizer(folder, size, eos)
    return str(folder)
