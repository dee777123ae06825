"""Encode texts with a tokenizer of others in a process with limits. Run as a script by `limits.py`, not imported."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from niels_gpt.system.untrusted_files import answer_lines

library = importlib.import_module(sys.argv[1])


def encode(request: tuple[str, list[str]]) -> None:
    """Encode each text. What the library itself refuses is found, and named, where the tokenizer is used."""
    model, texts = request
    try:
        tokenizer: Any
        if sys.argv[1] == "tokenizers":
            tokenizer = library.Tokenizer.from_str(model)
        else:
            tokenizer = library.SentencePieceProcessor(model_proto=bytes.fromhex(model))
        for text in texts:
            tokenizer.encode(text)
    except MemoryError:
        raise
    except Exception:
        pass


if __name__ == "__main__":
    answer_lines(encode)
