"""niels-gpt: your notes and public text in, your own small GPT out.

Everything public is importable from here, and loaded when it is first used: `import niels_gpt` alone
imports neither torch nor datasets.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "niels_gpt.config": ("ModelConfig", "TrainConfig", "default_p_train"),
    "niels_gpt.system.rng": ("set_seed",),
    "niels_gpt.system.device": ("get_device",),
    "niels_gpt.tokenizer": ("encode", "decode"),
    "niels_gpt.chat": ("format_chat", "extract_assistant_reply"),
    "niels_gpt.data.wikitext": ("load_wikitext",),
    "niels_gpt.data.roam": ("list_roam_paths", "load_texts", "split_roam_paths"),
    "niels_gpt.data.primer": ("load_primer_text", "split_primer_dialogues"),
    "niels_gpt.streams": (
        "StreamBuildConfig",
        "build_sources",
        "build_wiki_stream",
        "build_wiki_streams",
        "build_roam_stream",
        "build_roam_streams",
        "build_primer_stream",
        "build_primer_streams",
    ),
    "niels_gpt.batching": ("get_batch",),
    "niels_gpt.model.gpt": ("GPT",),
    "niels_gpt.model.rope": ("rope_cache", "apply_rope"),
    "niels_gpt.model.loss": ("loss_fn",),
    "niels_gpt.runs.checkpoint": ("save_checkpoint", "load_checkpoint"),
    "niels_gpt.training.optim.schedule": ("lr_at_step",),
    "niels_gpt.evaluation.sampled": ("evaluate",),
    "niels_gpt.inference.generation": ("generate",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'niels_gpt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
