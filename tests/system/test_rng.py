"""Derived seeds and generators."""

import ast
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import niels_gpt
from niels_gpt.system.rng import HashedDraws, derive_seed, generator, mix, seeded_or_random, set_seed

# From coreutils: printf '42:batch:7' | b2sum -l 64, read as little-endian, halved.
GOLDEN = {
    (42, "batch", 7): 7920063756806079070,
    (0,): 4246866556266386882,
    (42, "batch", 8): 4683021155490552510,
    (1, "split"): 6617131765387602438,
}


def test_set_seed_is_torch_manual_seed(random_states):
    before = random_states()[1:]
    wanted = torch.manual_seed(5).get_state()
    torch.rand(3)
    set_seed(5)
    assert torch.equal(torch.get_rng_state(), wanted)
    assert random_states()[1:] == before


@pytest.mark.parametrize(("parts", "wanted"), GOLDEN.items())
def test_derived_seeds_are_the_same_on_every_machine(parts, wanted):
    assert derive_seed(*parts) == wanted < 2**63
    assert torch.equal(generator(*parts, "x").get_state(), generator(derive_seed(*parts, "x")).get_state())


def test_neighboring_purposes_give_different_seeds():
    purposes = [(seed, what, step) for seed in range(20) for what in ("batch", "dropout") for step in range(50)]
    assert len({derive_seed(*purpose) for purpose in purposes}) == len(purposes)


def test_generator_without_a_purpose_has_the_seed_itself():
    wanted = torch.Generator()
    wanted.manual_seed(77)
    assert torch.equal(generator(77).get_state(), wanted.get_state())


def test_a_generator_without_a_seed_is_random():
    assert torch.equal(seeded_or_random(77).get_state(), generator(77).get_state())
    first, second = (torch.rand(4, generator=seeded_or_random(None)) for _ in range(2))
    assert not torch.equal(first, second)


def test_generators_are_new_and_move_no_global_state(random_states):
    before = random_states()
    first, second = generator(1, "batch", 2), generator(1, "batch", 2)
    a = torch.rand(4, generator=first)
    assert torch.equal(torch.rand(4, generator=second), a)
    assert random_states() == before
    assert first.device.type == "cpu"


def test_hashed_draws_are_uniform_and_repeatable():
    draw, again = HashedDraws(7), HashedDraws(7)
    numbers = [draw.random() for _ in range(4000)]
    assert numbers == [again.random() for _ in range(4000)] and numbers[:3] != [HashedDraws(8).random()] * 3
    assert 0 <= min(numbers) < 0.01 and 0.99 < max(numbers) < 1 and abs(np.mean(numbers) - 0.5) < 0.02
    counts = Counter(draw.choice("abcd") for _ in range(4000))
    assert set(counts) == set("abcd") and all(850 < number < 1150 for number in counts.values())
    firsts = Counter(draw.sample(range(4), 2)[0] for _ in range(4000))
    assert all(850 < firsts[i] < 1150 for i in range(4))
    assert sorted(draw.sample(range(9), 9)) == list(range(9)) and draw.sample("abc", 0) == []


def test_mix_is_the_finalizer_of_splitmix64():
    """The first numbers of its reference implementation from state 0 (Vigna)."""
    steps = np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix(steps).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


ALLOWED = {"data/oasst1.py"}
"""The order of oasst1's trees is specified by random.Random; the other exception is shuffle of `datasets`."""


def uses_other_random_numbers(source):
    """Whether a module uses the module random, or numpy's random numbers."""
    for node in ast.walk(ast.parse(source)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(name == "random" or name.startswith("numpy.random") for name in names):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "numpy":
            names = [alias.name for alias in node.names]
        if "random" in names or ast.unparse(node).startswith(("np.random.", "numpy.random.")):
            return True
    return False


def test_random_numbers_come_from_torch_or_from_hashes():
    root = Path(niels_gpt.__file__).parent
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if uses_other_random_numbers(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED
    for source in ("import random", "from numpy import random", "import numpy.random", "x = np.random.rand()"):
        assert uses_other_random_numbers(source)
