"""The plan of a model of some notes: from nothing, or from a base."""

from __future__ import annotations

from pathlib import Path

import pytest

from niels_gpt.config import NotesConfig
from niels_gpt.workflow import base_plan, plan
from niels_gpt.workflow.base_plan import BasePlan
from niels_gpt.workflow.chat_model import Corpus, read_corpus
from niels_gpt.workflow.choose_plan import choose_plan
from niels_gpt.workflow.plan import Plan, StepTimes
from tests.workflow.test_base_plan import BASE, loaded


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    for module in (plan, base_plan):
        monkeypatch.setattr(module, "measure_steps", lambda plan, device: StepTimes(0.1, 0.2))
    for number in range(20):
        (tmp_path / f"{number}.md").write_text(f"# note {number}\n\n" + "some words of a note. " * 30, encoding="utf-8")
    return read_corpus(tmp_path, NotesConfig(), errors="skip")


def test_from_nothing(corpus: Corpus) -> None:
    chosen = choose_plan(corpus, None, seconds=100.0, device="cpu")
    assert type(chosen) is Plan and (chosen.init_from, chosen.size.C) == ("", plan.SIZES[0].C)
    assert (chosen.vocab_size, chosen.subwords) == (4004, 4000) and "4,000 subwords" in chosen.describe()


@pytest.mark.parametrize("rank", [None, 3])
def test_from_a_base(corpus: Corpus, rank: int | None) -> None:
    chosen = choose_plan(corpus, loaded(), seconds=100.0, device="cpu", rank=rank)
    assert isinstance(chosen, BasePlan)
    assert (chosen.base, chosen.rank) == (BASE, rank or 0)
    described = chosen.describe()
    assert chosen.init_from in described and ("LoRA of rank 3" if rank else "all weights") in described
    assert chosen.vocab_size == 404 and "404 tokens" in described  # of the base, whatever its special tokens are
