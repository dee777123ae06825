"""Frozen run configuration: the options of a run, their checks, and reading them from YAML."""

from niels_gpt.config.schema import (
    LAST_SEED,
    MOST_TOKENS,
    PRESETS,
    DataConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    NotesConfig,
    OutputConfig,
    RunConfig,
    SourceConfig,
    TrainConfig,
    default_p_pretrain,
    default_p_sft,
    default_p_train,
    default_p_val,
)

__all__ = [
    "LAST_SEED",
    "MOST_TOKENS",
    "PRESETS",
    "DataConfig",
    "EngineConfig",
    "LoRAConfig",
    "ModelConfig",
    "NotesConfig",
    "OutputConfig",
    "RunConfig",
    "SourceConfig",
    "TrainConfig",
    "default_p_pretrain",
    "default_p_sft",
    "default_p_train",
    "default_p_val",
]
