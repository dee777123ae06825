"""The GPT compared with a forward pass written as loops in float64, and its properties one by one."""

from __future__ import annotations

import copy
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt import GPT, ModelConfig, loss_fn, rope_cache
from niels_gpt.config import PRESETS
from niels_gpt.model.backend import PLAIN, use_backend
from niels_gpt.model.kv_cache import KVCache
from niels_gpt.runs.checkpoint import build_model
from niels_gpt.system.device import bf16_autocast

SIZES = {"V": 61, "T": 16, "C": 32, "L": 2, "H": 4, "D": 8, "d_ff": 48, "dropout": 0.0}
V1: dict[str, object] = {"norm": "rmsnorm", "mlp": "swiglu"}
LLAMA = {**V1, "n_kv_heads": 2, "tie_embeddings": False, "rope_theta": 50.0}
OPTIONS: dict[str, dict[str, object]] = {
    "v0": {},
    "v1": V1,
    "one-kv-head": {"norm": "rmsnorm", "n_kv_heads": 1},
    "untied": {"mlp": "swiglu", "tie_embeddings": False},
    "llama": LLAMA,
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
v0_and_v1 = pytest.mark.parametrize("options", [{}, V1], ids=["v0", "v1"])


def make(seed: int = 0, **changes: object) -> GPT:
    torch.manual_seed(seed)
    return GPT({**SIZES, **changes}).eval()


def roughen(model: GPT, seed: int = 1) -> GPT:
    """Set weights as large as trained ones and norms away from 1: an error anywhere then shows in the logits."""
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


def rotated(vector: np.ndarray, position: int, theta: float) -> np.ndarray:
    """RoPE of one head at one position, pair by pair."""
    out = vector.copy()
    for i in range(len(vector) // 2):
        angle = position * theta ** (-2 * i / len(vector))
        a, b = vector[2 * i], vector[2 * i + 1]
        out[2 * i] = a * math.cos(angle) - b * math.sin(angle)
        out[2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def reference_logits(model: GPT, ids: list[int]) -> np.ndarray:
    """(n, V) for one row in float64, with a loop over positions, heads and keys."""
    w = {name: p.detach().double().numpy() for name, p in model.state_dict().items()}
    c = model.config
    norm = rms_norm if c.norm == "rmsnorm" else layer_norm
    D, kv = c.C // c.H, (c.n_kv_heads or c.H)
    stream = [w["tok_emb.weight"][i].copy() for i in ids]
    for layer in range(c.L):
        block = f"blocks.{layer}."
        queries, keys, values = [], [], []
        for position, x in enumerate(stream):
            heads = (w[block + "attn.qkv.weight"] @ norm(x, w[block + "norm_attn.weight"])).reshape(-1, D)
            assert len(heads) == c.H + 2 * kv
            queries.append([rotated(head, position, c.rope_theta) for head in heads[: c.H]])
            keys.append([rotated(head, position, c.rope_theta) for head in heads[c.H : c.H + kv]])
            values.append(heads[c.H + kv :])
        for t in range(len(stream)):
            mixed = []
            for h in range(c.H):
                g = h * kv // c.H  # the key/value head of this query head
                scores = [queries[t][h] @ keys[s][g] / math.sqrt(D) for s in range(t + 1)]
                top = max(scores)
                weights = [math.exp(score - top) for score in scores]
                mixed.append(sum(a * values[s][g] for s, a in enumerate(weights)) / sum(weights))
            x = stream[t] + w[block + "attn.out.weight"] @ np.concatenate(mixed)
            normed = norm(x, w[block + "norm_mlp.weight"])
            hidden = w[block + "mlp.up.weight"] @ normed
            hidden = silu(w[block + "mlp.gate.weight"] @ normed) * hidden if c.mlp == "swiglu" else gelu(hidden)
            stream[t] = x + w[block + "mlp.down.weight"] @ hidden
    return np.array([w["lm_head.weight"] @ norm(x, w["norm.weight"]) for x in stream])


@every_option
def test_logits_match_the_loops(options: dict[str, object]) -> None:
    """With the plain backend and with that of the CPU; in float64 with tables in float64."""
    model = roughen(make(**options))
    ids = some_ids(2, 16)
    expected = np.stack([reference_logits(model, row) for row in ids.tolist()])
    assert np.abs(expected).max() > 3  # small logits would hide errors
    with torch.no_grad():
        np.testing.assert_allclose(model(ids).numpy(), expected, atol=2e-4)
        with use_backend(model, PLAIN):
            np.testing.assert_allclose(model(ids).numpy(), expected, atol=2e-4)
        sin, cos = rope_cache(16, 8, theta=model.config.rope_theta, dtype=torch.float64)
        model.double().sin, model.cos = sin[0, 0, :, None], cos[0, 0, :, None]
        np.testing.assert_allclose(model(ids).numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("H", [1, 2])
def test_heads_of_other_sizes(H: int) -> None:
    model = roughen(make(H=H, D=32 // H))
    ids = some_ids(1, 16)
    expected = reference_logits(model, ids[0].tolist())
    np.testing.assert_allclose(model(ids)[0].detach().numpy(), expected, atol=2e-4)


# --- shapes, weights, sizes ------------------------------------------------------------------------


def test_any_length_up_to_T() -> None:
    model = roughen(make())
    ids = some_ids(3, 16)
    with torch.no_grad():
        full = model(ids)
        for n in range(1, 17):
            logits = model(ids[:, :n])
            assert logits.shape == (3, n, 61) and logits.dtype == torch.float32
            torch.testing.assert_close(logits, full[:, :n], atol=1e-4, rtol=1e-4)  # later tokens are not seen


@pytest.mark.parametrize("shape", [(1, 17), (2, 40), (1, 0), (5,), (1, 2, 3)])
def test_ids_of_other_shapes_raise(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"T=16.*{re.escape(str(shape))}"):
        make()(torch.zeros(shape, dtype=torch.int64))


def test_an_untied_head_is_a_separate_matrix() -> None:
    model = make(tie_embeddings=False)
    assert model.lm_head.weight is not model.tok_emb.weight
    assert model.lm_head.weight.shape == (61, 32)
    assert model.num_parameters() == make().num_parameters() + 61 * 32
    assert [name for name, _ in model.named_parameters()][-1] == "lm_head.weight"
    other = make(seed=3, tie_embeddings=False)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)
    assert not torch.equal(model.lm_head.weight, model.tok_emb.weight)


def test_the_options_keep_the_initial_weights_of_the_defaults() -> None:
    """An untied head is drawn last, and RoPE's base draws nothing: the others come out the same."""
    default = make().state_dict()
    for changes in ({"tie_embeddings": False}, {"rope_theta": 500.0}):
        for name, weight in make(**changes).state_dict().items():
            if name != "lm_head.weight":
                assert torch.equal(weight, default[name]), name


def test_the_head_is_the_embedding() -> None:
    model = make()
    assert model.lm_head.weight is model.tok_emb.weight
    assert model.tok_emb.weight.shape == (61, 32)
    assert model.lm_head.bias is None
    assert model.double().lm_head.weight is model.tok_emb.weight
    model.load_state_dict(make(seed=3).state_dict())
    assert model.lm_head.weight is model.tok_emb.weight


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
def test_the_names_of_the_weights(options: dict[str, object]) -> None:
    """A checkpoint is read by them, and there are no biases."""
    mlp = ["mlp.gate", "mlp.up", "mlp.down"] if options else ["mlp.up", "mlp.down"]
    block = ["norm_attn", "attn.qkv", "attn.out", "norm_mlp", *mlp]
    names = ["tok_emb", *(f"blocks.{layer}.{name}" for layer in range(2) for name in block), "norm", "lm_head"]
    assert list(make(**options).state_dict()) == [f"{name}.weight" for name in names]


@every_option
def test_only_weights_are_saved(options: dict[str, object]) -> None:
    """Buffers that are derived from the config (RoPE's tables) are not part of a checkpoint."""
    model = make(**options)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()} | {"lm_head.weight"}


@pytest.mark.parametrize(("L", "options"), [(1, {}), (2, V1), (8, {"tie_embeddings": False})])
def test_initial_weights(L: int, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = GPT({**SIZES, "V": 256, "C": 64, "H": 4, "D": 16, "d_ff": 256, "L": L, **options})
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.ones_like(p)), name
            continue
        residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
        assert p.std().item() == pytest.approx(0.02 / math.sqrt(2 * L) if residual else 0.02, rel=0.06), name
        assert abs(p.mean().item()) < 0.002, name


@pytest.mark.parametrize(("V", "options"), [(61, {}), (256, V1), (61, LLAMA)])
def test_untrained_loss_is_near_ln_V(V: int, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = GPT({**SIZES, "V": V, "C": 64, "D": 16, **options}).eval()
    x, y = some_ids(32, 16, seed=3, V=V), some_ids(32, 16, seed=4, V=V)
    with torch.no_grad():
        assert loss_fn(model(x), y).item() == pytest.approx(math.log(V), abs=0.1)


# --- causality -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
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
        ({"n_kv_heads": 3}, ["n_kv_heads=3", "H=4"]),
        ({"n_kv_heads": 8}, ["n_kv_heads=8", "H=4"]),
        ({"n_kv_heads": -1}, ["n_kv_heads", "-1"]),
        ({"n_kv_heads": 2.0}, ["n_kv_heads", "2.0"]),
        ({"tie_embeddings": 1}, ["tie_embeddings", "1"]),
        ({"rope_theta": 1.0}, ["rope_theta", "1.0"]),
        ({"rope_theta": math.inf}, ["rope_theta", "inf"]),
        ({"rope_theta": True}, ["rope_theta", "True"]),
        ({"rope_theta": "10000"}, ["rope_theta", "'10000'"]),
    ],
)
def test_errors_name_the_numbers(changes: dict[str, object], numbers: list[str]) -> None:
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


def test_kv_heads() -> None:
    """0, None and H are the same: one head of keys and values per query head."""
    for same in (0, None, 4):
        config = ModelConfig(**{**SIZES, "n_kv_heads": same})
        assert (config.n_kv_heads, config.kv_heads) == (0, 4)
        assert config == ModelConfig(**SIZES)
    config = ModelConfig(**SIZES, n_kv_heads=2)
    assert (config.n_kv_heads, config.kv_heads) == (2, 2)
    assert make(n_kv_heads=2).layers()[0].attn.qkv.weight.shape == ((4 + 2 * 2) * 8, 32)


def test_rope_theta_is_a_float() -> None:
    assert ModelConfig().rope_theta == 10000.0
    assert type(ModelConfig(rope_theta=500000).rope_theta) is float
    assert ModelConfig(rope_theta=1.5).rope_theta == 1.5


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


@pytest.mark.parametrize("options", [{}, LLAMA], ids=["v0", "llama"])
def test_one_batch_is_memorized(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = GPT({**SIZES, "d_ff": 128, **options}).train()
    x, y = some_ids(2, 16, seed=5), some_ids(2, 16, seed=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(90):
        optimizer.zero_grad()
        model.loss(x, y).backward()
        optimizer.step()
    assert model.loss(x, y).item() < 0.05


@every_option
def test_every_weight_gets_a_gradient(options: dict[str, object]) -> None:
    model = make(**options).train()
    loss_fn(model(some_ids(2, 16)), some_ids(2, 16, seed=8)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name


@every_option
def test_bf16_autocast_is_close_and_keeps_the_stream_in_float32(options: dict[str, object]) -> None:
    """Matmuls are bfloat16; the residual stream and the gradients are float32."""
    model, ids = roughen(make(**options)), some_ids(2, 16)
    exact = model(ids)
    loss_fn(exact, some_ids(2, 16, seed=8)).backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    streams = set()
    for block in model.layers():
        block.register_forward_hook(lambda module, args, output: streams.update((args[0].dtype, output.dtype)))
    with bf16_autocast("cpu"):
        with torch.no_grad():
            still = model(ids)
        logits = model(ids)
        loss_fn(logits, some_ids(2, 16, seed=8)).backward()
    assert streams == {torch.float32} and logits.dtype == torch.bfloat16
    torch.testing.assert_close(still, logits.detach(), atol=0.05, rtol=0.05)
    assert 0 < (logits.float() - exact).abs().mean() < 0.02 * exact.abs().mean()
    for (name, p), expected in zip(model.named_parameters(), gradients, strict=True):
        assert p.grad.dtype == torch.float32
        assert (p.grad - expected).norm() < 0.08 * expected.norm(), name


@every_option
def test_bfloat16_is_close(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = roughen(make(**options)), some_ids(2, 16)
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)  # it may not know bfloat16
        exact = model(ids)
        half = model.bfloat16()(ids)
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).abs().mean() < 0.1 * exact.abs().mean()


# --- how it is called ------------------------------------------------------------------------------


@every_option
def test_a_deep_copy_is_an_equal_and_independent_model(options: dict[str, object]) -> None:
    model, ids = make(**options), some_ids(2, 16)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(ids), model(ids))
    assert (twin.lm_head.weight is twin.tok_emb.weight) == model.config.tie_embeddings
    with torch.no_grad():
        twin.norm.weight.mul_(2)
    assert not torch.equal(twin(ids), model(ids))


def test_recomputed_activations_are_those_of_training_alone() -> None:
    """Blocks run once more in the backward pass, but only in training with gradients."""
    model, ids = make(), some_ids(1, 4)
    calls: list[int] = []
    model.layers()[0].register_forward_pre_hook(lambda *_: calls.append(1))
    model.checkpoint_activations = True
    for training, gradients, number in ((True, True, 2), (False, True, 1), (True, False, 1)):
        calls.clear()
        model.train(training)
        with torch.set_grad_enabled(gradients):
            loss = model.loss(ids, ids)
        if gradients:
            loss.backward()
        assert len(calls) == number


@torch.no_grad()
def test_which_forward_passes_are_plain_causal() -> None:
    """Only those may use kernels that know nothing of caches, segments and positions."""
    model, seen = make(), []
    model.layers()[0].register_forward_pre_hook(lambda module, args: seen.append(args[2]))
    ids, other = some_ids(2, 6), torch.arange(6).expand(2, 6)
    cache = KVCache(model.config, 2, device=model.device, dtype=torch.float32)
    for options in ({}, {"segments": other // 4}, {"positions": other}, {"cache": cache}):
        model(ids, **options)
    assert [context.plain_causal for context in seen] == [True, False, False, False]
    sin, cos = seen[0].tables
    expected = rope_cache(6, 8)
    assert torch.equal(sin, expected[0][0, 0]) and torch.equal(cos, expected[1][0, 0])
    learned = make(positions="learned")
    learned.layers()[0].register_forward_pre_hook(lambda module, args: seen.append(args[2]))
    learned(ids, positions=other)
    assert seen[-1].plain_causal and seen[-1].tables == (None, None)


def test_the_constructor_changes_nothing_in_the_process(monkeypatch):
    """Threads and the allocator are set by programs, such as one that loads a checkpoint."""
    prepared = []
    monkeypatch.setattr("niels_gpt.system.host_limits.prepare_torch", lambda: prepared.append(1))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: prepared.append(number))
    config = {"T": 8, "C": 8, "L": 1, "H": 1}
    state = GPT(config).state_dict()
    assert prepared == []
    build_model(config, state, where="here")
    assert prepared == [1]
