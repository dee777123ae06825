"""The C kernels of decoding give the results of naive formulas, alone and beside other rows."""

import math

import pytest
import torch

from niels_gpt.kernels.cpu import decoding, native

pytestmark = pytest.mark.skipif(not native.allowed() or native.find_compiler() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def two_threads():
    number = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(number)


def panels(weight):
    kernel = decoding.matmul_kernel()
    assert kernel is not None, native.problem()
    return decoding.Panels(weight, kernel)


@pytest.mark.parametrize(("N", "K"), [(1, 1), (15, 7), (64, 32), (130, 33), (257, 16)])
def test_a_product_with_any_number_of_rows(N, K):
    torch.manual_seed(0)
    weight = torch.randn(N, K)
    ours = panels(weight)
    for M in (*range(1, 15), 32, 129):
        x, add = torch.randn(M, K), torch.randn(M, N)
        exact = x.double() @ weight.double().t()
        torch.testing.assert_close(ours.multiply(x).double(), exact, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(ours.multiply(x, add).double(), add.double() + exact, rtol=1e-5, atol=1e-4)


def test_a_row_of_a_product_does_not_depend_on_other_rows_or_threads():
    torch.manual_seed(0)
    ours, x, add = panels(torch.randn(200, 96)), torch.randn(40, 96), torch.randn(40, 200)
    whole = ours.multiply(x, add)
    for rows in (1, 2, 5, 6, 7, 12, 13, 33):
        torch.set_num_threads(1 + rows % 2)
        assert torch.equal(ours.multiply(x[:rows], add[:rows]), whole[:rows])
        assert torch.equal(ours.multiply(x[-rows:].clone(), add[-rows:].clone()), whole[-rows:])


def test_panels_are_a_copy():
    weight = torch.ones(3, 4)
    ours = panels(weight)
    weight.zero_()
    assert ours.multiply(torch.ones(1, 4)).tolist() == [[4.0, 4.0, 4.0]]


def rotated(x, position):
    """RoPE by complex numbers: pair i of x (..., D) turned by position / 100^(i / D) radians."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    angles = position / 100.0 ** (torch.arange(pairs.shape[-1], dtype=torch.float64) / x.shape[-1])
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def naive(qkv, cache, n, H, G, D, rope):
    """Attention of one row (H, D), and its new key and value (G, D); cache (2, G, T, D) holds n tokens."""
    q, k, v = qkv.double().view(-1, D).split((H, G, G))
    if rope:
        q, k = rotated(q, n), rotated(k, n)
    y = []
    for h in range(H):
        g = h // (H // G)
        keys, values = (
            torch.cat((old[g, :n].double(), new[g : g + 1])) for old, new in zip(cache, (k, v), strict=True)
        )
        y.append((keys @ q[h] / math.sqrt(D)).softmax(0) @ values)
    return torch.cat(y), torch.stack((k, v))


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize(("H", "G", "D"), [(3, 3, 16), (4, 2, 32), (6, 1, 64), (2, 2, 128), (1, 1, 256)])
def test_attention_to_rows_of_any_length(H, G, D, rope):
    torch.manual_seed(0)
    kernel = decoding.token_attention(D)
    assert kernel is not None, native.problem()
    L, T, lengths = 3, 70, [0, 1, 3, 4, 31, 32, 33, 69]
    B = len(lengths)
    everything = torch.randn(L, B + 2, 2, G, T, D)  # the cache is a part of a larger buffer
    before, buffer = everything.clone(), everything[:, :B]
    qkv = 3 * torch.randn(B, (H + 2 * G) * D)
    angles = torch.arange(T)[:, None] / 100.0 ** (torch.arange(D // 2) / D)
    rotation = torch.stack((angles.cos(), angles.sin()), dim=-1) if rope else None
    y = kernel.layers(rotation, buffer, lengths, H)(1, qkv)
    for row, n in enumerate(lengths):
        expected, new = naive(qkv[row], before[1, row], n, H, G, D, rope)
        torch.testing.assert_close(y[row].double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(buffer[1, row, :, :, n].double(), new, rtol=1e-4, atol=1e-4)
        before[1, row, :, :, n] = buffer[1, row, :, :, n]
    assert torch.equal(everything, before)  # nothing else is written
    torch.set_num_threads(1)
    for row, n in enumerate(lengths):
        alone = before[:, row : row + 1].clone()
        assert torch.equal(kernel.layers(rotation, alone, [n], H)(1, qkv[row : row + 1])[0], y[row])


def test_head_sizes_without_a_kernel():
    assert decoding.token_attention(24) is None and decoding.token_attention(272) is None


def test_large_scores_do_not_overflow():
    kernel = decoding.token_attention(16)
    buffer = torch.zeros(1, 1, 2, 1, 40, 16)
    buffer[0, 0, 0, 0, 5] = 1000.0
    buffer[0, 0, 1, 0, 5] = 7.0
    y = kernel.layers(None, buffer, [20], 1)(0, torch.cat((torch.full((1, 16), 10.0), torch.zeros(1, 32)), dim=1))
    assert y.tolist() == [[7.0] * 16]


@pytest.mark.parametrize("numbers", [1, 7, 1024])
def test_gelu(numbers):
    x = torch.linspace(-9, 9, numbers)
    torch.testing.assert_close(decoding.gelu(x), torch.nn.functional.gelu(x.double()).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["matmul", "token_attention"])
def test_a_kernel_that_computes_something_else_is_not_used(name, monkeypatch):
    real = native.library

    class Wrong:
        """The library, whose main function writes nothing."""

        def __init__(self, library):
            self._library = library

        def __getattr__(self, attribute):
            return (lambda *_: None) if attribute == name else getattr(self._library, attribute)

    def library(kernel, **defines):
        found = real(kernel, **defines)
        if kernel != name:
            return found
        wrong = Wrong(found)
        setattr(wrong, name, type("Function", (), {"__call__": lambda *_: None})())
        return wrong

    monkeypatch.setattr(native, "library", library)
    monkeypatch.setattr(native, "_problems", {})
    make = decoding.matmul_kernel if name == "matmul" else lambda: decoding.token_attention(16)
    decoding.matmul_kernel.cache_clear(), decoding.token_attention.cache_clear()
    try:
        assert make() is None and name in native.problem()
    finally:
        decoding.matmul_kernel.cache_clear(), decoding.token_attention.cache_clear()
