"""The contract that all loaders share: order, take, shuffle, dropped rows, local files, and the Hub."""

import copy
import dataclasses
import inspect
import itertools
import logging
import random
import time
from collections.abc import Callable

import datasets
import numpy as np
import pytest

from niels_gpt.config import SourceConfig
from niels_gpt.data.dolly import iter_dolly_sft
from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.data.gutenberg import iter_gutenberg
from niels_gpt.data.oasst1 import iter_oasst1_sft
from niels_gpt.data.primer import iter_primer_sft
from niels_gpt.data.roam import iter_roam
from niels_gpt.data.types import ChatSample, PretrainSample
from niels_gpt.data.user_files import iter_user_files
from niels_gpt.data.wikitext import iter_wikitext
from tests.data import RowHub, dropped_lines, serve_in_turn, write_rows

COMMIT = "fdf72ae0827c1cda404aff25b6603abec9e3399b"


@dataclasses.dataclass(frozen=True)
class Loader:
    """A loader, and how to write its sample number i."""

    source: str
    iterate: Callable
    """Called with path and the loader's options."""
    row: Callable
    """Number (None: a bad row) -> row of the dataset."""
    dataset_id: str | None = None
    config: str | None = None
    shuffle: str | None = None
    """Name of the shuffle option."""
    take: str = "take"
    chat: bool = False
    optional: tuple[str, ...] = ()
    """Keywords beyond the specification; their defaults must be None."""

    def unshuffled(self, **options):
        return self.iterate(**({self.shuffle: False} if self.shuffle else {}), **options)

    def write(self, folder, numbers, suffix="jsonl"):
        """Write samples to files; return the path to read them from."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.source == "roam":
            for index, number in enumerate(numbers):
                (folder / f"{index:02}.md").write_text(self.row(number), encoding="utf-8")
            return folder
        if self.source == "primer":
            path = folder / "primer.txt"
            path.write_text("\n\n<dialogue>\n\n".join(map(self.row, numbers)), encoding="utf-8")
            return path
        write_rows(folder / f"train.{suffix}", [self.row(number) for number in numbers])
        return folder


def number_of(sample):
    """The number of a sample that `Loader.row` wrote."""
    text = sample.messages[0].content if isinstance(sample, ChatSample) else sample.text
    return int(text.split()[1])


def numbers_of(samples):
    return [number_of(sample) for sample in samples]


def text_row(number):
    return {"text": " " if number is None else f"page {number}", "id": number}


def dolly_row(number):
    return {"instruction": f"do {number}", "context": "", "response": "" if number is None else "done", "category": "a"}


_bad_ids = itertools.count()


def oasst1_row(number):
    text = " " if number is None else f"ask {number}"
    key = f"bad{next(_bad_ids)}" if number is None else f"p{number}"
    tree = {"message_id": key, "parent_id": None, "message_tree_id": key}
    return tree | {"role": "prompter", "text": text, "lang": "en"}


def chat_row(number):
    content = " " if number is None else f"ask {number}"
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]}


LOADERS = [
    Loader("fineweb_edu", iter_fineweb_edu, text_row, "HuggingFaceFW/fineweb-edu", "CC-MAIN-2024-10", "shuffle",
           optional=("path", "dataset_id", "stats")),
    Loader("gutenberg", iter_gutenberg, text_row, "nikolina-p/gutenberg_clean_en_splits", None, "shuffle",
           optional=("path", "stats")),
    Loader("wikitext", iter_wikitext, text_row, "wikitext", "wikitext-103-raw-v1", optional=("path", "stats")),
    Loader("dolly15k", iter_dolly_sft, dolly_row, "databricks/databricks-dolly-15k", None, "shuffle", chat=True,
           optional=("path", "stats")),
    Loader("oasst1", iter_oasst1_sft, oasst1_row, "OpenAssistant/oasst1", None, "shuffle_trees", "take_trees",
           chat=True, optional=("path", "stats")),
    Loader("roam", lambda path, **options: iter_roam(path, **options),
           lambda number: " \n" if number is None else f"note {number}"),
    Loader("primer", lambda path, **options: iter_primer_sft(path, **options),
           lambda number: "no turn" if number is None else f"user: ask {number}\nassistant: yes", chat=True),
    Loader("texts", lambda path, **options: iter_user_files("texts", SourceConfig(str(path)), **options), text_row,
           shuffle="shuffle"),
    Loader("chats", lambda path, **options: iter_user_files("chats", SourceConfig(str(path), kind="chat"), **options),
           chat_row, shuffle="shuffle", chat=True),
]  # fmt: skip
HUB = [loader for loader in LOADERS if loader.dataset_id]
SHUFFLED = [loader for loader in LOADERS if loader.shuffle]
MIXED = [0, None, 1, 2, None, 3]
"""Numbers of samples in a file with two bad rows."""

every_loader = pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.source)
every_hub_loader = pytest.mark.parametrize("loader", HUB, ids=lambda loader: loader.source)
every_shuffled_loader = pytest.mark.parametrize("loader", SHUFFLED, ids=lambda loader: loader.source)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    """Skip the 5 s that `datasets` waits after a shuffled stream of parquet files."""
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


# --- samples, order, take ----------------------------------------------------------------------------


@every_loader
def test_samples_in_order(loader, tmp_path):
    path = loader.write(tmp_path, range(6))
    samples = loader.unshuffled(path=path)
    assert iter(samples) is samples
    found = list(samples)
    assert numbers_of(found) == list(range(6))
    assert {type(sample) for sample in found} == {ChatSample if loader.chat else PretrainSample}
    assert {sample.source for sample in found} == {loader.source}
    assert not any("revision" in sample.meta for sample in found)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found[0].source = "other"
    found[0].meta["mine"] = 1  # each sample has its own meta
    assert not any("mine" in sample.meta for sample in [*found[1:], *loader.unshuffled(path=path)])


@every_loader
@pytest.mark.parametrize("take", [0, 3, 9, None])
def test_take_counts_samples_and_not_dropped_rows(loader, tmp_path, take):
    path = loader.write(tmp_path, MIXED)
    if loader.source == "oasst1":  # counts trees, also those without a valid thread
        wanted = [number for number in MIXED[:take] if number is not None]
    else:
        wanted = [0, 1, 2, 3][:take]
    assert numbers_of(loader.unshuffled(path=path, **{loader.take: take})) == wanted


@every_loader
def test_an_invalid_take_is_an_error_before_reading(loader, tmp_path):
    for take in (-1, 2.0):
        with pytest.raises(ValueError, match=rf"{loader.take}.*{take}"):
            list(loader.iterate(path=tmp_path / "nowhere", **{loader.take: take}))


@every_loader
def test_a_missing_path_is_named(loader, tmp_path):
    with pytest.raises((ValueError, OSError), match="nowhere"):
        list(loader.iterate(path=tmp_path / "nowhere"))


@every_shuffled_loader
def test_the_seed_decides_the_order(loader, tmp_path, random_states):
    path = loader.write(tmp_path, range(12))
    before = random_states()
    orders = {seed: numbers_of(loader.iterate(path=path, **{loader.shuffle: True}, seed=seed)) for seed in (0, 1, 42)}
    assert random_states() == before  # no global generator moves
    random.seed(1)
    np.random.seed(1)
    assert numbers_of(loader.iterate(path=path, **{loader.shuffle: True}, seed=0)) == orders[0]  # none is read
    assert len({tuple(order) for order in orders.values()}) == 3
    assert all(sorted(order) == list(range(12)) and order != list(range(12)) for order in orders.values())
    assert numbers_of(loader.unshuffled(path=path, seed=1)) == list(range(12))


@every_loader
def test_dropped_rows_are_counted_and_logged_once_at_the_end(loader, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = loader.write(tmp_path, MIXED)
    stats = {"another": 1}
    samples = loader.unshuffled(path=path, stats=stats)
    assert number_of(next(samples)) == 0
    assert dropped_lines(caplog) == []
    assert numbers_of(samples) == [1, 2, 3]
    del stats["another"]
    ((reason, number),) = stats.items()
    assert number == 2
    (line,) = dropped_lines(caplog)
    assert line.startswith(f"{loader.source}: ") and f"2 {reason}" in line
    list(loader.unshuffled(path=path, stats=stats))
    assert stats == {reason: 4}  # counts add up


@every_loader
def test_dropped_rows_are_logged_without_stats_and_when_closed_early(loader, tmp_path, caplog):
    path = loader.write(tmp_path, [None, 0, 1, None])
    samples = loader.unshuffled(path=path)
    assert number_of(next(samples)) == 0
    samples.close()
    assert len(dropped_lines(caplog)) == 1
    loader.unshuffled(path=path).close()  # never started
    assert len(dropped_lines(caplog)) == 1


@every_hub_loader
def test_files_of_other_formats_in_niels_gpt_data(loader, tmp_path, monkeypatch):
    monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path))
    path = loader.write(tmp_path / loader.dataset_id.rpartition("/")[2], MIXED, "parquet")
    assert numbers_of(loader.unshuffled()) == [0, 1, 2, 3]
    assert numbers_of(loader.unshuffled(path=str(path / "train.parquet"))) == [0, 1, 2, 3]
    mine = loader.write(tmp_path / "mine", [7], "jsonl.gz")
    assert numbers_of(loader.unshuffled(path=mine)) == [7]  # the path wins


# --- the Hub -----------------------------------------------------------------------------------------


@every_hub_loader
def test_what_the_hub_is_asked_for(loader, monkeypatch):
    hub = RowHub([loader.row(number) for number in range(3)]).install(monkeypatch)
    before = copy.deepcopy(hub.rows)
    assert sorted(numbers_of(loader.iterate())) == [0, 1, 2]
    list(loader.unshuffled(split="test"))
    assert hub.rows == before
    config = (loader.config,) if loader.config else ()
    assert [args for args, _ in hub.calls] == [(loader.dataset_id, *config)] * 2
    assert [kwargs["split"] for _, kwargs in hub.calls] == ["train", "test"]
    RowHub([loader.row(5)]).install(monkeypatch)  # load_dataset is looked up at each call
    assert numbers_of(loader.iterate()) == [5]
    assert list(loader.iterate(**{loader.take: 0})) == []


@every_hub_loader
def test_keyword_arguments(loader):
    parameters = inspect.signature(loader.iterate).parameters.values()
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    defaults = {parameter.name: parameter.default for parameter in parameters}
    assert defaults[loader.take] is None and defaults["split"] == "train"
    assert defaults.get("seed", 42) == 42
    assert {name: defaults[name] for name in loader.optional} == dict.fromkeys(loader.optional)


@every_hub_loader
def test_the_revision_is_in_meta(loader, monkeypatch):
    table = datasets.Dataset.from_list([loader.row(number) for number in range(2)])
    table.info.download_checksums = {f"hf://datasets/{loader.dataset_id}@{COMMIT}/data.parquet": {"num_bytes": 1}}
    serve_in_turn(monkeypatch, table)
    assert [sample.meta["revision"] for sample in loader.iterate()] == [COMMIT] * 2
