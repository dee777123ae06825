"""Encode texts with the tokenizer of a folder as transformers loads it. Run as a script by `self_check.py`."""

from __future__ import annotations

import json
import sys

if __name__ == "__main__":
    import transformers

    folder, texts = json.load(sys.stdin)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    ids = [tokenizer.encode(text) for text in texts]
    print(json.dumps([transformers.__version__, type(tokenizer).__name__, ids]))
