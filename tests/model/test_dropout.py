"""Dropout: rate, scale and independence by counting, and the mask in the gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.model.dropout import Dropout, keep_mask

N = 200_000


def dropped(p: float, shape: tuple[int, ...] = (N,), seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(seed)
    return Dropout(p).train()(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_rate_scale_and_mean(p: float) -> None:
    out = dropped(p)
    sigma = math.sqrt(p * (1 - p) / N)
    assert (out == 0).double().mean().item() == pytest.approx(p, abs=5 * sigma)
    kept = out[out != 0]
    assert kept.unique().numel() == 1
    assert kept[0].item() == pytest.approx(1 / (1 - p), rel=2e-4)  # the rate is a multiple of 1/65536
    assert out.double().mean().item() == pytest.approx(1.0, abs=5 * sigma / (1 - p))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_elements_are_independent(p: float) -> None:
    """Four elements share one random number: each has the rate, and no two are correlated."""
    zero = (dropped(p, seed=1) == 0).double()
    sigma = math.sqrt(p * (1 - p))
    for lane in range(8):
        part = zero[lane::8]
        assert part.mean().item() == pytest.approx(p, abs=5 * sigma / math.sqrt(len(part)))
    for distance in (1, 2, 3, 4, 5, 8, 16, 64):
        a, b = zero[:-distance] - p, zero[distance:] - p
        assert (a * b).mean().item() == pytest.approx(0.0, abs=5 * sigma**2 / math.sqrt(len(a)))


@settings(deadline=None, max_examples=20)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    p=st.floats(0.0, 0.95),
    seed=st.integers(0, 2**31),
)
def test_every_element_is_zero_or_scaled(shape: tuple[int, ...], p: float, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(shape) + 5.0  # no zeros in the input
    out = Dropout(p).train()(x)
    assert out.shape == x.shape and out.dtype == x.dtype
    ratio = out / x
    near = torch.isclose(ratio, torch.tensor(1 / (1 - p)), rtol=5e-4)
    assert ((out == 0) | near).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    out = dropped(0.25, dtype=dtype)
    assert out.dtype == dtype
    assert (out == 0).double().mean().item() == pytest.approx(0.25, abs=0.005)
    assert out.max().item() == pytest.approx(4 / 3, rel=2**-8)


def test_the_seed_determines_the_mask() -> None:
    assert torch.equal(dropped(0.3, seed=4), dropped(0.3, seed=4))
    assert not torch.equal(dropped(0.3, seed=4), dropped(0.3, seed=5))
    torch.manual_seed(4)
    layer = Dropout(0.3).train()
    first, second = layer(torch.ones(1000)), layer(torch.ones(1000))
    assert not torch.equal(first, second)  # a new mask every time


def test_eval_and_p_zero_are_the_identity() -> None:
    x = torch.randn(50)
    state = torch.get_rng_state()
    assert torch.equal(Dropout(0.7).eval()(x), x)
    assert torch.equal(Dropout(0.0).train()(x), x)
    assert torch.equal(Dropout(0.0).eval()(x), x)
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn


def test_gradient_has_the_mask_of_the_output() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 50, requires_grad=True)
    out = Dropout(0.4).train()(x)
    weights = torch.randn(4, 50)
    (out * weights).sum().backward()
    mask = (out / x).detach()
    assert 0 < (mask == 0).sum() < mask.numel()
    torch.testing.assert_close(x.grad, weights * mask)
    assert ((x.grad == 0) == (out == 0)).all()


def test_input_that_is_not_contiguous() -> None:
    torch.manual_seed(0)
    x = torch.arange(1.0, 13.0).view(3, 4).T
    out = Dropout(0.5).train()(x)
    assert ((out == 0) | (out == 2 * x)).all()


@pytest.mark.parametrize("p", [1e-7, 0.99999, 0.9999999])
def test_rates_near_the_ends_of_the_range(p: float) -> None:
    """ModelConfig allows [0, 1): every rate in it must work."""
    out = dropped(p, shape=(1000,))
    assert torch.isfinite(out).all()
    assert (out == 0).double().mean().item() == pytest.approx(p, abs=0.01)


@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 10])
@pytest.mark.parametrize("p", [0.0, 0.25, 0.999999])
def test_the_mask_is_that_of_the_random_bits(n: int, p: float) -> None:
    """16 bits per element, as signed integers: the smallest share p of them drops."""
    torch.manual_seed(7)
    mask = keep_mask(torch.Size((n,)), p)
    torch.manual_seed(7)
    words = torch.empty(math.ceil(n / 4), dtype=torch.int64).random_(-(2**63), None)
    after = torch.get_rng_state()
    number = min(round(p * 65536), 65535)  # of 65536 values
    values = words.view(torch.int16)[:n].int() + 32768
    expected = torch.where(values < number, 0.0, 65536 / (65536 - number))
    assert torch.equal(mask, expected)
    torch.manual_seed(7)
    keep_mask(torch.Size((n,)), p)
    assert torch.equal(torch.get_rng_state(), after)  # no bits more than needed


def test_on_another_device_the_mask_is_torchs() -> None:
    assert Dropout(0.5).train()(torch.ones(3, device="meta")).device.type == "meta"
    assert repr(Dropout(0.25)) == "Dropout(p=0.25)"
