"""The model families of Hugging Face that our GPT computes: their config.json and tensors as ours, and the reverse.

Options that our model does not have are refused by name, with what is supported. So are biases that are not zero, but
for those of GPT-2 and GPT-NeoX, which our model has (`bias`). Importing this module does not import
torch.
"""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niels_gpt.config import ModelConfig
from niels_gpt.pretrained.layouts import Layout, MappedTensor, NeoXHeads, RopePairs, Same, Transposed
from niels_gpt.system.untrusted_files import read_untrusted

Options = Mapping[str, Any]
"""A config.json."""
MOST_BYTES = 64 << 20
"""Of a config.json, or of the index of the weights."""


@dataclass(frozen=True)
class Family:
    """One architecture."""

    model_type: str
    """Its name in config.json."""
    architecture: str
    """Its class in transformers."""
    prefix: str
    """Of the names of all tensors but the head; files of a base model lack it."""
    read: Callable[..., ModelConfig]
    """Our config of a config.json, whose T is the longest context. Raises ValueError that names an option that we do
    not have. A further argument, `context`, is how much of the context will be used (default: all): a sliding window
    that is not shorter does nothing."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """The config.json of our config, without the parts that all families share."""
    tensors: Callable[[ModelConfig], Iterator[MappedTensor]]
    """The tensors in the order in which transformers names them; the head only if it is not tied."""
    computed: str = ""
    """Pattern of the names of tensors that files may have and that are computed here."""

    def is_computed(self, name: str) -> bool:
        """Whether a surplus tensor of a file is one that we do not need."""
        return bool(self.computed) and re.search(self.computed, name) is not None


# --- reading options ----------------------------------------------------------------------------------


class _Reader:
    """Reads a config.json of one model type. Raises ValueError for an option that is missing or has a wrong type.

    Options that are not supported are gathered; `check` raises one error with all of them.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._type = options.get("model_type")
        self._unsupported: list[str] = []
        if self.get("quantization_config", None):
            self.refuse(f"quantization_config={_short(options['quantization_config'])}", "weights without quantization")

    def size(self, name: str) -> int:
        value = self._options.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"config.json must have {name}, an integer above 0, got {value!r}")
        return value

    def sizes(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Our names of sizes -> their values; `names`: ours -> theirs."""
        return {ours: self.size(theirs) for ours, theirs in {"V": "vocab_size", **names}.items()}

    def get(self, name: str, default: Any) -> Any:
        value = self._options.get(name)
        return default if value is None else value

    def number(self, name: str, default: float | None = None) -> float:
        """A number. Without a default, it must be there."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} in config.json must be a number, got {value!r}")
        return float(value)

    def items(self, name: str) -> list[Any]:
        """A list; empty if there is none."""
        value = self.get(name, [])
        if not isinstance(value, list):
            raise ValueError(f"{name} in config.json must be a list, got {value!r}")
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        """An object; empty if there is none."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} in config.json must be an object, got {value!r}")
        return value

    def require(self, name: str, supported: Any, *, default: Any) -> None:
        """Gather an option that has another value than the supported one."""
        value = self.get(name, default)
        if value != supported or isinstance(value, bool) != isinstance(supported, bool):
            self.refuse(f"{name}={_short(value)}", str(supported))

    def gelu(self, name: str, *, default: str) -> Any:
        """Our `mlp` for an activation; another one is gathered."""
        value = self.get(name, default)
        if value not in GELU:
            self.refuse(f"{name}={_short(value)}", ", ".join(GELU))
        return GELU.get(value, "gelu")

    def refuse(self, found: str, supported: str) -> None:
        """Gather what is not supported, with what is."""
        self._unsupported.append(f"{found} (supported: {supported})")

    def check(self) -> None:
        """Raise ValueError with all that is not supported."""
        if self._unsupported:
            raise ValueError(
                f"config.json ({self._type}) has options that are not supported: {', '.join(self._unsupported)}"
            )

    def longest_context(self, window: Any, always: bool, context: int | None) -> int:
        """The longest context, which a sliding window limits. Gather a window that is shorter than `context`.

        always: whether the family uses a window that is not null without being told.
        """
        T, used = self.size("max_position_embeddings"), self.get("use_sliding_window", False)
        layers = [layer for layer in self.items("layer_types") if layer != "full_attention"]
        found = [f"sliding_window={window}"] if always and window is not None else []
        found += [f"use_sliding_window={_short(used)}"] if used is not False else []
        found += [f"layer_types with {_short(repr(layers[0]))}"] if layers else []
        if not found:
            return T
        width = 0 if window is None else _Reader({"sliding_window": window}).size("sliding_window")
        if min(T, context or T) <= width and all(layer == "sliding_attention" for layer in layers):
            return min(T, width)
        for each in found:
            self.refuse(each, f"full attention{f', or a context of at most {width} tokens' if width else ''}")
        return T

    def rope(
        self,
        *,
        theta: str = "rope_theta",
        theta_default: float = 10000.0,
        rotated: str = "partial_rotary_factor",
        rotated_default: float = 1.0,
    ) -> dict[str, Any]:
        """Our options of RoPE: theta, and Llama 3's scaling. `rope_scaling` counts before `rope_parameters`.

        theta, rotated: the family's own names of the base and of the rotated part of a head.
        """
        options = {
            "model_type": self._type,
            "rope_theta": self.get("rope_theta", self.get(theta, None)),
            "partial_rotary_factor": self.get("partial_rotary_factor", self.get(rotated, rotated_default)),
        }
        nested = _Reader({**options, **(self.table("rope_scaling") or self.table("rope_parameters"))})
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind == "linear" and nested.get("factor", None) == 1:
            kind = "default"
        if kind not in ("default", "llama3"):
            self.refuse(f"rope scaling of type {_short(repr(kind))}", "'default' or 'llama3'")
        part = nested.get("partial_rotary_factor", 1.0)
        if part != 1.0:
            self.refuse(f"{rotated}={_short(part)}", "1.0")
        ours: dict[str, Any] = {"rope_theta": nested.number("rope_theta", theta_default)}
        if kind == "llama3":
            context = nested.get("original_max_position_embeddings", self.get("max_position_embeddings", 0))
            ours |= {
                "rope_scale": nested.number("factor"),
                "rope_low": nested.number("low_freq_factor"),
                "rope_high": nested.number("high_freq_factor"),
                "rope_context": context,
            }
        return ours


def _short(value: Any) -> str:
    """A value of a JSON file in a message."""
    return textwrap.shorten(str(value), 60, placeholder=" …")


def _write_sizes(config: ModelConfig, names: Mapping[str, str]) -> dict[str, int]:
    """The inverse of `_Reader.sizes`, without the vocabulary, which all families share."""
    return {theirs: getattr(config, ours) for ours, theirs in names.items()}


def _write_rope(config: ModelConfig) -> dict[str, Any]:
    if config.rope_scale == 1:
        return {"rope_theta": config.rope_theta, "rope_scaling": None}
    scaling = {
        "rope_type": "llama3",
        "factor": config.rope_scale,
        "low_freq_factor": config.rope_low,
        "high_freq_factor": config.rope_high,
        "original_max_position_embeddings": config.rope_context,
    }
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling}


def _with_bias(
    name: str, shape: tuple[int, ...], ours: str, layout: Layout = Same(), *, bias: bool = False
) -> Iterator[MappedTensor]:
    """A weight, and its bias; zeros if our model has none."""
    yield MappedTensor(f"{name}.weight", shape, f"{ours}.weight", layout=layout)
    length = shape[1:] if isinstance(layout, Transposed) else shape[:1]
    layout = Same() if isinstance(layout, Transposed) else layout
    yield MappedTensor(f"{name}.bias", length, f"{ours}.bias" if bias else None, layout=layout)


SIZES = {
    "T": "max_position_embeddings",
    "C": "hidden_size",
    "L": "num_hidden_layers",
    "H": "num_attention_heads",
    "d_ff": "intermediate_size",
}
"""Our names of sizes -> those of Llama and GPT-NeoX."""
GPT2_SIZES = {"T": "n_positions", "C": "n_embd", "L": "n_layer", "H": "n_head"}
GELU: dict[str, Any] = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
"""Names of an activation in transformers -> our `mlp`."""
WRITTEN_GELU = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


WINDOWS = {"mistral": 4096, "smollm3": None}
"""model_type -> sliding_window of a config.json that does not have it."""
NO_ROPE_INTERVAL = 4
"""SmolLM3 without a list of its layers: every 4th has no RoPE."""


# --- Llama, Qwen2, Qwen3 --------------------------------------------------------------------------------


def _read_llama(options: Options, context: int | None = None) -> ModelConfig:
    """Llama and what differs from it only in options that we have. It may have biases on q, k and v."""
    read, kind = _Reader(options), options["model_type"]
    read.require("hidden_act", "silu", default="silu")
    biased = kind == "llama" and read.get("attention_bias", False) is True
    read.require("attention_bias", biased, default=False)
    read.require("mlp_bias", False, default=False)
    T = read.longest_context(options.get("sliding_window", WINDOWS.get(kind)), kind in WINDOWS, context)
    if not all(read.items("no_rope_layers")):
        read.refuse("no_rope_layers with layers without RoPE", "RoPE in every layer")
    elif kind == "smollm3" and not read.items("no_rope_layers"):
        interval = read.size("no_rope_layer_interval") if "no_rope_layer_interval" in options else NO_ROPE_INTERVAL
        if interval <= read.size("num_hidden_layers"):
            read.refuse(f"no_rope_layer_interval={interval}", "no_rope_layers with RoPE in every layer")
    rope = read.rope(theta_default=2_000_000.0) if kind == "smollm3" else read.rope()
    read.check()
    return ModelConfig(
        **read.sizes(SIZES) | {"T": T},
        n_kv_heads=read.get("num_key_value_heads", 0),
        head_dim=read.get("head_dim", 0),
        tie_embeddings=read.get("tie_word_embeddings", kind == "smollm3"),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        qkv_bias=biased or kind == "qwen2",
        qk_norm=kind == "qwen3",
        dropout=0.0,
        norm="rmsnorm",
        mlp="swiglu",
        **rope,
    )


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    written = {
        **_write_sizes(config, SIZES),
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.D,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "initializer_range": 0.02,
        **_write_rope(config),
    }
    return written | {"attention_bias": config.qkv_bias} | ({} if config.qk_norm else {"mlp_bias": False})


def _llama_tensors(config: ModelConfig) -> Iterator[MappedTensor]:
    C, V, wide, D = config.C, config.V, config.d_ff, config.D
    queries, keys = config.H * D, config.kv_heads * D
    yield MappedTensor("model.embed_tokens.weight", (V, C), "tok_emb.weight")
    for layer in range(config.L):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        yield MappedTensor(f"{theirs}.input_layernorm.weight", (C,), f"{ours}.norm_attn.weight")
        first = 0
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            place, layout = slice(first, first + rows), Same() if name == "v" else RopePairs(D)
            first += rows
            projection = f"{theirs}.self_attn.{name}_proj"
            yield MappedTensor(f"{projection}.weight", (rows, C), f"{ours}.attn.qkv.weight", place, layout)
            if config.qkv_bias:
                yield MappedTensor(f"{projection}.bias", (rows,), f"{ours}.attn.qkv.bias", place, layout)
            if config.qk_norm and name != "v":
                norm = f"{theirs}.self_attn.{name}_norm.weight"
                yield MappedTensor(norm, (D,), f"{ours}.attn.norm_{name}.weight", layout=RopePairs(D))
        yield MappedTensor(f"{theirs}.self_attn.o_proj.weight", (C, queries), f"{ours}.attn.out.weight")
        if config.qkv_bias:  # a Llama with biases has this one, too; a Qwen2 does not
            yield MappedTensor(f"{theirs}.self_attn.o_proj.bias", (C,), None)
        yield MappedTensor(f"{theirs}.post_attention_layernorm.weight", (C,), f"{ours}.norm_mlp.weight")
        for name, shape in (("gate", (wide, C)), ("up", (wide, C)), ("down", (C, wide))):
            yield MappedTensor(f"{theirs}.mlp.{name}_proj.weight", shape, f"{ours}.mlp.{name}.weight")
    yield MappedTensor("model.norm.weight", (C,), "norm.weight")
    if not config.tie_embeddings:
        yield MappedTensor("lm_head.weight", (V, C), "lm_head.weight")


# --- GPT-NeoX -------------------------------------------------------------------------------------------


def _read_neox(options: Options, context: int | None = None) -> ModelConfig:
    read = _Reader(options)
    read.require("use_parallel_residual", False, default=True)
    mlp = read.gelu("hidden_act", default="gelu")
    rope = read.rope(theta="rotary_emb_base", rotated="rotary_pct", rotated_default=0.25)
    read.check()
    return ModelConfig(
        **read.sizes(SIZES),
        mlp=mlp,
        bias=read.get("attention_bias", True),
        tie_embeddings=read.get("tie_word_embeddings", False),
        norm_eps=read.number("layer_norm_eps", 1e-5),
        dropout=0.0,
        **rope,
    )


def _write_neox(config: ModelConfig) -> dict[str, Any]:
    return {
        **_write_sizes(config, SIZES),
        "hidden_act": WRITTEN_GELU[config.mlp],
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": False,
        "rotary_pct": 1.0,
        "partial_rotary_factor": 1.0,
        "rotary_emb_base": config.rope_theta,
        "attention_bias": config.bias,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **_write_rope(config),
    }


def _neox_tensors(config: ModelConfig) -> Iterator[MappedTensor]:
    C, V, wide = config.C, config.V, config.d_ff
    heads = NeoXHeads(config.H, config.D)
    with_bias = functools.partial(_with_bias, bias=config.bias)
    yield MappedTensor("gpt_neox.embed_in.weight", (V, C), "tok_emb.weight")
    for layer in range(config.L):
        theirs, ours = f"gpt_neox.layers.{layer}", f"blocks.{layer}"
        yield from with_bias(f"{theirs}.input_layernorm", (C,), f"{ours}.norm_attn")
        yield from with_bias(f"{theirs}.post_attention_layernorm", (C,), f"{ours}.norm_mlp")
        if config.bias:
            yield from with_bias(f"{theirs}.attention.query_key_value", (3 * C, C), f"{ours}.attn.qkv", heads)
            yield from with_bias(f"{theirs}.attention.dense", (C, C), f"{ours}.attn.out")
        else:
            qkv = f"{theirs}.attention.query_key_value.weight"
            yield MappedTensor(qkv, (3 * C, C), f"{ours}.attn.qkv.weight", layout=heads)
            yield MappedTensor(f"{theirs}.attention.dense.weight", (C, C), f"{ours}.attn.out.weight")
        yield from with_bias(f"{theirs}.mlp.dense_h_to_4h", (wide, C), f"{ours}.mlp.up")
        yield from with_bias(f"{theirs}.mlp.dense_4h_to_h", (C, wide), f"{ours}.mlp.down")
    yield from with_bias("gpt_neox.final_layer_norm", (C,), "norm")
    if not config.tie_embeddings:
        yield MappedTensor("embed_out.weight", (V, C), "lm_head.weight")


# --- GPT-2 ----------------------------------------------------------------------------------------------


def _read_gpt2(options: Options, context: int | None = None) -> ModelConfig:
    read = _Reader(options)
    mlp = read.gelu("activation_function", default="gelu_new")
    read.require("scale_attn_weights", True, default=True)
    read.require("scale_attn_by_inverse_layer_idx", False, default=False)
    read.require("add_cross_attention", False, default=False)
    read.check()
    sizes = read.sizes(GPT2_SIZES)
    return ModelConfig(
        **sizes,
        d_ff=read.get("n_inner", 4 * sizes["C"]),
        positions="learned",
        mlp=mlp,
        bias=True,
        tie_embeddings=read.get("tie_word_embeddings", True),
        norm_eps=read.number("layer_norm_epsilon", 1e-5),
        dropout=0.0,
    )


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        **_write_sizes(config, GPT2_SIZES),
        "n_inner": config.d_ff,
        "activation_function": WRITTEN_GELU[config.mlp],
        "layer_norm_epsilon": config.norm_eps,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _gpt2_tensors(config: ModelConfig) -> Iterator[MappedTensor]:
    C, V, wide = config.C, config.V, config.d_ff
    with_bias = functools.partial(_with_bias, bias=config.bias)
    yield MappedTensor("transformer.wte.weight", (V, C), "tok_emb.weight")
    yield MappedTensor("transformer.wpe.weight", (config.T, C), "pos_emb.weight")
    for layer in range(config.L):
        theirs, ours = f"transformer.h.{layer}", f"blocks.{layer}"
        yield from with_bias(f"{theirs}.ln_1", (C,), f"{ours}.norm_attn")
        yield from with_bias(f"{theirs}.ln_2", (C,), f"{ours}.norm_mlp")
        for name, matrix, shape in (
            ("attn.c_attn", "attn.qkv", (C, 3 * C)),
            ("attn.c_proj", "attn.out", (C, C)),
            ("mlp.c_fc", "mlp.up", (C, wide)),
            ("mlp.c_proj", "mlp.down", (wide, C)),
        ):
            yield from with_bias(f"{theirs}.{name}", shape, f"{ours}.{matrix}", Transposed())
    yield from with_bias("transformer.ln_f", (C,), "norm")
    if not config.tie_embeddings:
        yield MappedTensor("lm_head.weight", (V, C), "lm_head.weight")


# --- the table ------------------------------------------------------------------------------------------


def _llama(model_type: str, architecture: str) -> Family:
    inverse_frequencies = r"rotary_emb\.inv_freq$"
    return Family(model_type, architecture, "model.", _read_llama, _write_llama, _llama_tensors, inverse_frequencies)


LLAMA = _llama("llama", "LlamaForCausalLM")
QWEN3 = _llama("qwen3", "Qwen3ForCausalLM")
NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    "gpt_neox.",
    _read_neox,
    _write_neox,
    _neox_tensors,
    r"rotary_emb\.inv_freq$|attention\.(bias|masked_bias)$",
)
GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    "transformer.",
    _read_gpt2,
    _write_gpt2,
    _gpt2_tensors,
    r"\.attn\.(bias|masked_bias)$",
)
FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA,
        _llama("mistral", "MistralForCausalLM"),
        _llama("smollm3", "SmolLM3ForCausalLM"),
        _llama("qwen2", "Qwen2ForCausalLM"),
        QWEN3,
        NEOX,
        GPT2,
    )
}
"""By model_type of config.json."""


def read_options(folder: Path, *, context: int | None = None) -> tuple[Family, ModelConfig]:
    """Return the family and the config of the config.json of a folder. No other file is read.

    context: as for `Family.read`. Raises ValueError or OSError: no or a damaged config.json, an architecture or options
    that are not supported.
    """
    options = read_json(folder / "config.json", folder)
    family = family_of_options(options)
    try:
        return family, family.read(options, context)
    except ValueError as err:
        raise ValueError(f"{folder}: {err}") from None


def read_json(file: Path, folder: Path) -> dict[str, Any]:
    """Return the object of a JSON file of a model folder."""
    data = read_untrusted(file, MOST_BYTES)
    if data is None:
        raise ValueError(
            f"{folder} is not a model in the Hugging Face format: it has no {file.name}; name a folder that "
            "save_pretrained wrote, or a repository (NAME/MODEL)"
        )
    try:
        options = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"{file} is not JSON, or is damaged: download it again") from None
    if not isinstance(options, dict):
        raise ValueError(f"{file} must be an object, got {type(options).__name__}")
    return options


def family_of_options(options: Options) -> Family:
    """The family of a config.json. Raises ValueError for one that is not supported, with those that are."""
    kind = options.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        named = options.get("architectures")
        name = named[0] if isinstance(named, list) and named else kind
        raise ValueError(
            f"the architecture {name} (model_type {kind!r}) is not supported: supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[kind]


def family_of_config(config: ModelConfig) -> Family:
    """The family that computes a model of ours. Raises ValueError that names the options that none has."""
    norm_mlp = f"norm={config.norm}, mlp={config.mlp}, positions={config.positions}"
    rope = config.positions == "rope"
    if config.norm == "rmsnorm" and config.mlp == "swiglu" and rope:
        if config.bias:
            raise ValueError(f"model.bias with {norm_mlp}: only GPT-NeoX and GPT-2 have it")
        if config.qkv_bias and config.qk_norm:
            raise ValueError("qkv_bias and qk_norm together: no family has both, Llama has biases and Qwen3 head norms")
        if not config.qk_norm and config.C % config.H:
            raise ValueError(
                f"model.C={config.C} is no multiple of model.H={config.H}, which transformers needs of a Llama"
            )
        return QWEN3 if config.qk_norm else LLAMA  # not Qwen2: transformers would replace any tokenizer by Qwen2's
    if config.norm == "layernorm" and config.mlp in WRITTEN_GELU:
        wrong = [name for name in ("n_kv_heads", "head_dim", "qkv_bias", "qk_norm") if getattr(config, name)]
        if wrong:
            raise ValueError(f"{norm_mlp} with {', '.join(wrong)}: GPT-NeoX and GPT-2 do not have {wrong[0]}")
        if rope and config.rope_scale == 1:
            return NEOX
        if not rope:
            return GPT2
    raise ValueError(
        f"no supported family computes {norm_mlp}: Llama and Qwen have rmsnorm, swiglu and rope; GPT-NeoX layernorm, "
        "gelu (or gelu_tanh) and rope; GPT-2 the same with learned positions"
    )
