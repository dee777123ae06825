"""Cached logits equal those of the full sequence, for any division of the sequence into chunks."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt import GPT, ModelConfig
from niels_gpt.model.kv_cache import KVCache

T, V = 16, 64


@functools.cache
def model() -> GPT:
    """A model with large random weights in float64: every earlier token matters, and rounding does not."""
    torch.manual_seed(0)
    made = GPT(ModelConfig(V=V, T=T, C=32, L=2, H=2, d_ff=64, dropout=0.1)).double().eval()
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(1 + 0.3 * torch.randn(p.shape) if p.dim() == 1 else 2 * torch.randn(p.shape) / p.shape[1] ** 0.5)
    return made


def new_cache(rows: int) -> KVCache:
    return KVCache(model().config, rows, device=torch.device("cpu"), dtype=torch.float64)


def some_ids(rows: int, n: int = T, seed: int = 0) -> torch.Tensor:
    return torch.randint(V, (rows, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def alone(ids: torch.Tensor) -> torch.Tensor:
    """The logits (n, V) of one sequence (n,), without a cache."""
    return model()(ids[None])[0]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


@torch.no_grad()
def test_token_by_token() -> None:
    ids, cache = some_ids(3), new_cache(3)
    expected = model()(ids)
    for t in range(T):
        close(model()(ids[:, t : t + 1], cache=cache)[:, 0], expected[:, t])
    assert cache.lengths == [T] * 3


@settings(deadline=None, max_examples=20)
@given(cuts=st.sets(st.integers(1, T - 1)), n=st.integers(1, T), rows=st.integers(1, 3), seed=st.integers(0, 999))
def test_in_chunks(cuts: set[int], n: int, rows: int, seed: int) -> None:
    ids, cache = some_ids(rows, n, seed), new_cache(rows)
    edges = [0, *sorted(cut for cut in cuts if cut < n), n]
    with torch.no_grad():
        parts = [model()(ids[:, a:b], cache=cache) for a, b in itertools.pairwise(edges)]
        close(torch.cat(parts, dim=1), model()(ids))


@torch.no_grad()
def prefilled(sequences: list[torch.Tensor]) -> KVCache:
    """A cache with sequences of different lengths: read with padding on the right, then set to their lengths."""
    cache = new_cache(len(sequences))
    padded = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64)
    for row, ids in enumerate(sequences):
        padded[row, : len(ids)] = ids
    logits = model()(padded, cache=cache)
    for row, ids in enumerate(sequences):
        close(logits[row, : len(ids)], alone(ids))
    cache.lengths = [len(ids) for ids in sequences]
    return cache


@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.integers(1, T - 3), min_size=1, max_size=4),
    chunks=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    seed=st.integers(0, 999),
)
def test_rows_of_different_lengths(lengths: list[int], chunks: list[int], seed: int) -> None:
    """Each row continues at its own position, and sees neither the padding nor the other rows."""
    sequences = [some_ids(1, T, seed + row)[0] for row in range(len(lengths))]
    cache = prefilled([ids[:n] for ids, n in zip(sequences, lengths, strict=True)])
    at = list(lengths)
    for n in chunks:
        if max(at) + n > T:
            break
        step = torch.stack([ids[a : a + n] for ids, a in zip(sequences, at, strict=True)])
        with torch.no_grad():
            logits = model()(step, cache=cache)
        for row, a in enumerate(at):
            close(logits[row], alone(sequences[row][: a + n])[a:])
        at = [a + n for a in at]
        assert cache.lengths == at


@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.integers(1, T - 2), min_size=2, max_size=5),
    data=st.data(),
)
def test_select_keeps_rows_in_the_order_given(lengths: list[int], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=5))
    sequences = [some_ids(1, T, 50 + row)[0] for row in range(len(lengths))]
    cache = prefilled([ids[:n] for ids, n in zip(sequences, lengths, strict=True)])
    cache.select(rows)
    assert cache.lengths == [lengths[row] for row in rows]
    for extra in range(2):
        step = torch.stack([sequences[row][lengths[row] + extra] for row in rows])[:, None]
        with torch.no_grad():
            logits = model()(step, cache=cache)
        for i, row in enumerate(rows):
            close(logits[i, 0], alone(sequences[row][: lengths[row] + extra + 1])[-1])


@torch.no_grad()
def test_an_overflow_raises_and_changes_nothing() -> None:
    ids, cache = some_ids(2, T), new_cache(2)
    model()(ids[:, :10], cache=cache)
    with pytest.raises(ValueError, match=r"16.*10.*7|10.*7.*16"):
        model()(ids[:, :7], cache=cache)
    assert cache.lengths == [10, 10]
    close(model()(ids[:, 10:], cache=cache), model()(ids)[:, 10:])  # six more fit
    with pytest.raises(ValueError):
        model()(ids[:, :1], cache=cache)


@torch.no_grad()
def test_overflow_of_the_longest_row() -> None:
    cache = prefilled([some_ids(1, T)[0], some_ids(1, 3)[0]])
    with pytest.raises(ValueError, match="16"):
        model()(torch.zeros(2, 1, dtype=torch.int64), cache=cache)
    cache.select([1])  # the other row alone may continue
    model()(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
    assert cache.lengths == [4]


@torch.no_grad()
def test_stale_keys_are_not_seen() -> None:
    """A row that is shortened and continued differently does not see its former tokens."""
    ids, cache = some_ids(1, T)[0], new_cache(1)
    model()(ids[None, :12], cache=cache)
    cache.lengths = [5]
    other = torch.cat([ids[:5], some_ids(1, 4, seed=7)[0]])
    close(model()(other[None, 5:7], cache=cache)[0], alone(other)[5:7])
    close(model()(other[None, 7:8], cache=cache)[0], alone(other)[7:8])


@torch.no_grad()
def test_float32_is_close() -> None:
    torch.manual_seed(1)
    single = GPT(model().config).eval()
    single.load_state_dict(model().state_dict())
    cache = KVCache(single.config, 2, device=torch.device("cpu"), dtype=torch.float32)
    ids = some_ids(2)
    parts = [single(ids[:, t : t + 1], cache=cache) for t in range(T)]
    torch.testing.assert_close(torch.cat(parts, dim=1), single(ids), atol=1e-3, rtol=1e-3)


def test_positions_masks_and_views_after_an_advance() -> None:
    """What `advance` prepares for the layers, for rows of one length and of several."""
    cache = new_cache(2)
    assert cache.advance(3) == 0
    assert cache.lengths == [3, 3]
    assert cache.mask.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert cache.advance(1) == 3 and cache.mask is None
    assert cache.advance(2) == 4
    assert cache.mask.tolist() == [[True] * 5 + [False], [True] * 6]
    cache.lengths = [4, 1]
    assert cache.advance(1).tolist() == [[4], [1]]
    assert cache.mask.shape == (2, 1, 1, 5)
    assert cache.mask[:, 0, 0].tolist() == [[True] * 5, [True, True, False, False, False]]
    kv = torch.randn(2, 2, 2, 1, 16, dtype=torch.float64)
    keys, values = cache.extend(1, kv)
    assert keys.shape == values.shape == (2, 2, 5, 16)
    assert torch.equal(keys[0, :, 4], kv[0, 0, :, 0]) and torch.equal(values[1, :, 1], kv[1, 1, :, 0])
    assert torch.equal(cache.buffer[1, 1, 1, :, 1], kv[1, 1, :, 0]) and not cache.buffer[0].any()


def test_capacity_and_a_given_buffer() -> None:
    config = model().config
    cache = KVCache(config, 3, device=torch.device("cpu"), dtype=torch.float32, capacity=5)
    assert cache.T == 5 and cache.buffer.shape == (2, 3, 2, 2, 5, 16)
    with pytest.raises(ValueError, match=r"T=5.*0 \+ 6"):
        cache.advance(6)
    assert cache.advance(5) == 0
    buffer = torch.ones(2, 1, 2, 2, T, 16)
    used = KVCache(config, 1, device=torch.device("cpu"), dtype=torch.float32, buffer=buffer)
    assert used.buffer is buffer and used.T == T and used.lengths == [0]
