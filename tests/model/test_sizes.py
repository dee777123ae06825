"""The shapes and number of weights, computed from a config, are those of the model."""

import pytest
import torch

from niels_gpt import GPT, ModelConfig
from niels_gpt.model.sizes import number_of_weights, weight_shapes

KINDS = [
    {},
    {"norm": "rmsnorm", "mlp": "swiglu", "L": 5},
    {"positions": "learned", "d_ff": 7},
    {"positions": "learned", "bias": True, "mlp": "gelu_tanh"},
    {"norm": "rmsnorm", "mlp": "swiglu", "bias": True, "qk_norm": True},
    {"mlp": "swiglu", "n_kv_heads": 1},
    {"tie_embeddings": False, "n_kv_heads": 2},
    {"positions": "learned", "tie_embeddings": False},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_they_are_those_of_the_model(kind):
    config = ModelConfig(**{"V": 50, "T": 12, "C": 16, "H": 4, "L": 2, **kind})
    with torch.device("meta"):
        model = GPT(config)
    assert number_of_weights(config) == sum(p.numel() for p in model.parameters()) == model.num_parameters()
    assert list(weight_shapes(config)) == [(name, tuple(w.shape)) for name, w in model.state_dict().items()]


def test_v0_and_v1_by_hand():
    assert number_of_weights(ModelConfig()) == 256 * 256 + 4 * (4 * 256 * 256 + 2 * 256 * 1024 + 2 * 256) + 256
    v1 = ModelConfig(V=16004, T=1024, C=512, L=8, H=8, d_ff=1536, norm="rmsnorm", mlp="swiglu")
    assert number_of_weights(v1) == 35_465_728
