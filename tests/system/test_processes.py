"""A single process, the environment variables of torchrun, and the device of each process."""

import pytest
import torch

from niels_gpt.system.processes import SINGLE_PROCESS, World, check_single_process, device_of_rank, open_world

VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_single_process_is_the_main_one():
    assert World(rank=0, size=1, device="cpu", restarts=0) == SINGLE_PROCESS
    assert SINGLE_PROCESS.is_main and not World(rank=1, size=2).is_main
    assert World(rank=1, size=3).share == (1, 3)
    assert SINGLE_PROCESS.broadcast("x") == "x"
    SINGLE_PROCESS.barrier()


def test_without_torchrun_there_is_one_process(monkeypatch):
    with open_world("cpu") as world:
        assert (world.rank, world.size, world.device, world.restarts) == (0, 1, "cpu", 0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    with open_world("cpu") as world:
        assert world.restarts == 3


@pytest.mark.parametrize(
    ("variables", "facts"),
    [({"WORLD_SIZE": "2"}, ["RANK", "torchrun"]), ({"WORLD_SIZE": "two"}, ["WORLD_SIZE", "'two'"])],
)
def test_invalid_variables_are_named(variables, facts, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as caught, open_world("cpu"):
        pytest.fail("the world opened")
    for fact in facts:
        assert fact in str(caught.value)


def test_a_command_for_one_process_fails_under_torchrun(monkeypatch):
    check_single_process(SINGLE_PROCESS)
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_single_process(SINGLE_PROCESS)
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_single_process(World(rank=0, size=2))
    with pytest.raises(ValueError, match="train and pipeline"):
        check_single_process(SINGLE_PROCESS)


def test_one_gpu_per_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of_rank("cpu", 7) == "cpu"
    assert [device_of_rank("cuda", local_rank) for local_rank in (0, 1)] == ["cuda:0", "cuda:1"]
    with pytest.raises(ValueError, match=r"2.*--nproc-per-node=2"):
        device_of_rank("cuda", 2)
    for device in ("cuda:1", "mps"):
        with pytest.raises(ValueError, match=device):
            device_of_rank(device, 0)
