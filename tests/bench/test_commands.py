"""Cases that measure commands: the checkpoint they import, the run they export, time and memory of the process."""

import math
import subprocess

import pytest
import torch

from bench import commands
from bench.case import Unavailable
from bench.cases import export, import_hf
from niels_gpt.runs.loading import load_run


def test_the_checkpoint_has_the_weights_of_tinyllama():
    files = import_hf.shapes(layers=22)
    assert len(files) == 7
    assert sum(math.prod(shape) for tensors in files for shape in tensors.values()) == 1_100_048_384


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformers_reads_the_checkpoint(tmp_path, dtype):
    transformers = pytest.importorskip("transformers")
    size = import_hf.write_checkpoint(tmp_path, dtype, **import_hf._size(22, True))
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=getattr(torch, dtype), output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(weight.nbytes for weight in model.parameters()) == size
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_the_run_to_export_loads(tmp_path):
    weights = export.write_run(tmp_path, True)
    loaded = load_run(tmp_path / "run", None, "cpu", None)
    assert loaded.model.num_parameters() == weights
    assert loaded.tokenizer.vocab_size == loaded.model.config.V
    assert (loaded.model.config.norm, loaded.model.config.mlp) == ("rmsnorm", "swiglu")


def test_a_command_that_fails_and_one_that_does_not_exist(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="nowhere"):
        commands.run(["cache", "verify", str(tmp_path / "nowhere")])
    monkeypatch.setattr(commands.subprocess, "run", lambda *args, **options: subprocess.CompletedProcess(args, 2))
    with pytest.raises(Unavailable, match="niels-gpt import hf"):
        commands.require("import", "hf")


def test_time_and_memory_of_a_command():
    done = commands.run(["--help"])
    assert done.seconds > 0 and 5 << 20 < done.peak_bytes < 1 << 30
