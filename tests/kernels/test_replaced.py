"""Kernels replace only code and modules that they know; anything else is computed by the model's own code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from niels_gpt import GPT, ModelConfig, RunConfig
from niels_gpt.config import EngineConfig
from niels_gpt.inference.int8 import Int8GPT, one_token
from niels_gpt.inference.one_token import OneToken, PlainOneToken
from niels_gpt.kernels import replaced
from niels_gpt.model import backend, gpt
from niels_gpt.model.backend import CPU, PLAIN, halves, usable, use_backend
from niels_gpt.model.kv_cache import KVCache
from niels_gpt.training.optim.optimizer import make_optimizer
from niels_gpt.training.step import StepRunner
from scripts import renew_replaced


def make(**options: Any) -> GPT:
    model = GPT({"V": 30, "T": 16, "C": 32, "L": 2, "H": 2, "dropout": 0.0, **options}).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_((weight.dim() == 1) + 0.3 * torch.randn(weight.shape, generator=generator))
    return model


class Doubled(gpt.MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Another(nn.Module):
    """No matrices that a kernel could read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


class TwiceTheLogits(GPT):
    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return 2 * super().logits(h)


def replace_mlp(kind: Callable[..., nn.Module]) -> Callable[[GPT], object]:
    def change(model: GPT) -> None:
        model.layers()[1].mlp = kind(model.config) if kind is Doubled else kind()

    return change


def own_forward(model: GPT) -> None:
    model.layers()[1].mlp.forward = lambda x: x.sin()  # type: ignore[method-assign]


def own_branch(model: GPT) -> None:
    block = model.layers()[0]
    block.mlp_branch = lambda x: x.cos()  # type: ignore[method-assign]


def hook_of(path: str) -> Callable[[GPT], object]:
    return lambda model: model.get_submodule(path).register_forward_hook(lambda module, inputs, output: output.sin())


def pre_hook(model: GPT) -> None:
    model.layers()[0].attn.out.register_forward_pre_hook(lambda module, inputs: (inputs[0].sin(),))


CHANGES: dict[str, Callable[[GPT], object]] = {
    "a subclass": replace_mlp(Doubled),
    "another class": replace_mlp(Another),
    "a forward of its own": own_forward,
    "a branch of its own": own_branch,
    "a hook": hook_of("blocks.1.mlp"),
    "a hook of a matrix": hook_of("blocks.0.attn.qkv"),
    "a hook of the last norm": hook_of("norm"),
    "a hook of the head": hook_of("lm_head"),
    "a hook before": pre_hook,
}


def decoded(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """The logits after the last id, from a cache of those before it."""
    cache = KVCache(model.config, 1, device=ids.device, dtype=torch.float32)
    hidden, _ = halves(model)
    hidden(ids[:, :-1], cache=cache)
    return one_token(model)(ids[:, -1], cache)


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_changed_module_is_computed_as_it_is(name: str) -> None:
    model, ids = make(), torch.arange(12)[None]
    before, loss = model(ids), model.loss(ids, ids)
    assert usable(model, CPU) is CPU and isinstance(one_token(model), OneToken)
    CHANGES[name](model)
    assert usable(model, CPU) is PLAIN and isinstance(one_token(model), PlainOneToken)
    with use_backend(model, PLAIN):
        expected, expected_loss = model(ids), model.loss(ids, ids)
    assert (expected - before).abs().max() > 0.01
    assert torch.equal(model(ids), expected)
    assert torch.equal(model.loss(ids, ids), expected_loss) and expected_loss != loss
    with use_backend(model, CPU):
        assert torch.equal(model.loss(ids, ids), expected_loss)
    torch.testing.assert_close(decoded(model, ids), expected[:, -1])


@torch.no_grad()
def test_a_hook_of_all_modules() -> None:
    model, ids, seen = make(), torch.arange(12)[None], []
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        model(ids)
        assert gpt.MLP in seen and isinstance(one_token(model), PlainOneToken)
    finally:
        hook.remove()
    assert isinstance(one_token(model), OneToken)


@torch.no_grad()
def test_a_subclass_of_the_model() -> None:
    """Its logits count in the loss, in one token and in the forward."""
    model, ids = TwiceTheLogits(make().config), torch.arange(12)[None]
    expected = 2 * model.lm_head(model.hidden(ids))
    torch.testing.assert_close(model(ids), expected)
    torch.testing.assert_close(model.loss(ids, ids), nn.functional.cross_entropy(expected[0], ids[0]))
    torch.testing.assert_close(decoded(model, ids), expected[:, -1])


@torch.no_grad()
def test_biases_that_were_added_later() -> None:
    """They are data, which each kernel adds, or leaves to the model."""
    model, ids = make(), torch.arange(12)[None]
    for block in model.layers():
        block.mlp.up = nn.Linear(32, 128)
        block.attn.qkv = nn.Linear(32, 96)
    model.lm_head = nn.Linear(32, 30)
    with use_backend(model, PLAIN):
        expected = model(ids), model.loss(ids, ids)
    torch.testing.assert_close((model(ids), model.loss(ids, ids)), expected)
    torch.testing.assert_close(decoded(model, ids), expected[0][:, -1])


@pytest.mark.parametrize(
    "options", [{"bias": True}, {"bias": True, "norm": "rmsnorm", "mlp": "swiglu"}, {"mlp": "gelu_tanh"}]
)
def test_options_that_few_kernels_know(options: dict[str, Any]) -> None:
    model, ids = make(**options), torch.arange(12)[None]
    found = []
    for chosen in (PLAIN, CPU):
        with use_backend(model, chosen):
            loss = model.loss(ids, ids)
        found.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(*found)
    with torch.no_grad():
        torch.testing.assert_close(decoded(model, ids), model(ids)[:, -1])
    assert isinstance(one_token(model), PlainOneToken if "bias" in options else OneToken)


def test_an_option_that_no_implementation_has_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(norm="rmsnorm")
    assert usable(model, CPU) is CPU
    monkeypatch.setattr(backend, "OPTIONS", tuple(name for name in backend.OPTIONS if name != "norm=rmsnorm"))
    assert usable(model, CPU) is PLAIN and isinstance(one_token(model), PlainOneToken)


# --- code ---------------------------------------------------------------------------------------------


def test_the_stored_digests_are_those_of_the_code() -> None:
    """After a deliberate edit, check that the kernels compute it; then run `python -m scripts.renew_replaced`."""
    assert renew_replaced.digests() == replaced.stored()


def test_comments_layout_and_docstring_do_not_count() -> None:
    def first() -> Callable[[int], int]:
        def function(x: int) -> int:
            """Return more."""
            return x + 1  # one more

        return function

    def second() -> Callable[[int], int]:
        def function(
            x: int,
        ) -> int:
            return x + 1

        return function

    def third() -> Callable[[int], int]:
        def function(x: int) -> int:
            return x + 2

        return function

    a, b, c = (replaced.digest(make_one()) for make_one in (first, second, third))
    assert a == b != c and a is not None


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_function_that_was_replaced(wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = make(), gpt.MLP.forward

    def forward(self: gpt.MLP, x: torch.Tensor) -> torch.Tensor:
        return 3 * original(self, x)

    monkeypatch.setattr(replaced, "warn_once", lambda text: None)
    monkeypatch.setattr(gpt.MLP, "forward", functools.wraps(original)(forward) if wrapped else forward)
    assert replaced.changed(replaced.BRANCHES) == ["niels_gpt.model.gpt:MLP.forward"]
    assert usable(model, CPU) is PLAIN and isinstance(one_token(model), PlainOneToken)
    monkeypatch.undo()
    assert usable(model, CPU) is CPU and not replaced.changed(replaced.FORWARD)


def test_without_sources_only_replaced_functions_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_source(function: Any) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr(inspect, "getsource", no_source)
    known = replaced._known.__wrapped__
    name = "niels_gpt.model.gpt:MLP.forward"
    assert known(name, gpt.MLP.forward)
    assert not known(name, gpt.Norm.forward) and not known(name, Doubled.forward)


# --- by request ---------------------------------------------------------------------------------------


def test_the_variable_turns_everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    int8 = Int8GPT.of(model)
    monkeypatch.setenv(replaced.VARIABLE, "plain")
    monkeypatch.setattr("niels_gpt.inference.int8.warn_once", lambda text: warned.append(text))
    warned: list[str] = []
    assert model.backend is usable(model, CPU) is PLAIN
    assert isinstance(one_token(model), PlainOneToken) and not warned
    assert isinstance(one_token(int8), PlainOneToken) and "int8" in warned[0]
    config = RunConfig(model=model.config, engine=EngineConfig(compile=True, graphs=True))
    runner = StepRunner(model, make_optimizer(model, config.train), config, "cpu")
    assert (runner.backend, runner._compile, runner._graphs) == ("plain", False, False)
    monkeypatch.setenv(replaced.VARIABLE, "auto")
    assert model.backend is CPU
    monkeypatch.setenv(replaced.VARIABLE, "triton")
    with pytest.raises(ValueError, match=r"NIELS_GPT_BACKEND must be auto or plain, got 'triton'"):
        model(torch.arange(3)[None])


def test_blocks_of_code_may_turn_it_off() -> None:
    model = make()
    with replaced.plain_inside(True), replaced.plain_inside(False):
        assert model.backend is PLAIN
    with replaced.plain_inside(False):
        assert model.backend is CPU
    assert ModelConfig.of(model.config) == model.config  # no part of the model
