"""Training: vocabulary, sampling, errors, meta.json, and identical bytes."""

import hashlib
import json
import os
import random
import shutil
import signal
import string
import subprocess
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import sentencepiece
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.tokenizer import SPECIAL_TOKENS, load_tokenizer, train_tokenizer, training
from niels_gpt.tokenizer.training import _chunks, reservoir
from tests.faults import killed_at

from .conftest import VOCAB_SIZE

ROOT = Path(__file__).resolve().parents[2]


def sha256_of(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def naive_hash(texts):
    """Hash each text as its length in eight little-endian bytes, and its utf-8."""
    joined = b""
    for text in texts:
        data = text.encode("utf-8")
        joined += bytes((len(data) >> 8 * i) & 255 for i in range(8)) + data
    return hashlib.sha256(joined).hexdigest()


def read_meta(model):
    return json.loads(Path(model).with_name("meta.json").read_text(encoding="utf-8"))


def train_quietly(texts, folder, **options):
    """Train without the warning about few pieces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train_tokenizer(texts, folder, **options)


# --- the vocabulary ----------------------------------------------------------------------------------


def test_vocab_size_does_not_count_the_special_tokens(tmp_path, corpus):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the text is long enough
        path = train_tokenizer(corpus, tmp_path, vocab_size=777)
    reference = sentencepiece.SentencePieceProcessor(model_file=path)
    assert reference.vocab_size() == load_tokenizer(path).vocab_size == 781
    assert all(reference.piece_to_id(token) > 0 for token in SPECIAL_TOKENS)


def test_no_pieces_for_sentence_boundaries(model_path):
    reference = sentencepiece.SentencePieceProcessor(model_file=model_path)
    assert [reference.bos_id(), reference.eos_id(), reference.pad_id()] == [-1, -1, -1]
    pieces = [reference.id_to_piece(i) for i in range(reference.vocab_size())]
    assert len(set(pieces)) == len(pieces)
    assert not {"<s>", "</s>", "<pad>"} & set(pieces)
    assert sum(reference.is_byte(i) for i in range(len(pieces))) == 256


def test_every_character_of_the_text_is_a_piece(tokenizer, corpus):
    assert {len(tokenizer.encode(character)) for character in set("".join(corpus))} == {1}


def test_a_space_is_one_piece_even_if_the_text_has_none(tmp_path):
    tokenizer = load_tokenizer(train_quietly(["abcabc", "abab"], tmp_path, vocab_size=300))
    ids = tokenizer.encode("a b")
    assert len(ids) == 3
    assert tokenizer.token_bytes[ids[1]] == b" "


def test_a_short_text_gives_fewer_pieces_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match=r"16,000") as caught:
        path = train_tokenizer(["to be or not to be"], tmp_path)
    tokenizer = load_tokenizer(path)
    assert 257 + 7 + 4 <= tokenizer.vocab_size < 350
    assert str(tokenizer.vocab_size - 4) in str(caught[0].message)
    assert read_meta(path)["vocab_size"] == tokenizer.vocab_size
    assert read_meta(path)["vocab_size_asked"] == 16_000
    assert tokenizer.decode(tokenizer.encode("not to be, or: \u2581漢")) == "not to be, or: \u2581漢"


@pytest.mark.parametrize(
    ("texts", "different"),
    [
        (["abc", "a b c"], 3 + 1),
        (["".join(map(chr, range(0x4E00, 0x4E00 + 100)))], 100 + 1),
        (["a\tb\0c\u2581d"], 4 + 1),  # replaced by a space
        (["a\r\nb"], 3 + 1),  # "\r\n" is "\n"
        (["ab" + SPECIAL_TOKENS[0] + "cd"], 4 + 1),  # no character of the special string
        (["x" * 3000 + "y", "éè"], 4 + 1),
    ],
)
def test_a_vocabulary_smaller_than_the_characters_names_the_minimum(tmp_path, texts, different):
    needed = 256 + 1 + different
    for vocab_size in (258, needed - 1):
        with pytest.raises(ValueError, match=rf"\b{needed}\b"):
            train_tokenizer(texts, tmp_path / "no", vocab_size=vocab_size)
    assert not (tmp_path / "no").exists()
    tokenizer = load_tokenizer(train_tokenizer(texts, tmp_path / "yes", vocab_size=needed))
    assert tokenizer.vocab_size == needed + 4


# --- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [65_533, 257, -1, True, 500.0, None])
def test_an_invalid_vocab_size(tmp_path, vocab_size):
    with pytest.raises(ValueError, match=r"65532|65,532") as caught:
        train_tokenizer(["abc"], tmp_path / "no", vocab_size=vocab_size)
    assert repr(vocab_size) in str(caught.value)
    assert not (tmp_path / "no").exists()


def test_the_largest_vocabulary_is_allowed(tmp_path):
    with pytest.warns(UserWarning, match=r"65,?532"):
        train_tokenizer(["abc"], tmp_path, vocab_size=65_532)


@pytest.mark.parametrize(
    "texts", [[], ["", ""], [" ", "\n\n", "\t", "\u3000\xa0\x85", "\0", "\u2581"], [SPECIAL_TOKENS[3]]]
)
def test_no_text_is_an_error(tmp_path, texts):
    with pytest.raises(ValueError, match=rf"no text.*\b{len(texts)} texts"):
        train_tokenizer(iter(texts), tmp_path / "no", vocab_size=300)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("item", [None, b"bytes"])
def test_an_item_of_another_type_is_named(tmp_path, item):
    with pytest.raises(ValueError, match=rf"text 2 .*{type(item).__name__}"):
        train_tokenizer(["a", "b", item, "c"], tmp_path / "no", vocab_size=300)
    with pytest.raises(ValueError, match="one string"):
        train_tokenizer("a text by mistake", tmp_path / "no", vocab_size=300)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_an_output_path_that_is_a_file_is_an_error_before_reading(tmp_path, name):
    def unread():
        pytest.fail("the texts were read")
        yield

    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="is a file") as caught:
        train_tokenizer(unread(), tmp_path / name)
    assert str(tmp_path / "file") in str(caught.value) and "out_dir" in str(caught.value)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("sample_chunks", [0, -1])
def test_an_empty_sample_is_an_error(tmp_path, sample_chunks):
    with pytest.raises(ValueError, match="sample_chunks"):
        train_tokenizer(["abc"], tmp_path, vocab_size=300, sample_chunks=sample_chunks)


def test_an_error_of_the_input_leaves_the_old_files(tmp_path):
    path = train_quietly(["the old text"], tmp_path, vocab_size=300)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def broken():
        yield "the new text"
        raise ConnectionError("the stream broke")

    with pytest.raises(ConnectionError, match="the stream broke"):
        train_tokenizer(broken(), tmp_path, vocab_size=300)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    load_tokenizer(path)


@pytest.mark.parametrize("mark", ["\t", "\0", "\u2581", "\u2585", "\r\n", "\ud800", SPECIAL_TOKENS[3]], ids=ascii)
def test_unusual_characters_do_not_break_training(tmp_path, mark):
    """Every line has one, and the words are still learned."""
    lines = [f"the zebra {mark} and the quagga{mark}", f"{mark}a zebra sleeps{mark}{mark}", "zebra quagga " * 30 + mark]
    path = train_quietly(lines * 20, tmp_path, vocab_size=330)
    tokenizer = load_tokenizer(path)
    for word in ("zebra", "quagga"):
        assert len(tokenizer.encode(word)) < 4, word
    mark = mark.replace("\ud800", "")
    for text in (mark, f"the zebra{mark} and {mark}", *lines):
        text = text.replace("\ud800", "")
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for token in SPECIAL_TOKENS:
        assert len(tokenizer.encode(token)) == 1


# --- determinism -------------------------------------------------------------------------------------


def test_the_same_texts_and_seed_give_the_same_bytes(tmp_path, monkeypatch, corpus, model_path):
    wanted = sha256_of(model_path)
    assert sha256_of(train_tokenizer(corpus, tmp_path / "list", vocab_size=VOCAB_SIZE)) == wanted
    assert sha256_of(train_tokenizer((t for t in corpus), str(tmp_path / "a" / "b"), vocab_size=VOCAB_SIZE)) == wanted
    monkeypatch.chdir(tmp_path)
    assert train_tokenizer(tuple(corpus), "relative", vocab_size=VOCAB_SIZE, seed=42) == str(Path("relative/spm.model"))
    assert sha256_of(tmp_path / "relative" / "spm.model") == wanted
    metas = [folder.joinpath("meta.json").read_bytes() for folder in (tmp_path / "list", tmp_path / "a" / "b")]
    assert metas == [Path(model_path).with_name("meta.json").read_bytes()] * 2


@pytest.mark.slow
def test_another_process_gives_the_same_bytes(tmp_path, corpus, model_path):
    (tmp_path / "corpus.json").write_text(json.dumps(corpus), encoding="utf-8")
    code = (
        "import json, pathlib, random, torch; random.seed(5); torch.manual_seed(5); torch.set_num_threads(2)\n"
        "from niels_gpt.tokenizer import train_tokenizer\n"
        "texts = json.loads(pathlib.Path('corpus.json').read_text(encoding='utf-8'))\n"
        f"train_tokenizer(texts, 'out', vocab_size={VOCAB_SIZE})\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT), "LC_ALL": "C"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=120)
    assert sha256_of(tmp_path / "out" / "spm.model") == sha256_of(model_path)


def test_training_again_replaces_the_files(tmp_path, corpus):
    train_quietly(["something else"], tmp_path, vocab_size=300)
    path = train_tokenizer(corpus, tmp_path, vocab_size=400)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["meta.json", "spm.model"]
    assert load_tokenizer(path).vocab_size == 404
    assert read_meta(path)["sha256"] == sha256_of(path)


def test_the_seed_decides_the_sample(tmp_path, corpus):
    def model(seed, name):
        path = train_quietly(corpus, tmp_path / f"{seed}{name}", vocab_size=400, seed=seed, sample_chunks=25)
        assert read_meta(path)["sample"]["chunks"] == 25
        assert read_meta(path)["seed"] == seed
        return sha256_of(path)

    first = [model(seed, "a") for seed in (1, 2)]
    assert model(1, "b") == first[0]
    assert len(set(first)) == 2


def test_training_does_not_move_global_generators(tmp_path, corpus, random_states):
    before = random_states()
    train_quietly(corpus, tmp_path, vocab_size=400, seed=3, sample_chunks=20)
    assert random_states() == before


# --- meta.json ---------------------------------------------------------------------------------------


def test_meta(tmp_path, corpus):
    texts = [*corpus, "über 漢字\r\n", ""]
    path = train_tokenizer(texts, tmp_path, vocab_size=500, seed=9)
    assert path == str(tmp_path / "spm.model")
    reference = sentencepiece.SentencePieceProcessor(model_file=path)
    size = sum(len(text.encode()) for text in texts)
    assert all(len(text) <= 1000 for text in texts)  # a chunk each
    meta = read_meta(path)
    assert meta["format"] == "niels-gpt tokenizer"
    assert meta["format_version"] == 1
    assert meta["sha256"] == sha256_of(path)
    assert meta["vocab_size"] == 504
    assert meta["vocab_size_asked"] == 500
    assert meta["seed"] == 9
    assert meta["special_token_ids"] == {
        name: reference.piece_to_id(token)
        for name, token in zip(("sys", "usr", "asst", "eot"), SPECIAL_TOKENS, strict=True)
    }
    assert meta["inputs"] == {"texts": len(texts), "bytes": size, "sha256": naive_hash(texts)}
    assert meta["sample"] == {"chunks": len(texts) - 1, "bytes": size - 1}  # without the empty one and the "\r"
    assert meta["versions"]["sentencepiece"] == version("sentencepiece")


def test_the_hash_of_the_inputs_golden(tmp_path):
    def hash_of(texts, name):
        return read_meta(train_quietly(texts, tmp_path / name, vocab_size=300))["inputs"]["sha256"]

    first = hash_of(["ab", "c"], "first")
    assert first == hashlib.sha256(b"\2\0\0\0\0\0\0\0ab\1\0\0\0\0\0\0\0c").hexdigest()
    assert hash_of(["a", "bc"], "second") != first
    assert hash_of(["ab", "c", ""], "third") != first
    assert hash_of(["a\tb\r\n" * 99], "long") == naive_hash(["a\tb\r\n" * 99])  # before any replacement


def test_all_texts_are_counted_if_few_are_sampled(tmp_path, corpus):
    meta = read_meta(train_quietly(corpus, tmp_path, vocab_size=400, sample_chunks=30))
    assert meta["inputs"]["texts"] == len(corpus)
    assert meta["inputs"]["sha256"] == naive_hash(corpus)
    assert meta["sample"]["chunks"] == 30
    shortest_first = sorted(len(text.encode()) for text in corpus)
    assert sum(shortest_first[:30]) <= meta["sample"]["bytes"] <= sum(shortest_first[-30:])


def test_a_long_text_is_many_chunks(tmp_path):
    """A chunk has at most 1,000 characters, so that a book counts more than a note."""
    plain = read_meta(train_quietly(["x" * 2500], tmp_path / "plain", vocab_size=300))
    assert plain["sample"] == {"chunks": 3, "bytes": 2500}
    words = "".join(random.Random(1).choices(string.ascii_lowercase + "      \n", k=20_000))
    meta = read_meta(train_quietly([words], tmp_path / "words", vocab_size=400))
    assert meta["sample"]["bytes"] == 20_000  # nothing is lost
    assert 20 <= meta["sample"]["chunks"] <= 40
    one = read_meta(train_quietly([words * 5], tmp_path / "one", vocab_size=400, sample_chunks=1))
    assert one["sample"]["chunks"] == 1
    assert 400 <= one["sample"]["bytes"] <= 1000


def test_the_files_contain_no_paths(tmp_path, corpus):
    folder = tmp_path / "a-private-folder-name"
    path = Path(train_tokenizer(corpus, folder, vocab_size=400))
    for file in (path, folder / "meta.json"):
        data = file.read_bytes()
        for word in (str(tmp_path), folder.name, tmp_path.name, str(Path.home()) + "/", str(ROOT)):
            assert word.encode() not in data


# --- the reservoir -----------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(0, 60), st.integers(1, 40), st.integers(0, 2**63 - 1))
def test_the_size_and_order_of_the_sample(n, size, seed):
    kept = reservoir((f"{i:02}" for i in range(n)), size, seed=seed)
    assert len(kept) == min(n, size)
    assert kept == sorted(set(kept))  # in order, without duplicates
    assert set(kept) <= {f"{i:02}" for i in range(n)}
    assert kept == reservoir([f"{i:02}" for i in range(n)], size, seed=seed)


def test_the_memory_of_training_is_bounded(tmp_path, corpus):
    class Text(str):
        """Counts its live instances."""

        alive = most = 0

        def __new__(cls, value):
            cls.alive += 1
            cls.most = max(cls.most, cls.alive)
            return super().__new__(cls, value)

        def __del__(self):
            type(self).alive -= 1

    stream = (Text(text) for _ in range(5) for text in corpus)
    train_quietly(stream, tmp_path, vocab_size=400, sample_chunks=20)
    assert Text.most <= 25


def test_chunks_end_at_the_last_white_space_of_their_second_half():
    words = "a" * 600 + " " + "b" * 300 + "\n" + "c" * 200
    assert list(_chunks([words])) == ["a" * 600 + " " + "b" * 300, "\n" + "c" * 200]
    assert list(_chunks(["a" * 400 + " " + "b" * 900])) == ["a" * 400 + " " + "b" * 599, "b" * 301]
    assert list(_chunks(["x" * 1000, "y" * 1001])) == ["x" * 1000, "y" * 1000, "y"]
    assert list(_chunks(["a" * 500 + " " + "b" * 999])) == ["a" * 500, " " + "b" * 999]
    assert list(_chunks(["a\r\nb\tc", " \n ", ""])) == ["a\nb c"]


def test_the_reservoir_replaces_by_algorithm_r():
    """Item n replaces slot int(u * (n + 1)) if that is below the size. Random numbers come in blocks of 4096."""
    for seed, count, size in (*((seed, 40, 3) for seed in range(10)), (5, 9000, 400), (6, 9000, 400)):
        generator = torch.Generator().manual_seed(seed)
        draws = torch.cat([torch.rand(4096, generator=generator, dtype=torch.float64) for _ in range(3)]).tolist()
        kept = list(range(size))
        for n in range(size, count):
            slot = int(draws[n - size] * (n + 1))
            if slot < size:
                kept[slot] = n
        assert reservoir(map(str, range(count)), size, seed=seed) == [str(n) for n in sorted(kept)]


def test_ctrl_c_ends_a_training_in_c_plus_plus(tmp_path):
    """A real process: SentencePiece would hold back the SIGINT until it has finished."""
    script = (
        "import sys, random\n"
        "from niels_gpt import tokenizer\n"
        "draw = random.Random(0)\n"
        "text = ' '.join(''.join(draw.choices('abcdefghij', k=draw.randint(2, 9))) for _ in range(900_000))\n"
        "from niels_gpt.tokenizer import training\n"
        "start = training.threading.Thread.start\n"
        "def started(thread):\n"
        "    start(thread); print('training', flush=True)\n"
        "training.threading.Thread.start = started\n"
        "tokenizer.train_tokenizer([text], sys.argv[1], vocab_size=8000)\n"
        "print('trained', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stdout.readline() == "training\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and output == "" and "KeyboardInterrupt" in errors
    assert not (tmp_path / "out" / "spm.model").exists()


def test_after_a_kill_the_next_training_gives_the_same_files(corpus, tokenizer, tmp_path, monkeypatch):
    """The process dies at each rename and fsync in turn, in an empty folder and in one with another tokenizer."""
    monkeypatch.setattr(training, "_train", lambda *_: tokenizer.model)
    train_tokenizer(corpus, tmp_path / "whole", vocab_size=VOCAB_SIZE)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert set(expected) == {"meta.json", "spm.model"}
    folder = tmp_path / "killed"
    deaths = 0
    while killed_at(deaths, lambda: train_tokenizer(corpus, folder, vocab_size=VOCAB_SIZE)):
        deaths += 1
        names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
        assert names != {"spm.model"}  # a model without its meta would never be completed
        if "spm.model" in names:
            assert load_tokenizer(folder).sha256 == tokenizer.sha256
        train_tokenizer(corpus, folder, vocab_size=VOCAB_SIZE)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected
        if deaths % 2:
            shutil.rmtree(folder)
    assert deaths >= 4
