"""The metrics line of a step: on a CPU at once, on CUDA without blocking the device."""

from types import SimpleNamespace

import pytest
import torch

from niels_gpt.config import ModelConfig
from niels_gpt.training import throughput
from niels_gpt.training.throughput import ThroughputMeter, flops_per_token


@pytest.mark.parametrize(
    ("tied", "frozen", "trained", "kept"),
    [(True, 0, 2000, 0), (True, 300, 1700, 300), (False, 0, 1200, 0), (False, 500, 1200, 0), (False, 900, 1100, 100)],
)
def test_flops_per_token(tied, frozen, trained, kept):
    """Of 2000 weights; an untied embedding has 800, which are frozen first and multiply nothing."""
    config = ModelConfig(V=50, T=12, C=16, L=2, H=2, tie_embeddings=tied)
    assert flops_per_token(config, 2000, frozen=frozen) == 6 * trained + 4 * kept + 12 * 2 * 16 * 12


@pytest.mark.parametrize("processes", [1, 3])
def test_a_line_on_a_cpu(monkeypatch, processes):
    now = [10.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    meter = ThroughputMeter("cpu", flops=1, processes=processes)
    meter.begin()
    now[0] = 12.5
    meter.batch_ready()
    loss, norm = torch.tensor(1.5), torch.tensor(2.5, dtype=torch.float64)
    (line,) = meter.end(7, 0.1, loss, norm, tokens=1000, supervised=torch.tensor(30))
    speeds = {"tokens_per_s": 400.0 * processes, "supervised_per_s": 12.0 * processes}
    assert line == {"step": 7, "loss": 1.5, "lr": 0.1, "grad_norm": 2.5, **speeds}
    (line,) = meter.end(8, 0.1, loss, norm, tokens=10, supervised=None)
    assert line == {"step": 8, "loss": 1.5, "lr": 0.1, "grad_norm": 2.5, "tokens_per_s": 4.0 * processes}
    (line,) = meter.end(9, 0.1, loss, norm, tokens=torch.tensor(50), supervised=torch.tensor(30))
    assert (line["tokens_per_s"], line["supervised_per_s"]) == (20.0 * processes, 12.0 * processes)
    assert meter.drain() == []


@pytest.fixture
def device(monkeypatch):
    """A stand-in for CUDA: events record the time at which the device will be done, which the test sets."""
    state = SimpleNamespace(now=0.0, done=-1.0, memory=2**30, clock=100.0)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = state.now

        def query(self):
            return self.at <= state.done

        def synchronize(self):
            state.done = max(state.done, self.at)

        def elapsed_time(self, other):
            return 1000 * (other.at - self.at)

    empty = torch.empty
    monkeypatch.setattr(throughput.torch.cuda, "Event", Event)
    monkeypatch.setattr(throughput.torch, "empty", lambda *shape, pin_memory, **options: empty(*shape, **options))
    monkeypatch.setattr(throughput.torch.cuda, "max_memory_allocated", lambda device: state.memory)
    monkeypatch.setattr(throughput, "peak_flops", lambda device: 1000.0)
    monkeypatch.setattr(throughput.time, "monotonic", lambda: state.clock)
    return state


def launch(meter, device, step, *, start, end, tokens=100):
    meter.begin()
    device.now = start
    meter.batch_ready()
    device.now = end
    scalar = torch.tensor(float(step))
    return meter.end(step, 0.5, scalar, 2 * scalar, tokens=tokens, supervised=None)


def test_lines_on_cuda_come_when_steps_are_done(device):
    meter = ThroughputMeter("cuda", flops=5, processes=2)
    assert launch(meter, device, 0, start=1.0, end=2.0) == []
    device.done = 2.0
    device.memory = 3 * 2**29
    (line,) = launch(meter, device, 1, start=2.5, end=4.0)
    # 2 processes of 100 tokens in the second from 1.0 to 2.0; 5 FLOPs per token of 2 * 1000 at most
    assert line == {
        "step": 0,
        "loss": 0.0,
        "lr": 0.5,
        "grad_norm": 0.0,
        "tokens_per_s": 200.0,
        "mfu": 0.5,
        "memory_gib": 1.5,
        "stall": 0.0,
    }
    device.memory = 2**31  # read at most once a second
    (line,) = meter.drain()
    assert (line["step"], line["loss"], line["grad_norm"]) == (1, 1.0, 2.0)
    assert (line["tokens_per_s"], line["stall"], line["memory_gib"]) == (100.0, 0.25, 1.5)  # idle from 2.0 to 2.5
    device.clock += 1.5
    launch(meter, device, 2, start=10.0, end=10.5)
    (line,) = meter.drain()
    assert (line["tokens_per_s"], line["stall"], line["memory_gib"]) == (400.0, 0.0, 2.0)  # timed from its own start


def test_at_most_three_steps_are_pending_on_cuda(device):
    meter = ThroughputMeter("cuda", flops=1)
    found = [launch(meter, device, step, start=step, end=step + 1) for step in range(5)]
    assert [[line["step"] for line in lines] for lines in found] == [[], [], [], [0], [1]]
    assert [line["step"] for line in meter.drain()] == [2, 3, 4]
    assert meter.drain() == []


def test_no_mfu_without_a_known_peak(device, monkeypatch):
    monkeypatch.setattr(throughput, "peak_flops", lambda device: None)
    meter = ThroughputMeter("cuda", flops=1)
    launch(meter, device, 0, start=1.0, end=2.0)
    (line,) = meter.drain()
    assert "mfu" not in line


def test_ratios_and_speeds_are_rounded(device):
    """Four decimals for ratios, two for memory, one for speeds."""
    device.memory = 1_234_567_890
    meter = ThroughputMeter("cuda", flops=10, processes=3)
    launch(meter, device, 0, start=0.0, end=1.0)
    launch(meter, device, 1, start=2.0, end=4.0, tokens=111)
    _, line = meter.drain()
    assert (line["tokens_per_s"], line["mfu"]) == (111.0, 0.37)
    assert (line["stall"], line["memory_gib"]) == (0.3333, 1.15)
    launch(meter, device, 2, start=10.0, end=13.0, tokens=100.01)
    (line,) = meter.drain()
    assert line["tokens_per_s"] == 100.0
    assert line["mfu"] == 0.3333
