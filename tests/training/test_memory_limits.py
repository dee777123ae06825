"""What does not fit into memory: refused beforehand, or said by name."""

import resource

import pytest

from niels_gpt.config import ModelConfig, RunConfig, TrainConfig
from niels_gpt.training.memory_limits import (
    OutOfMemory,
    check_size,
    machine_memory,
    reporting_out_of_memory,
)
from tests.training.test_step import SIZES, config_of, too_much


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_errors_that_mean_no_memory(kind):
    with pytest.raises(OutOfMemory, match="no memory is left for the tea"), reporting_out_of_memory("the tea"):
        too_much(kind)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), KeyError("x")])
def test_errors_that_mean_something_else(error):
    with pytest.raises(type(error)) as raised, reporting_out_of_memory("the tea"):
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    ("model", "B", "named"),
    [
        ({"V": 10**14}, 4, r"model of 1,600,000,\d{3},\d{3},\d{3} weights"),
        ({"d_ff": 10**12}, 4, r"model of [\d,]+ weights"),
        ({"L": 10**12}, 4, r"model of [\d,]+ weights"),
        ({}, 2**63 - 1, r"batch of 9,223,372,036,854,775,807 rows"),
        ({}, 10**20, r"batch of 100,000,000,000,000,000,000 rows"),
        ({"T": 10**15}, 4, r"T=1,000,000,000,000,000"),
    ],
)
def test_numbers_that_no_machine_has_room_for(model, B, named):
    config = RunConfig(model=ModelConfig(**{**SIZES, **model}), train=TrainConfig(B=B))
    with pytest.raises(ValueError, match=named + r".*GiB.*memory of this machine \([\d.,]+ GiB\): take a smaller"):
        check_size(config)


def test_a_limit_of_the_process_is_its_memory(monkeypatch):
    check_size(config_of())
    whole = machine_memory()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10_000, resource.RLIM_INFINITY))
    assert machine_memory() == 10_000 < whole
    with pytest.raises(ValueError, match="weights"):
        check_size(config_of())
