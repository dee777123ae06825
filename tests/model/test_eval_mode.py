"""Blocks without dropout, nested, interleaved and in threads."""

from __future__ import annotations

import threading

import pytest
from torch import nn

from niels_gpt.model.eval_mode import at_rest, evaluating


def model() -> nn.Module:
    """In training mode, but for one part that is not."""
    made = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(1, 1)))
    made[1][0].eval()
    return made


def modes(made: nn.Module) -> list[bool]:
    return [module.training for module in made.modules()]


def test_every_module_is_left_as_found() -> None:
    made = model()
    before = modes(made)
    with pytest.raises(KeyError), evaluating(made):
        assert not any(modes(made))
        raise KeyError
    assert modes(made) == before


def test_the_modes_come_back_with_the_last_of_overlapping_blocks() -> None:
    """As two texts are streamed in turn: the first that was begun is the first that ends."""
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


def test_a_block_inside_a_block_is_one_whatever_happened_between() -> None:
    made = model().eval()
    with evaluating(made):
        made.train()
        with evaluating(made):
            assert not any(modes(made))


def test_rest_is_evaluation_mode_that_lasts() -> None:
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
