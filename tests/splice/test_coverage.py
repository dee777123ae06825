"""Coverage counts, compared with counting every position of every frame."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from niels_gpt.splice import MultiSpliceDocumentDataset
from niels_gpt.splice import coverage as module
from niels_gpt.splice.coverage import Coverage, cover, epoch_spans, frames_needed, passes, step_spans
from niels_gpt.splice.packing import pack
from tests.splice import NULL, documents, schedules

S = 8


def lengths_of(spans):
    return [part.length for part in spans]


def multi(lengths, S=S, **options):
    return MultiSpliceDocumentDataset(S=S, doc_tokens_list=documents(lengths), pad_token_id=NULL, **options)


def names(lengths):
    return [f"document {i}" for i in range(len(lengths))]


def count_frames(docs, batches):
    """([seen per token], [supervised per token]) of each document, by visiting every position of every frame.

    Tokens are unique, so a token identifies its origin. A position with loss mask 1 predicts the token at the next
    position of its frame.
    """
    origin = {int(token): (number, i) for number, doc in enumerate(docs) for i, token in enumerate(doc)}
    seen = [[0] * len(doc) for doc in docs]
    supervised = [[0] * len(doc) for doc in docs]
    for frames in batches:
        for tokens, mask in zip(frames.tokens.tolist(), frames.loss_mask.tolist(), strict=True):
            for at, (token, target) in enumerate(zip(tokens, mask, strict=True)):
                if token != NULL:
                    number, i = origin[token]
                    seen[number][i] += 1
                if target:
                    number, i = origin[tokens[at + 1]]
                    supervised[number][i] += 1
    return seen, supervised


def check(found, lengths, wanted):
    """Compare the coverage of every document with naive counts."""
    assert [document.name for document in found] == names(lengths)
    assert [document.length for document in found] == list(lengths)
    for document, seen, supervised in zip(found, *wanted, strict=True):
        assert isinstance(document, Coverage)
        assert document.seen.tolist() == seen
        assert document.supervised.tolist() == supervised


def check_epoch(dataset, lengths, epoch=0):
    every = dataset.get_batch(np.arange(len(dataset)), epoch=epoch)
    found = cover(dataset, names(lengths), epoch_spans(dataset, epoch))
    check(found, lengths, count_frames(documents(lengths), [every]))
    return found


@given(
    schedules(), st.lists(st.integers(0, 20), min_size=1, max_size=4), st.sampled_from(["by_coverage", "by_document"])
)
def test_every_mode_equals_the_naive_count(schedule, lengths, balance):
    """All content modes, both bounds, strides, seams of cyclic_roll, documents without examples."""
    size, options = schedule
    try:
        dataset = multi(lengths, size, balance_mode=balance, **options)
    except ValueError as err:
        assert "no examples" in str(err)
        assume(False)
    check_epoch(dataset, lengths)


@given(
    st.lists(st.integers(2, 30), min_size=1, max_size=5),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.7, 3.0]),
    st.integers(1, 200),
    st.sampled_from(["quota", "stream"]),
    st.integers(0, 3),
)
def test_coverage_of_quotas_and_streams(lengths, tau, alpha, epoch_length, sampler, jitter):
    """Temperature, edge weights and jitter, in several epochs."""
    dataset = multi(
        lengths,
        content_length=5,
        balance_mode="by_temperature",
        balance_tau=tau,
        alpha=alpha,
        epoch_length=epoch_length,
        sampler=sampler,
        offset_jitter=jitter,
    )
    for epoch in (0, 3):
        found = check_epoch(dataset, lengths, epoch)
        assert sum(int(document.seen.sum() - document.supervised.sum()) for document in found) == epoch_length


def test_slide_and_documents_without_examples():
    lengths = [10, 7, 8]
    found = check_epoch(multi(lengths, S=8, mode="slide"), lengths)
    assert found[0].seen.tolist() == [1, 2, 3, 3, 3, 3, 3, 3, 2, 1]
    assert found[1].seen.tolist() == [0] * 7  # shorter than the frame
    assert found[1].supervised.tolist() == [0] * 7
    assert found[2].seen.tolist() == [1] * 8


def test_epoch_in_chunks(monkeypatch):
    lengths = [9, 6]
    dataset = multi(lengths, content_start_mode="slide_within")
    monkeypatch.setattr(module, "_CHUNK", 7)
    chunks = list(epoch_spans(dataset))
    assert [len(chunk.doc) for chunk in chunks[:-1]] == [7] * (len(chunks) - 1)
    assert sum(len(chunk.doc) for chunk in chunks) == len(dataset)
    check_epoch(dataset, lengths)


@pytest.mark.parametrize(
    ("shuffle", "options"),
    [(True, {"curriculum": 2}), (False, {}), (True, {"balance_mode": "by_temperature", "sampler": "stream"})],
)
def test_step_spans_are_the_training_batches(shuffle, options):
    lengths, steps, B = [9, 6, 4], 7, 5
    dataset = multi(lengths, content_length=4, shuffle=shuffle, **options)
    batches = [dataset.gather(dataset.plan(3, step, B)) for step in range(steps)]
    spans = list(step_spans(dataset, 3, steps, B))
    assert [len(part.doc) for part in spans] == [B] * steps
    found = cover(dataset, names(lengths), spans)
    check(found, lengths, count_frames(documents(lengths), batches))


def test_no_spans_cover_nothing():
    dataset = multi([9, 6])
    assert [document.seen.tolist() for document in cover(dataset, ["a", "b"], [])] == [[0] * 9, [0] * 6]
    with pytest.raises(ValueError):
        cover(dataset, ["one"], epoch_spans(dataset))


@given(st.lists(st.integers(2, 20), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 6))
def test_frames_needed_equals_packed_batches(lengths, B, steps):
    dataset = multi(lengths, balance_mode="by_document")
    frames = 0
    for step in range(steps):
        packed = pack(dataset, dataset.planned(dataset.plan(0, step, B)))
        assert packed.tokens.shape[1] <= dataset.S
        frames += len(packed.tokens)
    found = lengths_of(step_spans(dataset, 0, steps, B))
    assert frames_needed(found, dataset.S, B, packed=True) == (steps * B, frames)
    assert frames_needed(found, dataset.S, B, packed=False) == (steps * B, steps * B)


def test_frames_of_an_epoch_by_hand():
    """Ten spans of 3 tokens, two per frame of 8: batches of 4 need 2, 2 and 1 frames."""
    dataset = multi([12], content_length=3)
    assert len(dataset) == 10
    for B, frames in ((4, 5), (3, 2 + 2 + 2 + 1), (100, 5)):
        assert frames_needed(lengths_of(epoch_spans(dataset)), 8, B, packed=True) == (10, frames)
    assert frames_needed([], 8, 4, packed=True) == (0, 0)


@pytest.mark.parametrize("options", [{}, {"balance_mode": "by_document"}, {"content_start_mode": "cyclic_roll"}])
def test_passes_count_predictions(options):
    """After each step: predictions so far, divided by the predictable tokens of the documents."""
    lengths, B, steps = [9, 6, 4], 3, 12
    dataset = multi(lengths, content_length=4, **options)
    found = passes(dataset, 5, steps, B)
    assert len(found) == steps + 1
    predicted, wanted = 0, [0.0]
    for step in range(steps):
        predicted += int(dataset.gather(dataset.plan(5, step, B)).loss_mask.sum())
        wanted.append(float(Fraction(predicted, sum(length - 1 for length in lengths))))
    assert found.tolist() == pytest.approx(wanted)


def test_passes_ignore_documents_without_examples():
    lengths = [8, 4]
    dataset = multi(lengths, adaptive_k=False)
    assert Counter(dataset.triples()[:, 0].tolist()) == {0: 1}
    assert passes(dataset, 0, 2, 1).tolist() == [0, 1, 2]


def test_passes_follow_the_training_order():
    """Without shuffling, the short documents come last."""
    dataset = multi([8, 2, 2], content_length=None)
    in_order = multi([8, 2, 2], content_length=None, shuffle=False)
    assert passes(in_order, 0, 3, 1).tolist() == pytest.approx([0, 7 / 9, 8 / 9, 1])
    shuffled = {tuple(np.round(np.diff(passes(dataset, seed, 3, 1)) * 9).tolist()) for seed in range(20)}
    assert len(shuffled) == 3  # the long document first, second or third
    assert all(math.isclose(sum(order), 9) for order in shuffled)
