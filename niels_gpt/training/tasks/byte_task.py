"""The task over byte streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from niels_gpt.batching import RowPlan, gather_rows, plan_batch
from niels_gpt.config import DataConfig, RunConfig
from niels_gpt.data.note_selection import SelectedNotes, selection_lines
from niels_gpt.data.source_paths import display_name, with_absolute_paths
from niels_gpt.evaluation.sampled import evaluate_rows
from niels_gpt.model.gpt import GPT
from niels_gpt.streams import Stream, StreamBuildConfig, load_streams
from niels_gpt.system import files, user_cache
from niels_gpt.system.console import short_number
from niels_gpt.system.processes import ALL_ROWS, SINGLE_PROCESS, RankShare, World
from niels_gpt.system.rng import generator
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer
from niels_gpt.training.memory_limits import MEMORY_ERRORS, is_out_of_memory
from niels_gpt.training.tasks.base import Batch, RowOrigin, SourceRow, eval_name

SOURCES = ("wiki", "roam", "primer")
"""The built-in sources; data.sources adds others."""


class ByteTask:
    """Next-byte prediction over windows of the mixed byte streams."""

    tokenizer: AnyTokenizer = ByteTokenizer()

    def __init__(self, config: RunConfig, streams: dict[str, dict[str, Stream]]) -> None:
        """Raises ValueError if p_train or p_val name a missing source, or if model.V does not fit the bytes."""
        for key in ("p_train", "p_val"):
            missing = [name for name, share in getattr(config.train, key).items() if share and name not in streams]
            if missing:
                have = ", ".join(streams) or "none"
                raise ValueError(f"train.{key} names {', '.join(missing)}, but the sources are {have}")
        _check_vocabulary(config, streams)
        self.config = config
        self.streams = streams
        self._p = {name: share for name, share in config.train.p_train.items() if share}
        self._train = {name: streams[name]["train"].data for name in self._p}

    def plan(self, step: int) -> RowPlan:
        """The windows of a step: source and start of each row."""
        draw = generator(self.config.train.seed, "batch", step)
        return plan_batch(self._train, p=self._p, B=self.config.train.B, T=self.config.model.T, generator=draw)

    def batch(self, step: int, share: RankShare = ALL_ROWS) -> Batch:
        names, source, start = self.plan(step)
        rows = share.rows(len(start))
        plan = RowPlan(names, source[rows], start[rows])
        return Batch(*gather_rows(self._train, plan, T=self.config.model.T, device="cpu"))

    def origins(self, step: int) -> list[RowOrigin]:
        """Source, document, offset and text of every row of a step."""
        plan = self.plan(step)
        rows = []
        for row, (index, start) in enumerate(zip(plan.source, plan.start, strict=True)):
            name = plan.names[index]
            stream = self.streams[name]["train"]
            document, offset = stream.locate(start)
            text = stream.data[start : start + self.config.model.T].decode("utf-8", errors="replace")
            rows.append(RowOrigin(row, name, document, offset, start, text))
        return rows

    def evaluate(self, model: GPT, device: str, world: World = SINGLE_PROCESS) -> tuple[dict[str, float], float]:
        """The sampled loss of each source of p_val, on the same windows every time, and their mean by p_val."""
        weights = {name: w for name, w in self.config.train.p_val.items() if w}
        losses = self._losses(model, device, list(weights), world.share.rows(self.config.train.B))
        if world.size > 1:  # all shares have the same size
            sums = world.sum_arrays(*losses.values())
            losses = {name: float(total) / world.size for name, total in zip(losses, sums, strict=True)}
        return losses, sum(w * losses[eval_name(name)] for name, w in weights.items())

    def _losses(self, model: GPT, device: str, names: list[str], rows: slice) -> dict[str, float]:
        """The losses on these rows of every batch; halves the rows if they do not fit into memory."""
        try:
            return evaluate_rows(
                model,
                {eval_name(name): self.streams[name]["val"].data for name in names},
                rows,
                eval_steps=self.config.output.eval_steps,
                B=self.config.train.B,
                T=self.config.model.T,
                device=device,
                generator=generator(self.config.train.seed, "eval"),
            )
        except MEMORY_ERRORS as err:  # it keeps tensors alive until this block ends
            if not is_out_of_memory(err) or rows.stop - rows.start < 2:
                raise
        middle = (rows.start + rows.stop) // 2
        first, second = (
            self._losses(model, device, names, half) for half in (slice(rows.start, middle), slice(middle, rows.stop))
        )
        share = (middle - rows.start) / (rows.stop - rows.start)
        return {name: share * first[name] + (1 - share) * second[name] for name in first}

    def fingerprint(self) -> dict[str, str]:
        return {name: self.streams[name]["train"].sha256 for name in self._p}

    def sample_prompt(self) -> str:
        return self.config.output.sample_prompt

    def notes(self) -> list[str]:
        return selection_lines(self.selections())

    def selections(self) -> dict[str, SelectedNotes]:
        return selections_of(self.streams)

    def describe(self) -> list[SourceRow]:
        paths = source_paths(stream_config(self.config))
        rows = []
        for name, streams in self.streams.items():
            train, val = streams["train"], streams["val"]
            state = "cached" if all(stream.cached for stream in streams.values()) else "built"
            if "test" in streams:
                state += f"; {short_number(len(streams['test'].data))}B test split"
            rows.append(
                SourceRow(
                    display_name(name, paths[name]),
                    self.config.train.p_train.get(name, 0.0),
                    len(train.data),
                    len(val.data),
                    "B",
                    len(train.starts) + len(val.starts),
                    f"{files.display_path(paths[name])} ({state})",
                )
            )
        return rows


def selections_of(streams: Mapping[str, Mapping[str, Stream]]) -> dict[str, SelectedNotes]:
    """Which files of each source were read and skipped; without embedded notes."""
    chosen = {name: next(iter(splits.values())).selected for name, splits in streams.items()}
    return {name: one for name, one in chosen.items() if one is not None and not one.is_embedded}


def _check_vocabulary(config: RunConfig, streams: dict[str, dict[str, Stream]]) -> None:
    """Raise ValueError if model.V is larger than 256, or too small for a byte of the streams or the prompt."""
    V = config.model.V
    if V > 256:
        remedy = (
            "set task=pretrain, which reads token caches of its tokenizer" if config.init_from else "set model.V=256"
        )
        raise ValueError(f"model.V={V}, but bytes have 256 ids: {remedy}")
    if V == 256:
        return
    texts = {f"the stream {name}": stream.data for name, splits in streams.items() for stream in splits.values()}
    texts["output.sample_prompt"] = config.output.sample_prompt.encode("utf-8")
    largest, name = max((int(np.frombuffer(data, np.uint8).max(initial=0)), name) for name, data in texts.items())
    if largest >= V:
        raise ValueError(f"model.V={V}, but the largest byte is {largest} (in {name}): set model.V=256")


def source_paths(cfg: StreamBuildConfig) -> dict[str, str]:
    """The folder or file of each source."""
    added = {name: source.path for name, source in cfg.user_sources.items()}
    return {"wiki": cfg.wiki, "roam": cfg.roam_root, "primer": cfg.primer_path, **added}


def open_byte_task(config: RunConfig) -> ByteTask:
    """Build or load the byte streams of a config."""
    return ByteTask(config, load_streams(stream_config(config), T=config.model.T))


def _stream_folder(data: DataConfig) -> Path:
    """The folder of the cached streams; `auto` is one folder per choice of sources, in the user's cache."""
    if data.cache_dir != "auto":
        return files.expand_home(data.cache_dir)
    chosen = [data.wiki, data.roam, data.primer, *(source.path for source in data.sources.values())]
    key = files.sha256_bytes("\0".join([*chosen, *data.sources, str(data.seed)]).encode("utf-8"))
    return user_cache.private_folder(user_cache.STREAMS, key[:16])


def stream_config(config: RunConfig, names: Sequence[str] | None = None) -> StreamBuildConfig:
    """The StreamBuildConfig of some sources, all required; "auto" paths are resolved.

    names: by default the sources in p_train and p_val. Raises ValueError if those name an unknown source.
    """
    data, train = with_absolute_paths(config).data, config.train
    if names is None:
        known = (*SOURCES, *data.sources)
        for key in ("p_train", "p_val"):
            for name in getattr(train, key):
                if name not in known:
                    raise ValueError(f"train.{key}: unknown source {name!r}; known sources: {', '.join(known)}")
        names = [name for name in known if train.p_train.get(name) or train.p_val.get(name)]

    return StreamBuildConfig(
        roam_root=data.roam,
        primer_path=data.primer,
        wiki=data.wiki,
        cache_dir=str(_stream_folder(data)),
        roam_val_frac=data.roam_val_frac,
        roam_split=data.roam_split,
        primer_val_frac=data.primer_val_frac,
        seed=data.seed,
        encoding_errors=data.encoding_errors,
        notes=data.notes,
        user_sources=data.sources,
        enabled_sources=tuple(names),
        required_sources=tuple(names),
    )
