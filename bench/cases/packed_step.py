"""Supervised tokens per second of a training step on documents of length S/8: packed, or one frame per span."""

from __future__ import annotations

from bench.case import Case, Contender, Work

S, SPANS = 512, 32


def _work(quick: bool, packed: bool) -> Work:
    import numpy as np
    import torch

    from niels_gpt import GPT, ModelConfig, loss_fn
    from niels_gpt.splice import MultiSpliceDocumentDataset
    from niels_gpt.splice.packing import pack
    from niels_gpt.splice.tensors import to_tensors
    from niels_gpt.training.tasks.base import Batch

    width = 64 if quick else S
    documents = list(np.random.default_rng(0).integers(0, 256, (SPANS, width // 8)).astype(np.uint16))
    dataset = MultiSpliceDocumentDataset(S=width, doc_tokens_list=documents, pad_token_id=0)
    spans = dataset.spans(np.arange(SPANS))
    batch = Batch(*to_tensors(pack(dataset, spans) if packed else dataset.frames(spans)))
    torch.manual_seed(0)
    model = GPT(ModelConfig(T=width, C=32 if quick else 256, dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def run() -> None:
        loss_fn(model(batch.x, **batch.structure()), batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Work(run, amount=int((batch.targets != -100).sum()), facts={"frames": len(batch.x)})


CASE = Case(
    "packed_step",
    "tokens/s",
    (
        Contender("packed", lambda quick: _work(quick, True), role="ours", target=4.0),
        Contender("one frame per span", lambda quick: _work(quick, False)),
    ),
)
