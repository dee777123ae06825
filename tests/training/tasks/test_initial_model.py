"""A run without a model section has the model of init_from, and its adapters must fit that one."""

import pytest

from niels_gpt.config import LoRAConfig, ModelConfig, RunConfig, TrainConfig
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import save_checkpoint
from niels_gpt.training.tasks.initial_model import with_initial_model

DEFAULT = ModelConfig()
LARGE = ModelConfig(T=16, C=288, L=6, H=2, d_ff=300, norm="rmsnorm", mlp="swiglu")


def started(tmp_path, base: ModelConfig, **lora) -> RunConfig:
    """The config of a run that starts from a checkpoint of `base` with these adapters."""
    save_checkpoint(tmp_path / "base.pt", GPT(base), None, 1, base)
    train = TrainConfig(lora=LoRAConfig(**{"rank": 2} | lora))
    return with_initial_model(RunConfig(train=train, init_from=str(tmp_path / "base.pt")))


@pytest.mark.parametrize("lora", [{"layers": 6}, {"rank": 280}, {"targets": ("mlp.gate", "mlp.up")}])
def test_adapters_that_only_the_model_of_init_from_has(lora, tmp_path):
    """The default model has 4 blocks, 256 columns and no gate."""
    config = started(tmp_path, LARGE, **lora)
    assert config.model.L == 6 and config.model.mlp == "swiglu"


@pytest.mark.parametrize(
    ("base", "lora", "named"),
    [
        (LARGE, {"layers": 7}, r"layers=7.*model\.L=6"),
        (LARGE, {"rank": 289}, "rank=289.*288"),
        (DEFAULT, {"layers": 5}, r"layers=5.*model\.L=4"),
        (DEFAULT, {"targets": ("mlp.gate",)}, r"mlp\.gate"),
    ],
)
def test_adapters_that_it_does_not_have(base, lora, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        started(tmp_path, base, **lora)
