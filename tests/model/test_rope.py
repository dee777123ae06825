"""RoPE compared with a loop over rows, heads, positions and pairs with math.cos and math.sin."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt import apply_rope, rope_cache
from niels_gpt.model.rope import rotate


def angle(position: int, i: int, D: int, theta: float = 10000.0) -> float:
    return position * theta ** (-2 * i / D)


def reference(x: torch.Tensor, theta: float = 10000.0) -> np.ndarray:
    """x (B, H, T, D) rotated, in float64."""
    source = x.double().numpy()
    out = np.empty_like(source)
    B, H, T, D = source.shape
    for b in range(B):
        for h in range(H):
            for t in range(T):
                for i in range(D // 2):
                    c, s = math.cos(angle(t, i, D, theta)), math.sin(angle(t, i, D, theta))
                    even, odd = source[b, h, t, 2 * i], source[b, h, t, 2 * i + 1]
                    out[b, h, t, 2 * i] = even * c - odd * s
                    out[b, h, t, 2 * i + 1] = even * s + odd * c
    return out


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- tables ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(T=st.integers(1, 20), half=st.integers(1, 8), theta=st.sampled_from([100.0, 10000.0, 500000.0]))
def test_tables(T: int, half: int, theta: float) -> None:
    sin, cos = rope_cache(T, 2 * half, theta=theta)
    assert sin.shape == cos.shape == (1, 1, T, half)
    assert sin.dtype == cos.dtype == torch.float32
    assert sin.device.type == cos.device.type == "cpu"
    for t in range(T):
        for i in range(half):
            assert sin[0, 0, t, i].item() == pytest.approx(math.sin(angle(t, i, 2 * half, theta)), abs=1e-7)
            assert cos[0, 0, t, i].item() == pytest.approx(math.cos(angle(t, i, 2 * half, theta)), abs=1e-7)


def test_tables_are_computed_in_float64_and_then_cast() -> None:
    """At position 8000 a float32 angle is wrong by up to 2e-4; the table must not be."""
    T, D = 8001, 8
    exact = np.array([[angle(t, i, D) for i in range(D // 2)] for t in range(T)])
    sin, cos = rope_cache(T, D)
    np.testing.assert_allclose(sin[0, 0].numpy(), np.sin(exact), atol=7e-8, rtol=0)
    np.testing.assert_allclose(cos[0, 0].numpy(), np.cos(exact), atol=7e-8, rtol=0)
    sin, cos = rope_cache(T, D, dtype=torch.float64)
    assert sin.dtype == cos.dtype == torch.float64
    np.testing.assert_allclose(sin[0, 0].numpy(), np.sin(exact), atol=1e-11, rtol=0)
    np.testing.assert_allclose(cos[0, 0].numpy(), np.cos(exact), atol=1e-11, rtol=0)
    sin, cos = rope_cache(T, D, dtype=torch.bfloat16)
    assert sin.dtype == cos.dtype == torch.bfloat16
    np.testing.assert_allclose(sin[0, 0].float().numpy(), np.sin(exact), atol=2**-8, rtol=0)


def test_position_zero_and_device() -> None:
    sin, cos = rope_cache(3, 6, device="cpu")
    assert (sin[0, 0, 0] == 0).all() and (cos[0, 0, 0] == 1).all()
    meta = rope_cache(3, 6, device="meta", dtype=torch.float16)
    assert all(table.device.type == "meta" and table.dtype == torch.float16 for table in meta)


# --- rotation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 3, 7, 8), (1, 2, 16, 6)])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_rotation_matches_the_loop(shape: tuple[int, ...], dtype: torch.dtype, atol: float) -> None:
    q, k = noise(*shape, seed=1, dtype=dtype), noise(*shape, seed=2, dtype=dtype)
    sin, cos = rope_cache(shape[2], shape[3], dtype=dtype)
    before = q.clone(), k.clone()
    q_rotated, k_rotated = apply_rope(q, k, sin, cos)
    for given_, rotated in ((q, q_rotated), (k, k_rotated)):
        assert rotated.shape == shape and rotated.dtype == dtype
        np.testing.assert_allclose(rotated.double().numpy(), reference(given_), atol=atol)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])  # the inputs are unchanged


@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 0.04), (torch.float16, 0.005)])
def test_half_precision(dtype: torch.dtype, atol: float) -> None:
    q, k = noise(2, 2, 9, 8, seed=1, dtype=dtype), noise(2, 2, 9, 8, seed=2, dtype=dtype)
    sin, cos = rope_cache(9, 8, dtype=dtype)
    for given_, rotated in zip((q, k), apply_rope(q, k, sin, cos), strict=True):
        assert rotated.shape == given_.shape and rotated.dtype == dtype
        np.testing.assert_allclose(rotated.double().numpy(), reference(given_), atol=atol)


def test_neighboring_dimensions_are_paired() -> None:
    """A rotation of pair 0 by a quarter circle takes (1, 0) to (0, 1): 2i goes with 2i+1, not with i + D/2."""
    x = torch.zeros(1, 1, 1, 4)
    x[..., 0] = 1.0
    sin, cos = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2), torch.tensor([0.0, 1.0]).view(1, 1, 1, 2)
    rotated, _ = apply_rope(x, x, sin, cos)
    assert rotated.flatten().tolist() == [0.0, 1.0, 0.0, 0.0]


def test_inputs_need_not_be_contiguous() -> None:
    token_major = noise(2, 5, 3, 8)  # (B, T, H, D), as a projection gives it
    q = token_major.transpose(1, 2)
    sin, cos = rope_cache(5, 8)
    rotated, _ = apply_rope(q, q, sin, cos)
    np.testing.assert_allclose(rotated.double().numpy(), reference(q), atol=2e-6)


@settings(deadline=None, max_examples=15)
@given(T=st.integers(1, 12), half=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_norms_are_kept(T: int, half: int, seed: int) -> None:
    q = noise(2, 2, T, 2 * half, seed=seed, dtype=torch.float64)
    sin, cos = rope_cache(T, 2 * half, dtype=torch.float64)
    rotated, _ = apply_rope(q, q, sin, cos)
    torch.testing.assert_close(rotated.norm(dim=-1), q.norm(dim=-1))
    pairs = q.unflatten(-1, (half, 2)).norm(dim=-1)
    torch.testing.assert_close(rotated.unflatten(-1, (half, 2)).norm(dim=-1), pairs)


@settings(deadline=None, max_examples=15)
@given(m=st.integers(0, 15), n=st.integers(0, 15), shift=st.integers(0, 16), seed=st.integers(0, 2**31))
def test_scores_depend_only_on_the_distance(m: int, n: int, shift: int, seed: int) -> None:
    D, T = 8, 32
    q, k = noise(D, seed=seed, dtype=torch.float64), noise(D, seed=seed + 1, dtype=torch.float64)
    sin, cos = rope_cache(T, D, dtype=torch.float64)
    q_rotated, k_rotated = apply_rope(q.expand(1, 1, T, D), k.expand(1, 1, T, D), sin, cos)
    scores = q_rotated[0, 0] @ k_rotated[0, 0].T  # (T, T)
    assert scores[m, n].item() == pytest.approx(scores[m + shift, n + shift].item(), abs=1e-9)
    expected = sum(  # by complex numbers: Re(q conj(k) e^{i (m-n) w})
        (complex(*q[2 * i : 2 * i + 2]) * complex(*k[2 * i : 2 * i + 2]).conjugate() * np.exp(1j * angle(m - n, i, D)))
        for i in range(D // 2)
    ).real
    assert scores[m, n].item() == pytest.approx(expected, abs=1e-9)


def test_gradients_rotate_back() -> None:
    """The rotation is orthogonal, so the gradient of a sum of products is the other factor rotated back."""
    q = noise(1, 1, 6, 4, seed=1, dtype=torch.float64).requires_grad_()
    g = noise(1, 1, 6, 4, seed=2, dtype=torch.float64)
    sin, cos = rope_cache(6, 4, dtype=torch.float64)
    rotated, _ = apply_rope(q, q.detach(), sin, cos)
    (rotated * g).sum().backward()
    back, _ = apply_rope(g, g, -sin, cos)
    torch.testing.assert_close(q.grad, back)


# --- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("D", [1, 7])
def test_odd_width(D: int) -> None:
    with pytest.raises(ValueError, match=str(D)):
        rope_cache(4, D)
    x, table = torch.zeros(1, 1, 4, D), torch.zeros(1, 1, 4, D // 2)
    with pytest.raises(ValueError, match=str(D)):
        apply_rope(x, x, table, table)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("wrong", ["longer", "shorter", "width", "flat", "dtype"])
def test_tables_that_do_not_match_raise(which: int, wrong: str) -> None:
    q = torch.zeros(1, 2, 5, 8)
    tables = list(rope_cache(5, 8))
    tables[which] = {
        "longer": rope_cache(6, 8),
        "shorter": rope_cache(1, 8),  # would broadcast and rotate nothing
        "width": rope_cache(5, 4),
        "flat": [table[0, 0] for table in rope_cache(5, 8)],
        "dtype": rope_cache(5, 8, dtype=torch.float64),
    }[wrong][which]
    with pytest.raises(ValueError):
        apply_rope(q, q, *tables)


@pytest.mark.parametrize(
    "k", [torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 5, 8, dtype=torch.float16)]
)
def test_keys_that_do_not_match_raise(k: torch.Tensor) -> None:
    """Broadcasting or promoting k would change its shape or dtype."""
    with pytest.raises(ValueError):
        apply_rope(torch.zeros(1, 2, 5, 8), k, *rope_cache(5, 8))


# --- views -----------------------------------------------------------------------------------------


def aligned() -> torch.Tensor:
    """A slice of a larger tensor whose strides and offset are even: it can be viewed as complex numbers."""
    return noise(2, 5, 3, 8)[:, :, 1:]


def odd_offset() -> torch.Tensor:
    return noise(2 * 5 * 2 * 8 + 1)[1:].view(2, 5, 2, 8)


def odd_stride() -> torch.Tensor:
    return noise(2, 5, 2, 9)[..., :8]


def spread_lanes() -> torch.Tensor:
    return noise(2, 5, 2, 16)[..., ::2]


@pytest.mark.parametrize(
    ("view", "copied"), [(aligned, False), (odd_offset, True), (odd_stride, True), (spread_lanes, True)]
)
def test_only_views_that_are_not_complex_numbers_are_copied(view, copied: bool, monkeypatch) -> None:
    x = view()  # (B, T, H, D)
    copies: list[int] = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, **options: copies.append(1) or clone(self, **options))
    sin, cos = (table[0, 0, :, None] for table in rope_cache(5, 8))
    rotated = rotate(x, sin, cos)
    assert bool(copies) == copied
    np.testing.assert_allclose(rotated.transpose(1, 2).double().numpy(), reference(x.transpose(1, 2)), atol=2e-6)
