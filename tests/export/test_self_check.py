"""An export is compared with transformers as it loads it: other ids are refused, and nothing is left."""

from __future__ import annotations

import hashlib
import json
import re
from types import SimpleNamespace

import pytest
import transformers
from transformers import AutoTokenizer

from niels_gpt.config import ModelConfig
from niels_gpt.export import hugging_face, run_export, self_check
from niels_gpt.export.audit_gate import Clearance
from niels_gpt.export.hugging_face import write_hf
from niels_gpt.export.self_check import hard_texts
from niels_gpt.export.tokenizer_json import compare_ids
from niels_gpt.model.gpt import GPT
from niels_gpt.pretrained.imported_run import import_model
from niels_gpt.runs.folder import RunFolder
from niels_gpt.tokenizer import ByteTokenizer, load_tokenizer
from tests import foreign_tokenizers
from tests.export import V1, make
from tests.pretrained.conftest import change_config


@pytest.fixture
def biased(monkeypatch):
    """A model with biases and its tokenizer, as `export_hf` takes it."""
    model, tokenizer = make("biases")
    monkeypatch.setattr(run_export, "model_card", lambda *args, **options: "# A card\n")
    return SimpleNamespace(model=model, tokenizer=tokenizer, config=None)


@pytest.mark.slow
def test_an_export_is_checked_and_has_checksums(biased, tmp_path):
    out = tmp_path / "out"
    assert run_export.export_hf(biased, out, Clearance([], None)) == ("LlamaForCausalLM", transformers.__version__)
    listed = dict(line.split("  ")[::-1] for line in (out / "SHA256SUMS").read_text().splitlines())
    assert listed == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir() if path.name != "SHA256SUMS"
    }
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= listed.keys()
    assert import_model(str(out), RunFolder(tmp_path / "run")).config.qkv_bias


@pytest.mark.slow
def test_other_ids_are_refused_and_nothing_is_left(biased, tmp_path, monkeypatch):
    """transformers loads the folder of a qwen2 with the rules of Qwen2, whatever its tokenizer.json says."""
    write = hugging_face.write_hf

    def as_qwen2(model, tokenizer, folder, **options):
        write(model, tokenizer, folder, **options)
        change_config(folder, model_type="qwen2")

    monkeypatch.setattr(hugging_face, "write_hf", as_qwen2)
    with pytest.raises(ValueError, match=r"Qwen2Tokenizer of transformers 5.* of 200 texts") as caught:
        run_export.export_hf(biased, tmp_path / "a" / "out", Clearance([], None))
    assert int(re.search(r"(\d+) of 200", str(caught.value))[1]) > 100
    assert not list(tmp_path.iterdir())


def test_without_transformers_nothing_is_compared(biased, tmp_path, monkeypatch):
    monkeypatch.setattr(self_check.importlib.util, "find_spec", lambda name: None)
    assert run_export.export_hf(biased, tmp_path / "out", Clearance([], None)).checked is None
    assert (tmp_path / "out" / "SHA256SUMS").is_file()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("smollm", "GPT2Tokenizer"), ("qwen", "Qwen2Tokenizer"), ("llama3", None), ("llama2", "LlamaTokenizer")],
)
@pytest.mark.parametrize("options", [V1, V1 | {"qkv_bias": True}, V1 | {"qk_norm": True}, {}])
def test_a_tokenizer_of_others_keeps_its_ids(name, kind, options, tmp_path):
    """Published files name classes whose rules in transformers differ from their tokenizer.json."""
    folder = foreign_tokenizers.make(name, tmp_path / "base", name_or_path="/home/me/base", tokenizer_class=kind)
    tokenizer = load_tokenizer(folder)
    (tmp_path / "out").mkdir()
    write_hf(GPT(ModelConfig(V=tokenizer.vocab_size, T=64, C=16, L=1, H=2, **options)), tokenizer, tmp_path / "out")
    peer, texts = AutoTokenizer.from_pretrained(tmp_path / "out"), hard_texts(tokenizer)
    start = tokenizer.document_start
    found = [peer.encode(text) for text in texts]
    assert all(ids[: len(start)] == start for ids in found)
    compare_ids(texts, [ids[len(start) :] for ids in found], tokenizer, "")
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written.pop("tokenizer_class") == "PreTrainedTokenizerFast"
    known = json.loads((folder / "tokenizer_config.json").read_text())
    assert written == {key: known[key] for key in known if key not in ("tokenizer_class", "name_or_path")}


def test_the_texts_are_hard():
    texts = hard_texts(ByteTokenizer())
    assert texts == hard_texts(ByteTokenizer()) and len(set(texts)) == 200
    together = "".join(texts)
    for part in ("<|im_start|>", "</s>", "\x00", " " * 17, "\r\n", "\U0001f44d", "e\u0301", "\ufeff", "1234567890"):
        assert part in together
