"""The GPT against a forward pass written out with loops in float64, and its promises one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt import GPT, ModelConfig, loss_fn, rope_cache
from niels_gpt.config import PRESETS
from niels_gpt.model.gpt import RMSNorm, SwiGLU, number_of_weights, weight_shapes
from niels_gpt.system.device import bf16_autocast

SIZES = {"V": 61, "T": 16, "C": 32, "L": 2, "H": 4, "D": 8, "d_ff": 48, "dropout": 0.0}
V1 = {"norm": "rmsnorm", "mlp": "swiglu"}
OPTIONS = [{}, V1, {"norm": "rmsnorm"}, {"mlp": "swiglu"}]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=["v0", "v1", "rmsnorm", "swiglu"])
v0_and_v1 = pytest.mark.parametrize("options", OPTIONS[:2], ids=["v0", "v1"])


def make(seed: int = 0, **changes: object) -> GPT:
    torch.manual_seed(seed)
    return GPT({**SIZES, **changes}).eval()


def roughen(model: GPT, seed: int = 1) -> GPT:
    """Weights as large as trained ones, norms away from 1: an error anywhere then shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.3 * noise if p.dim() == 1 else 1.5 * noise / p.shape[1] ** 0.5)
    return model


def some_ids(rows: int, n: int, seed: int = 2, V: int = 61) -> torch.Tensor:
    return torch.randint(V, (rows, n), generator=torch.Generator().manual_seed(seed))


# --- the reference ---------------------------------------------------------------------------------


def layer_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / math.sqrt(x.var() + 1e-5) * weight


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / math.sqrt(sum(v * v for v in x) / len(x) + 1e-5) * weight


def gelu(x: np.ndarray) -> np.ndarray:
    return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x])


def silu(x: np.ndarray) -> np.ndarray:
    return np.array([v / (1 + math.exp(-v)) for v in x])


def turned(vector: np.ndarray, position: int) -> np.ndarray:
    """RoPE of one head at one position, pair by pair."""
    out = vector.copy()
    for i in range(len(vector) // 2):
        angle = position * 10000.0 ** (-2 * i / len(vector))
        a, b = vector[2 * i], vector[2 * i + 1]
        out[2 * i] = a * math.cos(angle) - b * math.sin(angle)
        out[2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def reference_logits(model: GPT, ids: list[int]) -> np.ndarray:
    """(n, V) for one row, float64: every position, head and key in a loop of its own."""
    w = {name: p.detach().double().numpy() for name, p in model.state_dict().items()}
    norm = rms_norm if model.config.norm == "rmsnorm" else layer_norm
    H, C = model.config.H, model.config.C
    D = C // H
    stream = [w["tok_emb.weight"][i].copy() for i in ids]
    for layer in range(model.config.L):
        at = f"blocks.{layer}."
        queries, keys, values = [], [], []
        for position, x in enumerate(stream):
            qkv = w[at + "attn.qkv.weight"] @ norm(x, w[at + "norm_attn.weight"])
            q, k, v = qkv[:C].reshape(H, D), qkv[C : 2 * C].reshape(H, D), qkv[2 * C :].reshape(H, D)
            queries.append([turned(head, position) for head in q])
            keys.append([turned(head, position) for head in k])
            values.append(v)
        for t in range(len(stream)):
            mixed = []
            for h in range(H):
                scores = [queries[t][h] @ keys[s][h] / math.sqrt(D) for s in range(t + 1)]
                top = max(scores)
                weights = [math.exp(score - top) for score in scores]
                mixed.append(sum(a * values[s][h] for s, a in enumerate(weights)) / sum(weights))
            x = stream[t] + w[at + "attn.out.weight"] @ np.concatenate(mixed)
            normed = norm(x, w[at + "norm_mlp.weight"])
            hidden = w[at + "mlp.up.weight"] @ normed
            gated = model.config.mlp == "swiglu"
            hidden = silu(w[at + "mlp.gate.weight"] @ normed) * hidden if gated else gelu(hidden)
            stream[t] = x + w[at + "mlp.down.weight"] @ hidden
    return np.array([w["tok_emb.weight"] @ norm(x, w["norm.weight"]) for x in stream])


@every_option
@pytest.mark.parametrize("H", [1, 2, 4])
def test_logits_match_the_loops(H: int, options: dict[str, str]) -> None:
    model = roughen(make(H=H, D=32 // H, **options))
    ids = some_ids(2, 16)
    with torch.no_grad():
        single = model(ids)
        sin, cos = rope_cache(16, 32 // H, dtype=torch.float64)  # the model's own tables are float32
        model.double().sin, model.cos = sin[0, 0, :, None, None], cos[0, 0, :, None, None]
        double = model(ids)
    expected = np.stack([reference_logits(model, row) for row in ids.tolist()])
    assert np.abs(expected).max() > 3  # spread out, or the comparison below says little
    np.testing.assert_allclose(single.numpy(), expected, atol=2e-4)
    np.testing.assert_allclose(double.numpy(), expected, atol=1e-10)


# --- the parts of v1 -------------------------------------------------------------------------------


def some_norm(dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(24).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * torch.randn(24, generator=torch.Generator().manual_seed(3)))
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("size", [0.003, 1.0, 50.0])  # at the first, eps is of the size of the mean square
def test_rms_norm_is_the_formula(size: float, gradients: bool, dtype: torch.dtype) -> None:
    norm = some_norm(dtype)
    x = size * (0.5 + torch.randn(2, 5, 24, dtype=dtype, generator=torch.Generator().manual_seed(4)))
    result = norm(x.requires_grad_(gradients))  # on a CPU there are two ways to compute it
    assert result.dtype == dtype and result.requires_grad
    expected = [
        [rms_norm(v, norm.weight.detach().double().numpy()) for v in row] for row in x.detach().double().numpy()
    ]
    np.testing.assert_allclose(result.detach().numpy(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-13)


def test_rms_norm_has_the_right_gradient() -> None:
    norm = some_norm(torch.float64)
    generator = torch.Generator().manual_seed(5)
    for size in (0.003, 1.0):
        x = size * (0.5 + torch.randn(2, 3, 24, dtype=torch.float64, generator=generator))
        weight = norm.weight.detach().clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, (x,)),
            (x.requires_grad_(), weight),
            eps=1e-6 * size,
            atol=1e-5,
        )


@pytest.mark.parametrize("autocast", [False, True])
def test_rms_norm_has_the_gradient_of_torch(autocast: bool) -> None:
    """In float32, also for a gradient that is no plain block of memory, and where backward runs inside autocast."""
    norm = some_norm(torch.float32)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(4, 6, 24, generator=generator)
    upstream = torch.randn(6, 24, 4, generator=generator).permute(2, 0, 1)
    found, expected = [], []
    for function, into in ((norm, found), (lambda x: F.rms_norm(x, (24,), norm.weight, 1e-5), expected)):
        leaf = x.clone().requires_grad_()
        with bf16_autocast("cpu", autocast and function is norm):
            into += torch.autograd.grad(function(leaf), (leaf, norm.weight), upstream)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert all(gradient.dtype == torch.float32 for gradient in found)


def test_rms_norm_of_zeros() -> None:
    norm, x = some_norm(torch.float32), torch.zeros(1, 2, 24, requires_grad=True)
    result = norm(x)
    assert (result == 0).all()
    result.sum().backward()
    torch.testing.assert_close(x.grad, (norm.weight / 1e-5**0.5).expand(1, 2, 24))
    assert (norm.weight.grad == 0).all()


def test_swiglu_is_the_formula() -> None:
    mlp = SwiGLU(ModelConfig(**{**SIZES, **V1})).double()
    x = 2 * torch.randn(3, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    gate, up, down = (m.weight.detach().numpy() for m in (mlp.gate, mlp.up, mlp.down))
    assert (gate.shape, up.shape, down.shape) == ((48, 32), (48, 32), (32, 48))
    expected = [[down @ (silu(gate @ v) * (up @ v)) for v in row] for row in x.numpy()]
    np.testing.assert_allclose(mlp(x).detach().numpy(), expected, rtol=1e-10, atol=1e-12)


# --- shapes, weights, sizes ------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 17))
def test_any_length_up_to_T(n: int) -> None:
    model = roughen(make())
    ids = some_ids(3, 16)
    with torch.no_grad():
        logits, whole = model(ids[:, :n]), model(ids)
    assert logits.shape == (3, n, 61) and logits.dtype == torch.float32
    torch.testing.assert_close(logits, whole[:, :n], atol=1e-4, rtol=1e-4)  # what follows is not seen


@pytest.mark.parametrize("shape", [(1, 17), (2, 40), (1, 0), (5,), (1, 2, 3)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"16"):
        make()(torch.zeros(shape, dtype=torch.int64))


def test_the_head_is_the_embedding() -> None:
    model = make()
    assert model.lm_head.weight is model.tok_emb.weight
    assert model.tok_emb.weight.shape == (61, 32)
    assert model.lm_head.bias is None
    assert model.double().lm_head.weight is model.tok_emb.weight
    model.load_state_dict(make(seed=3).state_dict())
    assert model.lm_head.weight is model.tok_emb.weight


@every_option
@pytest.mark.parametrize("sizes", [{}, {"V": 256, "L": 3, "d_ff": 100}, {"C": 64, "H": 2, "D": 32, "L": 1}])
def test_number_of_parameters(sizes: dict[str, int], options: dict[str, str]) -> None:
    model = make(**sizes, **options)
    c = model.config
    matrices = 3 if c.mlp == "swiglu" else 2
    block = 4 * c.C * c.C + matrices * c.C * c.d_ff + 2 * c.C  # q, k, v, out; (gate,) up, down; two norms
    assert model.num_parameters() == c.V * c.C + c.L * block + c.C
    assert sum(p.numel() for p in model.parameters()) == model.num_parameters()


def test_v0_has_the_size_of_the_spec() -> None:
    model = GPT(ModelConfig())
    c = model.config
    assert (c.V, c.T, c.C, c.L, c.H, c.D, c.d_ff, c.dropout) == (256, 256, 256, 4, 4, 64, 1024, 0.1)
    assert model.num_parameters() == 256 * 256 + 4 * (4 * 256 * 256 + 2 * 256 * 1024 + 2 * 256) + 256


def test_v1_has_the_size_of_the_spec() -> None:
    model = GPT(PRESETS["v1"])
    c = model.config
    assert (c.V, c.T, c.C, c.L, c.H, c.D, c.d_ff, c.dropout) == (16004, 1024, 512, 8, 8, 64, 1536, 0.0)
    assert (c.norm, c.mlp) == ("rmsnorm", "swiglu")
    block = 4 * 512 * 512 + 3 * 512 * 1536 + 2 * 512
    assert model.num_parameters() == 16004 * 512 + 8 * block + 512 == 35_465_728
    assert model.lm_head.weight is model.tok_emb.weight


def test_v0_is_the_default() -> None:
    assert ModelConfig(**PRESETS["v0"]) == ModelConfig()
    assert (ModelConfig().norm, ModelConfig().mlp) == ("layernorm", "gelu")
    assert ModelConfig(C=512, H=8).d_ff == 2048


@pytest.mark.parametrize(("C", "d_ff"), [(24, 64), (32, 128), (48, 128), (50, 192), (512, 1408), (768, 2048)])
def test_the_hidden_width_of_swiglu(C: int, d_ff: int) -> None:
    """8/3 C, rounded up to a multiple of 64; a width that is given stays."""
    assert ModelConfig(C=C, H=1, mlp="swiglu").d_ff == d_ff
    assert ModelConfig(C=C, H=1, mlp="swiglu", d_ff=100).d_ff == 100


@v0_and_v1
def test_the_names_of_the_weights(options: dict[str, str]) -> None:
    """A checkpoint is read by them, and there are no biases."""
    mlp = ["mlp.gate", "mlp.up", "mlp.down"] if options else ["mlp.up", "mlp.down"]
    block = ["norm_attn", "attn.qkv", "attn.out", "norm_mlp", *mlp]
    names = ["tok_emb", *(f"blocks.{layer}.{name}" for layer in range(2) for name in block), "norm", "lm_head"]
    assert list(make(**options).state_dict()) == [f"{name}.weight" for name in names]


@every_option
def test_only_weights_are_saved(options: dict[str, str]) -> None:
    """What is derived from the config (RoPE tables) is not part of a checkpoint."""
    model = make(**options)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()} | {"lm_head.weight"}


@v0_and_v1
@pytest.mark.parametrize("L", [1, 2, 8])
def test_initial_weights(L: int, options: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = GPT({**SIZES, "V": 256, "C": 64, "H": 4, "D": 16, "d_ff": 256, "L": L, **options})
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.ones_like(p)), name
            continue
        residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
        assert p.std().item() == pytest.approx(0.02 / math.sqrt(2 * L) if residual else 0.02, rel=0.06), name
        assert abs(p.mean().item()) < 0.002, name


@every_option
@pytest.mark.parametrize("V", [61, 256])
def test_untrained_loss_is_near_ln_V(V: int, options: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = GPT({**SIZES, "V": V, "C": 64, "D": 16, **options}).eval()
    x, y = some_ids(32, 16, seed=3, V=V), some_ids(32, 16, seed=4, V=V)
    with torch.no_grad():
        assert loss_fn(model(x), y).item() == pytest.approx(math.log(V), abs=0.1)


# --- causality -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(n=st.integers(2, 16), data=st.data())
def test_a_token_changes_nothing_before_it(n: int, data: st.DataObject) -> None:
    model = roughen(make())
    ids = some_ids(1, n, seed=data.draw(st.integers(0, 1000)))
    t = data.draw(st.integers(0, n - 1))
    other = ids.clone()
    other[0, t] = (ids[0, t] + data.draw(st.integers(1, 60))) % 61
    with torch.no_grad():
        before, after = model(ids)[0], model(other)[0]
    torch.testing.assert_close(after[:t], before[:t], atol=1e-5, rtol=1e-5)
    assert (after[t] - before[t]).abs().max() > 1e-3  # but it does change its own position


def test_no_gradient_flows_from_the_future() -> None:
    model = roughen(make())
    seen: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, args: object, output: torch.Tensor) -> None:
        output.retain_grad()
        seen.append(output)

    model.tok_emb.register_forward_hook(keep)
    model(some_ids(1, 16))[0, 7].sum().backward()
    gradient = seen[0].grad[0].abs().sum(dim=-1)
    assert (gradient[8:] == 0).all()
    assert (gradient[:8] > 0).all()


def test_rows_do_not_see_each_other() -> None:
    model = roughen(make())
    ids = some_ids(4, 16)
    with torch.no_grad():
        together = model(ids)
        for row in range(4):
            torch.testing.assert_close(model(ids[row : row + 1])[0], together[row], atol=1e-4, rtol=1e-4)


# --- configuration ---------------------------------------------------------------------------------


def test_dict_and_config_make_the_same_model() -> None:
    torch.manual_seed(5)
    from_dict = GPT(dict(SIZES))
    torch.manual_seed(5)
    from_config = GPT(ModelConfig(**SIZES))
    torch.manual_seed(5)
    without_D = GPT({key: value for key, value in SIZES.items() if key != "D"})
    assert from_dict.config == from_config.config == without_D.config == ModelConfig(**SIZES)
    for name, p in from_dict.state_dict().items():
        assert torch.equal(p, from_config.state_dict()[name])
        assert torch.equal(p, without_D.state_dict()[name])


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"D": 16}, ["16", "32", "4", "8"]),
        ({"D": 0}, ["0", "8"]),
        ({"C": 34, "D": 8}, ["34", "4"]),
        ({"C": 30, "H": 4, "D": 7}, ["30", "4"]),
        ({"C": 12, "H": 4, "D": 3}, ["12", "4", "3"]),
        ({"dropout": 1.0}, ["1.0"]),
        ({"dropout": -0.1}, ["-0.1"]),
        ({"V": 0}, ["V", "0"]),
        ({"T": -3}, ["T", "-3"]),
        ({"L": 0}, ["L", "0"]),
        ({"H": 0}, ["H", "0"]),
        ({"C": 32.0}, ["C", "32.0"]),
        ({"d_ff": -1}, ["d_ff", "-1"]),
        ({"width": 7}, ["width"]),
    ],
)
def test_numbers_that_do_not_fit_are_named(changes: dict[str, object], numbers: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        GPT({**SIZES, **changes})
    for number in numbers:
        assert number in str(caught.value)


@pytest.mark.parametrize(
    ("option", "allowed"), [("norm", ["'layernorm'", "'rmsnorm'"]), ("mlp", ["'gelu'", "'swiglu'"])]
)
@pytest.mark.parametrize("value", ["RMSNorm", "", "relu", None, 1, ["gelu"]])
def test_options_that_do_not_exist_are_named(option: str, allowed: list[str], value: object) -> None:
    for build in (lambda: GPT({**SIZES, option: value}), lambda: ModelConfig(**{option: value})):
        with pytest.raises(ValueError) as caught:
            build()
        for part in (f"model.{option}", repr(value), *allowed):
            assert part in str(caught.value)


# --- modes and training ----------------------------------------------------------------------------


def test_eval_is_deterministic_and_dropout_is_not() -> None:
    model = make(dropout=0.2)
    ids = some_ids(2, 16)
    with torch.no_grad():
        assert torch.equal(model(ids), model(ids))
        model.train()
        assert not torch.equal(model(ids), model(ids))
        torch.manual_seed(9)
        first = model(ids)
        torch.manual_seed(9)
        assert torch.equal(model(ids), first)
        torch.manual_seed(10)
        assert not torch.equal(model(ids), first)


def test_dropout_zero_trains_as_it_evaluates() -> None:
    model, ids = make(dropout=0.0), some_ids(2, 16)
    with torch.no_grad():
        assert torch.equal(model.train()(ids), model.eval()(ids))


def test_dropout_reaches_the_embedding_and_both_branches() -> None:
    """With everything but one place silenced, the output still varies: dropout is at that place."""
    ids = some_ids(1, 1)
    for kept in ("embedding", "attn", "mlp"):
        model = roughen(make(dropout=0.5, L=1)).train()
        with torch.no_grad():
            if kept != "attn":
                model.blocks[0].attn.out.weight.zero_()
            if kept != "mlp":
                model.blocks[0].mlp.down.weight.zero_()
            if kept != "embedding":
                model.drop.p = 0.0
            torch.manual_seed(0)
            assert not torch.allclose(model(ids), model(ids)), kept


@v0_and_v1
def test_one_batch_is_learnt_by_heart(options: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = GPT({**SIZES, "d_ff": 128, **options}).train()
    x, y = some_ids(4, 16, seed=5), some_ids(4, 16, seed=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    loss = loss_fn(model(x), y)
    for _ in range(250):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss_fn(model(x), y)
    assert loss.item() < 0.05


@every_option
def test_every_weight_gets_a_gradient(options: dict[str, str]) -> None:
    model = make(**options).train()
    loss_fn(model(some_ids(2, 16)), some_ids(2, 16, seed=8)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name


@every_option
def test_bf16_autocast_is_close_and_keeps_the_stream_in_float32(options: dict[str, str]) -> None:
    """Products are bfloat16; norms take and give float32, in training as in evaluation, and so are the gradients."""
    model, ids = roughen(make(**options)), some_ids(2, 16)
    exact = model(ids)
    loss_fn(exact, some_ids(2, 16, seed=8)).backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    seen: dict[str, set[tuple[torch.dtype, torch.dtype]]] = {}
    for module in model.modules():
        kind = "norm" if isinstance(module, RMSNorm | torch.nn.LayerNorm) else type(module).__name__
        if kind in ("norm", "Linear"):
            module.register_forward_hook(
                lambda module, args, output, kind=kind: seen.setdefault(kind, set()).add((args[0].dtype, output.dtype))
            )
    with bf16_autocast("cpu"):
        with torch.no_grad():
            still = model(ids)
        logits = model(ids)
        loss_fn(logits, some_ids(2, 16, seed=8)).backward()
    assert seen["norm"] == {(torch.float32, torch.float32)}
    assert {given for _, given in seen["Linear"]} == {torch.bfloat16}
    torch.testing.assert_close(still, logits.detach(), atol=0.05, rtol=0.05)
    assert 0 < (logits.float() - exact).abs().mean() < 0.02 * exact.abs().mean()
    for (name, p), expected in zip(model.named_parameters(), gradients, strict=True):
        assert p.grad.dtype == torch.float32
        assert (p.grad - expected).norm() < 0.05 * expected.norm(), name


@every_option
def test_bfloat16_is_close(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # it may not know bfloat16
    model, ids = roughen(make(**options)), some_ids(2, 16)
    with torch.no_grad():
        exact = model(ids)
        half = model.bfloat16()(ids)
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).abs().mean() < 0.1 * exact.abs().mean()


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("positions", ["rope", "learned"])
@pytest.mark.parametrize("sizes", [{"L": 2}, {"d_ff": 7, "L": 5}])
def test_the_weights_of_a_model_that_is_not_made(norm, mlp, positions, sizes):
    config = ModelConfig(V=50, T=12, C=16, H=2, norm=norm, mlp=mlp, positions=positions, **sizes)
    made = GPT(config)
    assert number_of_weights(config) == sum(p.numel() for p in made.parameters())
    assert list(weight_shapes(config)) == [(name, tuple(w.shape)) for name, w in made.state_dict().items()]
