"""`python -m scripts.scale_check [--steps N] [--kills N]`: compare predictions of scripts.scale with measurements.

One GPU: the figures recorded in docs/performance.md and docs/lab-notebook.md. Two processes: trains a small model on
the CPU of this machine, with one process and with two (DDP over gloo), then again while processes are killed at times
drawn from --seed, and prints predicted beside measured. Takes about seven minutes on two busy cores; --recorded skips
it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from scripts.scale import (
    MODELS,
    Model,
    OneLineParser,
    Rates,
    make_plan,
    print_table,
    run_with_failures,
    slowest_steps,
)

ROWS, T, ROUNDS = 8, 128, 2
SETTINGS = [
    f"model={{T: {T}, C: 128, L: 4, H: 4, dropout: 0.0}}",
    "output={eval_every: 1000000, eval_steps: 1, sample_every: 0, sample_tokens: 1, keep: 2}",
    "output.checkpoint_every=1000000",
]
HEAD = ("quantity", "predicted", "measured", "measured / predicted")
SKIPPED = 5
"""First steps of a run that are slower and do not count."""
ALL_REDUCE = """
import sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
medians = []
for numbers, rounds in ((int(sys.argv[1]), 20), (1, 200)):
    tensor, times = torch.zeros(numbers), []
    dist.barrier()
    for _ in range(rounds):
        began = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - began)
    medians.append(sorted(times)[rounds // 2])
if dist.get_rank() == 0:
    print(*medians)
dist.destroy_process_group()
"""


def compare(name: str, predicted: float, measured: float, form: str) -> tuple[str, str, str, str]:
    """Return a row of the table."""
    ratio = f"{measured / predicted:.2f}" if predicted else ""
    return name, format(predicted, form), format(measured, form), ratio


def one_gpu() -> list[tuple[str, str, str, str]]:
    """Return predictions for one H200 beside what was recorded."""
    rates = Rates()

    def tokens_per_s(model: Model) -> float:
        """From `rates.mfu` alone, as for sizes that nobody measured."""
        unmeasured = dataclasses.replace(model, tokens_per_s=0.0)
        return make_plan(unmeasured, 1, 1e9, rates).tokens_per_s

    enwik8 = Model(38.7e6, 12, 512, 2048, 32)
    byte_rates = dataclasses.replace(rates, bytes_per_token=1.0)
    run = make_plan(enwik8, 1, 90e6, byte_rates, epochs=21_800 * 32 * 2048 / 90e6)
    stall = make_plan(MODELS["v0"], 1, 1e9, rates)
    return [
        compare("one H200: v0, tokens/s", tokens_per_s(MODELS["v0"]), 13.0e6, ",.0f"),
        compare("one H200: v1, tokens/s", tokens_per_s(MODELS["v1"]), 1.69e6, ",.0f"),
        compare("one H200: 124M, tokens/s", tokens_per_s(MODELS["124m"]), 0.58e6, ",.0f"),
        compare("one H200: enwik8, step in ms", 1e3 * run.step_seconds, 58.2, ".1f"),
        compare("one H200: enwik8, run in minutes", 1440 * run.days + rates.start_s / 60, 23.0, ".1f"),
        compare("one H200: v0, data wait in %", 100 * stall.data_wait, 0.03, ".2f"),
    ]


class Bench:
    """Small training runs in a temporary folder."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.started: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(self, name: str, processes: int, rows: int, *settings: str, restarts: int = 0) -> subprocess.Popen[bytes]:
        """Start a run, in `processes` processes."""
        command = [sys.executable, "-m"]
        if processes > 1:
            command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            command += [f"--max-restarts={restarts}", "-m"]
        command += ["niels_gpt", "train", "--config", "debug", "--run-dir", str(self.folder / name), "--device", "cpu"]
        command += ["--steps", str(self.steps)]
        for setting in (*SETTINGS, f"train.B={rows}", *settings):
            command += ["--set", setting]
        with (self.folder / f"{name}.log").open("wb") as log:
            # A separate session, as the workers of torchrun have: Linux divides the CPU between sessions.
            process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
        self.started.append(process)
        return process

    def stop(self) -> None:
        """End the runs that an error or Ctrl-C left."""
        for process in self.started:
            if process.poll() is None:
                process.terminate()
                process.wait()

    def finish(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Wait for a run. Raises RuntimeError with the end of its output if it failed."""
        if process.wait():
            text = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
            last = (text.strip().splitlines() or ["no output"])[-1]
            raise RuntimeError(f"the run {name} ended with exit code {process.returncode}: {last}")

    def step_seconds(self, name: str, rows: int) -> np.ndarray:
        """Return the seconds of each step, without the first ones."""
        from niels_gpt.runs.folder import RunFolder

        lines = RunFolder(self.folder / name).metrics()
        return np.array([rows * T / line["tokens_per_s"] for line in lines[SKIPPED:]])

    def measure(self, name: str, processes: int, rows: int) -> np.ndarray:
        """Return the seconds of each step of a run."""
        self.finish(name, self.start(name, processes, rows))
        return self.step_seconds(name, rows)

    def first_step(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Wait until a run has written the metrics of a step, or ended."""
        path = self.folder / name / "metrics.jsonl"
        while process.poll() is None and not (path.exists() and path.stat().st_size):
            time.sleep(0.02)

    def all_reduce(self, numbers: int) -> tuple[float, float]:
        """Return the seconds in which two processes all-reduce so many float32 numbers, and one number."""
        script = self.folder / "all_reduce.py"
        script.write_text(ALL_REDUCE, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
        done = subprocess.run([*command, str(numbers)], env=self.environment, capture_output=True, check=True)
        many, one = map(float, done.stdout.split()[-2:])
        return many, one


def cpu_share(processes: int) -> float:
    """Return the share of a core that each of so many busy processes gets on this machine, now."""
    code = (
        "import time; end = time.perf_counter() + 3\n"
        "while time.perf_counter() < end: pass\n"
        "print(time.process_time() / 3)"
    )
    command = [sys.executable, "-S", "-c", code]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) for _ in range(processes)]
    return float(np.mean([float(process.communicate()[0]) for process in started]))


def two_processes(bench: Bench, rng: np.random.Generator) -> tuple[list[tuple[str, str, str, str]], np.ndarray]:
    """Return predictions for two processes beside what they measure, and the steps of the run with two processes."""
    weights = 256 * 128 + 4 * 12 * 128 * 128
    exchange, control = bench.all_reduce(weights)
    rounds: list[list[np.ndarray]] = [[], [], []]
    shares: list[float] = []
    for n in range(ROUNDS):  # in turns, because the load of the machine changes
        rounds[0].append(bench.measure(f"half-{n}", 1, ROWS // 2))
        shares.append(cpu_share(2) / cpu_share(1))
        rounds[1].append(bench.measure(f"whole-{n}", 1, ROWS))
        rounds[2].append(bench.measure(f"both-{n}", 2, ROWS))
    half, whole, both = map(np.concatenate, rounds)
    share = float(np.mean(shares))

    def predict(slower: float) -> float:
        """The slower of two such processes, and an exchange that no idle core hides."""
        jitter = float(half.std() / half.mean())
        slowest = slowest_steps(slower * float(half.mean()), jitter, 2, 20_000, rng)
        return float(slowest.mean()) + exchange + control

    alone, shared = predict(1.0), predict(1 / share)
    print(
        f"one process: {1e3 * half.mean():.1f} ms for {ROWS // 2} rows (jitter {half.std() / half.mean():.0%}), "
        f"{1e3 * whole.mean():.1f} ms for {ROWS}; all-reduce of {4 * weights:,} bytes {1e3 * exchange:.2f} ms, of one "
        f"number {1e3 * control:.2f} ms; each of two processes gets {share:.0%} of the CPU of one; load "
        f"{os.getloadavg()[0]:.1f}",
        file=sys.stderr,
    )
    rows = [
        compare("two processes: step in ms, a free core for each", 1e3 * alone, 1e3 * both.mean(), ".1f"),
        compare("two processes: step in ms, with the CPU they get", 1e3 * shared, 1e3 * both.mean(), ".1f"),
        compare("two processes: speed-up, with the CPU they get", whole.mean() / shared, whole.mean() / both.mean(),
                ".2f"),
    ]  # fmt: skip
    return rows, both


def with_kills(
    bench: Bench, steps: np.ndarray, kills: int, rng: np.random.Generator
) -> list[tuple[str, str, str, str]]:
    """Return predictions for a run of two processes that is killed, beside its time.

    An undisturbed run gives the time to start and the cost of a checkpoint. The prediction then replays the kills.
    """
    every = max(1, bench.steps // 8)
    setting = f"output.checkpoint_every={every}"
    began = time.monotonic()
    process = bench.start("undisturbed", 2, ROWS, setting)
    bench.first_step("undisturbed", process)
    start = time.monotonic() - began - float(steps.mean())
    bench.finish("undisturbed", process)
    undisturbed = time.monotonic() - began
    step = float(bench.step_seconds("undisturbed", ROWS).mean())
    saves = math.ceil(bench.steps / every)
    cost = max(0.0, undisturbed - start - bench.steps * step) / saves

    mean_gap = undisturbed / 2
    began = time.monotonic()
    process = bench.start("killed", 2, ROWS, setting, restarts=kills)
    times: list[float] = []
    at = 0.0
    for gap in rng.exponential(mean_gap, kills):
        at = max(at, time.monotonic() - began) + gap
        while process.poll() is None and time.monotonic() - began < at:
            time.sleep(0.02)
        victim = _a_child(process)
        if victim is None:
            break
        times.append(time.monotonic() - began)
        os.kill(victim, signal.SIGKILL)
    bench.finish("killed", process)
    measured = time.monotonic() - began
    gaps = [*np.diff([start, *times]), math.inf]
    predicted, _ = run_with_failures(bench.steps * step, every * step, cost, start, gaps)
    print(
        f"start {start:.1f} s, step {1e3 * step:.1f} ms, {saves} checkpoints of {cost:.2f} s, undisturbed "
        f"{undisturbed:.1f} s; killed after {', '.join(f'{t:.1f}' for t in times)} s",
        file=sys.stderr,
    )
    work = bench.steps * step
    return [
        compare(f"two processes, {len(times)} kills: run in s", start + predicted, measured, ".1f"),
        compare(f"two processes, {len(times)} kills: goodput in %", 100 * work / (start + predicted),
                100 * work / measured, ".1f"),
    ]  # fmt: skip


def _a_child(process: subprocess.Popen[bytes]) -> int | None:
    """The process id of a worker of torchrun; None once torchrun has ended. Waits until there is one."""
    while process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
        if children:
            return int(children[-1])
        time.sleep(0.02)
    return None


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = OneLineParser(prog="python -m scripts.scale_check", description=__doc__.splitlines()[0])
    parser.add_argument("--recorded", action="store_true", help="only compare with recorded figures; train nothing")
    parser.add_argument("--steps", type=int, default=50, help="steps of each run; default 50")
    parser.add_argument("--kills", type=int, default=3, help="processes to kill; default 3")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.steps < 4 * SKIPPED:
        parser.error(f"--steps {options.steps} is too few: take {4 * SKIPPED} at least")
    if options.kills < 0 or options.seed < 0:
        parser.error("--kills and --seed must be at least 0")
    rows = one_gpu()
    if not options.recorded:
        rng = np.random.default_rng(options.seed)
        try:
            with tempfile.TemporaryDirectory() as folder:
                bench = Bench(Path(folder), options.steps)
                try:
                    measured, steps = two_processes(bench, rng)
                    rows += measured
                    if options.kills:
                        rows += with_kills(bench, steps, options.kills, rng)
                finally:
                    bench.stop()
        except (RuntimeError, OSError, subprocess.CalledProcessError) as err:
            print(f"error: {' '.join(str(err).split())}", file=sys.stderr)
            return 1
    print_table([HEAD, *rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
