"""The plan of a model of some notes: from nothing, or from a base."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from niels_gpt.config import NotesConfig
from niels_gpt.export.chat_template import chat_template
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer, load_tokenizer
from niels_gpt.workflow import base_plan, plan
from niels_gpt.workflow.base_plan import BasePlan
from niels_gpt.workflow.chat_model import Corpus, read_corpus
from niels_gpt.workflow.choose_plan import already_chats, choose_plan
from niels_gpt.workflow.plan import Plan, StepTimes
from tests import chat_templates
from tests import foreign_tokenizers as made
from tests.cache import real_tokenizer
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


def base_with(tokenizer: AnyTokenizer) -> LoadedRun:
    return loaded(dataclasses.replace(BASE, V=tokenizer.vocab_size))._replace(tokenizer=tokenizer)


def test_a_base_that_chats_is_not_taught_to_chat(corpus: Corpus, tmp_path: Path) -> None:
    base = base_with(load_tokenizer(made.make("smollm", tmp_path / "a", chat_template=chat_templates.CHATML)))
    chosen = choose_plan(corpus, base, seconds=100.0, device="cpu")
    assert (chosen.general_dialogues, chosen.about_share) == (400, 0.8)
    assert str(base.path) in chosen.describe()
    named = choose_plan(corpus, base, seconds=100.0, device="cpu", own_dialogues=True, base_name="hf:m/smol")
    assert "fine-tune hf:m/smol," in named.describe() and str(base.path) not in named.describe()
    assert (named.general_dialogues, named.about_share) == (0, plan.ABOUT_SHARE)


def test_who_chats(tmp_path: Path) -> None:
    """A tokenizer with a chat template, unless the template is ours: a model that was exported may not chat yet."""
    chat = load_tokenizer(made.make("smollm", tmp_path / "chat", chat_template=chat_templates.CHATML))
    none = load_tokenizer(made.make("smollm", tmp_path / "none"))
    ours = load_tokenizer(made.make("smollm", tmp_path / "ours", chat_template=chat_template(real_tokenizer())))
    assert [already_chats(each) for each in (chat, none, ours, real_tokenizer(), ByteTokenizer())] == [True] + 4 * [
        False
    ]


@pytest.mark.parametrize("rank", [None, 3])
def test_from_a_base(corpus: Corpus, rank: int | None) -> None:
    chosen = choose_plan(corpus, loaded(), seconds=100.0, device="cpu", rank=rank)
    assert isinstance(chosen, BasePlan)
    assert (chosen.base, chosen.rank) == (BASE, rank or 0)
    described = chosen.describe()
    assert chosen.init_from in described and ("LoRA of rank 3" if rank else "all weights") in described
    assert chosen.vocab_size == 404 and "404 tokens" in described  # of the base, whatever its special tokens are
