"""Frames as tensors, and the loss of a model on them.

The reference runs every span separately, as a plain row of ids without segments. For learned positions, its position
table is shifted by s.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.config import ModelConfig
from niels_gpt.model.gpt import GPT
from niels_gpt.splice import MultiSpliceDocumentDataset, SpliceDocumentDataset
from niels_gpt.splice.packing import pack
from niels_gpt.splice.tensors import to_tensors
from tests.splice import BOUNDS, CONTENT_MODES, NULL, documents

V, S = 50, 24
KINDS = {"v0": {}, "v1": {"norm": "rmsnorm", "mlp": "swiglu"}, "learned": {"positions": "learned"}}
LENGTHS = [31, 9, 24, 5, 17]


def make_model(**options):
    torch.manual_seed(5)
    model = GPT(ModelConfig(V=V, T=S, C=32, L=2, H=2, dropout=0.0, **options))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.dim() > 1 else 1)  # far from the uniform distribution of the initialization
    return model


def tokens_of(lengths=LENGTHS, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.integers(1, V, length) for length in lengths]


def dataset_of(mode="slide_within", docs=None, pad_token_id=0, **options):
    options = {"content_length": 10, "offset_stride": 3, "content_stride": 2, "content_start_mode": mode, **options}
    docs = tokens_of() if docs is None else docs
    return MultiSpliceDocumentDataset(S=S, doc_tokens_list=docs, pad_token_id=pad_token_id, **options)


def some(dataset, number, seed=1):
    """Random spans of the dataset."""
    return dataset.spans(np.random.default_rng(seed).integers(0, len(dataset), number))


def forward(model, frames):
    tensors = to_tensors(frames)
    optional = {"segments": tensors.segments, "positions": tensors.positions}
    return tensors, model(tensors.x, **{name: tensor for name, tensor in optional.items() if tensor is not None})


def loss_of(model, frames, reduction="mean"):
    tensors, logits = forward(model, frames)
    return F.cross_entropy(logits.flatten(0, 1), tensors.targets.flatten(), reduction=reduction)


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def shifted(model, s):
    """The model for a span that starts at position s."""
    if model.config.positions == "rope":
        return model
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.pos_emb.weight[:] = torch.roll(model.pos_emb.weight, -s, dims=0)
    return other


def alone(model, docs, span):
    """The logits of a span on its own."""
    doc, t, s, length = (int(part) for part in span)
    ids = [int(docs[doc][(t + i) % len(docs[doc])]) for i in range(length)]
    return torch.tensor(ids), shifted(model, s)(torch.tensor([ids]))[0]


def spans_alone(model, docs, spans):
    """(sum of the loss over all targets, their number), span by span."""
    total, number = 0.0, 0
    for span in zip(*spans, strict=True):
        ids, logits = alone(model, docs, span)
        for i in range(len(ids) - 1):
            total = total + logits[i].logsumexp(0) - logits[i][ids[i + 1]]
            number += 1
    return total, number


@given(st.lists(st.integers(2, 14), min_size=1, max_size=4), st.integers(2, 12), st.booleans(), st.data())
def test_targets_are_the_next_tokens(lengths, frame, packed, data):
    docs = documents(lengths)
    options = {"S": frame, "pad_token_id": NULL, "content_start_mode": "slide_within"}
    dataset = MultiSpliceDocumentDataset(doc_tokens_list=docs, **options)
    numbers = data.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=12))
    spans = dataset.spans(numbers)
    frames = pack(dataset, spans) if packed else dataset.frames(spans)
    x, targets, segments, positions = to_tensors(frames)
    assert {x.dtype, targets.dtype} == {torch.int64}
    assert x.tolist() == frames.tokens.tolist()
    wanted = [[-100] * x.shape[1] for _ in x]
    where = zip(frames.frame, frames.start, strict=True) if packed else enumerate(spans.s)
    for (row, start), doc, t, length in zip(where, spans.doc, spans.t, spans.length, strict=True):
        for i in range(length - 1):
            wanted[row][start + i] = int(docs[doc][t + i + 1])
    assert targets.tolist() == wanted
    if segments is None:
        assert set(frames.segment_ids.ravel().tolist()) == {1}
    else:
        assert segments.tolist() == frames.segment_ids.tolist()
        assert not segments.is_floating_point()
    if packed:
        assert positions.tolist() == frames.positions.tolist()
        assert positions.dtype == torch.int64
    else:
        assert positions is None


def test_frames_of_one_segment_have_no_segments():
    """Windows of a long document, and left-aligned documents: causal attention is enough."""
    slide = SpliceDocumentDataset(S=5, doc_tokens=range(9), pad_token_id=NULL, mode="slide")
    assert to_tensors(slide.get_batch([0, 3])).segments is None
    left = SpliceDocumentDataset(S=5, doc_tokens=range(3), pad_token_id=NULL, content_start_mode="anchor_start")
    assert to_tensors(left.get_batch([0])).segments is None
    assert to_tensors(left.get_batch([0, 1])).segments.tolist() == [[1] * 5, [0, 1, 1, 1, 1]]


def test_tensors_are_copies():
    dataset = dataset_of()
    frames = dataset.frames(some(dataset, 4))
    before = [part.copy() for part in frames[:3]]
    tensors = to_tensors(frames, "cpu")
    tensors.x.add_(1)
    tensors.targets.add_(1)
    assert all((a == b).all() for a, b in zip(before, frames[:3], strict=True))


def close(found, wanted, tolerance=1e-5):
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("kind", "mode", "bound"), [*zip(("learned", *KINDS), CONTENT_MODES, BOUNDS * 2, strict=True)])
def test_loss_and_gradients_equal_those_of_separate_spans(kind, mode, bound):
    """The mean over targets, for one span per frame, packed frames and separate spans."""
    model = make_model(**KINDS[kind])
    docs = tokens_of()
    dataset = dataset_of(mode, docs, offset_bound=bound)
    spans = some(dataset, 14)
    assert len(set(spans.doc.tolist())) > 2
    assert len(set(spans.s.tolist())) > (2 if mode != "coverage_balanced" else 1)
    frames, packed = dataset.frames(spans), pack(dataset, spans)
    assert packed.tokens.size < 0.7 * frames.tokens.size
    found = {name: loss_of(model, made) for name, made in (("unpacked", frames), ("packed", packed))}
    total, number = spans_alone(model, docs, spans)
    assert found["unpacked"].item() == pytest.approx(total.item() / number, abs=1e-5)
    assert found["packed"].item() == pytest.approx(total.item() / number, abs=1e-5)
    one, other = (gradients(model, loss) for loss in found.values())
    for name in one:
        assert one[name].abs().max() > 1e-4
        close(other[name], one[name])
    if model.config.positions == "rope":
        for name, gradient in gradients(model, total / number).items():
            close(one[name], gradient)
            close(other[name], gradient)
