"""Overlaps with the training text of a run: against brute force, for every kind of data, and when data is gone."""

from __future__ import annotations

import json
import shutil
import string
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.memorization import provenance as module
from niels_gpt.memorization import suffix_search
from niels_gpt.memorization.provenance import (
    MOST_BYTES,
    SHORTEST,
    Profile,
    Provenance,
    find_overlaps,
    open_provenance,
)
from niels_gpt.memorization.text_index import build_index
from niels_gpt.runs.loading import load_run
from niels_gpt.system.user_cache import cache_folder
from tests import token_caches
from tests.cli import call, reciting
from tests.memorization.test_text_index import byte_documents, source_of

pytestmark = pytest.mark.usefixtures("workdir")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def opened(texts, *, held_out=(), profiles=None):
    """The provenance of notes."""
    index = build_index(source_of(byte_documents(texts), byte_documents(held_out)))
    measured = module._profiles([index], module.no_progress) if profiles is None else profiles
    return Provenance([index], measured, normalize=False, problems=[])


def naive_spans(text, documents, shortest):
    """(start, end) of the substrings of a text that are in a document, and in no longer one: character by character."""
    ends = []
    for i in range(len(text)):
        length = 0
        while i + length < len(text) and any(text[i : i + length + 1] in document for document in documents):
            length += 1
        ends.append(i + length)
    spans = [(i, end) for i, end in enumerate(ends) if i == 0 or end > ends[i - 1]]
    return [(start, end) for start, end in spans if end - start >= shortest]


# --- against brute force -----------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32), alphabet=st.sampled_from(["ab", "aé日🙂", "é日è", "abcdefghij klmn"]))
@settings(max_examples=60)
def test_spans_are_those_of_brute_force(seed, alphabet):
    """In characters, also where the bytes of different characters agree in part."""
    rng = np.random.default_rng(seed)

    def letters(most):
        return "".join(rng.choice(list(alphabet), rng.integers(1, most)))

    documents = [letters(120) for _ in range(rng.integers(1, 4))]
    cuts = [document[rng.integers(0, 60) :][: rng.integers(1, 60)] for document in documents]
    text = letters(10).join(cuts) + letters(30)
    shortest = int(rng.integers(2, 20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHORTEST", 1)
        patch.setattr(suffix_search, "NEIGHBORS", 1000)
        overlaps = find_overlaps(opened(documents, profiles=[]), text, min_length=shortest)
    expected = naive_spans(text, documents, shortest)
    assert sorted((span.start, span.end) for span in overlaps.spans) == expected
    for span in overlaps.spans:
        passage = span.passages[0]
        assert passage.text == text[span.start : span.end]
        assert any(passage.before + passage.text + passage.after in document for document in documents)
    covering = [max([end - start for start, end in expected if start <= i < end], default=0) for i in range(len(text))]
    assert overlaps.lengths.tolist() == covering
    assert overlaps.share == pytest.approx(sum(map(bool, covering)) / len(text))
    assert overlaps.longest == max(covering)


# --- what is usual -----------------------------------------------------------------------------------


def naive_usual(lengths, width, shortest):
    """(shares, longest) of the pieces of a profile, character by character."""
    shares, longest = [], []
    for begin in range(0, len(lengths) - width + 1, width):
        covered, best = set(), 0
        for i in range(width):
            length = min(int(lengths[begin + i]), width - i)
            if length >= shortest:
                covered |= set(range(i, i + length))
                best = max(best, length)
        shares.append(len(covered) / width)
        longest.append(best)
    return shares, longest


@pytest.mark.parametrize("width", [30, 70, 1000])
def test_usual_overlap_is_that_of_pieces_of_the_same_length(width):
    rng = np.random.default_rng(width)
    reach = np.maximum.accumulate(np.arange(400) + rng.integers(0, 60, 400) * (rng.random(400) < 0.05))
    lengths = reach - np.arange(400)
    usual = module._usual(Profile("roam", lengths, 3), width, SHORTEST)
    shares, longest = naive_usual(lengths, min(width, 400), SHORTEST)
    assert (usual.passages, usual.copies) == (len(shares), 3)
    assert usual.share == pytest.approx(np.median(shares))
    assert sum(share <= usual.high_share + 1e-9 for share in shares) >= 0.95 * len(shares)
    assert usual.high_share in [pytest.approx(share) for share in shares]
    assert usual.high_longest in longest and usual.longest in longest


def sentences(seed, number):
    """Sentences of random letters; no two have 24 characters in common."""
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list(string.ascii_lowercase), 60)) for _ in range(number)]


def test_phrases_that_held_out_text_has_too_are_not_recited():
    """Every note contains the same motto of 40 characters; only some have more in common."""
    motto = "a motto that stands in each of the notes"
    train = [f"{a} {motto}. {b}" for a, b in zip(sentences(1, 20), sentences(2, 20), strict=True)]
    held_out = [f"{a}: {motto}, {b}" for a, b in zip(sentences(3, 20), sentences(4, 20), strict=True)]
    found = opened(train, held_out=held_out)
    usual = find_overlaps(found, f"{sentences(5, 1)[0]}-{motto}-{sentences(6, 1)[0]}")
    assert usual.recites is False and usual.longest == len(motto)
    assert usual.spans[0].occurrences == 20
    assert len(usual.spans[0].passages) == 3
    assert usual.usual[0].longest == len(motto) + 1  # with the space before it
    more = find_overlaps(found, f"{sentences(5, 1)[0]}{train[3][40:120]}{sentences(6, 1)[0]}")
    assert more.recites is True and more.longest == 80
    assert find_overlaps(found, sentences(7, 1)[0]).recites is False
    assert find_overlaps(found, motto).recites is True  # all of it is in the training text
    assert find_overlaps(found, "a motto").recites is None
    assert {overlaps.verdict().partition(":")[0] for overlaps in (usual, more)} == {
        "overlaps no more than held-out text",
        "recites",
    }


def test_a_short_copy_recites_only_if_held_out_text_of_its_length_is_no_copy():
    """All of a slogan of 60 characters is in every held-out passage too, so that a copy of it proves nothing."""
    slogan = sentences(1, 1)[0]
    found = opened([f"{slogan}\n{a}" for a in sentences(2, 5)], held_out=[slogan * 3] * 5)
    copied = find_overlaps(found, slogan)
    assert (copied.share, copied.longest) == (1, 60)
    assert (copied.usual[0].high_share, copied.usual[0].high_longest) == (1, 60)
    assert copied.recites is False
    assert copied.verdict().startswith("overlaps no more than held-out text: 100%")
    assert find_overlaps(found, sentences(2, 5)[0] + slogan[:40]).recites is False  # no longer, no larger share
    longer = find_overlaps(found, f"{slogan}\n{sentences(2, 5)[0]}")
    assert longer.longest == 121 and longer.recites is True


def test_held_out_copies_of_training_text_are_left_out():
    notes = ["".join(sentences(i, 6)) for i in range(4)]
    found = opened(notes, held_out=[notes[0], "".join(sentences(9, 6))])
    (profile,) = found.profiles
    assert profile.copies == 1 and not profile.lengths.any()
    assert find_overlaps(found, f"{sentences(8, 1)[0]}{notes[1][:50]}").recites is True
    assert opened([*notes, "more"], held_out=notes).profiles == []


def test_held_out_replies_that_are_training_text_as_a_whole_are_left_out():
    """Of dialogues about notes, held-out ones have answers that others have, too: they are no control."""
    answers = sentences(1, 8)
    found = opened([f"asked: {answer}" for answer in answers], held_out=[*answers[:6], *sentences(2, 3), "short"])
    (profile,) = found.profiles
    assert profile.copies == 6 and len(profile.lengths) == 3 * 60 + 5
    assert find_overlaps(found, answers[7]).recites is True


def test_without_held_out_text_every_overlap_counts():
    overlaps = find_overlaps(opened(sentences(1, 5)), f"{sentences(2, 1)[0]}{sentences(1, 1)[0][:40]}")
    assert (overlaps.usual, overlaps.recites) == ([], True)
    assert "no held-out text" in overlaps.verdict()


# --- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("", {}, "empty"),
        ("x" * (MOST_BYTES + 1), {}, f"{MOST_BYTES:,}"),
        ("🙂" * (MOST_BYTES // 4 + 1), {}, f"{MOST_BYTES:,}"),
        ("a\ud800b", {}, "character 1"),
        ("text", {"min_length": SHORTEST - 1}, str(SHORTEST)),
    ],
)
def test_bad_text_is_refused(text, options, reason):
    with pytest.raises(ValueError, match=reason):
        find_overlaps(opened(["a note"], profiles=[]), text, **options)


def test_long_repetitive_text():
    """Many overlaps of the same bytes: time and memory are bounded."""
    found = opened(["ab" * 20_000, "a" * 20_000], profiles=[])
    overlaps = find_overlaps(found, "ab" * 1000 + "!" + "a" * 1000)
    assert [(span.start, span.end) for span in overlaps.spans] == [(0, 2000), (2001, 3001)]


def test_threads_share_it():
    notes = ["".join(sentences(i, 6)) for i in range(12)]
    found = opened(notes, profiles=[])
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda note: find_overlaps(found, note).spans, notes * 4))
    assert [(spans[0].end, spans[0].passages[0].document) for spans in results] == [
        (360, f"row {i}") for i in range(12)
    ] * 4


# --- runs --------------------------------------------------------------------------------------------


def test_a_splice_run_has_only_its_chosen_documents(place, loaded, trained):
    found = open_provenance(loaded)
    for path in (place / "notes").iterdir():
        overlaps = find_overlaps(found, path.read_text(encoding="utf-8"))
        if path.name in trained:
            assert overlaps.share == 1 and overlaps.recites
            (span,) = overlaps.spans
            assert (span.passages[0].file, span.passages[0].document) == (str(path), path.name)
        else:
            assert overlaps.longest < 100
    assert found.problems == []
    assert json.loads(json.dumps(overlaps.as_json()))["share"] == overlaps.share


def test_an_index_outlives_the_notes(workdir, trained):
    copy = reciting.copy_to(workdir / "copy")
    text = (copy / "notes" / trained[0]).read_text(encoding="utf-8")
    loaded = load_run(copy / "run", None, "cpu")
    open_provenance(loaded)
    shutil.rmtree(copy / "notes")
    shutil.rmtree(copy / "streams")
    found = open_provenance(loaded)
    assert find_overlaps(found, text).recites and found.problems == []
    shutil.rmtree(cache_folder())
    with pytest.raises(ValueError, match="no training text to search") as raised:
        open_provenance(loaded)
    assert str(copy / "notes") in str(raised.value) and "\n" not in str(raised.value)


def test_notes_that_changed_since_are_searched_as_they_are(workdir, trained):
    copy = reciting.copy_to(workdir / "copy")
    new = "A long note that was added later, and is now the longest of all. " * 12
    (copy / "notes" / "new.md").write_text(new, encoding="utf-8")
    found = open_provenance(load_run(copy / "run", None, "cpu"))
    assert any("changed since the training" in problem for problem in found.problems)
    assert find_overlaps(found, new).problems == found.problems


def test_a_checkpoint_outside_a_run_has_no_training_text(place, workdir):
    shutil.copy(place / "run/checkpoints/best.pt", workdir / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt is not in a run folder"):
        open_provenance(load_run(None, workdir / "model.pt", "cpu"))


def test_a_checkpoint_that_records_no_data(place, loaded):
    with pytest.raises(ValueError, match="does not record"):
        open_provenance(loaded._replace(data={}))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A run over token caches, and a chat run from it."""
    root = tmp_path_factory.mktemp("tokens")
    token_caches.copy_to(root / "cache")
    sets = ["model.T=64", "model.C=16", "model.L=1", "model.H=2", "train.total_steps=2", "train.warmup_steps=0"]
    sets += ["train.B=4", "output.eval_steps=1", "output.sample_tokens=2", f"data.token_cache={root / 'cache'}"]
    options = [f"--set={item}" for item in sets]
    shares = "--set=train.p_train={roam: 0.5, fineweb_edu: 0.5}"
    assert call("train", "--set=task=pretrain", *options, shares, "--run-dir", root / "run") == 0
    start = f"--set=init_from={root / 'run/checkpoints/best.pt'}"
    assert call("train", "--set=task=sft", *options, start, "--run-dir", root / "chat") == 0
    return root


def train_documents(root, name):
    """The texts of the training split of a pretrain cache."""
    stream = token_caches.stream(name, "train", root / "cache")
    starts = token_caches.read_offsets(root / "cache/pretrain" / name / "train/documents.npy")
    return [token_caches.tokenizer().decode(stream[a:b][:-1]) for a, b in zip(starts, [*starts[1:], None], strict=True)]


def test_documents_of_token_caches(tokens):
    found = open_provenance(load_run(tokens / "run", None, "cpu"))
    assert {index.source for index in found.indexes} == {"roam", "fineweb_edu"}
    assert {profile.source for profile in found.profiles} <= {"roam", "fineweb_edu"}
    for name in ("roam", "fineweb_edu"):
        for i, text in enumerate(train_documents(tokens, name)):
            if len(text) < 40:
                continue
            overlaps = find_overlaps(found, text.replace("\n", "\r\n"), passages=100)
            assert overlaps.text == text and overlaps.share == 1
            assert (name, f"document {i}") in {(p.source, p.document) for p in overlaps.spans[0].passages}


def test_a_chat_run_has_its_conversations_and_the_text_of_the_run_before(tokens):
    found = open_provenance(load_run(tokens / "chat", None, "cpu"))
    assert {index.source for index in found.indexes} == {"roam", "fineweb_edu", *token_caches.SFT}
    replies = [m["content"] for talk in token_caches.chats("oasst1") for m in talk if m["role"] == "assistant"]
    long = {reply for reply in replies if len(reply) > 40}
    sources = [find_overlaps(found, reply).spans for reply in long]
    known = [spans[0] for spans in sources if spans]
    assert len(known) > len(long) / 2
    assert all(span.passages[0].document.startswith("conversation ") for span in known if span.passages)
    assert find_overlaps(found, train_documents(tokens, "roam")[0]).share == 1


def test_a_rebuilt_cache_is_indexed_again(tokens, workdir):
    """The index of the old tokens is used while it exists; without it, the new ones are searched, and reported."""
    root = workdir / "copy"
    shutil.copytree(tokens, root)
    config = root / "run" / "config.yaml"
    config.write_text(config.read_text(encoding="utf-8").replace(str(tokens), str(root)), encoding="utf-8")
    loaded = load_run(root / "run", None, "cpu")
    old = train_documents(root, "roam")[0]
    assert find_overlaps(open_provenance(loaded), old).share == 1
    new = [f"another text, number {i}: {token_caches.words(900 + i, 30)}" for i in range(12)]
    shutil.rmtree(root / "cache/pretrain/roam")
    token_caches.build_pretrain(root / "cache", "roam", token_caches.tokenizer(), new)
    found = open_provenance(loaded)
    assert find_overlaps(found, old).share == 1 and found.problems == []
    shutil.rmtree(cache_folder())
    found = open_provenance(loaded)
    assert any("changed since the training" in problem for problem in found.problems)
    assert find_overlaps(found, train_documents(root, "roam")[0]).share == 1
    shutil.rmtree(root / "cache/pretrain/roam")
    shutil.rmtree(cache_folder())
    found = open_provenance(loaded)
    assert [index.source for index in found.indexes] == ["fineweb_edu"]
    assert any("roam" in problem for problem in found.problems)
