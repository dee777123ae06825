"""The model families of Hugging Face that our GPT computes: their config.json and tensors as ours, and the reverse.

Options that our model does not have are refused by name, with what is supported. So are biases that are not zero.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from niels_gpt.config import ModelConfig
from niels_gpt.pretrained.layouts import Layout, MappedTensor, NeoXHeads, RopePairs, Same, Transposed

Options = Mapping[str, Any]
"""A config.json."""


@dataclass(frozen=True)
class Family:
    """One architecture."""

    model_type: str
    """Its name in config.json."""
    architecture: str
    """Its class in transformers."""
    prefix: str
    """Of the names of all tensors but the head; files of a base model lack it."""
    read: Callable[[Options], ModelConfig]
    """Our config of a config.json. Raises ValueError that names an option we do not have."""
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

    def refuse(self, found: str, supported: str) -> None:
        """Gather what is not supported, with what is."""
        self._unsupported.append(f"{found} (supported: {supported})")

    def check(self) -> None:
        """Raise ValueError with all that is not supported."""
        if self._unsupported:
            raise ValueError(
                f"config.json ({self._type}) has options that are not supported: {', '.join(self._unsupported)}"
            )

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


def _with_zero_bias(name: str, shape: tuple[int, ...], ours: str, layout: Layout = Same()) -> Iterator[MappedTensor]:
    """A weight, and its bias, which we do not have."""
    yield MappedTensor(f"{name}.weight", shape, f"{ours}.weight", layout=layout)
    yield MappedTensor(f"{name}.bias", shape[1:] if isinstance(layout, Transposed) else shape[:1], None)


SIZES = {
    "T": "max_position_embeddings",
    "C": "hidden_size",
    "L": "num_hidden_layers",
    "H": "num_attention_heads",
    "d_ff": "intermediate_size",
}
"""Our names of sizes -> those of Llama and GPT-NeoX."""
GPT2_SIZES = {"T": "n_positions", "C": "n_embd", "L": "n_layer", "H": "n_head"}


WINDOWS = {"mistral": 4096, "smollm3": None}
"""model_type -> sliding_window of a config.json that does not have it."""
NO_ROPE_INTERVAL = 4
"""SmolLM3 without a list of its layers: every 4th has no RoPE."""


# --- Llama, Qwen2, Qwen3 --------------------------------------------------------------------------------


def _read_llama(options: Options) -> ModelConfig:
    """Llama and what differs from it only in options that we have."""
    read, kind = _Reader(options), options["model_type"]
    read.require("hidden_act", "silu", default="silu")
    read.require("attention_bias", False, default=False)
    read.require("mlp_bias", False, default=False)
    read.require("use_sliding_window", False, default=False)
    if kind in ("mistral", "smollm3"):
        T, window = read.size("max_position_embeddings"), options.get("sliding_window", WINDOWS[kind])
        if window is not None and _Reader({"sliding_window": window}).size("sliding_window") < T:
            read.refuse(f"sliding_window={window}", "null")
    layers = [layer for layer in read.items("layer_types") if layer != "full_attention"]
    if layers:
        read.refuse(f"layer_types with {_short(repr(layers[0]))}", "'full_attention'")
    if not all(read.items("no_rope_layers")):
        read.refuse("no_rope_layers with layers without RoPE", "RoPE in every layer")
    elif kind == "smollm3" and not read.items("no_rope_layers"):
        interval = read.size("no_rope_layer_interval") if "no_rope_layer_interval" in options else NO_ROPE_INTERVAL
        if interval <= read.size("num_hidden_layers"):
            read.refuse(f"no_rope_layer_interval={interval}", "no_rope_layers with RoPE in every layer")
    rope = read.rope(theta_default=2_000_000.0) if kind == "smollm3" else read.rope()
    read.check()
    return ModelConfig(
        **read.sizes(SIZES),
        n_kv_heads=read.get("num_key_value_heads", 0),
        head_dim=read.get("head_dim", 0),
        tie_embeddings=read.get("tie_word_embeddings", kind == "smollm3"),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        qkv_bias=kind == "qwen2",
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
    if config.qkv_bias:  # Qwen2 has no option for it
        return written | {"use_sliding_window": False}
    return written | {"attention_bias": False} | ({} if config.qk_norm else {"mlp_bias": False})


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
        yield MappedTensor(f"{theirs}.post_attention_layernorm.weight", (C,), f"{ours}.norm_mlp.weight")
        for name, shape in (("gate", (wide, C)), ("up", (wide, C)), ("down", (C, wide))):
            yield MappedTensor(f"{theirs}.mlp.{name}_proj.weight", shape, f"{ours}.mlp.{name}.weight")
    yield MappedTensor("model.norm.weight", (C,), "norm.weight")
    if not config.tie_embeddings:
        yield MappedTensor("lm_head.weight", (V, C), "lm_head.weight")


# --- GPT-NeoX -------------------------------------------------------------------------------------------


def _read_neox(options: Options) -> ModelConfig:
    read = _Reader(options)
    read.require("use_parallel_residual", False, default=True)
    read.require("hidden_act", "gelu", default="gelu")
    rope = read.rope(theta="rotary_emb_base", rotated="rotary_pct", rotated_default=0.25)
    read.check()
    return ModelConfig(
        **read.sizes(SIZES),
        tie_embeddings=read.get("tie_word_embeddings", False),
        norm_eps=read.number("layer_norm_eps", 1e-5),
        dropout=0.0,
        **rope,
    )


def _write_neox(config: ModelConfig) -> dict[str, Any]:
    return {
        **_write_sizes(config, SIZES),
        "hidden_act": "gelu",
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": False,
        "rotary_pct": 1.0,
        "partial_rotary_factor": 1.0,
        "rotary_emb_base": config.rope_theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **_write_rope(config),
    }


def _neox_tensors(config: ModelConfig) -> Iterator[MappedTensor]:
    C, V, wide = config.C, config.V, config.d_ff
    heads = NeoXHeads(config.H, config.D)
    yield MappedTensor("gpt_neox.embed_in.weight", (V, C), "tok_emb.weight")
    for layer in range(config.L):
        theirs, ours = f"gpt_neox.layers.{layer}", f"blocks.{layer}"
        yield from _with_zero_bias(f"{theirs}.input_layernorm", (C,), f"{ours}.norm_attn")
        yield from _with_zero_bias(f"{theirs}.post_attention_layernorm", (C,), f"{ours}.norm_mlp")
        qkv = f"{theirs}.attention.query_key_value.weight"
        yield MappedTensor(qkv, (3 * C, C), f"{ours}.attn.qkv.weight", layout=heads)
        yield MappedTensor(f"{theirs}.attention.dense.weight", (C, C), f"{ours}.attn.out.weight")
        yield from _with_zero_bias(f"{theirs}.mlp.dense_h_to_4h", (wide, C), f"{ours}.mlp.up")
        yield from _with_zero_bias(f"{theirs}.mlp.dense_4h_to_h", (C, wide), f"{ours}.mlp.down")
    yield from _with_zero_bias("gpt_neox.final_layer_norm", (C,), "norm")
    if not config.tie_embeddings:
        yield MappedTensor("embed_out.weight", (V, C), "lm_head.weight")


# --- GPT-2 ----------------------------------------------------------------------------------------------


def _read_gpt2(options: Options) -> ModelConfig:
    read = _Reader(options)
    read.require("activation_function", "gelu", default="gelu_new")
    read.require("scale_attn_weights", True, default=True)
    read.require("scale_attn_by_inverse_layer_idx", False, default=False)
    read.require("add_cross_attention", False, default=False)
    read.check()
    sizes = read.sizes(GPT2_SIZES)
    return ModelConfig(
        **sizes,
        d_ff=read.get("n_inner", 4 * sizes["C"]),
        positions="learned",
        tie_embeddings=read.get("tie_word_embeddings", True),
        norm_eps=read.number("layer_norm_epsilon", 1e-5),
        dropout=0.0,
    )


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        **_write_sizes(config, GPT2_SIZES),
        "n_inner": config.d_ff,
        "activation_function": "gelu",
        "layer_norm_epsilon": config.norm_eps,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _gpt2_tensors(config: ModelConfig) -> Iterator[MappedTensor]:
    C, V, wide = config.C, config.V, config.d_ff
    yield MappedTensor("transformer.wte.weight", (V, C), "tok_emb.weight")
    yield MappedTensor("transformer.wpe.weight", (config.T, C), "pos_emb.weight")
    for layer in range(config.L):
        theirs, ours = f"transformer.h.{layer}", f"blocks.{layer}"
        yield from _with_zero_bias(f"{theirs}.ln_1", (C,), f"{ours}.norm_attn")
        yield from _with_zero_bias(f"{theirs}.ln_2", (C,), f"{ours}.norm_mlp")
        for name, matrix, shape in (
            ("attn.c_attn", "attn.qkv", (C, 3 * C)),
            ("attn.c_proj", "attn.out", (C, C)),
            ("mlp.c_fc", "mlp.up", (C, wide)),
            ("mlp.c_proj", "mlp.down", (wide, C)),
        ):
            yield from _with_zero_bias(f"{theirs}.{name}", shape, f"{ours}.{matrix}", Transposed())
    yield from _with_zero_bias("transformer.ln_f", (C,), "norm")
    if not config.tie_embeddings:
        yield MappedTensor("lm_head.weight", (V, C), "lm_head.weight")


# --- the table ------------------------------------------------------------------------------------------


def _llama(model_type: str, architecture: str) -> Family:
    inverse_frequencies = r"rotary_emb\.inv_freq$"
    return Family(model_type, architecture, "model.", _read_llama, _write_llama, _llama_tensors, inverse_frequencies)


LLAMA = _llama("llama", "LlamaForCausalLM")
QWEN2 = _llama("qwen2", "Qwen2ForCausalLM")
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
    r"attn\.(bias|masked_bias)$",
)
FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA,
        _llama("mistral", "MistralForCausalLM"),
        _llama("smollm3", "SmolLM3ForCausalLM"),
        QWEN2,
        QWEN3,
        NEOX,
        GPT2,
    )
}
"""By model_type of config.json."""


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
        if config.qkv_bias and config.qk_norm:
            raise ValueError("qkv_bias and qk_norm together: no family has both, Qwen2 has biases and Qwen3 head norms")
        if not config.qkv_bias and not config.qk_norm and config.C % config.H:
            raise ValueError(
                f"model.C={config.C} is no multiple of model.H={config.H}, which transformers needs of a Llama"
            )
        return QWEN2 if config.qkv_bias else QWEN3 if config.qk_norm else LLAMA
    if config.norm == "layernorm" and config.mlp == "gelu":
        wrong = [name for name in ("n_kv_heads", "head_dim", "qkv_bias", "qk_norm") if getattr(config, name)]
        if wrong:
            raise ValueError(f"{norm_mlp} with {', '.join(wrong)}: GPT-NeoX and GPT-2 do not have {wrong[0]}")
        if rope and config.rope_scale == 1:
            return NEOX
        if not rope:
            return GPT2
    raise ValueError(
        f"no supported family computes {norm_mlp}: Llama and Qwen have rmsnorm, swiglu and rope; GPT-NeoX layernorm, "
        "gelu and rope; GPT-2 layernorm, gelu and learned positions"
    )
