"""A chat model of a folder of notes: its text, its token caches, and the configs of its two phases.

Pretraining reads the notes. Fine-tuning reads dialogues: general ones, and questions about the notes. The dialogues,
the tokenizer and the caches are written into the folder of the pipeline. Only the caches contain held-out notes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.cache.sources.build import build, install_tokenizer
from niels_gpt.cache.sources.texts import BuildSettings
from niels_gpt.config import DataConfig, NotesConfig, RunConfig, SourceConfig
from niels_gpt.config.yaml_file import config_from_dict
from niels_gpt.data import embedded
from niels_gpt.data.note_check import find_secrets
from niels_gpt.data.note_groups import SplitBy, group_notes, lines_in_training, split_groups
from niels_gpt.data.note_selection import SelectedNotes, read_note, select_notes
from niels_gpt.data.primer import iter_primer_sft
from niels_gpt.data.registry import PACKAGE, YOURS, sources
from niels_gpt.data.source_paths import primer_path
from niels_gpt.data.types import ChatMessage, ChatSample
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.runs.pipeline import TOPICS
from niels_gpt.system import files
from niels_gpt.tokenizer import (
    ByteTokenizer,
    SubwordTokenizer,
    Tokenizer,
    load_tokenizer,
    private_pieces,
    train_tokenizer,
)
from niels_gpt.workflow.note_questions import new_question, question_frames, questions_about
from niels_gpt.workflow.note_topics import NoteTopic, choose_topics, note_topics
from niels_gpt.workflow.plan import ABOUT_NOTES, Plan
from niels_gpt.workflow.variations import in_chats, with_variations

SEED = 42
"""Seed of the variations, and the first one that is tried for the split."""
SPLIT_SEEDS = 100
"""Seeds that are tried for the split; see `_choose_split`."""
HELD_OUT = 0.1
"""Share of the notes that is held out."""
TOKENIZER_CHUNKS = 2500
"""Chunks of 1,000 characters that the tokenizer learns from: more take minutes and do not help."""
MESSAGES_PER_TEXT = 30
"""Messages that are joined to a text for the tokenizer, which samples texts by chunks of similar size."""
DIALOGUES = "dialogues"
"""Name of the source of other dialogues than those about the notes."""
PERSONA = "niels"
"""Dialogues of the package with this name teach a model what it is."""
BYTE_DIALOGUES = 0.4
"""Share of the rows that are dialogues, for a model over bytes."""
QUESTION = "what is niels?"
"""Question whose answers are shown while the model trains, by default."""


@dataclass(frozen=True)
class Corpus:
    """The notes that a model is trained on and those that are held out."""

    selected: SelectedNotes
    notes: NotesConfig
    errors: str
    train: list[str]
    """Paths of the notes to train on."""
    held_out: list[str]
    size: int
    """Bytes of the notes to train on."""
    held_out_size: int
    """Bytes of the held-out notes."""
    characters: int
    """How many different characters the notes use."""
    split_seed: int = SEED
    """Seed of the split into notes to train on and held-out ones."""
    split_by: SplitBy = "shared_text"
    lines_in_training: float = 0.0
    """Share of the bytes of long held-out lines that stand in the notes to train on."""
    lines_in_training_by_file: float = 0.0
    """The same, had the notes been held out one by one."""

    def texts(self, paths: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield (path, text) of notes."""
        for path in paths:
            yield path, read_note(path, self.notes, self.errors)


def read_corpus(folder: str | Path, notes: NotesConfig, *, errors: str, split_by: SplitBy = "shared_text") -> Corpus:
    """Read a folder of notes and hold some out; both halves are those of the token caches.

    split_by: "file" is for models of older versions.
    Raises ValueError if there are fewer than two notes, and as `select_notes` does.
    """
    selected = select_notes(folder, notes, errors=errors)
    selected.check_found("note")
    if len(selected.paths) < 2:
        raise ValueError(f"{selected.root} has one note: two are needed, one to train on and one to hold out")
    corpus = Corpus(selected, notes, errors, [], [], 0, 0, 0, split_by=split_by)
    texts, listed = dict(corpus.texts(selected.paths)), selected.listed
    sizes = {path: len(text.encode("utf-8")) for path, text in texts.items()}
    groups = [[i] for i in range(len(listed))]
    by_file = _choose_split(listed, groups, sizes)
    if split_by == "shared_text":
        groups = group_notes((texts.get(path, "") for path in listed), val_frac=HELD_OUT)
    seed, train, held_out = _choose_split(listed, groups, sizes)

    def shared(train: list[str], held_out: list[str]) -> float:
        return lines_in_training((texts[path] for path in held_out), (texts[path] for path in train))

    return dataclasses.replace(
        corpus,
        train=train,
        held_out=held_out,
        size=sum(sizes[path] for path in train),
        held_out_size=sum(sizes[path] for path in held_out),
        characters=len(set[str]().union(*(texts[path] for path in train))),
        split_seed=seed,
        lines_in_training=shared(train, held_out),
        lines_in_training_by_file=shared(*by_file[1:]),
    )


def _choose_split(
    listed: list[str], groups: Sequence[Sequence[int]], sizes: Mapping[str, int]
) -> tuple[int, list[str], list[str]]:
    """Return (seed, paths to train on, held-out paths) of the first seed with a usual share of the bytes held out.

    listed: all files that are split. groups: numbers of those that stay together. sizes: bytes of those with text; the
    caches, too, drop the others after the split.
    A usual share is between half of HELD_OUT and half of everything. Of few notes, one is held out: without this, an
    empty one, or one that holds almost all of the text. If no seed has such a share, the one with most held-out bytes
    that are not more than half is used.
    """
    total = sum(sizes.values())
    best: tuple[int, int, list[str], list[str]] | None = None
    for seed in range(SEED, SEED + SPLIT_SEEDS):
        halves = split_groups(listed, groups, val_frac=HELD_OUT, seed=seed)
        train, held_out = ([path for path in half if path in sizes] for half in halves)
        size = sum(sizes[path] for path in held_out)
        if HELD_OUT / 2 * total <= size <= total / 2:
            return seed, train, held_out
        rank = size if size <= total / 2 else -size
        if best is None or rank > best[0]:
            best = rank, seed, train, held_out
    assert best is not None
    return best[1:]


def topics_of(corpus: Corpus, plan: Plan) -> list[NoteTopic]:
    """Return what the model will be asked about the notes: as many topics as it can learn in the steps of the plan.

    Topics with a secret (a key, a password) in the heading or the answer are skipped.
    """
    rows = plan.sft_rows * plan.sft_steps if plan.vocab_size else plan.pretrain_rows * plan.pretrain_steps
    share = plan.about_share if plan.vocab_size else BYTE_DIALOGUES * plan.about_share
    notes = [
        (title_of(path), list(note_topics(text, title=title_of(path)))) for path, text in corpus.texts(corpus.train)
    ]
    chosen = choose_topics(notes, most=max(int(rows * share / plan.rows_per_topic), 1))
    return [topic for topic in chosen if not (find_secrets(topic.answer) or find_secrets(topic.heading))]


def taught_topics(topics: Sequence[NoteTopic], folder: Path) -> list[NoteTopic]:
    """Return those of the topics that the model was taught, by the list in the folder of its caches.

    The notes may have changed since. Models of older versions have no list: all are returned.
    """
    path = folder / TOPICS
    if not path.is_file():
        return list(topics)
    names = set(path.read_text(encoding="utf-8").split("\n"))
    return [topic for topic in topics if topic.name in names]


def dialogue_file(primer: str | None) -> Path | None:
    """The file of dialogues that a user named, also as `embedded`; None: no file was named."""
    return embedded.PRIMER if primer == "embedded" else None if primer is None else primer_path(primer)


def write_dialogues(
    dialogues: Path | None,
    topics: Sequence[NoteTopic],
    folder: Path,
    *,
    general: int = 0,
    most: int = 0,
    errors: str = "strict",
) -> dict[str, int]:
    """Write the dialogues of fine-tuning into a folder, one file per source; return their numbers.

    dialogues: a file of dialogues; None: those of the package, with `general` only so many that are not about niels.
    topics: of the notes. most: keep so many of the others, evenly chosen; 0: all. errors: how the file is decoded.
    The names of the topics are listed in TOPICS. The files get mode 0600: they hold text of the notes.
    """
    chats = list(iter_primer_sft(dialogues or embedded.PRIMER, errors=_errors(errors)))
    if dialogues is None and general:
        samples = {DIALOGUES: general_dialogues(chats, general)}  # without variations, some of which name niels
    else:
        samples = {DIALOGUES: list(with_variations(chats, seed=SEED))}
    samples[DIALOGUES] = _evenly(samples[DIALOGUES], most)
    if topics:
        samples[ABOUT_NOTES] = [
            ChatSample([ChatMessage("user", question), ChatMessage("assistant", topic.answer)], ABOUT_NOTES, {})
            for question, topic in questions_about(topics, _frames(chats))
        ]
    others = [sample for source in samples.values() for sample in source]
    numbers = {
        name: _write(folder / f"{name}.jsonl", in_chats(source, others, seed=SEED)) for name, source in samples.items()
    }
    if topics:
        names = "".join(f"{topic.name}\n" for topic in topics)
        files.write_bytes(folder / TOPICS, names.encode("utf-8"), mode=0o600)
    return numbers


def _frames(chats: Iterable[ChatSample]) -> list[str]:
    return question_frames(message.content for chat in chats for message in chat.messages if message.role == "user")


def general_dialogues(samples: Iterable[ChatSample], most: int) -> list[ChatSample]:
    """The dialogues that neither name niels nor have a system message, at most `most` of them, evenly chosen."""
    kept = [
        sample
        for sample in samples
        if sample.messages[0].role != "system"
        and not any(PERSONA in message.content.lower() for message in sample.messages)
    ]
    return _evenly(kept, most)


def _evenly(samples: list[ChatSample], most: int) -> list[ChatSample]:
    """The samples, evenly chosen if there are more than `most`; 0: all."""
    return [samples[i * len(samples) // most] for i in range(most)] if 0 < most < len(samples) else samples


def title_of(path: str) -> str:
    """The title of a note in questions about it: its file name as words. Bytes that are not utf-8 are replaced."""
    stem = os.fsencode(Path(path).stem).decode("utf-8", "replace")
    return stem.replace("_", " ").replace("-", " ")


def _write(path: Path, samples: Iterable[ChatSample]) -> int:
    lines = [
        json.dumps({"messages": [dataclasses.asdict(message) for message in sample.messages]}, ensure_ascii=False)
        for sample in samples
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(path, "".join(line + "\n" for line in lines).encode("utf-8"), mode=0o600)
    return len(lines)


def _errors(errors: str) -> str:
    """How dialogues are decoded: only notes can be skipped."""
    return "replace" if errors == "replace" else "strict"


def dialogue_sources(folder: Path, names: Iterable[str]) -> dict[str, SourceConfig]:
    """The sources of the written dialogues."""
    return {name: SourceConfig(str((folder / f"{name}.jsonl").absolute()), kind="chat") for name in names}


def _with_licence(config: RunConfig, dialogues: Path | None, corpus: Corpus) -> RunConfig:
    """The config with the licence of its dialogues. Those of both sources occur in both: see `in_chats`."""
    used = dict.fromkeys([PACKAGE if dialogues in (None, embedded.PRIMER) else YOURS])
    if ABOUT_NOTES in config.data.sources:
        used |= dict.fromkeys([PACKAGE if corpus.selected.is_embedded else YOURS])
    written = config.data.sources.items()
    sources = {name: dataclasses.replace(source, licence=" and ".join(used)) for name, source in written}
    return dataclasses.replace(config, data=dataclasses.replace(config.data, sources=sources))


def build_caches(
    corpus: Corpus, folder: Path, names: Iterable[str], *, subwords: int, tokenizer: SubwordTokenizer | None = None
) -> SubwordTokenizer:
    """Build the caches of notes and dialogues in a folder; return their tokenizer.

    tokenizer: that of a base; by default one with `subwords` pieces is trained on the notes and dialogues. It has no
    pieces that stand in few notes: whoever gets the model could read them there.
    """
    added = dialogue_sources(folder, names)
    known = sources(DataConfig(sources=added))

    def texts() -> Iterator[str]:
        yield from (text for _, text in corpus.texts(corpus.train))
        for name in added:
            chats = (sample for sample in known[name].samples() if isinstance(sample, ChatSample))
            messages = (message.content for chat in chats for message in chat.messages)
            while block := "\n".join(itertools.islice(messages, MESSAGES_PER_TEXT)):
                yield block

    if tokenizer is None:

        def of_few_notes(trained: Tokenizer) -> Collection[int]:
            return private_pieces(trained, (text for _, text in corpus.texts(corpus.train)), embedded.public_texts())

        path = train_tokenizer(
            texts(),
            folder / "tokenizer",
            vocab_size=subwords,
            sample_chunks=TOKENIZER_CHUNKS,
            dropped=of_few_notes,
        )
        tokenizer = load_tokenizer(path)
    else:
        install_tokenizer(tokenizer, folder)
    settings = BuildSettings(
        folder,
        seed=corpus.split_seed,
        roam=corpus.selected.root,
        roam_val_frac=HELD_OUT,
        roam_split=corpus.split_by,
        errors=corpus.errors,
        notes=corpus.notes,
    )
    for name in ("roam", *added):
        build(known[name], settings, tokenizer)
    return tokenizer


class Prepared(NamedTuple):
    """What is trained."""

    configs: dict[str, RunConfig]
    """By phase: `pretrain` and `sft`; a model over bytes has one phase, `bytes`."""
    dialogues: dict[str, int]
    """Number of dialogues by source."""


def prepare(
    corpus: Corpus,
    dialogues: Path | None,
    topics: Sequence[NoteTopic],
    plan: Plan,
    folder: Path,
    *,
    base: LoadedRun | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> Prepared:
    """Write the dialogues and the caches of a model into a folder; return the configs of its phases.

    dialogues: a file; None: those of the package that the plan asks for. topics: what the model learns to answer about
    the notes. base: what the plan fine-tunes, and whose tokenizer is used. show: gets a line about each part of the
    work.
    """
    numbers = write_dialogues(
        dialogues,
        topics,
        folder,
        general=plan.general_dialogues,
        most=plan.most_dialogues,
        errors=corpus.errors,
    )
    question = new_question(topics[0]) if topics else QUESTION
    if not plan.vocab_size:
        config = byte_config(plan, corpus, folder, numbers, question=question)
        return Prepared({"bytes": _with_licence(config, dialogues, corpus)}, numbers)
    tokenizer = None if base is None or isinstance(base.tokenizer, ByteTokenizer) else base.tokenizer
    show("tokenizing" if tokenizer else f"training a tokenizer of {plan.subwords:,} subwords")
    build_caches(corpus, folder, numbers, subwords=plan.subwords, tokenizer=tokenizer)
    configs = phase_configs(plan, corpus, folder, numbers, question=question)
    return Prepared({phase: _with_licence(config, dialogues, corpus) for phase, config in configs.items()}, numbers)


def _data(corpus: Corpus, folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """The section `data` of a config."""
    return {
        "roam": str(corpus.selected.root),
        "roam_val_frac": HELD_OUT,
        "roam_split": corpus.split_by,
        "seed": corpus.split_seed,
        "encoding_errors": corpus.errors,
        "notes": _plain(corpus.notes),
        "sources": {name: _plain(source) for name, source in dialogue_sources(folder, names).items()},
        "token_cache": str(folder.absolute()),
        "retain": {"roam": 1.0},
    }


def byte_config(
    plan: Plan, corpus: Corpus, folder: Path, names: Iterable[str], *, question: str = QUESTION
) -> RunConfig:
    """The config of a model over bytes, which is trained on notes and dialogues together.

    question: its answers are shown while the model trains.
    """
    dialogues = {name: BYTE_DIALOGUES * share for name, share in _shares(list(names), plan).items()}
    data = _data(corpus, folder, names) | {"cache_dir": str((folder / "streams").absolute())}
    data = {key: value for key, value in data.items() if key not in ("token_cache", "retain")}
    return config_from_dict(
        {
            "task": "bytes",
            "init_from": plan.init_from,
            "model": plan.model(),
            "train": plan.train(plan.pretrain_steps, plan.pretrain_rows)
            | {"p_train": {"roam": 1 - BYTE_DIALOGUES, **dialogues}, "p_val": {"roam": 1.0}},
            "data": data,
            "output": _output(plan.pretrain_steps, plan.evaluations, plan.eval_steps)
            | {"sample_prompt": f"user: {question}\nassistant: ", "sample_tokens": 120},
        }
    )


def phase_configs(
    plan: Plan, corpus: Corpus, folder: Path, names: Iterable[str], *, question: str = QUESTION
) -> dict[str, RunConfig]:
    """The configs of pretraining and fine-tuning on the caches of a folder.

    question: its answers are shown while the model is fine-tuned.
    """
    data = _data(corpus, folder, names)
    notes = {"p_train": {"roam": 1.0}, "p_val": {"roam": 1.0}}
    pretrain = {
        "task": "pretrain",
        "init_from": plan.init_from,
        "model": plan.model(),
        "train": plan.train(plan.pretrain_steps, plan.pretrain_rows) | notes,
        "data": data,
        "output": _output(plan.pretrain_steps, plan.evaluations, plan.eval_steps) | {"sample_prompt": "# "},
    }
    # The last checkpoint answers best, although the loss on held-out dialogues is lowest before: one evaluation.
    shares = _shares(list(names), plan)
    sft = {
        "task": "sft",
        "model": plan.model(),
        "train": plan.train(plan.sft_steps, plan.sft_rows) | {"p_train": shares, "p_val": shares},
        "data": data,
        "output": _output(plan.sft_steps, 1, plan.sft_eval_steps) | {"sample_prompt": f"user: {question}\nassistant: "},
    }
    return {"pretrain": config_from_dict(pretrain), "sft": config_from_dict(sft)}


def _shares(names: list[str], plan: Plan) -> dict[str, float]:
    about = plan.about_share if ABOUT_NOTES in names else 0.0
    return {DIALOGUES: 1 - about, ABOUT_NOTES: about} if about else {DIALOGUES: 1.0}


def _output(steps: int, evaluations: int, eval_steps: int) -> dict[str, int]:
    """The section `output` of a config: few checkpoints, and six samples."""
    return {
        "checkpoint_every": max(steps // 3, 1),
        "keep": 1,
        "eval_every": max(steps // evaluations, 1),
        "eval_steps": eval_steps,
        "sample_every": max(steps // 6, 1),
        "sample_tokens": 40,
    }


def _plain(section: Any) -> dict[str, Any]:
    """A section of a config as the dict that a YAML file would hold."""
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(section).items()
    }
