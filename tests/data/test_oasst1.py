"""oasst1: threads of message trees against a naive reference, filters, bad data, and local files."""

import copy
import functools
import itertools
import json
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


# --- the reference -----------------------------------------------------------------------------------


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


@settings(max_examples=60)
@given(forests(), LENGTHS)
def test_the_rules_for_every_thread(records, max_messages):
    """The rules of the specification, without the reference."""
    by_id = {}
    for record in records:
        if isinstance(record.get("message_id"), str) and isinstance(record.get("parent_id"), str | None):
            by_id.setdefault(record["message_id"], record)
    found = reconstruct_threads(records, max_messages=max_messages)
    for sample in found:
        ids = sample.meta["message_ids"]
        assert 1 <= len(ids) == len(sample.messages) <= max_messages
        assert len(set(ids)) == len(ids)
        assert by_id[ids[0]].get("parent_id") is None
        assert all(by_id[below]["parent_id"] == above for above, below in itertools.pairwise(ids))
        roles = [message.role for message in sample.messages]
        assert set(roles) <= {"user", "assistant"}
        assert all(one != other for one, other in itertools.pairwise(roles))
        assert all(m.content and m.content == m.content.strip() for m in sample.messages)
        assert all(by_id[key].get("lang") in (None, "en") for key in ids)
    assert len({tuple(sample.meta["message_ids"]) for sample in found}) == len(found)


# --- filters -----------------------------------------------------------------------------------------


@pytest.fixture
def tree():
    """p1 → a1 → p2 → a2, with a second answer a3 to p1, and a second question p3 to a1."""
    return [rec("p1"), rec("a1", "p1"), rec("p2", "a1"), rec("a2", "p2"), rec("a3", "p1"), rec("p3", "a1")]


def change(records, key, **fields):
    return [{**record, **fields} if record["message_id"] == key else record for record in records]


def test_the_tree_as_it_is(tree):
    stats = {}
    assert paths(reconstruct_threads(tree, stats=stats)) == ["p1 a1 p2 a2", "p1 a1 p3", "p1 a3"]
    assert stats == {}


@pytest.mark.parametrize(
    ("key", "wanted", "lost"),
    [
        ("a2", ["p1 a1 p2", "p1 a1 p3", "p1 a3"], 0),  # p2 has no child any more: it is a leaf
        ("p2", ["p1 a1 p3", "p1 a3"], 1),  # a1 still has a child: it is not a leaf
        ("p3", ["p1 a1 p2 a2", "p1 a3"], 0),
        ("a1", ["p1 a3"], 3),
        ("a3", ["p1 a1 p2 a2", "p1 a1 p3"], 0),
        ("p1", [], 5),
    ],
)
@pytest.mark.parametrize(
    ("fields", "reason"), [({"lang": "de"}, LANGUAGE), ({"role": "tool"}, UNKNOWN_ROLE), ({"role": None}, UNKNOWN_ROLE)]
)
def test_a_filtered_message_ends_its_branch_at_the_parent(tree, key, wanted, lost, fields, reason):
    stats = {}
    assert paths(reconstruct_threads(change(tree, key, **fields), stats=stats)) == wanted
    assert stats == {reason: 1} | ({UNREACHED: lost} if lost else {})


def test_a_parent_of_filtered_children_only_is_one_leaf(tree):
    records = change(change(tree, "p2", lang="de"), "p3", lang="fr")
    assert paths(reconstruct_threads(records)) == ["p1 a1", "p1 a3"]
    records = change(change(tree, "a1", lang="de"), "a3", lang="fr")
    (only,) = reconstruct_threads(records)
    assert only.meta["message_ids"] == ["p1"]
    assert only.meta["leaf_message_id"] == "p1"
    assert only.messages == [ChatMessage("user", "text of p1")]


def test_all_languages_if_wanted(tree):
    records = change(change(tree, "p2", lang="de"), "a3", lang="pt-BR")
    stats = {}
    found = reconstruct_threads(records, english_only=False, stats=stats)
    assert paths(found) == ["p1 a1 p2 a2", "p1 a1 p3", "p1 a3"]
    assert stats == {}


def test_records_without_a_language_are_kept(tree):
    without = [{key: value for key, value in record.items() if key != "lang"} for record in tree]
    null = [{**record, "lang": None} for record in tree]
    for records in (without, null):
        assert paths(reconstruct_threads(records)) == ["p1 a1 p2 a2", "p1 a1 p3", "p1 a3"]


@pytest.mark.parametrize("lang", ["EN", "en-US", "", " en", "eng"])
def test_english_is_exactly_en(lang):
    stats = {}
    assert reconstruct_threads([rec("p1", lang=lang)], stats=stats) == []
    assert stats == {LANGUAGE: 1}


# --- dropped threads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "\u3000\u2028", None, 7, "half \udfff"])
@pytest.mark.parametrize(
    ("key", "wanted", "threads"),
    [
        ("a2", ["p1 a1 p3", "p1 a3"], 1),  # not cut short before it: gone
        ("a1", ["p1 a3"], 2),
        ("p1", [], 3),
    ],
)
def test_a_thread_with_an_empty_message_is_dropped_and_counted(tree, text, key, wanted, threads):
    stats = {}
    assert paths(reconstruct_threads(change(tree, key, text=text), stats=stats)) == wanted
    assert stats == {EMPTY: threads}


def test_a_missing_text_is_an_empty_one(tree):
    records = [{k: v for k, v in r.items() if k != "text" or r["message_id"] != "a3"} for r in tree]
    stats = {}
    assert paths(reconstruct_threads(records, stats=stats)) == ["p1 a1 p2 a2", "p1 a1 p3"]
    assert stats == {EMPTY: 1}


def test_an_empty_message_below_the_cut_is_ignored(tree):
    records = change(tree, "a2", text="")
    stats = {}
    assert paths(reconstruct_threads(records, max_messages=3, stats=stats)) == ["p1 a1 p2", "p1 a1 p3", "p1 a3"]
    assert stats == {}


def test_an_empty_filtered_message_is_ignored(tree):
    records = change(tree, "a2", text="", lang="de")
    stats = {}
    assert paths(reconstruct_threads(records, stats=stats)) == ["p1 a1 p2", "p1 a1 p3", "p1 a3"]
    assert stats == {LANGUAGE: 1}


def test_two_consecutive_turns_of_one_role():
    records = [rec("p1"), rec("p2", "p1"), rec("a1", "p1"), rec("a2", "a1"), rec("p3", "a1")]
    stats = {}
    assert paths(reconstruct_threads(records, stats=stats)) == ["p1 a1 p3"]
    assert stats == {SAME_ROLE: 2}


def test_two_consecutive_turns_of_one_role_below_the_cut():
    records = [rec("p1"), rec("a1", "p1"), rec("a2", "a1")]
    assert paths(reconstruct_threads(records, max_messages=2)) == ["p1 a1"]
    assert paths(reconstruct_threads(records, max_messages=3)) == []


def test_a_thread_with_both_faults_is_counted_once():
    stats = {}
    assert reconstruct_threads([rec("p1"), rec("p2", "p1", text=" ")], stats=stats) == []
    assert sum(stats.values()) == 1


def test_text_is_stripped_and_otherwise_unchanged():
    records = [rec("p1", text=" \n two\r\n\n  lines \t"), rec("a1", "p1", text="\u3000é\u2028x\x00 \x85")]
    (found,) = reconstruct_threads(records)
    assert [message.content for message in found.messages] == ["two\r\n\n  lines", "é\u2028x\x00"]


# --- the cut -----------------------------------------------------------------------------------------


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


def test_the_default_cut_is_32():
    chain = [rec("p0"), *(rec(f"{'pa'[i % 2]}{i}", f"{'pa'[(i - 1) % 2]}{i - 1}") for i in range(1, 40))]
    (found,) = reconstruct_threads(chain)
    assert len(found.messages) == 32
    assert found.meta["leaf_message_id"] == "a31"


@pytest.mark.parametrize("max_messages", [0, -1])
def test_a_cut_before_the_first_message_is_an_error(tree, serve, max_messages):
    serve(datasets.Dataset.from_list(tree))
    with pytest.raises(ValueError, match="max_messages"):
        reconstruct_threads(tree, max_messages=max_messages)
    with pytest.raises(ValueError, match="max_messages"):
        list(iter_oasst1_sft(max_messages=max_messages))


# --- bad data ----------------------------------------------------------------------------------------


def test_the_order_of_records_does_not_change_the_threads(tree):
    wanted = sorted(paths(reconstruct_threads(tree)))
    for seed in range(10):
        shuffled = random.Random(seed).sample(tree, len(tree))
        assert sorted(paths(reconstruct_threads(shuffled))) == wanted


def test_orphans_are_counted(tree):
    stats = {}
    orphans = [rec("p8", "gone"), rec("a8", "p8"), rec("a9", "also gone")]
    assert paths(reconstruct_threads(tree + orphans, stats=stats)) == ["p1 a1 p2 a2", "p1 a1 p3", "p1 a3"]
    assert stats == {ORPHAN: 3}


def test_cycles_and_self_parents_are_counted(tree):
    stats = {}
    bad = [rec("p8", "a8"), rec("a8", "p8"), rec("a7", "p8"), rec("p9", "p9"), rec("a9", "p9")]
    assert paths(reconstruct_threads(bad + tree, stats=stats)) == ["p1 a1 p2 a2", "p1 a1 p3", "p1 a3"]
    assert stats == {UNREACHED: 5}


def test_the_first_of_two_messages_with_one_id_counts(tree):
    stats = {}
    bad = [rec("a3", "p1", text="another"), rec("p1", text="a second root"), rec("p2", "p2")]
    found = reconstruct_threads(tree + bad, stats=stats)
    assert view(found) == view(reconstruct_threads(tree))
    assert stats == {DUPLICATE: 3}
    twice = {}
    assert view(reconstruct_threads(tree + tree, stats=twice)) == view(found)
    assert twice == {DUPLICATE: len(tree)}


@pytest.mark.parametrize("bad", [{}, {"message_id": None}, {"message_id": 7}, {"text": "x", "role": "prompter"}])
def test_messages_without_an_id_are_counted(tree, bad):
    stats = {}
    assert len(reconstruct_threads([bad, *tree, bad], stats=stats)) == 3
    assert sum(stats.values()) == 2


@pytest.mark.parametrize("parent", [7, ["p1"], 1.5])
def test_a_record_with_an_invalid_parent_is_not_a_root(tree, parent):
    stats = {}
    assert len(reconstruct_threads([*tree, rec("p9", parent)], stats=stats)) == 3
    assert sum(stats.values()) == 1


@pytest.mark.parametrize("role", ["system", "user", "Prompter", "", None, 7, ["prompter"], {}])
def test_unknown_roles_are_dropped(role):
    stats = {}
    records = [rec("p1"), {**rec("a1", "p1"), "role": role}]
    assert paths(reconstruct_threads(records, stats=stats)) == ["p1"]
    assert stats == {UNKNOWN_ROLE: 1}


def test_without_a_tree_id_the_root_names_the_tree():
    records = [rec("p1", tree=None), rec("a1", "p1", tree=None), rec("p2", tree=None)]
    for given_records in (records, [{k: v for k, v in r.items() if v is not None} for r in records]):
        assert [(s.meta["message_tree_id"], s.meta["message_ids"]) for s in reconstruct_threads(given_records)] == [
            ("p1", ["p1", "a1"]),
            ("p2", ["p2"]),
        ]


def test_no_records():
    stats = {}
    assert reconstruct_threads([], stats=stats) == []
    assert stats == {}


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


def test_a_deep_chain_below_a_filtered_root():
    records = chain(MANY)
    records[0]["lang"] = "de"
    stats = {}
    assert reconstruct_threads(records, max_messages=MANY, stats=stats) == []
    assert stats == {LANGUAGE: 1, UNREACHED: MANY - 1}


# --- meta --------------------------------------------------------------------------------------------


def test_meta_is_plain(tree):
    for sample in reconstruct_threads(tree):
        assert {"message_tree_id", "leaf_message_id", "message_ids"} <= sample.meta.keys()
        assert type(sample.meta["message_ids"]) is list
        assert json.loads(json.dumps(sample.meta)) == sample.meta
        assert "revision" not in sample.meta


def test_no_system_messages(tree):
    roles = {m.role for sample in reconstruct_threads(tree) for m in sample.messages}
    assert roles == {"user", "assistant"}


# --- reasons -----------------------------------------------------------------------------------------


@pytest.fixture
def faulty(tree):
    """Every reason to drop, each with a different count."""
    return [
        *tree,
        *(rec("a3", "p1") for _ in range(2)),
        *(rec(f"p1{i}", lang="de") for i in range(3)),
        *(rec(f"p2{i}", role="tool") for i in range(4)),
        *(rec(f"p3{i}", "gone") for i in range(5)),
        *(rec(f"p4{i}", f"p4{i}") for i in range(6)),
        *(rec(f"p5{i}", text=" ") for i in range(7)),
        *(rec(f"p6{i}", "p1") for i in range(8)),
        *({**rec("p7"), "message_id": None} for _ in range(9)),
    ]


FAULTS = {DUPLICATE: 2, LANGUAGE: 3, UNKNOWN_ROLE: 4, ORPHAN: 5, UNREACHED: 6, EMPTY: 7, SAME_ROLE: 8, NO_ID: 9}


def test_reasons_are_counted_and_logged_once(faulty, caplog):
    caplog.set_level(logging.INFO)
    stats = {}
    assert len(reconstruct_threads(faulty, stats=stats)) == 3
    assert stats == FAULTS
    (line,) = dropped_lines(caplog)
    assert "oasst1" in line
    assert str(sum(FAULTS.values())) in line
    for reason, number in FAULTS.items():
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


def forest(count=12, tree_name="t{}"):
    """Tree i has a root, and i % 3 answers."""
    records = []
    for i in range(count):
        more = {"tree": tree_name.format(i)}
        records.append(rec(f"p{i}", **more))
        records += [rec(f"a{i}.{j}", f"p{i}", **more) for j in range(i % 3)]
    return records


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
    records = forest(20)
    long = chain(40)
    records += [{**record, "message_tree_id": "long", "lang": "en"} for record in long]
    records += [rec("p999", lang="de", tree="german")]
    calls = serve(stored(records))
    order = [*(f"t{i}" for i in range(20)), "long"]
    random.Random(42).shuffle(order)
    found = list(iter_oasst1_sft())
    assert list(dict.fromkeys(sample.meta["message_tree_id"] for sample in found)) == order
    assert view(found) == Naive(records).expected(order)
    assert max(len(sample.messages) for sample in found) == 32
    ((args, kwargs),) = calls
    assert args[0] == "OpenAssistant/oasst1"
    assert kwargs["split"] == "train"


def test_without_a_shuffle_trees_come_in_order_of_first_appearance(serve):
    records = [rec("a1", "p1", tree="two"), rec("p2", tree="one"), rec("p1", tree="two"), rec("p3", tree="three")]
    serve(stored(records))
    for seed in (0, 1):
        assert paths(iter_oasst1_sft(shuffle_trees=False, seed=seed)) == ["p1 a1", "p2", "p3"]


def test_take_trees_counts_trees_not_threads(serve):
    records = forest(12)
    serve(stored(records))
    naive = Naive(records)
    for seed in (0, 7):
        order = list(naive.threads)
        random.Random(seed).shuffle(order)
        for take in (0, 1, 5, 12, 99, None):
            assert view(iter_oasst1_sft(seed=seed, take_trees=take)) == naive.expected(order[:take])


def test_take_trees_counts_trees_with_a_kept_root(serve):
    records = [
        rec("p1", tree="german root", lang="de"),
        rec("a1", "p1", tree="german root"),
        rec("p2", "gone", tree="no root"),
        rec("p3", tree="odd role", role="tool"),
        rec("p4", tree="first"),
        rec("p5", "p5", tree="own parent"),
        rec("p6", tree="second"),
        rec("p7", tree="third"),
    ]
    serve(stored(records))
    assert paths(iter_oasst1_sft(shuffle_trees=False, take_trees=2)) == ["p4", "p6"]
    # Trees without a kept root do not take part in the shuffle either.
    order = ["p4", "p6", "p7"]
    random.Random(3).shuffle(order)
    assert paths(iter_oasst1_sft(seed=3)) == order
    assert paths(iter_oasst1_sft(seed=3, take_trees=1)) == order[:1]


def test_a_tree_with_a_kept_root_counts_although_its_threads_are_dropped(serve):
    serve(stored([rec("p1", text="", tree="one"), rec("p2", tree="two")]))
    stats = {}
    assert paths(iter_oasst1_sft(shuffle_trees=False, take_trees=1, stats=stats)) == []
    assert stats == {EMPTY: 1}
    assert paths(iter_oasst1_sft(shuffle_trees=False, take_trees=2)) == ["p2"]


def test_an_iterable_dataset(serve):
    records = forest(9)
    serve(datasets.IterableDataset.from_generator(lambda: iter(records)))
    order = [f"t{i}" for i in range(9)]
    random.Random(42).shuffle(order)
    assert view(iter_oasst1_sft()) == Naive(records).expected(order)


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


# --- files -------------------------------------------------------------------------------------------


def as_on_the_hub(record):
    """Add the other columns of the dataset on the Hub."""
    return {
        "message_id": record["message_id"],
        "parent_id": record["parent_id"],
        "user_id": "2c96e467-66f0-4be7-9693-bda51356a424",
        "created_date": "2023-02-06T18:48:49.391686+00:00",
        "text": record["text"],
        "role": record["role"],
        "lang": record["lang"],
        "review_count": 3,
        "review_result": True,
        "deleted": False,
        "rank": None,
        "synthetic": False,
        "model_name": None,
        "detoxify": {"toxicity": 0.00044, "insult": 0.0002},
        "message_tree_id": record["message_tree_id"],
        "tree_state": "ready_for_export",
        "emojis": {"name": ["+1", "_skip_reply"], "count": [3, 5]},
        "labels": {"name": ["spam", "lang_mismatch"], "value": [0.0, 0.5], "count": [3, 3]},
    }


@pytest.fixture
def languages():
    """Two trees with the columns of the Hub, each with one German message."""
    records = [
        rec("p1", tree="p1", text=" How are you? \n"),
        rec("a1", "p1", tree="p1"),
        rec("a2", "p1", tree="p1", lang="de", text="Gut, und é\u2028?"),
        rec("p3", tree="p3"),
        rec("a3", "p3", tree="p3", lang="de"),
    ]
    return [as_on_the_hub(record) for record in records]


@pytest.mark.parametrize("name", ["train.parquet", "rows.jsonl.gz"])
def test_local_files(tmp_path, languages, name):
    write_rows(tmp_path / "data" / name, languages)
    for path in (tmp_path / "data" / name, str(tmp_path / "data")):
        stats = {}
        found = list(iter_oasst1_sft(path=path, shuffle_trees=False, stats=stats))
        assert paths(found) == ["p1 a1", "p3"]
        assert found[0].messages == [ChatMessage("user", "How are you?"), ChatMessage("assistant", "text of a1")]
        assert stats == {LANGUAGE: 2}
        assert not any("revision" in sample.meta for sample in found)
        every = list(iter_oasst1_sft(path=path, shuffle_trees=False, english_only=False))
        assert paths(every) == ["p1 a1", "p1 a2", "p3 a3"]
        assert every[1].messages[1].content == "Gut, und é\u2028?"


def test_a_tree_in_two_files(tmp_path, languages):
    write_rows(tmp_path / "train-00000-of-00002.parquet", languages[1:])
    write_rows(tmp_path / "train-00001-of-00002.parquet", languages[:1])
    assert paths(iter_oasst1_sft(path=tmp_path, shuffle_trees=False)) == ["p1 a1", "p3"]


def test_bad_rows_in_a_jsonl(tmp_path):
    """Null and missing fields."""
    rows = [
        rec("p1"),
        {**rec("a1", "p1"), "text": None},
        {"message_id": "a2", "parent_id": "p1", "role": "assistant"},
        {"text": "no id"},
        rec("a3", "p1"),
    ]
    write_rows(tmp_path / "train.jsonl", rows)
    stats = {}
    assert paths(iter_oasst1_sft(path=tmp_path, stats=stats)) == ["p1 a3"]
    assert stats == {EMPTY: 2, NO_ID: 1}


def test_half_a_surrogate_pair_in_a_jsonl_is_counted_or_named(tmp_path):
    path = tmp_path / "train.jsonl"
    lines = [json.dumps(rec("p1")), json.dumps(rec("a1", "p1", text="\ud83d")), json.dumps(rec("a2", "p1"))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    stats = {}
    try:
        found = paths(iter_oasst1_sft(path=path, stats=stats))
    except ValueError as err:
        assert str(path) in str(err)
        assert "line 2" in str(err)
    else:
        assert found == ["p1 a2"]
        assert sum(stats.values()) == 1
