"""The sampled loss against a loop that draws windows by the procedure of the spec."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from niels_gpt import GPT, ModelConfig, evaluate
from niels_gpt.evaluation.sampled import evaluate_rows, nats_and_targets

T = 16


def make(dropout: float = 0.5) -> GPT:
    torch.manual_seed(0)
    model = GPT(ModelConfig(V=256, T=T, C=32, L=2, H=2, d_ff=64, dropout=dropout))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(10)  # losses that differ from window to window
    return model


def stream(n: int, seed: int) -> bytes:
    return bytes(torch.randint(256, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


STREAMS = {"val_wiki": stream(500, 1), "val_roam": stream(90, 2), "val_chat": stream(T + 1, 3)}


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cross_entropy(scores: list[float], target: int) -> float:
    top = max(scores)
    return top + math.log(math.fsum(math.exp(s - top) for s in scores)) - scores[target]


@torch.no_grad()
def reference(
    model: GPT, streams: dict[str, bytes], *, steps: int, B: int, length: int, generator: torch.Generator
) -> dict[str, float]:
    """Draw one multinomial per batch and one randint per row; return the mean of the batch means."""
    model.eval()
    means = {}
    for name, data in streams.items():
        batches = []
        for _ in range(steps):
            torch.multinomial(torch.tensor([1.0]), B, replacement=True, generator=generator)
            losses = []
            for _ in range(B):
                start = torch.randint(0, len(data) - length, (1,), generator=generator).item()
                chunk = list(data[start : start + length + 1])
                logits = model(torch.tensor([chunk[:-1]]))[0].tolist()
                losses += [cross_entropy(scores, y) for scores, y in zip(logits, chunk[1:], strict=True)]
            batches.append(math.fsum(losses) / len(losses))
        means[name] = math.fsum(batches) / steps
    return means


@pytest.mark.parametrize(("steps", "B", "length"), [(1, 1, T), (3, 4, T), (2, 5, 7)])
def test_mean_of_the_batch_losses(steps: int, B: int, length: int) -> None:
    model = make().train()
    expected = reference(model, STREAMS, steps=steps, B=B, length=length, generator=seeded())
    model.train()
    got = evaluate(model, STREAMS, eval_steps=steps, B=B, T=length, device="cpu", generator=seeded())
    assert list(got) == list(STREAMS)
    for name, value in got.items():
        assert type(value) is float
        assert value == pytest.approx(expected[name], rel=1e-5), name
    assert len(set(got.values())) == 3


def test_the_generator_determines_the_windows() -> None:
    model, state = make().train(), torch.get_rng_state()

    def run(generator: torch.Generator) -> dict[str, float]:
        return evaluate(model, STREAMS, eval_steps=2, B=3, T=T, device="cpu", generator=generator)

    assert run(seeded(1)) == run(seeded(1))
    assert run(seeded(1))["val_wiki"] != run(seeded(2))["val_wiki"]
    generator = seeded(1)
    assert run(generator)["val_wiki"] != run(generator)["val_wiki"]  # it advances
    assert torch.equal(torch.get_rng_state(), state)  # the default generator is not used, not by dropout either


def test_signature_of_the_spec() -> None:
    parameters = inspect.signature(evaluate).parameters
    assert list(parameters) == ["model", "eval_streams", "eval_steps", "B", "T", "device", "generator"]
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(parameters)[2:])


@pytest.mark.parametrize(("wrong", "message"), [({"eval_steps": 0}, "0"), ({"B": 0}, "0"), ({"T": 0}, "0")])
def test_errors(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(make(), STREAMS, **{"eval_steps": 1, "B": 2, "T": T, "device": "cpu", "generator": seeded(), **wrong})
    with pytest.raises(ValueError, match="short"):
        evaluate(make(), {"short": bytes(T)}, eval_steps=1, B=2, T=T, device="cpu", generator=seeded())
    assert evaluate(make(), {}, eval_steps=1, B=1, T=T, device="cpu", generator=seeded()) == {}


def test_mode_of_each_module_is_restored() -> None:
    model = GPT(ModelConfig(T=8, C=16, L=2, H=2)).train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    generator = torch.Generator().manual_seed(0)
    evaluate(model, {"a": bytes(range(40))}, eval_steps=1, B=2, T=8, device="cpu", generator=generator)
    assert [module.training for module in model.modules()] == modes


def test_rows_of_every_batch() -> None:
    """Processes score disjoint rows; their mean is that of all rows."""
    model, options = make(), {"eval_steps": 2, "B": 4, "T": T, "device": "cpu"}
    halves = [evaluate_rows(model, STREAMS, rows, **options, generator=seeded()) for rows in (slice(0, 2), slice(2, 4))]
    together = evaluate(model, STREAMS, **options, generator=seeded())
    for name, value in together.items():
        assert (halves[0][name] + halves[1][name]) / 2 == pytest.approx(value, rel=1e-6)
    assert halves[0] != halves[1]


def test_nats_are_summed_over_targets() -> None:
    """A batch with one target must not weigh as much as one with many."""
    model = make().eval()
    x, y = torch.randint(256, (2, 4, T), generator=seeded())
    few = torch.full_like(y, -100)
    few[1, 3] = y[1, 3]
    with torch.no_grad():
        losses = -model(x).double().log_softmax(-1).gather(2, y[..., None]).squeeze(2)
    model.train()
    nats, targets = nats_and_targets(model, [(x, y), (x, few)], device="cpu")
    assert targets == 4 * T + 1
    assert nats == pytest.approx(losses.sum().item() + losses[1, 3].item(), rel=1e-5)
    assert model.training
    assert nats_and_targets(model, [], device="cpu") == (0.0, 0)


def test_padding_after_the_last_target_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make().eval()
    x, y = torch.randint(256, (2, 4, T), generator=seeded())
    y[:, 3:] = -100
    y[0, :] = -100
    with torch.no_grad():
        losses = -model(x).double().log_softmax(-1).gather(2, y.clamp(min=0)[..., None]).squeeze(2)
    widths = []
    block = model.blocks.get_submodule("0")
    block.register_forward_hook(lambda module, args, output: widths.append(args[0].shape[1]))
    nats, targets = nats_and_targets(model, [(x, y), (x, torch.full_like(y, -100))], device="cpu")
    assert (targets, widths) == (9, [3])
    assert nats == pytest.approx(losses[1:, :3].sum().item(), rel=1e-5)


def test_not_all_logits_are_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 12 x 512 tokens over 152k pieces would have 3.7 GB of them, twice."""
    monkeypatch.setattr("niels_gpt.evaluation.scoring.LOGITS_BYTES", 0)
    monkeypatch.setattr("niels_gpt.evaluation.scoring.FEWEST_ROWS", 10)
    model = make().eval()
    x, y = torch.randint(256, (2, 4, T), generator=seeded())
    y[:, ::2] = -100
    with torch.no_grad():
        losses = -model(x).double().log_softmax(-1).gather(2, y.clamp(min=0)[..., None]).squeeze(2)
    rows = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(args[0].shape[:-1].numel()))
    nats, targets = nats_and_targets(model, [(x, y)], device="cpu")
    assert rows == [10, 10, 10, 2] and targets == 32
    assert nats == pytest.approx(losses[:, 1::2].sum().item(), rel=1e-5)
