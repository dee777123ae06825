"""Batches of 32 x 1024 tokens from a cache of 200 million, beside nanoGPT's loader and Hugging Face datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.case import Case, Contender, Work, temporary_folder

B, T = 32, 1024
SHARD_TOKENS = 64 << 20


def tokens(quick: bool) -> Any:
    """Return a stream of uniform random ids."""
    import numpy as np

    return np.random.default_rng(0).integers(0, 16_004, 200_000 if quick else 200_000_000, dtype=np.uint16)


def nanogpt_style(path: Path, generator: Any) -> Any:
    """Return (x, y) as nanoGPT does: map the file for every batch, slice and cast each row of x and of y."""
    import numpy as np
    import torch

    data = np.memmap(path, dtype=np.uint16, mode="r")
    at = torch.randint(len(data) - T, (B,), generator=generator)
    x = torch.stack([torch.from_numpy((data[i : i + T]).astype(np.int64)) for i in at])
    y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + T]).astype(np.int64)) for i in at])
    return x, y


def _work(quick: bool, name: str) -> Work:
    import numpy as np
    import torch

    stream, root = tokens(quick), temporary_folder()
    generator = torch.Generator().manual_seed(0)
    calls = 5 if quick else 200
    if name == "ours":
        from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset

        for number, start in enumerate(range(0, len(stream), SHARD_TOKENS)):
            stream[start : start + SHARD_TOKENS].tofile(root / f"shard_{number:05d}.bin")
        dataset = PretrainTokenStreamDataset(root, T=T, device="cpu")

        def batch() -> Any:
            return dataset.get_batch(B=B, generator=generator)

    elif name == "nanogpt":
        stream.tofile(root / "train.bin")

        def batch() -> Any:
            return nanogpt_style(root / "train.bin", generator)

    else:
        import datasets

        datasets.disable_progress_bars()
        rows = stream[: len(stream) // (T + 1) * (T + 1)].reshape(-1, T + 1)
        rows = rows[:20_000]  # 20 million tokens: more take minutes to write, and the time per row is the same
        made = datasets.Dataset.from_dict({"ids": rows.astype(np.int32)}).with_format("torch")
        made.save_to_disk(root / "rows")
        table = datasets.load_from_disk(root / "rows")

        def batch() -> Any:
            ids = table[torch.randint(len(table), (B,), generator=generator).tolist()]["ids"].long()
            return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def run() -> None:
        for _ in range(calls):
            batch()

    return Work(run, amount=calls)


CASE = Case(
    "pretrain_batch",
    "ms",
    (
        Contender("niels-gpt", lambda quick: _work(quick, "ours"), role="ours", target=20.0),
        Contender("nanoGPT's loader", lambda quick: _work(quick, "nanogpt")),
        Contender("datasets", lambda quick: _work(quick, "datasets"), role="baseline"),
    ),
)
