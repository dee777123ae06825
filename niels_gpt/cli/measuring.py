"""`niels-gpt eval` and `niels-gpt batch show`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from niels_gpt.cli.runs import Loaded, find_run, load
from niels_gpt.cli.training import with_data
from niels_gpt.config import RunConfig
from niels_gpt.config_file import config_from_dict
from niels_gpt.evaluation.baselines import reference_bits
from niels_gpt.evaluation.exact import score_stream
from niels_gpt.train.task import SOURCES, ByteTask, eval_name, open_task


def run_eval(
    *,
    run: Path | None,
    checkpoint: Path | None,
    stride: int | None,
    data: Mapping[str, str | None],
    device: str,
    as_json: bool,
) -> None:
    loaded = load(run, checkpoint, device)
    scores = score_all(loaded, data=data, stride=stride)
    if as_json:
        result = {"checkpoint": str(loaded.path), "step": loaded.step, "stride": stride or loaded.model.config.T}
        print(json.dumps({**result, "scores": scores}, indent=2))
        return
    print(f"{loaded.path} after {loaded.step} updates; bits per byte, less is better")
    show_scores(scores)


def score_all(
    loaded: Loaded, *, data: Mapping[str, str | None], stride: int | None = None
) -> dict[str, dict[str, float]]:
    """The exact score of a model on every held-out stream, with the reference points."""
    config = loaded.run.read_config() if loaded.run is not None else RunConfig()
    shares = (config.train.p_train, config.train.p_val)
    names = (*SOURCES, *(name for name in config.data.sources if any(p.get(name) for p in shares)))
    everything = {name: 1 / len(names) for name in names}
    tree = {"train": {"p_train": everything, "p_val": everything}, "model": {"T": loaded.model.config.T}}
    whole = config_from_dict({**tree, "data": dataclasses.asdict(with_data(config, data).data)})
    task = open_task(whole)
    scores = {}
    for name, streams in task.streams.items():
        score = score_stream(loaded.model, streams["val"].data, stride=stride)
        scores[eval_name(name)] = {
            "bytes": score.tokens,
            "nats_per_token": score.nats_per_token,
            "bits_per_byte": score.bits_per_byte,
            "perplexity": score.perplexity,
            **{f"{k}_bits": v for k, v in reference_bits(streams["val"].data, train=streams["train"].data).items()},
        }
    return scores


def show_scores(scores: dict[str, dict[str, float]]) -> None:
    """The table of `eval`."""
    table = Table(box=None, pad_edge=False)
    table.add_column("held out")
    for name in ("bytes", "nats/byte", "ppl", "model", "xz", "gzip", "unigram", "uniform"):
        table.add_column(name, justify="right", style="bold" if name == "model" else None)
    for name, s in scores.items():
        bits = [s[k] for k in ("bits_per_byte", "xz_bits", "gzip_bits", "unigram_bits", "uniform_bits")]
        numbers = [f"{s['bytes']:,}", f"{s['nats_per_token']:.3f}", f"{s['perplexity']:.2f}"]
        table.add_row(name, *numbers, *(f"{b:.3f}" for b in bits))
    Console(highlight=False).print(table)


def run_batch_show(*, run: Path | None, step: int, chars: int, as_json: bool) -> None:
    folder = find_run(run)
    config = folder.read_config()
    task = open_task(config)
    _check_unchanged(task, folder.newest_checkpoint("cpu")[1], str(folder.path))
    rows = task.origins(step)
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2, ensure_ascii=False))
        return
    beyond = " (past the end of the run)" if step >= config.train.total_steps else ""
    print(f"step {step} of {config.train.total_steps}{beyond}: {len(rows)} rows of {config.model.T} bytes")
    for row in rows:
        print(f"\nrow {row.row}  {row.source}  {row.document}  offset {row.offset}  (stream {row.stream_offset})")
        text = row.text if not chars or len(row.text) <= chars else row.text[:chars] + "..."
        print(repr(text)[1:-1])


def _check_unchanged(task: ByteTask, saved: dict[str, Any], where: str) -> None:
    """Raise ValueError where the data is not what the run was trained on: the rows would be others."""
    trained_on = saved.get("extra", {}).get("data", {})
    changed = [name for name, sha in task.fingerprint().items() if trained_on.get(name, sha) != sha]
    if changed:
        raise ValueError(f"the data of {where} has changed since it was trained: {', '.join(changed)}; restore it")
