"""The plan of a model of some notes: from nothing, or from a base."""

from __future__ import annotations

from niels_gpt.runs.loading import LoadedRun
from niels_gpt.workflow.base_plan import make_base_plan
from niels_gpt.workflow.chat_model import Corpus
from niels_gpt.workflow.plan import Plan, make_plan


def choose_plan(
    corpus: Corpus, base: LoadedRun | None, *, seconds: float, device: str, rank: int | None = None
) -> Plan:
    """The plan for some notes, which `make_plan` chooses, or `make_base_plan` for a base.

    seconds: for everything. rank: of the adapters of a base, 0 for all weights; None: by the memory of the machine.
    """
    if base is not None:
        return make_base_plan(
            base,
            note_bytes=corpus.size,
            held_out_bytes=corpus.held_out_size,
            seconds=seconds,
            device=device,
            rank=rank,
        )
    return make_plan(
        note_bytes=corpus.size,
        held_out_bytes=corpus.held_out_size,
        characters=corpus.characters,
        seconds=seconds,
        device=device,
    )
