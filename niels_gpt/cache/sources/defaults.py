"""Default values of a build; each has an option of `niels-gpt cache build-all`."""

from __future__ import annotations

SEED = 42
SHARD_BYTES = 128 * 1024 * 1024
FINEWEB_CONFIG = "CC-MAIN-2024-10"
FINEWEB_TRAIN_TOKENS = 200_000_000
FINEWEB_VAL_TOKENS = 5_000_000
FINEWEB_SHUFFLE_BUFFER = 10_000
GUTENBERG_TRAIN_TOKENS = 20_000_000
GUTENBERG_VAL_TOKENS = 500_000
ROAM_VAL_FRAC = 0.10
SFT_VAL_FRAC = 0.10
VOCAB_SIZE = 16_000
TOKENIZER_DOCUMENTS = 20_000
"""Documents per source that a new tokenizer is trained on."""
