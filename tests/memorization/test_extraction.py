"""P(z), greedy continuations and verbatim runs against loops over tokens and models with known answers."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from niels_gpt import GPT
from niels_gpt.evaluation.scoring import score_rows
from niels_gpt.memorization import extraction
from niels_gpt.memorization.extraction import continue_greedily, log_probabilities, longest_run, scan_rows
from niels_gpt.memorization.measure import window_starts
from tests.inference.models import naive_greedy
from tests.memorization.models import chain_model, some_ids, some_model, taught_model
from tests.memorization.naive import naive_log_p


@pytest.mark.parametrize(("window", "prompt"), [(12, 5), (12, 11), (2, 1), (49, 20)])
def test_p_is_a_product_of_softmaxes(window: int, prompt: int) -> None:
    ids = some_ids(60)
    starts = window_starts(60, window, 7)
    found = log_probabilities(some_model(), ids, starts, window=window, prompt=prompt)
    expected = [naive_log_p(some_model(), ids[s : s + window].tolist(), prompt) for s in starts.tolist()]
    assert found.dtype == np.float64
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_log_p_below_the_range_of_float32() -> None:
    model = chain_model(sharpness=30.0)
    ids = some_ids(40)
    [found] = log_probabilities(model, ids, np.array([0]), window=40, prompt=4)
    assert -10_000 < found < -1000
    assert found == pytest.approx(direct_logs(model, ids.tolist(), 4), rel=1e-5)


def direct_logs(model: GPT, window: list[int], prompt: int) -> float:
    """Return log P(z) by logarithms: the softmax itself would underflow."""
    model = copy.deepcopy(model).double()
    with torch.no_grad():
        logits = model(torch.tensor([window[:-1]]))[0]
    return math.fsum((logits[i - 1, window[i]] - logits[i - 1].logsumexp(0)).item() for i in range(prompt, len(window)))


@pytest.mark.parametrize(("kind", "batch"), [("rope", 0), ("rope", 3), ("learned", 1)])
def test_greedy_decoding(kind: str, batch: int) -> None:
    model = some_model(positions=kind)
    prompts = [some_ids(length, seed=length) for length in (6, 1, 6, 9, 3)]
    found = continue_greedily(model, prompts, 7, batch=batch)
    assert found.tolist() == [naive_greedy(model, prompt.tolist(), 7) for prompt in prompts]


def test_a_memorized_text_needs_few_forward_passes() -> None:
    """Once a run reaches T no other can be longer, so the others are skipped."""
    ids = np.arange(2000) % 40
    starts = np.arange(0, 1900, 5)
    seen = []
    model = chain_model()
    hook = model.blocks.get_submodule("0").register_forward_hook(
        lambda module, args, output: seen.append(args[0].shape[:-1].numel())
    )
    try:
        tokens, _ = longest_run(model, ids, starts, np.full(380, 4), np.zeros(380, dtype=bool), prompt=4)
    finally:
        hook.remove()
    assert tokens == model.config.T + 1 - 4
    assert sum(seen) < 380 * 48 / 20


def test_greedy_continuations_up_to_T() -> None:
    """The prompt and all but the last decoded token fill the context."""
    prompt = some_ids(40, seed=1)
    assert continue_greedily(some_model(), [prompt], 9).tolist() == [naive_greedy(some_model(), prompt.tolist(), 9)]
    assert continue_greedily(some_model(), [], 3).shape == (0, 3)


def test_rows_done_are_counted() -> None:
    counts: list[int] = []
    continue_greedily(some_model(), [some_ids(4, seed=i) for i in range(5)], 2, batch=2, count=counts.append)
    assert counts == [2, 2, 1]


def test_longest_run_by_hand() -> None:
    """A chain with breaks: runs of 3, 9 and 5 tokens after prompts of 2."""
    ids = np.array([0, 1, 2, 3, 4, 9, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 5, 6, 7, 8, 9, 10, 11])
    starts = np.array([0, 6, 17])
    unknown, none = np.zeros(3, dtype=np.int64), np.zeros(3, dtype=bool)
    assert longest_run(chain_model(), ids, starts, unknown, none, prompt=2) == (9, 1)
    assert longest_run(chain_model(), ids, starts, unknown, np.array([False, True, False]), prompt=2) == (5, 2)
    assert longest_run(chain_model(), ids, starts, np.array([3, 4, 5]), none, prompt=2) == (9, 1)
    assert longest_run(chain_model(T=6), ids, starts, unknown, none, prompt=2)[0] == 6 + 1 - 2
    assert (unknown == 0).all() and not none.any()  # the arguments are not modified


def scanned(model, rows, prompts, **options):
    """log P(z) of all rows by `scan_rows`."""
    found = np.full(len(rows), np.nan)
    for indices, values in scan_rows(model, rows, prompts, **options):
        assert np.isnan(found[indices]).all()
        found[indices] = values
    return found


@pytest.mark.parametrize("text", ["known", "unknown", "mixed"])
def test_scan_with_a_floor_is_exact_above_it(text, monkeypatch):
    """Compared with a product of softmaxes, row by row; below the floor it is an upper bound."""
    monkeypatch.setattr(extraction, "CHUNK", 7)
    monkeypatch.setattr(extraction, "FIRST", 2)
    model, known = taught_model()
    noise = np.random.default_rng(0).integers(0, 20, len(known))
    ids = {"known": known, "unknown": noise, "mixed": np.where(np.arange(len(known)) % 60 < 40, known, noise)}[text]
    rows = [ids[s : s + 14] for s in range(0, len(ids) - 13, 3)] + [ids[:6], ids[4:7]]
    prompts = np.array([6] * (len(rows) - 2) + [3, 2])
    exact = [naive_log_p(model, row.tolist(), prompt) for row, prompt in zip(rows, prompts.tolist(), strict=True)]
    assert scanned(model, rows, prompts) == pytest.approx(exact, abs=1e-4)
    floor = np.log(1e-3)
    found = scanned(model, rows, prompts, floor=floor)
    over = np.array(exact) >= floor
    assert over.any() == (text != "unknown") and not over.all()
    assert found[over] == pytest.approx(np.array(exact)[over], abs=1e-4)
    assert ((found >= floor) == over).all() and (found >= np.array(exact) - 1e-4).all()


def test_scan_scores_few_tokens_of_unknown_text(monkeypatch):
    model, known = taught_model()
    noise = np.random.default_rng(0).integers(0, 20, 400)
    widths = []

    def watched(model, rows, prompts, **options):
        widths.extend(map(len, rows))
        return score_rows(model, rows, prompts, **options)

    monkeypatch.setattr(extraction, "score_rows", watched)
    monkeypatch.setattr(extraction, "FIRST", 4)
    rows = [noise[s : s + 30] for s in range(0, 370, 5)]
    scanned(model, rows, np.full(len(rows), 8), floor=np.log(1e-6))
    assert np.mean(np.array(widths) == 12) > 0.9
    widths.clear()
    monkeypatch.setattr(extraction, "CHUNK", 10)
    rows = [known[s : s + 30] for s in range(90)]
    scanned(model, rows, np.full(len(rows), 8), floor=np.log(1e-6))
    assert np.count_nonzero(np.array(widths) == 12) <= 20  # one pass per row after the first chunks


def test_scan_takes_the_best_offset_of_learned_positions():
    model = some_model(positions="learned")
    rows = [some_ids(12, seed=i) for i in range(5)] + [some_ids(7, seed=9)]
    prompts = np.array([5] * 5 + [3])
    expected = [
        max(score_rows(model, [row], np.array([p]), offset=o)[0][0] for o in range(48 - (len(row) - 1) + 1))
        for row, p in zip(rows, prompts, strict=True)
    ]
    assert scanned(model, rows, prompts) == pytest.approx(expected, abs=1e-4)
    floor = float(np.median(expected))
    found = scanned(model, rows, prompts, floor=floor)
    over = np.array(expected) >= floor
    assert found[over] == pytest.approx(np.array(expected)[over], abs=1e-4) and (found[~over] < floor).all()
