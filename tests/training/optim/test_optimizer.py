"""AdamW and Muon beside naive versions in float64."""

import copy

import numpy as np
import pytest
import torch

from niels_gpt.config import TrainConfig
from niels_gpt.model.gpt import GPT
from niels_gpt.training.optim.optimizer import make_optimizer, set_lr
from tests.training import same

SIZES = {"V": 32, "T": 8, "C": 16, "L": 2, "H": 2, "dropout": 0.0}
LR, DECAY, BETAS = 0.02, 0.3, (0.8, 0.9)


def settings(optimizer):
    return TrainConfig(base_lr=LR, weight_decay=DECAY, betas=BETAS, optimizer=optimizer)


def new_model():
    torch.manual_seed(0)
    return GPT(SIZES)


def give_gradients(model, seed):
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draw)


def weights(model):
    return {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}


def gradients(model):
    return {name: p.grad.double().numpy().copy() for name, p in model.named_parameters()}


class NaiveAdamW:
    """Loshchilov & Hutter, algorithm 2, in float64."""

    def __init__(self, decay):
        self.decay, self.m, self.v, self.t = decay, 0.0, 0.0, 0

    def step(self, w, g, lr):
        self.t += 1
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * g
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * g * g
        m, v = self.m / (1 - BETAS[0] ** self.t), self.v / (1 - BETAS[1] ** self.t)
        return w - lr * self.decay * w - lr * m / (np.sqrt(v) + 1e-8)


class NaiveMuon:
    """Keller Jordan's Muon: Nesterov momentum, orthogonalized by the quintic iteration, in float64."""

    def __init__(self, decay):
        self.decay, self.momentum = decay, 0.0

    def step(self, w, g, lr):
        self.momentum = 0.95 * self.momentum + 0.05 * g
        direction = 0.05 * g + 0.95 * self.momentum
        wide = direction if direction.shape[0] <= direction.shape[1] else direction.T
        x = wide / np.linalg.norm(wide)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = x if direction.shape[0] <= direction.shape[1] else x.T
        return w - lr * self.decay * w - lr * 0.2 * np.sqrt(max(w.shape)) * x


def is_hidden(name, shape):
    return len(shape) == 2 and name != "tok_emb.weight"


def test_adamw_decays_matrices_and_nothing_else():
    model = new_model()
    optimizer = make_optimizer(model, settings("adamw"))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay.pop(id(p)) for name, p in model.named_parameters()} == {
        name: DECAY if p.dim() == 2 else 0.0 for name, p in model.named_parameters()
    }
    assert not decay  # the tied matrix counts once
    assert all(tuple(group["betas"]) == BETAS for group in optimizer.param_groups)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_steps_equal_those_of_the_naive_version(kind):
    """Muon takes the hidden matrices, AdamW the rest."""
    model = new_model()
    optimizer = make_optimizer(model, settings(kind))
    naive = {name: NaiveAdamW(DECAY if p.dim() == 2 else 0.0) for name, p in model.named_parameters()}
    if kind == "muon":
        naive = {
            name: NaiveMuon(DECAY) if is_hidden(name, p.shape) else NaiveAdamW(0.0)
            for name, p in model.named_parameters()
        }
    expected = weights(model)
    for step in range(3):
        give_gradients(model, step)
        grads = gradients(model)
        optimizer.step()
        expected = {name: naive[name].step(w, grads[name], LR) for name, w in expected.items()}
    for name, w in weights(model).items():
        if isinstance(naive[name], NaiveMuon):  # torch iterates in bfloat16
            error = np.linalg.norm(w - expected[name]) / (LR * 0.2 * np.sqrt(max(w.shape) * min(w.shape)))
            assert error < 0.1, name
        else:
            np.testing.assert_allclose(w, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert sum(isinstance(one, NaiveMuon) for one in naive.values()) == (4 * SIZES["L"] if kind == "muon" else 0)


@pytest.mark.parametrize(("kind", "loaded"), [("adamw", True), ("muon", False), ("muon", True)])
def test_a_learning_rate_set_in_the_groups_reaches_every_weight(kind, loaded):
    model = new_model()
    optimizer = make_optimizer(model, settings(kind))
    if loaded:
        give_gradients(model, 0)
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(model.state_dict())
    give_gradients(model, 1)
    optimizer.step()
    assert same(before, model.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    for name, w in model.state_dict().items():
        assert not torch.equal(w, before[name]), name


def test_set_lr_reaches_all_groups_and_changes_tensors_in_place():
    for kind in ("adamw", "muon"):
        optimizer = make_optimizer(new_model(), settings(kind))
        set_lr(optimizer, 0.25)
        assert [group["lr"] for group in optimizer.param_groups] == [0.25] * len(optimizer.param_groups)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=rate)
    set_lr(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.5
