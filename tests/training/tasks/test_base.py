"""Batches, and the names of held-out sets."""

import torch

from niels_gpt.training.tasks.base import Batch, eval_name


def batch_of(rows=5, structured=True):
    x = torch.arange(rows * 4).view(rows, 4)
    return Batch(x, x + 1, x % 3, x % 5) if structured else Batch(x, x + 1)


def test_structure_is_what_plain_rows_lack():
    assert batch_of(structured=False).structure() == {}
    batch = batch_of()
    assert batch.structure() == {"segments": batch.segments, "positions": batch.positions}
    assert batch._replace(segments=None).structure() == {"positions": batch.positions}


def test_micro_batches_split_the_rows():
    batch = batch_of()
    parts = batch.micro_batches(2)
    assert [len(part.x) for part in parts] == [3, 2]
    for i, column in enumerate(batch):
        assert torch.equal(torch.cat([part[i] for part in parts]), column)
    assert len(batch.micro_batches(9)) == 5  # at most one per row
    plain = batch_of(structured=False).micro_batches(5)
    assert [(len(part.x), part.segments, part.positions) for part in plain] == [(1, None, None)] * 5


def test_segments_stay_on_the_cpu():
    batch = batch_of().to(torch.device("meta"))
    assert [tensor.device.type for tensor in batch] == ["meta", "meta", "cpu", "meta"]
    plain = batch_of(structured=False).to(torch.device("meta"))
    assert (plain.segments, plain.positions) == (None, None)


def test_names_of_held_out_sets():
    assert [eval_name(source) for source in ("wiki", "roam", "primer", "dolly15k")] == [
        "val_wiki",
        "val_roam",
        "val_chat",
        "val_dolly15k",
    ]
    assert eval_name("mine", "test") == "test_mine"


def test_pinned_batches_keep_their_segments(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 100)
    batch = batch_of()
    pinned = batch.pinned()
    assert pinned.segments is batch.segments
    for i in (0, 1, 3):
        assert torch.equal(pinned[i], batch[i] + 100)
    assert batch_of(structured=False).pinned().positions is None
