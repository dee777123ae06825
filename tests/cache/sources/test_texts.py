import hashlib
import inspect
import itertools
import logging
from pathlib import Path

import datasets
import pytest

from niels_gpt.cache.sources.texts import Rereadable, SplitTexts, budgets_of, identity_of
from niels_gpt.data import embedded
from niels_gpt.data.registry import sources
from niels_gpt.data.roam import list_roam_paths, split_roam_paths
from tests.cache import SPLITS, check_sft, meta_of, split_rule, stream_of
from tests.cache.sources.inputs import (
    BOOKS,
    DIALOGUES,
    DOLLY,
    LINES,
    OASST1,
    PAGES,
    THREADS,
    as_rows,
    build_source,
    by_budget,
    documents_of,
    dolly_example,
    folder_of,
    messages,
    reference,
    settings,
    user_config,
    write,
    write_dialogues,
    write_notes,
    write_rows,
)
from tests.data import RowHub

# --- each source -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "val_frac"), [(42, 0.1), (0, 1.0)])
def test_notes_are_split_by_file(seed, val_frac):
    notes = write_notes()
    build_source("roam", roam=Path("notes"), seed=seed, roam_val_frac=val_frac, val_frac=0.5)
    paths = sorted(str(path.absolute()) for path in Path("notes").rglob("*.md"))
    assert len(paths) == len(notes) == 24
    wanted = split_rule(paths, val_frac, seed)
    assert (wanted["train"], wanted["val"]) == split_roam_paths(list_roam_paths("notes"), val_frac=val_frac, seed=seed)
    for split in SPLITS:
        texts = [Path(path).read_bytes().decode() for path in wanted[split]]
        texts = [text.replace("\r\n", "\n") for text in texts if text.strip()]
        assert documents_of(folder_of("roam"), split) == texts
    assert meta_of(folder_of("roam"))["train_documents"] + meta_of(folder_of("roam"))["val_documents"] == 22


def test_default_and_embedded_notes():
    build_source("roam", cache_dir="one", shard_bytes=1 << 20)
    shipped = sorted(embedded.NOTES.rglob("*.md"))
    assert len(documents_of(folder_of("roam", "one"), "val")) == len(shipped) // 10
    assert len(documents_of(folder_of("roam", "one"), "train")) == len(shipped) - len(shipped) // 10
    write(".roam-data/mine.md", "my note")
    build_source("roam", cache_dir="two")
    assert documents_of(folder_of("roam", "two"), "train") == ["my note"]
    build_source("roam", cache_dir="three", path=write("other/x.md", "another note").parent)
    assert documents_of(folder_of("roam", "three"), "train") == ["another note"]


def test_notes_that_are_not_utf8():
    write("notes/a.md", "a note")
    write("notes/b.md", b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=r"b\.md.*offset 3"):
        build_source("roam", roam=Path("notes"), roam_val_frac=0.0)
    assert not folder_of("roam").exists()
    build_source("roam", roam=Path("notes"), roam_val_frac=0.0, errors="replace")
    assert documents_of(folder_of("roam"), "train") == ["a note", "caf\ufffd au lait"]


def test_wikitext_splits(monkeypatch):
    for split, lines in LINES.items():
        write_rows(f"data/wikitext/{split}.jsonl", as_rows(lines))
    monkeypatch.setenv("NIELS_GPT_DATA", "data")
    build_source("wikitext")
    folder = folder_of("wikitext")
    assert documents_of(folder, "train") == ["= heading =", " a line of train with é ß and 日本", " another line\n"]
    assert documents_of(folder, "val") == [" a held-out line", "= more ="]


def test_wikitext_of_another_config(everything):
    build_source("wikitext", wikitext_config="wikitext-2-raw-v1")
    assert documents_of(folder_of("wikitext"), "val") == [" a held-out line", "= more =", "of the small one"]
    assert meta_of(folder_of("wikitext"))["dataset_config"] == "wikitext-2-raw-v1"


def test_wikitext_of_one_file_raises(monkeypatch):
    """A single file has no splits, whether it is an argument or in NIELS_GPT_DATA."""
    file = write_rows("data/rows.jsonl", as_rows(f"line {i}" for i in range(10)))
    with pytest.raises(ValueError, match=file.name):
        build_source("wikitext", path=file)
    monkeypatch.setenv("NIELS_GPT_DATA", str(write("places.yaml", "wikitext: data/rows.jsonl")))
    with pytest.raises(ValueError, match=file.name):
        build_source("wikitext")


@pytest.mark.parametrize(("train", "val"), [(37, 1), (10**9, 333)])
def test_books_are_split_by_budget(everything, train, val):
    build_source("gutenberg", gutenberg_train_tokens=train, gutenberg_val_tokens=val)
    wanted = by_budget(BOOKS, train=train, val=val)
    assert {split: stream_of(folder_of("gutenberg"), split) for split in SPLITS} == wanted
    meta = meta_of(folder_of("gutenberg"))
    assert (meta["max_train_tokens"], meta["max_val_tokens"]) == (train, val)
    assert (meta["train_tokens"], meta["val_tokens"]) == (len(wanted["train"]), len(wanted["val"]))


@pytest.mark.parametrize(("seed", "buffer"), [(42, 10_000), (5, 4), (5, 1)])
def test_pages_are_shuffled_by_datasets(everything, seed, buffer):
    build_source("fineweb_edu", seed=seed, shuffle_buffer=buffer)
    rows = datasets.load_dataset("json", data_files="data/fineweb-edu/train.jsonl", split="train", streaming=True)
    # `datasets` 5 fills the buffer differently by default; see tests/data/test_hub.py.
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


def test_pages_without_streaming(everything):
    build_source("fineweb_edu", fineweb_streaming=False, fineweb_train_tokens=10**6, fineweb_val_tokens=0)
    assert meta_of(folder_of("fineweb_edu"))["streaming"] is False
    found = documents_of(folder_of("fineweb_edu"), "train")
    assert sorted(found) == sorted(PAGES) and found != PAGES


class Endless:
    """An infinite number of rows."""

    def __iter__(self):
        return ({"text": f"page {i}"} for i in itertools.count())


def test_options_of_the_hub_request(monkeypatch):
    hub = RowHub(Endless()).install(monkeypatch)
    build_source("fineweb_edu", fineweb_id="me/pages", fineweb_config="sample", shuffle_buffer=17, seed=3)
    for args, kwargs in hub.calls:
        assert args == ("me/pages", "sample")
        assert kwargs == {"split": "train", "streaming": True}
    (shuffle,) = hub.shuffles
    assert (shuffle["seed"], shuffle["buffer_size"]) == (3, 17)
    assert hub.pulled < 10_000  # some rows are read ahead
    meta = meta_of(folder_of("fineweb_edu"))
    assert (meta["dataset_config"], meta["streaming"], meta["revision"]) == ("sample", True, None)
    assert (meta["train_tokens"], meta["val_tokens"]) == (400, 50)


def test_hub_request_of_books(monkeypatch):
    hub = RowHub(as_rows(BOOKS)).install(monkeypatch)
    build_source("gutenberg")
    assert {args for args, _ in hub.calls} == {("nikolina-p/gutenberg_clean_en_splits",)}
    assert hub.shuffles == []
    assert stream_of(folder_of("gutenberg"), "val") == by_budget(BOOKS, train=600, val=100)["val"]


def test_dolly(everything):
    build_source("dolly15k", seed=8, val_frac=0.5, roam_val_frac=0.9)
    kept = [dolly_example(row) for row in DOLLY]
    check_sft(folder_of("dolly15k"), kept, tokenizer=reference(), val_frac=0.5, seed=8)
    meta = meta_of(folder_of("dolly15k"))
    assert (meta["train_examples"], meta["val_examples"]) == (12, 11)


def test_oasst1(everything):
    build_source("oasst1", val_frac=0.34)
    by_id = {row["message_id"]: row for row in OASST1}
    roles = {"prompter": "user", "assistant": "assistant"}
    kept = [messages([(roles[by_id[i]["role"]], by_id[i]["text"]) for i in thread]) for thread in THREADS]
    check_sft(folder_of("oasst1"), kept, tokenizer=reference(), val_frac=0.34, seed=42)
    assert meta_of(folder_of("oasst1"))["train_examples"] == 2


def test_primer():
    build_source("primer", primer=write_dialogues())
    kept = [messages(turns) for turns in DIALOGUES]
    check_sft(folder_of("primer"), kept, tokenizer=reference(), val_frac=0.1, seed=42)
    assert meta_of(folder_of("primer"))["val_examples"] == 1


def test_embedded_primer():
    build_source("primer")
    blocks = [block for block in embedded.PRIMER.read_text("utf-8").split("\n\n<dialogue>\n\n") if block.strip()]
    meta = meta_of(folder_of("primer"))
    assert len(blocks) > 500
    assert (meta["train_examples"], meta["val_examples"]) == (len(blocks) - len(blocks) // 10, len(blocks) // 10)


# --- user sources ------------------------------------------------------------------------------------


def test_folder_of_texts():
    texts = {f"poems/{'ab'[i % 2]}/{i}.{'txt' if i % 3 else 'md'}": f"poem {i} of a small model" for i in range(20)}
    for name, text in {**texts, "poems/z.txt": " \n"}.items():
        write(name, text)
    build_source("poems", user_config(poems={"path": "poems"}), seed=9, val_frac=0.3, roam_val_frac=0.9)
    in_order = [texts[name] for name in sorted(texts)]
    wanted = split_rule(in_order, 0.3, 9)
    assert len(wanted["val"]) == 6
    for split in SPLITS:
        assert documents_of(folder_of("poems"), split) == wanted[split]


@pytest.mark.parametrize(("field", "value"), [("", "text"), ("title", "a title of")])
def test_rows_of_text(everything, field, value):
    build_source("rows", user_config(rows={"path": "mine", "field": field}), val_frac=0.2)
    wanted = split_rule([f"{value} {i}" for i in range(15)], 0.2, 42)
    assert len(wanted["val"]) == 3
    for split in SPLITS:
        assert documents_of(folder_of("rows"), split) == wanted[split]


def test_rows_of_chat():
    rows = [{"messages": messages(turns)} for turns in DIALOGUES]
    rows.insert(3, {"messages": []})
    write_rows("rows.jsonl", rows)
    build_source("chats", user_config(chats={"path": "rows.jsonl"}), val_frac=0.25, seed=6)
    kept = [row["messages"] for row in rows if row["messages"]]
    check_sft(folder_of("chats"), kept, tokenizer=reference(), val_frac=0.25, seed=6)


def test_python_docstrings(monkeypatch):
    files = embedded.stdlib_files()[:12]  # reading all of them takes seconds
    monkeypatch.setattr(embedded, "stdlib_files", lambda: files)
    texts = [text for _, text in embedded.iter_stdlib()]
    build_source("stdlib", val_frac=0.2, shard_bytes=1 << 20)
    wanted = split_rule(texts, 0.2, 42)
    for split in SPLITS:
        assert documents_of(folder_of("stdlib"), split) == wanted[split]


def test_items_dropped_by_the_loader_are_counted():
    """Blank notes, rows without a response."""
    write_notes()
    write_rows("rows.jsonl", [*DOLLY[:6], {**DOLLY[6], "response": ""}])
    roam = build_source("roam", roam=Path("notes")).meta
    dolly = build_source("dolly15k", path=Path("rows.jsonl")).meta
    assert sum(roam["dropped"].values()) == 2
    assert sum(dolly["dropped"].values()) == 1


# --- Rereadable --------------------------------------------------------------------------------------


def test_count_reads_once_without_logging(caplog):
    opened = []

    def read(dropped):
        opened.append(1)
        dropped["empty"] = 2
        logging.getLogger("niels_gpt.data").warning("dropped")
        yield from "abc"

    items = Rereadable(read)
    assert (items.count(), items.count(), len(opened), caplog.records) == (3, 3, 1, [])
    assert list(items) == ["a", "b", "c"]
    assert items.dropped == {"empty": 2} and [r.getMessage() for r in caplog.records] == ["dropped"]


@pytest.mark.parametrize("number", [0, 5])
def test_known_number_is_not_counted(number):
    def read(dropped):
        raise AssertionError("it was read")

    assert Rereadable(read, number).count() == number


def test_dropped_items_are_counted_once_for_splits_of_the_same_rows():
    def read(dropped):
        dropped["empty"] = dropped.get("empty", 0) + 1
        yield "a"

    rows, other = Rereadable(read), Rereadable(read)
    list(rows), list(other)
    shared = Rereadable(read)
    shared.dropped = rows.dropped
    assert SplitTexts(rows, shared).dropped() == {"empty": 1}
    assert SplitTexts(rows, other).dropped() == {"empty": 2}
    assert SplitTexts(rows).dropped() == {"empty": 1}


# --- identity ----------------------------------------------------------------------------------------


def test_identity_of_sources(everything):
    known = sources(everything)

    def identity(name, **changes):
        return identity_of(known[name], settings(**changes))

    assert set(identity("wikitext")) == {"files", "sha256"}
    assert identity("wikitext", test=True)["test"] is True
    assert identity("roam", roam_val_frac=0.3)["val_frac"] == 0.3
    assert identity("roam")["files"] == 24
    assert identity("mine", val_frac=0.4)["val_frac"] == 0.4
    assert "val_frac" not in identity("chats") and "val_frac" not in identity("wikitext")
    assert identity("roam", errors="replace")["encoding_errors"] == "replace"
    assert "encoding_errors" not in identity("roam", errors="strict")
    assert "encoding_errors" not in identity("wikitext", errors="replace")
    web = identity("fineweb_edu", shuffle_buffer=9)
    assert (web["dataset_id"], web["source_buffer"], web["files"]) == ("HuggingFaceFW/fineweb-edu", 9, 1)
    digest = hashlib.sha256(Path("data/fineweb-edu/train.jsonl").read_bytes()).hexdigest()
    assert web["sha256"] == hashlib.sha256(f"train.jsonl\0{digest}\n".encode()).hexdigest()


def test_budgets_of_sources():
    known = sources(None)
    chosen = settings(fineweb_train_tokens=1, fineweb_val_tokens=2, gutenberg_train_tokens=3, gutenberg_val_tokens=4)
    assert budgets_of(known["fineweb_edu"], chosen) == {"max_train_tokens": 1, "max_val_tokens": 2}
    assert budgets_of(known["gutenberg"], chosen) == {"max_train_tokens": 3, "max_val_tokens": 4}
    assert budgets_of(known["roam"], chosen) == {"max_train_tokens": 1 << 62, "max_val_tokens": 1 << 62}


def test_settings_are_checked():
    for changes, named in (
        ({"errors": "ignore"}, "--encoding-errors.*'ignore'"),
        ({"seed": -1}, "seed.*-1"),
        ({"shard_bytes": 3}, "shard_bytes.*3"),
        ({"val_frac": 1.1}, "^val_frac.*1.1"),
        ({"roam_val_frac": -1}, "roam_val_frac.*-1"),
    ):
        with pytest.raises(ValueError, match=named):
            settings(**changes)
    assert settings(errors="strict").errors is None
    assert settings(roam=Path("a"), primer=Path("b")).path_of("primer") == Path("b")
    assert settings(roam=Path("a"), path=Path("c")).path_of("roam") == Path("c")
    assert settings(roam=Path("a")).path_of("wikitext") is None
