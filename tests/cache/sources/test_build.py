import dataclasses
import functools
import getpass
import inspect
import itertools
import json
import os
import platform
import re
import shutil
import warnings
from pathlib import Path

import datasets
import numpy as np
import pytest
import sentencepiece

from niels_gpt.cache.meta import CacheError
from niels_gpt.cache.sources import build as build_module
from niels_gpt.cache.sources.build import (
    BuildSettings,
    build,
    install_tokenizer,
    known_sources,
    open_tokenizer,
    write_placeholder,
)
from niels_gpt.config import DataConfig, SourceConfig
from niels_gpt.data import embedded
from niels_gpt.data.reading.local import DataUnavailable
from niels_gpt.data.roam import list_roam_paths, split_roam_paths
from niels_gpt.tokenizer import load_tokenizer, train_tokenizer
from tests.cache import (
    SPECIAL_STRINGS,
    SPLITS,
    check_listing,
    check_sft,
    digests,
    meta_of,
    no_waiting,
    read_offsets,
    read_tokens,
    real_tokenizer,
    split_rule,
    tree,
)
from tests.data import RowHub

PLACES = {
    "fineweb_edu": "fineweb-edu",
    "wikitext": "wikitext",
    "gutenberg": "gutenberg_clean_en_splits",
    "dolly15k": "databricks-dolly-15k",
    "oasst1": "oasst1",
}
"""Source -> its folder in NIELS_GPT_DATA."""
PAGES = [f"page {i}: " + "the model reads the page. " * (1 + i % 4) for i in range(30)]
BOOKS = [f"book {i}\n\n" + "a large book of a small model. " * (3 + i) for i in range(8)]
LINES = {
    "train": ["= heading =", "", " a line of train with é ß and 日本", " another line\r\n", "  "],
    "validation": [" a held-out line", "", "= more ="],
    "test": [" never cached"],
}
DOLLY = [
    {
        "instruction": f"what is note {i}?",
        "context": f"of note {i}" if i % 3 == 0 else "",
        "response": f"note {i} is small." * (1 + i % 2),
        "category": "open_qa",
    }
    for i in range(23)
]
OASST1 = [
    {"message_id": i, "parent_id": p, "message_tree_id": t, "role": r, "text": text, "lang": "en"}
    for i, p, t, r, text in [
        ("a", None, "a", "prompter", "why is the loss large?"),
        ("b", "a", "a", "assistant", "the model is small."),
        ("c", "a", "a", "assistant", "it learns."),
        ("d", "c", "a", "prompter", "and then?"),
        ("e", "d", "a", "assistant", "it learns again."),
        ("x", None, "x", "prompter", "what is a step?"),
        ("y", "x", "x", "assistant", "a small one."),
    ]
]
THREADS = [["a", "b"], ["a", "c", "d", "e"], ["x", "y"]]
DIALOGUES = [[("user", f"ask {i}"), ("assistant", f"a small answer {i}")] for i in range(12)]
DIALOGUES[4] = [("system", "be brief"), *DIALOGUES[4], ("user", "again?"), ("assistant", "never again")]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty working directory; nothing is waited for until it is on disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NIELS_GPT_DATA", raising=False)
    with no_waiting():
        yield


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory):
    """Another than `real_tokenizer`, and the folder it lies in."""
    folder = tmp_path_factory.mktemp("other")
    return load_tokenizer(train_tokenizer(PAGES + BOOKS, folder, vocab_size=300)), folder


# --- the input, written and read without the package ---------------------------------------------------


def write(path, text):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return path


def write_rows(path, rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path, rows):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(str(path))


def as_rows(texts):
    return [{"text": text} for text in texts]


def write_notes(folder="notes"):
    """Notes in folders, some of them blank; {path: text}."""
    made = {
        f"{'abc'[i % 3]}/note {i}.md": f"# note {i}\n\nthe model never reads it é\r\n" * (1 + i % 3) for i in range(21)
    }
    made |= {"b/blank.md": " \n\t\n", "empty.md": "", "b.md": "between the folders"}
    for name, text in made.items():
        write(Path(folder) / name, text)
    write(Path(folder) / "a/picture.txt", "no note")
    return made


def write_dialogues(path="primer.txt"):
    return write(path, "\n\n<dialogue>\n\n".join("\n".join(f"{r}: {c}" for r, c in turns) for turns in DIALOGUES))


def write_everything(folder="data"):
    """Local files of all sources of the Hub."""
    root = Path(folder)
    write_rows(root / "fineweb-edu" / "train.jsonl", as_rows(PAGES))
    for split, lines in LINES.items():
        write_rows(root / "wikitext" / "wikitext-103-raw-v1" / f"{split}.jsonl", as_rows(lines))
        write_rows(root / "wikitext" / "wikitext-2-raw-v1" / f"{split}.jsonl", as_rows([*lines, "of the small one"]))
    write_rows(root / "gutenberg_clean_en_splits" / "train.jsonl", as_rows(BOOKS))
    write_rows(root / "databricks-dolly-15k" / "train.jsonl", DOLLY)
    write_rows(root / "oasst1" / "train.jsonl", OASST1)
    return root


@pytest.fixture
def everything(monkeypatch):
    """All sources lie here: those of the Hub in NIELS_GPT_DATA, notes, dialogues, and own ones."""
    monkeypatch.setenv("NIELS_GPT_DATA", str(write_everything()))
    write_notes(".roam-data")
    write_dialogues("data/primer.txt")
    write_rows("mine/rows.jsonl", [{"text": f"text {i}", "title": f"a title of {i}", "n": i} for i in range(15)])
    write_rows("chats.jsonl", [{"messages": messages(turns)} for turns in DIALOGUES])
    return DataConfig(sources={"mine": SourceConfig("mine"), "chats": SourceConfig("chats.jsonl")})


def messages(turns):
    return [{"role": role, "content": content} for role, content in turns]


class Reference:
    """SentencePiece itself with the same model. (It takes U+2581 for a space: no text here has one.)"""

    def __init__(self, model):
        self.sp = sentencepiece.SentencePieceProcessor(model_proto=model)

    def encode(self, text):
        return self.sp.encode(text)

    def special_token_ids(self):
        return {
            name: self.sp.piece_to_id(s) for name, s in zip(("sys", "usr", "asst", "eot"), SPECIAL_STRINGS, strict=True)
        }

    def decode(self, ids):
        parts = []
        for i in ids:
            piece = self.sp.id_to_piece(int(i))
            parts.append(bytes([int(piece[3:5], 16)]) if self.sp.is_byte(int(i)) else piece.replace("▁", " ").encode())
        return b"".join(parts).decode()


@functools.cache
def reference():
    return Reference(real_tokenizer().model)


def documents_of(folder, split):
    """The texts of a cache, document by document; each must end with an EOT."""
    shards = sorted((folder / split).glob("shard_*.bin"))
    stream = [token for path in shards for token in read_tokens(path)]
    starts = [*read_offsets(folder / split / "documents.npy"), len(stream)]
    eot = reference().special_token_ids()["eot"]
    texts = []
    for begin, end in itertools.pairwise(starts):
        assert stream[end - 1] == eot
        ids = stream[begin : end - 1]
        texts.append(reference().decode(ids))
        assert ids == reference().encode(texts[-1])
    return texts


def stream_of(folder, split):
    return [token for path in sorted((folder / split).glob("shard_*.bin")) for token in read_tokens(path)]


def by_budget(texts, *, train, val):
    """{split: tokens}: whole documents to val until it is full, then to train; cut where a budget is full."""
    streams = {"val": [], "train": []}
    budgets = {"val": val, "train": train}
    eot = reference().special_token_ids()["eot"]
    for text in texts:
        unfilled = [split for split in streams if len(streams[split]) < budgets[split]]
        if unfilled:
            room = budgets[unfilled[0]] - len(streams[unfilled[0]])
            streams[unfilled[0]] += [*reference().encode(text), eot][:room]
    return streams


# --- building ----------------------------------------------------------------------------------------

SMALL = {
    "fineweb_train_tokens": 400,
    "fineweb_val_tokens": 50,
    "gutenberg_train_tokens": 600,
    "gutenberg_val_tokens": 100,
    "shard_bytes": 256,
    "workers": 1,
}


def settings(cache_dir="cache", **changes):
    return BuildSettings(cache_dir=Path(cache_dir), **{**SMALL, **changes})


def made(name, data=None, *, cache_dir="cache", tokenizer=None, force=False, **changes):
    """Build one cache."""
    source = known_sources(data)[name]
    return build(source, settings(cache_dir, **changes), tokenizer or real_tokenizer(), force=force)


def folder_of(name, cache_dir="cache"):
    return Path(cache_dir) / ("sft" if name in ("dolly15k", "oasst1", "primer", "chats") else "pretrain") / name


ALL = ["fineweb_edu", "wikitext", "gutenberg", "roam", "dolly15k", "oasst1", "primer", "mine", "chats"]


@pytest.mark.parametrize("name", ALL)
def test_the_place_the_meta_and_the_files(everything, name):
    built = made(name, everything)
    folder = folder_of(name)
    assert (built.name, built.state, built.folder, built.reason) == (name, "built", folder, "")
    meta = meta_of(folder)
    assert built.meta == meta
    check_listing(folder)
    chat = folder.parent.name == "sft"
    wanted = {
        "dataset_name": name,
        "dataset_config": {"fineweb_edu": "CC-MAIN-2024-10", "wikitext": "wikitext-103-raw-v1"}.get(name),
        "kind": "sft" if chat else "pretrain",
        "seed": 42,
        "token_dtype": "uint16-le",
        "tokenizer_sha256": real_tokenizer().sha256,
        "vocab_size": real_tokenizer().vocab_size,
        "special_token_ids": reference().special_token_ids(),
        "streaming": name == "fineweb_edu",
    }
    assert {key: meta[key] for key in wanted} == wanted
    assert isinstance(meta["split_rule"], str) and len(meta["split_rule"]) > 30
    if chat:
        assert meta["val_frac"] == 0.1
        assert meta["train_examples"] > meta["val_examples"] >= 0
        assert "shard_bytes" not in meta
    else:
        assert meta["shard_bytes"] == 256
        assert all(meta[f"{split}_tokens"] == len(stream_of(folder, split)) for split in SPLITS)
    assert not list(Path("cache").rglob(".*"))


@pytest.mark.parametrize("name", ALL)
def test_no_path_and_no_person_in_the_meta(everything, tmp_path, name):
    made(name, everything)
    text = (folder_of(name) / "meta.json").read_text(encoding="utf-8")
    assert str(tmp_path) not in text and tmp_path.name not in text
    for secret in (platform.node(), getpass.getuser(), str(Path.home())):
        assert f'"{secret}"' not in text
        assert secret == "/" or f"{secret}/" not in text
    assert not re.search(
        r"\.roam-data|note \d|primer\.txt|\.jsonl|20\d\d-\d\d-\d\d", text.replace("CC-MAIN-2024-10", "")
    )


@pytest.mark.parametrize("name", ALL)
def test_the_bytes_do_not_depend_on_the_workers_or_the_place(everything, name, tmp_path):
    made(name, everything, workers=1)
    made(name, everything, workers=4, cache_dir=tmp_path / "far" / "away" / "cache")
    assert digests(Path("cache")) == digests(tmp_path / "far" / "away" / "cache")


# --- each source -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "val_frac"), [(42, 0.1), (7, 0.34), (3, 0.0), (0, 1.0)])
def test_notes_are_split_by_file(seed, val_frac):
    notes = write_notes()
    made("roam", roam=Path("notes"), seed=seed, roam_val_frac=val_frac, val_frac=0.5)
    paths = sorted(str(path.absolute()) for path in Path("notes").rglob("*.md"))
    assert len(paths) == len(notes) == 24
    wanted = split_rule(paths, val_frac, seed)
    assert (wanted["train"], wanted["val"]) == split_roam_paths(list_roam_paths("notes"), val_frac=val_frac, seed=seed)
    for split in SPLITS:
        texts = [Path(path).read_bytes().decode() for path in wanted[split]]
        texts = [text.replace("\r\n", "\n") for text in texts if text.strip()]
        assert documents_of(folder_of("roam"), split) == texts
    assert meta_of(folder_of("roam"))["train_documents"] + meta_of(folder_of("roam"))["val_documents"] == 22


def test_notes_of_the_usual_place_and_embedded_ones():
    made("roam", cache_dir="one", shard_bytes=1 << 20)
    shipped = sorted(embedded.NOTES.rglob("*.md"))
    assert len(documents_of(folder_of("roam", "one"), "val")) == len(shipped) // 10
    assert len(documents_of(folder_of("roam", "one"), "train")) == len(shipped) - len(shipped) // 10
    write(".roam-data/mine.md", "my note")
    made("roam", cache_dir="two")
    assert documents_of(folder_of("roam", "two"), "train") == ["my note"]
    made("roam", cache_dir="three", path=write("other/x.md", "another note").parent)
    assert documents_of(folder_of("roam", "three"), "train") == ["another note"]


def test_notes_that_are_not_utf8():
    write("notes/a.md", "a note")
    write("notes/b.md", b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=r"b\.md.*offset 3"):
        made("roam", roam=Path("notes"), roam_val_frac=0.0)
    assert not folder_of("roam").exists()
    made("roam", roam=Path("notes"), roam_val_frac=0.0, errors="replace")
    assert documents_of(folder_of("roam"), "train") == ["a note", "caf\ufffd au lait"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_wikitext_has_its_own_splits(monkeypatch, kind):
    for split, lines in LINES.items():
        (write_rows if kind == "jsonl" else write_parquet)(f"data/wikitext/{split}.{kind}", as_rows(lines))
    monkeypatch.setenv("NIELS_GPT_DATA", "data")
    made("wikitext")
    folder = folder_of("wikitext")
    assert documents_of(folder, "train") == ["= heading =", " a line of train with é ß and 日本", " another line\n"]
    assert documents_of(folder, "val") == [" a held-out line", "= more ="]


def test_wikitext_of_another_config(everything):
    made("wikitext", wikitext_config="wikitext-2-raw-v1")
    assert documents_of(folder_of("wikitext"), "val") == [" a held-out line", "= more =", "of the small one"]
    assert meta_of(folder_of("wikitext"))["dataset_config"] == "wikitext-2-raw-v1"


@pytest.mark.parametrize("given", ["path", "environment"])
def test_wikitext_of_one_file_holds_out_none_of_what_it_trains_on(monkeypatch, given):
    """A file that is named itself has no splits."""
    file = write_rows("data/rows.jsonl", as_rows(f"line {i}" for i in range(10)))
    if given == "environment":
        monkeypatch.setenv("NIELS_GPT_DATA", str(write("places.yaml", "wikitext: data/rows.jsonl")))
    try:
        made("wikitext", path=file if given == "path" else None)
    except ValueError as err:
        assert file.name in str(err)
    else:
        train, val = (documents_of(folder_of("wikitext"), split) for split in SPLITS)
        assert not set(train) & set(val)


@pytest.mark.parametrize(("train", "val"), [(600, 100), (37, 1), (10**9, 0), (10**9, 333)])
def test_books_go_to_val_until_it_is_full(everything, train, val):
    made("gutenberg", gutenberg_train_tokens=train, gutenberg_val_tokens=val)
    wanted = by_budget(BOOKS, train=train, val=val)
    assert {split: stream_of(folder_of("gutenberg"), split) for split in SPLITS} == wanted
    meta = meta_of(folder_of("gutenberg"))
    assert (meta["max_train_tokens"], meta["max_val_tokens"]) == (train, val)
    assert (meta["train_tokens"], meta["val_tokens"]) == (len(wanted["train"]), len(wanted["val"]))


def test_a_budget_of_val_that_takes_everything(everything):
    with pytest.raises(ValueError, match=r"train would be empty.*max_val_tokens=1000000"):
        made("gutenberg", gutenberg_val_tokens=10**6)
    assert not list(Path("cache").rglob("*.*"))


@pytest.mark.parametrize(("seed", "buffer"), [(42, 10_000), (42, 4), (5, 4), (5, 1)])
def test_pages_come_shuffled_as_the_library_does_it(everything, seed, buffer):
    made("fineweb_edu", seed=seed, shuffle_buffer=buffer)
    rows = datasets.load_dataset("json", data_files="data/fineweb-edu/train.jsonl", split="train", streaming=True)
    # By default `datasets` 5 fills the buffer in another way; see tests/data/test_hub.py.
    one = (
        {"max_buffer_input_shards": 1}
        if "max_buffer_input_shards" in inspect.signature(rows.shuffle).parameters
        else {}
    )
    order = [row["text"] for row in rows.shuffle(seed=seed, buffer_size=buffer, **one)]
    assert sorted(order) == sorted(PAGES)
    assert (order == PAGES) == (buffer == 1)
    wanted = by_budget(order, train=400, val=50)
    assert {split: stream_of(folder_of("fineweb_edu"), split) for split in SPLITS} == wanted


def test_pages_that_are_not_streamed(everything):
    made("fineweb_edu", fineweb_streaming=False, fineweb_train_tokens=10**6, fineweb_val_tokens=0)
    assert meta_of(folder_of("fineweb_edu"))["streaming"] is False
    found = documents_of(folder_of("fineweb_edu"), "train")
    assert sorted(found) == sorted(PAGES) and found != PAGES


class Endless:
    """Rows without an end."""

    def __iter__(self):
        return ({"text": f"page {i}"} for i in itertools.count())


def test_what_the_hub_is_asked_for(monkeypatch):
    hub = RowHub(Endless()).install(monkeypatch)
    made("fineweb_edu", fineweb_id="me/pages", fineweb_config="sample", shuffle_buffer=17, seed=3)
    for args, kwargs in hub.calls:
        assert args == ("me/pages", "sample")
        assert kwargs == {"split": "train", "streaming": True}
    (shuffle,) = hub.shuffles
    assert (shuffle["seed"], shuffle["buffer_size"]) == (3, 17)
    assert hub.pulled < 10_000  # some are read ahead
    meta = meta_of(folder_of("fineweb_edu"))
    assert (meta["dataset_config"], meta["streaming"], meta["revision"]) == ("sample", True, None)
    assert (meta["train_tokens"], meta["val_tokens"]) == (400, 50)


def test_pages_of_the_hub_by_default(monkeypatch):
    hub = RowHub(as_rows(PAGES)).install(monkeypatch)
    made("fineweb_edu")
    assert {args for args, _ in hub.calls} == {("HuggingFaceFW/fineweb-edu", "CC-MAIN-2024-10")}
    assert hub.shuffles[0]["buffer_size"] == 10_000 and hub.shuffles[0]["seed"] == 42


def test_books_of_the_hub(monkeypatch):
    hub = RowHub(as_rows(BOOKS)).install(monkeypatch)
    made("gutenberg")
    assert {args for args, _ in hub.calls} == {("nikolina-p/gutenberg_clean_en_splits",)}
    assert hub.shuffles == []
    assert stream_of(folder_of("gutenberg"), "val") == by_budget(BOOKS, train=600, val=100)["val"]


def dolly_example(row):
    context = f"\n\ncontext:\n{row['context']}" if row["context"] else ""
    return messages([("user", row["instruction"] + context), ("assistant", row["response"])])


@pytest.mark.parametrize(("seed", "val_frac"), [(42, 0.1), (8, 0.5), (8, 0.0)])
def test_dolly(everything, seed, val_frac):
    made("dolly15k", seed=seed, val_frac=val_frac, roam_val_frac=0.9)
    kept = [dolly_example(row) for row in DOLLY]
    check_sft(folder_of("dolly15k"), kept, tokenizer=reference(), val_frac=val_frac, seed=seed)
    meta = meta_of(folder_of("dolly15k"))
    assert (meta["train_examples"], meta["val_examples"]) == {0.1: (21, 2), 0.5: (12, 11), 0.0: (23, 0)}[val_frac]


def test_dolly_with_a_forged_turn(monkeypatch):
    rows = [*DOLLY[:5], {**DOLLY[5], "response": f"yes{SPECIAL_STRINGS[3]}{SPECIAL_STRINGS[1]}no"}, *DOLLY[6:9]]
    write_rows("rows.jsonl", rows)
    made("dolly15k", path=Path("rows.jsonl"))
    kept = [dolly_example(row) for i, row in enumerate(rows) if i != 5]
    check_sft(folder_of("dolly15k"), kept, tokenizer=reference(), val_frac=0.1, seed=42)
    assert sum(meta_of(folder_of("dolly15k"))["dropped"].values()) == 1


def test_oasst1(everything):
    made("oasst1", val_frac=0.34)
    by_id = {row["message_id"]: row for row in OASST1}
    roles = {"prompter": "user", "assistant": "assistant"}
    kept = [messages([(roles[by_id[i]["role"]], by_id[i]["text"]) for i in thread]) for thread in THREADS]
    check_sft(folder_of("oasst1"), kept, tokenizer=reference(), val_frac=0.34, seed=42)
    assert meta_of(folder_of("oasst1"))["train_examples"] == 2


def test_primer():
    made("primer", primer=write_dialogues())
    kept = [messages(turns) for turns in DIALOGUES]
    check_sft(folder_of("primer"), kept, tokenizer=reference(), val_frac=0.1, seed=42)
    assert meta_of(folder_of("primer"))["val_examples"] == 1


def test_the_embedded_primer():
    made("primer")
    blocks = [block for block in embedded.PRIMER.read_text("utf-8").split("\n\n<dialogue>\n\n") if block.strip()]
    meta = meta_of(folder_of("primer"))
    assert len(blocks) > 500
    assert (meta["train_examples"], meta["val_examples"]) == (len(blocks) - len(blocks) // 10, len(blocks) // 10)


# --- sources of one's own ----------------------------------------------------------------------------


def own(**sources):
    return DataConfig(sources={name: SourceConfig(**config) for name, config in sources.items()})


@pytest.mark.parametrize(("seed", "val_frac"), [(42, 0.1), (9, 0.3)])
def test_a_folder_of_texts(seed, val_frac):
    texts = {f"poems/{'ab'[i % 2]}/{i}.{'txt' if i % 3 else 'md'}": f"poem {i} of a small model" for i in range(20)}
    for name, text in {**texts, "poems/z.txt": " \n"}.items():
        write(name, text)
    made("poems", own(poems={"path": "poems"}), seed=seed, val_frac=val_frac, roam_val_frac=0.9)
    in_order = [texts[name] for name in sorted(texts)]
    wanted = split_rule(in_order, val_frac, seed)
    assert len(wanted["val"]) == int(20 * val_frac)
    for split in SPLITS:
        assert documents_of(folder_of("poems"), split) == wanted[split]


@pytest.mark.parametrize(("field", "value"), [("", "text"), ("title", "a title of")])
def test_rows_of_text(everything, field, value):
    made("rows", own(rows={"path": "mine", "field": field}), val_frac=0.2)
    wanted = split_rule([f"{value} {i}" for i in range(15)], 0.2, 42)
    assert len(wanted["val"]) == 3
    for split in SPLITS:
        assert documents_of(folder_of("rows"), split) == wanted[split]


@pytest.mark.parametrize("kind", ["auto", "chat"])
def test_rows_of_chat(kind):
    rows = [{"messages": messages(turns)} for turns in DIALOGUES]
    rows.insert(3, {"messages": []})
    write_rows("rows.jsonl", rows)
    made("chats", own(chats={"path": "rows.jsonl", "kind": kind}), val_frac=0.25, seed=6)
    kept = [row["messages"] for row in rows if row["messages"]]
    check_sft(folder_of("chats"), kept, tokenizer=reference(), val_frac=0.25, seed=6)


def test_a_single_document_is_not_held_out():
    write("one.txt", "the only one")
    made("one", own(one={"path": "one.txt"}), val_frac=0.5)
    assert documents_of(folder_of("one"), "train") == ["the only one"]
    assert documents_of(folder_of("one"), "val") == []


def test_the_docstrings_of_python(monkeypatch):
    files = embedded.stdlib_files()[:12]  # all of it takes seconds to read
    monkeypatch.setattr(embedded, "stdlib_files", lambda: files)
    texts = [text for _, text in embedded.iter_stdlib()]
    made("stdlib", val_frac=0.2, shard_bytes=1 << 20)
    wanted = split_rule(texts, 0.2, 42)
    for split in SPLITS:
        assert documents_of(folder_of("stdlib"), split) == wanted[split]


# --- what has changed, and what has not ----------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_nothing_changed(everything, name):
    first = made(name, everything)
    before = tree(Path("cache"))
    times = {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*")}
    second = made(name, everything, workers=2)
    assert (second.state, second.folder, second.meta) == ("up to date", first.folder, first.meta)
    assert tree(Path("cache")) == before
    assert {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*")} == times


def test_touched_and_moved_files_are_the_same(everything):
    made("roam", everything)
    made("dolly15k", everything)
    for path in Path().rglob("*"):
        os.utime(path, (10**9, 10**9))
    assert made("dolly15k", everything).state == "up to date"
    Path(".roam-data").rename("elsewhere")
    assert made("roam", everything, roam=Path("elsewhere")).state == "up to date"


def rebuilt(name, data, **changes):
    """Build, build with changes, and once more; the result must be that of a build that knows of nothing before."""
    assert made(name, data).state == "built"
    assert made(name, data, **changes).state == "built"
    check_fresh(name, data, **changes)
    assert made(name, data, **changes).state == "up to date"


def check_fresh(name, data, **changes):
    made(name, data, cache_dir="fresh", **changes)
    assert tree(folder_of(name)) == tree(folder_of(name, "fresh"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {"seed": 43}) for name in ALL),
        *((name, {"shard_bytes": 64}) for name in ("fineweb_edu", "wikitext", "gutenberg", "roam", "mine")),
        *((name, {"val_frac": 0.4}) for name in ("dolly15k", "oasst1", "primer", "chats", "mine")),
        ("roam", {"roam_val_frac": 0.4}),
        ("fineweb_edu", {"fineweb_train_tokens": 401}),
        ("fineweb_edu", {"fineweb_val_tokens": 51}),
        ("fineweb_edu", {"fineweb_config": "sample-10BT"}),
        ("fineweb_edu", {"fineweb_streaming": False}),
        ("fineweb_edu", {"shuffle_buffer": 3}),
        ("gutenberg", {"gutenberg_train_tokens": 601}),
        ("gutenberg", {"gutenberg_val_tokens": 101}),
        ("wikitext", {"wikitext_config": "wikitext-2-raw-v1"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_another_setting(everything, name, changes):
    rebuilt(name, everything, **changes)


@pytest.mark.parametrize("name", ALL)
def test_another_tokenizer(everything, other_tokenizer, name):
    rebuilt(name, everything, tokenizer=other_tokenizer[0])
    assert meta_of(folder_of(name))["vocab_size"] == other_tokenizer[0].vocab_size


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("roam", {"val_frac": 0.5, "fineweb_train_tokens": 7, "shuffle_buffer": 3, "wikitext_config": "x"}),
        ("wikitext", {"val_frac": 0.5, "roam_val_frac": 0.5, "gutenberg_val_tokens": 7, "fineweb_config": "x"}),
        ("gutenberg", {"val_frac": 0.5, "roam_val_frac": 0.5, "fineweb_val_tokens": 7, "shuffle_buffer": 3}),
        ("fineweb_edu", {"val_frac": 0.5, "roam_val_frac": 0.5, "gutenberg_val_tokens": 7}),
        ("dolly15k", {"shard_bytes": 64, "roam_val_frac": 0.5, "fineweb_val_tokens": 7}),
        ("mine", {"roam_val_frac": 0.5, "fineweb_val_tokens": 7, "vocab_size": 999}),
    ],
)
def test_settings_of_other_sources(everything, name, changes):
    made(name, everything)
    assert made(name, everything, **changes).state == "up to date"


def swap(path, old, new):
    """Change the content, but neither the size nor the time."""
    path = Path(path)
    state = path.stat()
    data = path.read_bytes()
    assert data.count(old) and len(old) == len(new)
    path.write_bytes(data.replace(old, new))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize(
    ("name", "path", "old", "new"),
    [
        ("fineweb_edu", "data/fineweb-edu/train.jsonl", b"reads", b"wears"),
        ("wikitext", "data/wikitext/wikitext-103-raw-v1/train.jsonl", b"another", b"onother"),
        ("wikitext", "data/wikitext/wikitext-103-raw-v1/validation.jsonl", b"held", b"hold"),
        ("gutenberg", "data/gutenberg_clean_en_splits/train.jsonl", b"book 2", b"look 2"),
        ("roam", ".roam-data/a/note 0.md", b"model", b"mould"),
        ("dolly15k", "data/databricks-dolly-15k/train.jsonl", b"note 7", b"tone 7"),
        ("oasst1", "data/oasst1/train.jsonl", b"learns", b"yearns"),
        ("primer", "data/primer.txt", b"small", b"great"),
        ("mine", "mine/rows.jsonl", b"text 3", b"next 3"),
        ("chats", "chats.jsonl", b"small", b"great"),
    ],
)
def test_another_content_of_a_file(everything, name, path, old, new):
    before = made(name, everything).meta["files"]
    swap(path, old, new)
    again = made(name, everything)
    assert again.state == "built" and again.meta["files"] != before
    check_fresh(name, everything)


@pytest.mark.parametrize("change", ["more", "fewer", "renamed"])
def test_other_files(everything, change):
    made("roam", everything)
    if change == "more":
        write(".roam-data/c/new.md", "a new note")
    elif change == "fewer":
        Path(".roam-data/c/note 2.md").unlink()
    else:
        Path(".roam-data/c/note 2.md").rename(".roam-data/a/0.md")
    assert made("roam", everything).state == "built"
    check_fresh("roam", everything)


def test_another_id_with_files_of_its_own(everything):
    """Of both ids there are local files."""
    write_rows("data/pages/train.jsonl", as_rows(f"another page {i} of another id" for i in range(60)))
    made("fineweb_edu")
    again = made("fineweb_edu", fineweb_id="me/pages")
    assert again.state == "built"
    assert reference().decode(stream_of(folder_of("fineweb_edu"), "train")).count("another id") > 5


def test_another_field_of_the_same_rows(everything):
    made("rows", own(rows={"path": "mine"}))
    again = made("rows", own(rows={"path": "mine", "field": "title"}))
    assert again.state == "built"
    assert documents_of(folder_of("rows"), "train")[0].startswith("a title")


@pytest.mark.parametrize("name", ["wikitext", "dolly15k"])
@pytest.mark.parametrize("damage", ["missing", "longer", "shorter", "no meta", "damaged meta", "no folder"])
def test_a_cache_that_is_not_whole(everything, name, damage):
    made(name, everything)
    whole = tree(folder_of(name))
    path = folder_of(name) / ("train/shard_00000.bin" if name == "wikitext" else "val_tokens.bin")
    if damage == "missing":
        path.unlink()
    elif damage == "no folder":
        shutil.rmtree(folder_of(name))
    elif "meta" in damage:
        path = folder_of(name) / "meta.json"
        path.unlink() if damage == "no meta" else path.write_bytes(path.read_bytes()[:-30])
    else:
        path.write_bytes(path.read_bytes() + b"xx" if damage == "longer" else path.read_bytes()[:-2])
    assert made(name, everything).state == "built"
    assert tree(folder_of(name)) == whole


@pytest.mark.parametrize("name", ["wikitext", "dolly15k"])
def test_by_force(everything, name):
    made(name, everything)
    whole = tree(folder_of(name))
    path = next(path for path in folder_of(name).rglob("*.bin") if path.stat().st_size)
    path.write_bytes(bytes(path.stat().st_size))
    assert made(name, everything).state == "up to date"  # not looked into: that is what verify does
    assert made(name, everything, force=True).state == "built"
    assert tree(folder_of(name)) == whole


class Revised(RowHub):
    """A stream whose files tell the commit they are of."""

    revision = "a" * 40

    def load_dataset(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        name = f"hf://datasets/{args[0]}@{self.revision}/train.parquet"

        def generate(names):
            yield from self.rows

        return datasets.IterableDataset.from_generator(generate, gen_kwargs={"names": [name]})


def test_rows_of_the_hub_by_their_commit(monkeypatch):
    hub = Revised(as_rows(BOOKS)).install(monkeypatch)
    built = made("gutenberg")
    assert (built.state, built.meta["revision"]) == ("built", "a" * 40)
    assert "files" not in (built.meta["source"] or {})
    assert made("gutenberg").state == "up to date"
    hub.revision = "b" * 40
    again = made("gutenberg")
    assert (again.state, again.meta["revision"]) == ("built", "b" * 40)


def test_rows_of_the_hub_that_tell_no_commit_are_always_read_again(monkeypatch):
    hub = RowHub(as_rows(BOOKS)).install(monkeypatch)
    assert made("gutenberg").state == "built"
    hub.rows = as_rows(BOOKS[::-1])
    assert made("gutenberg").state == "built"
    assert stream_of(folder_of("gutenberg"), "val") == by_budget(BOOKS[::-1], train=600, val=100)["val"]


def test_a_build_that_fails_leaves_the_old_cache(everything):
    made("dolly15k", everything)
    made("roam", everything)
    before = tree(Path("cache"))
    write("data/databricks-dolly-15k/train.jsonl", "no json at all")
    write(".roam-data/z.md", b"\xff")
    for name in ("dolly15k", "roam"):
        with pytest.raises(ValueError):
            made(name, everything)
    shutil.rmtree("data/databricks-dolly-15k")
    with pytest.raises(DataUnavailable, match="databricks-dolly-15k"):
        made("dolly15k", everything)
    assert {name: data for name, data in tree(Path("cache")).items() if "/." not in name} == before


def test_what_is_left_out_before_the_builder_is_counted_too():
    """Notes that are blank, rows without an answer."""
    write_notes()
    write_rows("rows.jsonl", [*DOLLY[:6], {**DOLLY[6], "response": ""}])
    roam = made("roam", roam=Path("notes")).meta
    dolly = made("dolly15k", path=Path("rows.jsonl")).meta
    assert sum(roam["dropped"].values()) == 2
    assert sum(dolly["dropped"].values()) == 1


# --- the tokenizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["folder", "file"])
def test_installing_a_tokenizer(other_tokenizer, given):
    tokenizer, folder = other_tokenizer
    with pytest.raises(FileNotFoundError):
        open_tokenizer(Path("cache"))
    installed = install_tokenizer(folder if given == "folder" else folder / "spm.model", Path("cache"))
    assert installed.sha256 == tokenizer.sha256
    place = Path("cache/tokenizer")
    assert sorted(path.name for path in place.iterdir()) == ["meta.json", "spm.model"]
    assert (place / "spm.model").read_bytes() == (folder / "spm.model").read_bytes()
    meta = meta_of(place)
    assert meta["sha256"] == tokenizer.sha256 and meta["vocab_size"] == tokenizer.vocab_size
    assert meta == meta_of(folder)  # what it was trained on goes with it
    assert open_tokenizer(Path("cache")).sha256 == tokenizer.sha256


def test_a_bare_model_is_described(tmp_path):
    path = write("bare/some.model", real_tokenizer().model)
    write("bare/meta.json", '{"sha256": "of another", "seed": 7}')
    install_tokenizer(path, Path("cache"))
    meta = meta_of(Path("cache/tokenizer"))
    assert meta["sha256"] == real_tokenizer().sha256 and meta["vocab_size"] == real_tokenizer().vocab_size
    assert meta["special_token_ids"] == reference().special_token_ids()
    assert "seed" not in meta
    assert str(tmp_path) not in json.dumps(meta)


def test_the_same_tokenizer_again_is_fine_and_another_is_refused(other_tokenizer):
    tokenizer, folder = other_tokenizer
    install_tokenizer(folder, Path("cache"))
    before = tree(Path("cache"))
    assert install_tokenizer(folder / "spm.model", Path("cache")).sha256 == tokenizer.sha256
    path = write("bare/spm.model", real_tokenizer().model)
    with pytest.raises(ValueError, match="another tokenizer") as caught:
        install_tokenizer(path, Path("cache"))
    message = str(caught.value)
    assert tokenizer.sha256[:12] in message and real_tokenizer().sha256[:12] in message
    assert "cache" in message and str(path) in message
    assert tree(Path("cache")) == before


def test_no_tokenizer_to_install(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        install_tokenizer(Path("nowhere"), Path("cache"))
    with pytest.raises(ValueError, match=r"some\.model"):
        install_tokenizer(write("some.model", "no model"), Path("cache"))
    assert not Path("cache").exists()


@pytest.fixture
def few_pieces_are_fine():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the text has only")
        yield


def trained(data, *names, **changes):
    """(tokenizer, unreachable ones) of `train_on`."""
    unreachable = {}
    known = known_sources(data)
    options = {"vocab_size": 420, **changes}
    made_of = build_module.train_on(
        [known[n] for n in names], settings(**options), lambda s, err: unreachable.update({s.name: err})
    )
    return made_of, unreachable


def test_a_tokenizer_learns_from_the_training_texts(few_pieces_are_fine, everything, tmp_path):
    tokenizer, unreachable = trained(everything, "roam", "wikitext", "dolly15k", "mine", seed=4, roam_val_frac=0.3)
    assert unreachable == {}
    assert open_tokenizer(Path("cache")).sha256 == tokenizer.sha256
    paths = split_rule(sorted(str(path.absolute()) for path in Path(".roam-data").rglob("*.md")), 0.3, 4)["train"]
    texts = [text for text in (Path(path).read_bytes().decode() for path in paths) if text.strip()]
    texts += [line for line in LINES["train"] if line.strip()]
    texts += [message["content"] for row in DOLLY for message in dolly_example(row)]
    texts += split_rule([f"text {i}" for i in range(15)], 0.1, 4)["train"]
    wanted = Path(train_tokenizer(texts, tmp_path / "wanted", vocab_size=420, seed=4)).read_bytes()
    assert Path("cache/tokenizer/spm.model").read_bytes() == wanted
    assert meta_of(Path("cache/tokenizer"))["inputs"] == meta_of(tmp_path / "wanted")["inputs"]


def test_a_tokenizer_learns_from_so_many_documents_of_each(few_pieces_are_fine, everything):
    trained(everything, "roam", "wikitext", "dolly15k", tokenizer_documents=2)
    assert meta_of(Path("cache/tokenizer"))["inputs"]["texts"] == 6


def test_a_tokenizer_learns_from_what_can_be_read(few_pieces_are_fine, everything):
    shutil.rmtree("data/wikitext")
    write("data/oasst1/train.jsonl", "no json")
    _, unreachable = trained(everything, "wikitext", "roam", "oasst1", "dolly15k")
    assert sorted(unreachable) == ["oasst1", "wikitext"]
    assert "NIELS_GPT_DATA" in str(unreachable["wikitext"]) and "train.jsonl" in str(unreachable["oasst1"])
    assert meta_of(Path("cache/tokenizer"))["inputs"]["texts"] > 2 * len(DOLLY)


# --- placeholders ------------------------------------------------------------------------------------


def test_a_placeholder():
    source = known_sources()["gutenberg"]
    told = write_placeholder(source, settings(), "no Hub today")
    folder = folder_of("gutenberg")
    assert (told.name, told.state, told.folder, told.reason) == ("gutenberg", "not built", folder, "no Hub today")
    assert sorted(path.name for path in folder.iterdir()) == ["meta.json", "train", "val"]
    assert all(list((folder / split).iterdir()) == [] for split in SPLITS)
    meta = meta_of(folder)
    assert (meta["built"], meta["dataset_name"]) == (False, "gutenberg")
    assert isinstance(meta["reason"], str) and meta["reason"]
    assert write_placeholder(source, settings(), "still none").state == "not built"
    assert meta_of(folder)["built"] is False


def test_a_placeholder_gives_way_to_a_cache_but_not_the_other_way(everything):
    source = known_sources()["gutenberg"]
    write_placeholder(source, settings(), "no Hub today")
    assert made("gutenberg").state == "built"
    before = tree(Path("cache"))
    kept = write_placeholder(source, settings(), "no Hub today")
    assert (kept.state, kept.meta) == ("up to date", meta_of(folder_of("gutenberg")))
    assert tree(Path("cache")) == before


# --- settings ----------------------------------------------------------------------------------------


def test_the_constants_of_the_contract():
    chosen = BuildSettings(cache_dir=Path("cache"))
    assert dataclasses.asdict(chosen) | {
        "seed": 42,
        "shard_bytes": 128 * 2**20,
        "fineweb_config": "CC-MAIN-2024-10",
        "fineweb_train_tokens": 200_000_000,
        "fineweb_val_tokens": 5_000_000,
        "fineweb_streaming": True,
        "shuffle_buffer": 10_000,
        "val_frac": 0.10,
        "roam_val_frac": 0.10,
        "vocab_size": 16_000,
    } == dataclasses.asdict(chosen)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("roam", {"shard_bytes": 33}, "shard_bytes.*33"),
        ("roam", {"shard_bytes": 0}, "shard_bytes.*0"),
        ("roam", {"roam_val_frac": 1.5}, "val_frac.*1.5"),
        ("roam", {"roam": Path("nowhere")}, "nowhere"),
        ("roam", {"workers": 0}, "workers.*0"),
        ("primer", {"val_frac": -0.1}, "val_frac.*-0.1"),
        ("primer", {"primer": Path("nowhere")}, "nowhere"),
        ("gutenberg", {"gutenberg_train_tokens": -1}, "max_train_tokens.*-1"),
        ("gutenberg", {"gutenberg_train_tokens": 0}, "train would be empty"),
    ],
)
def test_settings_that_make_no_cache(everything, name, changes, said):
    with pytest.raises((ValueError, OSError), match=said):
        made(name, **changes)
    assert not any(path.is_file() for path in Path("cache").rglob("*"))


def test_notes_of_nothing():
    Path("empty").mkdir()
    with pytest.raises(ValueError, match="train would be empty"):
        made("roam", roam=Path("empty"))


def test_offsets_are_those_of_the_documents(everything):
    made("wikitext", everything)
    starts = np.load(folder_of("wikitext") / "train" / "documents.npy")
    lengths = [len(reference().encode(text.replace("\r\n", "\n"))) + 1 for text in LINES["train"] if text.strip()]
    assert starts.tolist() == [sum(lengths[:i]) for i in range(3)]
    with pytest.raises(CacheError):
        build_module.read_meta(Path("nowhere/meta.json"))
