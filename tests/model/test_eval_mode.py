"""Blocks in evaluation mode: nested, interleaved and in threads."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from niels_gpt.model.eval_mode import at_rest, eval_mode, evaluating


def model() -> nn.Module:
    """A model in training mode, except for one module."""
    made = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(1, 1)))
    made[1][0].eval()
    return made


def modes(made: nn.Module) -> list[bool]:
    return [module.training for module in made.modules()]


def test_every_module_returns_to_its_mode() -> None:
    made = model()
    before = modes(made)
    with pytest.raises(KeyError), evaluating(made):
        assert not any(modes(made))
        raise KeyError
    assert modes(made) == before


def test_gradients_are_off_in_a_block_and_on_again_after_an_error() -> None:
    made = model()
    before = modes(made)
    with pytest.raises(KeyError), eval_mode(made):
        assert not any(modes(made)) and not torch.is_grad_enabled()
        raise KeyError
    assert modes(made) == before and torch.is_grad_enabled()


def test_the_last_of_overlapping_blocks_restores_the_modes() -> None:
    """As when two texts are streamed alternately: the first block ends first."""
    made = model()
    before = modes(made)
    first, second = evaluating(made), evaluating(made)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not any(modes(made))
    assert not at_rest(made)
    second.__exit__(None, None, None)
    assert modes(made) == before


def test_an_inner_block_evaluates_although_the_mode_was_changed_before() -> None:
    made = model().eval()
    with evaluating(made):
        made.train()
        with evaluating(made):
            assert not any(modes(made))


def test_a_model_at_rest_is_in_evaluation_mode_outside_of_blocks() -> None:
    made = model()
    assert not at_rest(made)
    with evaluating(made):
        assert not at_rest(made)  # it ends with the block
    assert at_rest(made.eval())


def test_threads() -> None:
    made = nn.Sequential(*(model() for _ in range(20)))
    before = modes(made)
    wrong: list[int] = []

    def work() -> None:
        for _ in range(60):
            with evaluating(made):
                if any(modes(made)):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert modes(made) == before
