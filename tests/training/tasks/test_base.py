"""Batches, and the names of held-out sets."""

import torch
import torch.nn.functional as F

from niels_gpt import GPT, ModelConfig
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


def chats(*lengths, T=40):
    """Rows whose last target is at position `lengths` - 1, with gaps before it, then padding."""
    draw = torch.Generator().manual_seed(3)
    x, targets = torch.randint(0, 30, (2, len(lengths), T), generator=draw)
    targets[torch.rand(targets.shape, generator=draw) < 0.4] = -100
    for row, length in enumerate(lengths):
        targets[row, length:] = -100
        if length:
            targets[row, length - 1] = row
    return Batch(x, targets)


def test_groups_by_length_hold_every_row_up_to_its_last_target():
    lengths = [3, 40, 16, 17, 0, 33, 32, 1]
    batch = chats(*lengths)
    groups = batch.by_length()
    assert [tuple(group.x.shape) for group in groups] == [(4, 16), (2, 32), (2, 40)]  # the last is cut at T
    rows = [(x.tolist(), targets.tolist()) for group in groups for x, targets in zip(*group[:2], strict=True)]
    expected = []
    for width, members in ((16, [0, 2, 4, 7]), (32, [3, 6]), (40, [1, 5])):
        expected += [(batch.x[row, :width].tolist(), batch.targets[row, :width].tolist()) for row in members]
    assert rows == expected
    assert sum(int((group.targets != -100).sum()) for group in groups) == int((batch.targets != -100).sum())
    assert [group.x.shape[1] for group in batch.by_length(4)] == [4, 16, 20, 32, 36, 40]
    assert [group.x.shape[1] for group in batch.by_length(64)] == [40]


def test_groups_by_length_have_the_loss_of_the_whole_batch():
    torch.manual_seed(0)
    model = GPT(ModelConfig(V=30, T=40, C=16, L=2, H=2, dropout=0.0)).double()
    batch = chats(3, 40, 16, 17, 0, 33)
    scored = batch.targets != -100
    # The reference: a plain cross entropy over the logits of the whole batch.
    whole = F.cross_entropy(model(batch.x)[scored], batch.targets[scored], reduction="sum")
    summed = sum(model.loss(group.x, group.targets, total=torch.tensor(1)) for group in batch.by_length())
    torch.testing.assert_close(summed, whole)
    weights = list(model.parameters())
    for ours, plain in zip(torch.autograd.grad(summed, weights), torch.autograd.grad(whole, weights), strict=True):
        torch.testing.assert_close(ours, plain)


def test_rows_with_structure_are_not_grouped():
    batch = batch_of()
    assert batch.by_length() == [batch]
    assert batch._replace(segments=None).by_length()[0].positions is batch.positions
    assert len(batch._replace(positions=None).by_length()) == 1


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
