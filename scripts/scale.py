"""Predict a training run on many GPUs: step, data wait, cache build, checkpoints, failures (docs/scale.md).

    python -m scripts.scale                                   # 1, 8, 256 and 4,096 GPUs, 1 GB to 10 TB of text
    python -m scripts.scale --gpus 256 --text 1TB             # one run in detail
    python -m scripts.scale --gpus 8 --text 10GB --model 124m --assume failures_per_gpu_day=0.1
    python -m scripts.scale --rates                           # every rate, and whether it was measured

The simulation steps through batches and failures with numpy's generator; equal seeds print equal tables. Closed forms
stand beside it. Units are bytes, seconds, tokens and FLOPs.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

GIB = 2.0**30
UNITS = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
MOST_GPUS = 16_384
"""Most GPUs of a prediction; the simulation holds an array of them for every step."""
MOST_TORCH_GPUS = 256
"""Most GPUs for which the plan uses this project's own loop: its hosts exchange a number by a ring in every step."""
STEPS = 400
"""Steps that are simulated for the time of a step."""
MEMORY, DISK, SHARED = "memory of each node", "disk of each node", "shared storage"
TEXTS = ("1GB", "10GB", "100GB", "1TB", "10TB")


@dataclass(frozen=True)
class Model:
    """A model size; `tokens_per_s` is what one H200 measured in bf16 (docs/performance.md), 0 if nothing was."""

    weights: float
    L: int
    C: int
    T: int
    rows: int
    """Rows of T tokens that one GPU trains on in one forward pass."""
    tokens_per_s: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs of a forward and backward pass per token, as `niels_gpt.training.throughput` counts them."""
        return 6 * self.weights + 12 * self.L * self.C * self.T


MODELS = {
    "v0": Model(3.2e6, 4, 256, 256, 256, 13.0e6),
    "v1": Model(35.5e6, 8, 512, 1024, 64, 1.69e6),
    "124m": Model(124e6, 12, 768, 1024, 64, 0.58e6),
    "1b": Model(1.2e9, 24, 2048, 2048, 16),
    "8b": Model(8.0e9, 32, 4096, 4096, 2),
    "70b": Model(70e9, 80, 8192, 4096, 1),
}
DEFAULT_MODELS = {1: "124m", 8: "1b", 256: "8b", 4096: "70b"}
"""Most GPUs -> the model that a plan without --model trains."""


def _rate(value: float, origin: str) -> Any:
    """A field of Rates. `origin` says whether this project measured the value, assumes it, or has it from elsewhere."""
    return field(default=value, metadata={"origin": origin})


@dataclass(frozen=True)
class Rates:
    """Rates of machines, each with where it comes from."""

    bytes_per_token: float = _rate(3.7, "measured: 3.2 to 3.7 for English text, vocabularies of 8,000 and 16,000")
    stored_token_bytes: float = _rate(2.0, "the format: uint16")
    encode_tokens_per_s: float = _rate(2.4e6, "measured: 4.8M tokens/s by a cache build on two x86 cores; per core")
    reader_bytes_per_s: float = _rate(40e6, "measured: 62 to 89 ms per 1,000 streamed rows of 3 KB; per process")
    hash_bytes_per_s: float = _rate(1.5e9, "measured on a busy ARM core: sha256; per process")
    driver_rows_bytes_per_s: float = _rate(
        280e6, "measured on a busy ARM core: rows that the driver of a Ray build receives, per CPU second"
    )
    driver_tokens_per_s: float = _rate(
        54e6, "measured on a busy ARM core: tokens that the driver of a Ray build receives, hashes and writes"
    )
    plan_row_s: float = _rate(0.2e-6, "measured: every process plans all rows of the global batch")
    gather_row_s: float = _rate(16e-6, "measured: 0.51 ms per 32 rows of 1,024 tokens, each in a new 64 KB block")
    read_bytes: float = _rate(131072, "measured: what the system reads for one access to a mapped file")
    prefetch: float = _rate(2, "the default of engine.prefetch: batches prepared ahead")
    checkpoint_bytes: float = _rate(12.0, "measured: per weight; float32 weights and two AdamW moments")
    write_bytes_per_s: float = _rate(0.33e9, "measured on a busy ARM core: checkpoints, 0.26 to 0.39 GB/s; per process")
    load_bytes_per_s: float = _rate(0.8e9, "measured on a busy ARM core: 0.35 to 0.93 GB/s with CRCs; per process")
    start_s: float = _rate(60.0, "measured in part: imports, and about 30 s to compile on an H200")
    mfu: float = _rate(0.45, "measured: 0.45 for v1, 0.51 for 124M; assumed for sizes that were not measured")
    peak_flops: float = _rate(989e12, "vendor: H200, bf16")
    gpu_bytes: float = _rate(139 * GIB, "measured: memory of an H200")
    train_bytes: float = _rate(16.0, "per weight: float32 weight, gradient and two moments")
    gpus_per_node: float = _rate(8, "assumed")
    cores_per_gpu: float = _rate(12, "assumed; the machine with one H200 had 16")
    build_nodes: float = _rate(8, "assumed: nodes that build a cache")
    file_bytes: float = _rate(1e9, "assumed: size of an input file; one process reads it")
    node_memory: float = _rate(1e12, "assumed: memory of a node that can hold pages of the cache")
    node_disk: float = _rate(14e12, "assumed: NVMe of a node")
    disk_latency_s: float = _rate(0.1e-3, "assumed: one random read from NVMe")
    disk_bytes_per_s: float = _rate(10e9, "assumed: NVMe of a node")
    store_latency_s: float = _rate(2e-3, "assumed: one random read from a shared file system")
    store_node_bytes_per_s: float = _rate(5e9, "assumed: shared storage to one node")
    store_bytes_per_s: float = _rate(200e9, "assumed: shared storage to all nodes")
    node_bus_bytes_per_s: float = _rate(360e9, "assumed: collectives inside a node (NVLink at 80 %)")
    bus_bytes_per_s: float = _rate(320e9, "assumed: collectives between nodes, 8 x 400 Gb/s per node at 80 %")
    hop_s: float = _rate(5e-6, "assumed: one hop of a collective")
    control_hop_s: float = _rate(0.15e-3, "measured on busy ARM cores: a ring of gloo, one exchange per step")
    jitter: float = _rate(0.01, "assumed: standard deviation of a process's step over its mean")
    max_batch_tokens: float = _rate(16e6, "assumed: larger batches waste tokens")
    failures_per_gpu_day: float = _rate(4.7e-4, "published: 419 interruptions of 16,384 GPUs in 54 days (Llama 3)")
    replace_s: float = _rate(240.0, "assumed: to replace a node, where there are several")


# --- closed forms ------------------------------------------------------------------------------------


def choose_engine(model: Model, gpus: int, rates: Rates) -> str:
    """Return the engine that trains a model on so many GPUs; '' if none of them fits."""
    memory = 0.8 * rates.gpu_bytes  # the rest: activations and buffers
    if model.weights * rates.train_bytes / gpus > memory:
        return ""
    if gpus == 1:
        return "one process"
    if gpus <= MOST_TORCH_GPUS:
        if model.weights * rates.train_bytes <= memory:
            return "DDP"
        if model.weights * (rates.train_bytes / gpus + 4) <= memory:  # evaluation gathers the full float32 weights
            return "FSDP2"
    return "Levanter"


def communication_seconds(engine: str, model: Model, gpus: int, rates: Rates) -> float:
    """Return the seconds of one step's collectives, if nothing hides them.

    DDP all-reduces float32 gradients in buckets of 25 MB. FSDP2 as written here gathers float32 weights twice and
    reduce-scatters float32 gradients, by rings over all processes. Levanter is assumed to shard bf16 weights over up to
    64 GPUs and to all-reduce the shards' float32 gradients between such groups.
    """
    if gpus == 1:
        return 0.0
    nodes = _nodes(gpus, rates)
    rate = rates.node_bus_bytes_per_s if nodes == 1 else rates.bus_bytes_per_s
    ring = (gpus - 1) / gpus
    if engine == "DDP":
        buckets = math.ceil(4 * model.weights / 25e6)
        return 2 * ring * 4 * model.weights / rate + buckets * 2 * math.log2(gpus) * rates.hop_s
    if engine == "FSDP2":
        return 3 * ring * 4 * model.weights / rate + 3 * (model.L + 1) * (gpus - 1) / 8 * rates.hop_s
    group = min(gpus, 64)
    inside = 3 * 2 * model.weights / rate + 3 * (model.L + 1) * math.log2(group) * rates.hop_s
    between = 2 * 4 * model.weights / group / rate if gpus > group else 0.0
    return inside + between + 2 * math.log2(gpus) * rates.hop_s


def young_interval(cost: float, mtbf: float) -> float:
    """Return Young's interval between checkpoints, sqrt(2 cost mtbf)."""
    return math.sqrt(2 * cost * mtbf)


def daly_interval(cost: float, mtbf: float) -> float:
    """Return Daly's interval: seconds of work between two checkpoints that maximize goodput."""
    if cost >= 2 * mtbf:
        return mtbf
    x = cost / (2 * mtbf)
    return young_interval(cost, mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - cost


def expected_goodput(interval: float, cost: float, restart: float, mtbf: float) -> float:
    """Return work / time of an endless run with Poisson failures, which may also strike during a restart.

    Daly 2006: `interval` seconds of work take mtbf exp(restart / mtbf) (exp((interval + cost) / mtbf) - 1) seconds.
    """
    if math.isinf(mtbf):
        return interval / (interval + cost)
    if max(restart, interval + cost) > 500 * mtbf:
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + cost) / mtbf))


# --- simulation --------------------------------------------------------------------------------------


def simulate_pipeline(stages: Sequence[np.ndarray], buffer: int) -> tuple[float, float]:
    """Return (seconds per item, share of the time in which the last stage waits for its input).

    Each stage is an array (items, lanes) of seconds. The lanes of a stage work side by side, and an item moves on when
    all of them are done. A stage starts an item at most `buffer` items ahead of the next stage; with 0 it waits until
    the next stage is done. The first `buffer + len(stages)` items fill the pipeline and do not count.
    """
    items, last = len(stages[0]), len(stages) - 1
    done = [np.zeros(stage.shape[1]) for stage in stages]
    began: list[list[float]] = [[] for _ in stages]
    skipped = min(buffer + len(stages), items // 2)
    idle, counted_from = 0.0, 0.0
    for i in range(items):
        ready = 0.0
        for k, stage in enumerate(stages):
            free = 0.0
            if k < last and i >= max(buffer, 1):
                free = began[k + 1][i - buffer] if buffer else float(done[k + 1].max())
            start = np.maximum(done[k], max(ready, free))
            if k == last and i >= skipped:
                idle += float(start.max() - done[k].max())
            done[k] = start + stage[i]
            began[k].append(float(start.max()))
            ready = float(done[k].max())
        if i + 1 == skipped:
            counted_from = ready
    total = ready - counted_from
    return total / (items - skipped), idle / total


def run_with_failures(
    work: float, interval: float, cost: float, restart: float, gaps: Iterable[float]
) -> tuple[float, int]:
    """Return (seconds until `work` seconds of steps are saved, number of failures).

    A checkpoint that takes `cost` follows every `interval` of work and the end. `gaps` are the seconds from one failure
    to the next, also during a restart. Raises ValueError if they end before the run does.
    """
    saved = clock = 0.0
    for failures, gap in enumerate(gaps):
        pause = restart if failures else 0.0
        up = gap - pause
        left = work - saved
        needed = left + cost * math.ceil(left / interval - 1e-9)
        if up >= needed:
            return clock + pause + needed, failures
        if up > 0:
            saved += interval * math.floor(up / (interval + cost))
        clock += gap
    raise ValueError(f"the {failures + 1} failures end before the run does: give more of them, or inf as the last")


def poisson_gaps(mtbf: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield the times between failures of a Poisson process, without end."""
    while True:
        yield from rng.exponential(mtbf, 256) if math.isfinite(mtbf) else [math.inf]


def slowest_steps(mean: float, jitter: float, lanes: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Return (steps,) seconds: of each step the slowest of `lanes` processes, whose times are log-normal."""
    if jitter == 0:
        return np.full(steps, mean)
    sigma = math.sqrt(math.log1p(jitter * jitter))
    return np.asarray(mean * np.exp(sigma * rng.standard_normal((steps, lanes)).max(axis=1) - sigma * sigma / 2))


# --- one plan ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The prediction for one run; seconds, bytes and shares."""

    engine: str
    gpus: int
    nodes: int
    tokens: float
    cache_bytes: float
    cache_limit: str
    """The slowest stage of the cache build."""
    cache_seconds: float
    layout: str
    copy_seconds: float
    """To copy the cache to every node; 0 if nothing is copied."""
    batch_tokens: int
    compute_seconds: float
    exposed_seconds: float
    """Communication of a step that no computation hides."""
    control_seconds: float
    """The exchange of all hosts in a step; it runs beside the GPUs, so it counts only where it is longer."""
    build_seconds: float
    """To read, plan and gather one process's rows of a step."""
    read_bytes_per_s: float
    """What all nodes read together."""
    step_seconds: float
    data_wait: float
    tokens_per_s: float
    checkpoint_bytes: float
    checkpoint_seconds: float
    restart_seconds: float
    failures_per_day: float
    interval: float
    interval_steps: int
    goodput: float
    """Simulated: the mean of many runs."""
    goodput_range: tuple[float, float]
    """The 5 % and 95 % quantiles of these runs."""
    goodput_formula: float
    days: float


def make_plan(model: Model, gpus: int, text: float, rates: Rates, *, epochs: float = 1.0, seed: int = 0) -> Plan:
    """Return the prediction. Raises ValueError if no engine fits the model into so many GPUs."""
    engine = choose_engine(model, gpus, rates)
    if not engine:
        raise ValueError(
            f"{model.weights / 1e9:.3g}B weights need {rates.train_bytes * model.weights / 1e9:,.0f} GB for weights, "
            f"gradients and optimizer state, and {gpus} GPUs have {0.8 * rates.gpu_bytes * gpus / 1e9:,.0f} GB for "
            f"them: take more GPUs or a smaller --model"
        )
    rng = np.random.default_rng(seed)
    nodes = _nodes(gpus, rates)
    tokens = text / rates.bytes_per_token
    cache_bytes = tokens * rates.stored_token_bytes
    cache_limit, cache_seconds = cache_build(text, gpus, rates)

    control = 2 * (gpus - 1) * rates.control_hop_s if engine in ("DDP", "FSDP2") else 0.0
    rows = max(1, min(model.rows, int(rates.max_batch_tokens / model.T / gpus)))
    rate = model.tokens_per_s or rates.mfu * rates.peak_flops / model.flops
    compute = rows * model.T / rate
    hidden_by = compute * 2 / 3 if engine == "DDP" else compute  # DDP exchanges gradients during the backward
    exposed = max(0.0, communication_seconds(engine, model, gpus, rates) - hidden_by)
    layout = choose_layout(cache_bytes, model, rows, compute, gpus, rates)
    latency, row_seconds, row_bytes = _row_read(layout, model, gpus, rates)
    share = min(rates.store_node_bytes_per_s, rates.store_bytes_per_s / nodes)
    copy_seconds = cache_bytes / share if nodes > 1 and layout != SHARED else 0.0
    gather = rows * rates.gather_row_s * max(1.0, model.T / 1024) + rows * gpus * rates.plan_row_s
    transfer = rows * row_seconds
    build = gather + transfer + rows * latency

    waits = rng.gamma(rows, latency, (STEPS, gpus)) if latency else np.zeros((STEPS, 1))
    train = np.maximum(slowest_steps(compute, rates.jitter, gpus, STEPS, rng) + exposed, control)
    step, wait = simulate_pipeline([gather + transfer + waits, train[:, None]], int(rates.prefetch))

    state = rates.checkpoint_bytes * model.weights
    writers = 1 if engine in ("one process", "DDP") else gpus
    cost = max(state / writers / rates.write_bytes_per_s, state / rates.store_bytes_per_s)
    load = max(state / writers / rates.load_bytes_per_s, state * (gpus / writers) / rates.store_bytes_per_s)
    restart = rates.start_s + load + (rates.replace_s if nodes > 1 else 0.0)
    per_day = rates.failures_per_gpu_day * gpus
    mtbf = 86400 / per_day if per_day else math.inf
    batch = rows * model.T * gpus
    total_steps = math.ceil(epochs * tokens / batch)
    work = total_steps * step
    best = daly_interval(cost, mtbf) if per_day else work
    interval_steps = min(max(1, round(best / step)), total_steps)
    interval = interval_steps * step
    formula = expected_goodput(interval, cost, restart, mtbf)
    if formula < 0.01:
        raise ValueError(
            f"a failure every {mtbf:.3g} s leaves no time to train: a restart takes {restart:.3g} s and a checkpoint "
            f"{cost:.3g} s; take fewer --gpus or a lower failures_per_gpu_day"
        )
    trials = 200 if work * per_day / 86400 < 1000 else 20
    runs = [work / run_with_failures(work, interval, cost, restart, poisson_gaps(mtbf, rng))[0] for _ in range(trials)]
    goodput = float(np.mean(runs))
    low, high = np.quantile(runs, [0.05, 0.95])
    return Plan(
        engine=engine, gpus=gpus, nodes=nodes, tokens=tokens, cache_bytes=cache_bytes, cache_limit=cache_limit,
        cache_seconds=cache_seconds, layout=layout, copy_seconds=copy_seconds, batch_tokens=batch,
        compute_seconds=compute, exposed_seconds=exposed, control_seconds=control, build_seconds=build,
        read_bytes_per_s=gpus * rows * row_bytes / step, step_seconds=step, data_wait=wait,
        tokens_per_s=batch / step, checkpoint_bytes=state, checkpoint_seconds=cost, restart_seconds=restart,
        failures_per_day=per_day, interval=interval, interval_steps=interval_steps, goodput=goodput,
        goodput_range=(float(low), float(high)), goodput_formula=formula, days=work / goodput / 86400,
    )  # fmt: skip


def cache_build(text: float, gpus: int, rates: Rates) -> tuple[str, float]:
    """Return (slowest stage of the last pass, seconds) of building a token cache on the nodes of the run.

    One node: one process reads a streamed source once. Several nodes: `niels-gpt cache build --engine ray` from a URL,
    in four passes. The nodes hash the files; then they read all rows three times, to count the documents, for val and
    for train, and send them to the driver. In the last pass the driver sends the text to the nodes, which tokenize, and
    hashes and writes all tokens itself. The result is that of one process where this is faster.
    """
    nodes = min(_nodes(gpus, rates), rates.build_nodes)
    cores = nodes * rates.cores_per_gpu * min(gpus, rates.gpus_per_node)
    stored = rates.stored_token_bytes / rates.bytes_per_token  # bytes written per byte of text
    stages = {  # bytes of text per second
        "read": rates.reader_bytes_per_s,
        "tokenize": cores / nodes * rates.encode_tokens_per_s * rates.bytes_per_token,
        "write": rates.write_bytes_per_s / stored,
    }
    name = min(stages, key=lambda stage: stages[stage])
    one = name, text / stages[name]
    if nodes == 1:
        return one
    network = min(nodes * rates.store_node_bytes_per_s, rates.store_bytes_per_s)
    hashing = min(min(cores, math.ceil(text / rates.file_bytes)) * rates.hash_bytes_per_s, network)
    reading = min(cores * rates.reader_bytes_per_s, network)
    receiving = min(reading, rates.driver_rows_bytes_per_s)
    driver = 1 / (1 / rates.driver_rows_bytes_per_s + 1 / (rates.driver_tokens_per_s * rates.bytes_per_token))
    stages |= {"read": reading, "tokenize": nodes * stages["tokenize"], "driver": driver}
    name = min(stages, key=lambda stage: stages[stage])
    ray = name, text * (1 / hashing + 2 / receiving + 1 / stages[name])
    return min(one, ray, key=lambda found: found[1])


def choose_layout(cache_bytes: float, model: Model, rows: int, compute: float, gpus: int, rates: Rates) -> str:
    """Return where processes read the cache: MEMORY or DISK of each node, or SHARED storage.

    Several nodes read a cache that exceeds their memory in place if that takes less than half of a step, because a copy
    for each node would take longer to distribute.
    """
    if cache_bytes <= rates.node_memory / 2:
        return MEMORY
    latency, seconds, _ = _row_read(SHARED, model, gpus, rates)
    is_fast = _nodes(gpus, rates) > 1 and rows * (latency + seconds) < compute / 2
    return SHARED if is_fast or cache_bytes > rates.node_disk else DISK


def _row_read(layout: str, model: Model, gpus: int, rates: Rates) -> tuple[float, float, float]:
    """Return (latency, seconds of transfer, bytes) of reading one row into memory, with all processes reading."""
    if layout == MEMORY:
        return 0.0, 0.0, 0.0
    nodes = _nodes(gpus, rates)
    size = rates.stored_token_bytes * (model.T + 1) + rates.read_bytes
    if layout == DISK:
        return rates.disk_latency_s, size / (rates.disk_bytes_per_s * nodes / gpus), size
    share = min(rates.store_node_bytes_per_s, rates.store_bytes_per_s / nodes)
    return rates.store_latency_s, size / (share * nodes / gpus), size


def _nodes(gpus: int, rates: Rates) -> int:
    return math.ceil(gpus / rates.gpus_per_node)


# --- command line ------------------------------------------------------------------------------------


def read_bytes(text: str) -> float:
    """Return the bytes that '10GB' or '1.5 TB' means. Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*([\d.,_]+(?:e\d+)?)\s*([kmgtp]?b?)\s*", text, re.IGNORECASE)
    unit = match[2].upper() if match else ""
    try:
        size = (
            float(match[1].replace(",", "").replace("_", "")) * UNITS[unit + "B" * (unit in ("K", "M", "G", "T", "P"))]
        )  # type: ignore[index]
    except (TypeError, ValueError, KeyError):
        raise ValueError(f"--text {text!r} is not a size: write a number and a unit, such as 10GB") from None
    if not 1e6 <= size <= 1e15:
        raise ValueError(f"--text {text} is outside of 1MB to 1PB")
    return size


def assumed_rates(items: Iterable[str]) -> Rates:
    """Return the rates with NAME=VALUE replaced. Raises ValueError for an unknown name or an impossible value."""
    rates = Rates()
    known = [f.name for f in dataclasses.fields(Rates)]
    may_be_zero = ("failures_per_gpu_day", "jitter", "prefetch", "disk_latency_s", "store_latency_s", "replace_s",
                   "start_s", "hop_s")  # fmt: skip
    for item in items:
        name, _, value = item.partition("=")
        if name not in known:
            raise ValueError(f"--assume has no rate {name!r}: `python -m scripts.scale --rates` lists them")
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"--assume {item}: {value!r} is not a number") from None
        if not math.isfinite(number) or number < 0 or (number == 0 and name not in may_be_zero):
            raise ValueError(f"--assume {item}: the value must be a finite number above 0")
        rates = dataclasses.replace(rates, **{name: number})
    return rates


def duration(seconds: float) -> str:
    """Return a time in the unit that keeps it short, such as '3.2 h'."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= (2 if unit == "days" else 1) * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us" if seconds else "0 s"


def amount(number: float, unit: str = "B") -> str:
    """Return a number with a decimal prefix, such as '5.4 TB'."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def describe(plan: Plan) -> list[tuple[str, str]]:
    """Return the rows of the table of one plan."""
    copied = f"; copied in {duration(plan.copy_seconds)}" if plan.copy_seconds else ""
    low, high = plan.goodput_range
    return [
        ("engine", f"{plan.engine}, {plan.gpus:,} GPUs on {plan.nodes:,} nodes"),
        ("tokens; cache", f"{amount(plan.tokens, '')}; {amount(plan.cache_bytes)}"),
        ("cache build", f"{duration(plan.cache_seconds)} (limit: {plan.cache_limit})"),
        ("cache is read from", plan.layout + copied),
        ("read by all nodes", f"{amount(plan.read_bytes_per_s)}/s"),
        ("batch", f"{plan.batch_tokens:,} tokens"),
        ("step", f"{duration(plan.step_seconds)}: compute {duration(plan.compute_seconds)}, "
                 f"exposed communication {duration(plan.exposed_seconds)}, hosts {duration(plan.control_seconds)}"),
        ("batch of one process", f"built in {duration(plan.build_seconds)}"),
        ("data wait", f"{plan.data_wait:.2%} of the time"),
        ("throughput", f"{amount(plan.tokens_per_s, '')} tokens/s"),
        ("checkpoint", f"{amount(plan.checkpoint_bytes)} in {duration(plan.checkpoint_seconds)}"),
        ("failures", f"{plan.failures_per_day:.3g} per day; restart {duration(plan.restart_seconds)}"),
        ("checkpoint interval", f"{duration(plan.interval)} ({plan.interval_steps:,} steps), by Young/Daly"),
        ("goodput, simulated", f"{plan.goodput:.2%} (5 to 95 %: {low:.2%} to {high:.2%})"),
        ("goodput, closed form", f"{plan.goodput_formula:.2%}"),
        ("duration of the run", duration(plan.days * 86400)),
    ]  # fmt: skip


COLUMNS = ("GPUs", "text", "model", "engine", "cache", "cache build", "read from", "step", "wait", "tokens/s",
           "checkpoint", "fails/day", "interval", "goodput", "formula", "run")  # fmt: skip


def summary(plan: Plan, text: str, model: str) -> list[str]:
    """Return the cells of a plan under COLUMNS."""
    return [
        f"{plan.gpus:,}", text, model, plan.engine, amount(plan.cache_bytes), duration(plan.cache_seconds),
        plan.layout.split()[0], duration(plan.step_seconds), f"{plan.data_wait:.1%}", amount(plan.tokens_per_s, ""),
        duration(plan.checkpoint_seconds), f"{plan.failures_per_day:.2g}", duration(plan.interval),
        f"{plan.goodput:.2%}", f"{plan.goodput_formula:.2%}", duration(plan.days * 86400),
    ]  # fmt: skip


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in the columns of a markdown table; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def print_rates(rates: Rates) -> None:
    """Print every rate with its value and where it comes from."""
    rows = [("rate", "value", "origin")]
    for f in dataclasses.fields(Rates):
        value = getattr(rates, f.name)
        rows.append((f.name, f"{value:g}", f.metadata["origin"] if value == f.default else "given with --assume"))
    print_table(rows)


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Print the plan; return the exit code."""
    parser = OneLineParser(prog="python -m scripts.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, help=f"1 to {MOST_GPUS:,}; default: 1, 8, 256 and 4096")
    parser.add_argument("--text", help=f"size of the text, such as 10GB; default: {', '.join(TEXTS)}")
    parser.add_argument("--model", help=f"{', '.join(MODELS)}; default: by the number of GPUs")
    parser.add_argument("--epochs", type=float, default=1.0, help="passes over the text; default 1")
    parser.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE", help="replace a rate")
    parser.add_argument("--rates", action="store_true", help="list the rates")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        if options.gpus is not None and not 1 <= options.gpus <= MOST_GPUS:
            raise ValueError(f"--gpus {options.gpus} is outside of 1 to {MOST_GPUS:,}")
        if options.model is not None and options.model not in MODELS:
            raise ValueError(f"--model {options.model!r} is not one of {', '.join(MODELS)}")
        if not 0 < options.epochs <= 1e6:
            raise ValueError(f"--epochs {options.epochs} must be above 0, and 1,000,000 at most")
        if options.seed < 0:
            raise ValueError(f"--seed {options.seed} must be at least 0")
        rates = assumed_rates(options.assume)
        if options.rates:
            print_rates(rates)
            return 0
        counts = [options.gpus] if options.gpus else list(DEFAULT_MODELS)
        texts = {text: read_bytes(text) for text in ([options.text] if options.text else TEXTS)}
        plans = []
        for gpus in counts:
            name = options.model or next((DEFAULT_MODELS[most] for most in DEFAULT_MODELS if gpus <= most), "70b")
            for text, size in texts.items():
                plan = make_plan(MODELS[name], gpus, size, rates, epochs=options.epochs, seed=options.seed)
                plans.append((plan, text, name))
    except ValueError as err:
        parser.error(str(err))
    if len(plans) == 1:
        print_table([("", f"{plans[0][2]}, {plans[0][1]} of text"), *describe(plans[0][0])])
    else:
        print_table([COLUMNS, *(summary(*entry) for entry in plans)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
