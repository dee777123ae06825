"""Batches of 32 conversations at T = 1024 with assistant-only targets, beside TRL's collator."""

from __future__ import annotations

from typing import Any

from bench.case import Case, Contender, Work, temporary_folder

B, T = 32, 1024
SYS, USR, ASST, EOT = 1, 2, 3, 4


def conversations(quick: bool) -> list[list[int]]:
    """Return conversations of two or four messages, with 200 to 1,400 tokens each."""
    import numpy as np

    draw = np.random.default_rng(0)
    made = []
    for _ in range(64 if quick else 4000):
        turns = int(draw.integers(1, 3))
        each = int(draw.integers(200, 1400)) // (2 * turns)
        ids: list[int] = []
        for _ in range(turns):
            for role in (USR, ASST):
                ids += [role, *draw.integers(5, 16_004, each).tolist(), EOT]
        made.append(ids)
    return made


def labels(ids: list[int]) -> list[int]:
    """Return the ids inside assistant spans and -100 elsewhere."""
    inside, out = False, []
    for token in ids:
        out.append(token if inside else -100)
        inside = token == ASST or (inside and token != EOT)
    return out


def _work(quick: bool, ours: bool) -> Work:
    import numpy as np
    import torch

    examples = conversations(quick)
    generator = torch.Generator().manual_seed(0)
    calls = 3 if quick else 100
    if ours:
        from niels_gpt.cache.sft_dataset import SFTExampleDataset

        root = temporary_folder()
        np.array([i for ids in examples for i in ids], dtype="<u2").tofile(root / "tokens.bin")
        np.save(root / "idx.npy", np.cumsum([0, *map(len, examples)])[:-1].astype(np.int64))
        dataset = SFTExampleDataset(root / "tokens.bin", root / "idx.npy", T=T, device="cpu", eot_id=EOT, asst_id=ASST)

        def batch() -> Any:
            return dataset.get_batch(B=B, generator=generator)

    else:
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        collate = DataCollatorForLanguageModeling(pad_token_id=EOT)
        rows = [{"input_ids": ids[: T + 1], "labels": labels(ids)[: T + 1]} for ids in examples]

        def batch() -> Any:
            return collate([rows[i] for i in torch.randint(len(rows), (B,), generator=generator).tolist()])

    def run() -> None:
        for _ in range(calls):
            batch()

    return Work(run, amount=calls)


CASE = Case(
    "sft_batch",
    "ms",
    (
        Contender("niels-gpt", lambda quick: _work(quick, True), role="ours", target=30.0),
        Contender("TRL's collator", lambda quick: _work(quick, False), package="trl"),
    ),
)
