"""oasst1: threads of message trees against a naive reference, filters, bad data, and local files."""

import copy
import functools
import itertools
import logging
import random
from collections import Counter

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.data.oasst1 import iter_oasst1_sft, reconstruct_threads
from niels_gpt.data.types import ChatMessage, ChatSample
from tests.data import dropped_lines, serve_in_turn, write_rows

ROLES = {"prompter": "user", "assistant": "assistant"}
NO_ID = "messages without a proper id or parent id"
DUPLICATE = "messages with the id of another"
LANGUAGE = "messages in another language"
UNKNOWN_ROLE = "messages with an unknown role"
ORPHAN = "messages whose parent is missing"
UNREACHED = "messages in a cycle or below a left-out one"
EMPTY = "threads with an empty message"
SAME_ROLE = "threads with two turns of one role in a row"


def rec(key, parent=None, role=None, text=None, *, tree="t", lang="en", **more):
    """Return a record; the first letter of its id is its role (p1, a1), and its text contains its id."""
    role = role or {"p": "prompter", "a": "assistant"}[key[0]]
    text = f"text of {key}" if text is None else text
    record = {"message_id": key, "parent_id": parent, "message_tree_id": tree, "role": role, "text": text, "lang": lang}
    return record | more


def paths(samples):
    """The message ids of each thread, as words."""
    return [" ".join(sample.meta["message_ids"]) for sample in samples]


def is_utf8(text):
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class Naive:
    """Naive implementation with recursion and quadratic scans: `threads[tree]` has (ids, roles, texts) per thread."""

    def __init__(self, records, *, english_only=True, max_messages=32):
        self.stats, self.threads = Counter(), {}
        self.first, self.kept = [], []
        for record in records:
            key, parent = record.get("message_id"), record.get("parent_id")
            if type(key) is not str or type(parent) not in (str, type(None)):
                self.stats[NO_ID] += 1
            elif key in [other["message_id"] for other in self.first]:
                self.stats[DUPLICATE] += 1
            else:
                self.first.append(record)
        for record in self.first:
            if english_only and record.get("lang") not in (None, "en"):
                self.stats[LANGUAGE] += 1
            elif record.get("role") not in ("prompter", "assistant"):
                self.stats[UNKNOWN_ROLE] += 1
            else:
                self.kept.append(record)
        for record in self.kept:
            fate = self.climb(record, ())
            if fate is not None:
                self.stats[fate] += 1
        roots = [record for record in self.kept if record.get("parent_id") is None]
        for record in self.first:
            tree = self.tree_of(record)
            mine = [root for root in roots if self.tree_of(root) == tree]
            if mine and tree not in self.threads:
                found = [thread for root in mine for thread in self.walk(root, (), max_messages)]
                self.threads[tree] = [self.view(thread) for thread in found if not self.bad(thread)]
                self.stats.update(filter(None, map(self.bad, found)))

    def tree_of(self, record):
        tree = record.get("message_tree_id")
        return tree if isinstance(tree, str) else record["message_id"]

    def climb(self, record, below):
        """Return None if a root leads to the message, otherwise the reason to drop it."""
        parent = record.get("parent_id")
        if parent is None:
            return None
        if parent not in [other["message_id"] for other in self.first]:
            return ORPHAN
        above = [other for other in self.kept if other["message_id"] == parent]
        if not above or parent in below or parent == record["message_id"]:
            return UNREACHED
        return self.climb(above[0], (*below, record["message_id"]))

    def walk(self, record, above, max_messages):
        thread = (*above, record)
        children = [other for other in self.kept if other.get("parent_id") == record["message_id"]]
        if not children or len(thread) == max_messages:
            return [thread]
        return [found for child in children for found in self.walk(child, thread, max_messages)]

    def text(self, record):
        text = record.get("text")
        return text.strip() if isinstance(text, str) and is_utf8(text) else ""

    def bad(self, thread):
        if "" in [self.text(record) for record in thread]:
            return EMPTY
        roles = [record["role"] for record in thread]
        for i in range(1, len(roles)):
            if roles[i] == roles[i - 1]:
                return SAME_ROLE
        return None

    def view(self, thread):
        return (
            [record["message_id"] for record in thread],
            [ROLES[record["role"]] for record in thread],
            [self.text(record) for record in thread],
        )

    def expected(self, order=None):
        """(tree, leaf, ids, roles, texts) of every thread."""
        order = list(self.threads) if order is None else order
        return [(tree, thread[0][-1], *thread) for tree in order for thread in self.threads[tree]]


def view(samples):
    return [
        (
            sample.meta["message_tree_id"],
            sample.meta["leaf_message_id"],
            sample.meta["message_ids"],
            [message.role for message in sample.messages],
            [message.content for message in sample.messages],
        )
        for sample in samples
    ]


def forest_of(count, faults, seed, storable):
    """Return records in any order; each field is bad with the probability `faults`.

    There are orphans, cycles, self-parents, duplicate ids, other languages and roles, empty texts and null fields.
    With `storable`, all values fit into columns of strings.
    """
    rng = random.Random(seed)
    ids = [f"m{i}" for i in range(count)]
    records = []

    def either(good, *bad):
        return rng.choice(bad) if rng.random() < faults else good

    for i in range(count):
        above = rng.choice(records[-4:]) if records and rng.random() < 0.85 else {}
        turned = "assistant" if above.get("role") == "prompter" else "prompter"
        strange = [] if storable else ["\ud800", 7, ["text"]]
        record = {
            "message_id": either(ids[i], ids[0], *([] if storable else [None, 7])),
            "parent_id": either(above.get("message_id"), rng.choice(ids), ids[i], "gone", None),
            "message_tree_id": either(above.get("message_tree_id", ids[i]), "t", None),
            "role": either(turned, "prompter", "assistant", "tool", None),
            "text": either(rng.choice([f"text {i}", f" \n text {i}\u3000"]), "", " \n\t", None, *strange),
            "lang": either("en", "de", "EN", "", None),
        }
        records.append(record)
    if not storable and rng.random() < 0.5:  # a missing field equals a null
        records = [{key: value for key, value in record.items() if value is not None} for record in records]
    if rng.random() < 0.5:
        rng.shuffle(records)
    return records


def forests(*, storable=False):
    rates = st.sampled_from([0, 0.02, 0.06, 0.2])
    return st.builds(forest_of, st.integers(0, 25), rates, st.integers(0, 10**6), st.just(storable))


LENGTHS = st.sampled_from([1, 2, 3, 4, 32])


@settings(max_examples=200)
@given(forests(), st.booleans(), LENGTHS)
def test_threads_are_those_of_the_naive_reference(records, english_only, max_messages):
    wanted = Naive(records, english_only=english_only, max_messages=max_messages)
    before, stats = copy.deepcopy(records), {}
    found = reconstruct_threads(records, english_only=english_only, max_messages=max_messages, stats=stats)
    assert view(found) == wanted.expected()
    assert stats == dict(wanted.stats)
    assert records == before  # the records are not changed
    for sample in found:
        assert type(sample) is ChatSample
        assert sample.source == "oasst1"
        assert all(type(message) is ChatMessage for message in sample.messages)


@pytest.fixture
def tree():
    """p1 → a1 → p2 → a2, with a second answer a3 to p1, and a second question p3 to a1."""
    return [rec("p1"), rec("a1", "p1"), rec("p2", "a1"), rec("a2", "p2"), rec("a3", "p1"), rec("p3", "a1")]


def change(records, key, **fields):
    return [{**record, **fields} if record["message_id"] == key else record for record in records]


@pytest.mark.parametrize(
    ("key", "fields", "reason", "wanted", "lost"),
    [
        ("a2", {"lang": "de"}, LANGUAGE, ["p1 a1 p2", "p1 a1 p3", "p1 a3"], 0),  # p2 is now a leaf
        ("p2", {"role": "tool"}, UNKNOWN_ROLE, ["p1 a1 p3", "p1 a3"], 1),  # a1 still has a child: it is not a leaf
        ("a1", {"lang": "EN"}, LANGUAGE, ["p1 a3"], 3),
        ("a3", {"role": None}, UNKNOWN_ROLE, ["p1 a1 p2 a2", "p1 a1 p3"], 0),
        ("p1", {"lang": " en"}, LANGUAGE, [], 5),
    ],
)
def test_a_filtered_message_ends_its_branch_at_the_parent(tree, key, fields, reason, wanted, lost):
    stats = {}
    assert paths(reconstruct_threads(change(tree, key, **fields), stats=stats)) == wanted
    assert stats == {reason: 1} | ({UNREACHED: lost} if lost else {})


@pytest.mark.parametrize(
    ("text", "key", "wanted", "threads"),
    [
        ("", "a2", ["p1 a1 p3", "p1 a3"], 1),  # not cut short before it: gone
        ("\u3000\u2028", "a1", ["p1 a3"], 2),
        (None, "p1", [], 3),
        (7, "a3", ["p1 a1 p2 a2", "p1 a1 p3"], 1),
        ("half \udfff", "p3", ["p1 a1 p2 a2", "p1 a3"], 1),
    ],
)
def test_a_thread_with_an_empty_message_is_dropped_and_counted(tree, text, key, wanted, threads):
    stats = {}
    assert paths(reconstruct_threads(change(tree, key, text=text), stats=stats)) == wanted
    assert stats == {EMPTY: threads}


def test_text_is_stripped_and_otherwise_unchanged():
    records = [rec("p1", text=" \n two\r\n\n  lines \t"), rec("a1", "p1", text="\u3000é\u2028x\x00 \x85")]
    (found,) = reconstruct_threads(records)
    assert [message.content for message in found.messages] == ["two\r\n\n  lines", "é\u2028x\x00"]


@pytest.mark.parametrize(
    ("max_messages", "wanted"),
    [
        (1, ["p1"]),
        (2, ["p1 a1", "p1 a3"]),  # p2 and p3 differ below the cut only
        (3, ["p1 a1 p2", "p1 a1 p3", "p1 a3"]),
        (4, ["p1 a1 p2 a2", "p1 a1 p3", "p1 a3"]),
        (5, ["p1 a1 p2 a2", "p1 a1 p3", "p1 a3"]),
    ],
)
def test_max_messages(tree, max_messages, wanted):
    stats = {}
    found = reconstruct_threads(tree, max_messages=max_messages, stats=stats)
    assert paths(found) == wanted
    assert [sample.meta["leaf_message_id"] for sample in found] == [path.split()[-1] for path in wanted]
    assert stats == {}  # messages below the cut are not dropped


@pytest.mark.parametrize("max_messages", [0, -1])
def test_a_cut_before_the_first_message_is_an_error(tree, serve, max_messages):
    serve(datasets.Dataset.from_list(tree))
    with pytest.raises(ValueError, match="max_messages"):
        reconstruct_threads(tree, max_messages=max_messages)
    with pytest.raises(ValueError, match="max_messages"):
        list(iter_oasst1_sft(max_messages=max_messages))


@pytest.mark.parametrize(
    "bad", [{}, {"message_id": 7}, {"text": "x", "role": "prompter"}, rec("p9", 7), rec("p9", ["p1"])]
)
def test_messages_without_a_valid_id_or_parent_are_counted(tree, bad):
    stats = {}
    assert len(reconstruct_threads([bad, *tree, bad], stats=stats)) == 3
    assert stats == {NO_ID: 2}


# --- size --------------------------------------------------------------------------------------------

MANY = 20_000
"""More than the recursion limit."""


def chain(count):
    """One conversation of `count` messages, each below the one before."""
    return [
        {
            "message_id": str(i),
            "parent_id": str(i - 1) if i else None,
            "message_tree_id": "0",
            "role": ("prompter", "assistant")[i % 2],
            "text": "x",
        }
        for i in range(count)
    ]


def test_a_deep_chain():
    records = chain(MANY)
    (short,) = reconstruct_threads(records)
    assert short.meta["message_ids"] == [str(i) for i in range(32)]
    (long,) = reconstruct_threads(records[::-1], max_messages=MANY + 1)
    assert len(long.messages) == MANY
    assert long.meta["leaf_message_id"] == str(MANY - 1)
    assert (long.messages[0].role, long.messages[-1].role) == ("user", "assistant")


def test_a_wide_star():
    records = chain(1) + [{**record, "parent_id": "0", "role": "assistant"} for record in chain(MANY)[1:]]
    found = reconstruct_threads(records)
    assert [sample.meta["leaf_message_id"] for sample in found] == [str(i) for i in range(1, MANY)]
    assert all(len(sample.messages) == 2 for sample in found)
    (cut,) = reconstruct_threads(records, max_messages=1)
    assert cut.meta["message_ids"] == ["0"]


def test_a_long_cycle_and_a_deep_orphan():
    ring = chain(MANY)
    ring[0]["parent_id"] = str(MANY - 1)
    stats = {}
    assert reconstruct_threads(ring, stats=stats) == []
    assert stats == {UNREACHED: MANY}
    ring[0]["parent_id"] = "gone"
    stats = {}
    assert reconstruct_threads(ring, stats=stats) == []
    assert stats == {ORPHAN: MANY}


def test_meta():
    question, answer, other = rec("p1"), rec("a1", "p1", lang=None), rec("p2", lang=None)
    assert [sample.meta for sample in reconstruct_threads([question, answer, other])] == [
        {"message_tree_id": "t", "leaf_message_id": "a1", "message_ids": ["p1", "a1"], "lang": "en"},
        {"message_tree_id": "t", "leaf_message_id": "p2", "message_ids": ["p2"]},
    ]


def test_reasons_are_counted_and_logged_once(tree, caplog):
    caplog.set_level(logging.INFO)
    bad = {
        DUPLICATE: [rec("a3", "p1") for _ in range(2)],
        LANGUAGE: [rec(f"p1{i}", lang="de") for i in range(3)],
        UNKNOWN_ROLE: [{**rec(f"p2{i}"), "role": role} for i, role in enumerate(["tool", "", 7, ["prompter"], {}])],
        ORPHAN: [rec(f"p3{i}", "gone") for i in range(4)],
        UNREACHED: [rec(f"p4{i}", f"p4{i}") for i in range(6)],
        EMPTY: [rec(f"p5{i}", text=" ") for i in range(7)],
        SAME_ROLE: [rec(f"p6{i}", "p1") for i in range(8)],
        NO_ID: [{**rec("p7"), "message_id": None} for _ in range(9)],
    }
    stats = {}
    assert len(reconstruct_threads([*tree, *itertools.chain(*bad.values())], stats=stats)) == 3
    assert stats == {reason: len(records) for reason, records in bad.items()}
    (line,) = dropped_lines(caplog)
    assert "oasst1" in line and str(sum(stats.values())) in line
    for reason, number in stats.items():
        assert f"{number} {reason}" in line


# --- the loader --------------------------------------------------------------------------------------

COLUMNS = ("message_id", "parent_id", "message_tree_id", "role", "text", "lang")


def stored(records, columns=COLUMNS):
    """As a `datasets.Dataset`, which has every column in every row."""
    features = datasets.Features({name: datasets.Value("string") for name in columns})
    return datasets.Dataset.from_dict({name: [r.get(name) for r in records] for name in columns}, features=features)


@pytest.fixture
def serve(monkeypatch):
    return functools.partial(serve_in_turn, monkeypatch)


@settings(max_examples=30)
@given(forests(storable=True), st.booleans(), LENGTHS, st.booleans(), st.integers(0, 5), st.none() | st.integers(0, 4))
def test_the_loader_is_the_naive_reference(records, english_only, max_messages, shuffle, seed, take):
    naive = Naive(records, english_only=english_only, max_messages=max_messages)
    order = list(naive.threads)
    if shuffle:
        random.Random(seed).shuffle(order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_dataset", lambda *_, **__: stored(records))
        found = iter_oasst1_sft(
            english_only=english_only, max_messages=max_messages, shuffle_trees=shuffle, seed=seed, take_trees=take
        )
        assert view(found) == naive.expected(order[:take])


def test_defaults(serve):
    """Shuffled with 42, English only, all trees, cut at 32."""
    records = [rec(f"p{i}", tree=f"t{i}") for i in range(20)] + [rec(f"a{i}", f"p{i % 9}", tree="x") for i in range(20)]
    records += [{**record, "message_tree_id": "long", "lang": "en"} for record in chain(40)]
    records += [rec("p999", lang="de", tree="german")]
    calls = serve(stored(records))
    order = [*(f"t{i}" for i in range(20)), "long"]
    random.Random(42).shuffle(order)
    found = list(iter_oasst1_sft())
    assert view(found) == Naive(records).expected(order)
    assert max(len(sample.messages) for sample in found) == 32
    ((args, kwargs),) = calls
    assert args[0] == "OpenAssistant/oasst1"
    assert kwargs["split"] == "train"


def test_a_tree_with_a_kept_root_counts_although_its_threads_are_dropped(serve):
    serve(stored([rec("p1", text="", tree="one"), rec("p2", tree="two")]))
    stats = {}
    assert paths(iter_oasst1_sft(shuffle_trees=False, take_trees=1, stats=stats)) == []
    assert stats == {EMPTY: 1}
    assert paths(iter_oasst1_sft(shuffle_trees=False, take_trees=2)) == ["p2"]


def test_lone_surrogates_in_an_iterable_dataset(serve):
    records = [rec("p1"), rec("a1", "p1", text="half \ud83d"), rec("a2", "p1")]
    serve(datasets.IterableDataset.from_generator(lambda: iter(records)))
    stats = {}
    assert paths(iter_oasst1_sft(stats=stats)) == ["p1 a2"]
    assert stats == {EMPTY: 1}


@pytest.mark.parametrize("left", ["lang", "message_tree_id"])
def test_a_dataset_without_an_optional_column(serve, left):
    records = [{k: v for k, v in r.items() if k != left} for r in (rec("p1"), rec("a1", "p1"), rec("a2", "p1"))]
    serve(stored(records, [name for name in COLUMNS if name != left]))
    assert paths(iter_oasst1_sft()) == ["p1 a1", "p1 a2"]


OTHER_COLUMNS = {  # of the dataset on the Hub
    "created_date": "2023-02-06T18:48:49.391686+00:00",
    "rank": None,
    "detoxify": {"toxicity": 0.00044},
    "labels": {"name": ["spam", "lang_mismatch"], "value": [0.0, 0.5]},
}


def test_local_files_with_the_columns_of_the_hub(tmp_path):
    records = [
        rec("p1", tree="p1", text=" How are you? \n"),
        rec("a1", "p1", tree="p1"),
        rec("a2", "p1", tree="p1", lang="de", text="Gut, und é\u2028?"),
        rec("p3", tree="p3"),
        rec("a3", "p3", tree="p3", lang="de"),
    ]
    path = write_rows(tmp_path / "train.parquet", [record | OTHER_COLUMNS for record in records])
    stats = {}
    found = list(iter_oasst1_sft(path=path, shuffle_trees=False, stats=stats))
    assert paths(found) == ["p1 a1", "p3"]
    assert found[0].messages == [ChatMessage("user", "How are you?"), ChatMessage("assistant", "text of a1")]
    assert stats == {LANGUAGE: 2}
    every = list(iter_oasst1_sft(path=path, shuffle_trees=False, english_only=False))
    assert paths(every) == ["p1 a1", "p1 a2", "p3 a3"]
    assert every[1].messages[1].content == "Gut, und é\u2028?"
