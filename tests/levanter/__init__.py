"""Helpers for tests of the Levanter adapter: documents, Levanter caches, and runs of a tiny model."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

WORDS = ["the", "a", "note", "model", "byte", "loss", "step", "learns", "from", "reads", "writes", "small", "large"]
WORDS += ["never", "again", "and", "so", "then"]


def take(dataset: Any, positions: Any) -> list[Any]:
    """Examples of a Levanter dataset."""
    return asyncio.run(dataset.get_batch(positions))


def arrays(examples: list[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, loss weights, segment ids) of examples, stacked."""
    segments = [example.attn_mask.segment_ids for example in examples]
    for query, key in segments:
        np.testing.assert_array_equal(query.array, key.array)
    return (
        np.stack([np.asarray(example.tokens.array) for example in examples]),
        np.stack([np.asarray(example.loss_weight.array) for example in examples]),
        np.stack([np.asarray(query.array) for query, _ in segments]),
    )


def texts(number: int = 5) -> list[str]:
    """Documents of 40, 50, ... words."""
    draw = np.random.default_rng(3)
    return [" ".join(draw.choice(WORDS, 40 + 10 * i)) for i in range(number)]


def write_word_tokenizer(folder: Path, *, extra: Sequence[str] = ()) -> Path:
    """A Hugging Face tokenizer folder with one id per word; the last is <eos>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate([*WORDS, *extra, "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="the"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    tokenizer.add_special_tokens(["<eos>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def word_ids(text: str) -> list[int]:
    """The ids of a text with the tokenizer above, and its <eos>."""
    return [*(WORDS.index(word) for word in text.split()), len(WORDS)]


def write_levanter_cache(folder: Path, documents: list[list[int]]) -> Path:
    """A Levanter cache of these documents, as the train split of a dataset."""
    from levanter.store.cache import SerialCacheWriter

    exemplar = {"input_ids": np.zeros(0, dtype=np.int32)}
    with SerialCacheWriter(str(folder / "train"), exemplar) as writer:
        writer.write_batch([{"input_ids": np.array(ids, dtype=np.int32)} for ids in documents])
    return folder


def run_config(folder: Path, data: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The config of a run of a two-layer Llama on the CPU."""
    trainer = {
        "id": "run",
        "tracker": {"type": "json_logger"},
        "mp": "f32",
        "seed": 11,
        "train_batch_size": 8,
        "num_train_steps": 12,
        "steps_per_eval": 1000,
        "require_accelerator": False,
        "checkpointer": {"base_path": str(folder / "checkpoints"), "save_interval": "60m"},
        "log_dir": str(folder / "logs"),
    }
    model = {"type": "llama", "max_seq_len": 64, "hidden_dim": 32, "intermediate_dim": 64, "num_layers": 2}
    return {
        "data": {"eval_examples": 0} | data if "type" in data else data,
        "model": model | {"num_heads": 2, "num_kv_heads": 1},
        "trainer": trainer | options.pop("trainer", {}),
        "optimizer": {
            "type": "adam",
            "learning_rate": 1e-2,
            "lr_schedule": "constant",
            "warmup": 5,
            "weight_decay": 0.0,
        },
    } | options


def write_config(path: Path, config: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def parse_losses(lines: Any) -> dict[int, float]:
    """Loss by step, of the lines that Levanter's json_logger writes; it leaves out the first steps of a process."""
    losses = {}
    for line in lines:
        with contextlib.suppress(ValueError):
            record = json.loads(line[line.index("{") :])
            if "train/loss" in record.get("metrics", {}):
                losses[record["step"]] = record["metrics"]["train/loss"]
    return losses


def train(config: Path, *overrides: str) -> dict[int, float]:
    """Run the entry point in this process; the loss of every step."""
    from niels_gpt.levanter import train_lm

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("levanter.json_logger")
    logger.addHandler(handler)
    try:
        train_lm.run([str(config), *overrides])
    finally:
        logger.removeHandler(handler)
    return parse_losses(lines)
