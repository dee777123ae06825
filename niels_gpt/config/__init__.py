"""Frozen run configuration: what a run may choose, how it is checked, and how it is read from YAML."""

from niels_gpt.config.schema import (
    LAST_SEED,
    MOST_TOKENS,
    PRESETS,
    DataConfig,
    EngineConfig,
    ModelConfig,
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
    "ModelConfig",
    "OutputConfig",
    "RunConfig",
    "SourceConfig",
    "TrainConfig",
    "default_p_pretrain",
    "default_p_sft",
    "default_p_train",
    "default_p_val",
]
