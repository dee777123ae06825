"""FP8 quantization of rows and matrices, and transposes, compared with rounding written out in Python."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.kernels.fp8 import quantize
from tests.kernels.helpers import near


def restored(quantized, scales):
    return quantized.float() * scales


def scale_of(row):
    """The smallest power of two that maps a row into ±448."""
    top = max(map(abs, row)) / 448
    return 2.0 ** math.ceil(math.log2(top)) if top else 0.0


def exact(x, scale_of=scale_of):
    """`quantize.rows` and back, in Python: rounded to an eighth of the power of two below."""
    found = torch.zeros_like(x)
    for m, row in enumerate(x.tolist()):
        scale = scale_of(row)
        for k, value in enumerate(row):
            size = abs(value) / scale if scale else 0.0
            step = 2.0 ** max(math.floor(math.log2(size)) if size else -6, -6) / 8
            found[m, k] = (1 if value >= 0 else -1) * round(size / step) * step * scale  # round: ties to even
    return found


def exact_matrix(x):
    """As `exact` for a matrix, with one scale that maps its absolute maximum to 448."""
    return exact(x.reshape(1, -1), lambda row: max(map(abs, row)) / 448).view_as(x)


@given(st.integers(0, 10_000), st.sampled_from([1e-9, 1.0, 3e4]))
def test_rows_are_rounded_to_three_bits_of_their_largest(seed, size):
    x = size * torch.randn(3, 17, generator=torch.Generator().manual_seed(seed))
    x[1] = 0
    found = restored(*quantize.rows(x))
    expected = exact(x)
    assert torch.equal(found, expected)  # with powers of two the result is exact
    assert ((found - x).abs() <= x.abs() / 16 + x.abs().amax(1, keepdim=True) / 448 / 512).all()


@given(st.integers(0, 10_000), st.sampled_from([16, 112, 512]), st.sampled_from(["layer_norm", "rms_norm"]))
def test_the_result_of_a_norm_needs_one_scale(seed, K, norm):
    x = torch.randn(6, K, generator=torch.Generator().manual_seed(seed))
    x[0] *= 1e4
    x[1] = 0
    x[2] = 0
    x[2, seed % K] = 1e6  # the largest result of a norm: sqrt(K)
    x = getattr(F, norm)(x, (K,)).to(torch.bfloat16)
    found, step = restored(*quantize.normed_rows(x)), K**0.5 / 448
    assert (found - x.float()).abs().max() <= 16.5 * step  # half a step near 448; also fails for NaN
    assert ((found - x.float()).abs() <= x.float().abs() / 15.5 + 2**-10 * step).all()


@given(st.integers(0, 10_000))
def test_a_matrix_with_one_scale(seed):
    x = 0.02 * torch.randn(12, 16, generator=torch.Generator().manual_seed(seed))
    found, scale = quantize.matrix_with_one_scale(x)
    assert scale == x.abs().max() / 448
    assert near(restored(found, scale), exact_matrix(x), 1e-3)
    assert (quantize.matrix_with_one_scale(0 * x)[0].float() == 0).all()


def check_matrices(device):
    torch.manual_seed(0)
    shapes = [[(144, 48)], [(48, 80)], [(70, 48), (70, 48)], [(16, 16)], [(16004, 64)]]
    given = [([(5.0**i * torch.randn(shape)).to(device) for i, shape in enumerate(shape)], None) for shape in shapes]
    given[0] = given[0][0], torch.rand(48).add(0.5).to(device)
    given[2] = given[2][0], -torch.rand(48).add(0.5).to(device)
    given[3][0][0].zero_()
    for (members, norm), (quantized, transposed, one, row_scales, column_scales) in zip(
        given, quantize.matrices(given), strict=True
    ):
        matrix = torch.cat(members) * (1 if norm is None else norm)
        scale = matrix.abs().max() / 448
        assert torch.equal(transposed.float(), quantized.float().t())
        assert transposed.is_contiguous()
        assert (one.shape, row_scales.shape, column_scales.shape) == ((), (len(matrix), 1), (matrix.shape[1], 1))
        assert torch.allclose(
            torch.cat((one.view(1, 1), row_scales, column_scales)), scale.clamp(min=1e-30 / 448), rtol=1e-6, atol=0
        )
        off = (quantized.float() * scale - matrix).abs()
        # half a step of three bits; below 2^-6 half a step of 2^-9
        assert (off <= matrix.abs() / 15.9 + 2**-10 * scale * 1.01).all()
        assert (quantized.float().abs().max() == 448) | (scale == 0)


def test_the_matrices_of_a_block():
    check_matrices("cpu")


def check_transposed(device):
    torch.manual_seed(0)
    for M, K in [(1, 16), (40, 16), (300, 208), (64, 64)]:
        x = (100 * torch.randn(M, K)).to(torch.float8_e4m3fn)
        powers = 2.0 ** -torch.randint(0, 12, (M, 1))
        found = [quantize.transposed(x.to(device)), quantize.transposed(x.to(device), powers.to(device))]
        bytes5 = torch.randint(0, 120, (M, K), dtype=torch.uint8).view(torch.float8_e5m2)
        found.append(quantize.transposed(bytes5.to(device)))
        expected = [x.float(), (x.float() * powers).to(torch.float8_e4m3fn).float(), bytes5.float()]
        for a, b in zip(found, expected, strict=True):
            assert a.shape == (K, -(-M // 16) * 16)
            assert a.is_contiguous()
            assert torch.equal(a[:, :M].float().cpu(), b.t())
            assert (a[:, M:].float() == 0).all()


def test_transposed():
    check_transposed("cpu")


@given(st.integers(0, 10_000))
def test_a_sum_over_tokens_takes_scales_by_row_from_either_side(seed):
    torch.manual_seed(seed)
    rows, alike = torch.randn(20, 16) * 2.0 ** torch.randint(-9, 9, (20, 1)), torch.randn(20, 16)
    (quantized, scales), (other, unit) = quantize.rows(rows), quantize.matrix_with_one_scale(alike)
    expected = exact(rows).t() @ exact_matrix(alike)
    assert near(quantize.weight_gradient(quantized, other, scales, unit), expected, 0.01)
    assert near(quantize.weight_gradient(other, quantized, scales, unit), expected.t(), 0.01)
    found = quantize.weight_gradient(quantized, other, scales, unit, a_transposed=quantize.transposed(quantized))
    assert near(found, expected, 0.01)
    assert found.dtype == torch.float32


# --- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("width", [16, 112, 1536])
def test_rows_on_a_gpu(width, hopper):
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x[3] = 0
    assert torch.equal(restored(*quantize.rows(x.to(hopper))).cpu(), exact(x.float()))


@pytest.mark.gpu
def test_the_matrices_of_a_block_on_a_gpu(hopper):
    check_matrices(hopper)


@pytest.mark.gpu
def test_transposed_on_a_gpu(hopper):
    check_transposed(hopper)
