"""Documents of byte streams and token caches, against the files they come from."""

import shutil

import numpy as np
import pytest

from niels_gpt.cache.formats import CacheError
from niels_gpt.config.yaml_file import load_config
from niels_gpt.training.tasks.documents import (
    ContentIndex,
    EmptyDocumentSet,
    digest_indices,
    open_documents,
    uses_bytes,
)
from tests import token_caches
from tests.cache import no_waiting, split_rule
from tests.training import DELIMITER, sentence

NOTES = {
    "a.md": "# a\n\nwords of a\n",
    "b.md": "no line end",
    "sub/c.md": "ends with blank lines\n\n\n\n",
    "sub/deeper/a.md": "\n\nbegins with them, é 日本 🙂",
    "d.md": "",
    "e.md": "\r\nwindows\r\n\r\n",
    "f.md": "\ufeffa mark of order",
    "g.md": "\n\n",
    "h.md": "a line of its own",
    "i.md": sentence(1, 200),
    "j.md": "the last one\n\n",
}


@pytest.fixture(autouse=True, scope="module")
def quick():
    with no_waiting():
        yield


@pytest.fixture
def notes(tmp_path):
    for name, text in NOTES.items():
        path = tmp_path / "notes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8"))
    return tmp_path / "notes"


def byte_config(tmp_path, *overrides):
    paths = [f"data.roam={tmp_path / 'notes'}", f"data.primer={tmp_path / 'primer.txt'}"]
    paths += [f"data.cache_dir={tmp_path / 'streams'}", "task=splice"]
    return load_config(None, overrides=[*paths, *overrides])


def token_config(root, *overrides, task="splice"):
    options = [f"task={task}", f"data.token_cache={root}", "splice.documents=tokens"]
    return load_config(None, overrides=[*options, *overrides])


def texts_of(documents):
    """(name, bytes) of every document."""
    return [(documents.name(i), bytes(documents.ids(i).tolist())) for i in range(len(documents.lengths))]


def check_documents(split):
    """Lengths, ids and the documents of a dataset agree."""
    assert split.lengths.dtype == np.int64
    numbers = list(range(len(split.lengths)))
    ids = [split.ids(i).tolist() for i in numbers]
    assert [len(row) for row in ids] == split.lengths.tolist()
    documents = split.documents(numbers[::-1])
    assert documents.lengths.tolist() == split.lengths.tolist()[::-1]
    for n, i in enumerate(numbers[::-1]):
        for t in range(0, len(ids[i]), 7):
            out = np.empty(min(5, len(ids[i]) - t), dtype=np.int32)
            documents.read(n, t, out)
            assert out.tolist() == ids[i][t : t + 5]


# --- notes -------------------------------------------------------------------------------------------


def split_of_notes(val_frac=0.1, seed=42):
    """Train and val as the streams split them: paths in their order as strings, whole files."""
    return split_rule(sorted(NOTES), val_frac, seed)


@pytest.mark.parametrize(("seed", "val_frac"), [(42, 0.1), (5, 0.5)])
def test_notes_are_the_files_exactly(notes, tmp_path, seed, val_frac):
    documents = open_documents(byte_config(tmp_path, f"data.seed={seed}", f"data.roam_val_frac={val_frac}"))
    parts = split_of_notes(val_frac, seed)
    for split, names in ((documents.train, parts["train"]), (documents.held_out, parts["val"])):
        names = [name for name in names if NOTES[name].strip()]  # empty notes are dropped after the split
        assert texts_of(split) == [(name.split("/")[-1], NOTES[name].encode("utf-8")) for name in names]
        check_documents(split)
    number = sum(bool(text.strip()) for text in NOTES.values())
    assert len(documents.train.lengths) + len(documents.held_out.lengths) == number < len(NOTES)
    assert (documents.source, documents.unit) == ("roam", "B")
    assert documents.path == str(notes)
    assert documents.tokenizer.vocab_size == 256


def test_a_note_may_end_with_the_delimiter_of_dialogues(notes, tmp_path):
    """Joined with the next note it looks like the end of a dialogue."""
    text = "how dialogues are kept apart:\n\n<dialogue>"
    for path in notes.rglob("*.md"):
        path.write_text(text, encoding="utf-8")
    assert {content for _, content in texts_of(open_documents(byte_config(tmp_path)).train)} == {text.encode("utf-8")}


def test_ends_are_offsets_in_the_stream(notes, tmp_path):
    documents = open_documents(byte_config(tmp_path))
    stream = (tmp_path / "streams" / "roam_train.bin").read_bytes()
    split = documents.train
    for i, (end, length) in enumerate(zip(split.ends.tolist(), split.lengths.tolist(), strict=True)):
        assert stream[end - length : end] == bytes(split.ids(i).tolist())
    assert (np.diff(split.ends) >= 0).all()


def test_a_single_note(tmp_path):
    """Nothing is held out, which a study of one document does not need."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "only.md").write_text("the one document\n", encoding="utf-8")
    documents = open_documents(byte_config(tmp_path, "splice.controls=0"))
    assert texts_of(documents.train) == [("only.md", b"the one document\n")]
    assert len(documents.held_out.lengths) == 0


# --- other sources of bytes --------------------------------------------------------------------------


def test_dialogues(tmp_path):
    dialogues = [f"user: {sentence(i, 4)}?\nassistant: {sentence(i, 9)}." for i in range(20)]
    (tmp_path / "primer.txt").write_text(DELIMITER.join(dialogues), encoding="utf-8")
    documents = open_documents(byte_config(tmp_path), "primer")
    parts = split_rule(list(enumerate(dialogues)), 0.1, 42)
    for split, part in ((documents.train, parts["train"]), (documents.held_out, parts["val"])):
        assert texts_of(split) == [(f"dialogue {i}", text.encode("utf-8")) for i, text in part]
        check_documents(split)


def test_a_source_of_data_sources(tmp_path):
    texts = {f"text_{i:02d}.txt": sentence(i, 10) + "\n\n" * (i % 3) for i in range(20)}
    (tmp_path / "mine").mkdir()
    for name, text in texts.items():
        (tmp_path / "mine" / name).write_text(text, encoding="utf-8")
    config = byte_config(tmp_path, f"data.sources.mine.path={tmp_path / 'mine'}", "splice.dataset_name=mine")
    documents = open_documents(config)
    parts = split_rule(list(texts), 0.1, 42)
    assert (documents.source, documents.path) == ("mine", str(tmp_path / "mine"))
    for split, names in ((documents.train, parts["train"]), (documents.held_out, parts["val"])):
        assert texts_of(split) == [(name, texts[name].encode("utf-8")) for name in names]
        check_documents(split)


def test_an_unknown_source_is_rejected_with_the_known_ones(notes, tmp_path):
    config = byte_config(tmp_path, "splice.dataset_name=fineweb", "data.sources.mine.path=rows.jsonl")
    with pytest.raises(ValueError, match=r"'fineweb'.*wiki, roam, primer, mine"):
        open_documents(config)
    assert open_documents(config, "roam").source == "roam"


def test_uses_bytes(tmp_path):
    wanted = {"bytes": True, "splice": True, "pretrain": False, "sft": False}
    for task, answer in wanted.items():
        assert uses_bytes(load_config(None, overrides=[f"task={task}"])) is answer
    assert not uses_bytes(load_config(None, overrides=["task=splice", "splice.documents=tokens"]))


# --- token caches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["roam", "fineweb_edu"])
def test_documents_of_a_cache(name):
    root = token_caches.folder()
    documents = open_documents(token_config(root, f"splice.dataset_name={name}"))
    eot = token_caches.special("eot")
    found = []
    for name_of_split, split in (("val", documents.held_out), ("train", documents.train)):
        stream = token_caches.stream(name, name_of_split)
        starts = token_caches.read_offsets(root / "pretrain" / name / name_of_split / "documents.npy")
        wanted = [stream[a:b] for a, b in zip(starts, [*starts[1:], len(stream)], strict=True)]
        assert [split.ids(i).tolist() for i in range(len(split.lengths))] == wanted
        assert split.ends.tolist() == [*starts[1:], len(stream)]
        assert [split.name(i) for i in range(2)] == ["document 0", "document 1"]
        check_documents(split)
        found += wanted
    # In the order of the source, val first; the document that filled val's budget is truncated.
    complete = [[*token_caches.tokenizer().encode(text), eot] for text in token_caches.documents(name)]
    assert all(ids == document[: len(ids)] for ids, document in zip(found, complete, strict=True))
    assert sum(ids != document for ids, document in zip(found, complete, strict=True)) <= 1
    assert documents.tokenizer.sha256 == token_caches.tokenizer().sha256
    assert (documents.source, documents.unit) == (name, " tokens")
    assert documents.path == str(root / "pretrain" / name)


def test_roam_or_the_only_cache_is_the_default(tmp_path):
    root = token_caches.copy_to(tmp_path / "caches")
    assert open_documents(token_config(root)).source == "roam"
    (root / "pretrain" / "roam").rename(root / "pretrain" / "books")
    with pytest.raises(ValueError, match=r"caches.*books, fineweb_edu.*splice\.dataset_name"):
        open_documents(token_config(root))
    assert open_documents(token_config(root), "books").source == "books"
    shutil.rmtree(root / "pretrain" / "books")
    assert open_documents(token_config(root)).source == "fineweb_edu"
    shutil.rmtree(root / "pretrain")
    with pytest.raises(ValueError, match=r"caches.*none.*splice\.dataset_name"):
        open_documents(token_config(root))


def test_an_unknown_cache_is_rejected_with_the_existing_ones():
    with pytest.raises(ValueError, match=r"wikitext.*fineweb_edu, roam"):
        open_documents(token_config(token_caches.folder(), "splice.dataset_name=wikitext"))


def test_splice_base_overrides_the_token_cache(tmp_path):
    config = token_config(tmp_path / "nowhere", f"splice.base={token_caches.folder()}")
    assert open_documents(config).source == "roam"
    with pytest.raises(CacheError, match="nowhere"):
        open_documents(token_config(tmp_path / "nowhere"))


def test_a_cache_without_offsets_is_rejected(tmp_path):
    root = token_caches.copy_to(tmp_path / "caches")
    (root / "pretrain" / "roam" / "train" / "documents.npy").unlink()
    with pytest.raises(CacheError, match=r"documents\.npy"):
        open_documents(token_config(root))


def test_a_cache_of_another_tokenizer_is_rejected(tmp_path):
    root = token_caches.copy_to(tmp_path / "caches")
    token_caches.build_pretrain(root, "roam", token_caches.other_tokenizer())
    with pytest.raises(CacheError, match="tokenizer"):
        open_documents(token_config(root))


def test_a_cache_without_a_held_out_split(tmp_path):
    root = token_caches.copy_to(tmp_path / "caches")
    shutil.rmtree(root / "pretrain" / "roam" / "val")
    documents = open_documents(token_config(root))
    assert len(documents.held_out.lengths) == 0
    assert len(documents.train.lengths) > 0


# --- digests -------------------------------------------------------------------------------


def test_digests_differ_between_selections():
    choices = [[], [1], [1, 2], [2, 1], [12], [1, 2, 3]]
    assert len({digest_indices(choice) for choice in choices}) == len(choices)
    assert digest_indices([1, 2]) == digest_indices(iter([1, 2]))


def test_the_content_index_finds_equal_documents(notes, tmp_path):
    train = open_documents(byte_config(tmp_path)).train
    full, first = ContentIndex(train), ContentIndex(train, [0])
    for i in range(len(train.lengths)):
        assert train.ids(i) in full
        assert (train.ids(i) in first) == (train.ids(i).tolist() == train.ids(0).tolist())
    other = train.ids(0).copy()
    other[-1] ^= 1
    assert other not in full
    assert train.ids(0)[:-1] not in first


def test_an_empty_split_has_no_documents():
    empty = EmptyDocumentSet()
    assert (len(empty.lengths), len(empty.ends), empty.sha256) == (0, 0, "")
    for call in (empty.name, empty.ids, empty.documents):
        with pytest.raises(IndexError):
            call(0)
