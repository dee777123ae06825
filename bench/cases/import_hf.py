"""`niels-gpt import hf` of a made-up checkpoint of TinyLlama-1.1B's shape, in two or more safetensors files.

Seconds beside a copy of the same files that ends on the disk, and the peak memory of the process relative to the size
of the files. `import_hf` has two of the 22 layers, `import_hf_1b` all of them (2.2 GB in bf16, 4.4 GB in fp32).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import commands
from bench.case import Case, Contender, Work, temporary_folder

LAYERS_PER_FILE = 4


def shapes(*, layers: int, width: int = 2048, mlp: int = 5632, vocab: int = 32_000) -> list[dict[str, tuple[int, ...]]]:
    """Return the tensors of a Llama with 4 of 32 heads for keys and values, file by file."""
    keys = width // 8
    files: list[dict[str, tuple[int, ...]]] = [{"model.embed_tokens.weight": (vocab, width)}]
    for layer in range(layers):
        if layer % LAYERS_PER_FILE == 0:
            files.append({})
        name = f"model.layers.{layer}"
        files[-1] |= {
            f"{name}.input_layernorm.weight": (width,),
            f"{name}.post_attention_layernorm.weight": (width,),
            f"{name}.self_attn.q_proj.weight": (width, width),
            f"{name}.self_attn.k_proj.weight": (keys, width),
            f"{name}.self_attn.v_proj.weight": (keys, width),
            f"{name}.self_attn.o_proj.weight": (width, width),
            f"{name}.mlp.gate_proj.weight": (mlp, width),
            f"{name}.mlp.up_proj.weight": (mlp, width),
            f"{name}.mlp.down_proj.weight": (width, mlp),
        }
    files[-1] |= {"model.norm.weight": (width,), "lm_head.weight": (vocab, width)}
    return files


def write_checkpoint(folder: Path, dtype: str, **size: int) -> int:
    """Write a checkpoint with random weights, as transformers does, and return the bytes of its weights."""
    import torch
    from safetensors.torch import save_file

    files = shapes(**size)
    vocab, width = files[0]["model.embed_tokens.weight"]
    mlp = files[1]["model.layers.0.mlp.gate_proj.weight"][0]
    numbers = torch.randn(max(vocab, mlp, width) * width, generator=torch.Generator().manual_seed(0))
    numbers = numbers.mul_(0.02).to(getattr(torch, dtype))
    index: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        made = {key: numbers[: _count(shape)].reshape(shape).clone() for key, shape in tensors.items()}
        save_file(made, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in made.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}), encoding="utf-8"
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": width,
        "intermediate_size": mlp, "num_hidden_layers": size["layers"], "num_attention_heads": width // 64,
        "num_key_value_heads": width // 512, "vocab_size": vocab, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": dtype, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return total


def _count(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def _size(layers: int, quick: bool) -> dict[str, int]:
    return {"layers": 2, "width": 512, "mlp": 128, "vocab": 300} if quick else {"layers": layers}


def _import(dtype: str, layers: int, quick: bool) -> Work:
    commands.require("import", "hf")
    folder, out = temporary_folder(), temporary_folder() / "run"
    size = write_checkpoint(folder, dtype, **_size(layers, quick))

    def run() -> dict[str, float]:
        done = commands.run(["import", "hf", str(folder), "--run-dir", str(out)])
        shutil.rmtree(out)
        gib = done.peak_bytes / 2**30
        return {"seconds": done.seconds, "s": done.seconds, "GiB": gib, "x weights": done.peak_bytes / size}

    return Work(run, facts={"GiB of weights": size / 2**30}, measures=True)


def _copy(dtype: str, layers: int, quick: bool) -> Work:
    folder, out = temporary_folder(), temporary_folder() / "copy"
    write_checkpoint(folder, dtype, **_size(layers, quick))

    def run() -> dict[str, float]:
        began = time.perf_counter()
        shutil.copytree(folder, out)
        for path in out.iterdir():
            with path.open("r+b") as file:
                os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        shutil.rmtree(out)
        return {"seconds": seconds, "s": seconds}

    return Work(run, measures=True)


def _contenders(dtype: str, layers: int, goals: dict[str, str]) -> Iterator[Contender]:
    group = {"bfloat16": "bf16", "float32": "fp32"}[dtype]

    def made(label: str, work: Any, **options: Any) -> Contender:
        return Contender(f"{label}, {group}", lambda quick: work(dtype, layers, quick), group=group, **options)

    yield made("niels-gpt import hf", _import, role="ours", goals=goals)
    yield made("copy", _copy)


def _case(name: str, device: str, layers: int, goals: dict[str, str]) -> Case:
    contenders = (contender for dtype in ("bfloat16", "float32") for contender in _contenders(dtype, layers, goals))
    return Case(name, "s", tuple(contenders), device, rounds=3)


# With two layers, Python and torch (0.3 GiB) are a large part of the memory: no goal.
CASES = (
    _case("import_hf", "cpu", 2, {}),
    *(_case("import_hf_1b", device, 22, {"x weights": "≤ 1.2"}) for device in ("cpu", "cuda")),
)
