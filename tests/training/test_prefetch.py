"""Prefetching batches."""

import threading

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


def test_an_error_while_building_is_raised():
    def broken(step):
        raise OSError("the disk is gone")

    with Prefetcher(broken, first=0, last=2, device="cpu", ahead=2) as batches, pytest.raises(OSError, match="gone"):
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
