"""A GPT with adapters, against a GPT whose matrices are W + (alpha / r) B A in autograd."""

import pytest
import torch
from torch.func import functional_call

from niels_gpt.config import LoRAConfig, ModelConfig
from niels_gpt.model.backend import CPU, PLAIN, use_backend
from niels_gpt.model.gpt import GPT
from niels_gpt.model.lora import (
    adapter_state,
    add_adapters,
    base_state,
    has_adapters,
    merged_model,
)

GELU = {"V": 31, "T": 12, "C": 16, "L": 2, "H": 2, "dropout": 0.0}
LLAMA = {**GELU, "norm": "rmsnorm", "mlp": "swiglu", "d_ff": 24, "H": 4, "n_kv_heads": 2, "tie_embeddings": False}
ATTENTION = ("attn.qkv", "attn.out")


def build(sizes, **options):
    """A model with adapters whose B are not zero."""
    torch.manual_seed(5)
    model = GPT(ModelConfig(**sizes))
    add_adapters(model, LoRAConfig(**{"rank": 3, **options}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("lora_B"):
                weight.normal_(std=0.1)
    return model.train()


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 31, (3, 13), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def reference(model, scale):
    """(loss, {name: gradient of the adapter}) by autograd through the sums."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    adapters = {name: tensor.requires_grad_() for name, tensor in state.items() if "lora_" in name}
    weights = {name: tensor for name, tensor in state.items() if "lora_" not in name}
    for name, A in adapters.items():
        if name.endswith("lora_A"):
            matrix = name.removesuffix("lora_A") + "weight"
            weights[matrix] = weights[matrix] + scale * adapters[name.replace("lora_A", "lora_B")] @ A
    plain = GPT(model.config).train()
    x, y = batch()
    logits = functional_call(plain, weights, (x,), tie_weights=False)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    grads = torch.autograd.grad(loss, list(adapters.values()))
    return loss, dict(zip(adapters, grads, strict=True))


@pytest.mark.parametrize("backend", [PLAIN, CPU], ids=["plain", "cpu"])
@pytest.mark.parametrize(
    ("sizes", "options", "scale"),
    [(GELU, {}, 2.0), (LLAMA, {"alpha": 3.0}, 1.0), (LLAMA, {"targets": ("mlp.gate", "mlp.down"), "alpha": 1.5}, 0.5)],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_loss_and_gradients_are_those_of_the_sums(sizes, options, scale, backend, recompute):
    model = build(sizes, **options)
    model.checkpoint_activations = recompute
    loss, expected = reference(model, scale)
    with use_backend(model, backend):
        ours = model.loss(*batch())
        ours.backward()
    torch.testing.assert_close(ours, loss)
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_new_adapters_change_nothing():
    torch.manual_seed(0)
    model = GPT(ModelConfig(**LLAMA)).eval()
    x, _ = batch()
    before, names = model(x), [name for name, _ in model.named_parameters()]
    add_adapters(model, LoRAConfig(rank=2))
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-6)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert len(trained) == 2 * 5 * model.config.L  # A and B of qkv, out, gate, up, down
    assert list(base_state(model)) == [*names]
    assert sorted(adapter_state(model)) == sorted(trained)


@pytest.mark.parametrize("sizes", [GELU, LLAMA])
def test_the_merged_model_computes_the_same(sizes):
    model = build(sizes).eval()
    merged = merged_model(model)
    x, _ = batch()
    with torch.no_grad():
        assert torch.equal(merged(x), model(x))
    assert not has_adapters(merged)
    assert merged.state_dict().keys() == GPT(model.config).state_dict().keys()
    assert merged.tok_emb.weight.data_ptr() == model.tok_emb.weight.data_ptr()
    assert (merged.lm_head.weight is merged.tok_emb.weight) == model.config.tie_embeddings


def test_targets():
    model = build(LLAMA, targets=ATTENTION)
    matrices = {name.rpartition(".")[0] for name in adapter_state(model)}
    assert matrices == {f"blocks.{layer}.{target}" for layer in range(2) for target in ATTENTION}


def test_the_backward_ends_below_the_adapted_layers():
    model = build(LLAMA, layers=1)
    assert {name.split(".")[1] for name in adapter_state(model)} == {"1"}
    h, context = model.embed(batch()[0], None, None, None)
    assert not model.layers()[0](h, 0, context).requires_grad
    loss, expected = reference(model, 2.0)
    ours = model.loss(*batch())
    ours.backward()
    torch.testing.assert_close(ours, loss)
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-6)


def test_decoders_refuse_a_model_with_adapters():
    with pytest.raises(ValueError, match="adapters"):
        build(GELU).weights()
