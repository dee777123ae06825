"""The plan of a model of some notes: from nothing, or from a base."""

from __future__ import annotations

from dataclasses import replace

from niels_gpt.runs.loading import LoadedRun
from niels_gpt.tokenizer import SPECIAL_TOKENS, AnyTokenizer, ForeignTokenizer
from niels_gpt.workflow.base_plan import make_base_plan
from niels_gpt.workflow.chat_model import Corpus
from niels_gpt.workflow.plan import Plan, make_plan

GENERAL_DIALOGUES = 400
"""Dialogues of the package for a base that chats: enough that not every question is taken for one about the notes."""
CHATTING_ABOUT_SHARE = 0.8
"""Share of the fine-tuning rows that are about the notes, for a base that chats."""


def choose_plan(
    corpus: Corpus,
    base: LoadedRun | None,
    *,
    seconds: float,
    device: str,
    rank: int | None = None,
    own_dialogues: bool = False,
    base_name: str = "",
) -> Plan:
    """The plan for some notes, which `make_plan` chooses, or `make_base_plan` for a base.

    seconds: for everything. rank: of the adapters of a base, 0 for all weights; None: by the memory of the machine.
    own_dialogues: the user has named dialogues, so those of the package are not used. base_name: what the user calls
    the base.
    """
    if base is not None:
        plan = make_base_plan(
            base,
            note_bytes=corpus.size,
            held_out_bytes=corpus.held_out_size,
            seconds=seconds,
            device=device,
            rank=rank,
            name=base_name,
        )
        if own_dialogues or not already_chats(base.tokenizer):
            return plan
        return replace(plan, general_dialogues=GENERAL_DIALOGUES, about_share=CHATTING_ABOUT_SHARE)
    return make_plan(
        note_bytes=corpus.size,
        held_out_bytes=corpus.held_out_size,
        characters=corpus.characters,
        seconds=seconds,
        device=device,
    )


def already_chats(tokenizer: AnyTokenizer) -> bool:
    """Whether a base with this tokenizer was taught to chat by others: it has a chat template that is not ours."""
    template = tokenizer.templates.get("default") if isinstance(tokenizer, ForeignTokenizer) else None
    return template is not None and SPECIAL_TOKENS[0] not in template
