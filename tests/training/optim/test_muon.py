"""Muon's matmuls, on the CPU and with the Triton kernel on a GPU."""

import pytest
import torch

from niels_gpt.training.optim import muon

STACKS = [(1, 16, 16), (2, 48, 80), (3, 144, 160), (6, 384, 384), (8, 512, 512), (12, 512, 512), (16, 256, 1040)]


def stack(k, m, n, *, device="cpu"):
    return torch.randn(k, m, n, generator=torch.Generator().manual_seed(m + n)).to(device)


def orthogonal_one_by_one(x):
    """Newton-Schulz in float64, matrix by matrix: X becomes a X + (b A + c A A) X, where A = X X^T."""
    results = []
    for matrix in x.double():
        matrix = matrix / matrix.norm()
        for _ in range(5):
            a = matrix @ matrix.T
            matrix = 3.4445 * matrix + (-4.7750 * a + 2.0315 * a @ a) @ matrix
        results.append(matrix)
    return torch.stack(results)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7), *STACKS[:3]])
def test_orthogonal(shape, monkeypatch):
    monkeypatch.setattr(muon, "_dtype", lambda device: torch.float32)
    x = stack(*shape)
    assert torch.allclose(muon.orthogonal(x).double(), orthogonal_one_by_one(x), atol=1e-4)


def test_a_matmul_multiplies_each_matrix_of_the_stack():
    a, b, added = stack(3, 4, 5), stack(3, 5, 6), stack(3, 4, 6)
    made = muon._matmul(a, b, added, alpha=2.0, beta=-0.5)
    for i in range(3):
        for row in range(4):
            for column in range(6):
                summed = sum(a[i, row, k].item() * b[i, k, column].item() for k in range(5))
                expected = 2 * summed - 0.5 * added[i, row, column].item()
                assert made[i, row, column].item() == pytest.approx(expected, abs=1e-5)
    assert torch.allclose(muon._matmul(a, b), torch.einsum("kij,kjl->kil", a, b), atol=1e-6)


# --- on a GPU --------------------------------------------------------------------------------------


@pytest.fixture
def ampere(gpu_state):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs CUDA with bfloat16 (Ampere or later)")
    return "cuda"


def near(found, expected, size):
    """Equal up to one rounding to bfloat16, and to float32 rounding of sums of the given size."""
    return bool(((found.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * size).all())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", STACKS)
def test_matmuls_on_a_gpu(shape, ampere):
    x = stack(*shape, device=ampere).bfloat16()
    other = x[:, :, : shape[1]]
    square = (other + other.mT).contiguous()
    a, s = x.double(), square.double()
    size = (a.abs() @ a.mT.abs()).max()
    gram = muon._matmul(x, x.mT, symmetric=True)
    assert near(gram, a @ a.mT, size)
    assert torch.equal(gram, gram.mT)
    size = (s.abs() @ s.abs()).max()
    made = muon._matmul(square, square, square, alpha=2.0, beta=-3.0, symmetric=True)
    assert near(made, 2 * s @ s - 3 * s, 5 * size)
    assert torch.equal(made, made.mT)
    size = (s.abs() @ a.abs()).max()
    assert near(muon._matmul(square, x, x, beta=0.5), s @ a + a / 2, 2 * size)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", STACKS)
def test_orthogonal_on_a_gpu(shape, ampere):
    """As close to float64 as bfloat16 is on a CPU."""
    x = stack(*shape)
    expected = orthogonal_one_by_one(x)
    found = muon.orthogonal(x.to(ampere)).cpu().double()
    assert (found - expected).norm() <= 0.025 * expected.norm()


@pytest.mark.gpu
def test_aligned_matmuls_do_not_use_cublas(ampere):
    """One of its kernels, for stacks of 512 x 512, fails if processes share a GPU."""
    x = stack(12, 512, 512, device=ampere)
    muon.orthogonal(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        muon.orthogonal(x)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if "Memcpy" not in event.name]
    assert sum("matmul_kernel" in name for name in names) == 15
    assert not [name for name in names if "nvjet" in name or "gemm" in name or "cutlass" in name]
