"""`niels-gpt eval` and `niels-gpt batch show`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from niels_gpt.cache.folder import CacheFolder
from niels_gpt.cache.meta import check_meta, past_vocabulary, read_meta
from niels_gpt.cache.verify import stream_slice
from niels_gpt.cli.tables import show_table
from niels_gpt.cli.train import with_data
from niels_gpt.config import RunConfig
from niels_gpt.config.yaml_file import config_from_dict, to_dict
from niels_gpt.evaluation.baselines import reference_bits
from niels_gpt.evaluation.exact import Score, score_examples, score_stream
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import (
    LoadedRun,
    check_unchanged,
    find_run,
    load_run,
)
from niels_gpt.tokenizer import Tokenizer, text_bytes, token_sizes
from niels_gpt.training.tasks.base import eval_name
from niels_gpt.training.tasks.byte_task import SOURCES, open_byte_task
from niels_gpt.training.tasks.documents import uses_bytes
from niels_gpt.training.tasks.registry import open_task


def run_eval(
    *,
    run: Path | None,
    checkpoint: Path | None,
    split: str,
    stride: int | None,
    precision: str,
    data: Mapping[str, str | None],
    sources: Sequence[str],
    device: str,
    tokenizer: Path | None,
    token_cache: Path | None,
    limit: int | None,
    as_json: bool,
) -> None:
    for option, value, allowed in (("split", split, ("val", "test")), ("precision", precision, ("fp32", "bf16"))):
        if value not in allowed:
            raise ValueError(f"--{option} must be {' or '.join(allowed)}, got {value!r}")
    loaded = load_run(run, checkpoint, device, tokenizer)
    how = ScoreOptions(split, stride, limit, precision)
    if isinstance(loaded.tokenizer, Tokenizer):
        scores = score_caches(loaded, how, token_cache=token_cache)
    else:
        scores = score_all(loaded, how, data=data, sources=sources)
    if as_json:
        result = {"checkpoint": str(loaded.path), "step": loaded.step, "stride": stride or loaded.model.config.T}
        print(json.dumps({**result, "precision": precision, "scores": scores}, indent=2))
        return
    print(f"{loaded.path} after {loaded.step} updates; bits per byte, less is better")
    show_scores(scores)


class ScoreOptions(NamedTuple):
    """What of the held-out text is scored, and how."""

    split: str = "val"
    stride: int | None = None
    limit: int | None = None
    """Only so many bytes or tokens of each held-out set."""
    precision: str = "fp32"


def score_all(
    loaded: LoadedRun,
    how: ScoreOptions = ScoreOptions(),
    *,
    data: Mapping[str, str | None],
    sources: Sequence[str] = (),
) -> dict[str, dict[str, float]]:
    """The exact score of a model on every held-out stream, or on the test parts of its sources, with the reference
    points. Raises ValueError where no source has a test part."""
    config = with_data(loaded.home.read_config() if loaded.home else RunConfig(), data, sources)
    shares = (config.train.p_train, config.train.p_val)
    own = {name: source for name, source in config.data.sources.items() if any(p.get(name) for p in shares)}
    asked = any(data.get(name) for name in SOURCES) or any(p.get(name) for p in shares for name in SOURCES)
    usual = SOURCES if asked else ()
    names = (*usual, *own) if how.split == "val" else [name for name, source in own.items() if len(source.split) > 2]
    if not names:
        raise ValueError(
            f"no source of {loaded.path} has a test part: three numbers in data.sources.NAME.split make one"
        )
    everything = {name: 1 / len(names) for name in names}
    tree = {"train": {"p_train": everything, "p_val": everything}, "model": {"T": loaded.model.config.T}}
    task = open_byte_task(config_from_dict({**tree, "data": to_dict(config.data)}))
    scores = {}
    for name, streams in task.streams.items():
        held_out = streams[how.split].data[: how.limit]
        score = score_stream(loaded.model, held_out, stride=how.stride, precision=how.precision)
        scores[eval_name(name, how.split)] = _with_references(score, held_out, streams["train"].data)
    return scores


REFERENCE_TOKENS = 5_000_000
"""Training tokens that the unigram reference of a cache is fitted on, at most."""


def score_caches(
    loaded: LoadedRun,
    how: ScoreOptions = ScoreOptions(),
    *,
    token_cache: Path | None,
) -> dict[str, dict[str, float]]:
    """The exact score of a model on the held-out tokens of every pretrain cache, or on the test splits of those that
    have one; and, if it was tuned for chat, on what the assistant says in every SFT cache. Bits are per byte of the
    text itself. Raises ValueError where no cache has a test split."""
    assert isinstance(loaded.tokenizer, Tokenizer)
    run = loaded.run or RunFolder(loaded.path.parent.parent)  # a checkpoint that is named itself usually lies in a run
    config = run.read_config() if run.exists else RunConfig()
    folder = CacheFolder(token_cache or config.data.token_cache)
    if folder.tokenizer.sha256 != loaded.tokenizer.sha256:
        raise ValueError(f"{folder.path} was built with another tokenizer than that of {loaded.path}")
    sizes = token_sizes(loaded.tokenizer)

    def text(ids: np.ndarray) -> bytes:
        return text_bytes(loaded.tokenizer, ids)

    def known(ids: Any, where: Path) -> Any:
        if len(ids) and (highest := int(ids.max())) >= len(sizes):
            raise past_vocabulary(highest, len(sizes), where, folder.path)
        return ids

    T = loaded.model.config.T
    scores: dict[str, dict[str, float]] = {}
    for name in folder.names("pretrain"):
        place = folder.path / "pretrain" / name
        meta = read_meta(place / "meta.json")
        check_meta(meta, place, tokenizer_sha256=loaded.tokenizer.sha256)
        length = meta.get(f"{how.split}_tokens", 0)
        length = min(length, how.limit or length)
        if length >= 2:
            ids = known(stream_slice(place, how.split, 0, length), place / how.split)
            score = score_stream(loaded.model, ids, stride=how.stride, token_sizes=sizes, precision=how.precision)
            train = known(stream_slice(place, "train", 0, min(meta["train_tokens"], REFERENCE_TOKENS)), place / "train")
            scores[eval_name(name, how.split)] = _with_references(score, text(ids), text(train))
    if how.split == "test":
        if not scores:
            raise ValueError(f"no cache of {folder.path} has a test split: niels-gpt cache build wikitext --test")
        return scores
    for name in folder.names("sft") if config.task == "sft" else ():
        if not read_meta(folder.path / "sft" / name / "meta.json").get("val_examples"):
            continue  # nothing is held out
        dataset = folder.sft(name, "val", T=T)
        rows = dataset.usable.tolist()
        batches = (dataset.gather(rows[i : i + 32]) for i in range(0, len(rows), 32))
        pairs = ((known(x, dataset.tokens_path), targets) for x, _, targets in batches)
        score = score_examples(loaded.model, pairs, token_sizes=sizes, precision=how.precision)
        scores[f"{eval_name(name)} (replies)"] = _numbers(score)
    return scores


def _numbers(score: Score) -> dict[str, float]:
    return {
        "bytes": score.tokens if score.bytes is None else score.bytes,
        "tokens": score.tokens,
        "nats_per_token": score.nats_per_token,
        "bits_per_byte": score.bits_per_byte,
        "perplexity": score.perplexity,
    }


def _with_references(score: Score, held_out: bytes, train: bytes) -> dict[str, float]:
    return _numbers(score) | {f"{k}_bits": v for k, v in reference_bits(held_out, train=train).items()}


def show_scores(scores: dict[str, dict[str, float]]) -> None:
    """The table of `eval`."""
    table = Table(box=None, pad_edge=False)
    table.add_column("held out")
    bytes_only = all(s["bytes"] == s["tokens"] for s in scores.values())
    unit = "byte" if bytes_only else "token"
    names = [
        "bytes",
        *([] if bytes_only else ["tokens"]),
        f"nats/{unit}",
        "ppl",
        "model",
        "xz",
        "gzip",
        "unigram",
        "uniform",
    ]
    for name in names:
        table.add_column(name, justify="right", style="bold" if name == "model" else None)
    for name, s in scores.items():
        sizes = [s["bytes"]] if bytes_only else [s["bytes"], s["tokens"]]
        numbers = [*(f"{size:,}" for size in sizes), f"{s['nats_per_token']:.3f}", f"{s['perplexity']:.2f}"]
        bits = [s.get(k) for k in ("bits_per_byte", "xz_bits", "gzip_bits", "unigram_bits", "uniform_bits")]
        table.add_row(name, *numbers, *("" if b is None else f"{b:.3f}" for b in bits))
    show_table(table, width=120)


def run_batch_show(*, run: Path | None, step: int, chars: int, as_json: bool) -> None:
    folder = find_run(run)
    config = folder.read_config()
    task = open_task(config)
    trained_on = folder.newest_checkpoint("cpu")[1].get("extra", {}).get("data", {})
    check_unchanged(task.fingerprint(), trained_on, str(folder.path))
    rows = task.origins(step)
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2, ensure_ascii=False))
        return
    beyond = " (past the end of the run)" if step >= config.train.total_steps else ""
    unit = "bytes" if uses_bytes(config) else "tokens"
    what = "spans for frames" if config.task == "splice" else "rows"
    print(f"step {step} of {config.train.total_steps}{beyond}: {len(rows)} {what} of {config.model.T} {unit}")
    for row in rows:
        print(f"\nrow {row.row}  {row.source}  {row.document}  offset {row.offset}  (stream {row.stream_offset})")
        text = row.text if not chars or len(row.text) <= chars else row.text[:chars] + "..."
        print(repr(text)[1:-1])
