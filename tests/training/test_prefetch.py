"""Batches made ahead."""

import threading

import pytest
import torch

from niels_gpt.training.prefetch import Prefetcher
from niels_gpt.training.tasks.base import Batch


def feeding():
    """Threads that make batches."""
    return [thread for thread in threading.enumerate() if thread.name == "feeder"]


def make(step):
    x = torch.arange(6).view(2, 3) + 100 * step
    return Batch(x, x + 1)


def test_without_a_gpu_each_batch_is_made_when_it_is_asked_for():
    made = []

    def remembered(step):
        made.append(step)
        return make(step)

    with Prefetcher(remembered, first=4, last=9, device="cpu", ahead=2) as feeder:
        assert made == []
        for step in range(4, 9):
            batch = feeder.next()
            assert made == list(range(4, step + 1))
            assert torch.equal(batch.x, make(step).x)
            assert torch.equal(batch.targets, make(step).targets)
    assert feeding() == []


def test_an_error_comes_out():
    def broken(step):
        raise OSError("the disk is gone")

    with Prefetcher(broken, first=0, last=2, device="cpu", ahead=2) as feeder, pytest.raises(OSError, match="gone"):
        feeder.next()


# --- on a GPU --------------------------------------------------------------------------------------


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    return "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_arrive_in_order_and_whole(ahead, cuda):
    segments = torch.zeros(2, 3, dtype=torch.int64)

    def with_structure(step):
        x, targets, *_ = make(step)
        return Batch(x, targets, segments, x % 7)

    with Prefetcher(with_structure, first=2, last=40, device=cuda, ahead=ahead) as feeder:
        for step in range(2, 40):
            batch, expected = feeder.next(), with_structure(step)
            assert batch.x.is_cuda
            assert not batch.segments.is_cuda
            for found, wanted in zip(batch, expected, strict=True):
                assert torch.equal(found.cpu(), wanted)
            torch.empty(1 << 20, device=cuda).fill_(step)  # something that could take freed memory
    assert feeding() == []


@pytest.mark.gpu
def test_an_error_in_the_thread_comes_out_after_what_was_good(cuda):
    def broken_at_three(step):
        if step == 3:
            raise OSError("the disk is gone")
        return make(step)

    with Prefetcher(broken_at_three, first=0, last=10, device=cuda, ahead=2) as feeder:
        for step in range(3):
            assert torch.equal(feeder.next().x.cpu(), make(step).x)
        with pytest.raises(OSError, match="gone"):
            feeder.next()


@pytest.mark.gpu
def test_leaving_early_ends_the_thread(cuda):
    with Prefetcher(make, first=0, last=10**9, device=cuda, ahead=2) as feeder:
        feeder.next()
    assert feeding() == []
