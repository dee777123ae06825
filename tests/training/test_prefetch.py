"""Prefetching batches."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from niels_gpt.training.prefetch import Prefetcher
from niels_gpt.training.tasks.base import Batch


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def build(step):
    x = torch.arange(6).view(2, 3) + 100 * step
    return Batch(x, x + 1)


def test_without_a_gpu_each_batch_is_built_on_demand():
    built = []

    def recorded(step):
        built.append(step)
        return build(step)

    with Prefetcher(recorded, first=4, last=9, device="cpu", ahead=2) as batches:
        assert built == []
        for step in range(4, 9):
            batch = batches.next()
            assert built == list(range(4, step + 1))
            assert torch.equal(batch.x, build(step).x)
            assert torch.equal(batch.targets, build(step).targets)
    assert prefetch_threads() == []


# --- the thread, with a stand-in for CUDA -----------------------------------------------------------


class Pinned:
    """A batch that records how it was moved."""

    def __init__(self, step):
        self.step, self.moves = step, []

    def pinned(self):
        self.moves.append("pinned")
        return self

    def to(self, device):
        self.moves.append(str(device))
        return self

    def __iter__(self):
        return iter([])


@pytest.fixture
def fake_cuda(monkeypatch):
    """CUDA without a device; records which device the thread selects."""
    selected = []
    event = SimpleNamespace(record=lambda stream: None, wait=lambda stream: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "copies")
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "main")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: selected.append(str(device)))
    return selected


@pytest.mark.parametrize(("device", "selected"), [("cuda", []), ("cuda:1", ["cuda:1"])])
def test_a_thread_builds_batches_ahead(fake_cuda, device, selected):
    built, ready = [], threading.Semaphore(0)

    def build(step):
        built.append(step)
        ready.release()
        return Pinned(step)

    with Prefetcher(build, first=3, last=7, device=device, ahead=1) as batches:
        for _ in range(2):  # one in the queue, one that waits for space in it
            assert ready.acquire(timeout=60)
        assert built == [3, 4]
        for step in range(3, 7):
            batch = batches.next()
            assert (batch.step, batch.moves) == (step, ["pinned", device])
    assert built == [3, 4, 5, 6]
    assert fake_cuda == selected
    assert prefetch_threads() == []


@pytest.mark.parametrize(("first", "last", "ahead"), [(0, 5, 0), (5, 5, 2)])
def test_no_thread_without_batches_to_prefetch(fake_cuda, first, last, ahead):
    with Prefetcher(Pinned, first=first, last=last, device="cuda", ahead=ahead) as batches:
        assert prefetch_threads() == []
        if first < last:
            assert batches.next().moves == ["cuda"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_error_while_building_is_raised_by_next(fake_cuda, device):
    def broken(step):
        raise OSError("the disk is gone")

    with Prefetcher(broken, first=0, last=2, device=device, ahead=1) as batches, pytest.raises(OSError, match="gone"):
        batches.next()


# --- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_arrive_complete_and_in_order(ahead):
    segments = torch.zeros(2, 3, dtype=torch.int64)

    def with_structure(step):
        x, targets, *_ = build(step)
        return Batch(x, targets, segments, x % 7)

    with Prefetcher(with_structure, first=2, last=40, device="cuda", ahead=ahead) as batches:
        for step in range(2, 40):
            batch, expected = batches.next(), with_structure(step)
            assert batch.x.is_cuda
            assert not batch.segments.is_cuda
            for found, wanted in zip(batch, expected, strict=True):
                assert torch.equal(found.cpu(), wanted)
            torch.empty(1 << 20, device="cuda").fill_(step)  # would reuse freed memory
    assert prefetch_threads() == []


@pytest.mark.gpu
def test_an_error_in_the_thread_is_raised_after_the_good_batches():
    def broken_at_three(step):
        if step == 3:
            raise OSError("the disk is gone")
        return build(step)

    with Prefetcher(broken_at_three, first=0, last=10, device="cuda", ahead=2) as batches:
        for step in range(3):
            assert torch.equal(batches.next().x.cpu(), build(step).x)
        with pytest.raises(OSError, match="gone"):
            batches.next()


@pytest.mark.gpu
def test_leaving_early_ends_the_thread():
    with Prefetcher(build, first=0, last=10**9, device="cuda", ahead=2) as batches:
        batches.next()
    assert prefetch_threads() == []
