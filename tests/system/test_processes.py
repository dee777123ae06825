"""Worlds of processes: shares, collective calls, errors, and torchrun's environment variables."""

import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.system.console import OtherProcessFailed
from niels_gpt.system.processes import (
    ALL_ROWS,
    SINGLE_PROCESS,
    RankShare,
    World,
    _connection_errors,
    check_single_process,
    device_of_rank,
    open_world,
)
from tests.training.worlds import run_world

ROOT = Path(__file__).parents[2]


@given(st.integers(0, 200), st.integers(1, 40))
def test_shares_are_contiguous_and_even(count, size):
    rows = list(range(count))
    shares = [rows[RankShare(rank, size).rows(count)] for rank in range(size)]
    assert list(chain(*shares)) == rows
    assert max(map(len, shares)) - min(map(len, shares)) <= (0 if count % size == 0 else 1)


def test_a_single_process_needs_no_communication():
    tensor = torch.ones(2)
    assert SINGLE_PROCESS.all_reduce(tensor) is tensor
    assert SINGLE_PROCESS.is_main and SINGLE_PROCESS.share == ALL_ROWS == RankShare(0, 1)
    nats, table = SINGLE_PROCESS.sum_arrays(1.5, np.arange(4).reshape(2, 2))
    assert (float(nats), table.tolist(), table.dtype) == (1.5, [[0, 1], [2, 3]], np.float64)
    assert SINGLE_PROCESS.max(3) == 3
    assert SINGLE_PROCESS.all_gather("a") == ["a"]
    assert SINGLE_PROCESS.broadcast("a") == "a"
    assert SINGLE_PROCESS.main_first(lambda: 7) == 7
    SINGLE_PROCESS.barrier()
    with pytest.raises(KeyError, match="b"), SINGLE_PROCESS.fail_together():
        raise KeyError("b")
    assert not torch.distributed.is_initialized()


def collective_calls(world, folder):
    """One of every collective call."""
    tensor = torch.tensor([1.0, world.rank])
    sums = world.sum_arrays(float(world.rank), np.full((2, 1), world.rank), np.array([0.5]))
    outcomes = []
    for failing in (set(), {1}, {1, 2}):
        try:
            with world.fail_together():
                if world.rank in failing:
                    raise KeyError(world.rank)
            outcomes.append("ok")
        except (KeyError, OtherProcessFailed) as err:
            outcomes.append((type(err).__name__, str(err)))

    def build():
        order = len(list(folder.iterdir()))
        if world.is_main:
            (folder / "built").touch()
        return order

    return {
        "world": (world.rank, world.size, world.device, world.restarts, world.is_main, tuple(world.share)),
        "all_reduce": world.all_reduce(tensor).tolist(),
        "sum_arrays": [array.tolist() for array in sums],
        "max": world.max(5 - world.rank),
        "all_gather": world.all_gather(f"rank {world.rank}"),
        "broadcast": world.broadcast(f"from {world.rank}"),
        "fail_together": outcomes,
        "main_first": world.main_first(build),
        "barrier": world.barrier(),
    }


def test_collective_calls_of_three_processes(tmp_path):
    results = run_world(3, collective_calls, tmp_path)
    for rank, result in enumerate(results):
        assert result["world"] == (rank, 3, "cpu", 0, rank == 0, (rank, 3))
        assert result["all_reduce"] == [3.0, 3.0]
        assert result["sum_arrays"] == [3.0, [[3.0], [3.0]], [1.5]]
        assert result["max"] == 5
        assert result["all_gather"] == ["rank 0", "rank 1", "rank 2"]
        assert result["broadcast"] == "from 0"
        assert result["main_first"] == (0 if rank == 0 else 1)  # the others find what the main process built
    # The lowest rank that failed raises its own error; all others exit silently.
    other = ("OtherProcessFailed", "rank 1 failed")
    assert [result["fail_together"] for result in results] == [
        ["ok", other, other],
        ["ok", ("KeyError", "1"), ("KeyError", "1")],
        ["ok", other, other],
    ]


def test_a_world_from_the_environment(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    with open_world("cpu") as world:
        assert world == World(device="cpu")
        check_single_process(world)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with open_world("cpu") as world:
        assert (world.size, world.restarts) == (1, 2)
    assert not torch.distributed.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE .*\bRANK .*torchrun"), open_world("cpu"):
        pass
    with pytest.raises(ValueError, match="torchrun"):
        check_single_process(SINGLE_PROCESS)
    check_single_process(World(size=2))
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match=r"WORLD_SIZE .*'two'"), open_world("cpu"):
        pass


def test_each_rank_gets_one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of_rank("cpu", 7) == "cpu"
    assert [device_of_rank("cuda", local) for local in (0, 1)] == ["cuda:0", "cuda:1"]
    with pytest.raises(ValueError, match=r"process 2 .*--nproc-per-node=2"):
        device_of_rank("cuda", 2)
    for device in ("mps", "cuda:0"):
        with pytest.raises(ValueError, match=f"not on {device}"):
            device_of_rank(device, 0)


@pytest.mark.parametrize(
    ("message", "reason"), [("Gloo: Connection closed by peer [::1]", "Connection closed by peer"), ("NCCL x", "NCCL")]
)
def test_a_lost_process_is_a_connection_error(message, reason):

    with pytest.raises(ConnectionError, match=rf"3 processes .*\({reason}\).*--resume"), _connection_errors(3):
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="another bug"), _connection_errors(3):
        raise RuntimeError("another bug")


def test_one_process_imports_nothing_of_distributed_training():
    names = tuple(f"torch.distributed.{name}" for name in ("checkpoint", "fsdp", "tensor"))
    code = f"import sys, niels_gpt.cli.train; print([name for name in sys.modules if name.startswith({names})])"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    assert ran.stdout.strip() == "[]"
