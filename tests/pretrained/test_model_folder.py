"""Models saved by transformers, read into ours: equal logits and greedy ids; what does not fit is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from niels_gpt import GPT
from niels_gpt.pretrained.checksums import write_sums
from niels_gpt.pretrained.families import FAMILIES as SUPPORTED
from niels_gpt.pretrained.families import family_of_config
from niels_gpt.pretrained.find_model import find_folder
from niels_gpt.pretrained.imported_run import import_model
from niels_gpt.pretrained.model_folder import open_folder
from niels_gpt.runs.folder import RunFolder
from tests.pretrained.conftest import FAMILIES, change_config, random_model, save


def ours(folder: Path) -> GPT:
    opened = open_folder(folder)
    model = GPT(opened.config).eval()
    model.load_state_dict(opened.read_state(dtype=torch.float32))
    return model


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_and_greedy_ids_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = random_model(name)
    model = ours(save(theirs, tmp_path))
    ids = torch.randint(300, (2, 60), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids).logits
    assert expected.std() > 0.5  # the comparison means something
    torch.testing.assert_close(model(ids), expected, atol=1e-4, rtol=0)
    wanted = theirs.generate(
        ids[:1, :9],
        attention_mask=torch.ones(1, 9),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    found = ids[:1, :9]
    for _ in range(40):
        found = torch.cat((found, model(found)[:, -1:].argmax(-1)), dim=1)
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_read_is_written_unchanged(name: str, tmp_path: Path) -> None:
    """The export direction is the inverse: every tensor has its bits, and the config gives the same model."""
    theirs = random_model(name)
    opened = open_folder(save(theirs, tmp_path))
    state, stored = opened.read_state(), safetensors.torch.load_file(tmp_path / "model.safetensors")
    for mapped in opened.family.tensors(opened.config):
        if mapped.ours is not None:
            found = mapped.layout.to_theirs(state[mapped.ours][mapped.rows])
            assert found.shape == mapped.shape
            assert torch.equal(found, stored[mapped.name])
    family = family_of_config(opened.config)
    shared = {"model_type": family.model_type, "vocab_size": opened.config.V}
    shared["tie_word_embeddings"] = opened.config.tie_embeddings
    again = family.read(family.write(opened.config) | shared)
    assert dataclasses.replace(again, bias=opened.config.bias) == opened.config  # a GPT-2 has biases; here zeros


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    model = random_model("smollm2")
    one, several = save(model, tmp_path / "a"), save(model, tmp_path / "b", max_shard_size="100KB")
    assert len(list(several.glob("*.safetensors"))) > 2
    states = [open_folder(folder).read_state() for folder in (one, several)]
    assert all(torch.equal(a, b) for a, b in zip(*(state.values() for state in states), strict=True))


def test_model_safetensors_counts_before_other_files(tmp_path: Path) -> None:
    """Some repositories have consolidated.safetensors, or an index of shards, beside it."""
    expected = open_folder(save(random_model("smollm2"), tmp_path)).read_state()
    safetensors.torch.save_file({"layers.0.attention.wq.weight": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    found = open_folder(tmp_path).read_state()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_keep_their_type(dtype: torch.dtype, tmp_path: Path) -> None:
    opened = open_folder(save(random_model("tinyllama").to(dtype), tmp_path))
    state = opened.read_state()
    assert opened.dtype == dtype and {weight.dtype for weight in state.values()} == {dtype}
    assert state["lm_head.weight"].data_ptr() != state["tok_emb.weight"].data_ptr()


def test_a_tied_head_is_one_tensor(tmp_path: Path) -> None:
    state = open_folder(save(random_model("smollm2"), tmp_path)).read_state()
    assert state["lm_head.weight"].data_ptr() == state["tok_emb.weight"].data_ptr()


def test_a_head_that_is_stored_beside_its_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("niels_gpt.pretrained.model_folder.HEAD_ROWS", 128)  # several groups of rows
    file = save(random_model("smollm2"), tmp_path) / "model.safetensors"
    stored = safetensors.torch.load_file(file)
    head = stored["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(stored | {"lm_head.weight": head}, file)
    assert torch.equal(open_folder(tmp_path).read_state()["lm_head.weight"], head)
    head[-1, -1] += 1
    safetensors.torch.save_file(stored | {"lm_head.weight": head}, file)
    with pytest.raises(ValueError, match=r"lm_head\.weight.*tie_word_embeddings"):  # transformers 5 does not tie them
        open_folder(tmp_path).read_state()
    safetensors.torch.save_file(stored | {"lm_head.weight": head[1:]}, file)
    with pytest.raises(ValueError, match=r"lm_head\.weight is 299 x"):
        open_folder(tmp_path)


@pytest.mark.parametrize("name", ["smollm3", "mistral"])
def test_options_that_are_not_there_have_the_defaults_of_the_family(name: str, tmp_path: Path) -> None:
    """A config.json without theta or a window."""
    theirs = random_model(name)
    save(theirs, tmp_path)
    change_config(tmp_path, rope_parameters=None)
    config = open_folder(tmp_path).config
    assert config.rope_theta == theirs.config.default_theta
    options = json.loads((tmp_path / "config.json").read_text())
    options.pop("sliding_window")
    (tmp_path / "config.json").write_text(json.dumps(options | {"max_position_embeddings": 5000}))
    if name == "mistral":
        with pytest.raises(ValueError, match=f"sliding_window={type(theirs.config)().sliding_window} "):
            open_folder(tmp_path)
    else:
        assert open_folder(tmp_path).config.T == 5000


def test_a_base_model_without_its_prefix(tmp_path: Path) -> None:
    theirs = random_model("smollm2")
    theirs.model.save_pretrained(tmp_path)
    change_config(tmp_path, architectures=["LlamaForCausalLM"])
    names = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert "embed_tokens.weight" in names
    ids = torch.randint(300, (1, 20))
    with torch.no_grad():
        torch.testing.assert_close(ours(tmp_path)(ids), theirs(ids).logits, atol=1e-4, rtol=0)


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("tinyllama", {"attention_bias": True}, r"missing 6.*q_proj\.bias"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("mistral", {"sliding_window": 63}, "sliding_window=63"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 63}, "use_sliding_window=True"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 63}, "'sliding_attention'"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 2, "sliding_window": 64}, "'chunked_attention'"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("tinyllama", {"mlp_bias": True}, "mlp_bias=True"),
        ("tinyllama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
        ("tinyllama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "'yarn'"),
        ("tinyllama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "'linear'"),
        ("tinyllama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),  # beside rope_parameters
        ("llama3", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}}, "low_freq_fac"),
        ("llama3", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor"),
        ("tinyllama", {"hidden_size": None}, "hidden_size"),
        ("tinyllama", {"num_hidden_layers": 10**12}, "layers"),
        ("tinyllama", {"layer_types": 1}, "layer_types"),
        ("tinyllama", {"no_rope_layers": 1.5}, "no_rope_layers"),
        ("mistral", {"sliding_window": "x"}, "sliding_window"),
        ("gpt_neox", {"rope_parameters": "x"}, "rope_parameters"),
        ("gpt2", {"model_type": "gemma", "architectures": 3}, "gemma"),
        ("mistral", {"sliding_window": 16}, "sliding_window=16"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ("tinyllama", {"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2}, "no_rope_layer_interval=2"),
        ("gpt_neox", {"use_parallel_residual": True}, "use_parallel_residual=True"),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.25, "rope_type": "default"}}, "rotary_pct"),
        ("gpt2", {"activation_function": "relu"}, "activation_function=relu"),
        ("qwen2", {"quantization_config": {"bits": 4}}, "quantization_config=.*'bits': 4"),
        (
            "gpt_neox",
            {"use_parallel_residual": True, "hidden_act": "relu"},
            "use_parallel_residual=True.*hidden_act=relu",
        ),
        ("gpt2", {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
    ],
)
def test_options_that_we_do_not_have_are_refused_by_name(
    name: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = save(random_model(name), tmp_path)
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=named) as caught:
        open_folder(folder)
    if "model_type" in changes and changes["model_type"] not in SUPPORTED:
        assert all(known in str(caught.value) for known in SUPPORTED)


def test_all_tensors_that_do_not_fit_are_listed(llama: Path) -> None:
    tensors = safetensors.torch.load_file(llama / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.input_layernorm.weight"] = torch.zeros(3)
    tensors["model.visual.weight"] = torch.zeros(2, 2)
    safetensors.torch.save_file(tensors, llama / "model.safetensors")
    with pytest.raises(ValueError, match="missing 2") as caught:
        open_folder(llama)
    for part in (
        "model.norm.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.input_layernorm.weight is 3 instead of 64",
        "model.visual.weight",
    ):
        assert part in str(caught.value)


def test_tensors_of_many_layers_are_listed_together(tmp_path: Path) -> None:
    folder = save(random_model("tinyllama", num_hidden_layers=12), tmp_path)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for layer in (0, 1, 2, 3, 7, 9, 10, 11):
        del tensors[f"model.layers.{layer}.mlp.up_proj.weight"]
    del tensors["model.norm.weight"], tensors["model.layers.5.mlp.down_proj.weight"]
    tensors["model.layers.5.mlp.up_proj.weight"] = torch.zeros(2, 2)
    tensors |= {f"surplus{number}": torch.zeros(1) for number in range(105)}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="missing 10: ") as caught:
        open_folder(folder)
    message = str(caught.value)
    assert "model.layers.0-3,7,9-11.mlp.up_proj.weight" in message
    assert "model.norm.weight" in message and "model.layers.5.mlp.down_proj.weight" in message
    assert "of a wrong shape 1: model.layers.5.mlp.up_proj.weight is 2 x 2 instead of" in message
    assert "unknown 105: " in message and message.count("surplus") == 100 and "5 others" in message


def test_a_bias_that_is_not_zero_is_refused_by_name(tmp_path: Path) -> None:
    file, name = save(random_model("smollm2"), tmp_path) / "model.safetensors", "model.layers.1.mlp.up_proj.bias"
    safetensors.torch.save_file(safetensors.torch.load_file(file) | {name: torch.eye(1, 96)[0]}, file)
    with pytest.raises(ValueError, match=re.escape(name)):
        open_folder(tmp_path).read_state()


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_biases_that_are_all_zero_are_left_out(name: str, tmp_path: Path) -> None:
    """Then kernels compute the model; one that is not zero brings all of them."""
    theirs = random_model(name)
    assert not open_folder(save(theirs, tmp_path / "zero")).config.bias
    with torch.no_grad():
        next(p for key, p in theirs.named_parameters() if key.endswith("bias"))[3] = 0.5
    assert open_folder(save(theirs, tmp_path / "one")).config.bias


def test_a_pickle_is_never_loaded(llama: Path, tmp_path: Path) -> None:
    """Neither alone, nor beside safetensors, nor under the name of another file that is read."""
    exploded = tmp_path / "exploded"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (exploded,)

    def import_it() -> None:
        import_model(str(llama), RunFolder(tmp_path / "run"))

    pickles = [llama / name for name in ("pytorch_model.bin", "weights.pt", "tokenizer.model", "model.safetensors")]
    for path in pickles[:2]:
        torch.save({"model.norm.weight": Bomb()}, path)
    import_it()  # from model.safetensors
    assert not exploded.exists()
    for path in pickles[2:]:
        torch.save({"model.norm.weight": Bomb()}, path)
        with pytest.raises(ValueError, match=path.name):
            import_model(str(llama), RunFolder(tmp_path / "again"))
        path.unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, a pickle"):
        import_model(str(llama), RunFolder(tmp_path / "again"))
    assert not exploded.exists() and not (tmp_path / "again").exists()
    torch.load(pickles[0], weights_only=False)
    assert exploded.exists()  # what would have happened


def test_a_pickle_under_the_name_of_safetensors(llama: Path) -> None:
    torch.save({"a": torch.zeros(2)}, llama / "model.safetensors")
    with pytest.raises(ValueError, match="not a safetensors file"):
        open_folder(llama)


def test_truncated_and_damaged_files(llama: Path) -> None:
    path = llama / "model.safetensors"
    data = path.read_bytes()
    for broken in (b"", data[:5], data[:200], data[: len(data) // 2], b"\xff" * 64, b"\x02" + bytes(7) + b"[]"):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            open_folder(llama)


def test_offsets_outside_the_file(llama: Path) -> None:
    path = llama / "model.safetensors"
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(255))
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        open_folder(llama)


def change_entry(path: Path, name: str, **changes: Any) -> None:
    """Change the entry of a tensor in the header of a safetensors file."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header[name] = header.get(name, {}) | changes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("model.norm.weight", {"dtype": ["F32"]}, r"model\.norm\.weight"),
        ("model.norm.weight", {"dtype": "I32"}, "integers"),
        ("model.norm.weight", {"data_offsets": [4, 4 + 256]}, "overlap"),
        ("model.norm.bias", {"dtype": "I64", "shape": [10**12], "data_offsets": [0, 8]}, "offsets"),
    ],
)
def test_entries_that_do_not_describe_weights(name: str, changes: dict[str, Any], named: str, llama: Path) -> None:
    change_entry(llama / "model.safetensors", name, **changes)
    with pytest.raises(ValueError, match=named):
        open_folder(llama)


def test_an_index_cannot_reach_outside_the_folder(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="outside"):
        open_folder(llama)
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ValueError, match=r"gone\.safetensors"):
        open_folder(llama)


def test_config_json_is_missing_or_damaged(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        open_folder(tmp_path)
    (llama / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        open_folder(llama)


@pytest.mark.parametrize(
    ("name", "changes", "context", "T"),
    [
        ("tinyllama", {"rope_scaling": {"type": "linear", "factor": 1.0}}, None, 64),
        ("tinyllama", {"rope_parameters": {"rope_type": "linear", "factor": 1, "rope_theta": 1e4}}, None, 64),
        ("mistral", {"sliding_window": 64}, None, 64),
        ("mistral", {"sliding_window": 32}, 32, 32),
        ("mistral", {"sliding_window": 32, "max_position_embeddings": 4096}, 20, 32),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, None, 64),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16}, None, 64),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 40, "use_sliding_window": True},
            40,
            40,
        ),
    ],
)
@torch.no_grad()
def test_options_without_effect_in_the_context_are_accepted(
    name: str, changes: dict[str, Any], context: int | None, T: int, tmp_path: Path
) -> None:
    save(random_model(name), tmp_path)
    change_config(tmp_path, **changes)
    opened = open_folder(tmp_path, context=context)
    assert opened.config.T == T
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    model = GPT(opened.config).eval()
    model.load_state_dict(opened.read_state(dtype=torch.float32))
    ids = torch.randint(300, (1, context or T))
    torch.testing.assert_close(model(ids), theirs(ids).logits, atol=1e-4, rtol=0)


def test_a_refused_option_is_reported_before_anything_heavy(tmp_path: Path) -> None:
    """The weights and the tokenizer here could not even be opened."""
    folder = tmp_path / "model"
    folder.mkdir()
    options = random_model("tinyllama").config.to_dict() | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    (folder / "config.json").write_text(json.dumps(options, default=str))
    (folder / "model.safetensors").write_bytes(b"junk")
    (folder / "tokenizer.json").write_bytes(b"junk")
    program = (
        "import sys; from niels_gpt.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'datasets', 'safetensors'} & sys.modules.keys()\n"
        "sys.exit(f'{code} {sorted(heavy)}')"
    )
    command = [sys.executable, "-c", program, "import", "hf", str(folder), "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    error, found = done.stderr.strip().splitlines()
    assert "'yarn'" in error and found == "1 []"
    assert not (tmp_path / "run").exists()


# --- hostile folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "SHA256SUMS", "x.safetensors"]
)
@pytest.mark.parametrize("kind", ["pipe", "link", "dangling link", "folder"])
def test_what_is_no_regular_file_of_the_folder_is_refused(name: str, kind: str, llama: Path, tmp_path: Path) -> None:
    path = llama / name
    if name == "x.safetensors":
        (llama / "model.safetensors").unlink()
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        if kind == "link":
            (tmp_path / "secret").write_text("{}")
        path.symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=f"{name} is (not a regular file|a link to a file outside)"):
        import_model(str(llama), RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_links_inside_the_folder_and_to_blobs_of_the_hub(llama: Path, tmp_path: Path) -> None:
    (llama / "weights").mkdir()
    (llama / "model.safetensors").rename(llama / "weights" / "a")
    (llama / "model.safetensors").symlink_to("weights/a")
    snapshot = tmp_path / "models--somebody--llama" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--somebody--llama" / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(llama / name, tmp_path / "models--somebody--llama" / "blobs" / name)
        (snapshot / name).symlink_to(Path("..", "..", "blobs", name))
    linked = tmp_path / "linked"
    linked.symlink_to(snapshot)
    states = [open_folder(folder).read_state() for folder in (llama, snapshot, linked)]
    for state in states[1:]:
        assert all(torch.equal(state[name], weight) for name, weight in states[0].items())


def test_a_config_that_is_too_large(llama: Path) -> None:
    with (llama / "config.json").open("ab") as file:
        file.truncate(65 << 20)
    with pytest.raises(ValueError, match=r"config\.json has 68,157,440 bytes, more than 67,108,864"):
        open_folder(llama)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
def test_checksums_find_a_flipped_bit_and_a_missing_file(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / "README.md").write_text("# A card")
    write_sums(folder)
    (folder / "README.md").write_text("# An edited card")
    import_model(str(folder), RunFolder(tmp_path / "whole"))
    data = bytearray((folder / name).read_bytes())
    position = data.rindex(b"1") if name.endswith(".json") else len(data) - 9
    data[position] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{name} is (damaged.*SHA256SUMS|not JSON)"):
        import_model(str(folder), RunFolder(tmp_path / "run"))
    if name == "tokenizer.json":
        (folder / name).unlink()
        with pytest.raises(ValueError, match=f"{name}.*missing"):
            import_model(str(folder), RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    (folder / "SHA256SUMS").write_text("0" * 64 + "  ./onnx/other\n" + "0" * 64 + "  pytorch_model.bin\nwords\n")
    if name == "generation_config.json":
        import_model(str(folder), RunFolder(tmp_path / "run"))  # sums of files that are not here


# --- folders and repositories -----------------------------------------------------------------------------


def test_a_repository_while_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"somebody/small-model.*HF_HUB_OFFLINE is set.*unset it"):
        find_folder("hf:somebody/small-model")


def test_neither_a_folder_nor_a_repository(tmp_path: Path, llama: Path) -> None:
    assert find_folder(f"hf:{llama}") == llama
    with pytest.raises(ValueError, match="NAME/MODEL"):
        find_folder("no such thing")
    with pytest.raises(ValueError, match="is a file"):
        find_folder(str(llama / "config.json"))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused_by_tensor(bad: float, llama: Path) -> None:
    file = llama / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        tensors[name].view(-1)[-1] = bad
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"2: .*") as error:
        open_folder(llama).read_state()
    assert "model.norm.weight" in str(error.value) and "layers.1.mlp.up_proj" in str(error.value)
