"""Muon's matmuls, on the CPU and with the Triton kernel on a GPU."""

import sys
from types import SimpleNamespace

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


# --- the launch of the kernel, without a GPU ---------------------------------------------------------


class Launches:
    """Stands in for the Triton kernel: records grid and constants of each launch."""

    def __init__(self):
        self.found = []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.found.append((grid, arguments, constants))


@pytest.fixture
def launches(monkeypatch):
    kernel = Launches()
    monkeypatch.setattr(muon, "_has_kernels", lambda device: True)
    module = SimpleNamespace(matmul_kernel=kernel)
    monkeypatch.setitem(sys.modules, "niels_gpt.kernels.cuda.muon_triton", module)
    monkeypatch.setattr("niels_gpt.kernels.cuda.muon_triton", module, raising=False)
    return kernel.found


@pytest.mark.parametrize(
    ("shape", "symmetric", "side", "tiles"),
    [
        ((1, 128, 256), True, 64, 3),  # two tiles a side: one triangle
        ((100, 128, 64), True, 128, 1),
        ((99, 128, 64), True, 64, 3),
        ((12, 512, 512), True, 128, 10),
        ((2, 272, 64), True, 64, 15),  # 272 needs five tiles of 64
    ],
)
def test_small_stacks_get_small_tiles(launches, shape, symmetric, side, tiles):
    k, M, K = shape
    x = torch.zeros(shape, dtype=torch.bfloat16)
    out = muon._matmul(x, x.mT, symmetric=symmetric)
    assert (out.shape, out.dtype) == ((k, M, M), torch.bfloat16)
    ((grid, arguments, constants),) = launches
    assert grid == (tiles, k)
    assert arguments[2] is None and arguments[4:7] == (M, M, K)
    assert arguments[7:9] == (M * K, K)
    assert arguments[-2:] == (1.0, 0.0)
    assert (constants["SIDE"], constants["DEPTH"], constants["EVEN"]) == (side, 64, K % 64 == 0)
    assert (constants["ADDED"], constants["SYMMETRIC"]) == (False, symmetric)
    assert (constants["num_warps"], constants["num_stages"]) == (4, 3 if side == 128 else 4)


def test_a_general_matmul_computes_all_tiles(launches):
    a, b = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((2, 144, 80), (2, 80, 208)))
    added = torch.zeros(2, 144, 208, dtype=torch.bfloat16)
    muon._matmul(a, b, added, alpha=2.0, beta=3.0)
    ((grid, arguments, constants),) = launches
    assert grid == (3 * 4, 2)  # tiles of 64: 3 rows, 4 columns
    assert arguments[4:7] == (144, 208, 80)
    assert arguments[-2:] == (2.0, 3.0)
    assert (constants["ADDED"], constants["EVEN"]) == (True, False)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 24, 32), torch.bfloat16), ((1, 32, 24), torch.bfloat16), ((1, 32, 32), torch.float32)]
)
def test_other_shapes_and_dtypes_do_not_use_the_kernel(launches, shape, dtype, monkeypatch):
    monkeypatch.setattr(torch, "baddbmm", lambda *matrices, **factors: factors)
    x = torch.ones(shape, dtype=dtype)
    assert muon._matmul(x, x.mT, x, alpha=2.0, beta=3.0) == {"alpha": 2.0, "beta": 3.0}
    assert launches == []
