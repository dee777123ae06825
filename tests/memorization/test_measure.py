"""Measurements against loops over tokens, closed forms, and models with known answers."""

from __future__ import annotations

import dataclasses
import math
import warnings
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.memorization.measure import Document, ExtractionSettings, WindowPlan, chance, measure, window_starts
from tests.inference.models import naive_greedy
from tests.memorization.models import SMALL, chain_model, letters, some_ids, some_model, taught_model
from tests.memorization.naive import naive_log_p


@settings(max_examples=50)
@given(length=st.integers(2, 300), window=st.integers(2, 60), stride=st.integers(1, 70))
def test_window_starts_cover_the_tail(length: int, window: int, stride: int) -> None:
    starts = window_starts(length, window, stride).tolist()
    last = max(0, length - window)
    assert starts == sorted({*range(0, last + 1, stride), last})


def exact_chance(log_p: float, n: int) -> float:
    with localcontext() as context:
        context.prec = 400
        missed = 1 - Decimal(log_p).exp()
        return float(1 - missed**n)


@settings(max_examples=50)
@given(log_p=st.floats(-120, 0) | st.floats(-1e-9, 0) | st.floats(-2, 0), n=st.sampled_from([10**k for k in range(7)]))
def test_chance_of_n_samples(log_p: float, n: int) -> None:
    assert chance(log_p, n) == pytest.approx(exact_chance(log_p, n), rel=1e-9)


def test_chance_at_the_limits() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chance(np.array([0.0, -1000.0, math.log(0.5)]), 1) == pytest.approx([1.0, 0.0, 0.5], abs=1e-15)
        assert chance(np.array([0.0, -1000.0, -1e-300]), 10**6).tolist() == [1.0, 0.0, 1.0]
        assert chance(-30.0, 10**6) == pytest.approx(1e6 * math.exp(-30), rel=1e-6)
    with pytest.raises(ValueError, match="0"):
        chance(-1.0, 0)


def test_greedy_scores_against_a_loop() -> None:
    """A memorized text with errors."""
    model, text = taught_model()
    ids = text.copy()
    ids[[17, 43, 80]] = 30
    chosen = ExtractionSettings(window=20, prompt=8, stride=3, greedy=8)
    [one] = measure(model, [Document("a", ids)], letters(), chosen)
    shares, runs = [], []
    for s in one.starts.tolist():
        wanted, got = ids[s + 8 : s + 16].tolist(), naive_greedy(model, ids[s : s + 8].tolist(), 8)
        equal = [a == b for a, b in zip(wanted, got, strict=True)]
        shares.append(sum(equal) / 8)
        runs.append([*equal, False].index(False))
    assert len({*shares}) > 3 and 1.0 in shares
    assert one.greedy_share.tolist() == shares
    assert one.greedy_run.tolist() == runs
    assert one.greedy_exact == shares.count(1.0)


@settings(max_examples=25)
@given(
    length=st.integers(12, 120),
    wrong=st.sets(st.integers(0, 119), max_size=12),
    T=st.sampled_from([12, 48]),
    greedy=st.integers(1, 6),
)
def test_runs_of_a_chain(length: int, wrong: set[int], T: int, greedy: int) -> None:
    """The next id depends on the last one only, so runs can be counted on the text."""
    ids = np.arange(length) % 40
    ids[[i for i in wrong if i < length]] = 39
    chosen = ExtractionSettings(window=12, prompt=5, stride=2, greedy=greedy)
    [one] = measure(chain_model(T=T), [Document("a", ids)], letters(), chosen)
    right = [i > 0 and ids[i] == (ids[i - 1] + 1) % 40 for i in range(length)] + [False]
    runs = {}
    for s in one.starts.tolist():
        end = s + greedy
        while right[end]:
            end += 1
        runs[s] = min(end - s - greedy, T + 1 - greedy)
    tokens, where = one.longest
    assert (tokens, runs[where - greedy]) == (max(runs.values()), tokens)
    assert one.greedy_run.tolist() == [min(run, greedy) for run in runs.values()]


def test_without_greedy_decoding() -> None:
    [one] = measure(some_model(), [Document("a", some_ids(60))], letters(), ExtractionSettings(12, 5, 3, greedy=0))
    assert np.isnan(one.greedy_share).all() and not one.greedy_run.any()
    assert (one.greedy_exact, one.longest) == (0, (0, 0))


def test_documents_do_not_affect_each_other() -> None:
    lengths = [60, 7, 30, 2, 12, 3]
    documents = [Document(f"d{n}", some_ids(n, V=39, seed=n), control=n == 30) for n in lengths]
    together = measure(some_model(), documents, letters(), SMALL)
    for document, one in zip(documents, together, strict=True):
        [alone] = measure(some_model(), [document], letters(), SMALL)
        assert one.document is document and one.short == (len(document.ids) < 12)
        assert one.starts.tolist() == alone.starts.tolist()
        assert one.log_p == pytest.approx(alone.log_p, abs=1e-4)
        assert one.greedy_share == pytest.approx(alone.greedy_share, nan_ok=True)
        assert (one.longest, one.score) == (alone.longest, alone.score)
        assert one.bytes == sum(1 if i < 26 else 2 for i in document.ids.tolist())


@pytest.mark.parametrize(("length", "prompt"), [(11, 5), (7, 3), (3, 1), (2, 1)])
def test_short_documents_are_one_window(length: int, prompt: int) -> None:
    """The prompt is the same fraction of it as of a window."""
    ids = some_ids(length, V=39)
    [one] = measure(some_model(), [Document("a", ids)], letters(), SMALL)
    assert one.short and one.starts.tolist() == [0]
    assert (one.ends[0], one.cuts[0]) == (length, prompt)
    assert one.log_p == pytest.approx([naive_log_p(some_model(), ids.tolist(), prompt)], abs=1e-4)
    half = min(4, length // 2)
    got = naive_greedy(some_model(), ids[:half].tolist(), half)
    assert one.greedy_share.tolist() == [np.mean([a == b for a, b in zip(got, ids[half : 2 * half], strict=True)])]


def test_loss_of_every_token_but_the_first() -> None:
    ids = some_ids(40)
    ids[-1] = 39
    [one] = measure(some_model(), [Document("a", ids)], letters(), SMALL)
    total = -naive_log_p(some_model(), ids.tolist(), 1)
    assert one.score.nats_per_token == pytest.approx(total / 39, rel=1e-5)
    scored = sum(1 if i < 26 else 2 for i in ids[1:-1].tolist())
    assert one.score.bits_per_byte == pytest.approx(total / math.log(2) / scored, rel=1e-5)


def test_progress_reaches_the_end() -> None:
    seen: list[tuple[int, int]] = []
    documents = [Document("a", some_ids(60)), Document("b", some_ids(7, V=39))]
    chosen = ExtractionSettings(12, 5, 3, 4, batch=4)
    measure(some_model(), documents, letters(), chosen, progress=lambda *now: seen.append(now))
    total = 2 * (17 + 1)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_mode_is_restored(random_states) -> None:
    documents = [Document("a", some_ids(60))]
    [expected] = measure(some_model(), documents, letters(), SMALL)
    before = random_states()
    some_model().train()
    try:
        [found] = measure(some_model(), documents, letters(), SMALL)  # without dropout
        assert all(module.training for module in some_model().modules())
    finally:
        some_model().eval()
    assert found.log_p.tolist() == expected.log_p.tolist()
    assert random_states() == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 1, "prompt": 1}, r"window.*2.*1"),
        ({"prompt": 0}, r"prompt.*1.*0"),
        ({"prompt": 100}, r"100 .*100.*99"),
        ({"stride": 0}, r"stride.*1.*0"),
        ({"greedy": -1}, r"greedy.*0.*-1"),
        ({"batch": True}, r"batch.*True"),
        ({"stride": 2.5}, r"stride.*2\.5"),
    ],
)
def test_invalid_settings(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExtractionSettings(**values)


def test_numpy_settings_become_ints() -> None:
    kind = np.uint8
    given = ExtractionSettings(window=kind(40), prompt=kind(20), stride=kind(5), greedy=kind(8), batch=kind(4))
    assert given == ExtractionSettings(window=40, prompt=20, stride=5, greedy=8, batch=4)
    assert {type(value) for value in dataclasses.asdict(given).values()} == {int, bool}


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (ExtractionSettings(window=50, prompt=10), r"50 .*T=48.*--window.*49"),
        (ExtractionSettings(window=49, prompt=10, greedy=25), r"25 .*T=48.*--greedy.*24"),
    ],
)
def test_settings_that_exceed_T(chosen: ExtractionSettings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(some_model(), [Document("a", some_ids(60))], letters(), chosen)


def test_settings_that_fill_T() -> None:
    chosen = ExtractionSettings(window=49, prompt=10, greedy=24)
    [one] = measure(some_model(), [Document("a", some_ids(60))], letters(), chosen)
    assert one.log_p[0] == pytest.approx(naive_log_p(some_model(), some_ids(49).tolist(), 10), abs=1e-4)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "no document"),
        ([Document("empty note", np.array([], dtype=np.uint16))], "'empty note' has 0 "),
        ([Document("a", np.array([3, 39]))], "'a' has 1 "),
        ([Document("a", some_ids(9)), Document("b", np.array([1, 40]))], r"'b'.*1\.\.40.*0\.\.39"),
        ([Document("a", some_ids(9)), Document("a", some_ids(8))], "two .*'a'"),
        ([Document("a", np.ones((2, 3), dtype=int))], r"'a': .* shape \(2, 3\)"),
        ([Document("a", np.ones(3))], "'a': .* float64"),
    ],
)
def test_invalid_documents(documents: list[Document], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(some_model(), documents, letters(), SMALL)


def test_tokenizer_of_another_model() -> None:
    with pytest.raises(ValueError, match=r"50 ids.*V=40"):
        measure(some_model(), [Document("a", some_ids(60))], letters(50), SMALL)


@pytest.mark.parametrize(
    ("T", "given", "expected"),
    [
        (99, {}, (100, 50, 32)),
        (98, {}, (99, 49, 32)),
        (62, {}, (63, 31, 31)),
        (63, {}, (64, 32, 32)),
        (1, {}, (2, 1, 1)),
        (200, {"prompt": 120}, (121, 120, 32)),
        (200, {"window": 30, "greedy": 0}, (30, 15, 0)),
    ],
)
def test_default_settings_fit_the_model(T: int, given: dict, expected: tuple[int, int, int]) -> None:
    settings = ExtractionSettings.fitting(T, **given)
    assert (settings.window, settings.prompt, settings.greedy) == expected
    assert (settings.stride, settings.whole_window) == (5, False)


def test_given_settings_must_fit() -> None:
    for wrong, message in (({"window": 50}, "--window"), ({"greedy": 25}, "--greedy"), ({"prompt": 49}, "--prompt")):
        with pytest.raises(ValueError, match=message):
            ExtractionSettings.fitting(48, **wrong)


@pytest.mark.parametrize(
    ("length", "window", "prompt", "greedy", "decodable"),
    [(60, 12, 5, 4, 17), (12, 12, 5, 4, 1), (11, 11, 5, 4, 1), (7, 7, 3, 3, 1), (2, 2, 1, 1, 1), (14, 12, 5, 4, 2)],
)
def test_window_plans(length: int, window: int, prompt: int, greedy: int, decodable: int) -> None:
    plan = WindowPlan.of(length, SMALL)
    assert (plan.window, plan.prompt, plan.greedy, plan.decodable) == (window, prompt, greedy, decodable)


def test_greedy_share_where_the_text_ends() -> None:
    """Windows of 3: after a greedy prompt of 4 the last starts have fewer than 4 tokens to compare, or none."""
    plan = WindowPlan.of(12, ExtractionSettings(window=3, prompt=1, stride=1, greedy=4))
    assert (len(plan.starts), plan.decodable) == (10, 8)
    [one] = measure(chain_model(), [Document("a", np.arange(12))], letters(), ExtractionSettings(3, 1, 1, greedy=4))
    assert np.isnan(one.greedy_share).tolist() == [False] * 5 + [True] * 5
    assert one.greedy_run.tolist() == [4, 4, 4, 4, 4, 3, 2, 1, 0, 0]
    assert (one.greedy_exact, one.longest) == (5, (8, 4))
