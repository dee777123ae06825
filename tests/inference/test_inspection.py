"""Inspection against a naive forward pass, written position by position, for all kinds of models."""

from __future__ import annotations

import math

import pytest
import torch

from niels_gpt import GPT, ModelConfig
from niels_gpt.inference.engine.engine import Engine
from niels_gpt.inference.inspection import attention, embedding, logit_lens, reply_logprobs, visible_context
from niels_gpt.inference.sampling import Sampling
from niels_gpt.model import gpt
from tests.inference.models import spread_model

KINDS = {
    "v0": {},
    "v1": {"norm": "rmsnorm", "mlp": "swiglu", "d_ff": 40},
    "learned": {"positions": "learned"},
    "grouped": {"n_kv_heads": 2, "tie_embeddings": False, "rope_theta": 100.0},
}
VIEWS = {"attend": lambda model: attention(model, IDS, 0, 0), "hidden": lambda model: logit_lens(model, IDS, 0, 1)}
V, T, IDS = 20, 9, [3, 1, 4, 1, 5, 9, 2]


def spread(kind: str) -> GPT:
    torch.manual_seed(1)
    model = GPT(ModelConfig(V=V, T=T, C=16, L=3, H=4, dropout=0.5, **KINDS[kind]))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(1 + 0.3 * torch.randn(p.shape) if p.dim() == 1 else 0.4 * torch.randn(p.shape))
    return model.double().train()


def normed(model: GPT, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if model.config.norm == "layernorm":
        x = x - x.mean()
    return x / (x.square().mean() + 1e-5).sqrt() * weight


def rotated(model: GPT, x: torch.Tensor, position: int) -> torch.Tensor:
    if model.config.positions == "learned":
        return x
    result = x.clone()
    for i in range(0, len(x), 2):
        angle = position * model.config.rope_theta ** (-i / len(x))
        result[i] = x[i] * math.cos(angle) - x[i + 1] * math.sin(angle)
        result[i + 1] = x[i] * math.sin(angle) + x[i + 1] * math.cos(angle)
    return result


@torch.no_grad()
def naive(model: GPT) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[torch.Tensor]]:
    """Return, for IDS, the residual stream after each layer, the attention by layer and head, and the last states."""
    w, c, n = model.state_dict(), model.config, len(IDS)
    H, G, D = c.H, c.n_kv_heads or c.H, c.D
    x = [w["tok_emb.weight"][i] for i in IDS]
    if c.positions == "learned":
        x = [row + w["pos_emb.weight"][i] for i, row in enumerate(x)]
    streams, weights = [], []
    for layer in range(c.L):
        name = f"blocks.{layer}."
        qkv = [w[name + "attn.qkv.weight"] @ normed(model, row, w[name + "norm_attn.weight"]) for row in x]
        heads, outputs = [], [[] for _ in IDS]
        for h in range(H):
            g = h // (H // G)
            q = [rotated(model, row[h * D : (h + 1) * D], i) for i, row in enumerate(qkv)]
            k = [rotated(model, row[(H + g) * D : (H + g + 1) * D], i) for i, row in enumerate(qkv)]
            v = [row[(H + G + g) * D : (H + G + g + 1) * D] for row in qkv]
            matrix = torch.zeros(n, n, dtype=torch.float64)
            for i in range(n):
                scores = torch.stack([q[i] @ k[j] / math.sqrt(D) for j in range(i + 1)])
                matrix[i, : i + 1] = scores.exp() / scores.exp().sum()
                outputs[i].append(sum(matrix[i, j] * v[j] for j in range(i + 1)))
            heads.append(matrix)
        x = [row + w[name + "attn.out.weight"] @ torch.cat(parts) for row, parts in zip(x, outputs, strict=True)]
        for i, row in enumerate(x):
            y = normed(model, row, w[name + "norm_mlp.weight"])
            up = w[name + "mlp.up.weight"] @ y
            if c.mlp == "swiglu":
                gate = w[name + "mlp.gate.weight"] @ y
                up = gate * torch.sigmoid(gate) * up
            else:
                up = 0.5 * up * (1 + torch.erf(up / math.sqrt(2)))
            x[i] = row + w[name + "mlp.down.weight"] @ up
        streams.append(list(x))
        weights.append(heads)
    return streams, weights, [normed(model, row, w["norm.weight"]) for row in x]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_against_a_naive_forward_pass(kind):
    model = spread(kind)
    streams, weights, states = naive(model)
    for layer in range(3):
        for head in range(4):
            got = attention(model, IDS, layer, head)
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, weights[layer][head].float(), atol=1e-6, rtol=1e-5)
    for position in (0, 4, len(IDS) - 1):
        lens = logit_lens(model, IDS, position, 5)
        assert len(lens) == 3
        for layer, top in enumerate(lens):
            h = normed(model, streams[layer][position], model.norm.weight)
            p = (model.lm_head.weight @ h).softmax(dim=0)
            assert [token for token, _ in top] == p.argsort(descending=True)[:5].tolist()
            assert [value for _, value in top] == pytest.approx([float(p[token]) for token, _ in top], rel=1e-5)
    torch.testing.assert_close(embedding(model, IDS), torch.stack(states).mean(dim=0).float())
    assert model.training  # as before; dropout was off


def test_a_long_text_is_embedded_in_windows():
    model, ids = spread("v0"), [(7 * i) % V for i in range(2 * T + 3)]
    parts = [embedding(model, ids[i : i + T]) * len(ids[i : i + T]) for i in range(0, len(ids), T)]
    torch.testing.assert_close(embedding(model, ids), sum(parts) / len(ids))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model: attention(model, [], 0, 0), ["empty"]),
        (lambda model: attention(model, [1] * (T + 1), 0, 0), [str(T + 1), f"T={T}"]),
        (lambda model: attention(model, [V], 0, 0), [str(V)]),
        (lambda model: attention(model, [1], 3, 0), ["layer", "3"]),
        (lambda model: attention(model, [1], -1, 0), ["layer", "-1"]),
        (lambda model: attention(model, [1], 0, 4), ["head", "4"]),
        (lambda model: logit_lens(model, [1], 1, 1), ["position", "1"]),
        (lambda model: logit_lens(model, [1], 0, 0), ["top", "0"]),
        (lambda model: logit_lens(model, [1], 0, V + 1), ["top", str(V + 1)]),
        (lambda model: embedding(model, []), ["empty"]),
        (lambda model: embedding(model, [-1]), ["-1"]),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError) as caught:
        call(spread("v0"))
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("overflow", ["half", "slide"])
@pytest.mark.parametrize(("prompt_length", "pinned"), [(5, 0), (5, 3), (30, 8), (33, 0), (60, 4)])
def test_visible_context_is_what_an_engine_decodes_from(overflow, prompt_length, pinned):
    model = spread_model(T=32, dropout=0.0)
    prompt = [7 * i % 251 for i in range(prompt_length)]
    engine = Engine(model, slots=1, context_overflow=overflow)
    options = {"max_new_tokens": 70, "sampling": Sampling(temperature=0.0), "logprobs": 3, "pinned": pinned}
    request = engine.submit(prompt, **options)
    reported = []
    while engine.busy:
        for event in engine.step():
            reported += event.logprobs
    ids = request.ids
    scored = reply_logprobs(model, ids, prompt_length, top=3, pinned=pinned, context_overflow=overflow)
    assert len(scored) == 70
    for n, (seen, found) in enumerate(zip(reported, scored, strict=True), start=prompt_length):
        visible = visible_context(ids[:n], prompt_length, 32, pinned=pinned, context_overflow=overflow)
        assert len(visible) <= 32 and visible[-1] == ids[n - 1]
        with torch.inference_mode():
            logp = model(torch.tensor([visible]))[0, -1].log_softmax(-1)
        assert seen.logprob == pytest.approx(logp[ids[n]].item(), abs=1e-4)
        if found is not None:
            assert found.token == seen.token and found.logprob == pytest.approx(seen.logprob, abs=1e-4)
            assert [i for i, _ in found.top] == [i for i, _ in seen.top]
    unknown = [n for n, found in enumerate(scored) if found is None]
    assert unknown == ([] if overflow == "half" else list(range(max(33 - prompt_length, 1), 70)))


@pytest.mark.parametrize("name", VIEWS)
def test_edited_code_is_not_shown_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = spread("v0")
    owner = gpt if name == "attend" else GPT
    monkeypatch.setattr(owner, name, lambda *args, original=getattr(owner, name), **options: original(*args, **options))
    with pytest.raises(ValueError, match=rf"model/gpt.py was changed \((GPT\.)?{name}\)"):
        VIEWS[name](model)
