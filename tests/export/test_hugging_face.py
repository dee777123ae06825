"""transformers loads what was written, without code of ours, and computes what our model computes."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from niels_gpt.chat.formats import chat_format
from niels_gpt.config import ModelConfig
from niels_gpt.export.hugging_face import is_export, write_hf
from niels_gpt.export.pieces import HARD_TEXTS
from niels_gpt.export.self_check import TEXTS, hard_texts
from niels_gpt.export.tokenizer_json import compare_ids
from niels_gpt.model.gpt import GPT
from niels_gpt.tokenizer import ByteTokenizer
from tests.export import MODELS, greedy, make, some_ids

CLASSES = {
    "head norms": "Qwen3ForCausalLM",
    "v0": "GPTNeoXForCausalLM",
    "v0, untied": "GPTNeoXForCausalLM",
    "learned positions": "GPT2LMHeadModel",
    "GPT-2": "GPT2LMHeadModel",
    "v0 with biases": "GPTNeoXForCausalLM",
}
"""All others are Llamas."""


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_and_greedy_ids_are_ours(tmp_path, name):
    model, tokenizer = make(name)
    write_hf(model, tokenizer, tmp_path)
    peer, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(peer).__name__ == CLASSES.get(name, "LlamaForCausalLM") and peer.dtype == torch.float32
    assert not any(info.values())  # nothing missing, nothing surplus
    ids = torch.tensor([some_ids(model, 60)])
    expected = model(ids)
    assert expected.abs().max() > 3  # small logits would hide errors
    torch.testing.assert_close(peer(ids).logits, expected, atol=1e-4, rtol=0)
    prompt = ids[:, :8]
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert peer.generate(prompt, **options)[0].tolist() == greedy(model, prompt[0].tolist(), 40)


@pytest.mark.parametrize("name", MODELS)
def test_the_tokenizer_is_ours(tmp_path, name):
    model, tokenizer = make(name)
    write_hf(model, tokenizer, tmp_path)
    peer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(peer) == tokenizer.vocab_size and peer.model_max_length == model.config.T
    texts = hard_texts(tokenizer)
    assert len(set(texts)) == TEXTS == 200
    compare_ids(texts, [peer.encode(text) for text in texts], tokenizer, "")
    for text in HARD_TEXTS:
        assert peer(text)["input_ids"] == tokenizer.encode(text)
        assert peer.decode(peer(text)["input_ids"]) == text
    messages = [{"role": "system", "content": " a "}, {"role": "user", "content": "b\n"}]
    found = peer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    if isinstance(tokenizer, ByteTokenizer):
        assert found == tokenizer.encode("system:  a \nuser: b\n\nassistant: ") and peer.eos_token_id is None
    else:
        special = tokenizer.special_token_ids()
        assert found == chat_format(tokenizer).fit(messages, limit=10**6).ids
        assert peer.eos_token_id == peer.pad_token_id == special["eot"]
        assert set(peer.all_special_ids) == set(special.values())
        assert peer.decode(found, skip_special_tokens=True) == " a b\n"
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.eos_token_id, config.bos_token_id) == (peer.eos_token_id, None)


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_other_types(tmp_path, dtype, expected):
    model, tokenizer = make("v1")
    write_hf(model, tokenizer, tmp_path, dtype=dtype)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert peer.dtype == expected
    assert torch.equal(peer.model.embed_tokens.weight, model.tok_emb.weight.to(expected))
    assert (tmp_path / "model.safetensors").stat().st_size < 2.2 * model.num_parameters()
    with pytest.raises(ValueError, match=r"--dtype.*fp32.*fp64"):
        write_hf(model, tokenizer, tmp_path, dtype="fp64")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"norm": "layernorm", "mlp": "swiglu"}, "layernorm.*swiglu"),
        ({"norm": "rmsnorm", "mlp": "gelu"}, "rmsnorm.*gelu"),
        ({"norm": "rmsnorm", "mlp": "swiglu", "positions": "learned"}, "learned"),
        ({"n_kv_heads": 1}, "n_kv_heads"),
        ({"norm": "rmsnorm", "mlp": "swiglu", "H": 3, "head_dim": 8}, r"model\.C=16.*model\.H=3"),  # Llama refuses it
    ],
)
def test_models_that_no_family_computes_are_refused_by_name(tmp_path, options, named):
    model = GPT(ModelConfig(**{"T": 16, "C": 16, "L": 1, "H": 2} | options))
    with pytest.raises(ValueError, match=named):
        write_hf(model, ByteTokenizer(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_export_is_known_by_its_config(tmp_path):
    assert not is_export(tmp_path)
    for content in ("", "[1]", "3", '{"model_type": "llama"}'):
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
        assert not is_export(tmp_path)
    model, tokenizer = make("v0")
    write_hf(model, tokenizer, tmp_path)
    assert is_export(tmp_path)
    assert not any("/" in str(value) for value in json.loads((tmp_path / "config.json").read_text()).values())
