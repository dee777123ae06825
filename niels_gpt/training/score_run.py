"""Score the model of a run on held-out data: its byte streams, or the token caches it was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from niels_gpt.cache.folder import CacheFolder
from niels_gpt.cache.formats import splits_of
from niels_gpt.cache.meta import check_meta, past_vocabulary, read_meta, split_tokens
from niels_gpt.cache.verify import stream_slice
from niels_gpt.config import RunConfig
from niels_gpt.evaluation.baselines import PRIMED_BYTES, references
from niels_gpt.evaluation.exact import Score, score_examples, score_stream
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.streams import load_streams
from niels_gpt.system.program import command
from niels_gpt.tokenizer import ByteTokenizer, text_bytes, token_sizes
from niels_gpt.training.tasks.base import eval_name
from niels_gpt.training.tasks.byte_task import SOURCES, stream_config

REFERENCE_TOKENS = 5_000_000
"""Most training tokens of a cache, the first ones, that the references read."""
EXAMPLES_PER_BATCH = 32
"""SFT examples per forward pass."""

Compare = Callable[..., dict[str, Any]]
"""A function such as `references`."""
Scores = dict[str, dict[str, Any]]
"""Name of a held-out set -> bytes, tokens, nats_per_token, bits_per_byte, perplexity and the `references`."""


class ScoreOptions(NamedTuple):
    """Which held-out data is scored, and how."""

    split: str = "val"
    """val or test."""
    stride: int | None = None
    """Distance between the starts of neighboring windows; None is T."""
    limit: int | None = None
    """Score only the first so many bytes or tokens of each held-out set."""
    precision: str = "fp32"
    primed: int = PRIMED_BYTES
    """Bytes of the training text that the compressors read first, at most."""


def score_byte_streams(
    loaded: LoadedRun, config: RunConfig, options: ScoreOptions = ScoreOptions(), *, built_in: bool = False
) -> Scores:
    """Score every held-out byte of the sources of a config.

    With split "test", only sources of data.sources that have a test part are scored. Otherwise wiki, roam and primer
    are scored too, if the run draws from one of them or if `built_in` asks for them. Raises ValueError if nothing is
    left to score.
    """
    shares = (config.train.p_train, config.train.p_val)
    names = [name for name in config.data.sources if any(p.get(name) for p in shares)]
    if options.split == "test":
        names = [name for name in names if len(config.data.sources[name].split) > 2]
    elif built_in or any(p.get(name) for p in shares for name in SOURCES):
        names = [*SOURCES, *names]
    if not names:
        raise ValueError(
            f"no source of {loaded.path} has a {options.split} part: "
            "three fractions in data.sources.NAME.split make train, val and test"
        )
    scores = {}
    for name, streams in load_streams(stream_config(config, names), T=loaded.model.config.T).items():
        held_out = streams[options.split].data[: options.limit]
        score = score_stream(loaded.model, held_out, stride=options.stride, precision=options.precision)
        compared = references(held_out, train=streams["train"].data, primed=options.primed)
        scores[eval_name(name, options.split)] = _as_dict(score) | compared
    return scores


def score_held_out(loaded: LoadedRun, config: RunConfig, options: ScoreOptions = ScoreOptions()) -> Scores:
    """Score the held-out data that the config of a run names: its byte streams or its token caches."""
    if config.task == "bytes":
        return score_byte_streams(loaded, config, options)
    return score_token_caches(loaded, config, CacheFolder(config.data.token_cache), options)


def score_token_caches(
    loaded: LoadedRun, config: RunConfig, folder: CacheFolder, options: ScoreOptions = ScoreOptions()
) -> Scores:
    """Score the held-out tokens of every pretrain cache in a folder, or the test splits of those that have one.

    A model tuned for chat is also scored on the assistant's replies in every SFT cache. Bits are per byte of text.
    Raises ValueError if the caches have another tokenizer, an id past the vocabulary, or no test split where one is
    asked for.
    """
    assert not isinstance(loaded.tokenizer, ByteTokenizer)
    if folder.tokenizer.sha256 != loaded.tokenizer.sha256:
        raise ValueError(f"{folder.path} was built with another tokenizer than that of {loaded.path}")
    sizes = token_sizes(loaded.tokenizer)

    def checked(ids: Any, path: Any) -> Any:
        """Return the ids, or raise if one is past the vocabulary."""
        if len(ids) and (highest := int(ids.max())) >= len(sizes):
            raise past_vocabulary(highest, len(sizes), path, folder.path)
        return ids

    def text(ids: np.ndarray) -> bytes:
        return text_bytes(loaded.tokenizer, ids)

    scores: Scores = {}
    for name in folder.names("pretrain"):
        cache = folder.path / "pretrain" / name
        meta = read_meta(cache / "meta.json")
        check_meta(meta, cache, tokenizer_sha256=loaded.tokenizer.sha256)
        length = split_tokens(meta, cache, options.split) if options.split in splits_of(meta) else 0
        length = min(length, options.limit or length)
        if length < 2:
            continue
        ids = checked(stream_slice(cache, options.split, 0, length), cache / options.split)
        score = score_stream(loaded.model, ids, stride=options.stride, token_sizes=sizes, precision=options.precision)
        whole = split_tokens(meta, cache, "train")
        train = checked(stream_slice(cache, "train", 0, min(whole, REFERENCE_TOKENS)), cache / "train")
        compared = references(text(ids), train=text(train), primed=options.primed, whole=len(train) == whole)
        scores[eval_name(name, options.split)] = _as_dict(score) | compared
    if options.split == "test":
        if not scores:
            build = command("cache", "build", "wikitext", "--test", "--cache-dir", folder.path)
            raise ValueError(f"no cache of {folder.path} has a test split: {build}")
        return scores
    for name in folder.names("sft") if config.task == "sft" else ():
        if not read_meta(folder.path / "sft" / name / "meta.json").get("val_examples"):
            continue  # nothing is held out
        dataset = folder.sft(name, "val", T=loaded.model.config.T)
        rows = dataset.usable.tolist()
        starts = range(0, len(rows), EXAMPLES_PER_BATCH)
        batches = (dataset.gather(rows[i : i + EXAMPLES_PER_BATCH]) for i in starts)
        pairs = ((checked(x, dataset.tokens_path), targets) for x, _, targets in batches)
        score = score_examples(loaded.model, pairs, token_sizes=sizes, precision=options.precision)
        scores[f"{eval_name(name)} (replies)"] = _as_dict(score)
    return scores


def held_out_references(
    config: RunConfig, fingerprint: Mapping[str, str] | None, *, limit: int, compare: Compare = references
) -> Scores:
    """Return sizes and `references` of the held-out sets of p_val and p_train, which need no model.

    A set is {bytes, tokens, baselines, ...} of its first `limit` bytes or tokens. fingerprint: the task's, of the run;
    None: unknown. compare: in place of `references`. Raises ValueError or OSError if the data is gone, or has changed
    since.
    """
    shares = (config.train.p_val, config.train.p_train)
    names = list(dict.fromkeys(name for p in shares for name, share in p.items() if share))
    found: Scores = {}
    if config.task == "bytes":
        for name, streams in load_streams(stream_config(config, names), T=config.model.T).items():
            _check_unchanged(name, streams["train"].sha256, fingerprint)
            data = streams["val"].data[:limit]
            compared = compare(data, train=streams["train"].data)
            found[eval_name(name)] = {"bytes": len(data), "tokens": len(data), **compared}
    elif config.task == "pretrain":
        folder = CacheFolder(config.data.token_cache)
        for name in names:
            dataset = folder.pretrain(name, "train", T=config.model.T)
            _check_unchanged(name, dataset.fingerprint(), fingerprint)
            cache = folder.path / "pretrain" / name
            meta = read_meta(cache / "meta.json")
            length, train_length = (split_tokens(meta, cache, split) for split in ("val", "train"))
            ids = stream_slice(cache, "val", 0, min(length, limit))
            train = stream_slice(cache, "train", 0, min(train_length, REFERENCE_TOKENS))
            text = text_bytes(folder.tokenizer, ids)
            compared = compare(text, train=text_bytes(folder.tokenizer, train), whole=len(train) == train_length)
            found[eval_name(name)] = {"bytes": len(text), "tokens": len(ids), **compared}
    return found


def _check_unchanged(name: str, sha256: str, fingerprint: Mapping[str, str] | None) -> None:
    if fingerprint is not None and fingerprint.get(name, sha256) != sha256:
        raise ValueError(f"the source {name} has changed since the run")


def _as_dict(score: Score) -> dict[str, float]:
    return {
        "bytes": score.tokens if score.bytes is None else score.bytes,
        "tokens": score.tokens,
        "nats_per_token": score.nats_per_token,
        "bits_per_byte": score.bits_per_byte,
        "perplexity": score.perplexity,
    }
