"""Frozen configuration: one dataclass per topic, a docstring under every field.

A config comes from a YAML file plus `key=value` overrides. It is checked completely before any work starts, and the
resolved config is stored with the run (`yaml_file.py`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from niels_gpt.config.checks import check_probabilities
from niels_gpt.config.options import Option, build, check_fields
from niels_gpt.config.public_model import folder_or_id, is_public
from niels_gpt.config.splice import SpliceConfig

LAST_SEED = 2**63 - 1
"""Largest seed; the smallest is 0."""
MOST_TOKENS = 1_000_000
"""Most tokens of one continuation; the random numbers that sample them are drawn before the first token."""

MOST_STEPS = 1_000_000_000
"""Most steps of a run. The sizes of models and batches are limited by the memory of the machine instead."""


def default_p_train() -> dict[str, float]:
    """Return the share of training rows drawn from each source."""
    return {"wiki": 0.784, "roam": 0.196, "primer": 0.020}


def default_p_val() -> dict[str, float]:
    """Return the weight of each source in the validation loss that selects the best checkpoint."""
    return {"wiki": 1.0}


def default_p_pretrain() -> dict[str, float]:
    """Return the mix of token caches for pretraining."""
    return {"fineweb_edu": 0.95, "roam": 0.05}


def default_p_sft() -> dict[str, float]:
    """Return the mix of token caches for chat fine-tuning."""
    return {"dolly15k": 0.50, "oasst1": 0.45, "primer": 0.05}


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a GPT and which building blocks it uses. The defaults are v0: 3.2M parameters over bytes."""

    V: Annotated[int, Option(1)] = 256
    """Vocabulary size: 256 for bytes."""
    T: Annotated[int, Option(1)] = 256
    """Context length: the most tokens of one forward pass."""
    C: Annotated[int, Option(1)] = 256
    """Model width (d_model)."""
    L: Annotated[int, Option(1)] = 4
    """Number of transformer blocks."""
    H: Annotated[int, Option(1)] = 4
    """Attention heads (of the queries)."""
    D: Annotated[int, Option(0)] = 0
    """Head width, always `head_dim` or C // H, and even with RoPE (it rotates pairs); 0: derived."""
    d_ff: Annotated[int, Option(0)] = 0
    """Hidden width of the MLP; 0: 4 * C, or with a gate (swiglu) 8/3 * C rounded up to a multiple of 64: three matrices
    of that width have about as many weights as two."""
    dropout: Annotated[float, Option(0, 1, "[)")] = 0.1
    """Share of the embedding and of each residual branch that is zeroed in training."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """`rmsnorm` divides by the root mean square and subtracts no mean. Both have a weight; `bias` adds one to
    `layernorm`."""
    mlp: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    """`gelu` is down(gelu(up(x))), `gelu_tanh` the same with the approximation of GPT-2 (`gelu_new`), `swiglu` is
    down(silu(gate(x)) * up(x)). Each is an entry of ACTIVATIONS in model/gpt.py; a name that ends in `glu` has a
    gate."""
    positions: Literal["rope", "learned"] = "rope"
    """`rope` rotates queries and keys, so that only distances matter; `learned` adds a vector per position to the
    embedding (T * C more weights), so that the model knows the absolute position of a token."""
    n_kv_heads: Annotated[int, Option(0, since="0.2")] = 0
    """Heads of keys and values, a divisor of H: each is shared by H / n_kv_heads query heads (grouped-query attention),
    and the KV cache shrinks by as much. 0: one per query head; H itself is stored as 0."""
    tie_embeddings: Annotated[bool, Option(since="0.2")] = True
    """Whether the output head is the embedding matrix; false: a separate matrix (V * C more weights)."""
    rope_theta: Annotated[float, Option(1, ends="()", since="0.2")] = 10000.0
    """Base of RoPE's frequencies: the pair 2i, 2i+1 rotates by position * rope_theta ** (-2i / D)."""
    head_dim: Annotated[int, Option(0, since="0.3")] = 0
    """Head width, if it is not C // H: the heads together are then wider or narrower than the model. 0: C // H; C // H
    itself is stored as 0."""
    norm_eps: Annotated[float, Option(0, ends="()", since="0.3")] = 1e-5
    """Added to the variance or mean square in every norm, against a division by zero."""
    qkv_bias: Annotated[bool, Option(since="0.3")] = False
    """Whether a bias is added to queries, keys and values (Qwen2)."""
    bias: Annotated[bool, Option(since="0.3")] = False
    """Whether every matrix of a block and every LayerNorm adds a bias (GPT-2); the output head has none."""
    qk_norm: Annotated[bool, Option(since="0.3")] = False
    """Whether an RMSNorm over the D dimensions of each head is applied to queries and keys, before RoPE (Qwen3)."""
    rope_scale: Annotated[float, Option(1, since="0.3")] = 1.0
    """Llama 3's extension of the context by this factor: frequencies whose wavelength exceeds rope_context / rope_low
    are divided by it, those below rope_context / rope_high stay, and those between are interpolated. 1: none."""
    rope_low: Annotated[float, Option(0, ends="()", since="0.3")] = 1.0
    """See rope_scale."""
    rope_high: Annotated[float, Option(0, ends="()", since="0.3")] = 4.0
    """See rope_scale; above rope_low."""
    rope_context: Annotated[int, Option(1, since="0.3")] = 8192
    """See rope_scale: the context length before the extension."""

    def __post_init__(self) -> None:
        if self.n_kv_heads is None:
            object.__setattr__(self, "n_kv_heads", 0)
        check_fields(self, "model")
        self._set_head_width()
        if self.d_ff == 0:
            object.__setattr__(self, "d_ff", -(-8 * self.C // 192) * 64 if self.gated else 4 * self.C)
        shared = self.n_kv_heads
        if shared and self.H % shared:
            raise ValueError(f"model.n_kv_heads={shared} does not divide model.H={self.H}: take a divisor, or 0 for H")
        object.__setattr__(self, "n_kv_heads", 0 if shared == self.H else shared)
        if self.bias:
            object.__setattr__(self, "qkv_bias", False)  # one form: `bias` includes it
        if self.rope_high <= self.rope_low:
            raise ValueError(f"model.rope_high must be above model.rope_low={self.rope_low:g}, got {self.rope_high!r}")

    def _set_head_width(self) -> None:
        """Derive D, and check what it is derived from."""
        given = self.head_dim
        if not given and self.C % self.H:
            raise ValueError(f"model.C={self.C} is not divisible by model.H={self.H}: heads have C / H dimensions each")
        head = given or self.C // self.H
        source = f"head_dim = {given}" if given else f"C // H = {self.C} // {self.H} = {head}"
        if self.D not in (0, head):
            raise ValueError(f"model.D={self.D} disagrees with {source}: leave D out")
        if head % 2 and self.positions == "rope":
            raise ValueError(f"head width D = {source} is odd; RoPE needs pairs")
        object.__setattr__(self, "D", head)
        object.__setattr__(self, "head_dim", 0 if head * self.H == self.C else head)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values: `n_kv_heads`, or H."""
        return self.n_kv_heads or self.H

    @property
    def gated(self) -> bool:
        """Whether the MLP has a third matrix, whose activation is multiplied with `up`."""
        return self.mlp.endswith("glu")

    @classmethod
    def of(cls, config: ModelConfig | Mapping[str, Any]) -> ModelConfig:
        """The ModelConfig for a dict with its keys (D is optional), or `config` itself if it is one.

        Raises ValueError for an unknown key and for sizes that do not fit together.
        """
        if isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            raise ValueError(f"a model config is a dict or a ModelConfig, got {type(config).__name__}")
        made: ModelConfig = build(cls, config, "model")
        if "D" in config and config["D"] != made.D:
            raise ValueError(f"D={config['D']} disagrees with the head width {made.D}: leave D out")
        return made


PRESETS: dict[str, dict[str, Any]] = {
    "v0": {},
    "v1": {
        "V": 16004,
        "T": 1024,
        "C": 512,
        "L": 8,
        "H": 8,
        "d_ff": 1536,
        "dropout": 0.0,
        "norm": "rmsnorm",
        "mlp": "swiglu",
    },
}
"""Model sizes by name, as differences from the defaults. `v0` is the defaults; `v1` is exactly a Llama (with a tied
head), 35.5M parameters, whose V comes from the tokenizer if there is one."""


@dataclass(frozen=True)
class LoRAConfig:
    """Adapters instead of full fine-tuning: `train.lora`. The weights of `init_from` stay as they are, and low-rank
    updates of chosen matrices are trained (docs/how-to/lora.md)."""

    rank: Annotated[int, Option(0, 65_536)] = 0
    """Rank of the updates; 0: no adapters, all weights are trained."""
    alpha: Annotated[float, Option(0)] = 0.0
    """The updates are multiplied by alpha / rank; 0: 2 * rank, so by 2."""
    targets: tuple[Literal["attn.qkv", "attn.out", "mlp.gate", "mlp.up", "mlp.down"], ...] = ()
    """The matrices of each block that get an adapter; empty: all of them. attn.qkv is one matrix: queries, keys and
    values share its adapter."""
    layers: Annotated[int, Option(0)] = 0
    """Only the last N blocks get adapters; 0: all. The backward ends below them, which saves time and memory."""

    def __post_init__(self) -> None:
        check_fields(self, "train.lora")
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"train.lora.targets names a matrix twice: {', '.join(self.targets)}")
        if not self.rank and (self.alpha or self.targets or self.layers):
            raise ValueError("train.lora has other options, but its rank is 0: set train.lora.rank, for example to 16")

    @property
    def scale(self) -> float:
        """What the updates are multiplied by."""
        return self.alpha / self.rank if self.alpha else 2.0


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained. Every field here changes the result."""

    total_steps: Annotated[int, Option(1, MOST_STEPS)] = 2000
    """Number of optimizer steps; the learning-rate schedule ends there."""
    base_lr: Annotated[float, Option(0)] = 3e-4
    """Learning rate at the end of the warm-up."""
    warmup_steps: Annotated[int, Option(0, MOST_STEPS)] = 200
    """Steps of linear warm-up; fewer than total_steps. A config that does not set it has at most a tenth of
    total_steps."""
    min_lr: Annotated[float, Option(0)] = 3e-5
    """Learning rate at the last step."""
    seed: Annotated[int, Option(0, LAST_SEED)] = 42
    """Seed of the initial weights, the batches, dropout and evaluation."""
    B: Annotated[int, Option(1)] = 32
    """Rows per step."""
    p_train: Annotated[dict[str, float], Option(shares=True)] = field(default_factory=default_p_train)
    """Share of rows drawn from each source; sums to 1."""
    p_val: Annotated[dict[str, float], Option(shares=True)] = field(default_factory=default_p_val)
    """Sources evaluated during training; their weighted mean loss selects the best checkpoint."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` uses Muon for the hidden matrices and AdamW for the rest: fewer steps to the same loss."""
    precision: Literal["fp32", "tf32", "bf16", "fp8"] = "fp32"
    """`bf16` runs matmuls in bfloat16 (on CUDA the residual stream is bfloat16 too); weights and their gradients stay
    float32. It is many times faster on a GPU, twice as fast on CPUs with hardware support (Intel AMX), and slower on
    other CPUs. `tf32` is CUDA's float32 with matmul inputs rounded to 10 bits of mantissa. `fp8` is bf16 with most
    matmuls in 8 bits, on Hopper, Ada and later: on an H200, 21 % more tokens/s than bf16 at v1's size and 31 % at 124M
    parameters (docs/performance.md), at a loss that is 0.3 to 0.7 % higher."""
    accumulate: Annotated[int, Option(0)] = 0
    """Split the B rows of a step into this many forward passes (less memory, same rows); 0: as few as fit into the
    memory of the device."""
    weight_decay: Annotated[float, Option(0)] = 0.1
    """AdamW weight decay; applies to matrices only."""
    betas: Annotated[tuple[float, float], Option(0, 1, "[)")] = (0.9, 0.95)
    """AdamW moment decays."""
    clip_norm: Annotated[float, Option(0)] = 1.0
    """Largest global gradient norm."""
    lora: Annotated[LoRAConfig, Option(since="0.3")] = field(default_factory=LoRAConfig)
    """Adapters of low rank on frozen weights (LoRA), instead of training all weights."""
    extended: Annotated[tuple[tuple[int, int], ...], Option(1, since="0.3")] = ()
    """How total_steps changed while the run was resumed: [steps done, total_steps before] of each change. Written by
    `train --resume --steps N`; the learning rate follows from it (docs/runs.md)."""

    def __post_init__(self) -> None:
        check_fields(self, "train")
        if self.accumulate and self.B % self.accumulate:
            raise ValueError(f"train.B={self.B} rows are not divisible by train.accumulate={self.accumulate}")
        self._check_extended()

    def _check_extended(self) -> None:
        changes = self.extended
        if list(changes) != sorted(changes, key=lambda change: change[0]) or any(at > before for at, before in changes):
            listed = [list(change) for change in changes]
            raise ValueError(
                "train.extended must be pairs of steps done and the larger total_steps before, in the order of the "
                f"steps, got {listed}: leave it out, `train --resume --steps N` writes it"
            )


def default_warmup(total_steps: int) -> int:
    """Return the warm-up of a config that does not set one: at most a tenth of the steps, and fewer than all."""
    return min(TrainConfig.warmup_steps, max(total_steps // 10, 1), max(total_steps - 1, 0))


@dataclass(frozen=True)
class SourceConfig:
    """A user-defined source: `data.sources.NAME`."""

    path: Annotated[str, Option(1)]
    """A folder of .txt, .txt.gz or .md files, or rows in .jsonl, .json, their .gz or .parquet (a file or a folder of
    files), or the .zip of a ChatGPT or Claude data export. With `split`, also any plain file or its .gz, and `hub:ID`
    or `hub:ID@REVISION` for a dataset of the Hugging Face Hub."""
    kind: Literal["auto", "text", "chat"] = "auto"
    """`auto`: chat if the columns of the rows are those of a known chat format, otherwise text."""
    field: str = ""
    """The column that holds the text or the messages (a list of {role, content} or {from, value}).
    Default: recognized by name; for texts `text`, `content`, or the only column of text."""
    licence: str = ""
    """Stored for your records; not used otherwise."""
    split: tuple[int | float, ...] = ()
    """Split by bytes instead of by documents, for byte streams only. Two or three numbers, for train, val and test in
    this order: shares that sum to 1 ([0.9, 0.1]) or numbers of bytes ([90000000, 5000000, 5000000]; bytes after the
    last part are dropped). The source is then one byte string: its files unchanged, or the texts of its rows without a
    separator. Files or splits named train come before those named validation and test."""
    columns: Annotated[dict[str, str], Option(since="0.3")] = dataclasses.field(default_factory=dict, hash=False)
    """For chats with one prompt and one reply per row: which columns hold them, `{user: COLUMN, assistant: COLUMN}`,
    and optionally `system: COLUMN`. Default: recognized by name, such as `prompt` and `completion`."""

    def __post_init__(self) -> None:
        check_fields(self, "data.sources")
        if self.columns:
            self._check_columns()
        if self.split:
            self._check_split()
        if self.path.startswith("hub:"):
            if not re.fullmatch(r"hub:[^@\s]+(@[^@\s]+)?", self.path):
                raise ValueError(f"a Hub path in data.sources must be hub:ID or hub:ID@REVISION, got {self.path}")
            if not self.split:
                raise ValueError(f"a source in data.sources with path {self.path} needs a split")

    def _check_columns(self) -> None:
        allowed, required = ("user", "assistant", "system"), ("user", "assistant")
        given = set(self.columns)
        if not given <= set(allowed) or not given >= set(required) or not all(self.columns.values()):
            raise ValueError(
                "columns in data.sources must be {user: COLUMN, assistant: COLUMN}, optionally with system: COLUMN, "
                f"got {dict(self.columns)}"
            )
        for name, value, default in (("field", self.field, ""), ("kind", self.kind, "chat"), ("split", self.split, ())):
            if value not in (default, "auto"):
                raise ValueError(
                    f"a source in data.sources with columns is a chat, so it cannot have {name}: {value}; remove one"
                )

    def _check_split(self) -> None:
        got = f"got {list(self.split)}"
        if self.kind == "chat":
            raise ValueError("a source in data.sources of kind chat cannot have a split: only text is split by bytes")
        if len(self.split) not in (2, 3) or not all(part > 0 for part in self.split):
            raise ValueError(f"split in data.sources must be two or three numbers above 0 (train, val, test), {got}")
        if all(isinstance(part, int) for part in self.split):
            return
        if not all(part < 1 for part in self.split) or abs(math.fsum(self.split) - 1.0) > 1e-6:
            raise ValueError(
                f"split in data.sources must be shares that sum to 1 (within 1e-6) or integer numbers of bytes, {got}"
            )


@dataclass(frozen=True)
class NotesConfig:
    """Which files of folders are read as notes, and how: `data.notes`. A `.nielsignore` file in the folder or its
    sub-folders (gitignore syntax) excludes more."""

    formats: Literal["md", "text"] = "md"
    """`md`: files ending in exactly `.md`. `text`: .md, .markdown and .txt, in upper or lower case."""
    include_hidden: bool = False
    """Also read hidden files and folders (.trash, .obsidian, .git) and node_modules."""
    exclude: tuple[str, ...] = ()
    """Patterns in gitignore syntax, relative to the folder: files and folders that are not read."""
    skip_templates: bool = False
    """Skip folders named template or templates, also `_templates` and `99 Templates`."""
    respect_front_matter: bool = False
    """Skip notes whose front matter has `publish: false` or `private: true`."""
    strip_front_matter: bool = False
    """Remove the front matter from the text."""
    links: Literal["keep", "text"] = "keep"
    """`text` replaces [[target|label]] by the label and [[target]] by the target, except in code."""

    def __post_init__(self) -> None:
        check_fields(self, "data.notes")

    def text_options(self) -> dict[str, Any]:
        """Return the options that change the text of a note, without defaults."""
        given = {"strip_front_matter": self.strip_front_matter, "links": self.links}
        return {key: value for key, value in given.items() if value not in (False, "keep")}


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from. `auto` is the default path if it exists, otherwise the embedded text."""

    wiki: Annotated[str, Option(1)] = "auto"
    """`hub` (wikitext-103 from the Hugging Face Hub), `embedded` (docstrings of the Python standard library), or a
    folder with train and validation files. `auto` is `embedded`: nothing is downloaded unless you ask for it."""
    roam: Annotated[str, Option(1)] = "auto"
    """A folder of markdown notes, or `embedded`. `auto`: `.roam-data/` if it exists, otherwise `embedded`."""
    primer: Annotated[str, Option(1)] = "auto"
    """A file of dialogues, a chat file (.jsonl, .json, .parquet, the .zip of an export), or `embedded`. `auto`:
    `data/primer.txt` if it exists, otherwise `embedded`."""
    roam_val_frac: Annotated[float, Option(0, 1)] = 0.10
    """Share of the notes held out."""
    roam_split: Annotated[Literal["file", "shared_text"], Option(since="0.3")] = "file"
    """`file`: notes are held out one by one. `shared_text`: notes that have a long line in common, or almost the same
    text, are all held out or all trained on."""
    primer_val_frac: Annotated[float, Option(0, 1)] = 0.10
    """Share of the dialogues held out."""
    seed: Annotated[int, Option(0, LAST_SEED)] = 42
    """Seed of the splits. Separate from train.seed, so that runs with different seeds share one split."""
    cache_dir: Annotated[str, Option(1)] = "auto"
    """Folder for the cached byte streams. `auto`: a folder of the user's cache (`niels-gpt cache clean` lists it)."""
    encoding_errors: Literal["strict", "replace", "skip"] = "strict"
    """How to treat files that are not utf-8: `strict` stops and names all of them, `replace` inserts U+FFFD, `skip`
    does not read them."""
    notes: Annotated[NotesConfig, Option(since="0.3")] = field(default_factory=NotesConfig)
    """Which files of the notes and of user-defined sources are read."""
    token_cache: Annotated[str, Option(1)] = "cache"
    """Folder of the token caches and their tokenizer (tasks pretrain and sft), or its URL (`s3://bucket/cache`)."""
    retain: dict[str, float] = field(default_factory=default_p_pretrain)
    """For the task sft: the pretrain caches whose mixed loss is reported as val_pretrain; missing ones are skipped."""
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """User-defined sources, by name. train.p_train may give them a share. A tenth of their documents is held out,
    unless they have a `split`."""

    def __post_init__(self) -> None:
        check_fields(self, "data")
        if self.retain:
            check_probabilities(self.retain, name="data.retain")
        for name in self.sources:
            if name in ("wiki", "roam", "primer", "chat"):
                raise ValueError(f"data.sources.{name}: the name {name} is reserved; choose another")
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                raise ValueError(f"data.sources.{name}: a name may have only letters, digits, - and _, got {name!r}")


@dataclass(frozen=True)
class OutputConfig:
    """What a run writes, and when. No field here changes the weights."""

    checkpoint_every: Annotated[int, Option(1, MOST_STEPS)] = 500
    """Steps between checkpoints; the last step always writes one."""
    keep: Annotated[int, Option(1, MOST_STEPS)] = 3
    """How many of the newest checkpoints are kept on disk, besides the best."""
    eval_every: Annotated[int, Option(1, MOST_STEPS)] = 250
    """Steps between validations; the last step always runs one."""
    eval_steps: Annotated[int, Option(1, 1_000_000)] = 20
    """Batches per source in each validation."""
    sample_every: Annotated[int, Option(0, MOST_STEPS)] = 500
    """Steps between sample texts (samples/step_N.txt); 0: only one after the last step."""
    sample_prompt: Annotated[str, Option(1)] = "user: what is niels?\nassistant: "
    """Prompt of the samples."""
    sample_tokens: Annotated[int, Option(1, MOST_TOKENS)] = 160
    """Tokens per sample."""

    def __post_init__(self) -> None:
        check_fields(self, "output")


@dataclass(frozen=True)
class EngineConfig:
    """How the machine runs the training. No field here changes the result, except for rounding."""

    backend: Annotated[Literal["auto", "plain"], Option(since="0.3")] = "auto"
    """`plain`: compute the model with the plain torch of model/gpt.py, without kernels, fast decoders, compilation and
    CUDA graphs; several times slower. NIELS_GPT_BACKEND=plain does so for every command."""
    compile: bool | None = None
    """Compile the model with torch.compile. null: compile on CUDA for runs of at least 500 steps, since compiling takes
    half a minute. It does not pay off on a CPU."""
    graphs: bool | None = None
    """Capture a complete step as one CUDA graph, so that small models do not wait for Python. null: on a single CUDA
    device where all batches have the same shape."""
    prefetch: Annotated[int, Option(0)] = 2
    """Batches that a thread prepares ahead of the GPU; 0: no thread."""
    checkpoint_activations: bool = False
    """Recompute the activations of each block in the backward pass: less memory, a third slower."""
    shard: bool = False
    """With several processes: shard weights, gradients and optimizer state over them (FSDP2) instead of replicating
    them (DDP)."""
    deterministic: bool = False
    """Use deterministic kernels: with the same GPU model and torch version, every run gives the same bits, and a
    resumed run equals an uninterrupted one. Somewhat slower. Runs on a CPU are always deterministic."""

    def __post_init__(self) -> None:
        check_fields(self, "engine")


@dataclass(frozen=True)
class RunConfig:
    """All options of a run."""

    task: Literal["bytes", "pretrain", "sft", "splice"] = "bytes"
    """What to train on. `bytes`: next-byte prediction over the mixed byte streams. `pretrain`: next-token prediction
    over windows of the mixed token caches. `sft`: conversations from the token caches, with a loss on the assistant's
    turns only. `splice`: spans of chosen documents at chosen positions."""
    init_from: str = ""
    """The initial weights: a checkpoint, a run (its best checkpoint), or `hf:` with a folder or a repository of the
    Hugging Face Hub (`hf:HuggingFaceTB/SmolLM2-135M`). Without a model section, the model is the one found there.
    Empty: random weights."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Size and components of the model."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Optimization."""
    data: DataConfig = field(default_factory=DataConfig)
    """Sources of text."""
    output: OutputConfig = field(default_factory=OutputConfig)
    """Checkpoints, evaluation, samples."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Compilation, prefetching, sharding."""
    splice: SpliceConfig = field(default_factory=SpliceConfig)
    """Documents and spans of the task splice."""

    def __post_init__(self) -> None:
        check_fields(self, "")
        if is_public(self.init_from):
            try:
                folder_or_id(self.init_from)
            except ValueError as err:
                raise ValueError(f"init_from: {err}") from None
        if self.train.precision == "fp8":
            odd = [f"model.{name}={n}" for name, n in (("C", self.model.C), ("d_ff", self.model.d_ff)) if n % 16]
            if odd:
                raise ValueError(
                    f"train.precision=fp8 needs matrices whose sides are multiples of 16, but "
                    f"{' and '.join(odd)} is not: use another size, or train.precision=bf16"
                )
        if self.train.lora.rank:
            self._check_lora()
        if self.task in ("bytes", "splice"):
            return
        # The default shares are for byte streams; the token tasks have their own defaults.
        train = self.train
        if train.p_train == default_p_train():
            shares = default_p_pretrain() if self.task == "pretrain" else default_p_sft()
            train = dataclasses.replace(train, p_train=shares)
        if train.p_val == default_p_val():
            train = dataclasses.replace(train, p_val=dict(train.p_train))
        object.__setattr__(self, "train", train)

    @property
    def takes_initial_model(self) -> bool:
        """Whether the model will be that of `init_from`, because no option of its architecture is set."""
        return bool(self.init_from) and _architecture(self.model) == _architecture(ModelConfig())

    def _check_lora(self) -> None:
        refused = {
            "train.optimizer=muon": (self.train.optimizer == "muon", "Muon needs full matrices, not factors", "adamw"),
            "train.precision=fp8": (self.train.precision == "fp8", "the FP8 kernels have no adapters", "bf16"),
            "engine.shard=true": (self.engine.shard, "frozen weights have nothing to shard but themselves", "false"),
        }
        for option, (given, why, instead) in refused.items():
            if given:
                key = option.partition("=")[0]
                raise ValueError(f"{option} does not work with train.lora: {why}; use {key}={instead}")
        if not self.takes_initial_model:
            self.check_adapters()

    def check_adapters(self) -> None:
        """Raise ValueError if the model does not have the matrices or blocks that `train.lora` names."""
        lora, model = self.train.lora, self.model
        smallest = min(model.C, model.d_ff)
        if lora.rank > smallest:
            raise ValueError(f"train.lora.rank={lora.rank} exceeds the smallest side of the matrices, {smallest}")
        if lora.layers > model.L:
            raise ValueError(f"train.lora.layers={lora.layers} exceeds the blocks of the model, model.L={model.L}")
        if "mlp.gate" in lora.targets and not model.gated:
            missing = f"a model with mlp={model.mlp} has no such matrix"
            raise ValueError(f"train.lora.targets has mlp.gate, but {missing}: remove it")


def _architecture(model: ModelConfig) -> ModelConfig:
    """The model without what may be set beside `init_from`."""
    default = ModelConfig()
    return dataclasses.replace(model, V=default.V, T=default.T, dropout=default.dropout)
