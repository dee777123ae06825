"""llama.cpp loads our GGUF files: the same ids for texts, the same greedy continuations, and what quantizing costs."""

from __future__ import annotations

import math
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch

from niels_gpt.chat.formats import chat_format
from niels_gpt.chat.transcript import format_chat
from niels_gpt.data import embedded
from niels_gpt.export.gguf_file import TYPES, write_gguf
from niels_gpt.export.hugging_face import write_hf
from niels_gpt.export.pieces import HARD_TEXTS, pieces_of
from niels_gpt.inference.generation import generate
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.loading import load_run
from niels_gpt.tokenizer import SPECIAL_TOKENS, ByteTokenizer, load_tokenizer, train_tokenizer
from tests import foreign_tokenizers
from tests.cli import call
from tests.export import MODELS, greedy, make, some_ids
from tests.export.test_gguf_bpe import PRE_TOKENIZERS, bpe_tokenizer

llama_cpp = pytest.importorskip("llama_cpp")
gguf = pytest.importorskip("gguf")


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hello\n"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Why 12 = 3 · 4?"},
]


def load(path: Path, T: int = 64):
    """The model in llama.cpp, with keys and values in f32 as ours are."""
    f32 = llama_cpp.GGML_TYPE_F32
    options = {"n_ctx": T, "n_batch": T, "n_threads": 1, "logits_all": True, "verbose": False}
    return llama_cpp.Llama(str(path), type_k=f32, type_v=f32, flash_attn=False, **options)


def logits_of(llama, ids: list[int]) -> np.ndarray:
    llama.reset()
    llama.eval(ids)
    return np.array(llama.scores[: len(ids)])


def written(tmp_path, name: str, kind: str = "f32"):
    model, tokenizer = make(name)
    path = tmp_path / f"{name}.gguf"
    write_gguf(model, tokenizer, path, kind=kind)
    return model, tokenizer, load(path)


def ending_ids(llama) -> set[int]:
    """The ids after which llama.cpp stops."""
    vocabulary = llama_cpp.llama_model_get_vocab(llama.model)
    return {i for i in range(llama.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocabulary, i)}


GELU = 1e-2
"""llama.cpp computes the tanh approximation of GELU from a table of f16; ours is exact."""


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_f32_gives_our_logits_and_greedy_ids(tmp_path, name):
    model, _, llama = written(tmp_path, name)
    ids = some_ids(model, 60)
    expected = model(torch.tensor([ids]))[0].numpy()
    tolerance = 1e-4 if model.config.mlp == "swiglu" else GELU
    np.testing.assert_allclose(logits_of(llama, ids), expected, atol=tolerance, rtol=0)
    found = ids[:8]
    llama.reset()
    llama.eval(found)
    for _ in range(40):
        found.append(int(llama.scores[llama.n_tokens - 1].argmax()))
        llama.eval(found[-1:])
    if model.config.mlp == "swiglu":
        assert found == greedy(model, ids[:8], 40)
    else:  # with random weights some maxima are closer than the error of the approximation
        ours = model(torch.tensor([found[:-1]]))[0, 7:]
        chosen = ours.gather(1, torch.tensor(found[8:])[:, None])[:, 0]
        assert (ours.max(dim=1).values - chosen).max() < 2 * GELU


def rounded(model: GPT, kind: str) -> GPT:
    """The model with the weights of a file of this kind (see TYPES)."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and name != "pos_emb.weight":
            rows = name in ("tok_emb.weight", "lm_head.weight")
            stored = "f16" if weight.shape[1] % 32 else "q8_0" if rows and kind == "q4_0" else kind
            as_type = gguf.GGMLQuantizationType[stored.upper()]
            values = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), as_type), as_type)
            weight.copy_(torch.from_numpy(values.astype(np.float32)))
    return model


@pytest.mark.parametrize(("kind", "limit"), [("f16", 0.003), ("q8_0", 0.05), ("q4_0", 0.05)])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_other_types_give_the_logits_of_rounded_weights(tmp_path, name, kind, limit):
    """Not the same logits: llama.cpp rounds activations, too, to f16 or to 8 bits."""
    model, _, llama = written(tmp_path, name, kind)
    ids = some_ids(model, 60)
    exact = model(torch.tensor([ids]))[0].numpy()
    expected = rounded(model, kind)(torch.tensor([ids]))[0].numpy()
    found = logits_of(llama, ids)
    assert np.linalg.norm(found - expected) < limit * np.linalg.norm(expected)
    assert np.linalg.norm(found - exact) > 1e-4 * np.linalg.norm(exact)  # it is no f32


@pytest.mark.parametrize("name", ["v1", "v0"])
def test_hard_texts_have_our_ids_and_come_back(tmp_path, name):
    _, tokenizer, llama = written(tmp_path, name)
    for text in HARD_TEXTS:
        for special in (True, False):
            ids = llama.tokenize(text.encode(), add_bos=True, special=special)
            assert ids == tokenizer.encode(text)
            assert llama.detokenize(ids) == text.encode()


def test_special_strings_and_ends_of_turns(tmp_path):
    _, tokenizer, llama = written(tmp_path, "v1")
    text = f"{SPECIAL_TOKENS[1]}hi there{SPECIAL_TOKENS[3]}"
    assert llama.tokenize(text.encode(), add_bos=False, special=True) == tokenizer.encode(text)
    plain = llama.tokenize(text.encode(), add_bos=False, special=False)
    assert not set(plain) & set(tokenizer.special_token_ids().values()) and llama.detokenize(plain) == text.encode()
    assert llama.token_eos() == tokenizer.special_token_ids()["eot"]
    assert ending_ids(llama) == {tokenizer.special_token_ids()["eot"]}


def test_bytes_are_tokens_and_no_text_has_the_one_that_ends_it(tmp_path):
    _, _, llama = written(tmp_path, "v0")
    assert [llama.detokenize([byte]) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    (end,) = ending_ids(llama)
    every_character = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    assert end == llama.token_eos() and end not in every_character.encode()


@pytest.mark.parametrize("name", ["v1", "v0"])
def test_the_chat_template_gives_our_prompt(tmp_path, name):
    _, tokenizer, llama = written(tmp_path, name)
    template = llama.metadata["tokenizer.chat_template"]
    formatter = llama_cpp.llama_chat_format.Jinja2ChatFormatter(template, eos_token="", bos_token="")
    prompt = formatter(messages=MESSAGES).prompt
    found = llama.tokenize(prompt.encode(), add_bos=False, special=True)
    if isinstance(tokenizer, ByteTokenizer):
        assert found == tokenizer.encode(format_chat(MESSAGES))
    else:
        assert found == chat_format(tokenizer).fit(MESSAGES, limit=10**6).ids


@pytest.mark.parametrize("name", ["v1", "v1 of bytes"])
def test_a_chat_gives_our_greedy_reply(tmp_path, name):
    model, tokenizer, llama = written(tmp_path, name)
    messages = MESSAGES[1:2]
    prompt = list(chat_format(tokenizer).fit(messages, limit=32).ids)
    answer = llama.create_chat_completion(messages, max_tokens=24, temperature=0.0, repeat_penalty=1.0)
    number = answer["usage"]["completion_tokens"]  # it goes on while a character is incomplete
    assert answer["usage"]["prompt_tokens"] == len(prompt) and 24 <= number < 28
    reply = llama.detokenize(greedy(model, prompt, number)[len(prompt) :])
    assert answer["choices"][0]["message"]["content"] == reply.decode("utf-8", errors="ignore")


def test_long_texts_have_our_ids_up_to_ties(tmp_path, capsys):
    """Where they differ, the pieces are the same in another order: SentencePiece itself decides ties by rounding."""
    notes = [path.read_text(encoding="utf-8") for path in sorted(embedded.NOTES.glob("*.md"))]
    tokenizer = load_tokenizer(train_tokenizer(notes, tmp_path, vocab_size=1500))
    model, _ = make("v1")
    model.config = type(model.config)(V=tokenizer.vocab_size, T=64, C=64, L=2, H=4, norm="rmsnorm", mlp="swiglu")
    model.tok_emb.weight = model.lm_head.weight = torch.nn.Parameter(torch.zeros(tokenizer.vocab_size, 64))
    write_gguf(model, tokenizer, tmp_path / "m.gguf")
    llama, pieces = load(tmp_path / "m.gguf"), pieces_of(tokenizer)
    for text in HARD_TEXTS:
        assert llama.tokenize(text.encode(), add_bos=False, special=False) == tokenizer.encode(text), text
    texts = [part for note in notes for part in note.split("\n\n")]
    different = 0
    for text in texts:
        found, expected = llama.tokenize(text.encode(), add_bos=False, special=True), tokenizer.encode(text)
        if found != expected:
            different += 1
            scores = [math.fsum(pieces[i].score for i in ids) for ids in (found, expected)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-3) and llama.detokenize(found) == text.encode()
    with capsys.disabled():
        print(f"\n{different} of {len(texts)} paragraphs have pieces of equal score in another order")
    assert different < 0.05 * len(texts)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_bpe_of_others_has_its_ids(tmp_path, pre):
    tokenizer = bpe_tokenizer(pre)
    model = GPT({"V": tokenizer.vocab_size + 3, "T": 64, "C": 32, "L": 1, "H": 2, "norm": "rmsnorm", "mlp": "swiglu"})
    write_gguf(model, tokenizer, tmp_path / "m.gguf")
    llama = load(tmp_path / "m.gguf")
    for text in [*HARD_TEXTS, "a<|end|>b", "It's 12345, I'LL  go\n\n x"]:
        found = llama.tokenize(text.encode(), add_bos=False, special=True)
        assert found == tokenizer.encode(text), text
    assert llama.token_eos() == tokenizer.special_token_ids()["eot"]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_padded_vocabularies_of_others_load(tmp_path, tied, kind):
    """An embedding with more rows than the tokenizer has ids, in an imported model and its export."""
    tokenizer = bpe_tokenizer("smollm")
    V = tokenizer.vocab_size + 48
    sizes = {"V": V, "T": 64, "C": 64, "L": 1, "H": 2, "norm": "rmsnorm", "mlp": "swiglu", "tie_embeddings": tied}
    (tmp_path / "public").mkdir()
    write_hf(GPT(sizes), tokenizer, tmp_path / "public")
    assert call("import", "hf", tmp_path / "public", "--run-dir", tmp_path / "run") == 0
    assert call("export", "gguf", tmp_path / "run", "--type", kind, "--out", tmp_path / "m.gguf") == 0
    model, llama = load_run(tmp_path / "run", None, "cpu").model, load(tmp_path / "m.gguf")
    assert llama.n_vocab() == V
    ids = some_ids(model, 40)
    limit = {"f32": 1e-5, "f16": 0.003, "q8_0": 0.05, "q4_0": 0.3}[kind]
    expected = model(torch.tensor([ids]))[0].numpy()
    assert np.linalg.norm(logits_of(llama, ids) - expected) < limit * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["llama2", "llama2-never"])
def test_bpe_with_byte_fallback_of_others_has_its_ids(tmp_path, name):
    tokenizer = load_tokenizer(foreign_tokenizers.make(name, tmp_path / "public"))
    model = GPT({"V": tokenizer.vocab_size + 3, "T": 64, "C": 32, "L": 1, "H": 2, "norm": "rmsnorm", "mlp": "swiglu"})
    write_gguf(model, tokenizer, tmp_path / "m.gguf")
    llama = load(tmp_path / "m.gguf")
    for text in [*HARD_TEXTS, *foreign_tokenizers.TEXTS, "[INST] a [/INST] b</s><s> [INST]c", "aaaaaaa     theethe"]:
        found = llama.tokenize(text.encode(), add_bos=False, special=True)
        assert found == tokenizer.encode(text), text
        found = llama.tokenize(text.encode(), add_bos=False, special=False)
        assert found == tokenizer.encode_as_text(text), text
        assert llama.detokenize(found) == b"".join(tokenizer.token_bytes[i] for i in found)


@pytest.mark.parametrize("name", ["smollm", "qwen", "llama3", "llama2"])
def test_tokenizers_of_others_begin_and_end_a_text_as_here(tmp_path, name):
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    tokenizer = load_tokenizer(foreign_tokenizers.make(name, tmp_path / "public", chat_template=template))
    model = GPT({"V": tokenizer.vocab_size, "T": 64, "C": 32, "L": 1, "H": 2, "norm": "rmsnorm", "mlp": "swiglu"})
    write_gguf(model, tokenizer, tmp_path / "m.gguf")
    llama = load(tmp_path / "m.gguf")
    for text in HARD_TEXTS:
        if name != "qwen" or unicodedata.is_normalized("NFC", text):  # llama.cpp does not normalize
            found = llama.tokenize(text.encode(), add_bos=True, special=True)
            assert found == [*tokenizer.document_start, *tokenizer.encode(text)], text
    assert set(tokenizer.end_ids) <= ending_ids(llama)
    assert all(not llama.detokenize([i]) for i in ending_ids(llama))  # control tokens, which are never shown
    assert llama.metadata["tokenizer.chat_template"] == template


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small v1 over bytes, trained on the texts of the package: (run, {type: GGUF file}, held-out ids)."""
    folder = tmp_path_factory.mktemp("trained")
    model = "{T: 128, C: 128, L: 3, H: 4, norm: rmsnorm, mlp: swiglu, dropout: 0.0}"
    shares = "{wiki: 0.5, roam: 0.5}"
    options = [f"--set=model={model}", f"--set=train.p_train={shares}", f"--set=train.p_val={shares}", "--steps=300"]
    options += [f"--set=train.{key}" for key in ("B=8", "optimizer=muon", "base_lr=0.01", "warmup_steps=20")]
    options += ["--wiki=embedded", "--notes=embedded", f"--set=data.cache_dir={folder / 'streams'}", "--device=cpu"]
    assert call("train", *options, "--run-dir", folder / "run") == 0
    exported = {kind: folder / f"{kind}.gguf" for kind in TYPES}
    for kind, path in exported.items():
        assert call("export", "gguf", folder / "run", "--out", path, "--type", kind, "--anyway") == 0
    held_out = b"".join(path.read_bytes() for path in sorted((folder / "streams").glob("*roam*val*.bin")))
    return load_run(folder / "run", None, "cpu"), exported, list(held_out[: 128 * 160])


def bits_per_byte(logits_of_window, ids: list[int], T: int) -> float:
    """Mean over disjoint windows; the first byte of each is given."""
    total, count = 0.0, 0
    for start in range(0, len(ids) - T, T):
        window = ids[start : start + T]
        logits = torch.from_numpy(logits_of_window(window)).double()
        total += float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:]), reduction="sum"))
        count += T - 1
    return total / count / math.log(2)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["The ", "# Ideas", "user: naïve café?\nassistant: ", "def "])
def test_a_trained_model_continues_texts_as_here(trained, prompt):
    loaded, exported, _ = trained
    ids = loaded.tokenizer.encode(prompt)
    llama = load(exported["f32"], 128)
    found = [token for _, token in zip(range(80), llama.generate(ids, temp=0.0), strict=False)]
    assert found == greedy(loaded.model, ids, 80)[len(ids) :]
    text = generate(loaded.model, prompt, max_new_tokens=80, temperature=0.0, tokenizer=loaded.tokenizer)
    assert prompt + llama.detokenize(found).decode("utf-8", errors="replace") == text


@pytest.mark.slow
@torch.no_grad()
def test_what_each_type_costs(trained, capsys):
    loaded, exported, ids = trained
    T = loaded.model.config.T
    ours = bits_per_byte(lambda window: loaded.model(torch.tensor([window]))[0].numpy(), ids, T)
    found = {}
    for kind, path in exported.items():
        llama = load(path, T)
        found[kind] = bits_per_byte(lambda window, llama=llama: logits_of(llama, window), ids, T)
    with capsys.disabled():
        print(f"\nours: {ours:.4f} bits per byte of {len(ids):,} held-out bytes")
        for kind, bits in found.items():
            print(f"{kind:>5}: {bits:.4f} ({bits / ours - 1:+.2%}), {exported[kind].stat().st_size:,} bytes")
    assert found["f32"] == pytest.approx(ours, rel=1e-4)
    assert found["f16"] == pytest.approx(ours, rel=1e-3)
    assert found["q8_0"] == pytest.approx(ours, rel=5e-3)
    assert found["q8_0"] < found["q4_0"] < 1.1 * ours
