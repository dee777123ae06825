"""GGUF files, read with the `gguf` package; tests/gguf runs them in llama.cpp."""

import math

import numpy as np
import pytest
import torch

from niels_gpt.config import ModelConfig
from niels_gpt.export.gguf_file import TYPES, architecture_of, write_gguf
from niels_gpt.export.pieces import pieces_of
from niels_gpt.model.gpt import GPT
from niels_gpt.tokenizer import ByteTokenizer
from tests.export import MODELS, make

gguf = pytest.importorskip("gguf")
ARCHITECTURES = {"head norms": "qwen3", "v0": "gptneox", "v0, untied": "gptneox", "learned positions": "gpt2"}
ARCHITECTURES |= {"GPT-2": "gpt2", "v0 with biases": "gptneox"}
"""All others are `llama`."""


def read(path):
    reader = gguf.GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items()}, {t.name: t for t in reader.tensors}


@pytest.mark.parametrize("name", MODELS)
def test_sizes_and_options(tmp_path, name):
    model, tokenizer = make(name)
    write_gguf(model, tokenizer, tmp_path / "m.gguf", name="my model")
    fields, tensors = read(tmp_path / "m.gguf")
    kind, config = ARCHITECTURES.get(name, "llama"), model.config
    assert (fields["general.architecture"], fields["general.name"]) == (kind, "my model")
    sizes = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
    assert [fields[f"{kind}.{size}"] for size in sizes] == [64, 64, 2, config.d_ff, 4]
    assert fields[f"{kind}.attention.head_count_kv"] == config.kv_heads
    assert fields[f"{kind}.attention.key_length"] == config.D
    norm = "layer_norm_rms_epsilon" if config.norm == "rmsnorm" else "layer_norm_epsilon"
    assert fields[f"{kind}.attention.{norm}"] == pytest.approx(config.norm_eps)
    if config.positions == "rope":
        assert fields[f"{kind}.rope.freq_base"] == config.rope_theta
    assert "tokenizer.chat_template" in fields and len(fields["tokenizer.ggml.tokens"]) == config.V
    weights = sum(
        math.prod(t.shape) for n, t in tensors.items() if not n.endswith(".bias") and n != "rope_freqs.weight"
    )
    biases = sum(p.numel() for name, p in model.named_parameters() if name.endswith(".bias"))
    copied = config.V * config.C * (kind == "gptneox" and config.tie_embeddings)
    assert weights == model.num_parameters() - biases + copied


@pytest.mark.parametrize("name", ["grouped", "v0", "v0, untied"])
def test_the_head_has_all_rows_if_the_tokenizer_has_fewer_ids(tmp_path, name):
    """Embeddings of public models are padded; a loaded model generates only the ids of its tokenizer."""
    model, tokenizer = make(name)
    model.sampled_ids = 250
    write_gguf(model, tokenizer, tmp_path / "m.gguf")
    _, tensors = read(tmp_path / "m.gguf")
    C, V = model.config.C, model.config.V
    assert tensors["output.weight"].shape.tolist() == tensors["token_embd.weight"].shape.tolist() == [C, V]
    np.testing.assert_array_equal(tensors["output.weight"].data, model.lm_head.weight.detach().numpy())


@pytest.mark.parametrize("kind", TYPES)
def test_types_of_tensors(tmp_path, kind):
    model, tokenizer = make("grouped")
    write_gguf(model, tokenizer, tmp_path / "m.gguf", kind=kind)
    _, tensors = read(tmp_path / "m.gguf")
    expected = {"f32": "F32", "f16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}[kind]
    assert tensors["blk.1.attn_q.weight"].tensor_type.name == expected
    assert tensors["blk.1.attn_norm.weight"].tensor_type.name == "F32"
    rows = "Q8_0" if kind == "q4_0" else expected
    assert {tensors[name].tensor_type.name for name in ("token_embd.weight", "output.weight")} == {rows}
    step = {"f32": 0, "f16": 1e-3, "q8_0": 1e-2, "q4_0": 0.2}[kind]
    for name, weight in (
        ("blk.1.ffn_down.weight", model.layers()[1].mlp.down.weight),
        ("blk.0.attn_k.weight", model.layers()[0].attn.qkv.weight[64:96]),
    ):
        found = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        np.testing.assert_allclose(found, weight.detach().numpy(), atol=step)


def test_rows_that_cannot_be_quantized_are_f16(tmp_path):
    model = GPT({"T": 16, "C": 48, "L": 1, "H": 2, "d_ff": 64, **{"norm": "rmsnorm", "mlp": "swiglu"}})
    write_gguf(model, ByteTokenizer(), tmp_path / "m.gguf", kind="q4_0")
    _, tensors = read(tmp_path / "m.gguf")
    assert tensors["blk.0.ffn_up.weight"].tensor_type.name == "F16"
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == "Q4_0"


def test_the_vocabulary_of_subwords(tmp_path):
    model, tokenizer = make("v1")
    write_gguf(model, tokenizer, tmp_path / "m.gguf")
    fields, _ = read(tmp_path / "m.gguf")
    pieces, scores, kinds = pieces_of(tokenizer), *(fields[f"tokenizer.ggml.{n}"] for n in ("scores", "token_type"))
    assert fields["tokenizer.ggml.tokens"] == [piece.text for piece in pieces]
    types = {"normal": 1, "special": 3, "unknown": 5, "byte": 6}
    assert kinds == [types[piece.kind] for piece in pieces]
    normal = [(s, p.score) for s, p in zip(scores, pieces, strict=True) if p.kind == "normal"]
    assert min(s for s, _ in normal) == pytest.approx(-900)  # an unknown character costs 1000
    factor = normal[0][0] / normal[0][1]
    assert all(s == pytest.approx(factor * score, rel=1e-6) for s, score in normal)
    assert {s for s, p in zip(scores, pieces, strict=True) if p.kind != "normal"} == {-math.inf}
    special = tokenizer.special_token_ids()
    assert fields["tokenizer.ggml.eos_token_id"] == fields["tokenizer.ggml.eot_token_id"] == special["eot"]
    assert fields["tokenizer.ggml.add_bos_token"] is fields["tokenizer.ggml.add_space_prefix"] is False


def test_the_vocabulary_of_bytes_and_rows_without_a_text(tmp_path):
    model = GPT({"V": 300, "T": 16, "C": 32, "L": 1, "H": 2})
    write_gguf(model, ByteTokenizer(), tmp_path / "m.gguf")
    fields, _ = read(tmp_path / "m.gguf")
    assert fields["tokenizer.ggml.tokens"][:256] == [f"\\x{byte:02x}" for byte in range(256)]
    assert set(fields["tokenizer.ggml.token_type"][256:]) == {5}
    with pytest.raises(UnicodeDecodeError):  # no text has the byte that ends it
        bytes([fields["tokenizer.ggml.eos_token_id"]]).decode()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mlp": "swiglu"}, r"layernorm \+ swiglu \+ rope.*llama.*gptneox.*gpt2"),
        ({"norm": "rmsnorm", "mlp": "swiglu", "positions": "learned"}, "learned"),
        ({"qk_norm": True}, r"gptneox.*qk_norm"),
        ({"norm": "rmsnorm", "mlp": "swiglu", "qk_norm": True, "rope_scale": 2.0}, r"qwen3.*rope_scale"),
    ],
)
def test_models_that_llama_cpp_does_not_compute_are_refused_by_name(options, named):
    with pytest.raises(ValueError, match=named):
        architecture_of(ModelConfig(**options))


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    """numpy reports a full disk as an OSError without a number."""
    model, tokenizer = make("v0")
    real = gguf.GGUFWriter.write_tensor_data
    count = 0

    def full(self, tensor, *args):
        nonlocal count
        count += 1
        if count == 5:
            raise OSError("2048 requested and 0 written")
        return real(self, tensor, *args)

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(OSError, match=r"m\.gguf.*free some space"):
        write_gguf(model, tokenizer, tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_f16_does_not_have(tmp_path):
    model, tokenizer = make("v1")
    with torch.no_grad():
        model.blocks[0].mlp.up.weight[0, 0] = -70000.0
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight.*70000.*65504.*--type f32"):
        write_gguf(model, tokenizer, tmp_path / "m.gguf", kind="f16")
    assert list(tmp_path.iterdir()) == []
    for kind in ("f32", "q8_0"):
        write_gguf(model, tokenizer, tmp_path / f"{kind}.gguf", kind=kind)
        [up] = [t for name, t in read(tmp_path / f"{kind}.gguf")[1].items() if name == "blk.0.ffn_up.weight"]
        assert gguf.quants.dequantize(up.data, up.tensor_type)[0, 0] == pytest.approx(-70000.0, rel=1e-2)


def test_divisors_of_scaled_frequencies_give_our_angles(tmp_path):
    model, tokenizer = make("scaled RoPE")
    write_gguf(model, tokenizer, tmp_path / "m.gguf")
    divisors = torch.from_numpy(np.array(read(tmp_path / "m.gguf")[1]["rope_freqs.weight"].data)).double()
    angles = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16) / divisors
    torch.testing.assert_close(torch.sin(angles).float(), model.sin[1, 0], atol=1e-6, rtol=0)
    assert divisors.max() > 1.5
