"""Edits of the model's code take effect in everything that uses a model, on a CPU and on a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GPT, ROPE, SCHEMA = "model/gpt.py", "model/rope.py", "config/schema.py"
EDITS: dict[str, dict[str, tuple[str, str]]] = {
    "nothing": {},
    "activation": {GPT: ("self.activation(self.up(x))", "F.relu(self.up(x)).square()")},
    "extra norm": {
        GPT: ("return self.mlp(self.norm_mlp(x))", "return F.rms_norm(self.mlp(self.norm_mlp(x)), (x.shape[-1],))")
    },
    "residual scale": {GPT: ("x + self.drop(mlp(x))", "x + 0.5 * self.drop(mlp(x))")},
    "attention scale": {GPT: ("attn_mask=mask, is_causal", "scale=0.9, attn_mask=mask, is_causal")},
    "RoPE base": {ROPE: ("theta ** (-torch", "(theta / 50) ** (-torch")},
    "raise": {
        GPT: ("        if self.gate is None:", "        raise RuntimeError('edited')\n        if self.gate is None:")
    },
    "logits": {GPT: ("return self.backend.logits(h, self.lm_head)", "return self.lm_head(h).tanh()")},
    "forward": {
        GPT: ("return self.logits(self.hidden(x, cache=cache", "return 0.5 * self.logits(self.hidden(x, cache=cache")
    },
    "new activation": {
        GPT: ('    "gelu": F.gelu,', '    "gelu": F.gelu,\n    "relu2": lambda x: F.relu(x).square(),'),
        SCHEMA: ('Literal["gelu",', 'Literal["relu2", "gelu",'),
    },
}
"""Name -> file of the package -> (what is replaced, by what)."""
CHANGED = {
    "activation": "MLP.forward",
    "extra norm": "Block.mlp_branch",
    "residual scale": "Block.forward",
    "attention scale": "attend",
    "raise": "MLP.forward",
    "logits": "GPT.logits",
    "forward": "GPT.forward",
}
"""Edits of code that kernels replace; what the others change is handed to the kernels as data."""


def copy(edit: str, folder: Path) -> Path:
    """Copy the package into a folder and edit it."""
    shutil.copytree(ROOT / "niels_gpt", folder / "niels_gpt", ignore=shutil.ignore_patterns("__pycache__"))
    for file, (old, new) in EDITS[edit].items():
        path = folder / "niels_gpt" / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, (file, old)
        path.write_text(text.replace(old, new), encoding="utf-8")
    options = {"mlp": "relu2"} if edit == "new activation" else {}
    (folder / "options.json").write_text(json.dumps(options), encoding="utf-8")
    return folder


def computed(device: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the package computes after each edit; see `edited.py`."""
    packages = [str(copy(edit, folder / edit.replace(" ", "_"))) for edit in EDITS]
    program = [sys.executable, str(ROOT / "tests" / "model" / "edited.py"), device, *packages]
    environment = {key: value for key, value in os.environ.items() if key != "NIELS_GPT_BACKEND"}
    done = subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(EDITS, found, strict=True))


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return computed("cpu", tmp_path_factory.mktemp("edits"))


def close(found: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(found, str) or isinstance(expected, str):
        return bool(found == expected)
    return len(found) == len(expected) and all(abs(a - b) <= tolerance for a, b in zip(found, expected, strict=True))


def check(found: dict[str, dict[str, Any]], edit: str, tolerance: float) -> None:
    """The edit changes every number, and the kernels, if they are used, agree with plain torch."""
    before, after, plain = found["nothing"]["auto"], found[edit]["auto"], found[edit]["plain"]
    assert set(after) == {"forward", "train", "evaluate", "generate_one", "generate_many", "chat", "serve"}
    for entry, numbers in after.items():
        if edit == "raise":
            assert "edited" in numbers or "500" in numbers or "error" in numbers, (entry, numbers)
            continue
        assert not isinstance(numbers, str), (entry, numbers)
        if edit in CHANGED or entry in ("forward", "train", "evaluate"):
            assert close(numbers, plain[entry], tolerance), entry
        same_argmax = edit in ("forward", "logits") and entry in ("generate_one", "generate_many", "chat")
        assert close(numbers, before[entry], 1e-3) == same_argmax, entry
    assert len(found[edit]["warnings"]) == (edit in CHANGED)
    if edit in CHANGED:
        assert f"model/gpt.py was changed ({CHANGED[edit]})" in found[edit]["warnings"][0]


@pytest.mark.slow
@pytest.mark.parametrize("edit", list(EDITS)[1:])
def test_an_edit_takes_effect_everywhere(edit: str, on_cpu: dict[str, dict[str, Any]]) -> None:
    check(on_cpu, edit, 1e-4)


@pytest.mark.slow
def test_kernels_compute_what_the_code_says(on_cpu: dict[str, dict[str, Any]]) -> None:
    found = on_cpu["nothing"]
    assert not found["warnings"] and all(
        close(found["auto"][name], each, 1e-4) for name, each in found["plain"].items()
    )


@pytest.mark.slow
def test_a_new_activation_costs_two_files(on_cpu: dict[str, dict[str, Any]]) -> None:
    """It gives what the same edit of the MLP gives, and the kernels for all else stay."""
    assert set(EDITS["new activation"]) == {GPT, SCHEMA}
    new, edited = on_cpu["new activation"], on_cpu["activation"]
    assert all(close(new["auto"][name], each, 1e-4) for name, each in edited["plain"].items())
    assert not new["warnings"]


@pytest.mark.gpu
def test_an_edit_takes_effect_everywhere_on_a_gpu(cuda: Any, tmp_path: Path) -> None:
    found = computed("cuda", tmp_path)
    for edit in list(EDITS)[1:]:
        check(found, edit, 0.1)
