"""References for the splice tests: the spec as plain loops, and checks for every dataset.

The code is deliberately naive: all pairs are tried, examples are filled token by token, shares are fractions.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

NULL = 99
"""Filler token of the tests; no test document contains it."""
CONTENT_MODES = ("anchor_start", "slide_within", "cyclic_roll", "coverage_balanced")
BOUNDS = ("tight", "truncate")


def document(length, number=0):
    """A document whose tokens are unique, also across documents."""
    return np.arange(length) + 1000 * (number + 1)


def documents(lengths):
    return [document(length, number) for number, length in enumerate(lengths)]


def spans(
    *,
    S,
    L,
    content_length=None,
    content_stride=1,
    offset_stride=1,
    content_start_mode="coverage_balanced",
    min_copy_len=2,
    offset_bound="tight",
    mode="splice",
    adaptive_k=True,
):
    """All (t, s, length) of one document in enumeration order; every pair is tried."""
    K = S if content_length is None else min(content_length, S)
    found = []
    for t in range(L):
        for s in range(S):
            if mode == "slide":
                length = S
                fits = t % content_stride == 0 and s == 0 and t + S <= L
            elif content_start_mode == "coverage_balanced":
                length = min(K, L)
                fits = t % content_stride == 0 and t + length <= L and s == S - length and (adaptive_k or L >= K)
            else:
                cyclic = content_start_mode == "cyclic_roll"
                rest = L if cyclic else L - t
                length = min(K, rest, S - s)
                fits = s % offset_stride == 0 and t % content_stride == 0
                if content_start_mode == "anchor_start":
                    fits = fits and t == 0
                if offset_bound == "tight":
                    fits = fits and s <= S - min(K, rest)
                if cyclic:
                    fits = fits and (adaptive_k or L >= K)
            if fits and length >= min_copy_len:
                found.append((t, s, length))
    return found


def example(doc, S, t, s, length, filler=NULL):
    """Tokens, loss mask and segment ids of one example as lists. Only cyclic spans wrap around the document's end."""
    tokens, loss_mask, segment_ids = [filler] * S, [0] * S, [0] * S
    for i in range(length):
        tokens[s + i] = int(doc[(t + i) % len(doc)])
        if i + 1 < length:
            loss_mask[s + i] = 1
    for i in range(s, S):
        segment_ids[i] = 1
    return tokens, loss_mask, segment_ids


def by_coverage(spans_of):
    """(doc_idx, t, s, length) of all documents in order."""
    return [(number, *span) for number, found in enumerate(spans_of) for span in found]


def by_document(spans_of):
    """The same with each document's list repeated to the longest; documents without spans are skipped."""
    longest = max(len(found) for found in spans_of)
    return [(number, *found[i % len(found)]) for number, found in enumerate(spans_of) if found for i in range(longest)]


def by_quota(spans_of, quotas):
    """For n spans and a quota of q: the spans floor((j + 1/2) * n / q)."""
    wanted = []
    for number, (found, quota) in enumerate(zip(spans_of, quotas, strict=True)):
        for j in range(quota):
            wanted.append((number, *found[math.floor(Fraction(2 * j + 1, 2) * len(found) / quota)]))
    return wanted


def shares(lengths, has_examples, *, tau, weights=None, groups=None):
    """P(doc) ~ weight * length ** tau over documents with examples; groups get equal shares."""
    weights = weights or [1] * len(lengths)
    groups = groups or ["all"] * len(lengths)
    # Exact for tau 0 and 1; a float is also a fraction.
    power = {0: lambda length: 1, 1: lambda length: length}.get(tau, lambda length: length**tau)
    mass = [
        Fraction(weight) * Fraction(power(length)) if has else Fraction(0)
        for weight, length, has in zip(weights, lengths, has_examples, strict=True)
    ]
    used = {group for group, has in zip(groups, has_examples, strict=True) if has}
    total = {g: sum((m for m, group in zip(mass, groups, strict=True) if group == g), Fraction(0)) for g in used}
    return [
        m / total[group] / len(used) if has else Fraction(0)
        for m, group, has in zip(mass, groups, has_examples, strict=True)
    ]


def largest_remainder(probabilities, total):
    """Integer quotas that sum to `total`, by largest remainder; ties go to the lower index."""
    exact = [p * total for p in probabilities]
    quotas = [math.floor(x) for x in exact]
    remainders = [x - quota for x, quota in zip(exact, quotas, strict=True)]
    for _ in range(total - sum(quotas)):
        best = remainders.index(max(remainders))
        quotas[best] += 1
        remainders[best] = Fraction(-1)
    return quotas


def check_quotas(quotas, probabilities, total, tolerance=Fraction(1, 10**9)):
    """Check largest-remainder quotas; a tie within the rounding error may go either way."""
    assert len(quotas) == len(probabilities)
    assert sum(quotas) == total
    exact = [p * total for p in probabilities]
    for quota, x in zip(quotas, exact, strict=True):
        assert x - 1 - tolerance < quota < x + 1 + tolerance
    up = [x - quota for quota, x in zip(quotas, exact, strict=True) if quota > x]
    down = [x - quota for quota, x in zip(quotas, exact, strict=True) if quota <= x]
    for rounded_up, rounded_down in itertools.product(up, down):
        assert rounded_up + 1 >= rounded_down - tolerance


def edge_weights(starts, *, L, K, alpha):
    """w(t) = (K / d(t)) ** alpha with d(t) = min(t + 1, L - K - t + 1, K)."""
    return [(K / min(t + 1, L - K - t + 1, K)) ** alpha for t in starts]


def quantiles(weights, q, tolerance=1e-9):
    """The indices allowed for each quantile (j + 1/2) / q of the weights' CDF: one, or two at a tie."""
    total = math.fsum(weights)
    cumulative = [0.0, *(partial / total for partial in itertools.accumulate(weights))]
    allowed = []
    for j in range(q):
        target = (j + 0.5) / q
        allowed.append(
            {i for i in range(len(weights)) if cumulative[i] - tolerance <= target <= cumulative[i + 1] + tolerance}
        )
    return allowed


def check_frequencies(drawn, probabilities):
    """Chi-square test with a false-alarm rate of about 1e-9. `probabilities`: value -> share."""
    drawn = list(drawn)
    counts = dict.fromkeys(probabilities, 0)
    for value in drawn:
        assert value in counts
        counts[value] += 1
    expected = {value: float(p) * len(drawn) for value, p in probabilities.items()}
    assert min(expected.values()) > 5
    statistic = sum((counts[value] - expected[value]) ** 2 / expected[value] for value in counts)
    freedom = len(counts) - 1
    assert statistic <= freedom + 8 * math.sqrt(2 * freedom) + 20


def tuples(array):
    """The rows of an integer array as tuples."""
    assert isinstance(array, np.ndarray)
    assert array.dtype.kind == "i"
    return [tuple(row) for row in array.tolist()]


def check_example(found, wanted, origin, S):
    """Compare one example with the naive lists and its (doc_idx, t, s, length)."""
    for field, values in zip(("tokens", "loss_mask", "segment_ids"), wanted, strict=True):
        array = getattr(found, field)
        assert isinstance(array, np.ndarray)
        assert array.dtype == np.int32
        assert array.shape == (S,)
        assert array.tolist() == values, field
    assert (found.origin.doc_idx, found.origin.t, found.origin.s, found.origin.length) == origin
    assert all(isinstance(getattr(found.origin, name), int) for name in ("doc_idx", "t", "s", "length"))


def origins(batch):
    """(doc_idx, t, s, length) of each batch row."""
    columns = [getattr(batch.origin, name) for name in ("doc_idx", "t", "s", "length")]
    assert all(column.shape == (len(batch.tokens),) for column in columns)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def check_dataset(ds, docs, wanted, S, *, filler=NULL, epoch=0):
    """Compare every example, single and as a batch, with the wanted (doc_idx, t, s, length)."""
    assert len(ds) == len(wanted)
    batch = ds.get_batch(np.arange(len(ds)), epoch=epoch)
    assert origins(batch) == wanted
    arrays = [example(docs[number], S, *span, filler=filler) for number, *span in wanted]
    for field, column in zip(("tokens", "loss_mask", "segment_ids"), zip(*arrays, strict=True), strict=True):
        array = getattr(batch, field)
        assert array.dtype == np.int32
        assert array.shape == (len(wanted), S)
        assert array.tolist() == list(column), field
    if epoch == 0:
        for i in range(len(ds)):
            check_example(ds[i], arrays[i], wanted[i], S)


@st.composite
def schedules(draw):
    """Frame length and the options that determine the spans of a document, in both classes."""
    mode = draw(st.sampled_from(CONTENT_MODES))
    return draw(st.integers(2, 12)), {
        "content_start_mode": mode,
        "content_length": draw(st.none() | st.integers(2, 14)),
        "content_stride": draw(st.integers(1, 4)),
        "offset_stride": draw(st.integers(1, 4)),
        "min_copy_len": draw(st.sampled_from([2, 2, 3, 5])),
        "offset_bound": draw(st.sampled_from(BOUNDS)),
        "adaptive_k": draw(st.booleans()) if mode in ("coverage_balanced", "cyclic_roll") else True,
    }
