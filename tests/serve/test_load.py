"""A short run of the mixed load; `python -m tests.serve.load --minutes 10` is the long one."""

import asyncio

import pytest

from niels_gpt import GPT, ModelConfig, save_checkpoint
from tests.serve import load


@pytest.mark.slow
def test_mixed_load(tmp_path):
    model = GPT(ModelConfig(T=128, C=32, L=1, H=2))
    save_checkpoint(tmp_path / "small.pt", model, None, 0, model.config)
    process, port, name = load.start_server(tmp_path / "small.pt", "--slots", "8", "--threads", "1")
    try:
        report = asyncio.run(load.run(port, name, process.pid, seconds=8, clients=12, seed=1))
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0
    assert not report.failures
    assert min(report.counts.values()) > 0 and len(report.counts) == 7
    assert report.growth < 0.25  # seconds are too short for the limit of 5 %
