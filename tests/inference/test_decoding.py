"""Decoding against a loop that calls the model on the last T ids, one row at a time."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt import GPT, ModelConfig
from niels_gpt.inference.decoding import Decoder
from niels_gpt.inference.one_token import OneToken
from niels_gpt.inference.sampling import Sampling

T, V = 16, 256
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=1.2, top_k=40)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "top_p": Sampling(1.0, None, 0.9),
    "min_p": Sampling(1.5, None, None, 0.02),
}


@functools.cache
def model(seed: int = 2, dtype: torch.dtype = torch.float64) -> GPT:
    """Random weights large enough that every token in the window matters. In float64 the ways to compute
    the same logits differ by 1e-13, so no two candidates are near enough to change places."""
    torch.manual_seed(seed)
    made = GPT(ModelConfig(V=V, T=T, C=32, L=2, H=2, d_ff=64, dropout=0.1))
    with torch.no_grad():
        for name, p in made.named_parameters():
            noise = torch.randn(p.shape)
            gain = 4 if name.endswith(("out.weight", "down.weight")) else 2
            p.copy_(1 + 0.3 * noise if p.dim() == 1 else gain * noise / p.shape[1] ** 0.5)
        made.tok_emb.weight.copy_(0.3 * torch.randn(V, 32))
        made.norm.weight.mul_(2)
    return made.to(dtype).eval()


@torch.no_grad()
def naive_greedy(prompt: list[int], steps: int, gpt: GPT | None = None) -> list[int]:
    gpt = gpt or model()
    ids = list(prompt)
    for _ in range(steps):
        ids.append(gpt(torch.tensor([ids[-T:]]))[0, -1].argmax().item())
    return ids


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run(decoder: Decoder, steps: int) -> list[list[int]]:
    for _ in range(steps):
        before = [list(ids) for ids in decoder.ids]
        active = list(decoder.active)
        new = decoder.step()
        assert sorted(new) == sorted(active)
        for row, ids in enumerate(before):
            assert decoder.ids[row] == ([*ids, new[row]] if row in new else ids)
    return decoder.ids


def alone(
    prompt: list[int], steps: int, sampling: Sampling, generator: torch.Generator | None, use_cache: bool
) -> list[int]:
    decoder = Decoder(
        model(), [prompt], max_new_tokens=steps, sampling=sampling, generators=generator, use_cache=use_cache
    )
    return run(decoder, steps)[0]


prompts = st.lists(st.integers(0, V - 1), min_size=1, max_size=2 * T)


def test_the_model_makes_the_comparison_worth_it() -> None:
    """Different prompts lead to different and varied continuations, and the window's far end matters."""
    first, second = naive_greedy([72, 105], 60), naive_greedy([1, 105], 60)
    assert len(set(first)) > 15 and first[2:] != second[2:]
    changed = 0
    for seed in range(20):
        window = torch.randint(V, (1, T), generator=seeded(seed))
        other = window.clone()
        other[0, 0] = (other[0, 0] + 1) % V
        with torch.no_grad():
            changed += int(model()(window)[0, -1].argmax() != model()(other)[0, -1].argmax())
    assert changed >= 3


# --- greedy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("length", [1, 2, T - 1, T, T + 1, 3 * T])
def test_greedy_is_the_naive_loop(length: int, use_cache: bool) -> None:
    prompt = torch.randint(V, (length,), generator=seeded(length)).tolist()
    assert alone(prompt, 2 * T, GREEDY, None, use_cache) == naive_greedy(prompt, 2 * T)


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_in_float32(use_cache: bool) -> None:
    """The same in the precision that is used; along these paths the best two logits are well apart."""
    gpt = model(dtype=torch.float32)
    for prompt in ([72, 105], list(range(40, 40 + T)), list(range(30))):
        ids = naive_greedy(prompt, 30, gpt)
        with torch.no_grad():
            for n in range(len(prompt), len(ids)):
                best, second = gpt(torch.tensor([ids[:n][-T:]]))[0, -1].topk(2).values.tolist()
                assert best - second > 1e-3
        decoder = Decoder(gpt, [prompt], max_new_tokens=30, sampling=GREEDY, use_cache=use_cache)
        assert run(decoder, 30) == [ids]


@settings(deadline=None, max_examples=15)
@given(batch=st.lists(prompts, min_size=1, max_size=4), use_cache=st.booleans())
def test_a_batch_of_different_lengths_is_the_naive_loop_for_each(batch: list[list[int]], use_cache: bool) -> None:
    decoder = Decoder(model(), batch, max_new_tokens=T + 4, sampling=GREEDY, use_cache=use_cache)
    assert run(decoder, T + 4) == [naive_greedy(prompt, T + 4) for prompt in batch]


def test_greedy_draws_no_numbers() -> None:
    state = torch.get_rng_state()
    generator = seeded(5)
    before = generator.get_state()
    alone([1, 2, 3], 5, GREEDY, generator, True)
    alone([1, 2, 3], 5, GREEDY, None, True)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(generator.get_state(), before)


# --- sampled ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(
    batch=st.lists(prompts, min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(sorted(SAMPLINGS)),
)
def test_cached_uncached_and_batched_ids_are_equal(batch: list[list[int]], seed: int, kind: str) -> None:
    steps, sampling = T + 4, SAMPLINGS[kind]
    single = [alone(p, steps, sampling, seeded(seed + i), False) for i, p in enumerate(batch)]
    assert [alone(p, steps, sampling, seeded(seed + i), True) for i, p in enumerate(batch)] == single
    for use_cache in (True, False):
        decoder = Decoder(
            model(),
            batch,
            max_new_tokens=steps,
            sampling=sampling,
            generators=[seeded(seed + i) for i in range(len(batch))],
            use_cache=use_cache,
        )
        assert run(decoder, steps) == single


def test_the_seed_decides() -> None:
    prompt = [7, 8, 9]
    first = alone(prompt, 20, SAMPLED, seeded(1), True)
    assert alone(prompt, 20, SAMPLED, seeded(1), True) == first
    assert alone(prompt, 20, SAMPLED, seeded(2), True) != first


def test_one_generator_for_many_rows() -> None:
    """Rows get numbers of their own: equal prompts go different ways; the same seed gives the same batch."""

    def batch(seed: int) -> list[list[int]]:
        decoder = Decoder(model(), [[5, 6]] * 4, max_new_tokens=12, sampling=SAMPLED, generators=seeded(seed))
        return run(decoder, 12)

    assert batch(3) == batch(3)
    assert batch(3) != batch(4)
    assert len({tuple(ids) for ids in batch(3)}) == 4


def test_none_is_the_default_generator() -> None:
    torch.manual_seed(11)
    first = alone([1, 2], 15, SAMPLED, None, True)
    assert alone([1, 2], 15, SAMPLED, None, True) != first  # it has moved on
    torch.manual_seed(11)
    assert alone([1, 2], 15, SAMPLED, None, True) == first
    torch.manual_seed(11)
    many = Decoder(model(), [[1, 2], [3]], max_new_tokens=9, sampling=SAMPLED)
    torch.manual_seed(11)
    again = Decoder(model(), [[1, 2], [3]], max_new_tokens=9, sampling=SAMPLED)
    assert run(many, 9) == run(again, 9)


def test_a_generator_leaves_the_default_one_alone() -> None:
    state = torch.get_rng_state()
    alone([1, 2], 10, SAMPLED, seeded(1), True)
    Decoder(model(), [[1, 2], [3]], max_new_tokens=9, sampling=SAMPLED, generators=seeded(1)).step()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("prompt", [[3, 1, 4], list(range(100, 100 + T + 5))])
def test_frequencies_of_the_next_token(prompt: list[int]) -> None:
    """3000 rows of one prompt: chi-square against the softmax of the model's own logits."""
    n, temperature, k = 3000, 2.0, 12
    decoder = Decoder(model(), [prompt] * n, max_new_tokens=1, sampling=Sampling(temperature, k), generators=seeded(6))
    with torch.no_grad():
        logits = model()(torch.tensor([prompt[-T:]]))[0, -1].tolist()
    best = sorted(range(V), key=lambda i: -logits[i])[:k]
    weights = {i: math.exp((logits[i] - logits[best[0]]) / temperature) for i in best}
    total = math.fsum(weights.values())
    drawn = list(decoder.step().values())
    assert set(drawn) <= set(best)
    chi = math.fsum((drawn.count(i) - n * w / total) ** 2 / (n * w / total) for i, w in weights.items())
    assert chi < (k - 1) + 5 * math.sqrt(2 * (k - 1))


# --- rows that stop early --------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(
    batch=st.lists(prompts, min_size=2, max_size=5),
    ends=st.lists(st.integers(0, T + 6), min_size=5, max_size=5),
    kind=st.sampled_from(["greedy", "sampled"]),
    use_cache=st.booleans(),
)
def test_finished_rows_do_not_disturb_the_others(
    batch: list[list[int]], ends: list[int], kind: str, use_cache: bool
) -> None:
    steps, sampling = T + 6, SAMPLINGS[kind]
    generators = [seeded(i) for i in range(len(batch))]
    decoder = Decoder(
        model(), batch, max_new_tokens=steps, sampling=sampling, generators=generators, use_cache=use_cache
    )
    for step in range(steps):
        for row in [row for row in decoder.active if ends[row] <= step]:
            decoder.finish(row)
        if decoder.active:
            assert sorted(decoder.step()) == [row for row in range(len(batch)) if ends[row] > step]
    for row, prompt in enumerate(batch):
        whole = alone(prompt, steps, sampling, seeded(row), False)
        assert decoder.ids[row] == whole[: len(prompt) + ends[row]]


# --- how it is computed ----------------------------------------------------------------------------


def widths(monkeypatch: pytest.MonkeyPatch, prompt: list[int], steps: int, use_cache: bool) -> list[int]:
    """How many tokens each forward pass saw."""
    seen: list[int] = []
    plain = OneToken.__call__
    monkeypatch.setattr(OneToken, "__call__", lambda self, ids, cache: (seen.append(1), plain(self, ids, cache))[1])
    hook = model().register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    try:
        alone(prompt, steps, GREEDY, None, use_cache)
    finally:
        hook.remove()
        monkeypatch.undo()
    return seen


def test_the_cache_is_used_up_to_T_and_the_window_after(monkeypatch: pytest.MonkeyPatch) -> None:
    assert widths(monkeypatch, [1, 2, 3], T, True) == [3] + [1] * (T - 3) + [T] * 2
    assert widths(monkeypatch, [1, 2, 3], T, False) == [*range(3, T + 1), T, T]
    assert widths(monkeypatch, list(range(T + 9)), 3, True) == [T, T, T]


def test_prompts_are_not_changed() -> None:
    batch = [[1, 2], [3, 4, 5]]
    run(Decoder(model(), batch, max_new_tokens=4, sampling=GREEDY), 4)
    assert batch == [[1, 2], [3, 4, 5]]


# --- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([[]], "0"),
        ([[1], []], "1"),
        ([[1, V]], str(V - 1)),
        ([[5], [-1]], "1"),
        ([[5], [1, 2.0]], "prompt 1: .*got 2.0"),
        ([[math.nan]], "got nan"),
        ([[False]], "got False"),
    ],
)
def test_prompts_that_cannot_be_continued(batch: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Decoder(model(), batch, max_new_tokens=3, sampling=GREEDY)


def test_other_errors() -> None:
    with pytest.raises(ValueError, match="-1"):
        Decoder(model(), [[1]], max_new_tokens=-1, sampling=GREEDY)
    for number in (10**12, 3.0, True):
        with pytest.raises(ValueError, match=rf"max_new_tokens must be an integer from 0 to 1000000, got {number}"):
            Decoder(model(), [[1]], max_new_tokens=number, sampling=SAMPLED)
    with pytest.raises(ValueError, match=r"2.*3"):
        Decoder(model(), [[1]] * 3, max_new_tokens=2, sampling=SAMPLED, generators=[seeded(0), seeded(1)])
