"""Tokenizers of others: the ids of transformers, exact bytes of every token, special strings, losses, bad files."""

import json
import pickle
import sys

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from niels_gpt.inference.generation import TextOutput
from niels_gpt.tokenizer import ForeignTokenizer, Tokenizer, load_tokenizer, token_sizes, write_foreign
from niels_gpt.tokenizer.huggingface import HuggingFaceModel
from tests import foreign_tokenizers as made

NAMES = list(made.MAKERS)
KEEP_ALL = ["smollm", "llama3"]
"""Those that keep every character."""
HARD = [
    "", " ", "  ", "a", " a", "a ", "a  b", "\n", "a\nb\n\n", "\t", "1984 12", "café", "cafe\u0301", "漢字 🍎",
    "👩\u200d👩\u200d👧", "def f(x):\n    return x\n", "\u2581", "a\u2581b", "<0x41>", "\ufffd", "\x00\x07",
    "<s>", "x</s>y",
    "<|im_end|>", "<|im_start|>user\nhi<|im_end|>", "Ġ", "Ċ", "<unk>", "<tool_call>", "A long word: " + "x" * 50,
]  # fmt: skip
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
UNUSUAL = st.lists(st.sampled_from([*HARD, "the ", "dog", "\r\n", "</s", "<|", "|>"]), max_size=6).map("".join)
PLAIN = st.text(st.sampled_from("abcdefghij ABC.,;é1984\n")).filter(lambda text: text == text.strip(" "))


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("foreign")
    return {name: made.make(name, root / name) for name in NAMES}


@pytest.fixture(scope="session")
def tokenizers(folders):
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def theirs(folders):
    return {name: AutoTokenizer.from_pretrained(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def libraries(folders):
    return {name: Library.from_file(str(folders[name] / "tokenizer.json")) for name in NAMES if name != "sentencepiece"}


def decoded(tokenizer, ids):
    """The bytes of ids, one after the other, less the space that the tokenizer adds."""
    data = b"".join([tokenizer.token_bytes[i] for i in ids])
    return data[1:] if tokenizer.adds_space and data[:1] == b" " else data


@pytest.mark.parametrize("name", NAMES)
class TestIds:
    def test_equal_those_of_transformers(self, name, tokenizers, theirs):
        for text in HARD:
            if name == "sentencepiece" and (text.startswith((" ", "\u2581")) or "\u2581" in text):
                continue  # transformers computes SentencePiece by other rules at the start of a text
            assert tokenizers[name].encode(text) == theirs[name](text, add_special_tokens=False)["input_ids"], text

    def test_a_document_starts_as_with_add_special_tokens(self, name, tokenizers, theirs):
        text = "The dog sleeps"
        (ids,) = tokenizers[name].encode_documents([text])
        assert ids.tolist() == theirs[name](text)["input_ids"]
        assert ids.dtype == np.uint16

    def test_batches_equal_single_texts(self, name, tokenizers):
        tokenizer = tokenizers[name]
        for text, ids in zip(HARD, tokenizer.encode_batch(HARD), strict=True):
            assert ids.tolist() == tokenizer.encode(text)
            assert ids.dtype == tokenizer.dtype == np.uint16
        for text, ids in zip(HARD, tokenizer.encode_documents(HARD), strict=True):
            expected = tokenizer.encode_as_text(text)
            assert ids.tolist() == ([*tokenizer.document_start, *expected] if expected else [])

    def test_vocabulary(self, name, tokenizers, theirs):
        assert tokenizers[name].vocab_size == len(tokenizers[name].token_bytes) == len(theirs[name])

    def test_special_ids(self, name, tokenizers, theirs):
        special, other = tokenizers[name].special_token_ids(), theirs[name]
        assert special["eot"] == tokenizers[name].end_ids[0] == other.eos_token_id
        assert special.get("bos") == other.bos_token_id
        for i in {i for i, token in other.added_tokens_decoder.items() if token.special} - {other.unk_token_id}:
            assert special[other.convert_ids_to_tokens(i)] == i

    def test_special_strings_become_ids(self, name, tokenizers):
        tokenizer = tokenizers[name]
        for text, i in tokenizer.special_token_ids().items():
            if text not in ("eot", "bos"):
                assert tokenizer.encode(text) == [i]

    @given(text=UNUSUAL | TEXTS)
    def test_text_never_becomes_a_special_id(self, name, tokenizers, text):
        tokenizer = tokenizers[name]
        special = set(tokenizer.special_token_ids().values())
        assert special.isdisjoint(tokenizer.encode_as_text(text))
        assert special.isdisjoint(tokenizer.encode_inside(text, as_text=True))
        (document,) = tokenizer.encode_documents([text])
        assert special.isdisjoint(document[len(tokenizer.document_start) :].tolist())

    def test_text_without_special_strings_is_encoded_alike(self, name, tokenizers):
        for text in made.TEXTS:
            assert tokenizers[name].encode_as_text(text) == tokenizers[name].encode(text)


@pytest.mark.parametrize("name", NAMES)
class TestBytes:
    @given(text=UNUSUAL | TEXTS)
    def test_decode_joins_the_bytes_of_the_tokens(self, name, tokenizers, text):
        tokenizer = tokenizers[name]
        ids = tokenizer.encode_as_text(text)
        assert tokenizer.decode(ids) == decoded(tokenizer, ids).decode("utf-8", "replace")

    @given(text=TEXTS.filter(lambda text: text[:1] not in (" ", "\u2581")))
    def test_decode_equals_the_library(self, name, tokenizers, libraries, text):
        tokenizer = tokenizers[name]
        ids = tokenizer.encode(text)
        if name == "sentencepiece":
            reference = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.files["tokenizer.model"])
            assert tokenizer.decode(ids) == reference.decode(ids)
        else:
            assert tokenizer.decode(ids) == libraries[name].decode(ids, skip_special_tokens=False)

    def test_every_token_equals_the_library(self, name, tokenizers, libraries):
        if name == "sentencepiece":
            pytest.skip("the library decodes control pieces to nothing")
        tokenizer, first = tokenizers[name], tokenizers[name].encode("dog")
        before = libraries[name].decode(first, skip_special_tokens=False)
        for i in range(tokenizer.vocab_size):
            data = tokenizer.token_bytes[i]
            if data.decode("utf-8", "ignore").encode() == data:  # a part of a character has no text alone
                found = libraries[name].decode([*first, i], skip_special_tokens=False)
                assert before.encode() + data == found.encode(), (i, data)

    @given(text=UNUSUAL | TEXTS)
    def test_streaming_never_splits_a_character(self, name, tokenizers, text):
        tokenizer = tokenizers[name]
        ids = tokenizer.encode_as_text(text)
        output = TextOutput([])
        pieces = [output.add(tokenizer.token_bytes[i]) for i in ids]
        pieces.append(output.flush())
        whole = "".join(pieces)
        assert (whole.removeprefix(" ") if tokenizer.adds_space else whole) == tokenizer.decode(ids)
        if "\ufffd" not in tokenizer.decode(ids):
            assert not any("\ufffd" in piece for piece in pieces)

    @given(text=UNUSUAL | TEXTS)
    def test_reports_what_it_loses(self, name, tokenizers, text):
        tokenizer = tokenizers[name]
        if tokenizer.lossy is None:
            assert tokenizer.decode(tokenizer.encode_as_text(text)) == text

    @given(first=PLAIN, second=PLAIN)
    def test_a_text_continues_another_without_a_space(self, name, tokenizers, first, second):
        tokenizer = tokenizers[name]
        ids = [*tokenizer.encode(first), *tokenizer.encode_inside(second)]
        if first and (name != "unigram"):
            assert tokenizer.decode(ids) == first + second


class TestLosses:
    @pytest.mark.parametrize("name", KEEP_ALL)
    def test_none(self, name, tokenizers):
        assert tokenizers[name].lossy is None

    @pytest.mark.parametrize("name", ["llama2", "sentencepiece"])
    def test_sentencepiece_loses_only_its_block(self, name, tokenizers):
        assert tokenizers[name].lossy == "U+2581 becomes a space"

    def test_are_named(self, tokenizers):
        assert "NFC" in tokenizers["qwen"].lossy
        assert "lower" not in tokenizers["qwen"].lossy
        assert "NFKC" in tokenizers["unigram"].lossy
        assert "vocabulary" in tokenizers["unigram"].lossy
        assert "start" in tokenizers["llama2-first"].lossy

    @pytest.mark.parametrize(
        ("normalizer", "word"),
        [
            (normalizers.Lowercase(), "lower case"),
            (normalizers.Strip(), "space at the end"),
            (normalizers.NFD(), "NFD"),
            (normalizers.Replace("\r\n", "\n"), "line ends"),
        ],
    )
    def test_by_normalizers(self, tmp_path, normalizer, word):
        tokenizer = made.byte_level(["<|endoftext|>"], 300)
        tokenizer.normalizer = normalizer
        assert word in load_tokenizer(made.write_folder(tmp_path, tokenizer)).lossy

    def test_only_what_is_lost_is_named(self, tmp_path):
        tokenizer = made.byte_level(["<|endoftext|>"], 300)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Strip()])
        lost = load_tokenizer(made.write_folder(tmp_path, tokenizer)).lossy.split("; ")
        assert [any(word in each for each in lost) for word in ("lower case", "at the start", "at the end")] == [
            True
        ] * 3
        assert len(lost) == 3

    def test_a_space_that_is_added(self, tmp_path):
        tokenizer = made.byte_level(["<|endoftext|>"], 300)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        loaded = load_tokenizer(made.write_folder(tmp_path, tokenizer))
        assert "added at the start" in loaded.lossy
        assert "line ends" not in loaded.lossy
        assert loaded.decode([*loaded.encode("a"), *loaded.encode_inside("b")]) == " ab"


class TestForgery:
    def test_a_normalizer_cannot_make_a_special_string(self, tmp_path):
        """`<|END|>` is not special, but lower case makes it so, if the added token is matched in normalized text."""
        tokenizer = made.byte_level([], 300)
        tokenizer.normalizer = normalizers.Lowercase()
        content = json.loads(tokenizer.to_str())
        content["added_tokens"] = [
            {"id": 300, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": True, "special": True}
        ]  # fmt: skip
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
        loaded = load_tokenizer(tmp_path)
        assert loaded.encode("a<|END|>") == [*loaded.encode("a"), 300]
        assert 300 not in loaded.encode_as_text("a<|END|>b<|end|>")
        assert loaded.normalizes_special

    def test_added_tokens_of_a_template_are_special(self, tmp_path):
        plain = load_tokenizer(made.make("qwen", tmp_path / "plain"))
        template = "{% for m in messages %}<tool_call>{{ m.content }}{% endfor %}"
        used = load_tokenizer(made.make("qwen", tmp_path / "used", chat_template=template))
        i = plain.encode("<tool_call>")
        assert len(i) == 1
        assert plain.encode_as_text("<tool_call>") == i
        assert i[0] not in used.encode_as_text("<tool_call>")
        assert used.encode("<tool_call>") == i


class TestEnds:
    def test_several(self, tmp_path):
        folder = made.make("llama3", tmp_path)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [401, 404]}))
        assert load_tokenizer(folder).end_ids == (404, 401)

    def test_one_of_the_generation_config(self, tmp_path):
        folder = made.make("llama3", tmp_path, eos_token=None)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 401}))
        loaded = load_tokenizer(folder)
        assert loaded.end_ids == (401,)
        assert loaded.special_token_ids()["eot"] == 401

    def test_of_the_special_tokens_map(self, tmp_path):
        folder = made.make("llama3", tmp_path, eos_token=None)
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|end_of_text|>"}}))
        assert load_tokenizer(folder).end_ids == (401,)

    def test_a_usual_name_where_no_file_names_one(self, tmp_path):
        folder = made.write_folder(tmp_path, made.smollm())
        assert load_tokenizer(folder).eos_token == "<|endoftext|>"

    @pytest.mark.parametrize(("value", "fact"), [([7, 9999], "9999"), ("7", "'7'"), ([-1], "-1")])
    def test_outside_the_vocabulary(self, tmp_path, value, fact):
        folder = made.make("llama3", tmp_path)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(ValueError, match=f"generation_config.json.*{fact}"):
            load_tokenizer(folder)

    def test_unknown_name(self, tmp_path):
        folder = made.make("llama3", tmp_path, eos_token="<|stop|>")
        with pytest.raises(ValueError, match=r"eos_token is '<\|stop\|>'"):
            load_tokenizer(folder)

    def test_none(self, tmp_path):
        folder = made.write_folder(tmp_path, made.byte_level(["<|x|>"], 300))
        with pytest.raises(ValueError, match=r"no end-of-text token.*eos_token"):
            load_tokenizer(folder)


class TestFiles:
    @pytest.mark.parametrize("name", ["smollm", "sentencepiece"])
    def test_written_and_loaded_again(self, name, tokenizers, tmp_path):
        tokenizer = tokenizers[name]
        (tmp_path / "tokenizer.json").write_text("old")
        write_foreign(tokenizer, tmp_path)
        again = load_tokenizer(tmp_path)
        assert again.files == tokenizer.files
        assert again.sha256 == tokenizer.sha256
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert copy.encode("The dog") == tokenizer.encode("The dog") and copy.where == tokenizer.where

    def test_the_same_files_are_made_into_one_tokenizer(self, tmp_path):
        folder = made.make("smollm", tmp_path / "a")
        first = load_tokenizer(folder)
        assert load_tokenizer(folder) is first
        other = load_tokenizer(made.make("smollm", tmp_path / "b"))
        assert other.where != first.where and other.sha256 == first.sha256
        made.make("smollm", folder, chat_template="x")
        assert load_tokenizer(folder).templates == {"default": "x"} and not first.templates

    def test_identity_covers_all_files(self, tmp_path):
        shas = set()
        for number, change in enumerate(({}, {"chat_template": "x"}, {"eos_token": "<|endoftext|>"})):
            shas.add(load_tokenizer(made.make("smollm", tmp_path / str(number), **change)).sha256)
        (tmp_path / "0" / "generation_config.json").write_text('{"eos_token_id": 400}')
        shas.add(load_tokenizer(tmp_path / "0").sha256)
        (tmp_path / "0" / "README.md").write_text("no part of it")
        shas.add(load_tokenizer(tmp_path / "0").sha256)
        assert len(shas) == 4

    def test_by_file(self, folders, tokenizers):
        assert load_tokenizer(folders["smollm"] / "tokenizer.json").sha256 == tokenizers["smollm"].sha256
        found = load_tokenizer(folders["sentencepiece"] / "tokenizer.model")
        assert isinstance(found, ForeignTokenizer)
        assert found.sha256 == tokenizers["sentencepiece"].sha256

    def test_ours_is_found_under_the_same_name(self, model_path, tmp_path):
        (tmp_path / "tokenizer.model").write_bytes(open(model_path, "rb").read())  # noqa: PTH123, SIM115
        assert isinstance(load_tokenizer(tmp_path / "tokenizer.model"), Tokenizer)
        assert isinstance(load_tokenizer(tmp_path), Tokenizer)

    def test_json_comes_before_the_model(self, tmp_path):
        folder = made.make("llama2", tmp_path)
        (folder / "tokenizer.model").write_bytes(b"not read")
        assert list(load_tokenizer(folder).files) == ["tokenizer.json", "tokenizer_config.json"]

    def test_named_templates(self, tmp_path):
        listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
        folder = made.make("smollm", tmp_path, chat_template=listed)
        assert load_tokenizer(folder).templates == {"default": "a", "tool_use": "b"}
        (folder / "chat_template.jinja").write_text("c")
        assert load_tokenizer(folder).templates == {"default": "c"}

    def test_importing_needs_no_library(self):
        import subprocess

        code = "import sys, niels_gpt.tokenizer; sys.exit('tokenizers' in sys.modules or 'transformers' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestOfSentencePiece:
    def test_added_tokens_of_the_config(self, tmp_path):
        size = load_tokenizer(made.make("sentencepiece", tmp_path / "a")).vocab_size
        added = {str(size): {"content": "<|im_end|>", "special": True}, "1": {"content": "<s>", "special": True}}
        loaded = load_tokenizer(made.make("sentencepiece", tmp_path / "b", added_tokens_decoder=added))
        assert loaded.vocab_size == size + 1
        assert loaded.encode("the<|im_end|>dog")[-3:].count(size) <= 1
        assert size in loaded.encode("the<|im_end|>dog")
        assert size not in loaded.encode_as_text("the<|im_end|>dog")
        assert loaded.decode(loaded.encode("the<|im_end|>dog")) == "the<|im_end|>dog"

    @pytest.mark.parametrize(
        ("entry", "fact"),
        [
            ({"1": {"content": "<x>", "special": True}}, "id 1.*'<x>'.*'<s>'"),
            ({"900": {"content": "<x>", "lstrip": True}}, "lstrip"),
            ({"x": {"content": "<x>"}}, "'x'"),
        ],
    )
    def test_bad_added_tokens(self, tmp_path, entry, fact):
        with pytest.raises(ValueError, match=fact):
            load_tokenizer(made.make("sentencepiece", tmp_path, added_tokens_decoder=entry))

    def test_start_of_a_text_without_a_config(self, tmp_path):
        loaded = load_tokenizer(made.write_folder(tmp_path, made.sentencepiece_model()))
        assert (loaded.document_start, loaded.end_ids) == ([1], (2,))


class TestBadFiles:
    @pytest.mark.parametrize(
        ("data", "fact"),
        [
            (b'{"model": {', "line 1"),
            (b"\xff\xfe{}", "byte 0 is not utf-8"),
            (b"[]", "no field model"),
            (b"{}", "no field model"),
            (b'{"model": 3}', "no field model"),
            (b'{"model": {"type": "BPE", "vocab": 3}}', "cannot be read"),
            (b"[" * 100_000, "nested too deep"),
        ],
    )
    def test_damaged(self, tmp_path, data, fact):
        (tmp_path / "tokenizer.json").write_bytes(data)
        with pytest.raises(ValueError, match=f"tokenizer.json.*{fact}"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize(
        ("model", "decoder", "fact"),
        [
            (models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"), decoders.WordPiece(), "type WordPiece.*BPE"),
            (models.WordLevel({"a": 0}), None, "type WordLevel"),
            (models.BPE({"a": 0}, []), None, "no decoder"),
            (models.BPE({"a": 0}, []), decoders.BPEDecoder(), "step BPEDecoder"),
            (models.BPE({"a": 0}, []), decoders.CTC(), "step CTC"),
            (models.BPE({"a": 0}, []), decoders.Strip(" ", 1, 0), "step Strip"),
        ],
    )
    def test_not_supported(self, tmp_path, model, decoder, fact):
        tokenizer = Library(model)
        if decoder is not None:
            tokenizer.decoder = decoder
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ValueError, match=fact):
            load_tokenizer(tmp_path)

    def test_huge(self, tmp_path):
        made.make("smollm", tmp_path)
        with (tmp_path / "chat_template.jinja").open("wb") as file:
            file.truncate(2 << 20)
        with pytest.raises(ValueError, match=r"chat_template.jinja has 2,097,152 bytes, more than 1,048,576"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize(
        ("name", "data", "fact"),
        [
            ("tokenizer_config.json", b"{", "damaged"),
            ("tokenizer_config.json", b"[]", "JSON object"),
            ("tokenizer_config.json", b'{"eos_token": "<|im_end|>", "chat_template": 3}', "chat_template"),
            ("special_tokens_map.json", b"\xff", "damaged"),
            ("generation_config.json", b"nul", "damaged"),
            ("chat_template.jinja", b"a\xffb", "byte 1"),
        ],
    )
    def test_damaged_beside_it(self, tmp_path, name, data, fact):
        folder = made.make("smollm", tmp_path)
        (folder / name).write_bytes(data)
        with pytest.raises(ValueError, match=f"{name}.*{fact}"):
            load_tokenizer(folder)

    def test_damaged_sentencepiece_model(self, tmp_path):
        (tmp_path / "tokenizer.model").write_bytes(b"junk")
        with pytest.raises(ValueError, match=r"tokenizer.model is not a SentencePiece model"):
            load_tokenizer(tmp_path)

    def test_missing(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            load_tokenizer(tmp_path)
        with pytest.raises(FileNotFoundError, match=r"tokenizer.json"):
            load_tokenizer(tmp_path / "tokenizer.json")

    @pytest.mark.parametrize("ids", [[10**6], [-1], [[1, 2]]])
    def test_bad_ids(self, tokenizers, ids):
        with pytest.raises(ValueError):
            tokenizers["smollm"].decode(np.array(ids))

    @pytest.mark.parametrize("text", ["\ud800", 3, None])
    @pytest.mark.parametrize("method", ["encode", "encode_as_text", "encode_inside"])
    def test_bad_texts(self, tokenizers, text, method):
        with pytest.raises(ValueError, match=r"surrogate|strings"):
            getattr(tokenizers["smollm"], method)(text)


def test_render_shows_special_strings(tokenizers):
    tokenizer = tokenizers["smollm"]
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert tokenizer.render(ids) == "<|im_start|>user\nhi<|im_end|>\n"


def test_sizes_of_special_tokens_are_zero(tokenizers):
    tokenizer = tokenizers["llama3"]
    sizes = token_sizes(tokenizer)
    assert not sizes[list(tokenizer.special_token_ids().values())].any()
    assert sizes[tokenizer.encode(" dog")].sum() == 4


def test_a_large_vocabulary_needs_32_bits(tmp_path):
    tokenizer = made.byte_level(["<|endoftext|>"], 300)
    tokenizer.add_tokens([f"<extra {i}>" for i in range(65_536)])
    loaded = load_tokenizer(made.write_folder(tmp_path, tokenizer))
    assert loaded.vocab_size > 65_536
    (ids,) = loaded.encode_batch(["<extra 65535>"])
    assert ids.dtype == loaded.dtype == np.uint32
    assert ids.tolist() == [loaded.vocab_size - 1]


def test_text_that_a_tokenizer_cannot_encode_is_an_error():
    """The library raises Exception itself."""
    data = b'{"model": {"type": "Unigram", "vocab": [["b", 0.0]]}, "decoder": {"type": "Fuse"}}'
    model = HuggingFaceModel(data, where="here")
    for encode in (model.encode, lambda text: model.encode_batch([text])):
        with pytest.raises(ValueError, match="here cannot encode"):
            encode("a")
