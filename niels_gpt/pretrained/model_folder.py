"""A folder with a model in the Hugging Face format: its config.json and its tensors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from niels_gpt.config import ModelConfig
from niels_gpt.model.sizes import weight_shapes
from niels_gpt.pretrained.families import Family, read_json, read_options
from niels_gpt.pretrained.layouts import MappedTensor, Same
from niels_gpt.pretrained.safetensors_file import StoredTensor, read_header
from niels_gpt.system.untrusted_files import is_untrusted_file

_LAYER = re.compile(r"(?<=\.)(?:0|[1-9]\d{0,5})(?=\.)")
"""The number of the layer in the name of a tensor."""
HEADS = ("lm_head.weight", "embed_out.weight")
"""Names of the output head."""
HEAD_ROWS = 4096
"""Rows of a head that are compared at a time."""
NAMED_SINGLY = 8
"""If more tensors of a kind do not fit, an error names those that differ only in the layer together."""
MOST_NAMED = 100
"""Names that an error has of each kind; a file of a stranger may have millions."""


@dataclass(frozen=True)
class ModelFolder:
    """A model whose options are supported and whose tensors are all there."""

    path: Path
    family: Family
    config: ModelConfig
    """T is the longest context that the model was made for."""
    tensors: tuple[tuple[MappedTensor, StoredTensor], ...]

    @property
    def dtype(self) -> torch.dtype:
        """The widest type of the weights."""
        found = torch.bfloat16 if any(stored.dtype == torch.bfloat16 for _, stored in self.tensors) else torch.float16
        for _, stored in self.tensors:
            found = torch.promote_types(found, stored.dtype)
        return found

    def read_state(
        self, *, dtype: torch.dtype | None = None, on_bytes: Callable[[int], None] | None = None
    ) -> dict[str, torch.Tensor]:
        """Our state dict, in `dtype` (default: that of the weights), read one tensor at a time.

        on_bytes: called with the number of bytes of each tensor that has been read.
        Raises ValueError for a bias that is not zero, a tied head that is not the embedding, and for weights that are
        not finite.
        """
        damaged: list[str] = []
        dtype = dtype or self.dtype
        tied = {"lm_head.weight"} if self.config.tie_embeddings else set()
        shapes = dict(weight_shapes(self.config))
        # All are allocated before the first temporary tensor: those between them would leave gaps in the heap.
        state = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items() if name not in tied}
        biases_first = sorted(self.tensors, key=lambda pair: pair[0].ours is not None)
        for mapped, stored in biases_first:  # they are small, and may be refused
            if mapped.ours in tied:
                self._check_tied(mapped.name, stored, state["tok_emb.weight"])
            elif mapped.ours is None:
                if stored.read().any():
                    raise ValueError(
                        f"{self.path} has a bias that is not zero ({mapped.name}): models of type "
                        f"{self.family.model_type} are supported only without it"
                    )
            else:
                rows = state[mapped.ours][mapped.rows]
                if isinstance(mapped.layout, Same) and stored.dtype == dtype:
                    stored.read_into(rows)
                else:
                    rows.copy_(mapped.layout.to_ours(stored.read()))
                if not all(extreme.isfinite() for extreme in torch.aminmax(rows)):  # without a temporary tensor
                    damaged.append(mapped.name)
            if on_bytes is not None:
                on_bytes(stored.nbytes)
        if damaged:
            raise ValueError(
                f"{self.path} has tensors with nan or infinite weights ({_listed(damaged)}): it is damaged, download "
                "it again or use another copy"
            )
        return {name: state["tok_emb.weight" if name in tied else name] for name in shapes}

    def _check_tied(self, name: str, head: StoredTensor, embedding: torch.Tensor) -> None:
        """Raise ValueError unless a stored head equals the embedding that it is tied to; read in groups of rows."""
        for rows, expected in zip(head.split(HEAD_ROWS), embedding.split(HEAD_ROWS), strict=True):
            if not torch.equal(rows.read().to(expected.dtype), expected):
                raise ValueError(
                    f"{self.path} has a {name} that differs from its embedding, but tie_word_embeddings is true: if "
                    "the model was trained with this head, set tie_word_embeddings to false in config.json"
                )


def open_folder(path: Path, *, context: int | None = None) -> ModelFolder:
    """Open a folder and compare its tensors with what its config.json needs. Of the tensors, only biases are read.

    A model whose biases are all zero gets `bias` false: it is the same, and kernels compute it.

    context: as for `Family.read`.
    Raises ValueError or OSError: no or a damaged config.json, an architecture or option that is not supported, weights
    only as pickles, and tensors that are missing, surplus, quantized or of a wrong shape: one error lists all of
    them.
    """
    family, config = read_options(path, context=context)
    stored = _stored_tensors(path)
    biases = (_is_bias_with_values(name, each) for name, each in stored.items() if not family.is_computed(name))
    if config.bias and not any(biases):
        config = dataclasses.replace(config, bias=False)
    return ModelFolder(path, family, config, _match(path, family, config, stored))


def _is_bias_with_values(name: str, tensor: StoredTensor) -> bool:
    """Whether a tensor is a bias that is not zero."""
    return name.endswith(".bias") and tensor.dtype.is_floating_point and bool(tensor.read().any())


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of model.safetensors, else of the files that the index names, else of all files.

    transformers chooses in this order, too. A repository may have the same weights in further files.
    """
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if is_untrusted_file(one):
        paths = [one]
    elif is_untrusted_file(index):
        named = read_json(index, folder).get("weight_map")
        if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named.values()):
            raise ValueError(f"{index} is damaged: it has no weight_map; download it again")
        paths = [folder / name for name in sorted(set(named.values()))]
        outside = [str(path) for path in paths if path.parent != folder or path.name == ".."]
        if outside:
            raise ValueError(f"{index} names a file outside the folder ({outside[0]})")
        missing = [path.name for path in paths if not is_untrusted_file(path)]
        if missing:
            raise ValueError(f"{folder} lacks {', '.join(missing[:MOST_NAMED])}, which its index names: download again")
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        pickles = [path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern)]
        if pickles:
            raise ValueError(
                f"{folder} has its weights in {sorted(pickles)[0]}, a pickle, which could run code and is never "
                "loaded: convert it with transformers (save_pretrained writes safetensors), or use another copy"
            )
        raise ValueError(f"{folder} has no *.safetensors file")
    stored: dict[str, StoredTensor] = {}
    for path in paths:
        for name, tensor in read_header(path).items():
            if name in stored:
                raise ValueError(f"{folder}: the tensor {name} is in {stored[name].path.name} and in {path.name}")
            stored[name] = tensor
    return stored


def _match(
    folder: Path, family: Family, config: ModelConfig, stored: dict[str, StoredTensor]
) -> tuple[tuple[MappedTensor, StoredTensor], ...]:
    """The tensors of the family with those of the files. Raises ValueError that lists everything that does not fit."""
    if not any(name.startswith(family.prefix) for name in stored):  # a base model, saved without its head
        stored = {name if name in HEADS else family.prefix + name: tensor for name, tensor in stored.items()}
    if len(stored) < config.L:  # the names of so many layers might not fit into memory
        raise ValueError(
            f"the config.json of {folder} ({family.model_type}) has {config.L:,} layers, but the files only "
            f"{len(stored):,} tensors: download it again"
        )
    found: list[tuple[MappedTensor, StoredTensor]] = []
    missing: list[str] = []
    wrong: list[str] = []
    integers: list[str] = []
    tied_heads = [name for name in HEADS if config.tie_embeddings and name in stored]  # must equal the embedding
    heads = [MappedTensor(name, (config.V, config.C), "lm_head.weight") for name in tied_heads]
    for mapped in (*family.tensors(config), *heads):
        tensor = stored.pop(mapped.name, None)
        if tensor is None:
            if mapped.ours is not None:
                missing.append(mapped.name)
        elif tensor.shape != mapped.shape:
            wrong.append(f"{mapped.name} is {_by(tensor.shape)} instead of {_by(mapped.shape)}")
        elif not tensor.dtype.is_floating_point:
            integers.append(f"{mapped.name} has {tensor.dtype}")
        else:
            found.append((mapped, tensor))
    surplus = []
    for name, tensor in stored.items():
        weight = name.removesuffix("bias") + "weight"
        if family.is_computed(name):
            continue
        floats = tensor.dtype.is_floating_point
        if name.endswith(".bias") and floats and any(mapped.name == weight for mapped, _ in found):
            found.append((MappedTensor(name, tensor.shape, None), tensor))  # must be zero
        else:
            surplus.append(name)
    kinds = {
        "missing": missing,
        "of a wrong shape": wrong,
        "of integers (a quantized model?)": integers,
        "unknown": surplus,
    }
    problems = [f"{kind} {_listed(names)}" for kind, names in kinds.items() if names]
    if problems:
        raise ValueError(
            f"the tensors of {folder} do not fit its config.json ({family.model_type}): {'; '.join(problems)}"
        )
    return tuple(found)


def _listed(texts: Sequence[str]) -> str:
    """The number of texts, and the texts; of many, those that differ only in the layer are one ("layers.0-29.mlp")."""
    names = list(texts)
    if len(texts) > NAMED_SINGLY:
        layers: dict[tuple[str, str], list[int]] = {}
        for text in texts:
            layer = _LAYER.search(text)
            around = (text[: layer.start()], text[layer.end() :]) if layer else (text, "")
            layers.setdefault(around, []).extend([int(layer[0])] if layer else [])
        names = [before + _ranges(numbers) + after for (before, after), numbers in layers.items()]
    others = f", and {len(names) - MOST_NAMED:,} others" if len(names) > MOST_NAMED else ""
    return f"{len(texts)}: {', '.join(names[:MOST_NAMED])}{others}"


def _ranges(numbers: Sequence[int]) -> str:
    """Whole numbers as "0-3,7"; empty for none."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"
