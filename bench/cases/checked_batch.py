"""What checking costs: batches of `pretrain_batch` from the same shards, with and without their checksums.

`steady`: every block was checked before. `first`: a round opens the cache and draws 100 batches, so almost every row
is in a block that is checked now; its ratio has no target, because what matters is its share of a training step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.case import Case, Contender, Work, temporary_folder
from bench.cases.pretrain_batch import SHARD_TOKENS, B, T, tokens


def write_cache(root: Path, quick: bool, checked: bool) -> Path:
    """Write a cache; without `checked`, it has no meta, and is read as it is."""
    from niels_gpt.cache.checksums import BlockHasher, write_table
    from niels_gpt.cache.formats import CHECKSUMS, shard_name
    from niels_gpt.cache.meta import sha256_file, write_meta

    stream, paths, checksums = tokens(quick), [], []
    (root / "train").mkdir()
    for number, start in enumerate(range(0, len(stream), SHARD_TOKENS)):
        shard = stream[start : start + SHARD_TOKENS]
        paths.append(root / "train" / shard_name(number))
        shard.tofile(paths[-1])
        hasher = BlockHasher()
        hasher.update(shard.data)
        checksums += hasher.finish()
    if checked:
        write_table(root / "train" / CHECKSUMS, checksums)
        paths.append(root / "train" / CHECKSUMS)
        entries = {f"train/{p.name}": {"bytes": p.stat().st_size, "sha256": sha256_file(p)} for p in paths}
        write_meta(root / "meta.json", {"files": entries})
    return root / "train"


def _work(quick: bool, checked: bool, first: bool) -> Work:
    import torch

    from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset

    folder = write_cache(temporary_folder(), quick, checked)
    generator = torch.Generator().manual_seed(0)
    calls = 5 if quick else 100

    def open_cache() -> Any:
        return PretrainTokenStreamDataset(folder, T=T, device="cpu")

    dataset = open_cache()
    for shard in dataset.shards:
        shard.tokens.max()  # check and map every page

    def run() -> None:
        opened = open_cache() if first else dataset
        for _ in range(calls):
            opened.get_batch(B=B, generator=generator)

    return Work(run, amount=calls)


CASE = Case(
    "checked_batch",
    "ms",
    (
        Contender("steady, checked", lambda quick: _work(quick, True, False), role="ours", group="steady", target=0.98),
        Contender("steady, unchecked", lambda quick: _work(quick, False, False), group="steady"),
        Contender("first, checked", lambda quick: _work(quick, True, True), role="ours", group="first"),
        Contender("first, unchecked", lambda quick: _work(quick, False, True), group="first"),
    ),
)
