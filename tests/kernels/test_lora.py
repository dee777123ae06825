"""Low-rank updates of a linear map, against the matrix W + B A in autograd."""

import pytest
import torch
import torch.nn.functional as F

from niels_gpt.kernels import lora
from niels_gpt.kernels.cpu import ops

INPUTS, OUTPUTS, RANK = 24, 40, 3


def tensors(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


def gradients(y, inputs):
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return torch.autograd.grad((y * weights).sum(), inputs)


@pytest.mark.parametrize("transposed", [False, True])
def test_value_and_gradients_are_those_of_the_sum(transposed):
    x, A, B = tensors((2, 5, INPUTS), (RANK, INPUTS), (OUTPUTS, RANK))
    W = torch.randn(OUTPUTS, INPUTS, dtype=torch.float64)
    expected = F.linear(x, W + B @ A)
    y = lora.linear(x, W, lora.Adapter(A, B), transposed=transposed)
    # The sum is computed in float32.
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients(y, (x, A, B)), gradients(expected, (x, A, B)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_without_an_adapter_it_is_linear():
    x, W = tensors((4, INPUTS), (OUTPUTS, INPUTS))
    assert torch.equal(lora.linear(x, W, None), F.linear(x, W))


def test_the_matrix_gets_no_gradient():
    x, W, A, B = tensors((4, INPUTS), (OUTPUTS, INPUTS), (RANK, INPUTS), (OUTPUTS, RANK))
    lora.linear(x, W, lora.Adapter(A, B)).sum().backward()
    assert W.grad is None
    assert A.grad is not None


def test_under_autocast_matmuls_are_bfloat16_and_gradients_float32():
    x, A, B = tensors((64, INPUTS), (RANK, INPUTS), (OUTPUTS, RANK), dtype=torch.float32)
    W = torch.randn(OUTPUTS, INPUTS)
    with torch.autocast("cpu", torch.bfloat16):
        y = lora.linear(x, W, lora.Adapter(A, B))
    assert y.dtype == torch.bfloat16
    expected = F.linear(x, W + B @ A)
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.2)
    ours, theirs = gradients(y.float(), (x, A, B)), gradients(expected, (x, A, B))
    assert {g.dtype for g in ours} == {torch.float32}
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("present", [(True, True), (True, False), (False, True)])
def test_stacked_adapters_update_their_own_matrix(present):
    W, U = torch.randn(5, INPUTS), torch.randn(7, INPUTS)
    adapters = tuple(
        lora.Adapter(torch.randn(RANK, INPUTS), torch.randn(len(M), RANK)) if p else None
        for M, p in zip((W, U), present, strict=True)
    )
    stacked = lora.stack(W, U, adapters)
    expected = [M if a is None else lora.merge(M, a) for M, a in zip((W, U), adapters, strict=True)]
    torch.testing.assert_close(lora.merge(torch.cat((W, U)), stacked), torch.cat(expected))
    assert lora.stack(W, U, (None, None)) is None


def test_a_scaled_input_scales_the_columns():
    W, scale = torch.randn(OUTPUTS, INPUTS), torch.rand(INPUTS) + 0.5
    adapter = lora.Adapter(torch.randn(RANK, INPUTS), torch.randn(OUTPUTS, RANK))
    scaled = lora.merge(W * scale, adapter.with_inputs_scaled(scale))
    torch.testing.assert_close(scaled, lora.merge(W, adapter) * scale)


def test_frozen_weights_on_a_cpu_get_no_gradient(monkeypatch):
    monkeypatch.setattr(ops, "WITHOUT_MKL", True)
    x = torch.randn(ops.MANY, 8, requires_grad=True)
    W, norm = torch.randn(4, 8), torch.rand(8)
    assert ops.transposes(x)
    y = ops.linear(ops.rms_norm(x, norm, 1e-5), W)
    (dx,) = torch.autograd.grad(y.sum(), (x,))
    again = x.detach().requires_grad_()
    (expected,) = torch.autograd.grad(F.linear(F.rms_norm(again, (8,), norm, 1e-5), W).sum(), (again,))
    torch.testing.assert_close(dx, expected, rtol=1e-4, atol=1e-5)
