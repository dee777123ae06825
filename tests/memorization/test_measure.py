"""P(z), greedy decoding and runs against loops over tokens, closed forms, and models whose answers are known."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt import GPT
from niels_gpt.evaluation.scoring import score_rows
from niels_gpt.memorization.extraction import continue_greedily, log_probabilities, longest_run
from niels_gpt.memorization.measure import (
    Document,
    ExtractionSettings,
    chance,
    measure,
    window_starts,
)
from niels_gpt.tokenizer import ByteTokenizer
from tests.memorization.models import chain_model, letters, some_ids, some_model, taught_model

SMALL = ExtractionSettings(window=12, prompt=5, stride=3, greedy=4)


def direct(model: GPT, window: list[int], prompt: int) -> float:
    """log P(z) as a product of softmaxes: the model in float64, called anew for every token."""
    model = copy.deepcopy(model).double().eval()
    total = 0.0
    with torch.no_grad():
        for i in range(prompt, len(window)):
            logits = model(torch.tensor([window[:i]]))[0, -1]
            total += math.log(torch.softmax(logits, dim=0)[window[i]].item())
    return total


def decode(model: GPT, prompt: list[int], new: int) -> list[int]:
    """Greedy decoding, one token at a time, nothing kept."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def run_from(model: GPT, ids: list[int], start: int, prompt: int) -> int:
    """How long greedy decoding stays on the text: to its end, or until T tokens have been read."""
    done = list(ids[start : start + prompt])
    run = 0
    while start + prompt + run < len(ids) and len(done) <= model.config.T:
        token = decode(model, done, 1)[0]
        if token != ids[start + prompt + run]:
            break
        done.append(token)
        run += 1
    return run


# --- windows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "window", "stride", "starts"),
    [
        (100, 100, 5, [0]),
        (101, 100, 5, [0, 1]),
        (105, 100, 5, [0, 5]),
        (112, 100, 5, [0, 5, 10, 12]),
        (99, 100, 5, [0]),
        (2, 100, 5, [0]),
        (10, 4, 1, [0, 1, 2, 3, 4, 5, 6]),
        (10, 4, 50, [0, 6]),
    ],
)
def test_starts(length: int, window: int, stride: int, starts: list[int]) -> None:
    assert window_starts(length, window, stride).tolist() == starts


@given(length=st.integers(2, 300), window=st.integers(2, 60), stride=st.integers(1, 70))
def test_every_stride_and_the_tail(length: int, window: int, stride: int) -> None:
    starts = window_starts(length, window, stride).tolist()
    last = max(0, length - window)
    assert starts == sorted({*range(0, last + 1, stride), last})


# --- P(z) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "prompt"), [(12, 5), (12, 1), (12, 11), (2, 1), (49, 20)])
def test_p_is_the_product_of_softmaxes(window: int, prompt: int) -> None:
    ids = some_ids(60)
    starts = window_starts(60, window, 7)
    found = log_probabilities(some_model(), ids, starts, window=window, prompt=prompt)
    expected = [direct(some_model(), ids[s : s + window].tolist(), prompt) for s in starts.tolist()]
    assert found.dtype == np.float64
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_other_tokens_of_the_window_matter() -> None:
    """Guards the test above: with this model the whole prompt counts."""
    ids = some_ids(12).tolist()
    values = {round(direct(some_model(), [other, *ids[1:]], 5), 4) for other in range(5)}
    assert len(values) == 5


@pytest.mark.parametrize("batch", [0, 1, 2, 3, 100])
def test_the_size_of_a_batch_does_not_matter(batch: int) -> None:
    ids = some_ids(60)
    whole = log_probabilities(some_model(), ids, np.arange(40), window=20, prompt=8)
    assert log_probabilities(some_model(), ids, np.arange(40), window=20, prompt=8, batch=batch) == pytest.approx(
        whole, abs=1e-4
    )


@settings(max_examples=25)
@given(
    rows=st.lists(st.tuples(st.integers(2, 30), st.integers(1, 29)), min_size=1, max_size=8), batch=st.integers(0, 4)
)
def test_rows_of_any_lengths_share_a_batch(rows: list[tuple[int, int]], batch: int) -> None:
    texts = [some_ids(length, seed=i) for i, (length, _) in enumerate(rows)]
    prompts = np.array([min(prompt, length - 1) for length, prompt in rows])
    log_p, led = score_rows(some_model(), texts, prompts, batch=batch)
    for i, (text, prompt) in enumerate(zip(texts, prompts.tolist(), strict=True)):
        alone = log_probabilities(some_model(), text, np.array([0]), window=len(text), prompt=prompt)
        assert log_p[i] == pytest.approx(alone[0], abs=1e-4)
        with torch.no_grad():
            best = some_model()(torch.from_numpy(text[None].astype(np.int64)))[0, prompt - 1 : -1].argmax(-1).numpy()
        assert led[i] == next(
            (k for k, (a, b) in enumerate(zip(best, text[prompt:], strict=True)) if a != b), len(best)
        )


def test_large_vocabularies_are_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = some_ids(60)
    whole = log_probabilities(some_model(), ids, np.arange(9), window=20, prompt=8)
    monkeypatch.setattr("niels_gpt.evaluation.scoring.logits_budget", lambda model: 4 * 40 * 5)
    assert log_probabilities(some_model(), ids, np.arange(9), window=20, prompt=8) == pytest.approx(whole, abs=1e-4)


def test_far_below_what_float32_can_hold() -> None:
    model = chain_model(sharpness=30.0)
    ids = some_ids(40)
    [found] = log_probabilities(model, ids, np.array([0]), window=40, prompt=4)
    assert -10_000 < found < -1000
    assert found == pytest.approx(direct_logs(model, ids.tolist(), 4), rel=1e-5)


def direct_logs(model: GPT, window: list[int], prompt: int) -> float:
    """As `direct`, by logarithms: softmax itself would be 0."""
    model = copy.deepcopy(model).double()
    with torch.no_grad():
        logits = model(torch.tensor([window[:-1]]))[0]
    return math.fsum((logits[i - 1, window[i]] - logits[i - 1].logsumexp(0)).item() for i in range(prompt, len(window)))


def test_a_text_known_by_heart_has_p_near_one() -> None:
    ids = np.arange(100) % 40
    log_p = log_probabilities(chain_model(), ids, window_starts(100, 30, 5), window=30, prompt=10)
    assert (log_p <= 0).all()
    assert (np.exp(log_p) > 0.999).all()


def test_special_ids_of_the_suffix_count() -> None:
    ids = some_ids(12)
    ids[11] = 39  # the end of the document
    [one] = measure(some_model(), [Document("a", ids)], letters(), SMALL)
    assert one.log_p[-1] == pytest.approx(direct(some_model(), ids.tolist(), 5), abs=1e-4)
    assert one.log_p[-1] < direct(some_model(), ids[:-1].tolist(), 5) - 0.01


def test_one_pass_per_batch_and_the_head_for_the_suffix_alone() -> None:
    model, seen, passes = some_model(), [], []
    hooks = [
        model.lm_head.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[:-1].numel())),
        model.blocks.get_submodule("0").register_forward_hook(
            lambda module, args, output: passes.append((*args[0].shape[:-1], output.requires_grad))
        ),
    ]
    try:
        log_probabilities(model, some_ids(60), np.arange(20), window=12, prompt=5, batch=8)
    finally:
        for hook in hooks:
            hook.remove()
    assert passes == [(8, 11, False), (8, 11, False), (4, 11, False)]
    assert sum(seen) == 20 * (12 - 5)


def test_weights_that_are_no_numbers() -> None:
    model = copy.deepcopy(some_model())
    with torch.no_grad():
        model.norm.weight[0] = math.nan
    with pytest.raises(ValueError, match=r"3 of 3 windows .* checkpoint"):
        log_probabilities(model, some_ids(30), np.arange(3), window=10, prompt=5)


# --- (n, p) ----------------------------------------------------------------------------------------


def exact_chance(log_p: float, n: int) -> float:
    with localcontext() as context:
        context.prec = 400
        missed = 1 - Decimal(log_p).exp()
        return float(1 - missed**n)


@given(log_p=st.floats(-120, 0) | st.floats(-1e-9, 0) | st.floats(-2, 0), n=st.sampled_from([10**k for k in range(7)]))
def test_chance_of_n_samples(log_p: float, n: int) -> None:
    assert chance(log_p, n) == pytest.approx(exact_chance(log_p, n), rel=1e-9)


def test_chance_at_the_ends() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chance(np.array([0.0, -1000.0, math.log(0.5)]), 1) == pytest.approx([1.0, 0.0, 0.5], abs=1e-15)
        assert chance(np.array([0.0, -1000.0, -1e-300]), 10**6).tolist() == [1.0, 0.0, 1.0]
        assert chance(-30.0, 10**6) == pytest.approx(1e6 * math.exp(-30), rel=1e-6)
    with pytest.raises(ValueError, match="0"):
        chance(-1.0, 0)


# --- greedy decoding -------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("model", [some_model(), chain_model(), some_model(positions="learned")])
def test_greedy_decoding(model: GPT, batch: int) -> None:
    prompts = [some_ids(length, seed=length) for length in (6, 1, 6, 9, 3)]
    found = continue_greedily(model, prompts, 7, batch=batch)
    assert found.tolist() == [decode(model, prompt.tolist(), 7) for prompt in prompts]


def test_greedy_scores_against_a_loop() -> None:
    """A text that the model knows, with errors here and there."""
    model, text = taught_model()
    ids = text.copy()
    ids[[17, 43, 80]] = 30
    chosen = ExtractionSettings(window=20, prompt=8, stride=3, greedy=8)
    [one] = measure(model, [Document("a", ids)], letters(), chosen)
    shares, runs = [], []
    for s in one.starts.tolist():
        wanted, got = ids[s + 8 : s + 16].tolist(), decode(model, ids[s : s + 8].tolist(), 8)
        equal = [a == b for a, b in zip(wanted, got, strict=True)]
        shares.append(sum(equal) / 8)
        runs.append([*equal, False].index(False))
    assert len({*shares}) > 3 and 1.0 in shares
    assert one.greedy_share.tolist() == shares
    assert one.greedy_run.tolist() == runs
    assert one.greedy_exact == shares.count(1.0)


@pytest.mark.parametrize(("window", "prompt", "greedy"), [(20, 8, 8), (20, 19, 8), (12, 5, 8), (40, 8, 3), (30, 5, 15)])
@pytest.mark.parametrize("wrong", [[], [17, 43, 80], [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110]])
def test_the_longest_run_against_a_loop(window: int, prompt: int, greedy: int, wrong: list[int]) -> None:
    model, text = taught_model()
    ids = text.copy()
    ids[wrong] = 30
    [one] = measure(model, [Document("a", ids)], letters(), ExtractionSettings(window, prompt, 7, greedy))
    runs = {s: run_from(model, ids.tolist(), s, greedy) for s in one.starts.tolist()}
    tokens, where = one.longest
    assert tokens == max(runs.values())
    assert runs[where - greedy] == tokens
    assert wrong or tokens == model.config.T + 1 - greedy  # or the model would not know the text


@given(
    length=st.integers(12, 200),
    wrong=st.sets(st.integers(0, 199), max_size=12),
    T=st.sampled_from([12, 48]),
    greedy=st.integers(1, 6),
)
def test_runs_of_a_chain(length: int, wrong: set[int], T: int, greedy: int) -> None:
    """What the model says after an id does not depend on those before, so runs can be counted on the text alone."""
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


def test_a_text_known_by_heart_costs_little_to_follow() -> None:
    """Once a run reaches T no other can be longer: the rest are not looked at."""
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


def test_without_greedy_decoding() -> None:
    [one] = measure(some_model(), [Document("a", some_ids(60))], letters(), ExtractionSettings(12, 5, 3, greedy=0))
    assert np.isnan(one.greedy_share).all() and not one.greedy_run.any()
    assert (one.greedy_exact, one.longest) == (0, (0, 0))


# --- documents -------------------------------------------------------------------------------------


def test_documents_are_measured_as_if_alone() -> None:
    lengths = [60, 7, 30, 2, 12, 3]
    documents = [Document(f"d{n}", some_ids(n, V=39, seed=n), control=n == 30) for n in lengths]
    together = measure(some_model(), documents, letters(), SMALL)
    for document, one in zip(documents, together, strict=True):
        [alone] = measure(some_model(), [document], letters(), SMALL)
        assert one.document is document
        assert one.starts.tolist() == alone.starts.tolist()
        assert one.log_p == pytest.approx(alone.log_p, abs=1e-4)
        assert one.greedy_share == pytest.approx(alone.greedy_share, nan_ok=True)
        assert (one.longest, one.score) == (alone.longest, alone.score)
        assert one.bytes == sum(1 if i < 26 else 2 for i in document.ids.tolist())


@pytest.mark.parametrize(("length", "prompt"), [(11, 5), (7, 3), (3, 1), (2, 1)])
def test_short_documents_are_one_window(length: int, prompt: int) -> None:
    """The prompt is as large a part of it as of a window."""
    ids = some_ids(length, V=39)
    [one] = measure(some_model(), [Document("a", ids)], letters(), SMALL)
    assert one.short and one.starts.tolist() == [0]
    assert (one.window, one.prompt) == (length, prompt)
    assert one.log_p == pytest.approx([direct(some_model(), ids.tolist(), prompt)], abs=1e-4)
    half = min(4, length // 2)
    got = decode(some_model(), ids[:half].tolist(), half)
    assert one.greedy_share.tolist() == [np.mean([a == b for a, b in zip(got, ids[half : 2 * half], strict=True)])]


def test_a_document_of_one_window_is_not_short() -> None:
    [one] = measure(some_model(), [Document("a", some_ids(12))], letters(), SMALL)
    assert not one.short and (one.window, one.prompt, len(one.starts)) == (12, 5, 1)


@given(length=st.integers(2, 400), window=st.integers(2, 48), prompt=st.integers(1, 47), stride=st.integers(1, 40))
@settings(max_examples=25)
def test_any_settings_cover_every_token_after_the_first_prompt(
    length: int, window: int, prompt: int, stride: int
) -> None:
    prompt = min(prompt, window - 1)
    stride = min(stride, window - prompt)
    chosen = ExtractionSettings(window, prompt, stride, greedy=0)
    [one] = measure(chain_model(), [Document("a", np.arange(length) % 39)], letters(), chosen)
    assert 1 <= one.prompt < one.window <= length
    covered = {i for s in one.starts.tolist() for i in range(s + one.prompt, s + one.window)}
    assert covered == set(range(one.prompt, length))


def test_the_loss_is_that_of_every_token_but_the_first() -> None:
    ids = some_ids(40)
    ids[-1] = 39
    [one] = measure(some_model(), [Document("a", ids)], letters(), SMALL)
    total = -direct(some_model(), ids.tolist(), 1)
    assert one.score.nats_per_token == pytest.approx(total / 39, rel=1e-5)
    scored = sum(1 if i < 26 else 2 for i in ids[1:-1].tolist())
    assert one.score.bits_per_byte == pytest.approx(total / math.log(2) / scored, rel=1e-5)


def test_bytes() -> None:
    model = some_model(V=256)
    data = "héé — naïve".encode() * 3
    [one] = measure(model, [Document("a", np.frombuffer(data, np.uint8))], ByteTokenizer(), SMALL)
    assert one.bytes == len(data)
    assert one.log_p[0] == pytest.approx(direct(model, list(data[:12]), 5), abs=1e-4)


def test_progress_reaches_the_end() -> None:
    seen: list[tuple[int, int]] = []
    documents = [Document("a", some_ids(60)), Document("b", some_ids(7, V=39))]
    measure(
        some_model(),
        documents,
        letters(),
        ExtractionSettings(12, 5, 3, 4, batch=4),
        progress=lambda *now: seen.append(now),
    )
    total = 2 * (17 + 1)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_left_as_found(training: bool, random_states) -> None:
    documents = [Document("a", some_ids(60))]
    [expected] = measure(some_model(), documents, letters(), SMALL)
    before = random_states()
    some_model().train(training)
    try:
        [found] = measure(some_model(), documents, letters(), SMALL)  # without dropout
        assert all(module.training is training for module in some_model().modules())
    finally:
        some_model().eval()
    assert found.log_p.tolist() == expected.log_p.tolist()
    assert random_states() == before


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 1, "prompt": 1}, "window must be an integer of at least 2, got 1"),
        ({"prompt": 0}, "prompt must be an integer of at least 1"),
        ({"prompt": 100}, "prompt of 100 tokens leaves nothing of a window of 100"),
        ({"stride": 0}, "stride must be an integer of at least 1"),
        ({"greedy": -1}, "greedy must be an integer of at least 0"),
        ({"batch": True}, "batch must be an integer"),
        ({"stride": 2.5}, "stride must be an integer"),
    ],
)
def test_settings_that_make_no_sense(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExtractionSettings(**values)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_settings_of_numpy_are_plain_numbers(kind: type) -> None:
    given = ExtractionSettings(window=kind(40), prompt=kind(20), stride=kind(5), greedy=kind(8), batch=kind(4))
    assert given == ExtractionSettings(window=40, prompt=20, stride=5, greedy=8, batch=4)
    assert {type(value) for value in dataclasses.asdict(given).values()} == {int, bool}


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (ExtractionSettings(window=50, prompt=10), "windows of 50 tokens .* T=48: set --window to 49 or less"),
        (ExtractionSettings(window=49, prompt=10, greedy=25), "T=48: set --greedy to 24 or less"),
    ],
)
def test_settings_that_do_not_fit_the_model(chosen: ExtractionSettings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(some_model(), [Document("a", some_ids(60))], letters(), chosen)


def test_settings_that_just_fit() -> None:
    chosen = ExtractionSettings(window=49, prompt=10, greedy=24)
    [one] = measure(some_model(), [Document("a", some_ids(60))], letters(), chosen)
    assert one.log_p[0] == pytest.approx(direct(some_model(), some_ids(49).tolist(), 10), abs=1e-4)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "no document"),
        ([Document("empty note", np.array([], dtype=np.uint16))], "'empty note' has 0 tokens of text"),
        ([Document("a", np.array([3]))], "'a' has 1 tokens of text"),
        ([Document("a", np.array([3, 39]))], "'a' has 1 tokens of text"),
        ([Document("a", some_ids(9)), Document("b", np.array([1, 40]))], r"'b' has ids 1\.\.40, outside .* 0\.\.39"),
        ([Document("a", some_ids(9)), Document("a", some_ids(8))], "two documents are named 'a'"),
        ([Document("a", np.ones((2, 3), dtype=int))], r"'a': .* shape \(2, 3\)"),
        ([Document("a", np.ones(3))], "'a': .* float64"),
    ],
)
def test_documents_that_cannot_be_measured(documents: list[Document], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(some_model(), documents, letters(), SMALL)


def test_the_tokenizer_of_another_model() -> None:
    with pytest.raises(ValueError, match="50 ids, the model V=40"):
        measure(some_model(), [Document("a", some_ids(60))], letters(50), SMALL)
