import errno
import hashlib
import json
import os
import re
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt import streams
from niels_gpt.config import ModelConfig, NotesConfig
from niels_gpt.streams import (
    StreamBuildConfig,
    build_primer_stream,
    build_primer_streams,
    build_roam_stream,
    build_roam_streams,
    build_sources,
    build_wiki_stream,
    build_wiki_streams,
    load_streams,
)
from tests.cache import split_rule
from tests.faults import flipped, killed_at

SOURCES = ("wiki", "roam", "primer")
SPLITS = ("train", "val")
DELIMITER = "\n\n<dialogue>\n\n"
T = 16
OLD = 1_000_000_000_000_000_000  # mtime_ns of unchanged files


class World:
    """Notes, a primer and a Hub, and their expected streams, from the bytes on disk."""

    def __init__(self, folder, hub):
        self.hub, self.folder = hub, folder
        self.notes, self.primer, self.cache = folder / "notes", folder / "primer.txt", folder / "cache"
        self.notes.mkdir()
        (self.notes / "sub").mkdir()
        for i in range(20):
            name = f"sub/{i}.md" if i % 3 == 0 else f"{i}.md"
            (self.notes / name).write_bytes(f"\ufeff# note {i}\r\n".encode() + b"text \xc3\xa9 " * (2 + i))
        blocks = [f"user: question {i}?\nassistant: niels is {i}." for i in range(20)]
        self.primer.write_bytes((DELIMITER.join([*blocks, "", " \n"]) + "\n").encode())
        hub.rows = {
            "train": ["", *(f" = row {i} = é\n" for i in range(30)), " \n"],
            "validation": [f"held-out row {i}" for i in range(5)],
            "test": ["never used"],
        }

    def cfg(self, **changes):
        given_paths = {"roam_root": str(self.notes), "primer_path": str(self.primer), "cache_dir": str(self.cache)}
        return StreamBuildConfig(**{**given_paths, **changes})

    def build(self, **changes):
        return build_sources(self.cfg(**changes), T=T)

    def expected(self, **changes):
        """{source: {split: bytes}}"""
        cfg = self.cfg(**changes)
        sep = cfg.doc_separator.encode("utf-8")
        notes = sorted(str(path) for path in Path(cfg.roam_root).rglob("*.md"))
        notes = split_rule(notes, cfg.roam_val_frac, cfg.seed)
        blocks = Path(cfg.primer_path).read_bytes().decode("utf-8").split(cfg.delimiter)
        blocks = split_rule([block for block in blocks if block.strip()], cfg.primer_val_frac, cfg.seed)
        rows = {ours: self.hub.rows[theirs] for ours, theirs in (("train", "train"), ("val", "validation"))}
        return {
            "wiki": {s: sep.join(row.encode("utf-8") for row in rows[s] if row.strip()) for s in SPLITS},
            "roam": {s: sep.join(Path(path).read_bytes() for path in notes[s]) for s in SPLITS},
            "primer": {s: cfg.delimiter.join(blocks[s]).encode("utf-8") for s in SPLITS},
        }

    def assert_built(self, found, sources=SOURCES, **changes):
        """Check the returned streams and the cache entries."""
        expected = self.expected(**changes)
        train, val = found
        assert train == {source: expected[source]["train"] for source in sources}
        assert val == {source: expected[source]["val"] for source in sources}
        for source in sources:
            for split in SPLITS:
                data, meta = self.entry(source, split)
                assert data == expected[source][split]
                assert meta["sha256"] == hashlib.sha256(data).hexdigest()

    def entry(self, source, split):
        meta = json.loads((self.cache / f"{source}_{split}.meta.json").read_text(encoding="utf-8"))
        return (self.cache / f"{source}_{split}.bin").read_bytes(), meta

    def age_cache(self):
        for path in self.cache.iterdir():
            os.utime(path, ns=(OLD, OLD))

    def rewritten(self):
        """The entries (source_split) whose metadata was written since `age_cache`."""
        metas = self.cache.glob("*.meta.json")
        return {path.name.removesuffix(".meta.json") for path in metas if path.stat().st_mtime_ns != OLD}


ALL = {f"{source}_{split}" for source in SOURCES for split in SPLITS}


@pytest.fixture
def world(tmp_path, hub):
    return World(tmp_path, hub)


@pytest.fixture
def built(world):
    world.assert_built(world.build())
    world.age_cache()
    return world


# --- stream functions --------------------------------------------------------------------------------

DOCS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=6)


@given(DOCS, st.sampled_from(["\n\n", "", " é ", "\x00"]))
def test_documents_are_joined_with_the_separator(docs, sep):
    wanted = b""
    for number, doc in enumerate(docs):
        wanted += (sep.encode("utf-8") if number else b"") + doc.encode("utf-8")
    assert build_wiki_stream(docs, sep=sep) == wanted
    assert build_roam_stream(docs, sep=sep) == wanted


def test_primer_is_unchanged():
    text = "\ufeff user: é\r\nassistant: b \n\n<dialogue>\n\n\n"
    assert build_primer_stream(text) == text.encode("utf-8")
    assert build_primer_streams(text, "") == (text.encode("utf-8"), b"")


def test_pairs_of_streams():
    for build in (build_wiki_streams, build_roam_streams):
        assert build(["a", "é"], ["b", "c", "d"]) == ("a\n\né".encode(), b"b\n\nc\n\nd")


def test_defaults():
    cfg = StreamBuildConfig()
    assert (cfg.roam_root, cfg.primer_path, cfg.cache_dir) == (".roam-data/", "data/primer.txt", "data/cache/streams")
    assert (cfg.doc_separator, cfg.delimiter) == ("\n\n", DELIMITER)
    assert (cfg.roam_val_frac, cfg.primer_val_frac, cfg.seed, cfg.force_rebuild) == (0.10, 0.10, 42, False)
    assert cfg.enabled_sources == cfg.required_sources == SOURCES


# --- building ----------------------------------------------------------------------------------------


def test_cache_contains_only_entries_and_locks(world):
    for changes in ({}, {"seed": 1}, {}, {"force_rebuild": True}):
        world.build(**changes)
        names = {path.name for path in world.cache.iterdir() if path.suffix != ".lock"}
        assert names == {f"{entry}.{kind}" for entry in ALL for kind in ("bin", "meta.json")}


def test_metadata_has_the_fields_of_the_spec(world):
    world.build()
    splits = split_rule(sorted(str(path) for path in world.notes.rglob("*.md")), 0.1, 42)
    for split in SPLITS:
        kept = [row for row in world.hub.rows["train" if split == "train" else "validation"] if row.strip()]
        _, wiki = world.entry("wiki", split)
        assert (wiki["source"], wiki["split"], wiki["sep"]) == ("wiki", split, "\n\n")
        assert (wiki["n_docs"], wiki["total_chars"]) == (len(kept), sum(map(len, kept)))

        _, roam = world.entry("roam", split)
        stats = [(path, Path(path).stat()) for path in splits[split]]
        wanted = [{"path": path, "mtime_ns": status.st_mtime_ns, "size": status.st_size} for path, status in stats]
        assert wanted in roam.values()
        assert (roam["sep"], roam["seed"], roam["val_frac"]) == ("\n\n", 42, 0.1)

        _, primer = world.entry("primer", split)
        status = world.primer.stat()
        assert (primer["path"], primer["mtime_ns"]) == (str(world.primer), status.st_mtime_ns)
        assert (primer["size"], primer["delimiter"], primer["split"]) == (status.st_size, DELIMITER, split)
        assert (primer["seed"], primer["val_frac"]) == (42, 0.1)
        for source in SOURCES:
            data, meta = world.entry(source, split)
            assert len(data) in meta.values()
            assert hashlib.sha256(data).hexdigest() in meta.values()


# --- cache -------------------------------------------------------------------------------------------


def test_second_build_reads_the_cache(built, monkeypatch):
    files = sorted(path for path in built.cache.iterdir() if path.suffix != ".lock")
    before = [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in files]
    built.assert_built(built.build())
    assert [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in files] == before
    assert all(stream.cached for splits in load_streams(built.cfg(), T=T).values() for stream in splits.values())
    wanted = built.build()
    for name in ("load_texts", "load_primer_text"):
        monkeypatch.setattr(streams, name, lambda *args, **kwargs: pytest.fail("read although the cache is valid"))
    assert built.build() == wanted


def test_force_rebuild(built):
    built.assert_built(built.build(force_rebuild=True))
    assert built.rewritten() == ALL


def edit_note_keeping_its_size(world):
    path = world.notes / "1.md"
    path.write_bytes(path.read_bytes().replace(b"text", b"TEXT"))
    os.utime(path, ns=(OLD + 1, OLD + 1))


def edit_note_keeping_its_mtime(world):
    path = world.notes / "1.md"
    status = path.stat()
    path.write_bytes(path.read_bytes() + b"more")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def add_note(world):
    (world.notes / "new.md").write_bytes(b"a new note")


def edit_primer_keeping_its_size(world):
    world.primer.write_bytes(world.primer.read_bytes().replace(b"niels is", b"NIELS IS"))
    os.utime(world.primer, ns=(OLD + 1, OLD + 1))


def edit_primer_keeping_its_mtime(world):
    status = world.primer.stat()
    world.primer.write_bytes(world.primer.read_bytes().replace(b"niels is", b"niels was"))
    os.utime(world.primer, ns=(status.st_atime_ns, status.st_mtime_ns))


def add_rows(world):
    world.hub.rows["train"].append("a new row")
    world.hub.rows["validation"].append("a new row")


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (edit_note_keeping_its_size, {"roam_train"}),
        (edit_note_keeping_its_mtime, {"roam_train"}),
        (add_note, {"roam_train", "roam_val"}),
        (edit_primer_keeping_its_size, {"primer_train", "primer_val"}),
        (edit_primer_keeping_its_mtime, {"primer_train", "primer_val"}),
        (add_rows, {"wiki_train", "wiki_val"}),
    ],
)
def test_changed_inputs_rebuild(built, change, wanted):
    change(built)
    built.assert_built(built.build())
    assert built.rewritten() == wanted  # the others are cached
    built.age_cache()
    built.assert_built(built.build())
    assert built.rewritten() == set()


@pytest.mark.parametrize(
    ("changes", "sources"),
    [
        ({"seed": 43}, ["roam", "primer"]),
        ({"roam_val_frac": 0.12}, ["roam"]),  # n_val is 2 in both cases, but val_frac differs
        ({"primer_val_frac": 0.12}, ["primer"]),
        ({"doc_separator": " é "}, ["wiki", "roam"]),
        ({"delimiter": "?\n"}, ["primer"]),
    ],
    ids=str,
)
def test_changed_settings_rebuild(built, changes, sources):
    built.assert_built(built.build(**changes), **changes)
    assert built.rewritten() == {f"{source}_{split}" for source in sources for split in SPLITS}
    built.age_cache()
    built.assert_built(built.build())  # and back
    assert built.rewritten() == {f"{source}_{split}" for source in sources for split in SPLITS}


def test_changed_paths_rebuild(built, tmp_path):
    other = tmp_path / "other.txt"
    other.write_bytes(built.primer.read_bytes())
    status = built.primer.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    built.build(primer_path=str(other))
    assert built.rewritten() == {"primer_train", "primer_val"}
    moved = tmp_path / "moved"
    built.notes.rename(moved)
    built.assert_built(built.build(roam_root=str(moved)), roam_root=str(moved))


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def without_hash(path):
    meta = json.loads(path.read_text(encoding="utf-8"))
    del meta["sha256"]
    path.write_text(json.dumps(meta), encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        *(("bin", damage) for damage in (cut, flip, Path.unlink)),
        *(("meta.json", damage) for damage in (without_hash, lambda path: path.write_text("[1]"))),
        ("meta.json", lambda path: path.write_text("[" * 200_000)),
    ],
)
def test_damaged_entry_rebuilds(built, kind, damage):
    for entries in ({"wiki_train", "roam_val", "primer_train"}, {"wiki_val", "roam_train", "primer_val"}):
        for path in (built.cache / f"{entry}.{kind}" for entry in entries):
            damage(path)
            if path.exists():
                os.utime(path, ns=(OLD, OLD))  # readers must not trust the time
        built.assert_built(built.build())
        assert built.rewritten() == entries
        built.age_cache()


def test_entry_of_another_split_is_not_used(built):
    for kind in ("bin", "meta.json"):
        (built.cache / f"primer_train.{kind}").replace(built.cache / f"primer_val.{kind}")
    built.assert_built(built.build())


def test_crash_at_any_write_never_leaves_a_wrong_entry(built, monkeypatch):
    replace, calls = os.replace, []

    def fail_at(moment, failure):
        def counted(source, target):
            calls.append(target)
            if len(calls) > moment:
                raise failure
            replace(source, target)

        return counted

    seed = 42
    for moment in range(12):  # 6 * 2 files
        calls.clear()
        failure = OSError(errno.EIO, "Input/output error") if moment % 3 else KeyboardInterrupt()
        old, seed = seed, seed + 1
        before = {path.name: path.read_bytes() for path in built.cache.glob("*.bin")}
        add_rows(built)
        new = {f"{s}_{split}.bin": data for s, v in built.expected(seed=seed).items() for split, data in v.items()}
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail_at(moment, failure))
            with pytest.raises(type(failure)):
                built.build(force_rebuild=True, seed=seed)
        assert len(calls) == moment + 1
        for path in built.cache.glob("*.bin"):
            assert path.read_bytes() in (before[path.name], new[path.name])
        assert not list(built.cache.glob(".*.tmp"))
        if moment % 2:  # the next build has the old inputs
            seed = old
        built.assert_built(built.build(seed=seed), seed=seed)


# --- unwritable cache --------------------------------------------------------------------------------


def read_only(monkeypatch, folder, number):
    """Make the folder read-only."""
    real_open, real_mkdir = Path.open, Path.mkdir

    def refuse(path):
        if folder in (path, *path.parents):
            raise OSError(number, os.strerror(number), str(path))

    def open_(self, mode="r", *args, **kwargs):
        if set(mode) & set("wax+"):
            refuse(self)
        return real_open(self, mode, *args, **kwargs)

    def mkdir(self, *args, **kwargs):
        if not self.exists():
            refuse(self)
        return real_mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_)
    monkeypatch.setattr(Path, "mkdir", mkdir)


@pytest.mark.parametrize(("number", "locked_before"), [(errno.EACCES, True), (errno.EROFS, False)])
def test_read_only_cache_is_read(built, monkeypatch, number, locked_before):
    if not locked_before:
        (built.cache / "build.lock").unlink()
    wanted = built.build()
    with monkeypatch.context() as patch:
        read_only(patch, built.cache, number)
        assert built.build() == wanted
    assert built.rewritten() == set()


def test_invalid_entry_of_a_read_only_cache_is_named(built, monkeypatch):
    (built.cache / "primer_val.bin").write_bytes(b"damaged")
    read_only(monkeypatch, built.cache, errno.EROFS)
    with pytest.raises(OSError, match=r"cannot write .*primer_val\.bin") as caught:
        built.build(required_sources=())
    assert caught.value.errno == errno.EROFS


def test_cache_that_cannot_be_created_is_named_before_any_download(world, monkeypatch):
    read_only(monkeypatch, world.cache, errno.EACCES)
    with pytest.raises(PermissionError, match=f"cannot write {re.escape(str(world.cache))}"):
        world.build()
    assert world.hub.calls == []


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_cache_dir_is_a_file(world, name):
    (world.folder / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(OSError, match=r"cannot write .*choose another") as caught:
        world.build(cache_dir=str(world.folder / name))
    assert str(world.folder / name) in str(caught.value)
    assert world.hub.calls == []


@pytest.mark.parametrize(("name", "required"), [("primer_val.meta.json", SOURCES), ("roam_train.bin", ())])
def test_folder_instead_of_an_entry_is_named(built, name, required):
    """The source is not missing, so it is not skipped."""
    (built.cache / name).unlink()
    (built.cache / name).mkdir()
    with pytest.raises(OSError, match=f"cannot write .*{re.escape(name)}: .*choose another"):
        built.build(required_sources=required)


# --- required and optional ---------------------------------------------------------------------------


def no_hub(world):
    world.hub.error = ConnectionError("no route")
    return {}


def short_rows(world):
    world.hub.rows = {"train": ["enough text for sixteen bytes"], "validation": ["x"], "test": []}
    return {}


def empty_folder(world):
    (world.folder / "empty").mkdir()
    return {"roam_root": str(world.folder / "empty")}


def one_note(world):
    (world.folder / "one").mkdir()
    (world.folder / "one" / "note.md").write_text("long enough, but nothing is left to hold out", encoding="utf-8")
    return {"roam_root": str(world.folder / "one")}


def empty_primer(world):
    world.primer.write_bytes(b" \n")
    return {}


def short_primer(world):
    world.primer.write_text(f"a{DELIMITER}b", encoding="utf-8")
    return {}


BROKEN = [
    ("wiki", no_hub),
    ("wiki", lambda world: {"wiki": str(world.folder / "nowhere")}),
    ("wiki", short_rows),
    ("roam", lambda world: {"roam_root": str(world.folder / "nowhere")}),
    ("roam", empty_folder),
    ("roam", one_note),
    ("primer", lambda world: {"primer_path": str(world.folder / "nowhere.txt")}),
    ("primer", lambda world: {"primer_path": str(world.notes)}),
    ("primer", empty_primer),
    ("primer", short_primer),
]


def test_complete_build_does_not_warn(world, recwarn):
    world.build(required_sources=())
    assert recwarn.list == []


@pytest.mark.parametrize(("source", "damage"), BROKEN)
def test_missing_source_raises_if_required_and_else_warns(world, source, damage):
    changes = damage(world)
    with pytest.raises(ValueError, match=rf"\b{source}") as caught:
        world.build(**changes)
    message = str(caught.value)
    assert all("nowhere" not in str(value) or str(value) in message for value in changes.values())
    rest = tuple(other for other in SOURCES if other != source)
    assert not [other for other in rest if re.search(rf"\b{other}(/|:)", message)]
    with pytest.warns(UserWarning, match=rf"\b{source}"):
        train, val = world.build(**changes, required_sources=rest)
    assert tuple(train) == tuple(val) == rest


def test_all_problems_are_reported_at_once(world):
    short_primer(world)
    short_rows(world)
    with pytest.raises(ValueError) as caught:
        world.build(roam_root=str(world.folder / "nowhere"))
    for part in ("wiki", "roam", "nowhere", "primer"):
        assert part in str(caught.value)


def test_disabled_source_is_not_read(world):
    world.hub.error = AssertionError("asked the Hub")
    changes = {"roam_root": str(world.folder / "nowhere"), "enabled_sources": ("primer",)}
    found = world.build(**changes, required_sources=("primer",))
    expected = world.expected()["primer"]
    assert found == ({"primer": expected["train"]}, {"primer": expected["val"]})
    assert {path.name.split("_")[0] for path in world.cache.iterdir() if path.suffix != ".lock"} == {"primer"}
    assert world.hub.calls == []


def test_required_sources_must_be_enabled(world):
    with pytest.raises(ValueError, match=r"required_sources.*roam"):
        world.build(enabled_sources=("wiki", "primer"))
    with pytest.raises(ValueError, match=r"books.*wiki, roam, primer"):
        world.build(enabled_sources=(*SOURCES, "books"))
    with pytest.raises(ValueError, match="books"):
        world.build(required_sources=("books",))
    assert world.hub.calls == []


# --- minimum length ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "split"), [("wiki", "train"), ("roam", "val"), ("primer", "train")])
def test_stream_needs_t_plus_1_bytes(world, source, split):
    lengths = {key: len(data) for key, data in world.expected()[source].items()}
    only = {"enabled_sources": (source,), "required_sources": (source,)}
    assert lengths["val"] < lengths["train"]
    fits = build_sources(world.cfg(**only), T=lengths["val"] - 1)
    assert len(fits[1][source]) == lengths["val"]
    with pytest.raises(ValueError) as caught:
        build_sources(world.cfg(**only), T=lengths[split])
    message = str(caught.value)
    for key in SPLITS if split == "train" else ("val",):
        assert re.search(rf"\b{source}\W+{key}\b[^;]*\b{lengths[key]}\b", message)
    assert str(lengths[split] + 1) in message
    assert (f"{source}/train" in message) == (split == "train")


def test_default_T_is_that_of_the_model(world):
    lengths = {source: len(data["val"]) for source, data in world.expected().items()}
    assert max(lengths["wiki"], lengths["primer"]) < ModelConfig().T + 1 == 257
    with pytest.raises(ValueError) as caught:
        build_sources(world.cfg())
    for source in ("wiki", "primer"):
        assert re.search(rf"\b{source}\W+val\b[^;]*\b{lengths[source]}\b[^;]*\b257\b", str(caught.value))


# --- wiki from a folder ------------------------------------------------------------------------------


def write_rows(folder, train, validation):
    folder.mkdir(exist_ok=True)
    for split, rows in (("train", train), ("validation", validation)):
        text = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")


def test_wiki_from_a_local_folder(world):
    folder = world.folder / "wikitext"
    write_rows(folder, ["", "first row é \n", "second row"], ["held-out row of text", " "])
    train, val = world.build(wiki=str(folder))
    assert train["wiki"] == "first row é \n\n\nsecond row".encode()
    assert val["wiki"] == b"held-out row of text"
    assert world.hub.calls == []
    world.age_cache()
    assert world.build(wiki=str(folder)) == (train, val)
    assert world.rewritten() == set()
    write_rows(folder, ["", "FIRST row é \n", "second row"], ["HELD-out row of text", " "])  # the same counts
    for path in folder.iterdir():
        os.utime(path, ns=(OLD + 1, OLD + 1))
    train, val = world.build(wiki=str(folder))
    assert train["wiki"] == "FIRST row é \n\n\nsecond row".encode()
    assert val["wiki"] == b"HELD-out row of text"


# --- decoding ----------------------------------------------------------------------------------------


def test_note_that_is_not_utf8_is_named_with_its_offset(world):
    (world.notes / "bad note.md").write_bytes("é".encode() * 4 + b"\xe9!")
    for changes in ({}, {"required_sources": ("wiki", "primer")}):
        with pytest.raises(ValueError, match=r"bad note\.md.*\b8\b"):
            world.build(**changes)
    train, val = world.build(encoding_errors="replace")
    assert ("é" * 4 + "\ufffd!").encode() in train["roam"] + val["roam"]
    with pytest.raises(ValueError, match=r"bad note\.md"):  # "strict" does not use the entry of "replace"
        world.build()


# --- provenance --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True])
def test_every_byte_is_located_in_its_document(world, cached):
    if cached:
        world.build()
    found = load_streams(world.cfg(), T=T)
    expected = world.expected()
    blocks = [b for b in world.primer.read_bytes().decode("utf-8").split(DELIMITER) if b.strip()]
    for split in SPLITS:
        for source, stream in ((source, found[source][split]) for source in SOURCES):
            assert stream.data == expected[source][split]
            assert stream.cached == cached
            assert stream.sha256 == hashlib.sha256(stream.data).hexdigest()
            seen = {}
            for offset in range(len(stream.data)):
                name, within = stream.locate(offset)
                assert within == seen.get(name, -1) + 1  # each document from its first byte on, once
                seen[name] = within
                if source == "roam":
                    text = Path(name).read_bytes() + b"\n\n"
                elif source == "primer":
                    text = (blocks[int(name.removeprefix("dialogue "))] + DELIMITER).encode()
                else:
                    rows = [r for r in world.hub.rows["train" if split == "train" else "validation"] if r.strip()]
                    text = (rows[int(name.removeprefix("row "))] + "\n\n").encode()
                assert text[within] == stream.data[offset]


@pytest.mark.parametrize(
    "documents",
    [
        {"names": None, "starts": []},
        {"names": ["a"], "starts": [0, 1]},
        {"names": None, "starts": [3, 1]},
        {"names": None, "starts": [0, 10**9]},
        {"names": None, "starts": ["0"]},
    ],
)
def test_damaged_document_list_rebuilds(built, documents):
    path = built.cache / "roam_train.meta.json"
    meta = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**meta, "documents": documents}), encoding="utf-8")
    os.utime(path, ns=(OLD, OLD))
    built.assert_built(built.build())
    assert built.rewritten() == {"roam_train"}
    assert built.entry("roam", "train")[1] == meta


def test_load_wikitext_is_called_without_arguments(world, monkeypatch):
    monkeypatch.setattr(
        streams, "load_wikitext", lambda: {"train": ["one row of the text"], "val": ["another row of it"]}
    )
    train, _ = world.build(enabled_sources=("wiki",), required_sources=("wiki",))
    assert train == {"wiki": b"one row of the text"}


# --- embedded text -----------------------------------------------------------------------------------


def test_embedded_sources_need_no_network_and_are_read_once(tmp_path, hub, monkeypatch):
    hub.error = AssertionError("asked the Hub")
    some = streams.embedded.stdlib_files()[:80]  # parsing all 400 modules takes seconds
    monkeypatch.setattr(streams.embedded, "stdlib_files", lambda: some)
    cfg = StreamBuildConfig(wiki="embedded", roam_root="embedded", primer_path="embedded", cache_dir=str(tmp_path))
    first = load_streams(cfg)
    assert set(first) == set(SOURCES)
    for source in SOURCES:
        names = [set(first[source][split].names) for split in SPLITS]
        assert names[0]
        assert names[1]
        assert not names[0] & names[1]
        assert all(len(first[source][split].data) > 2000 for split in SPLITS)
    assert first["wiki"]["train"].data.count(b"\n") > 1000
    monkeypatch.setattr(streams.embedded, "iter_stdlib", lambda: pytest.fail("read although cached"))
    train, val = build_sources(cfg)
    assert train == {source: first[source]["train"].data for source in SOURCES}
    assert val == {source: first[source]["val"].data for source in SOURCES}


# --- the selection of notes --------------------------------------------------------------------------


def _selected(tmp_path, files, **options):
    """{split: names} and the joined bytes of the roam streams with a NotesConfig."""
    for name, content in files.items():
        path = tmp_path / "vault" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    cfg = StreamBuildConfig(
        roam_root=str(tmp_path / "vault"),
        cache_dir=str(tmp_path / "streams"),
        enabled_sources=("roam",),
        required_sources=("roam",),
        **options,
    )
    streams = load_streams(cfg, T=0)["roam"]
    return {split: [Path(n).name for n in s.names] for split, s in streams.items()}, streams


def test_streams_without_a_notes_config_list_every_note(tmp_path):
    files = {f"{i}.md": f"note {i}" for i in range(10)} | {".trash/x.md": "deleted", "empty.md": ""}
    names, _ = _selected(tmp_path, files)
    assert sorted(names["train"] + names["val"]) == sorted([*(f"{i}.md" for i in range(10)), "x.md", "empty.md"])


def test_a_notes_config_selects_and_an_empty_note_moves_no_other(tmp_path):
    files = {f"{i}.md": f"note {i}" for i in range(20)} | {".trash/x.md": "deleted"}
    before, streams = _selected(tmp_path, files, notes=NotesConfig())
    assert len(before["train"] + before["val"]) == 20
    assert b"deleted" not in b"".join(s.data for s in streams.values())
    assert [entry.path for entry in streams["train"].selected.skipped] == [".trash/"]
    empty = before["train"][0]
    after, _ = _selected(tmp_path, {empty: "\n"}, notes=NotesConfig())
    assert after == {"train": before["train"][1:], "val": before["val"]}


def test_options_of_the_text_rebuild_a_stream(tmp_path):
    files = {f"{i}.md": "---\na: 1\n---\nsee [[b|c]]" for i in range(4)}
    for notes, text in (
        (NotesConfig(), b"---\na: 1\n---\nsee [[b|c]]"),
        (NotesConfig(links="text"), b"---\na: 1\n---\nsee c"),
        (NotesConfig(links="text", strip_front_matter=True), b"see c"),
        (None, b"---\na: 1\n---\nsee [[b|c]]"),
    ):
        _, streams = _selected(tmp_path, files, notes=notes)
        assert streams["val"].data.split(b"\n\n")[0] == text
        assert not streams["val"].cached
        assert _selected(tmp_path, {}, notes=notes)[1]["val"].cached


def test_skip_leaves_out_files_that_are_not_utf8(tmp_path):
    files = {f"{i}.md": f"note {i}" for i in range(4)} | {"bad.md": b"caf\xe9"}
    for notes in (None, NotesConfig()):
        names, _ = _selected(tmp_path, files, notes=notes, encoding_errors="skip")
        assert len(names["train"] + names["val"]) == 4


@pytest.mark.parametrize("name", ["roam_train.meta.json", "primer_val.meta.json", "roam_train.bin"])
def test_a_flipped_bit_is_rebuilt_or_changes_nothing(built, name):
    path = built.cache / name
    original = path.read_bytes()
    intact = load_streams(built.cfg(), T=16)
    for damaged in flipped(original):
        path.write_bytes(damaged)
        found = load_streams(built.cfg(), T=16)
        for source in SOURCES:
            for split in SPLITS:
                assert replace(found[source][split], cached=True) == intact[source][split]
        assert path.read_bytes() in (original, damaged)  # damaged: in the key of the checksum
        path.write_bytes(original)


def test_after_a_kill_the_next_build_gives_the_same_files(world, tmp_path):
    def content():
        return {path.name: path.read_bytes() for path in world.cache.iterdir() if path.suffix != ".lock"}

    changes = {"enabled_sources": ("roam", "primer"), "required_sources": ("roam", "primer")}
    world.build(**changes)
    expected = content()
    deaths = 0
    while True:
        shutil.rmtree(world.cache)
        if not killed_at(deaths, lambda: world.build(**changes)):
            break
        deaths += 1
        world.build(**changes)
        assert content() == expected
    assert deaths >= 16


def test_an_existing_cache_of_private_notes_becomes_private(built):
    assert {stat.S_IMODE(path.stat().st_mode) for path in built.cache.iterdir()} == {0o644}
    next(Path(built.cfg().roam_root).rglob("*.md")).chmod(0o600)
    built.build()
    assert {stat.S_IMODE(path.stat().st_mode) for path in built.cache.iterdir()} == {0o600}
    assert stat.S_IMODE(built.cache.stat().st_mode) == 0o700
