"""Packed frames, compared with frames filled token by token."""

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from niels_gpt.splice import MultiSpliceDocumentDataset, Spans, SpliceDocumentDataset
from niels_gpt.splice.packing import PackedFrames, arrange, pack
from tests.splice import NULL, documents, schedules
from tests.splice import spans as naive_spans


def multi(lengths, **options):
    fixed = {"S": options.pop("S", 16), "pad_token_id": options.pop("pad_token_id", NULL)}
    return MultiSpliceDocumentDataset(doc_tokens_list=documents(lengths), **fixed, **options)


def all_spans(dataset):
    return dataset.spans(np.arange(len(dataset)))


def naive(docs, packed):
    """Tokens, loss mask, segments and positions of the frames described by `packed`, as nested lists."""
    rows, width = packed.tokens.shape
    tokens = [[NULL] * width for _ in range(rows)]
    mask, segments, positions = ([[0] * width for _ in range(rows)] for _ in range(3))
    seen = [0] * rows
    for i, (doc, t, s, length) in enumerate(zip(*(part.tolist() for part in packed.origin), strict=True)):
        row, start = int(packed.frame[i]), int(packed.start[i])
        seen[row] += 1
        for j in range(length):
            tokens[row][start + j] = int(docs[doc][(t + j) % len(docs[doc])])
            mask[row][start + j] = int(j + 1 < length)
            segments[row][start + j] = seen[row]
            positions[row][start + j] = s + j
    return tokens, mask, segments, positions


def check_packed(packed, docs, spans):
    """Every span appears once, spans do not overlap, everything else is filler."""
    lengths = spans.length.tolist()
    free = {(row, i) for row in range(packed.tokens.shape[0]) for i in range(packed.tokens.shape[1])}
    for row, start, length in zip(packed.frame.tolist(), packed.start.tolist(), lengths, strict=True):
        used = {(row, start + i) for i in range(length)}
        assert used <= free, "spans overlap or leave the frame"
        free -= used
    for part, given_part in zip(packed.origin, spans, strict=True):
        assert part.tolist() == given_part.tolist()
    for name in ("tokens", "loss_mask", "segment_ids", "positions"):
        assert getattr(packed, name).dtype == np.int32
        assert getattr(packed, name).shape == packed.tokens.shape
    tokens, mask, segments, positions = naive(docs, packed)
    assert packed.tokens.tolist() == tokens
    assert packed.loss_mask.tolist() == mask
    assert packed.positions.tolist() == positions
    assert packed.segment_ids.tolist() == segments
    assert sum(map(sum, mask)) == sum(length - 1 for length in lengths)


@given(st.lists(st.integers(2, 40), min_size=1, max_size=60), st.integers(0, 30))
def test_few_frames_without_overlap(lengths, more):
    S = max(lengths) + more
    frame, start = arrange(np.array(lengths), S)
    frames = int(max(frame)) + 1
    used = [set() for _ in range(frames)]
    for row, at, length in zip(frame.tolist(), start.tolist(), lengths, strict=True):
        positions = set(range(at, at + length))
        assert 0 <= at <= S - length
        assert not used[row] & positions
        used[row] |= positions
    assert all(used), "an empty frame"
    assert -(-sum(lengths) // S) <= frames <= len(lengths)
    # First-fit decreasing needs at most 11/9 of the optimum plus two thirds of a frame.
    assert frames <= 11 / 9 * optimum_bound(lengths, S) + 6 / 9
    # No two frames could be merged.
    assert all(len(a) + len(b) > S for i, a in enumerate(used) for b in used[:i])


def optimum_bound(lengths, S):
    """An upper bound of the optimum: next fit in the best of a few orders."""
    best = len(lengths)
    for order in (sorted(lengths), sorted(lengths, reverse=True), lengths):
        frames, left = 0, 0
        for length in order:
            if length > left:
                frames, left = frames + 1, S
            left -= length
        best = min(best, frames)
    return best


@given(schedules(), st.lists(st.integers(2, 14), min_size=1, max_size=5), st.data())
def test_packed_frames_equal_the_naive_frames(schedule, lengths, data):
    S, options = schedule
    docs = documents(lengths)
    assume(any(naive_spans(S=S, L=length, **options) for length in lengths))
    dataset = MultiSpliceDocumentDataset(doc_tokens_list=docs, S=S, pad_token_id=NULL, **options)
    numbers = data.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=24))
    spans = dataset.spans(numbers)
    packed = pack(dataset, spans)
    check_packed(packed, docs, spans)
    ends = (packed.start + spans.length).tolist()
    assert packed.tokens.shape == (max(packed.frame.tolist()) + 1, max(ends))
    assert packed.tokens.shape[1] <= S


def test_packed_frames_by_hand():
    dataset = SpliceDocumentDataset(S=8, doc_tokens=range(10, 18), pad_token_id=NULL, content_start_mode="slide_within")
    spans = Spans(*(np.array(part) for part in ([0, 0, 0], [0, 5, 2], [0, 4, 1], [3, 3, 4])))
    packed = pack(dataset, spans)
    assert packed.tokens.tolist() == [[12, 13, 14, 15, 10, 11, 12], [15, 16, 17, NULL, NULL, NULL, NULL]]
    assert packed.loss_mask.tolist() == [[1, 1, 1, 0, 1, 1, 0], [1, 1, 0, 0, 0, 0, 0]]
    assert packed.segment_ids.tolist() == [[2, 2, 2, 2, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]]
    assert packed.positions.tolist() == [[1, 2, 3, 4, 0, 1, 2], [4, 5, 6, 0, 0, 0, 0]]
    assert packed.frame.tolist() == [0, 1, 0]
    assert packed.start.tolist() == [4, 0, 0]


def test_frames_are_trimmed_to_the_longest():
    dataset = multi([4, 5], S=64)
    packed = pack(dataset, all_spans(dataset))
    assert packed.tokens.shape == (1, 9)
    one = pack(dataset, dataset.spans([1]))
    assert one.tokens.shape == (1, 5)
    assert one.segment_ids.tolist() == [[1] * 5]


def test_no_spans_give_no_frames():
    packed = pack(multi([4, 5]), multi([4, 5]).spans([]))
    assert len(packed.tokens) == len(packed.frame) == len(packed.start) == 0


def test_packed_batch_equals_pack():
    ds = SpliceDocumentDataset(S=8, doc_tokens=np.arange(10, 19), pad_token_id=0, content_length=3)
    found, wanted = ds.get_batch([0, 2, -1], packed=True), pack(ds, ds.spans([0, 2, -1]))
    assert isinstance(found, PackedFrames)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len(found.tokens) == 2  # two spans of 3 in the first frame, one in the second
