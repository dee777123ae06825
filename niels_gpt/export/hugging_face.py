"""Write a model as a folder that `transformers` loads: weights, config, tokenizer and chat template, no code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from niels_gpt import __version__
from niels_gpt.chat.formats import template_format
from niels_gpt.config import ModelConfig
from niels_gpt.export.chat_template import chat_template
from niels_gpt.export.tokenizer_json import to_tokenizer_json
from niels_gpt.model.gpt import GPT
from niels_gpt.pretrained.families import LLAMA, Family, family_of_config
from niels_gpt.pretrained.layouts import MappedTensor
from niels_gpt.pretrained.public_base import PRIVATE_TEXT
from niels_gpt.pretrained.safetensors_file import NamedTensor, write_safetensors
from niels_gpt.system import files
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer, ForeignTokenizer, Tokenizer
from niels_gpt.tokenizer.foreign import CONFIG_FILE, FILES, GENERATION_FILE, JSON_FILE, TEMPLATE_FILE
from niels_gpt.tokenizer.special import SPECIAL_STRINGS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Option -> type of the weights."""
MARK = "niels_gpt_version"
"""Key of config.json by which a folder is known to be an export."""
FILE_CLASS = "PreTrainedTokenizerFast"
"""The class of transformers that computes what tokenizer.json says; others replace its rules by their own."""
NAMES = frozenset({"config.json", "model.safetensors", *FILES})
"""The files that `write_hf` may write."""


def is_export(folder: Path) -> bool:
    """Whether a folder was written by `write_hf`, so that it may be replaced."""
    try:
        return MARK in json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def write_hf(
    model: GPT,
    tokenizer: AnyTokenizer,
    folder: Path,
    *,
    dtype: str = "fp32",
    private_text: bool = False,
    learned_chat: bool = False,
) -> None:
    """Write all files but the model card into an existing folder.

    dtype: one of DTYPES. private_text: what `PRIVATE_TEXT` tells whoever imports the folder. learned_chat: the model
    learned conversations here, so that a tokenizer of others gets the chat format in which it learned them. Raises
    ValueError for a model that no family of transformers computes, or a tokenizer that tokenizer.json cannot represent.
    """
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    family = family_of_config(model.config)
    ids = _special_ids(tokenizer)
    marks = {PRIVATE_TEXT: True} if private_text else {}
    files.write_json(folder / "config.json", hf_config(model.config, family, ids, dtype) | marks)
    files.write_json(folder / "generation_config.json", ids)
    if isinstance(tokenizer, ForeignTokenizer):
        for name, data in tokenizer.files.items():
            files.write_bytes(folder / name, data)
        options = json.loads(tokenizer.files.get(CONFIG_FILE, b"{}"))
        kept = {key: value for key, value in options.items() if key not in ("name_or_path", "auto_map")}  # path, code
        if JSON_FILE in tokenizer.files and ("tokenizer_class" in options or family is not LLAMA):  # a Llama needs none
            kept["tokenizer_class"] = FILE_CLASS
        if kept != options:
            files.write_json(folder / CONFIG_FILE, kept)
        if learned_chat:
            _write_chat_format(tokenizer, ids, folder)
    else:
        _write_tokenizer(tokenizer, model.config.T, folder)
    write_safetensors(folder / "model.safetensors", [*_tensors(model, family)], DTYPES[dtype])


def _special_ids(tokenizer: AnyTokenizer) -> dict[str, int | None]:
    """The ids that generation needs. Bytes have none: a reply ends with a line such as `user: `."""
    special = tokenizer.special_token_ids()
    return {"bos_token_id": special.get("bos"), "eos_token_id": special.get("eot"), "pad_token_id": special.get("eot")}


def _write_chat_format(tokenizer: ForeignTokenizer, ids: dict[str, int | None], folder: Path) -> None:
    """Write what ends a reply, and our template if the tokenizer has none."""
    chat = template_format(tokenizer)
    options = json.loads(tokenizer.files.get(GENERATION_FILE, b"{}"))
    files.write_json(folder / GENERATION_FILE, ids | options | {"eos_token_id": list(chat.end_ids)})
    if chat.is_default:
        files.write_text(folder / TEMPLATE_FILE, chat.template)


def hf_config(config: ModelConfig, family: Family, ids: dict[str, int | None], dtype: str) -> dict[str, Any]:
    """Return the content of config.json."""
    return {
        **family.write(config),
        **ids,
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.V,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": str(DTYPES[dtype]).removeprefix("torch."),
        "use_cache": True,
        MARK: __version__,
    }


def _tensors(model: GPT, family: Family) -> Iterator[NamedTensor]:
    state = model.state_dict()

    def read(mapped: MappedTensor) -> torch.Tensor:
        if mapped.ours is None:
            return torch.zeros(mapped.shape)
        return mapped.layout.to_theirs(state[mapped.ours][mapped.rows])

    for mapped in family.tensors(model.config):
        yield NamedTensor(mapped.name, mapped.shape, lambda mapped=mapped: read(mapped))  # type: ignore[misc]


def _write_tokenizer(tokenizer: Tokenizer | ByteTokenizer, T: int, folder: Path) -> None:
    options: dict[str, Any] = {
        "tokenizer_class": FILE_CLASS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": T,
    }
    if isinstance(tokenizer, Tokenizer):
        options |= {"eos_token": SPECIAL_STRINGS["eot"], "pad_token": SPECIAL_STRINGS["eot"]}
        options["additional_special_tokens"] = [SPECIAL_STRINGS[name] for name in ("sys", "usr", "asst")]
    files.write_text(folder / "tokenizer.json", to_tokenizer_json(tokenizer))
    files.write_json(folder / "tokenizer_config.json", options)
    files.write_text(folder / "chat_template.jinja", chat_template(tokenizer))
