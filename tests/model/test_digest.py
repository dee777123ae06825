"""The digest of weights."""

import torch

from niels_gpt.model.digest import weights_digest
from niels_gpt.model.gpt import GPT

SIZES = {"T": 16, "C": 16, "L": 2, "H": 2}


def test_the_digest_depends_on_every_weight_and_on_nothing_else():
    torch.manual_seed(0)
    model = GPT(SIZES)
    same = GPT(SIZES)
    same.load_state_dict(model.state_dict())
    assert weights_digest(same.eval()) == weights_digest(model)
    seen = {weights_digest(model)}
    with torch.no_grad():
        for weight in same.parameters():
            weight.view(-1)[-1] += 1e-6
            seen.add(weights_digest(same))
    assert len(seen) == 1 + len(list(same.parameters()))


def test_swapped_tensors_of_one_shape_change_it():
    model = GPT(SIZES)
    with torch.no_grad():
        model.blocks[0].norm_attn.weight.fill_(2.0)
        one = weights_digest(model)
        model.blocks[0].norm_attn.weight.fill_(1.0)
        model.blocks[0].norm_mlp.weight.fill_(2.0)
    assert weights_digest(model) != one
