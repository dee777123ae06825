import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import niels_gpt

PACKAGE = Path(niels_gpt.__file__).parent
# The names that the specification fixes; niels_gpt exports more.
NAMES = [
    "encode", "decode", "format_chat", "extract_assistant_reply", "load_wikitext", "list_roam_paths",
    "load_texts", "split_roam_paths", "load_primer_text", "split_primer_dialogues", "build_wiki_streams",
    "build_roam_streams", "build_primer_streams", "build_sources", "StreamBuildConfig", "get_batch", "GPT",
    "ModelConfig", "TrainConfig", "default_p_train", "rope_cache", "apply_rope", "loss_fn", "set_seed",
    "lr_at_step", "get_device", "save_checkpoint", "load_checkpoint", "evaluate", "generate",
]  # fmt: skip


# The signatures of the specification. Further parameters are fine if they have defaults.
class Specification:
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
def test_specified_name_is_importable_from_the_top(name):
    value = getattr(niels_gpt, name)
    assert callable(value)
    assert value.__name__ == name
    assert value.__module__.startswith("niels_gpt.")
    assert name in dir(niels_gpt)
    assert name in niels_gpt.__all__


def test_every_exported_name_resolves_to_the_object_of_its_module():
    for name in niels_gpt.__all__:
        value = getattr(niels_gpt, name)
        assert name == "__version__" or value is getattr(sys.modules[niels_gpt._MODULE_OF[name]], name)


def test_type_checkers_and_the_runtime_see_the_same_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    typed = {alias.asname or alias.name: node.module for node in imports for alias in node.names}
    assert typed == niels_gpt._MODULE_OF
    assert set(niels_gpt.__all__) == {"__version__", *typed}
    assert dir(niels_gpt) == sorted(niels_gpt.__all__)


def test_public_names_shadow_no_submodule():
    top = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert top & set(niels_gpt.__all__) == set()
    below = {path.stem if path.suffix else path.name for path in PACKAGE.rglob("*") if path.suffix in ("", ".py")}
    assert below & set(NAMES) == set()


@pytest.mark.parametrize("name", [name for name in NAMES if hasattr(Specification, name)])
def test_signature(name):
    specified = list(inspect.signature(getattr(Specification, name)).parameters.values())
    actual = list(inspect.signature(getattr(niels_gpt, name)).parameters.values())
    by_name = {p.name: p for p in actual}
    for position, parameter in enumerate(specified):
        found = by_name[parameter.name]
        assert found.default == parameter.default
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            assert actual[position].name == parameter.name
            assert found.kind is parameter.kind
    extra = [p for p in actual if p.name not in {s.name for s in specified}]
    assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in extra)


def test_every_specified_function_has_a_signature_here():
    classes = {"StreamBuildConfig", "GPT", "ModelConfig", "TrainConfig"}
    assert {name for name in NAMES if not hasattr(Specification, name)} == classes


def test_import_config_and_chat_load_no_torch():
    names = "format_chat, ModelConfig, RunConfig, load_config"
    first = "import niels_gpt, sys; assert 'numpy' not in sys.modules"
    loaded = python(f"{first}; from niels_gpt import {names}; print(*sys.modules)")
    assert "niels_gpt.config" in loaded
    assert not {"torch", "datasets"} & set(loaded)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = niels_gpt.no_such_name


TYPED = """\
import niels_gpt
from niels_gpt import *

reveal_type(niels_gpt.GPT)
reveal_type(niels_gpt.train)
reveal_type(load_run)
reveal_type(Conversation)
reveal_type(score_stream)
reveal_type(PretrainTokenStreamDataset)
niels_gpt.no_such_name
"""
MYPY = """\
[mypy]
no_implicit_reexport = True
follow_imports = silent
[mypy-torch.*,numpy.*,datasets.*,sentencepiece.*,pydantic.*,yaml.*,rich.*,typer.*]
follow_imports = skip
ignore_missing_imports = True
"""


@pytest.mark.slow
def test_type_checkers_see_real_types(tmp_path):
    """mypy runs on a script of a user: nothing public is Any, and a misspelled name is an error."""
    api = pytest.importorskip("mypy.api")
    (tmp_path / "script.py").write_text(TYPED, encoding="utf-8")
    (tmp_path / "mypy.ini").write_text(MYPY, encoding="utf-8")
    options = ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path / "cache")]
    shown, errors, _ = api.run([*options, str(tmp_path / "script.py")])
    revealed = [line for line in shown.splitlines() if "Revealed type" in line]
    assert len(revealed) == TYPED.count("reveal_type"), shown + errors
    for line, word in zip(
        revealed, ("GPT", "TrainResult", "LoadedRun", "Conversation", "Score", "Dataset"), strict=True
    ):
        assert word in line.rpartition(" -> ")[2], line
    assert 'no attribute "no_such_name"' in shown
    assert (PACKAGE / "py.typed").is_file()
