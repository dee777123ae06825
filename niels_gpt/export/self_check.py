"""Compare the tokenizer of an exported folder, as transformers loads it, with ours on hard texts.

transformers chooses the class of a tokenizer by the type of the model, too, so that a right tokenizer.json is not
enough. It runs in a separate process: importing it takes about 4 s of computing, and prints.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from niels_gpt.export.pieces import HARD_TEXTS
from niels_gpt.export.tokenizer_json import compare_ids
from niels_gpt.tokenizer import SPECIAL_TOKENS, AnyTokenizer, ForeignTokenizer, Tokenizer
from niels_gpt.tokenizer.foreign import JSON_FILE

WORKER = Path(__file__).with_name("self_check_worker.py")
TEXTS = 200
SECONDS = 600
_FRAGMENTS = (
    *HARD_TEXTS[1:],
    *(" " * 3, " " * 17, "\n" * 5, "\t \t", "\r\n\r\n", "\u00a0\u2003\u3000", "\u2028\u2029\x85"),
    *("7", "1234567890123", "٣٤٥ १२३ Ⅷ ²", "-0.5e10", "a1b2c3"),
    *("👍🏽", "🏳️‍🌈", "☕️", "\U0001f9ff\U0001f9ff", "👨‍👩‍👧"),
    *("\x00", "\x1b[31m", "\x7f\x08", "\ufeff", "\u200d\u200e\u202e", "\ufffd\ufffe\ue000"),
    *("a\u0300\u0316", "\u1100\u1161\u11a8", "Å Å", "ſﬀ Ǆ", "ÅÄÖ"),
    *("<|im_start|>", "<|endoftext|>", "<|eot_id|>", "</s>", "<s>", "[INST]", "<unk>", "<0x0A>", "<|", "|>", "<pad>"),
    *(
        "don't WE'LL I'M",
        "Straße",
        "ไทย",
        "עִבְרִית",
        "हिन्दी",
        "日本語テキスト",
        "aaaaaaaaaaaaaaaa",
        "x=y;{}[]()",
        "_ __ ___",
    ),
)


def check_folder_ids(folder: Path, tokenizer: AnyTokenizer) -> str | None:
    """Compare the ids of hard texts; return the version of transformers, or None if it is not installed.

    Raises ValueError if ids differ, or transformers cannot load the tokenizer.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    texts = hard_texts(tokenizer)
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONIOENCODING": "utf-8"}
    command, given = [sys.executable, "-P", str(WORKER)], json.dumps([str(folder), texts]).encode()
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, timeout=SECONDS, check=True, env=os.environ | quiet
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as err:
        lines = (err.stderr or b"").decode("utf-8", "replace").strip().splitlines() or [str(err)]
        raise ValueError(f"not exported: transformers cannot load the tokenizer: {lines[-1][:300]}") from None
    version, kind, found = json.loads(done.stdout.splitlines()[-1])
    start = list(tokenizer.document_start)
    if any(ids[: len(start)] != start for ids in found):
        raise ValueError(f"not exported: the {kind} of transformers {version} does not begin a text with {start}")
    remedy = ""
    if isinstance(tokenizer, ForeignTokenizer) and JSON_FILE not in tokenizer.files:
        remedy = " (it has no tokenizer.json, which is computed as it is: import the model with one)"
    problem = f"not exported: the {kind} of transformers {version} gives other ids{remedy}"
    compare_ids(texts, [ids[len(start) :] for ids in found], tokenizer, problem)
    return str(version)


def hard_texts(tokenizer: AnyTokenizer) -> list[str]:
    """Return TEXTS texts, the same each time for a tokenizer: sequences of hard fragments and special strings."""
    special = [name for name in tokenizer.special_token_ids() if name not in ("eot", "bos")]
    if isinstance(tokenizer, Tokenizer):
        special = [*SPECIAL_TOKENS]
    fragments = [*_FRAGMENTS, *special, *(text[:-1] for text in special), *(text.upper() for text in special)]
    texts = dict.fromkeys(fragments)
    for number in range(2 * TEXTS):  # more than enough, should some be equal
        digest = hashlib.sha256(str(number).encode()).digest()
        chosen = [int.from_bytes(digest[n : n + 2]) % len(fragments) for n in range(0, 4 + 2 * (number % 6), 2)]
        texts["".join(fragments[index] for index in chosen)] = None
    return list(texts)[:TEXTS]
