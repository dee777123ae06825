"""Where a run is exported to, and with which chat format."""

import json
from types import SimpleNamespace

import pytest

from niels_gpt.chat.formats import chat_format
from niels_gpt.config import ModelConfig
from niels_gpt.export import gguf_file, run_export
from niels_gpt.export.audit_gate import Clearance
from niels_gpt.model.gpt import GPT
from niels_gpt.tokenizer import load_tokenizer
from tests.foreign_tokenizers import make


def test_a_refused_gguf_leaves_no_empty_folders(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise ValueError("not supported")

    monkeypatch.setattr(gguf_file, "write_gguf", refuse)
    with pytest.raises(ValueError, match="not supported"):
        loaded = SimpleNamespace(model=None, tokenizer=None, config=None)
        run_export.export_gguf(loaded, tmp_path / "a" / "b" / "x.gguf")
    assert not list(tmp_path.iterdir())


CONVERSATION = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is it? \U0001f642"},
    {"role": "assistant", "content": "A fox."},
    {"role": "user", "content": "Why?"},
]


@pytest.mark.parametrize(
    ("name", "config"),
    [("smollm", {"eos_token": "<|endoftext|>"}), ("llama3", {"eos_token": "<|end_of_text|>"}), ("llama2", {})],
)
def test_a_base_that_learned_to_chat_takes_its_chat_format_along(name, config, tmp_path, monkeypatch):
    """A base model has no template: conversations are learned in ChatML or as a transcript."""
    import gguf
    import transformers

    tokenizer = load_tokenizer(make(name, tmp_path / "base", **config))
    loaded = SimpleNamespace(
        model=GPT(ModelConfig(V=tokenizer.vocab_size, T=64, C=16, L=1, H=2, norm="rmsnorm", mlp="swiglu")).eval(),
        tokenizer=tokenizer,
        config=SimpleNamespace(task="sft"),
    )
    monkeypatch.setattr(run_export, "model_card", lambda *args, usage, **options: usage)
    monkeypatch.setattr(run_export, "check_folder_ids", lambda folder, tokenizer: None)  # see test_self_check.py
    run_export.export_hf(loaded, tmp_path / "out", Clearance([], None))
    assert "apply_chat_template" in (tmp_path / "out" / "README.md").read_text()
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), chat_format(tokenizer)
    found = theirs.apply_chat_template(CONVERSATION, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert found == ours.fit(CONVERSATION, 1000).ids
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert tuple(ends) == ours.end_ids and set(ours.reply_ends) <= set(ends)
    run_export.export_gguf(loaded, tmp_path / "out.gguf")
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == (tmp_path / "out" / "chat_template.jinja").read_text()
    assert fields["tokenizer.ggml.eot_token_id"].contents() == ours.reply_ends[0]
    loaded.config.task = "pretrain"
    run_export.export_hf(loaded, tmp_path / "plain", Clearance([], None))
    assert not (tmp_path / "plain" / "chat_template.jinja").exists()
