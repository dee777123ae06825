"""Derived seeds and generators."""

import pytest
import torch

from niels_gpt.system.rng import derive_seed, generator, seeded_or_random, set_seed

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
