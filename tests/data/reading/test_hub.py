"""Broken streams, failing Hubs, and their error messages, with real `datasets` objects."""

import dataclasses
import errno
import functools
import itertools
import logging
import os
import socket
import sys
import time

import datasets
import huggingface_hub.errors
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.data.reading import hub as hub_module
from niels_gpt.data.reading.hub import (
    ATTEMPTS,
    DataUnavailable,
    HubReader,
    HubRequest,
    Shuffle,
    fixed_revisions,
    go_offline,
    open_dataset,
    revision_of,
)
from niels_gpt.data.wikitext import load_wikitext
from tests.data.reading.failures import FINAL, MISSING, NAME, TRANSIENT, Refused, caused, hub_error, reset

STREAM = HubRequest(NAME, "some-config", "train", streaming=True)
TABLE = HubRequest(NAME, "some-config", "train")
TWO_WAYS = (NAME, "connect to the Hub", "path=", "NIELS_GPT_DATA")


def numbered(n):
    return [{"text": f"row {i}", "number": i} for i in range(n)]


class Fake:
    """Replaces `datasets.load_dataset`. Call k fails as `plan[k]` says; later calls succeed.

    An entry of the plan is (row, error): the error is raised instead of that row; None: when the dataset is opened.
    """

    def __init__(self, rows, plan=(), *, revisions=(), files=1):
        self.rows, self.plan, self.files = rows, list(plan), files
        self.revisions = list(revisions)
        self.calls = []
        self.pauses = []

    def load_dataset(self, *args, split=None, streaming=False, **kwargs):
        opening = len(self.calls)
        self.calls.append((args, {"split": split, "streaming": streaming, **kwargs}))
        at, error = self.plan[opening] if opening < len(self.plan) else (None, None)
        if error is not None and at is None:
            raise error
        revision = self.revisions[opening] if opening < len(self.revisions) else None
        names = [f"hf://datasets/{NAME}@{revision or 'main'}/data/train-{i}.parquet" for i in range(self.files)]
        if not streaming:
            table = datasets.Dataset.from_list(self.rows)
            table.info.download_checksums = {name: {} for name in names}
            return table
        rows, files = self.rows, self.files

        def generate(names):
            for name in names:
                first = int(name.rpartition("-")[2].partition(".")[0])
                for i in range(first, len(rows), files):
                    if i == at:
                        raise error
                    yield dict(rows[i])
                if at == len(rows) and first == 0:
                    raise error

        return datasets.IterableDataset.from_generator(generate, gen_kwargs={"names": names})

    def install(self, monkeypatch):
        monkeypatch.setattr(datasets, "load_dataset", self.load_dataset)
        monkeypatch.setattr(time, "sleep", self.pauses.append)
        return self


@pytest.fixture
def fake(monkeypatch):
    """Return a function that installs a fake Hub."""

    def install(*args, **kwargs):
        return Fake(*args, **kwargs).install(monkeypatch)

    return install


def read(request=STREAM, shuffle=None):
    return [row for _, row in HubReader(request, shuffle=shuffle)]


def unbroken(rows, shuffle, files=1):
    """Return the rows in the order of `datasets`."""
    stream = Fake(rows, files=files).load_dataset(NAME, split="train", streaming=True)
    if shuffle is not None:
        stream = stream.shuffle(seed=shuffle.seed, buffer_size=shuffle.buffer_size, max_buffer_input_shards=1)
    return list(stream)


# --- rows --------------------------------------------------------------------------------------------


def test_rows_of_a_stream_and_their_numbers(fake):
    rows = numbered(12)
    hub = fake(rows)
    assert list(HubReader(STREAM)) == list(enumerate(rows))
    assert hub.calls == [((NAME, "some-config"), {"split": "train", "streaming": True})]
    assert hub.pauses == []
    assert len(list(HubReader(HubRequest(NAME, streaming=True)))) == 12
    assert hub.calls[1][0] == (NAME,)  # no config


def test_a_shuffled_stream_is_in_the_order_of_datasets(fake):
    rows, shuffle = numbered(50), Shuffle(7, 8)
    wanted = unbroken(rows, shuffle, files=3)
    fake(rows, files=3)
    found = list(HubReader(STREAM, shuffle=shuffle))
    assert [row for _, row in found] == wanted
    assert wanted != rows
    assert sorted(row["number"] for row in wanted) == list(range(50))
    assert {number for number, _ in found} == {None}


@pytest.mark.parametrize("n", [0, 1000, 1001])
def test_rows_of_a_table_and_their_numbers(fake, n):
    rows = numbered(n)
    fake(rows)
    assert list(HubReader(TABLE)) == list(enumerate(rows))


@pytest.mark.parametrize("n", [1, 2500])
def test_a_shuffled_table_has_every_row_once_with_its_number(fake, n):
    rows = numbered(n)
    fake(rows)
    found = list(HubReader(TABLE, shuffle=Shuffle(3)))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(3)).tolist()
    assert found == [(i, rows[i]) for i in order]


def test_only_the_requested_columns(fake):
    fake([{"text": "a", "number": 1, "rest": "x"}, {"text": "b", "number": 2, "rest": "y"}])
    request = HubRequest(NAME, columns=("number", "text", "not there"))
    assert list(HubReader(request)) == [(0, {"text": "a", "number": 1}), (1, {"text": "b", "number": 2})]
    assert read(HubRequest(NAME, columns=("not there",)))[0] == {"text": "a", "number": 1, "rest": "x"}


def test_a_reader_can_be_read_twice(fake):
    rows = numbered(5)
    fake(rows)
    reader = HubReader(STREAM)
    assert list(reader) == list(reader) == list(enumerate(rows))


def test_rows_are_read_one_at_a_time(monkeypatch):
    pulled = []

    def generate():
        for row in numbered(100):
            pulled.append(row)
            yield row

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(generate))
    rows = list(itertools.islice(HubReader(STREAM), 7))
    assert [row for _, row in rows] == numbered(7)
    assert len(pulled) == 7


# --- streams that break ------------------------------------------------------------------------------

ORDERS = [None, Shuffle(0, 1), Shuffle(1, 4), Shuffle(2, 20), Shuffle(3, 1000)]


@pytest.mark.parametrize(
    ("shuffle", "breaks"),
    list(zip(ORDERS, ([1, None, 2, None], [5, 5, 5], [0, 0, 0, 0], [12, 3, 15], [19, 0, 20, 1]), strict=True)),
    ids=str,
)
def test_a_stream_broken_several_times(fake, shuffle, breaks):
    rows = numbered(20)
    wanted = unbroken(rows, shuffle)
    hub = fake(rows, [(at, reset()) for at in breaks])
    assert read(shuffle=shuffle) == wanted
    assert len(hub.calls) == len(breaks) + 1
    assert len({str(call) for call in hub.calls}) == 1


@given(
    n=st.integers(0, 25),
    breaks=st.lists(st.one_of(st.none(), st.integers(0, 26)), max_size=ATTEMPTS - 1),
    shuffle=st.one_of(st.none(), st.builds(Shuffle, st.integers(0, 2**32), st.integers(1, 30))),
    files=st.integers(1, 3),
)
@settings(max_examples=30)
def test_a_stream_broken_anywhere_gives_the_same_rows(n, breaks, shuffle, files):
    rows = numbered(n)
    wanted = [(number if shuffle is None else None, row) for number, row in enumerate(unbroken(rows, shuffle, files))]
    with pytest.MonkeyPatch.context() as patch:
        Fake(rows, [(at, reset()) for at in breaks], files=files).install(patch)
        assert list(HubReader(STREAM, shuffle=shuffle)) == wanted


@given(breaks=st.sets(st.integers(1, 30), max_size=15))
@settings(max_examples=15)
def test_a_stream_that_advances_may_break_any_number_of_times(breaks):
    rows = numbered(30)
    with pytest.MonkeyPatch.context() as patch:
        hub = Fake(rows, [(at, reset()) for at in sorted(breaks)]).install(patch)
        assert read() == rows
    assert len(hub.pauses) == len(breaks)
    assert all(0.5 <= pause <= 1.5 for pause in hub.pauses)  # each time the first failure again


def test_progress_resets_the_back_off(fake):
    hub = fake(numbered(10), [(2, reset()), (2, reset()), (2, reset()), (3, reset()), (3, reset())])
    assert read() == numbered(10)
    bounds = [(0.5, 1.5), (1, 3), (2, 6), (0.5, 1.5), (1, 3)]
    # The fourth opening gave row 2, so its break is the first failure after progress.
    assert [low <= pause <= high for pause, (low, high) in zip(hub.pauses, bounds, strict=True)] == [True] * 5


def test_repeated_rows_are_not_progress(fake):
    hub = fake(numbered(20), [(10, reset()), (9, reset()), (5, reset()), (10, reset()), (0, reset()), (19, reset())])
    found = []
    with pytest.raises(DataUnavailable, match="10 rows"):
        for row in HubReader(STREAM):
            found.append(row)
    assert found == list(enumerate(numbered(10)))
    assert len(hub.calls) == ATTEMPTS


def test_a_stream_that_always_breaks_at_one_row_fails(fake):
    hub = fake(numbered(20), [(3, reset()) for _ in range(50)])
    found = []
    with pytest.raises(DataUnavailable) as caught:
        for _, row in HubReader(STREAM):
            found.append(row)
    assert found == numbered(3)
    assert len(hub.calls) == ATTEMPTS == 5
    assert len(hub.pauses) == 4
    for part in (*TWO_WAYS, "some-config", "Connection reset by peer", "5 attempts", "3 rows"):
        assert part in str(caught.value)


def test_a_shuffled_reader_that_is_closed_early_prints_nothing(fake, monkeypatch):
    ignored = []  # errors that Python would print as "Exception ignored in ..."
    monkeypatch.setattr(sys, "unraisablehook", lambda event: ignored.append(str(event.exc_value)))
    for at in (0, 3, 5, 19):
        fake(numbered(20), [(at, reset())])
        assert len(list(itertools.islice(HubReader(STREAM, shuffle=Shuffle(0, 4)), 2))) == 2
    assert ignored == []


def test_no_global_generator_moves_when_a_stream_breaks(fake, random_states):
    hub = fake(numbered(20), [(3, reset()), (8, reset())])
    before = random_states()
    assert len(read(shuffle=Shuffle(0, 5))) == 20
    assert len(hub.pauses) == 2
    assert random_states() == before


# --- revisions ---------------------------------------------------------------------------------------

OLD, NEW = "0123456789abcdef" * 2 + "01234567", "fedcba9876543210" * 2 + "fedcba98"


def test_a_new_revision_in_the_middle_is_an_error(fake):
    hub = fake(numbered(10), [(4, reset())], revisions=[OLD, NEW, NEW, NEW, NEW, NEW])
    found = []
    with pytest.raises(DataUnavailable) as caught:
        for _, row in HubReader(STREAM):
            found.append(row)
    assert found == numbered(4)
    assert [call[1].get("revision") for call in hub.calls] == [None, None, OLD]  # it asks for the old one, once
    for part in (NAME, OLD, NEW):
        assert part in str(caught.value)


def test_a_stream_resumes_at_the_revision_it_began_with(fake):
    hub = fake(numbered(10), [(4, reset())], revisions=[OLD, NEW, OLD])
    reader = HubReader(STREAM)
    assert [row for _, row in reader] == numbered(10)
    assert reader.revision == OLD
    assert [call[1].get("revision") for call in hub.calls] == [None, None, OLD]


@pytest.mark.parametrize("request_", [STREAM, TABLE], ids=["stream", "table"])
def test_fixed_revisions_read_the_first_one_again(fake, request_):
    hub = fake(numbered(3), revisions=[OLD, NEW, OLD, NEW, NEW])
    with fixed_revisions():
        for _ in range(2):
            with fixed_revisions():  # an inner context continues the outer one
                reader = HubReader(request_)
                assert len(list(reader)) == 3
            assert reader.revision == OLD
    assert [call[1].get("revision") for call in hub.calls] == [None, None, OLD]
    reader = HubReader(request_)
    list(reader)
    assert reader.revision == NEW


def test_fixed_revisions_keep_a_revision_that_the_request_names(fake):
    hub = fake(numbered(3), revisions=[OLD, NEW])
    with fixed_revisions():
        open_dataset(TABLE)
        assert revision_of(open_dataset(dataclasses.replace(TABLE, revision="next"))) == NEW
    assert [call[1].get("revision") for call in hub.calls] == [None, "next"]


def test_a_dataset_without_a_namespace_is_also_read_under_its_new_id(fake, monkeypatch):
    hub = fake(numbered(3))
    load = hub.load_dataset

    def refuse(name, *args, **kwargs):
        if "/" not in name:
            raise ValueError(f"Repository id must be 'namespace/name', got '{name}'")
        return load(name, *args, **kwargs)

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    assert len(open_dataset(HubRequest("wikitext", "some-config"))) == 3
    assert hub.calls[0][0] == ("Salesforce/wikitext", "some-config")
    with pytest.raises(DataUnavailable, match=r"namespace/name.*squad"):
        open_dataset(HubRequest("squad"))


@pytest.mark.parametrize(("at", "revisions"), [(0, [OLD, NEW]), (4, [NEW, NEW])])
def test_a_stream_resumes_at_the_same_revision_or_before_its_first_row(fake, at, revisions):
    fake(numbered(10), [(at, reset())], revisions=revisions)
    reader = HubReader(STREAM)
    assert [row for _, row in reader] == numbered(10)
    assert reader.revision == NEW


def test_revision_of_a_dataset(tmp_path):
    stream = Fake(numbered(3), revisions=[OLD]).load_dataset(NAME, streaming=True)
    assert revision_of(stream) == OLD
    assert revision_of(stream.shuffle(seed=1, buffer_size=2)) == OLD
    assert revision_of(stream.filter(lambda row: True)) == OLD
    assert revision_of(Fake(numbered(3), revisions=[NEW]).load_dataset(NAME)) == NEW
    assert revision_of(datasets.Dataset.from_list(numbered(3))) is None
    assert revision_of(Fake(numbered(3), revisions=["main"]).load_dataset(NAME, streaming=True)) is None
    assert revision_of(Fake(numbered(3), revisions=[OLD[:39]]).load_dataset(NAME, streaming=True)) is None
    assert revision_of(object()) is None
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    for streaming in (True, False):
        assert revision_of(open_dataset(HubRequest(NAME, streaming=streaming, path=tmp_path))) is None


# --- pauses ------------------------------------------------------------------------------------------


def failing_pauses(fake, error=reset, **kwargs):
    hub = fake([], [(None, error()) for _ in range(100)], **kwargs)
    with pytest.raises(DataUnavailable):
        read()
    return hub.pauses


def test_pauses_grow_and_vary(fake):
    runs = [failing_pauses(fake) for _ in range(12)]
    for pauses in runs:
        assert len(pauses) == 4
        for k, pause in enumerate(pauses):
            assert 0.5 * 2**k <= pause <= 1.5 * 2**k
        assert pauses == sorted(pauses)
    for k in range(4):
        factors = [pauses[k] / 2**k for pauses in runs]
        assert len(set(factors)) > 9
        assert max(factors) - min(factors) > 0.5  # spread over 0.5 to 1.5


def test_pauses_have_an_upper_limit(fake, monkeypatch):
    monkeypatch.setattr(hub_module, "ATTEMPTS", 12)
    pauses = failing_pauses(fake)
    assert len(pauses) == 11
    assert all(30 <= pause <= 90 for pause in pauses[6:])


def test_open_dataset_retries(fake):
    hub = fake(numbered(4), [(None, reset()), (None, Refused(503)), (None, TimeoutError())])
    assert list(open_dataset(TABLE)) == numbered(4)
    assert len(hub.pauses) == 3
    hub = fake([], [(None, reset()) for _ in range(9)])
    with pytest.raises(DataUnavailable) as caught:
        open_dataset(TABLE)
    assert len(hub.calls) == 5 and len(hub.pauses) == 4
    for part in TWO_WAYS:
        assert part in str(caught.value)


def test_open_dataset_without_a_split_returns_all(hub):
    hub.rows = {"train": ["a", "b"], "validation": ["c"], "test": []}
    splits = open_dataset(HubRequest("wikitext", "wikitext-103-raw-v1", split=None))
    assert {name: list(rows["text"]) for name, rows in splits.items()} == hub.rows
    assert hub.calls == [("wikitext", "wikitext-103-raw-v1")]


def test_each_retry_is_logged(fake, caplog):
    fake(numbered(9), [(2, reset()), (2, Refused(503))])
    with caplog.at_level(logging.WARNING, logger="niels_gpt.data"):
        assert read() == numbered(9)
    assert len(caplog.messages) == 2
    for message, reason in zip(caplog.messages, ("Connection reset by peer", "HTTP 503"), strict=True):
        assert NAME in message and reason in message and "2 rows" in message


@pytest.mark.parametrize(
    "error",
    [
        lambda: hub_error(503, {"retry-after": "100"}),
        lambda: caused(datasets.exceptions.DatasetGenerationError("generating"), Refused(429, {"Retry-After": "100"})),
    ],
    ids=["503", "cause"],
)
def test_retry_after_is_respected(fake, error):
    hub = fake(numbered(3), [(1, error())])
    assert read() == numbered(3)
    assert len(hub.pauses) == 1
    assert 100 <= hub.pauses[0] < 160


def test_retry_after_has_an_upper_limit(fake):
    assert failing_pauses(fake, lambda: Refused(429, {"Retry-After": "1000000"})) == [300] * 4


@pytest.mark.parametrize("value", ["0.01", "nan", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_an_invalid_retry_after_is_ignored(fake, value):
    pauses = failing_pauses(fake, lambda: Refused(429, {"Retry-After": value}))
    assert len(pauses) == 4
    assert all(0.5 * 2**k <= pause <= 1.5 * 2**k for k, pause in enumerate(pauses))


# --- transient and final errors ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["status 429", "network down, nothing cached"])
def test_transient_errors_are_retried(fake, name):
    hub = fake(numbered(5), [(None, TRANSIENT[name]), (2, TRANSIENT[name])])
    assert read() == numbered(5)
    assert len(hub.calls) == 3 and len(hub.pauses) == 2


@pytest.mark.parametrize(("name", "at"), [("status 404", None), ("disk full", 2)])
def test_final_errors_are_raised_at_once(fake, name, at):
    hub = fake(numbered(5), [(at, FINAL[name])])
    with pytest.raises(DataUnavailable) as caught:
        read()
    assert hub.pauses == []
    assert len(hub.calls) == 1
    message = str(caught.value)
    assert NAME in message
    assert "\n" not in message


def test_the_error_is_both_an_oserror_and_a_valueerror(fake):
    fake([], [(None, FINAL["KeyError"])])
    with pytest.raises(DataUnavailable) as caught:
        read()
    assert isinstance(caught.value, OSError) and isinstance(caught.value, ValueError)
    assert caught.value.__cause__ is FINAL["KeyError"]


def message_of(fake, error, request=STREAM):
    fake([], [(None, error)])
    with pytest.raises(DataUnavailable) as caught:
        read(request)
    return str(caught.value)


@pytest.mark.parametrize("name", ["gated", "status 401", "hub status 403"])
def test_gated_datasets_need_a_login(fake, name):
    message = message_of(fake, FINAL[name])
    for part in (NAME, "hf auth login", f"https://huggingface.co/datasets/{NAME}", "path=", "NIELS_GPT_DATA"):
        assert part in message


@pytest.mark.parametrize("name", ["missing repo", "DatasetNotFoundError", "status 404"])
def test_a_missing_dataset_hints_at_the_id(fake, name):
    message = message_of(fake, FINAL[name])
    for part in (NAME, "Check the id", f"https://huggingface.co/datasets/{NAME}", "path=", "NIELS_GPT_DATA"):
        assert part in message
    assert "HF_HUB_OFFLINE" not in message


def test_a_missing_dataset_without_login(fake):
    # The Hub answers 401 for an id that does not exist, and huggingface_hub then mentions "private or gated".
    missing = hub_error(401, MISSING)
    assert "gated" in str(missing)
    words = f"Dataset '{NAME}' doesn't exist on the Hub or cannot be accessed."
    message = message_of(fake, caused(datasets.exceptions.DatasetNotFoundError(words), missing))
    assert "Check the id" in message
    assert "It is gated" not in message


def test_an_id_with_gated_in_it_is_not_gated(fake):
    error = ConnectionError("Couldn't reach 'me/aggregated-books' on the Hub (OfflineModeIsEnabled)")
    message = message_of(fake, error, HubRequest("me/aggregated-books", streaming=True))
    assert "It is gated" not in message
    assert "connect to the Hub" in message


@pytest.mark.parametrize(
    ("name", "config", "split", "known"),
    [
        ("unknown split", "some-config", "nosuch", "'train', 'test'"),
        ("bad split", "some-config", "nosuch", "'train', 'test'"),
        ("bad config", "nosuch", "train", "'one', 'two'"),
    ],
)
def test_an_unknown_split_or_config_names_the_known_ones(fake, name, config, split, known):
    message = message_of(fake, FINAL[name], HubRequest(NAME, config, split, streaming=True))
    for part in (NAME, "nosuch", known):
        assert part in message
    assert "connect" not in message and "log in" not in message


@pytest.fixture
def sockets(monkeypatch):
    """The attempted uses of sockets and of time.sleep."""
    tried = []

    def refuse(what, *args, **kwargs):
        tried.append((what, args))
        raise OSError(errno.ENETUNREACH, f"a test tried {what}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, functools.partialmethod(lambda _, *a, n: refuse(n, *a), n=name))
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, functools.partial(refuse, name))
    monkeypatch.setattr(time, "sleep", lambda seconds: tried.append(("sleep", seconds)))
    return tried


@pytest.mark.parametrize(
    ("load", "dataset_id"),
    [
        (lambda: list(iter_fineweb_edu(take=1)), "HuggingFaceFW/fineweb-edu"),
        (lambda: list(iter_fineweb_edu(take=1, streaming=False)), "HuggingFaceFW/fineweb-edu"),
        (load_wikitext, "wikitext"),
    ],
    ids=["stream", "table", "all splits"],
)
def test_go_offline(sockets, monkeypatch, load, dataset_id):
    """It also works after the libraries are imported."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    go_offline()
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert datasets.config.HF_HUB_OFFLINE is huggingface_hub.constants.HF_HUB_OFFLINE is True
    with pytest.raises(DataUnavailable) as caught:
        load()
    assert sockets == []
    name = dataset_id.rpartition("/")[2]
    for part in (dataset_id, "connect to the Hub", "HF_HUB_OFFLINE", "path=", "NIELS_GPT_DATA=", f"/{name}/"):
        assert part in str(caught.value)


def test_local_files_need_no_socket(sockets, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "here"}\n', encoding="utf-8")
    for streaming in (True, False):
        assert read(HubRequest(NAME, streaming=streaming, path=tmp_path)) == [{"text": "here"}]
    assert sockets == []


@pytest.mark.parametrize(("disabled", "works"), [(True, False), (False, True), (False, False)])
def test_log_level_and_progress_bars_of_datasets_are_restored(fake, tmp_path, disabled, works):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n' if works else "{", encoding="utf-8")
    logger = logging.getLogger("datasets")
    level, bars = logger.level, datasets.utils.are_progress_bars_disabled()
    try:
        logger.setLevel(17)
        (datasets.utils.disable_progress_bars if disabled else datasets.utils.enable_progress_bars)()
        if works:
            assert len(list(HubReader(HubRequest(NAME, path=tmp_path)))) == 1
        else:
            with pytest.raises(ValueError, match=r"train\.jsonl"):
                list(HubReader(HubRequest(NAME, path=tmp_path)))
        assert logger.level == 17
        assert datasets.utils.are_progress_bars_disabled() is disabled
    finally:
        logger.setLevel(level)
        (datasets.utils.disable_progress_bars if bars else datasets.utils.enable_progress_bars)()


# --- progress ----------------------------------------------------------------------------------------


def test_rows_that_fill_the_buffer_are_progress(fake):
    """Ten breaks, each at a later row, before a shuffled stream yields its first row."""
    rows = numbered(40)
    hub = fake(rows, [(at, reset()) for at in range(3, 33, 3)])
    assert read(shuffle=Shuffle(7, 100)) == unbroken(rows, Shuffle(7, 100))
    assert len(hub.calls) == 11


@pytest.mark.parametrize("plan", [[(50, reset()), (None, reset())], [(50, reset()), (20, reset())]])
def test_time_between_rows_does_not_count(fake, monkeypatch, plan):
    """With one row per second, two failures after fifty rows are still only two failures."""
    rows = numbered(100)
    fake(rows, plan)
    now = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    assert read() == rows


def test_two_slow_failures_are_final(fake, monkeypatch):
    """The first slow failure is retried; after PATIENCE seconds in failing calls there is no further attempt."""
    hub = fake([], [(None, reset()) for _ in range(9)])
    now = itertools.count(step=hub_module.PATIENCE + 1)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    with pytest.raises(DataUnavailable):
        read()
    assert len(hub.calls) == 2
    hub = fake(numbered(2), [(None, reset())])
    assert read() == numbered(2)


def test_failures_up_to_the_patience_are_retried(fake, monkeypatch):
    hub = fake([], [(None, reset()) for _ in range(9)])
    now = itertools.count(step=hub_module.PATIENCE / 3)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    with pytest.raises(DataUnavailable):
        read()
    assert len(hub.calls) == 4  # 10, 20 and 30 seconds are not above 30


# --- names of local files ----------------------------------------------------------------------------

ODD_NAMES = ["a[1]", "b*", "c?d", "i{1,2}", "j%20 k#l"]


@pytest.mark.parametrize(("name", "streaming"), [(name, i % 2 == 0) for i, name in enumerate(ODD_NAMES)])
def test_names_are_not_patterns(tmp_path, monkeypatch, name, streaming):
    folder = tmp_path / name
    folder.mkdir()
    (folder / f"{name}.jsonl").write_text('{"text": "mine"}\n', encoding="utf-8")
    (folder / "b2.jsonl").write_text('{"text": "another"}\n', encoding="utf-8")
    for path in (folder / f"{name}.jsonl", f"{name}.jsonl"):
        monkeypatch.chdir(folder)
        assert read(HubRequest(NAME, streaming=streaming, path=path)) == [{"text": "mine"}]
    assert {row["text"] for row in read(HubRequest(NAME, streaming=streaming, path=folder))} == {"mine", "another"}
    splits = open_dataset(HubRequest(NAME, split=None, path=folder / f"{name}.jsonl"))
    assert list(splits["train"]["text"]) == ["mine"]


@pytest.mark.parametrize("request_", [HubRequest(NAME), HubRequest(NAME, split=None), HubRequest(NAME, streaming=True)])
def test_a_path_with_two_colons_is_an_error(tmp_path, request_):
    (tmp_path / "a::b").mkdir()
    path = tmp_path / "a::b" / "train.jsonl"
    path.write_text('{"text": "mine"}\n', encoding="utf-8")
    request = dataclasses.replace(request_, path=path)
    with pytest.raises(ValueError, match="rename") as caught:
        open_dataset(request) if request.split is None else read(request)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("streaming", [True, False])
def test_an_edited_file_is_read_again(tmp_path, streaming):
    """Also with its old size and time, as after unpacking an archive again."""
    file = tmp_path / "train.jsonl"
    for text in ("one", "two"):
        file.write_text(f'{{"text": "{text}"}}\n', encoding="utf-8")
        os.utime(file, (1, 1))
        assert read(HubRequest(NAME, streaming=streaming, path=file)) == [{"text": text}]


def test_files_of_a_split_with_different_columns(tmp_path):
    (tmp_path / "train-00000-of-00002.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    (tmp_path / "train-00001-of-00002.jsonl").write_text('{"text": "a", "url": "b"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="the same columns") as caught:
        read(HubRequest(NAME, path=tmp_path))
    assert str(tmp_path / "train-00001-of-00002.jsonl") in str(caught.value) and "\n" not in str(caught.value)
