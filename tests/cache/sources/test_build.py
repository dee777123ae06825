import getpass
import json
import os
import platform
import re
import shutil
import warnings
from pathlib import Path

import datasets
import pytest

from niels_gpt.cache.sources import build as build_module
from niels_gpt.cache.sources.build import (
    check_lost_tokenizer,
    choose_sources,
    install_tokenizer,
    open_tokenizer,
    train_on,
    write_placeholder,
)
from niels_gpt.cache.sources.texts import BuildSettings
from niels_gpt.data.reading.local import DataUnavailable
from niels_gpt.data.registry import sources
from niels_gpt.tokenizer import train_tokenizer
from tests.cache import SPLITS, check_listing, meta_of, real_tokenizer, split_rule, stream_of, tree
from tests.cache.sources.inputs import (
    BOOKS,
    DOLLY,
    LINES,
    as_rows,
    build_source,
    by_budget,
    dolly_example,
    folder_of,
    reference,
    settings,
    swap,
    write,
    write_rows,
)
from tests.data import RowHub


@pytest.mark.parametrize("name", ["fineweb_edu", "wikitext", "roam", "dolly15k", "mine"])
def test_folder_meta_and_files(everything, name, tmp_path):
    built = build_source(name, everything)
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
    check_anonymous((folder / "meta.json").read_text(encoding="utf-8"), tmp_path)


def check_anonymous(text, tmp_path):
    """No path, user or host name in the meta."""
    assert str(tmp_path) not in text and tmp_path.name not in text
    for secret in (platform.node(), getpass.getuser(), str(Path.home())):
        assert f'"{secret}"' not in text
        assert secret == "/" or f"{secret}/" not in text
    assert not re.search(
        r"\.roam-data|note \d|primer\.txt|\.jsonl|20\d\d-\d\d-\d\d", text.replace("CC-MAIN-2024-10", "")
    )


# --- up to date or not ---------------------------------------------------------------------------------


def test_touched_and_moved_files_are_up_to_date(everything):
    build_source("roam", everything)
    build_source("dolly15k", everything)
    for path in Path().rglob("*"):
        os.utime(path, (10**9, 10**9))
    assert build_source("dolly15k", everything).state == "up to date"
    Path(".roam-data").rename("elsewhere")
    assert build_source("roam", everything, roam=Path("elsewhere")).state == "up to date"


def rebuilt(name, data, **changes):
    """Build, rebuild with changes, and once more; the result must equal that of a fresh build."""
    assert build_source(name, data).state == "built"
    assert build_source(name, data, **changes).state == "built"
    check_fresh(name, data, **changes)
    assert build_source(name, data, **changes).state == "up to date"


def check_fresh(name, data, **changes):
    build_source(name, data, cache_dir="fresh", **changes)
    assert tree(folder_of(name)) == tree(folder_of(name, "fresh"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {"seed": 43}) for name in ("wikitext", "oasst1")),
        ("gutenberg", {"shard_bytes": 64}),
        *((name, {"val_frac": 0.4}) for name in ("primer", "mine")),
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
def test_changed_setting_rebuilds(everything, name, changes):
    rebuilt(name, everything, **changes)


def test_changed_tokenizer_rebuilds(everything, other_tokenizer):
    rebuilt("chats", everything, tokenizer=other_tokenizer[0])
    assert meta_of(folder_of("chats"))["vocab_size"] == other_tokenizer[0].vocab_size


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("roam", {"val_frac": 0.5, "fineweb_train_tokens": 7, "shuffle_buffer": 3, "wikitext_config": "x"}),
        ("wikitext", {"val_frac": 0.5, "roam_val_frac": 0.5, "gutenberg_val_tokens": 7, "fineweb_config": "x"}),
        ("fineweb_edu", {"val_frac": 0.5, "roam_val_frac": 0.5, "gutenberg_val_tokens": 7}),
        ("dolly15k", {"shard_bytes": 64, "roam_val_frac": 0.5, "fineweb_val_tokens": 7}),
        ("mine", {"roam_val_frac": 0.5, "fineweb_val_tokens": 7, "vocab_size": 999}),
    ],
)
def test_settings_of_other_sources_do_not_rebuild(everything, name, changes):
    first = build_source(name, everything)
    before = tree(Path("cache"))
    times = {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*")}
    second = build_source(name, everything, workers=2, **changes)
    assert (second.state, second.folder, second.meta) == ("up to date", first.folder, first.meta)
    assert tree(Path("cache")) == before
    assert {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*")} == times


@pytest.mark.parametrize(
    ("name", "path", "old", "new"),
    [
        ("wikitext", "data/wikitext/wikitext-103-raw-v1/validation.jsonl", b"held", b"hold"),
        ("gutenberg", "data/gutenberg_clean_en_splits/train.jsonl", b"book 2", b"look 2"),
        ("roam", ".roam-data/a/note 0.md", b"model", b"mould"),
        ("dolly15k", "data/databricks-dolly-15k/train.jsonl", b"note 7", b"tone 7"),
        ("primer", "data/primer.txt", b"small", b"great"),
        ("mine", "mine/rows.jsonl", b"text 3", b"next 3"),
    ],
)
def test_changed_file_rebuilds(everything, name, path, old, new):
    before = build_source(name, everything).meta["files"]
    swap(path, old, new)
    again = build_source(name, everything)
    assert again.state == "built" and again.meta["files"] != before
    check_fresh(name, everything)


def test_changed_list_of_files_rebuilds(everything):
    build_source("roam", everything)
    for change in (
        lambda: write(".roam-data/c/new.md", "a new note"),
        lambda: Path(".roam-data/c/note 2.md").rename(".roam-data/a/0.md"),
    ):
        change()
        assert build_source("roam", everything).state == "built"
    check_fresh("roam", everything)


def test_changed_hub_id_rebuilds(everything):
    """There are local files for both ids."""
    write_rows("data/pages/train.jsonl", as_rows(f"another page {i} of another id" for i in range(60)))
    build_source("fineweb_edu")
    again = build_source("fineweb_edu", fineweb_id="me/pages")
    assert again.state == "built"
    assert reference().decode(stream_of(folder_of("fineweb_edu"), "train")).count("another id") > 5


@pytest.mark.parametrize(
    ("name", "damage"),
    [("wikitext", "missing"), ("dolly15k", "longer"), ("wikitext", "damaged meta"), ("dolly15k", "list in meta")],
)
def test_damaged_cache_rebuilds(everything, name, damage):
    build_source(name, everything)
    complete = tree(folder_of(name))
    path = folder_of(name) / ("train/shard_00000.bin" if name == "wikitext" else "val_tokens.bin")
    if damage == "missing":
        path.unlink()
    elif "meta" in damage:
        path = folder_of(name) / "meta.json"
        files = {**json.loads(path.read_bytes()), "files": ["train_tokens.bin"]}
        path.write_bytes(json.dumps(files).encode() if "list" in damage else path.read_bytes()[:-30])
    else:
        path.write_bytes(path.read_bytes() + b"xx")
    assert build_source(name, everything).state == "built"
    assert tree(folder_of(name)) == complete


def test_force_rebuilds(everything):
    name = "dolly15k"
    build_source(name, everything)
    complete = tree(folder_of(name))
    path = next(path for path in folder_of(name).rglob("*.bin") if path.stat().st_size)
    path.write_bytes(bytes(path.stat().st_size))
    assert build_source(name, everything).state == "up to date"  # content is not hashed: that is what verify does
    assert build_source(name, everything, force=True).state == "built"
    assert tree(folder_of(name)) == complete


class Revised(RowHub):
    """A stream whose file names contain the commit."""

    revision = "a" * 40

    def load_dataset(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        name = f"hf://datasets/{args[0]}@{self.revision}/train.parquet"

        def generate(names):
            yield from self.rows

        return datasets.IterableDataset.from_generator(generate, gen_kwargs={"names": [name]})


def test_hub_commit_decides_the_rebuild(monkeypatch):
    hub = Revised(as_rows(BOOKS)).install(monkeypatch)
    built = build_source("gutenberg")
    assert (built.state, built.meta["revision"]) == ("built", "a" * 40)
    assert "files" not in (built.meta["source"] or {})
    assert build_source("gutenberg").state == "up to date"
    hub.revision = "b" * 40
    again = build_source("gutenberg")
    assert (again.state, again.meta["revision"]) == ("built", "b" * 40)


def test_hub_rows_without_a_commit_always_rebuild(monkeypatch):
    hub = RowHub(as_rows(BOOKS)).install(monkeypatch)
    assert build_source("gutenberg").state == "built"
    hub.rows = as_rows(BOOKS[::-1])
    assert build_source("gutenberg").state == "built"
    assert stream_of(folder_of("gutenberg"), "val") == by_budget(BOOKS[::-1], train=600, val=100)["val"]


def test_failed_build_keeps_the_old_cache(everything):
    build_source("dolly15k", everything)
    build_source("roam", everything)
    before = tree(Path("cache"))
    write("data/databricks-dolly-15k/train.jsonl", "no json at all")
    write(".roam-data/z.md", b"\xff")
    for name in ("dolly15k", "roam"):
        with pytest.raises(ValueError):
            build_source(name, everything)
    shutil.rmtree("data/databricks-dolly-15k")
    with pytest.raises(DataUnavailable, match="databricks-dolly-15k"):
        build_source("dolly15k", everything)
    assert {name: data for name, data in tree(Path("cache")).items() if "/." not in name} == before


# --- the tokenizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["folder", "file"])
def test_install_tokenizer(other_tokenizer, given):
    tokenizer, folder = other_tokenizer
    with pytest.raises(FileNotFoundError):
        open_tokenizer(Path("cache"))
    installed = install_tokenizer(folder if given == "folder" else folder / "spm.model", Path("cache"))
    assert installed.sha256 == tokenizer.sha256
    target = Path("cache/tokenizer")
    assert sorted(path.name for path in target.iterdir()) == ["meta.json", "spm.model"]
    assert (target / "spm.model").read_bytes() == (folder / "spm.model").read_bytes()
    meta = meta_of(target)
    assert meta["sha256"] == tokenizer.sha256 and meta["vocab_size"] == tokenizer.vocab_size
    assert meta == meta_of(folder)  # its training inputs are copied too
    assert open_tokenizer(Path("cache")).sha256 == tokenizer.sha256


def test_install_model_without_its_meta(tmp_path):
    path = write("bare/some.model", real_tokenizer().model)
    write("bare/meta.json", '{"sha256": "of another", "seed": 7}')
    install_tokenizer(path, Path("cache"))
    meta = meta_of(Path("cache/tokenizer"))
    assert meta["sha256"] == real_tokenizer().sha256 and meta["vocab_size"] == real_tokenizer().vocab_size
    assert meta["special_token_ids"] == reference().special_token_ids()
    assert "seed" not in meta
    assert str(tmp_path) not in json.dumps(meta)


def test_install_a_loaded_tokenizer(other_tokenizer):
    tokenizer, _ = other_tokenizer
    assert install_tokenizer(tokenizer, Path("cache")) is tokenizer
    assert open_tokenizer(Path("cache")).sha256 == meta_of(Path("cache/tokenizer"))["sha256"] == tokenizer.sha256
    with pytest.raises(ValueError, match="another tokenizer"):
        install_tokenizer(real_tokenizer(), Path("cache"))


def test_reinstalling_the_tokenizer_works_and_another_raises(other_tokenizer):
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


def test_missing_or_invalid_tokenizer_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        install_tokenizer(Path("nowhere"), Path("cache"))
    with pytest.raises(ValueError, match=r"some\.model"):
        install_tokenizer(write("some.model", "no model"), Path("cache"))
    assert not Path("cache").exists()


@pytest.fixture
def small_vocabulary():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the text has only")
        yield


def trained(data, *names, **changes):
    """(tokenizer, unreachable sources) of `train_on`."""
    unreachable = {}
    known = sources(data)
    options = {"vocab_size": 420, **changes}
    tokenizer = build_module.train_on(
        [known[n] for n in names], settings(**options), lambda s, err: unreachable.update({s.name: err})
    )
    return tokenizer, unreachable


def test_tokenizer_is_trained_on_the_training_texts(small_vocabulary, everything, tmp_path):
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


def test_tokenizer_is_trained_on_a_number_of_documents_per_source(small_vocabulary, everything):
    trained(everything, "roam", "wikitext", "dolly15k", tokenizer_documents=2)
    assert meta_of(Path("cache/tokenizer"))["inputs"]["texts"] == 6


def test_tokenizer_is_trained_on_readable_sources(small_vocabulary, everything):
    shutil.rmtree("data/wikitext")
    write("data/oasst1/train.jsonl", "no json")
    _, unreachable = trained(everything, "wikitext", "roam", "oasst1", "dolly15k")
    assert sorted(unreachable) == ["oasst1", "wikitext"]
    assert "NIELS_GPT_DATA" in str(unreachable["wikitext"]) and "train.jsonl" in str(unreachable["oasst1"])
    assert meta_of(Path("cache/tokenizer"))["inputs"]["texts"] > 2 * len(DOLLY)


def test_lost_tokenizer_of_caches_that_are_not_rebuilt(everything, other_tokenizer):
    """Placeholders and damaged caches need no tokenizer."""
    write("cache/pretrain/gutenberg/meta.json", '{"built": false}')
    write("cache/pretrain/fineweb_edu/meta.json", "[" * 100_000)
    roam, primer = (sources()[name] for name in ("roam", "primer"))
    for source in (roam, primer):
        build_source(source.name)
    check_lost_tokenizer(Path("cache"), [primer, roam], None)
    check_lost_tokenizer(Path("cache"), [], write("spm.model", real_tokenizer().model))
    for chosen, given, named in (
        ([], None, "pretrain/roam, sft/primer"),
        ([roam], None, ": sft/primer"),
        ([primer], other_tokenizer[1], ": pretrain/roam"),
    ):
        with pytest.raises(ValueError, match=rf"spm\.model.*{named} with {real_tokenizer().sha256[:12]}.*--tokenizer"):
            check_lost_tokenizer(Path("cache"), chosen, given)


def test_chosen_sources():
    config = write("c.yaml", "data: {sources: {poems: {path: poems}}}")

    def chosen(names=None, only=(), skip=(), config=None):
        return [source.name for source in choose_sources(names, list(only), list(skip), config)]

    default = ["fineweb_edu", "roam", "wikitext", "gutenberg", "dolly15k", "oasst1", "primer"]
    assert chosen() == default and chosen(config=config) == [*default, "poems"]
    assert chosen(["roam", "dolly15k", "roam"]) == ["roam", "dolly15k"]
    assert chosen(only=["oasst1", "roam"], skip=["roam"]) == ["oasst1"]
    assert chosen(skip=default[:4]) == default[4:]
    for options, named in (
        ({"names": ["poems"]}, "'poems'.*roam"),
        ({"skip": ["dolly"]}, "'dolly'.*dolly15k"),
        ({"only": ["roam"], "skip": ["roam"]}, "--only.*--skip"),
    ):
        with pytest.raises(ValueError, match=named):
            chosen(**options)


# --- placeholders ------------------------------------------------------------------------------------


def test_placeholder():
    source = sources()["gutenberg"]
    result = write_placeholder(source, settings(), "no Hub today")
    folder = folder_of("gutenberg")
    assert (result.name, result.state, result.folder) == ("gutenberg", "not built", folder)
    assert result.reason == "no Hub today"
    assert sorted(path.name for path in folder.iterdir()) == ["meta.json", "train", "val"]
    assert all(list((folder / split).iterdir()) == [] for split in SPLITS)
    meta = meta_of(folder)
    assert (meta["built"], meta["dataset_name"]) == (False, "gutenberg")
    assert isinstance(meta["reason"], str) and meta["reason"]
    assert write_placeholder(source, settings(), "still none").state == "not built"
    assert meta_of(folder)["built"] is False


def test_placeholder_never_replaces_a_cache(everything):
    source = sources()["gutenberg"]
    write_placeholder(source, settings(), "no Hub today")
    assert build_source("gutenberg").state == "built"
    before = tree(Path("cache"))
    kept = write_placeholder(source, settings(), "no Hub today")
    assert (kept.state, kept.meta) == ("up to date", meta_of(folder_of("gutenberg")))
    assert tree(Path("cache")) == before


# --- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("roam", {"roam": Path("nowhere")}, "nowhere"),
        ("roam", {"workers": 0}, "workers.*0"),
        ("primer", {"primer": Path("nowhere")}, "nowhere"),
        ("gutenberg", {"gutenberg_train_tokens": -1}, "max_train_tokens.*-1"),
        ("gutenberg", {"gutenberg_train_tokens": 0}, "train would be empty"),
    ],
)
def test_invalid_settings_are_named(everything, name, changes, named):
    with pytest.raises((ValueError, OSError), match=named):
        build_source(name, **changes)
    assert not any(path.is_file() for path in Path("cache").rglob("*"))


@pytest.mark.parametrize("option", ["path", "roam"])
def test_a_tokenizer_of_named_notes_has_no_private_words(option, tmp_path):
    """The default notes are those of the package, which are public; a folder that is named is not."""
    notes = tmp_path / "notes"
    notes.mkdir()
    for i in range(6):
        write(notes / f"{i}.md", f"note {i}: " + "some words that all of these notes have. " * 9)
    write(notes / "rent.md", "Vrenzkowitz wants the rent. Vrenzkowitz calls. " * 40)
    chosen = [sources()["roam"]]
    made = BuildSettings(tmp_path / "cache", vocab_size=300, **{option: notes})
    with pytest.warns(UserWarning, match="fewer than vocab_size"):
        trained = train_on(chosen, made, lambda source, err: None)
    assert [piece for piece in trained.token_bytes if b"zkow" in piece] == []
