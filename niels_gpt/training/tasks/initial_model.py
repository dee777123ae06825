"""The model of a run that starts from given weights."""

from __future__ import annotations

import dataclasses

from niels_gpt.config import ModelConfig, RunConfig
from niels_gpt.config.public_model import is_public
from niels_gpt.pretrained.initial_weights import initial_model, initial_path

MOST_CONTEXT = 1024
"""Context of a run from given weights that sets none: activations grow with it, and notes are short."""


def with_initial_model(config: RunConfig, notes: list[str] | None = None) -> RunConfig:
    """The config with the model of `init_from`, if there is one and the config sets no other model options.

    V, T and dropout may be set beside init_from: they are no part of the architecture. V is the one found there, since
    an embedding may have more rows than the tokenizer has ids. `notes`: a line is appended if a model was found.
    Raises ValueError or OSError if init_from cannot be read, or does not have what `train.lora` names.
    """
    if not config.init_from:
        return config
    if not is_public(config.init_from):  # of a run, its checkpoint
        config = dataclasses.replace(config, init_from=str(initial_path(config.init_from)))
    default, ours = ModelConfig(), config.model
    theirs = initial_model(config.init_from, ours.T if ours.T != default.T else 1)
    if not config.takes_initial_model:
        return config
    T = ours.T if ours.T != default.T else min(theirs.T, MOST_CONTEXT)
    if theirs.positions == "learned":
        T = theirs.T
    dropout = ours.dropout if ours.dropout != default.dropout else theirs.dropout
    if notes is not None and (ours, theirs) != (default, default):
        size = f"C={theirs.C}, L={theirs.L}, H={theirs.H}, V={theirs.V}"
        notes.append(f"the model is that of init_from ({size}), with a context of {T} (model.T)")
    found = dataclasses.replace(config, model=dataclasses.replace(theirs, T=T, dropout=dropout))
    if found.train.lora.rank:
        found.check_adapters()
    return found
