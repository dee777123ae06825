"""Segments and positions compared with attention written as loops, and with the same spans computed alone."""

from __future__ import annotations

import cmath
import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt import GPT, ModelConfig
from niels_gpt.model import segments as segments_module
from niels_gpt.model.rope import rotate
from niels_gpt.model.segments import Segments
from niels_gpt.system.device import bf16_autocast

T, V = 40, 61
CONFIG = ModelConfig(V=V, T=T, C=32, L=2, H=4, d_ff=48, dropout=0.0)
V1 = {"norm": "rmsnorm", "mlp": "swiglu"}
ROPE_AND_LEARNED = pytest.mark.parametrize("kind", ["rope", "learned"])


def make(dtype: torch.dtype = torch.float32, **changes: object) -> GPT:
    """A model with large weights and norms away from 1: which positions see each other shows in the logits."""
    model = GPT(dataclasses.replace(CONFIG, **changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p.dim() == 1) + 0.15 * torch.randn(p.shape, generator=generator))
    return model.to(dtype)


MODELS = {kind: make(positions=kind) for kind in ("rope", "learned")}


def some_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def ids_of(*lengths: int) -> list[int]:
    """Segments 1, 2, ... of these lengths."""
    return [i for i, length in enumerate(lengths, start=1) for _ in range(length)]


# --- the reference ---------------------------------------------------------------------------------


def attention_by_loops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: list[int]) -> torch.Tensor:
    """Attention (n, H, D) of one row, with loops over heads, queries and keys and a mask."""
    n, H, D = q.shape
    out = torch.zeros_like(v)
    for h in range(H):
        for t in range(n):
            scores = [
                float(q[t, h] @ k[s, h]) / math.sqrt(D) if s <= t and segments[s] == segments[t] else -math.inf
                for s in range(n)
            ]
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            for s in range(n):
                out[t, h] += weights[s] / sum(weights) * v[s, h]
    return out


def rotated(x: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """x (n, H, D) with neighbouring pairs rotated by `position * 10000**(-2i/D)`."""
    out = x.clone()
    n, H, D = x.shape
    for t in range(n):
        for h in range(H):
            for i in range(0, D, 2):
                number = complex(x[t, h, i], x[t, h, i + 1]) * cmath.exp(1j * positions[t] * 10000.0 ** (-i / D))
                out[t, h, i], out[t, h, i + 1] = number.real, number.imag
    return out


@torch.no_grad()
def logits_by_loops(model: GPT, ids: torch.Tensor, segments: list[int], positions: list[int]) -> torch.Tensor:
    """(n, V) of one row (n,) for a float64 model."""
    c = model.config
    h = model.tok_emb.weight[ids]
    if model.pos_emb is not None:
        h = h + torch.stack([model.pos_emb.weight[position] for position in positions])
    for block in model.layers():
        heads = (block.norm_attn(h) @ block.attn.qkv.weight.T).view(len(ids), -1, c.D)
        q, k, v = heads.split((c.H, c.kv_heads, c.kv_heads), dim=1)
        k, v = (t.repeat_interleave(c.H // c.kv_heads, dim=1) for t in (k, v))
        if model.pos_emb is None:
            q, k = rotated(q, positions), rotated(k, positions)
        h = h + attention_by_loops(q, k, v, segments).flatten(1) @ block.attn.out.weight.T
        h = h + block.mlp(block.norm_mlp(h))
    return model.norm(h) @ model.tok_emb.weight.T


def kernel_by_loops(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, edges: torch.Tensor, edges_k: torch.Tensor, longest: int, _: int
) -> torch.Tensor:
    """`varlen_attn`, sequence by sequence."""
    assert q.dtype == k.dtype == v.dtype and edges.dtype == torch.int32 and edges is edges_k
    bounds = edges.tolist()
    assert bounds[0] == 0 and bounds[-1] == len(q)
    assert longest == max(b - a for a, b in itertools.pairwise(bounds))
    parts = [attention_by_loops(q[a:b], k[a:b], v[a:b], [0] * (b - a)) for a, b in itertools.pairwise(bounds)]
    return torch.cat(parts)


def use_groups(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Segments, "_worth_grouping", True)


def use_mask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Segments, "_worth_grouping", False)


def use_kernel(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(segments_module, "fits_varlen", lambda v: True)
    patch.setattr(segments_module, "varlen_kernel", lambda: kernel_by_loops)


WAYS = {"groups": use_groups, "mask": use_mask, "varlen": use_kernel}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@every_way
@settings(max_examples=25)
@given(data=st.data(), B=st.integers(1, 3), n=st.integers(1, 20))
def test_attention_is_that_of_the_loops(
    way: Callable[[pytest.MonkeyPatch], None], data: st.DataObject, B: int, n: int
) -> None:
    """For ids that are negative, large, unordered, or not adjacent; with one or two key/value heads."""
    ids = st.lists(st.sampled_from([-7, 0, 1, 2, 2**40]), min_size=n, max_size=n)
    rows = data.draw(st.lists(ids, min_size=B, max_size=B))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    G = data.draw(st.sampled_from([1, 2]))  # key/value heads of two query heads
    qk = torch.randn(B, n, 2 + G, 4, generator=generator, dtype=torch.float64)
    v = torch.randn(B, n, G, 4, generator=generator, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        way(patch)
        found = Segments(torch.tensor(rows), device=torch.device("cpu")).attend(qk, v)
    assert found.shape == (B, n, 8)
    for b, row in enumerate(rows):
        k, values = (t.expand(-1, 2, -1) for t in (qk[b, :, 2:], v[b]))
        expected = attention_by_loops(qk[b, :, :2], k, values, row)
        torch.testing.assert_close(found[b].view(n, 2, 4), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("way", [use_groups, use_mask])
def test_segments_of_similar_length_share_a_call(way: Callable[[pytest.MonkeyPatch], None], monkeypatch) -> None:
    """Long segments, so that groups contain padded ones; values and gradients."""
    way(monkeypatch)
    lengths = [[130, 135, 7, 40, 3], [42, 41, 129, 7, 96], [315]]
    rows = torch.tensor([ids_of(*row) for row in lengths])
    generator = torch.Generator().manual_seed(0)
    qk = torch.randn(3, 315, 4, 8, generator=generator, dtype=torch.float64).requires_grad_()
    v = torch.randn(3, 315, 2, 8, generator=generator, dtype=torch.float64).requires_grad_()
    upstream = torch.randn(3, 315, 2, 8, generator=generator, dtype=torch.float64)
    segments = Segments(rows, device=torch.device("cpu"))
    calls = []
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **kw: calls.append(a) or attention(*a, **kw))
    found = segments.attend(qk, v).view_as(v)
    assert len(calls) == (7 if way is use_groups else 1)  # (129, 130, 135), (41, 42), and five of one length
    scores = torch.einsum("bthd,bshd->bhts", qk[:, :, :2], qk[:, :, 2:]) / math.sqrt(8)
    seen = (rows[:, :, None] == rows[:, None, :]) & (torch.arange(315)[:, None] >= torch.arange(315))
    weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(dim=-1)
    expected = torch.einsum("bhts,bshd->bthd", weights, v)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    gradients = torch.autograd.grad(found, (qk, v), upstream)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (qk, v), upstream), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("options", [{}, V1 | {"n_kv_heads": 2}, {"positions": "learned"}], ids=str)
@torch.no_grad()
def test_logits_are_those_of_the_loops(options: dict[str, object]) -> None:
    model = make(torch.float64, **options)
    x = some_ids(3, 12)
    segments = torch.tensor([[0] * 5 + [1] * 7, ids_of(3, 1, 4, 4), [2, 2, 1, 2, 1, 1, 0, 2, 0, 2, 1, 1]])
    positions = torch.randint(T, (3, 12), generator=torch.Generator().manual_seed(2))
    for chosen in (None, positions):
        found = model(x, segments=segments, positions=chosen)
        for row in range(3):
            places = list(range(12)) if chosen is None else chosen[row].tolist()
            expected = logits_by_loops(model, x[row], segments[row].tolist(), places)
            assert expected.abs().max() > 1
            torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-5)  # RoPE's tables are float32
    expected = logits_by_loops(model, x[0], [0] * 12, positions[0].tolist())
    torch.testing.assert_close(model(x[:1], positions=positions[:1])[0], expected, atol=1e-5, rtol=1e-5)


def test_hidden_is_the_input_of_the_head() -> None:
    model, x = make(), some_ids(2, 9)
    keywords = {"segments": torch.tensor([ids_of(4, 5)] * 2), "positions": torch.arange(9, 18).expand(2, 9)}
    hidden = model.hidden(x, **keywords)
    assert hidden.shape == (2, 9, 32)
    assert torch.equal(model.logits(hidden), model(x, **keywords))
    assert torch.equal(model.logits(hidden[:, 3]), model.lm_head(hidden[:, 3]))


# --- one segment: as without -----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 17, T])
@torch.no_grad()
def test_one_segment_gives_the_bits_of_causal_attention(n: int) -> None:
    model, x = make(), some_ids(3, n)
    h = model.tok_emb(x)
    for block in model.layers():
        qkv = block.attn.qkv(block.norm_attn(h)).view(3, n, 3, 4, 8)
        q, k = rotate(qkv[:, :, :2], model.sin[:n, None], model.cos[:n, None]).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, qkv[:, :, 2].transpose(1, 2), is_causal=n > 1)
        h = h + block.attn.out(y.transpose(1, 2).reshape(3, n, 32))
        h = h + block.mlp(block.norm_mlp(h))
    expected = model.lm_head(model.norm(h))
    assert torch.equal(model(x), expected)
    assert torch.equal(model(x, segments=torch.full((3, n), 5)), expected)
    torch.testing.assert_close(model(x, positions=torch.arange(n).expand(3, n)), expected, atol=1e-6, rtol=1e-6)


# --- spans in frames -------------------------------------------------------------------------------


@settings(max_examples=30)
@given(data=st.data(), length=st.integers(1, T), kind=st.sampled_from(["rope", "learned"]))
@torch.no_grad()
def test_a_span_in_a_frame_has_the_logits_of_the_span_alone(data: st.DataObject, length: int, kind: str) -> None:
    """At any offset and with any filler: with RoPE as at offset 0, with learned positions as at its own."""
    model = MODELS[kind]
    s = data.draw(st.integers(0, T - length))
    filler = data.draw(st.integers(0, V - 1))
    span = some_ids(length, seed=data.draw(st.integers(0, 999)))
    frame = torch.full((1, T), filler)
    frame[0, s : s + length] = span
    segments = torch.tensor([[0] * s + [1] * (T - s)])  # the span does not see what follows it in its segment
    found = model(frame, segments=segments)
    assert found.shape == (1, T, V)
    positions = None if kind == "rope" else torch.arange(s, s + length)[None]
    alone = model(span[None], positions=positions)[0]
    assert (found[0, s : s + length] - alone).abs().max() < 1e-5


@torch.no_grad()
def test_learned_positions_depend_on_the_offset() -> None:
    model, span = MODELS["learned"], some_ids(1, 9)
    at = [model(span, positions=torch.arange(s, s + 9)[None]) for s in (0, 1, 30)]
    assert (at[0] - at[1]).abs().max() > 0.1 and (at[0] - at[2]).abs().max() > 0.1


def losses(model: GPT, x: torch.Tensor, mask: torch.Tensor, **keywords: torch.Tensor) -> torch.Tensor:
    """The sum over the positions of `mask` (B, n) of the loss of predicting the next token."""
    logits = model(x, **keywords)[:, :-1]
    each = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none")
    return (each * mask[:, :-1].flatten()).sum()


@pytest.mark.parametrize(
    ("lengths", "options", "kind"),
    [((10, 10, 10, 10), {}, "rope"), ((5, 17, 11, 2, 4), V1, "rope"), ((5, 17, 11, 2, 4), {}, "learned")],
)
def test_a_packed_frame_has_the_loss_and_gradients_of_separate_frames(
    lengths: tuple[int, ...], options: dict[str, str], kind: str
) -> None:
    model = make(positions=kind, **options)
    spans = [some_ids(length, seed=length + 100 * i) for i, length in enumerate(lengths)]
    offsets = [(7 * i) % (T - length + 1) for i, length in enumerate(lengths)]
    frames = torch.zeros(len(spans), T, dtype=torch.int64)
    segments, supervised = torch.zeros_like(frames), torch.zeros(len(spans), T)
    for i, (span, s) in enumerate(zip(spans, offsets, strict=True)):
        frames[i, s : s + len(span)] = span
        segments[i, s:] = 1
        supervised[i, s : s + len(span) - 1] = 1
    unpacked = losses(model, frames, supervised, segments=segments)
    expected = torch.autograd.grad(unpacked, list(model.parameters()))

    packed_mask = torch.cat([torch.tensor([1.0] * (len(span) - 1) + [0.0]) for span in spans])[None]
    begins = [s if kind == "learned" else 0 for s in offsets]
    places = torch.cat([torch.arange(s, s + len(span)) for s, span in zip(begins, spans, strict=True)])[None]
    packed = losses(
        model, torch.cat(spans)[None], packed_mask, segments=torch.tensor([ids_of(*lengths)]), positions=places
    )
    found = torch.autograd.grad(packed, list(model.parameters()))
    assert packed.item() == pytest.approx(unpacked.item(), rel=1e-5)
    for (name, _), ours, theirs in zip(model.named_parameters(), found, expected, strict=True):
        scale = theirs.abs().max().item()
        assert scale > 1e-3, name
        assert (ours - theirs).abs().max().item() < 1e-5 * max(1.0, scale), name


# --- nothing leaks ---------------------------------------------------------------------------------


@every_way
@torch.no_grad()
def test_another_segment_changes_nothing(way: Callable[[pytest.MonkeyPatch], None], monkeypatch) -> None:
    way(monkeypatch)
    model, x = make(L=1), some_ids(2, 20)
    segments = torch.tensor([ids_of(6, 7, 7), [1, 2] * 10])
    before = model(x, segments=segments)
    for changed in (1, 2, 3):
        other = torch.where(segments == changed, (x + 1) % V, x)
        after = model(other, segments=segments)
        same = segments != changed
        assert (after - before)[same].abs().max() < 1e-6
        assert (after - before)[~same].abs().amax(dim=-1).min() > 1e-3


@pytest.mark.parametrize("way", [use_groups, use_mask])
def test_gradients_stay_in_their_segment(way: Callable[[pytest.MonkeyPatch], None], monkeypatch) -> None:
    way(monkeypatch)
    model, x = make(), some_ids(1, 12)
    seen: list[torch.Tensor] = []
    model.tok_emb.register_forward_hook(lambda module, args, output: (output.retain_grad(), seen.append(output))[1])
    model(x, segments=torch.tensor([ids_of(4, 6, 2)]))[0, 7].sum().backward()
    gradient = seen[0].grad[0].abs().sum(dim=-1)
    assert (gradient[4:8] > 1e-3).all()
    assert (gradient[:4] == 0).all() and (gradient[8:] == 0).all()


@torch.no_grad()
def test_a_token_alone_in_its_segment() -> None:
    """No row of the mask is empty, so nothing is NaN."""
    model, x = make(), some_ids(2, 15)
    found = model(x, segments=torch.arange(15).expand(2, 15))
    assert found.isfinite().all()
    alone = model(x.reshape(30, 1), positions=torch.arange(15).repeat(2)[:, None])
    torch.testing.assert_close(found.reshape(30, 1, V), alone, atol=1e-5, rtol=1e-5)


# --- how it is computed ----------------------------------------------------------------------------


def test_segments_are_computed_once_per_forward(monkeypatch) -> None:
    made = []
    init = Segments.__init__
    monkeypatch.setattr(Segments, "__init__", lambda self, *a, **kw: made.append(self) or init(self, *a, **kw))
    make(L=3)(some_ids(2, 9), segments=torch.tensor([ids_of(4, 5)] * 2))
    assert len(made) == 1


@pytest.mark.parametrize(
    ("rows", "grouped"),
    [
        ([ids_of(10, 10, 10, 10)] * 8, True),
        ([ids_of(40)] * 8, True),
        ([ids_of(13, 27)] * 8, True),  # the same lengths in every row: two calls
        ([ids_of(3, 9, 6, 11, 11), ids_of(7, 12, 1, 18, 2)], True),
        ([ids_of(s, 40 - s) for s in range(1, 9)], False),  # many calls, little saved
    ],
)
def test_groups_are_used_only_if_they_save(rows: list[list[int]], grouped: bool, monkeypatch) -> None:
    masks = []
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda *a, **kw: masks.append(kw.get("attn_mask") is not None) or attention(*a, **kw),
    )
    make()(some_ids(len(rows), 40), segments=torch.tensor(rows))
    assert masks and all(masks) == (not grouped) and any(masks) == (not grouped)


@pytest.mark.parametrize("way", [use_groups, use_mask])
def test_attention_stays_float32_under_autocast(way: Callable[[pytest.MonkeyPatch], None], monkeypatch) -> None:
    way(monkeypatch)
    dtypes = set()
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda q, k, v, **kw: dtypes.update((q.dtype, k.dtype, v.dtype)) or attention(q, k, v, **kw),
    )
    model, x, segments = make(), some_ids(2, 20), torch.tensor([ids_of(8, 12), ids_of(3, 17)])
    exact = model(x, segments=segments)
    dtypes.clear()
    with bf16_autocast("cpu"):
        rounded = model(x, segments=segments)
    assert dtypes == {torch.float32}
    assert (rounded.float() - exact).abs().max() < 0.05 * exact.abs().max()


def test_the_kernel_gets_one_dtype(monkeypatch) -> None:
    """Under autocast RoPE makes q and k float32, but v is bfloat16."""
    use_kernel(monkeypatch)
    qk, v = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 2, 8).bfloat16()
    assert Segments(torch.tensor([[1, 1, 2, 2]]), device=qk.device).attend(qk, v).dtype == torch.bfloat16


def test_the_varlen_kernel_of_this_torch_is_causal() -> None:
    """Its arguments depend on the version of torch."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    kernel = segments_module.varlen_kernel()
    assert kernel is not None and kernel.func is varlen.varlen_attn
    assert kernel.keywords in ({"window_size": (-1, 0)}, {"is_causal": True})


# --- on a GPU --------------------------------------------------------------------------------------


GPU_ROWS = [ids_of(10, 10, 10, 10), ids_of(3, 9, 6, 11, 11), [0] * 13 + [1] * 27, [1, 2] * 20]


@pytest.mark.gpu
@ROPE_AND_LEARNED
@pytest.mark.parametrize("way", [None, use_groups, use_mask])
def test_a_gpu_computes_what_the_cpu_does(
    way: Callable[[pytest.MonkeyPatch], None] | None, kind: str, cuda: torch.device, monkeypatch
) -> None:
    """In float32 (groups or mask) nearly exactly, in bfloat16 (one varlen call, if there is one) approximately."""
    if way is not None:
        way(monkeypatch)
    model, x, segments = make(positions=kind), some_ids(4, 40), torch.tensor(GPU_ROWS)
    positions = torch.randint(T, (4, 40), generator=torch.Generator().manual_seed(3))
    losses(model, x, torch.ones(4, 40), segments=segments, positions=positions).backward()
    expected = model(x, segments=segments, positions=positions)
    gradients = [p.grad.clone() for p in model.parameters()]
    model, there = model.to(cuda), {"segments": segments.to(cuda), "positions": positions.to(cuda)}
    for keywords in (there, {"segments": segments, "positions": positions}):
        found = model(x.to(cuda), **keywords).cpu()
        assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        found = model(x.to(cuda), **there)
        loss = losses(model, x.to(cuda), torch.ones(4, 40, device=cuda), **there)
    loss.backward()
    assert (found.float().cpu() - expected).abs().max() < 0.05 * expected.abs().max()
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert (p.grad.cpu() - gradient).norm() < 0.05 * gradient.norm()


@pytest.mark.gpu
@every_way
def test_the_ways_agree_on_a_gpu(way: Callable[[pytest.MonkeyPatch], None], cuda: torch.device, monkeypatch) -> None:
    """In half precision, compared with float64 on the CPU; without patches by the varlen kernel of torch."""
    generator = torch.Generator().manual_seed(0)
    qk = torch.randn(4, 40, 8, 16, generator=generator)
    v = torch.randn(4, 40, 4, 16, generator=generator)
    segments = Segments(torch.tensor(GPU_ROWS), device=torch.device("cpu"))
    expected = segments.attend(qk.double(), v.double())
    half = v.to(cuda, torch.bfloat16)
    if way is use_kernel:
        if not segments_module.fits_varlen(half):
            pytest.skip("this torch or this GPU has no such kernel")
    else:
        monkeypatch.setattr(segments_module, "fits_varlen", lambda v: False)
        way(monkeypatch)
    found = Segments(torch.tensor(GPU_ROWS), device=cuda).attend(qk.to(cuda, torch.bfloat16), half)
    assert (found.cpu().double() - expected).abs().max() < 0.05


# --- details of the implementation ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "D", "capability", "fits"),
    [
        (torch.bfloat16, 64, (8, 0), True),
        (torch.float16, 256, (9, 0), True),
        (torch.float32, 64, (9, 0), False),
        (torch.bfloat16, 60, (9, 0), False),
        (torch.bfloat16, 264, (9, 0), False),
        (torch.bfloat16, 64, (7, 5), False),
    ],
)
def test_what_the_varlen_kernel_takes(dtype, D, capability, fits, monkeypatch) -> None:
    class OnCuda:
        is_cuda, device, shape = True, "cuda", (2, 3, 4, D)

    monkeypatch.setattr(segments_module, "varlen_kernel", lambda: kernel_by_loops)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    OnCuda.dtype = dtype
    assert segments_module.fits_varlen(OnCuda()) is fits
    monkeypatch.setattr(segments_module, "varlen_kernel", lambda: None)
    assert not segments_module.fits_varlen(OnCuda())
    assert not segments_module.fits_varlen(torch.zeros(2, 3, 4, 64, dtype=torch.bfloat16))


def shapes_of(*rows: list[int]) -> list[tuple[int, int]]:
    return Segments(torch.tensor(rows), device=torch.device("cpu"))._groups[0]


def test_which_segments_share_a_group() -> None:
    """Lengths are rounded up to multiples of an eighth, at least 1 and at most 16."""
    assert shapes_of(ids_of(5, 5, 6)) == [(2, 5), (1, 6)]
    assert shapes_of(ids_of(16, 15, 1)) == [(1, 1), (1, 15), (1, 16)]
    assert shapes_of(ids_of(17, 18, 5)) == [(1, 5), (2, 18)]  # steps of 2
    assert shapes_of(ids_of(129, 144, 145)) == [(2, 144), (1, 145)]  # steps of 16


@pytest.mark.parametrize(
    ("lengths", "worth"),
    [
        ((1, 2, 3, 30), True),  # four groups: always
        ((1, 2, 3, 4, 6), True),  # 66 of 256 scores
        ((1, 2, 4, 5, 26), True),  # 722 of 1,444: exactly half of the scores
        ((1, 2, 3, 4, 25), False),  # 655 of 1,225 scores
    ],
)
def test_when_groups_are_worth_it(lengths: tuple[int, ...], worth: bool) -> None:
    """Up to four groups always; more if they compute at most half of the scores."""
    assert Segments(torch.tensor([ids_of(*lengths)]), device=torch.device("cpu"))._worth_grouping == worth


def test_an_index_that_changes_nothing_is_not_used() -> None:
    whole = Segments(torch.zeros(2, 4, dtype=torch.int64), device=torch.device("cpu"))
    assert whole._sequences[:2] == (None, None) and whole._sequences[3] == 4
    assert whole._sequences[2].tolist() == [0, 4, 8]
    assert whole._groups == ([(2, 4)], None, None)
    mixed = Segments(torch.tensor([[1, 0, 1]]), device=torch.device("cpu"))
    assert mixed._sequences[0].tolist() == [1, 0, 2] and mixed._sequences[1].tolist() == [1, 0, 2]
    assert mixed._sequences[2].tolist() == [0, 1, 3] and mixed._sequences[3] == 2
