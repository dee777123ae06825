"""The registry: which sources there are, where they are read from, and their samples."""

import itertools
import json
import shutil
import socket
import sys
import textwrap
import warnings
from dataclasses import replace

import datasets  # imported before a fixture changes HF_HUB_OFFLINE, which it reads once
import pytest

from niels_gpt.config import DataConfig, SourceConfig
from niels_gpt.data import embedded
from niels_gpt.data.registry import describe, get_source, is_private, licence_of, sources
from niels_gpt.data.types import ChatMessage, ChatSample, PretrainSample
from tests.data import write_rows

BUILT_IN = {  # name: (kind, id on the Hub, part of the licence)
    "fineweb_edu": ("text", "HuggingFaceFW/fineweb-edu", "ODC-By"),
    "wikitext": ("text", "wikitext", "CC BY-SA 3.0"),
    "gutenberg": ("text", "nikolina-p/gutenberg_clean_en_splits", "public domain"),
    "dolly15k": ("chat", "databricks/databricks-dolly-15k", "CC BY-SA 3.0"),
    "oasst1": ("chat", "OpenAssistant/oasst1", "Apache-2.0"),
    "roam": ("text", None, "MIT"),
    "primer": ("chat", None, "MIT"),
    "stdlib": ("text", None, "PSF"),
}
ON_HUB = {name: id_ for name, (_, id_, _) in BUILT_IN.items() if id_}
CONFIGS = {"fineweb_edu": "CC-MAIN-2024-10", "wikitext": "wikitext-103-raw-v1"}
CACHE = {name: (id_.replace("/", "___"), CONFIGS.get(name, "default")) for name, id_ in ON_HUB.items()}
"""Folders in the cache of `datasets`."""
ROWS = {
    "fineweb_edu": [{"text": f"page {i}", "url": f"u{i}"} for i in range(6)],
    "wikitext": [{"text": f" line {i} \n"} for i in range(6)],
    "gutenberg": [{"text": f"book {i}", "title": f"t{i}"} for i in range(6)],
    "dolly15k": [
        {"instruction": f"ask {i}", "context": "", "response": f"answer {i}", "category": "qa"} for i in range(6)
    ],
    "oasst1": [
        {"message_id": f"{kind}{i}", "parent_id": None if kind == "q" else f"q{i}", "message_tree_id": f"q{i}"}
        | {"role": role, "text": f"{role} {i}", "lang": "en"}
        for i in range(6)
        for kind, role in (("q", "prompter"), ("a", "assistant"))
    ],
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty working directory and an empty cache; the environment says online."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "NIELS_GPT_DATA"):
        monkeypatch.delenv(name, raising=False)


def texts(samples):
    """Return (source, text) of each sample, or (source, content, content, ...) of a chat."""
    return [
        (s.source, *(m.content for m in s.messages)) if isinstance(s, ChatSample) else (s.source, s.text)
        for s in samples
    ]


# --- names -------------------------------------------------------------------------------------------


def test_the_built_in_sources():
    found = sources()
    assert list(found) == list(BUILT_IN)
    for name, (kind, id_, licence) in BUILT_IN.items():
        source = found[name]
        assert (source.name, source.kind, source.dataset_id) == (name, kind, id_)
        assert licence in source.licence
    assert [name for name, source in found.items() if source.large] == ["fineweb_edu", "gutenberg"]


def test_the_sources_of_the_config_come_after_them(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("a note", encoding="utf-8")
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    rows = write_rows(tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    data = DataConfig(
        sources={
            "diary": SourceConfig(str(tmp_path / "notes"), licence="secret"),
            "chats": SourceConfig(str(rows)),
            "forced": SourceConfig(str(rows), kind="text"),
            "gone": SourceConfig(str(tmp_path / "gone")),
            "bad": SourceConfig(str(tmp_path / "bad.parquet")),
        }
    )
    found = sources(data)
    assert list(found) == [*BUILT_IN, "diary", "chats", "forced", "gone", "bad"]
    assert [found[name].kind for name in data.sources] == ["text", "chat", "text", "auto", "auto"]
    assert (found["diary"].licence, found["chats"].licence) == ("secret", "yours")
    assert found["diary"].where() == ("local", str(tmp_path / "notes"))
    where = found["gone"].where()
    assert where.kind == "missing" and str(tmp_path / "gone") in where.location
    assert texts(found["diary"].samples()) == [("diary", "a note")]
    assert list(sources()) == list(sources(DataConfig())) == list(BUILT_IN)


def test_the_licence_of_a_source_of_a_config(tmp_path):
    here = SourceConfig(str(tmp_path))
    own = {"diary": here, "page": replace(here, licence="CC0")}
    packaged, local, hub = ("embedded",) * 3, (str(tmp_path),) * 3, ("hub", "embedded", "embedded")
    known = {"oasst1": "Apache-2.0", "gone": "", "diary": "yours", "page": "CC0"}
    for paths, wiki, notes in ((packaged, "PSF", "MIT"), (local, "CC BY-SA", "yours"), (hub, "CC BY-SA", "MIT")):
        data = DataConfig(**dict(zip(("wiki", "roam", "primer"), paths, strict=True)), sources=own)
        for name, licence in {**known, "wiki": wiki, "roam": notes, "primer": notes}.items():
            assert licence_of(name, data).startswith(licence) and bool(licence_of(name, data)) == bool(licence)
            assert is_private(licence_of(name, data)) == (licence in ("yours", ""))
    assert is_private("MIT, yours") and not is_private("not-yours")


def test_a_name_that_is_already_used(tmp_path):
    with pytest.raises(ValueError, match=r"data\.sources\.stdlib\b"):
        sources(DataConfig(sources={"stdlib": SourceConfig(str(tmp_path))}))


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    data = DataConfig(sources={"diary": SourceConfig(str(tmp_path))})
    with pytest.raises(ValueError) as caught:
        get_source("wikitxt", data)
    for name in ("'wikitxt'", *BUILT_IN, "diary"):
        assert name in str(caught.value)
    assert get_source("diary", data).name == "diary"
    with pytest.raises(ValueError, match="'diary'"):
        get_source("diary")


# --- locations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), list(zip(ON_HUB, ["1", "true", "YES", "ON", "1"], strict=True)))
def test_from_the_hub_unless_offline(name, value, monkeypatch):
    for online in ("0", "", "no"):
        monkeypatch.setenv("HF_HUB_OFFLINE", online)
        assert get_source(name).where() == ("hub", ON_HUB[name])
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    where = get_source(name).where()
    assert where.kind == "missing"
    assert "offline" in where.location and "NIELS_GPT_DATA" in where.location


@pytest.mark.parametrize(
    ("name", "variable", "offline"),
    [(name, ("HF_HOME", "HF_DATASETS_CACHE")[i % 2], str(i // 2 % 2)) for i, name in enumerate(ON_HUB)],
)
def test_from_the_cache(name, variable, offline, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setenv(variable, str(tmp_path / "cache"))
    folder, config = CACHE[name]
    root = tmp_path / "cache" / ("datasets" if variable == "HF_HOME" else "") / folder
    (root / config / "0.0.0" / ("a" * 40)).mkdir(parents=True)
    where = get_source(name).where()
    assert where.kind == "cache"
    assert where.location.startswith(str(root))


def test_other_configs_and_datasets_in_the_cache_do_not_count(tmp_path):
    (tmp_path / "hf" / "datasets" / "wikitext" / "wikitext-2-raw-v1" / "0.0.0").mkdir(parents=True)
    for folder in ("oasst1", "someone___oasst1", "OpenAssistant___oasst2", "Salesforce___wikitext"):
        (tmp_path / "hf" / "datasets" / folder / "default" / "0.0.0").mkdir(parents=True)
    assert get_source("wikitext").where().kind == get_source("oasst1").where().kind == "hub"


def test_wikitext_in_the_cache_under_its_id_with_a_namespace(tmp_path):
    folder = tmp_path / "hf" / "datasets" / "Salesforce___wikitext" / CONFIGS["wikitext"]
    folder.mkdir(parents=True)
    assert get_source("wikitext").where() == ("cache", str(folder))


def fill_cache(root, folder, config, rows):
    """Fill the cache as `datasets` does after a download."""
    prepared = root.parent / "prepared"
    file = write_rows(root.parent / "rows.jsonl", rows)
    builder = datasets.load_dataset_builder("json", data_files={"train": [str(file)]}, cache_dir=str(prepared))
    builder.download_and_prepare()
    name = folder.rpartition("___")[2]
    cached = root / folder / config / "0.0.0" / ("a" * 40)
    cached.parent.mkdir(parents=True)
    shutil.move(builder.cache_dir, cached)
    for arrow in list(cached.glob("*.arrow")):
        arrow.rename(arrow.with_name(arrow.name.replace("json", name, 1)))
    info = json.loads((cached / "dataset_info.json").read_text(encoding="utf-8"))
    info |= {"config_name": config, "dataset_name": name}
    (cached / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")


def test_a_cached_dataset_can_be_read_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf" / "datasets")
    fill_cache(tmp_path / "hf" / "datasets", *CACHE["oasst1"], ROWS["oasst1"])
    source = get_source("oasst1")
    assert len(list(source.samples(take=2))) == 2
    assert source.where().kind == "cache"


@pytest.mark.parametrize(("name", "short"), [(name, i % 2 == 0) for i, name in enumerate(ON_HUB)])
def test_local_files_come_first(name, short, tmp_path, monkeypatch):
    folder_here = tmp_path / "data" / (ON_HUB[name].rpartition("/")[2] if short else ON_HUB[name])
    write_rows(folder_here / "train.jsonl", ROWS[name])
    folder, config = CACHE[name]
    (tmp_path / "hf" / "datasets" / folder / config / "0.0.0" / "abc").mkdir(parents=True)
    monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = get_source(name)
    assert source.where() == ("local", str(folder_here))
    assert len(list(source.samples())) == 6


def test_local_files_by_a_map(tmp_path, monkeypatch):
    file = write_rows(tmp_path / "elsewhere" / "some.jsonl", ROWS["dolly15k"])
    (tmp_path / "map.yaml").write_text(f"databricks/databricks-dolly-15k: {file}\noasst1: nowhere\n", encoding="utf-8")
    monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path / "map.yaml"))
    assert get_source("dolly15k").where() == ("local", str(file))
    gone = get_source("oasst1").where()
    assert gone.kind == "missing" and "nowhere" in gone.location
    assert get_source("wikitext").where().kind == "hub"


def test_an_invalid_niels_gpt_data_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path / "none"))
    where = get_source("wikitext").where()
    assert where.kind == "missing"
    assert "NIELS_GPT_DATA" in where.location and str(tmp_path / "none") in where.location


@pytest.mark.parametrize(("name", "default"), [("roam", ".roam-data"), ("primer", "data/primer.txt")])
def test_embedded_unless_the_default_path_exists(name, default, tmp_path):
    assert get_source(name).where().kind == "embedded"
    assert len(list(get_source(name).samples(take=3))) == 3
    if name == "roam":
        (tmp_path / default).mkdir()
        (tmp_path / default / "mine.md").write_text("my note", encoding="utf-8")
        wanted = [("roam", "my note")]
    else:
        (tmp_path / default).parent.mkdir()
        (tmp_path / default).write_text("user: mine?\nassistant: yes.", encoding="utf-8")
        wanted = [("primer", "mine?", "yes.")]
    assert get_source(name).where() == ("local", default)
    assert texts(get_source(name).samples()) == wanted


@pytest.fixture
def small_library(monkeypatch):
    """Part of the standard library: reading all of it takes seconds."""
    files = embedded.stdlib_files()[:40]
    monkeypatch.setattr(embedded, "stdlib_files", lambda: files)


def test_the_standard_library_is_always_available(small_library, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = get_source("stdlib")
    assert source.where().kind == "embedded"
    three = list(source.samples(take=3))
    assert [s.source for s in three] == ["stdlib"] * 3
    assert all(isinstance(s, PretrainSample) and s.text.startswith(s.meta["module"]) for s in three)


# --- samples -----------------------------------------------------------------------------------------


def expected(name):
    chat = {"dolly15k": ("ask {}", "answer {}"), "oasst1": ("prompter {}", "assistant {}")}
    text = {"fineweb_edu": ("page {}",), "wikitext": (" line {} \n",), "gutenberg": ("book {}",)}
    return [(name, *(part.format(i) for part in (chat | text)[name])) for i in range(6)]


@pytest.mark.parametrize("name", ON_HUB)
def test_samples_of_a_path_in_its_order(name, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", ROWS[name])
    source = get_source(name)
    assert texts(source.samples(path=str(file))) == expected(name)
    for take in (0, 4):
        assert texts(source.samples(path=file, take=take)) == expected(name)[:take]
    assert source.files(None, file) == [str(file)] and source.files(None, None) == []


@pytest.mark.parametrize("name", ["fineweb_edu", "gutenberg", "dolly15k", "oasst1"])
def test_shuffled_samples(name, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", ROWS[name])
    source = get_source(name)
    orders = [texts(source.samples(path=file, shuffle=True, seed=seed)) for seed in (1, 1, 2, 3, 4)]
    assert all(sorted(order) == expected(name) for order in orders)
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) > 1
    assert texts(source.samples(path=file, shuffle=True, seed=1, take=2)) == orders[0][:2]


def test_wikitext_is_not_shuffled(tmp_path):
    (tmp_path / "train.txt").write_text("one\ntwo\n", encoding="utf-8")
    with pytest.raises(ValueError, match="--shuffle"):
        list(get_source("wikitext").samples(path=tmp_path, shuffle=True))


def test_notes_and_dialogues_can_be_shuffled(tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    for i in range(8):
        (notes / f"{i}.md").write_text(f"note {i}", encoding="utf-8")
    primer = tmp_path / "p.txt"
    blocks = [f"user: q{i}\nassistant: a{i}" for i in range(8)]
    primer.write_text("\n\n<dialogue>\n\n".join(blocks), encoding="utf-8")
    for name, path, wanted in (
        ("roam", notes, [("roam", f"note {i}") for i in range(8)]),
        ("primer", primer, [("primer", f"q{i}", f"a{i}") for i in range(8)]),
    ):
        source = get_source(name)
        assert texts(source.samples(path=path)) == wanted
        orders = [texts(source.samples(path=path, shuffle=True, seed=seed)) for seed in (1, 1, 2, 3)]
        assert all(sorted(order) == wanted for order in orders)
        assert orders[0] == orders[1]
        assert len({tuple(order) for order in orders}) > 1, f"{name} is never shuffled"


def test_the_standard_library_has_no_path(small_library, tmp_path):
    (tmp_path / "a.txt").write_text("not of the standard library", encoding="utf-8")
    with pytest.raises(ValueError, match="path"):
        list(get_source("stdlib").samples(path=tmp_path, take=1))


@pytest.mark.parametrize(
    ("name", "subset", "called"),
    [
        ("wikitext", None, ("wikitext", "wikitext-103-raw-v1")),
        ("wikitext", "wikitext-2-raw-v1", ("wikitext", "wikitext-2-raw-v1")),
        ("fineweb_edu", None, ("HuggingFaceFW/fineweb-edu", "CC-MAIN-2024-10")),
        ("fineweb_edu", "sample-10BT", ("HuggingFaceFW/fineweb-edu", "sample-10BT")),
        ("gutenberg", None, ("nikolina-p/gutenberg_clean_en_splits", None)),
    ],
)
def test_the_subset_and_the_split_go_to_the_hub(hub, name, subset, called):
    hub.rows = {"train": ["one", "two", "three"], "validation": ["four"], "test": ["five"]}
    source = get_source(name)
    assert texts(source.samples(subset=subset, take=2)) == [(name, "one"), (name, "two")]
    assert hub.calls == [called]
    assert texts(source.samples(subset=subset, split="test")) == [(name, "five")]
    assert texts(source.samples(subset=subset, split="validation")) == [(name, "four")]


@pytest.mark.parametrize("name", ["gutenberg", "primer"])
def test_sources_without_subsets(name):
    with pytest.raises(ValueError, match=rf"{name}.*'big'"):
        get_source(name).samples(subset="big")


@pytest.mark.parametrize(("name", "split"), [("roam", "validation"), ("primer", "trian"), ("stdlib", "")])
def test_an_unknown_split_of_an_embedded_source(name, split):
    with pytest.raises(ValueError, match=rf"{name}.*'{split}'.*train"):
        get_source(name).samples(split=split)


def test_options_of_the_loader(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", ROWS["dolly15k"])
    first = next(get_source("dolly15k").samples(path=file, include_system=True))
    assert [m.role for m in first.messages] == ["system", "user", "assistant"]
    german = [{**row, "lang": "de"} for row in ROWS["oasst1"]]
    file = write_rows(tmp_path / "german.jsonl", german)
    assert list(get_source("oasst1").samples(path=file)) == []
    assert len(list(get_source("oasst1").samples(path=file, english_only=False))) == 6


def test_offline_without_data_has_two_remedies_and_never_connects(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    connections = []
    monkeypatch.setattr(socket.socket, "connect", lambda *args: connections.append(args))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: connections.append(args))
    for name, id_ in ON_HUB.items():
        with pytest.raises(ValueError) as caught:
            list(get_source(name).samples(take=1))
        message = str(caught.value)
        assert id_ in message
        assert "NIELS_GPT_DATA" in message and "--path" in message
        assert "connect to the Hub" in message
    assert connections == []


# --- sources of other packages -----------------------------------------------------------------------

counter = itertools.count()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a distribution: a module, and entry points as pip writes them."""

    def make(module, points):
        name = f"poems_{next(counter)}"
        site = tmp_path / f"site-{name}"
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{name}.py").write_text(textwrap.dedent(module), encoding="utf-8")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
        lines = [f"{point} = {name}{target}" for point, target in points.items()]
        listed = "\n".join(["[console_scripts]", f"{name} = {name}:main", "", "[niels_gpt.sources]", *lines, ""])
        (info / "entry_points.txt").write_text(listed, encoding="utf-8")
        monkeypatch.syspath_prepend(str(site))
        return name

    yield make
    for name in [name for name in sys.modules if name.startswith("poems_")]:
        del sys.modules[name]


POEMS = """
from niels_gpt.data import embedded
from niels_gpt.data.registry import Source, SourceLocation
from niels_gpt.data.types import ChatMessage, ChatSample, PretrainSample

def poems(*, split, take, shuffle, seed, path, stats, metre="iambic"):
    for i in range(3 if take is None else min(3, take)):
        yield PretrainSample(f"poem {i} of {split}, {metre}", "poems", {"lang": "en"})

def talks(**options):
    yield ChatSample([ChatMessage("user", "rhyme?"), ChatMessage("assistant", "no.")], "talks", {})

POEMS = Source("poems", "text", "CC0", poems, lambda: SourceLocation("embedded", "my package"), subset_option="metre",
               splits=("train", "test"))

def make_talks():
    return Source("talks", "chat", "MIT", talks, lambda: SourceLocation("hub", "me/talks"), "me/talks")

NOTHING = 3.5
"""


def test_a_source_of_another_package(install):
    install(POEMS, {"poems": ":POEMS", "talks": ":make_talks"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sources()
    assert list(found) == [*BUILT_IN, "poems", "talks"]
    row = {"name": "poems", "kind": "text", "id": None, "licence": "CC0", "from": "embedded", "place": "my package"}
    assert dict(describe(found["poems"])) == row
    assert texts(found["poems"].samples(take=2, split="test")) == [
        ("poems", "poem 0 of test, iambic"),
        ("poems", "poem 1 of test, iambic"),
    ]
    assert texts(found["poems"].samples(take=1, subset="free")) == [("poems", "poem 0 of train, free")]
    with pytest.raises(ValueError, match=r"'val'.*train, test"):
        found["poems"].samples(split="val")
    (talk,) = found["talks"].samples()
    assert talk.messages == [ChatMessage("user", "rhyme?"), ChatMessage("assistant", "no.")]
    assert found["talks"].dataset_id == "me/talks"
    assert get_source("poems") == found["poems"]


@pytest.mark.parametrize(
    ("module", "target", "fact"),
    [
        ("raise RuntimeError('no poetry today')", ":POEMS", "no poetry today"),
        ("x = = 1", ":POEMS", "invalid syntax"),
        (POEMS, ":PROSE", "PROSE"),
        (POEMS, ":NOTHING", "float"),
        ("def make():\n    return {'name': 'poems'}", ":make", "dict"),
        ("def make(needed):\n    return needed", ":make", "needed"),
    ],
)
def test_a_source_that_cannot_be_loaded_is_skipped_with_a_warning(install, module, target, fact):
    name = install(module, {"odd": target})
    install(POEMS, {"poems": ":POEMS"})
    with pytest.warns(UserWarning) as caught:
        found = sources()
    assert list(found) == [*BUILT_IN, "poems"]
    (message,) = [str(warning.message) for warning in caught]
    assert "odd" in message and f"{name}{target}" in message and fact in message
    assert "\n" not in message


def test_a_package_does_not_replace_a_built_in_source(install):
    install(POEMS.replace('"poems", "text"', '"wikitext", "text"'), {"wikitext": ":POEMS"})
    with pytest.warns(UserWarning, match="wikitext"):
        found = sources()
    assert found["wikitext"].dataset_id == "wikitext"
