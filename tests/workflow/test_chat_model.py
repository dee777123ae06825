"""A chat model of some notes: what is trained on, what is held out, the caches, and the configs of its phases."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from niels_gpt.cache.sources.build import folder_of
from niels_gpt.config import DataConfig, NotesConfig, RunConfig
from niels_gpt.config.yaml_file import config_from_dict, to_dict
from niels_gpt.data import embedded
from niels_gpt.data.registry import is_private, sources
from niels_gpt.tokenizer import load_tokenizer, private_pieces, train_tokenizer
from niels_gpt.training.tasks.registry import licence_in, open_task
from niels_gpt.training.tasks.token_task import with_vocabulary
from niels_gpt.workflow.chat_model import (
    DIALOGUES,
    Corpus,
    build_caches,
    byte_config,
    dialogue_sources,
    phase_configs,
    prepare,
    read_corpus,
    taught_topics,
    title_of,
    topics_of,
    write_dialogues,
)
from niels_gpt.workflow.note_questions import PER_TOPIC, new_question
from niels_gpt.workflow.plan import ABOUT_SHARE, ROWS_PER_TOPIC, Plan, Size
from tests.cache import split_rule, stream_of
from tests.token_caches import words
from tests.tokenizer.test_private_pieces import NOTES

NAMES = [f"note_{number:02}.md" for number in range(12)]
ANSWERS = {"what is niels?": "a small model.", "what is the loss of a model?": "how wrong it is."}
PRIMER = "\n\n<dialogue>\n\n".join(f"user: {question}\nassistant: {answer}" for question, answer in ANSWERS.items())
PLAN = Plan(Size(16, 1, 2, 32), 404, 40, 10, pretrain_rows=3, sft_rows=4)


def note(number: int) -> str:
    return f"# Heading {number}\n\n{words(number, 40)} é{number}.\n\n## Part of {number}\n\n{words(90 + number, 30)}.\n"


@pytest.fixture(scope="module")
def vault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vault")
    for number, name in enumerate(NAMES):
        (root / name).write_bytes(note(number).encode("utf-8"))
    (root / ".trash").mkdir()
    (root / ".trash" / "deleted.md").write_text("a deleted note that must not be read", encoding="utf-8")
    (root / "blank.md").write_text(" \n", encoding="utf-8")
    (root / "latin.md").write_bytes(b"caf\xe9 and more words")
    (root / "primer.txt").write_text(PRIMER, encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def corpus(vault: Path) -> Corpus:
    return read_corpus(vault, NotesConfig(), errors="skip")


@pytest.fixture(scope="module")
def folder(corpus: Corpus, vault: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dialogues and caches."""
    folder = tmp_path_factory.mktemp("pipeline") / "cache"
    names = write_dialogues(vault / "primer.txt", topics_of(corpus, PLAN), folder)
    build_caches(corpus, folder, names, subwords=400)
    return folder


def test_topics_of_notes_that_came_later_were_not_taught(corpus: Corpus, folder: Path, tmp_path: Path) -> None:
    topics = topics_of(corpus, PLAN)
    later = [topics[0]._replace(name="a later topic"), *topics[1:]]
    assert taught_topics(topics, folder) == topics
    assert taught_topics(later, folder) == topics[1:]
    assert taught_topics(later, tmp_path) == later  # an older version wrote no list


@pytest.mark.parametrize("over", ["subwords", "bytes", "a base"])
def test_what_is_prepared(over: str, corpus: Corpus, vault: Path, folder: Path, tmp_path: Path) -> None:
    base: Any = None
    if over == "a base":
        base = SimpleNamespace(tokenizer=load_tokenizer(folder / "tokenizer"))
    plan = dataclasses.replace(PLAN, vocab_size=0 if over == "bytes" else 454)
    topics, shown = topics_of(corpus, plan), list[str]()
    configs, numbers = prepare(
        corpus, vault / "primer.txt", topics, plan, tmp_path / "cache", base=base, show=shown.append
    )
    assert list(configs) == (["bytes"] if over == "bytes" else ["pretrain", "sft"])
    assert list(numbers) == ["dialogues", "about_notes"]
    assert new_question(topics[0]) in list(configs.values())[-1].output.sample_prompt
    if over == "bytes":
        assert not (tmp_path / "cache" / "tokenizer").exists() and shown == []
        return
    ids = {"subwords": 454, "a base": 404}[over]
    size = load_tokenizer(tmp_path / "cache" / "tokenizer").vocab_size  # less the pieces of few notes
    assert 0.9 * ids < size <= ids and len(shown) == 1
    for config in configs.values():
        open_task(with_vocabulary(config))


@pytest.mark.parametrize("over", ["subwords", "bytes"])
def test_licences(over: str, corpus: Corpus, vault: Path, tmp_path: Path) -> None:
    """Dialogues of the package are MIT, the user's are theirs; where both can occur in a chat, both are named."""
    plan = dataclasses.replace(PLAN, vocab_size=0 if over == "bytes" else 454, general_dialogues=40)
    package = read_corpus(embedded.NOTES, NotesConfig(), errors="skip")
    topics = topics_of(corpus, plan)
    cases: list[tuple[Corpus, Path | None, list[Any], str]] = [
        (corpus, None, [], "MIT"),
        (corpus, None, topics, "MIT and yours"),
        (corpus, embedded.PRIMER, [], "MIT"),
        (corpus, vault / "primer.txt", topics, "yours"),
        (package, None, topics_of(package, plan)[:3], "MIT"),
    ]
    for number, (notes, dialogues, about, expected) in enumerate(cases if over == "bytes" else cases[:2]):
        configs, _ = prepare(notes, dialogues, about, plan, tmp_path / str(number))
        for config in configs.values():
            assert {source.licence for source in config.data.sources.values()} == {expected}
            assert is_private(licence_in(config, "dialogues")) == ("yours" in expected)
            assert licence_in(config, "roam") == ("MIT" if notes is package else "yours")


def held_out_texts(corpus: Corpus) -> list[str]:
    return [Path(path).read_text(encoding="utf-8") for path in corpus.held_out]


def test_the_halves_of_the_notes(corpus: Corpus, vault: Path) -> None:
    """Empty notes are split too, and then dropped, so that one that becomes empty moves no other."""
    expected = split_rule([str(vault / name) for name in ("blank.md", *NAMES)], 0.1, 42)
    blank = str(vault / "blank.md")
    assert corpus.held_out == expected["val"] and [blank, *corpus.train] == expected["train"]
    assert len(corpus.held_out) == 1 and {entry.path for entry in corpus.selected.skipped} >= {".trash/", "latin.md"}
    texts = [Path(path).read_bytes() for path in corpus.train]
    assert corpus.size == sum(map(len, texts))
    assert corpus.held_out_size == len(Path(corpus.held_out[0]).read_bytes())
    assert corpus.characters == len(set(b"".join(texts).decode("utf-8")))
    assert list(corpus.texts(corpus.held_out)) == [(corpus.held_out[0], held_out_texts(corpus)[0])]


def test_options_of_the_notes_are_honored(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.md").write_text(f"---\nx: 1\n---\ntext [[of|and]] {name}\n", encoding="utf-8")
    notes = NotesConfig(strip_front_matter=True, links="text", exclude=("c.md",))
    read = read_corpus(tmp_path, notes, errors="strict")
    texts = dict(read.texts([*read.train, *read.held_out]))
    assert {Path(path).name: text for path, text in texts.items()} == {"a.md": "text and a\n", "b.md": "text and b\n"}
    assert (read.size, read.held_out_size) == (11, 11)


def test_too_few_notes(tmp_path: Path) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match="note"):
        read_corpus(tmp_path, NotesConfig(), errors="skip")
    (tmp_path / "a.md").write_text("one", encoding="utf-8")
    with pytest.raises(ValueError, match=r"one note.*two"):
        read_corpus(tmp_path, NotesConfig(), errors="skip")
    (tmp_path / "b.md").write_text("two", encoding="utf-8")
    found = read_corpus(tmp_path, NotesConfig(), errors="skip")
    assert (len(found.train), len(found.held_out)) == (1, 1)


def test_bytes_that_are_not_utf8_stop_only_if_wanted(vault: Path) -> None:
    with pytest.raises(ValueError, match=r"latin\.md"):
        read_corpus(vault, NotesConfig(), errors="strict")
    replaced = read_corpus(vault, NotesConfig(), errors="replace")
    assert len(replaced.train) + len(replaced.held_out) == len(NAMES) + 1


def rows(path: Path) -> list[tuple[str, str]]:
    """(question, answer) at the end of each line; others can stand before them."""
    lines = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert all([message["role"] for message in line[-2:]] == ["user", "assistant"] for line in lines)
    return [(line[-2]["content"], line[-1]["content"]) for line in lines]


def test_dialogues_are_written(corpus: Corpus, vault: Path, tmp_path: Path) -> None:
    topics = topics_of(corpus, dataclasses.replace(PLAN, sft_steps=1000))
    numbers = write_dialogues(vault / "primer.txt", topics, tmp_path / "made")
    general, about = (rows(tmp_path / "made" / f"{name}.jsonl") for name in ("dialogues", "about_notes"))
    assert numbers == {"dialogues": len(general), "about_notes": len(about)}
    assert set(ANSWERS.items()) <= set(general)
    assert {answer for _, answer in general} == set(ANSWERS.values()) and len(general) in (2, 3, 4)
    trained = [NAMES.index(Path(path).name) for path in corpus.train]
    answers = {f"{words(number, 40)} é{number}." for number in trained} | {f"{words(90 + n, 30)}." for n in trained}
    assert all(any(full.startswith(answer.removesuffix(" ...")) for full in answers) for _, answer in about)
    assert len(about) == PER_TOPIC * 2 * len(corpus.train)  # two headings in each note
    for path in (tmp_path / "made").iterdir():  # private: they hold text of the notes
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_dialogues_without_questions_about_the_notes(vault: Path, tmp_path: Path) -> None:
    assert list(write_dialogues(vault / "primer.txt", [], tmp_path)) == ["dialogues"]
    assert [path.name for path in tmp_path.iterdir()] == ["dialogues.jsonl"]


def test_general_dialogues_do_not_name_niels(corpus: Corpus, vault: Path, tmp_path: Path) -> None:
    """For a base that chats: some of the package's dialogues, as they are; a file of the user is used as a whole."""
    numbers = write_dialogues(None, topics_of(corpus, PLAN), tmp_path / "package", general=40)
    assert numbers[DIALOGUES] == 40
    text = (tmp_path / "package" / "dialogues.jsonl").read_text(encoding="utf-8")
    assert "niels" not in text.lower() and '"system"' not in text
    answers = {json.loads(line)["messages"][-1]["content"] for line in text.splitlines()}
    assert len(answers) > 20  # from the whole file, which has many questions for each answer
    named = write_dialogues(vault / "primer.txt", [], tmp_path / "user", general=1)
    assert named == write_dialogues(vault / "primer.txt", [], tmp_path / "all")


def test_few_dialogues_are_chosen_from_the_whole_file(corpus: Corpus, tmp_path: Path) -> None:
    topics = topics_of(corpus, PLAN)
    numbers = write_dialogues(None, topics, tmp_path / "few", most=50)
    assert numbers == {DIALOGUES: 50, "about_notes": write_dialogues(None, topics, tmp_path / "all")["about_notes"]}
    files = {name: tmp_path / name / "dialogues.jsonl" for name in ("few", "all")}
    lines = {name: path.read_text(encoding="utf-8").splitlines() for name, path in files.items()}
    answers = [{json.loads(line)["messages"][-1]["content"] for line in lines[name]} for name in lines]
    assert answers[0] <= answers[1] and len(answers[0]) > 25
    assert write_dialogues(None, topics, tmp_path / "more", most=10**6)[DIALOGUES] == len(lines["all"])


def test_the_share_of_dialogues_about_the_notes(corpus: Corpus, vault: Path, tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, about_share=0.8)
    configs = phase_configs(plan, corpus, tmp_path, ["dialogues", "about_notes"])
    assert configs["sft"].train.p_train == pytest.approx({"dialogues": 0.2, "about_notes": 0.8})
    assert Plan.of(configs["pretrain"], configs["sft"]).about_share == 0.8  # the same topics after a resume
    over_bytes = byte_config(plan, corpus, tmp_path, ["dialogues", "about_notes"])
    assert Plan.of(over_bytes, None).about_share == 0.8
    assert Plan.of(byte_config(plan, corpus, tmp_path, ["dialogues"]), None).about_share == ABOUT_SHARE
    alone = phase_configs(plan, corpus, tmp_path, ["dialogues"])
    assert alone["sft"].train.p_train == {"dialogues": 1.0}
    for share, topics in {0.8: 4, 0.4: 2}.items():  # of 300 rows, 60 for each topic
        assert len(topics_of(corpus, dataclasses.replace(plan, sft_steps=75, about_share=share))) == topics


def test_a_base_needs_fewer_rows_for_a_topic(corpus: Corpus, tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, sft_steps=60, init_from="base")  # 120 rows about notes
    configs = phase_configs(plan, corpus, tmp_path, ["dialogues", "about_notes"])
    resumed = Plan.of(configs["pretrain"], configs["sft"])
    for each, topics in ((plan, 5), (resumed, 5), (dataclasses.replace(plan, init_from=""), 2)):
        assert len(topics_of(corpus, each)) == topics


def test_topics_with_secrets_are_not_taught(tmp_path: Path) -> None:
    """Neither in the answer nor in the heading, of which a name in lower case is made."""
    key = "AKIA" + "IOSFODNN7EXAMPL3"
    texts = {
        "plants": f"# Ferns\n{words(1, 20)}.\n# The key {key}\n{words(2, 20)}.\n# Amazon\n{key} {words(3, 20)}.\n",
        "first": f"# Same\n{words(4, 20)}.\n",
        f"second {key}": f"# Same\n{words(5, 20)}.\n",
        "router": f"# password: hunter2hunter\n{words(6, 20)}.\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.md").write_text(text, encoding="utf-8")
    found = read_corpus(tmp_path, NotesConfig(), errors="strict")
    found = dataclasses.replace(found, train=found.train + found.held_out)
    topics = topics_of(found, dataclasses.replace(PLAN, sft_steps=10_000))
    assert {topic.name for topic in topics} == {"ferns", "same of first"}


def test_a_title_that_is_not_utf8(tmp_path: Path) -> None:
    title = title_of(os.fsdecode(b"vault/caf\xe9 notes_of-2.md"))
    assert title == "caf\ufffd notes of 2" and title.encode("utf-8")


@pytest.mark.parametrize("vocab_size", [404, 0])
def test_as_many_topics_as_are_seen_often_enough(corpus: Corpus, vocab_size: int) -> None:
    plan = dataclasses.replace(PLAN, vocab_size=vocab_size)
    steps, rows, share = (
        ("sft_steps", plan.sft_rows, ABOUT_SHARE) if vocab_size else ("pretrain_steps", 3, 0.4 * ABOUT_SHARE)
    )
    for number in (1, 3, 8):
        enough = math.ceil(number * ROWS_PER_TOPIC / (rows * share))
        assert len(topics_of(corpus, dataclasses.replace(plan, **{steps: enough}))) == number
        assert len(topics_of(corpus, dataclasses.replace(plan, **{steps: enough - 1}))) == max(number - 1, 1)


def test_notes_about_which_nothing_can_be_asked(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.md").write_text("short", encoding="utf-8")
    found = read_corpus(tmp_path, NotesConfig(), errors="skip")
    assert topics_of(found, PLAN) == []


def test_the_title_of_a_note_is_its_file_name(vault: Path, tmp_path: Path) -> None:
    for name in ("green-ferns_at home", "b"):
        (tmp_path / f"{name}.md").write_text("water them twice a week, at least", encoding="utf-8")
    found = read_corpus(tmp_path, NotesConfig(), errors="skip")
    found = Corpus(**{**vars(found), "train": found.train + found.held_out})
    write_dialogues(vault / "primer.txt", topics_of(found, PLAN), tmp_path / "made")
    asked = [question for question, _ in rows(tmp_path / "made" / "about_notes.jsonl")]
    assert len(asked) == PER_TOPIC and sum("green ferns at home" in question.lower() for question in asked) > 8


def test_caches_hold_the_same_halves(corpus: Corpus, folder: Path) -> None:
    pieces = load_tokenizer(folder / "tokenizer")
    assert 360 < pieces.vocab_size <= 404  # less the pieces of few notes
    eot, roam = pieces.special_token_ids()["eot"], folder_of(sources(DataConfig())["roam"], folder)
    for split, paths in (("train", corpus.train), ("val", corpus.held_out)):
        expected = [id for _, text in corpus.texts(paths) for id in (*pieces.encode(text), eot)]
        assert stream_of(roam, split) == expected


@pytest.mark.parametrize("number", range(3, 13))
@pytest.mark.parametrize("odd", ["", "long " * 2000], ids=["empty", "long"])
def test_of_few_notes_none_that_is_empty_or_most_of_the_text_is_held_out(number: int, odd: str, tmp_path: Path) -> None:
    for position in range(number):
        folder = tmp_path / str(position)
        folder.mkdir()
        for note in range(number):
            text = odd if note == position else words(note, 60)
            (folder / f"{note:02}.md").write_text(text, encoding="utf-8")
        found = read_corpus(folder, NotesConfig(), errors="skip")
        sizes = [len(Path(path).read_bytes()) for path in found.held_out]
        assert len(sizes) == 1 and found.held_out_size == sizes[0] and 198 < sizes[0] < found.size
        assert (
            found.held_out == split_rule([str(path) for path in sorted(folder.iterdir())], 0.1, found.split_seed)["val"]
        )


def test_caches_hold_the_halves_of_another_seed(tmp_path: Path) -> None:
    seeds = set()
    for name in [f"{number}.md" for number in range(7)]:  # one of them is what seed 42 holds out
        folder = tmp_path / name.removesuffix(".md")
        folder.mkdir()
        for note in range(7):
            (folder / f"{note}.md").write_text("" if f"{note}.md" == name else words(note, 60), encoding="utf-8")
        found = read_corpus(folder, NotesConfig(), errors="skip")
        seeds.add(found.split_seed)
        if found.split_seed == 42:
            continue
        pieces = build_caches(found, tmp_path / "cache", [], subwords=300)
        eot, roam = pieces.special_token_ids()["eot"], folder_of(sources(DataConfig())["roam"], tmp_path / "cache")
        for split, paths in (("train", found.train), ("val", found.held_out)):
            assert stream_of(roam, split) == [id for _, t in found.texts(paths) for id in (*pieces.encode(t), eot)]
        configs = phase_configs(PLAN, found, tmp_path / "cache", [])
        assert {config.data.seed for config in configs.values()} == {found.split_seed}
    assert len(seeds) == 2


def test_no_file_but_the_cache_has_a_held_out_note(corpus: Corpus, folder: Path) -> None:
    (text,) = held_out_texts(corpus)
    for line in filter(None, text.splitlines()):
        found = [path for path in folder.rglob("*") if path.is_file() and line.encode("utf-8") in path.read_bytes()]
        assert found == []


def configs(corpus: Corpus, folder: Path, *, about: bool = True) -> dict[str, RunConfig]:
    names = ["dialogues", "about_notes"] if about else ["dialogues"]
    return phase_configs(PLAN, corpus, folder, names)


def test_the_configs_of_both_phases(corpus: Corpus, folder: Path, vault: Path) -> None:
    made = configs(corpus, folder)
    pretrain, sft = made["pretrain"], made["sft"]
    assert (pretrain.task, sft.task) == ("pretrain", "sft") and list(made) == ["pretrain", "sft"]
    assert pretrain.model == sft.model and pretrain.data == sft.data
    assert (pretrain.train.total_steps, pretrain.train.B) == (40, 3)
    assert (sft.train.total_steps, sft.train.B) == (10, 4)
    assert pretrain.train.p_train == pretrain.train.p_val == {"roam": 1.0}
    assert sft.train.p_train == sft.train.p_val == pytest.approx({"dialogues": 0.5, "about_notes": 0.5})
    assert configs(corpus, folder, about=False)["sft"].train.p_train == {"dialogues": 1.0}
    data = pretrain.data
    assert (data.roam, data.token_cache, data.roam_val_frac, data.seed) == (str(vault), str(folder), 0.1, 42)
    assert (data.encoding_errors, data.notes) == ("skip", corpus.notes)
    assert data.sources == dialogue_sources(folder, ["dialogues", "about_notes"])
    out = pretrain.output
    assert (out.checkpoint_every, out.keep, out.eval_every, out.sample_every) == (13, 1, 5, 6)
    assert sft.output.eval_every == 10  # the last checkpoint is the best
    assert "what is niels?" in sft.output.sample_prompt
    for config in made.values():  # also as a YAML file
        assert config_from_dict(to_dict(config)) == config


def test_a_plan_of_one_step_is_a_config(corpus: Corpus, folder: Path) -> None:
    plan = Plan(PLAN.size, 400, 1, 1)
    for config in phase_configs(plan, corpus, folder, ["dialogues"]).values():
        out = config.output
        assert (out.checkpoint_every, out.eval_every, out.sample_every) == (1, 1, 1)


@pytest.mark.parametrize("phase", ["pretrain", "sft"])
def test_the_caches_are_those_of_the_configs(phase: str, corpus: Corpus, folder: Path) -> None:
    task = open_task(with_vocabulary(configs(corpus, folder)[phase]))
    batch = task.batch(0)
    assert tuple(batch.x.shape) == ((3, 32) if phase == "pretrain" else (4, 32))
    assert int(batch.x.max()) < 404
    names = {origin.source for step in range(8) for origin in task.origins(step)}
    assert names == ({"roam"} if phase == "pretrain" else {"dialogues", "about_notes"})


def test_a_model_over_bytes_reads_notes_and_dialogues_together(corpus: Corpus, folder: Path) -> None:
    plan = Plan(PLAN.size, 0, 40, 0)
    config = byte_config(plan, corpus, folder, ["dialogues", "about_notes"])
    assert (config.task, config.model.V, config.train.total_steps, config.train.B) == ("bytes", 256, 40, 8)
    assert config.train.p_train == pytest.approx({"roam": 0.6, "dialogues": 0.2, "about_notes": 0.2})
    assert config.train.p_val == {"roam": 1.0}
    assert config.data.cache_dir == str(folder / "streams")
    assert byte_config(plan, corpus, folder, ["dialogues"]).train.p_train == {"roam": 0.6, "dialogues": 0.4}
    task = open_task(config)
    assert tuple(task.batch(0).x.shape) == (8, 32)
    origins = [origin for step in range(8) for origin in task.origins(step)]
    assert {origin.source for origin in origins} == {"roam", "dialogues", "about_notes"}
    notes = {Path(origin.document).name for origin in origins if origin.source == "roam"}
    assert len(notes) > 5 and notes <= {Path(path).name for path in corpus.train}


def test_notes_that_share_lines_are_held_out_together(tmp_path: Path) -> None:
    """Newsletters repeat notes: half of the held-out notes would stand in the training notes."""
    lines = [f"the sentence number {i} of the vault, which a newsletter repeats word for word" for i in range(60)]
    for i in range(60):
        (tmp_path / f"note{i:02}.md").write_text(f"# Note {i}\n\n{lines[i]}\n" + f"word{i} " * 9, encoding="utf-8")
    for i in range(0, 40, 2):
        (tmp_path / f"news{i:02}.md").write_text(f"# News {i}\n\n{lines[i]}\n", encoding="utf-8")
    by_file = read_corpus(tmp_path, NotesConfig(), errors="skip", split_by="file")
    together = read_corpus(tmp_path, NotesConfig(), errors="skip")

    def shared(corpus: Corpus) -> float:
        train = [line.strip() for _, text in corpus.texts(corpus.train) for line in text.split("\n")]
        lines = [line.strip() for _, text in corpus.texts(corpus.held_out) for line in text.split("\n")]
        long = [line for line in lines if len(line) >= 40]
        return sum(len(line) for line in long if line in train) / sum(map(len, long))

    assert by_file.lines_in_training == pytest.approx(shared(by_file)) and shared(by_file) > 0
    assert (together.lines_in_training, shared(together)) == (0, 0)
    assert together.lines_in_training_by_file == by_file.lines_in_training
    paths = sorted(map(str, tmp_path.iterdir()))
    assert list(split_rule(paths, 0.1, by_file.split_seed).values()) == [by_file.train, by_file.held_out]
    for corpus, split in ((by_file, "file"), (together, "shared_text")):  # the cache of one is not served for the other
        pieces = build_caches(corpus, tmp_path / ".cache", [], subwords=300)
        eot, roam = pieces.special_token_ids()["eot"], folder_of(sources(DataConfig())["roam"], tmp_path / ".cache")
        held_out = [id for _, text in corpus.texts(corpus.held_out) for id in (*pieces.encode(text), eot)]
        assert stream_of(roam, "val") == held_out
        configs = phase_configs(PLAN, corpus, tmp_path / ".cache", [])
        assert {config.data.roam_split for config in configs.values()} == {split}
        assert Plan.of(configs["pretrain"], configs["sft"]).split_by == split


def test_topics_of_a_vault_are_listed_for_its_owner_only(corpus: Corpus, tmp_path: Path) -> None:
    topics = topics_of(corpus, PLAN)
    write_dialogues(None, topics, tmp_path)
    listed = tmp_path / "topics.txt"
    assert listed.read_text(encoding="utf-8").splitlines() == [topic.name for topic in topics]
    assert stat.S_IMODE(listed.stat().st_mode) == 0o600


def test_the_tokenizer_of_notes_has_no_private_pieces(tmp_path):
    """A name and a number that stand 12 times in one note; the audit judges by the same rule."""
    folder = tmp_path / "vault"
    folder.mkdir()
    for i, text in enumerate(NOTES):
        (folder / f"{i}.md").write_text(text, encoding="utf-8")
    corpus = read_corpus(folder, NotesConfig(), errors="strict")
    corpus = dataclasses.replace(corpus, train=corpus.selected.paths, held_out=[])
    path = train_tokenizer(NOTES, tmp_path / "before", vocab_size=600)
    assert private_pieces(load_tokenizer(path), NOTES, [])
    tokenizer = build_caches(corpus, tmp_path / "caches", [], subwords=600)
    assert not private_pieces(tokenizer, NOTES, embedded.public_texts())
