"""GPT.loss: its value, the sum over parts of a batch, and recomputed activations."""

import pytest
import torch

from tests.kernels.helpers import IDS, KINDS, batch_of, gradients, model_of

each_kind = pytest.mark.parametrize("kind", KINDS, ids=IDS)


@each_kind
def test_it_is_the_mean_over_the_targets_that_count(kind):
    model, (x, targets) = model_of(kind), batch_of()
    log_p = model(x).log_softmax(-1)
    expected = sum(-log_p[b, t, targets[b, t]] for b in range(5) for t in range(24) if targets[b, t] >= 0)
    number = int((targets >= 0).sum())
    torch.testing.assert_close(model.loss(x, targets), expected / number)
    torch.testing.assert_close(model.loss(x, targets, total=torch.tensor(1000)), expected / 1000)


@each_kind
def test_parts_of_a_batch_add_up(kind):
    model, (x, targets) = model_of(kind), batch_of()
    model.loss(x, targets).backward()
    expected = gradients(model)
    total = (targets >= 0).sum()
    for part in (slice(0, 2), slice(2, 5)):
        model.loss(x[part], targets[part], total=total).backward()
    for found, gradient in zip(gradients(model), expected, strict=True):
        assert torch.allclose(found, gradient, atol=1e-6)


def test_a_part_without_targets_adds_nothing():
    model, (x, _) = model_of({}), batch_of()
    loss = model.loss(x, torch.full_like(x, -100), total=torch.tensor(7))
    loss.backward()
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients(model))


@pytest.mark.parametrize(("kind", "dropout"), [({}, 0.0), ({}, 0.3), (KINDS[3], 0.0)], ids=str)
def test_recomputed_activations_change_no_bit(kind, dropout):
    """Dropout draws the same masks in both passes."""
    model, (x, targets) = model_of(kind, dropout=dropout).train(), batch_of()
    found = []
    for again in (False, True):
        model.checkpoint_activations = again
        torch.manual_seed(5)
        model.loss(x, targets).backward()
        found.append(gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
