"""Export a run: check where it is written, write it completely or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from niels_gpt.export import gguf_file, hugging_face
from niels_gpt.export.audit_gate import Clearance
from niels_gpt.export.model_card import model_card
from niels_gpt.export.ollama import modelfile
from niels_gpt.export.self_check import check_folder_ids
from niels_gpt.memorization.audit import SAFE
from niels_gpt.pretrained.checksums import MODEL_CARD, SUMS_FILE, write_sums
from niels_gpt.pretrained.families import family_of_config
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.system import files
from niels_gpt.system.files import atomic_folder, check_atomic_folder
from niels_gpt.tokenizer import ByteTokenizer, ForeignTokenizer

MODELFILE = "Modelfile"
"""Beside a GGUF file: how Ollama runs it."""
_GGUF_MAGIC = b"GGUF"
_LOAD = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
{prompt}
reply = model.generate(**prompt, max_new_tokens=100, do_sample=True, temperature=0.7)
print(tokenizer.decode(reply[0]))"""
_CHAT = """\
messages = [{"role": "user", "content": "Hello"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)"""
_CONTINUE = 'prompt = tokenizer("Once upon a time", return_tensors="pt")'


class Exported(NamedTuple):
    """What `export_hf` wrote."""

    architecture: str
    """The class of transformers that loads it."""
    checked: str | None
    """The version of transformers whose ids of hard texts were compared with ours; None: it is not installed."""


def check_folder(out: Path, *, overwrite: bool) -> None:
    """Raise ValueError if an export cannot be written to a folder: it has other files, or is an earlier export.

    The folder is replaced as a whole, so an earlier export to which the user added files is not replaced either.
    """
    check_atomic_folder(out, "--out")
    if out.is_dir() and any(out.iterdir()):
        if not hugging_face.is_export(out):
            raise ValueError(f"{out} is not empty and is not an earlier export: choose another --out")
        if not overwrite:
            raise ValueError(f"{out} has an earlier export: --overwrite replaces it, or choose another --out")
        added = sorted({path.name for path in out.iterdir()} - hugging_face.NAMES - {MODEL_CARD, SUMS_FILE})
        if added:
            raise ValueError(
                f"{out} has {added[0]}, which export hf did not write and --overwrite would delete: move it elsewhere, "
                "or choose another --out"
            )


def check_file(out: Path, *, overwrite: bool, with_modelfile: bool = False) -> None:
    """Raise ValueError if a GGUF file, or the Modelfile beside it, cannot be written: there is a file already."""
    files.check_output_path(out, "--out")
    if out.is_file():
        with out.open("rb") as file:
            if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
                raise ValueError(f"{out} exists and is not a GGUF file: choose another --out")
        if not overwrite:
            raise ValueError(f"{out} exists: --overwrite replaces it, or choose another --out")
    beside = out.parent / MODELFILE
    if with_modelfile and beside.exists() and not overwrite:
        raise ValueError(f"{beside} exists: --overwrite replaces it, or choose another folder for --out")


def export_hf(
    loaded: LoadedRun, out: Path, clearance: Clearance, *, dtype: str = "fp32", overwrite: bool = False
) -> Exported:
    """Write a Hugging Face folder, compare its ids in transformers with ours, and add checksums.

    Raises ValueError for a model that no class computes, for other ids, and as `check_folder` does. A failed write
    leaves nothing.
    """
    check_folder(out, overwrite=overwrite)
    architecture = family_of_config(loaded.model.config).architecture
    name = out.absolute().name
    usage = _LOAD.format(name=name, prompt=_CHAT if _is_chat_model(loaded) else _CONTINUE)
    card = model_card(loaded, clearance, name=name, architecture=architecture, usage=usage)
    with atomic_folder(out) as folder:
        uncleared = clearance.judgment != SAFE
        hugging_face.write_hf(
            loaded.model,
            loaded.tokenizer,
            folder,
            dtype=dtype,
            private_text=uncleared,
            learned_chat=_learned_chat(loaded),
        )
        files.write_text(folder / MODEL_CARD, card)
        checked = check_folder_ids(folder, loaded.tokenizer)
        write_sums(folder)
    return Exported(architecture, checked)


def _is_chat_model(loaded: LoadedRun) -> bool:
    """Whether a model was trained on conversations, or was imported with a chat template."""
    config, tokenizer = loaded.config, loaded.tokenizer
    if _learned_chat(loaded) or (isinstance(tokenizer, ForeignTokenizer) and "default" in tokenizer.templates):
        return True
    return config is not None and isinstance(tokenizer, ByteTokenizer) and "primer" in config.train.p_train


def _learned_chat(loaded: LoadedRun) -> bool:
    """Whether a model was trained on a cache of conversations."""
    return loaded.config is not None and loaded.config.task == "sft"


def export_gguf(
    loaded: LoadedRun, out: Path, *, kind: str = "f32", overwrite: bool = False, with_modelfile: bool = False
) -> str:
    """Write a GGUF file; return llama.cpp's name of the architecture.

    with_modelfile: also write `Modelfile`, for Ollama, into the same folder. Raises ValueError for a model that
    llama.cpp does not compute, and as `check_file` does. A GGUF file that cannot be written leaves nothing.
    """
    check_file(out, overwrite=overwrite, with_modelfile=with_modelfile)
    created = [parent for parent in out.absolute().parents if not parent.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    learned = _learned_chat(loaded)
    try:
        gguf_file.write_gguf(loaded.model, loaded.tokenizer, out, kind=kind, name=out.stem, learned_chat=learned)
    finally:
        files.remove_empty(created)  # those that a failed write leaves
    if with_modelfile:
        text = modelfile(out.name, loaded.tokenizer, loaded.model.config.T, learned_chat=learned)
        files.write_text(out.parent / MODELFILE, text)
    return gguf_file.architecture_of(loaded.model.config)
