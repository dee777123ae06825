import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import niels_gpt

PACKAGE = Path(niels_gpt.__file__).parent
NAMES = [
    "encode", "decode", "format_chat", "extract_assistant_reply", "load_wikitext", "list_roam_paths",
    "load_texts", "split_roam_paths", "load_primer_text", "split_primer_dialogues", "build_wiki_streams",
    "build_roam_streams", "build_primer_streams", "build_sources", "StreamBuildConfig", "get_batch", "GPT",
    "ModelConfig", "TrainConfig", "default_p_train", "rope_cache", "apply_rope", "loss_fn", "set_seed",
    "lr_at_step", "get_device", "save_checkpoint", "load_checkpoint", "evaluate", "generate",
]  # fmt: skip


# The signatures of the contract. Further parameters are fine if they have defaults.
class Contract:
    def encode(text): ...
    def decode(ids): ...
    def format_chat(messages): ...
    def extract_assistant_reply(generated_text): ...
    def load_wikitext(): ...
    def list_roam_paths(root_dir): ...
    def load_texts(paths): ...
    def split_roam_paths(paths, *, val_frac=0.1, seed): ...
    def load_primer_text(path): ...
    def split_primer_dialogues(text, *, val_frac=0.1, seed): ...
    def build_wiki_streams(docs_train, docs_val): ...
    def build_roam_streams(docs_train, docs_val): ...
    def build_primer_streams(text_train, text_val): ...
    def build_sources(cfg, *, T=None): ...
    def get_batch(sources, *, p, B, T=256, device, generator=None): ...
    def default_p_train(): ...
    def rope_cache(T, D, *, theta=10000.0, device=None, dtype=None): ...
    def apply_rope(q, k, sin, cos): ...
    def loss_fn(logits, y): ...
    def set_seed(seed): ...
    def lr_at_step(step, total_steps, *, base_lr=3e-4, warmup_steps=200, min_lr=3e-5): ...
    def get_device(): ...
    def save_checkpoint(path, model, optimizer, step, config): ...
    def load_checkpoint(path, device): ...
    def evaluate(model, eval_streams, *, eval_steps, B, T, device, generator): ...
    def generate(model, prompt_text, *, max_new_tokens, temperature=0.9, top_k=50): ...


def python(code):
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("name", NAMES)
def test_importable_from_the_top(name):
    thing = getattr(niels_gpt, name)
    assert callable(thing)
    assert thing.__name__ == name
    assert thing.__module__.startswith("niels_gpt.")
    assert name in dir(niels_gpt)
    assert name in niels_gpt.__all__


@pytest.mark.parametrize("name", [name for name in NAMES if hasattr(Contract, name)])
def test_signature(name):
    wanted = list(inspect.signature(getattr(Contract, name)).parameters.values())
    given = list(inspect.signature(getattr(niels_gpt, name)).parameters.values())
    by_name = {p.name: p for p in given}
    for position, parameter in enumerate(wanted):
        found = by_name[parameter.name]
        assert found.default == parameter.default
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            assert given[position].name == parameter.name
            assert found.kind is parameter.kind
    extra = [p for p in given if p.name not in {w.name for w in wanted}]
    assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in extra)


def test_the_contract_has_all_functions():
    classes = {"StreamBuildConfig", "GPT", "ModelConfig", "TrainConfig"}
    assert {name for name in NAMES if not hasattr(Contract, name)} == classes


def test_names_with_a_home_of_their_own():
    from niels_gpt import batching, config, streams

    for module, names in {
        config: ["ModelConfig", "TrainConfig", "default_p_train"],
        streams: [
            "StreamBuildConfig",
            "build_sources",
            "build_wiki_stream",
            "build_roam_stream",
            "build_primer_stream",
        ],
        batching: ["get_batch"],
    }.items():
        for name in names:
            assert getattr(module, name).__module__ == module.__name__


def test_import_alone_loads_neither_torch_nor_datasets():
    loaded = python("import niels_gpt, sys; print(*sys.modules)")
    assert "niels_gpt" in loaded
    assert not {"torch", "datasets", "numpy"} & set(loaded)


def test_a_name_that_needs_no_torch_loads_none():
    loaded = python("from niels_gpt import format_chat, ModelConfig; import sys; print(*sys.modules)")
    assert "niels_gpt.config" in loaded
    assert not {"torch", "datasets"} & set(loaded)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = niels_gpt.no_such_name


def test_no_module_or_package_bears_a_public_name():
    modules = {p.relative_to(PACKAGE).with_suffix("") for p in PACKAGE.rglob("*.py")}
    modules |= {parent for module in modules for parent in module.parents}
    assert len(modules) > 10
    assert [str(m) for m in sorted(modules) if m.name in NAMES] == []
