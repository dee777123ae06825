"""Memory limits: what is rejected beforehand, and how running out of memory is reported."""

import resource

import pytest

from niels_gpt.config import ModelConfig, RunConfig, TrainConfig
from niels_gpt.model.sizes import number_of_weights
from niels_gpt.training import memory_limits
from niels_gpt.training.memory_limits import (
    OutOfMemory,
    check_size,
    gib,
    is_out_of_memory,
    machine_memory,
    reporting_out_of_memory,
    weights_text,
)
from tests.training.test_step import SIZES, config_of, too_much


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_errors_that_mean_no_memory(kind):
    with pytest.raises(OutOfMemory, match="out of memory for the tea"), reporting_out_of_memory("the tea"):
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
        ({"L": 10**12}, 4, r"model of [\d,]+ weights"),
        ({}, 10**18, r"batch of 1,000,000,000,000,000,000 rows"),
        ({"T": 10**15}, 4, r"T=1,000,000,000,000,000"),
    ],
)
def test_sizes_that_no_machine_has_memory_for(model, B, named):
    config = RunConfig(model=ModelConfig(**{**SIZES, **model}), train=TrainConfig(B=B))
    with pytest.raises(ValueError, match=named + r".*GiB.*machine \([\d.,]+ GiB\): use a smaller"):
        check_size(config)


def test_the_limit_of_the_process_counts(monkeypatch):
    check_size(config_of())
    physical = machine_memory()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10_000, resource.RLIM_INFINITY))
    assert machine_memory() == 10_000 < physical
    with pytest.raises(ValueError, match="weights"):
        check_size(config_of())


def test_limits_are_exact(monkeypatch):
    """Four bytes a weight, sixteen a token; processes share a batch."""
    config = config_of()  # 6 rows of 12 tokens
    weights = 4 * number_of_weights(config.model)
    monkeypatch.setattr(memory_limits, "machine_memory", lambda: weights)
    check_size(config)
    monkeypatch.setattr(memory_limits, "machine_memory", lambda: weights - 1)
    with pytest.raises(ValueError, match="weights"):
        check_size(config)
    monkeypatch.setattr(memory_limits, "number_of_weights", lambda model: 1)
    monkeypatch.setattr(memory_limits, "machine_memory", lambda: 16 * 2 * 12)
    check_size(config, processes=3)
    with pytest.raises(ValueError, match="batch of 3 rows of T=12 "):
        check_size(config, processes=2)


def test_sizes_in_messages():
    assert gib(3 * 2**29) == "1.50 GiB"
    assert gib(2**40 - 1) == "1,024.00 GiB"
    assert gib(2**40) == "1,024 GiB"
    assert gib(5 * 2**40 + 2**30 - 1) == "5,120 GiB"
    number = number_of_weights(config_of().model)
    assert weights_text(config_of().model) == f"{number:,} weights (0.00 GiB)"


@pytest.mark.parametrize("message", ["DefaultCPUAllocator: x", "std::bad_alloc", "could not create a primitive"])
def test_messages_that_mean_out_of_memory(message):
    assert is_out_of_memory(RuntimeError(message))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("a shape"))
