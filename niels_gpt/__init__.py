"""niels-gpt: your notes and public text in, your own small GPT out.

The public API. Each name is loaded when it is first used: `import niels_gpt` alone imports neither torch nor datasets.
`docs/api.md` describes the names and says what is stable.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as `typing` has it, which takes longer to import than all else here
if TYPE_CHECKING:
    from niels_gpt.batching import get_batch
    from niels_gpt.cache.build_cache import build_pretrain_cache, build_sft_cache
    from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
    from niels_gpt.cache.sft_dataset import SFTExampleDataset
    from niels_gpt.chat import extract_assistant_reply, format_chat
    from niels_gpt.config import (
        DataConfig,
        EngineConfig,
        LoRAConfig,
        ModelConfig,
        OutputConfig,
        RunConfig,
        SourceConfig,
        TrainConfig,
        default_p_train,
    )
    from niels_gpt.config.yaml_file import load_config
    from niels_gpt.data.primer import load_primer_text, split_primer_dialogues
    from niels_gpt.data.roam import list_roam_paths, load_texts, split_roam_paths
    from niels_gpt.data.wikitext import load_wikitext
    from niels_gpt.evaluation.exact import Score, score_stream
    from niels_gpt.evaluation.sampled import evaluate
    from niels_gpt.inference.conversation import Conversation
    from niels_gpt.inference.engine.engine import Engine
    from niels_gpt.inference.generation import generate, generate_batch, stream_text
    from niels_gpt.inference.sampling import Sampling
    from niels_gpt.model.gpt import GPT
    from niels_gpt.model.kv_cache import KVCache
    from niels_gpt.model.loss import loss_fn
    from niels_gpt.model.rope import apply_rope, rope_cache
    from niels_gpt.runs.checkpoint import load_checkpoint, save_checkpoint
    from niels_gpt.runs.loading import LoadedRun, load_run
    from niels_gpt.splice import MultiSpliceDocumentDataset, SpliceDocumentDataset
    from niels_gpt.streams import (
        StreamBuildConfig,
        build_primer_stream,
        build_primer_streams,
        build_roam_stream,
        build_roam_streams,
        build_sources,
        build_wiki_stream,
        build_wiki_streams,
    )
    from niels_gpt.system.device import get_device
    from niels_gpt.system.rng import set_seed
    from niels_gpt.tokenizer import ByteTokenizer, Tokenizer, decode, encode, load_tokenizer, train_tokenizer
    from niels_gpt.training.loop import TrainResult, train
    from niels_gpt.training.optim.schedule import lr_at_step

__version__ = "0.2.0"

# Type checkers read the imports above and `__all__`; at run time `__getattr__` looks names up here. A test holds the
# three lists to each other.
_NAMES_OF = {
    "niels_gpt.config": (
        "DataConfig EngineConfig LoRAConfig ModelConfig OutputConfig RunConfig SourceConfig TrainConfig default_p_train"
    ),
    "niels_gpt.config.yaml_file": "load_config",
    "niels_gpt.system.device": "get_device",
    "niels_gpt.system.rng": "set_seed",
    "niels_gpt.tokenizer": "ByteTokenizer Tokenizer decode encode load_tokenizer train_tokenizer",
    "niels_gpt.chat": "extract_assistant_reply format_chat",
    "niels_gpt.data.primer": "load_primer_text split_primer_dialogues",
    "niels_gpt.data.roam": "list_roam_paths load_texts split_roam_paths",
    "niels_gpt.data.wikitext": "load_wikitext",
    "niels_gpt.streams": (
        "StreamBuildConfig build_primer_stream build_primer_streams build_roam_stream build_roam_streams "
        "build_sources build_wiki_stream build_wiki_streams"
    ),
    "niels_gpt.batching": "get_batch",
    "niels_gpt.cache.build_cache": "build_pretrain_cache build_sft_cache",
    "niels_gpt.cache.pretrain_dataset": "PretrainTokenStreamDataset",
    "niels_gpt.cache.sft_dataset": "SFTExampleDataset",
    "niels_gpt.splice": "MultiSpliceDocumentDataset SpliceDocumentDataset",
    "niels_gpt.model.gpt": "GPT",
    "niels_gpt.model.kv_cache": "KVCache",
    "niels_gpt.model.loss": "loss_fn",
    "niels_gpt.model.rope": "apply_rope rope_cache",
    "niels_gpt.runs.checkpoint": "load_checkpoint save_checkpoint",
    "niels_gpt.runs.loading": "LoadedRun load_run",
    "niels_gpt.evaluation.exact": "Score score_stream",
    "niels_gpt.evaluation.sampled": "evaluate",
    "niels_gpt.inference.conversation": "Conversation",
    "niels_gpt.inference.engine.engine": "Engine",
    "niels_gpt.inference.generation": "generate generate_batch stream_text",
    "niels_gpt.inference.sampling": "Sampling",
    "niels_gpt.training.loop": "TrainResult train",
    "niels_gpt.training.optim.schedule": "lr_at_step",
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}

__all__ = [
    "GPT",
    "ByteTokenizer",
    "Conversation",
    "DataConfig",
    "Engine",
    "EngineConfig",
    "KVCache",
    "LoRAConfig",
    "LoadedRun",
    "ModelConfig",
    "MultiSpliceDocumentDataset",
    "OutputConfig",
    "PretrainTokenStreamDataset",
    "RunConfig",
    "SFTExampleDataset",
    "Sampling",
    "Score",
    "SourceConfig",
    "SpliceDocumentDataset",
    "StreamBuildConfig",
    "Tokenizer",
    "TrainConfig",
    "TrainResult",
    "__version__",
    "apply_rope",
    "build_pretrain_cache",
    "build_primer_stream",
    "build_primer_streams",
    "build_roam_stream",
    "build_roam_streams",
    "build_sft_cache",
    "build_sources",
    "build_wiki_stream",
    "build_wiki_streams",
    "decode",
    "default_p_train",
    "encode",
    "evaluate",
    "extract_assistant_reply",
    "format_chat",
    "generate",
    "generate_batch",
    "get_batch",
    "get_device",
    "list_roam_paths",
    "load_checkpoint",
    "load_config",
    "load_primer_text",
    "load_run",
    "load_texts",
    "load_tokenizer",
    "load_wikitext",
    "loss_fn",
    "lr_at_step",
    "rope_cache",
    "save_checkpoint",
    "score_stream",
    "set_seed",
    "split_primer_dialogues",
    "split_roam_paths",
    "stream_text",
    "train",
    "train_tokenizer",
]

if not TYPE_CHECKING:  # a type checker would take every misspelled name for Any

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'niels_gpt' has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value  # later accesses skip this function
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
