"""Steps of Muon on the hidden matrices of the demo's model (C=128, L=4): ours, and torch's one by one."""

from __future__ import annotations

from bench.case import Case, Contender, Work


def _work(quick: bool, ours: bool) -> Work:
    import torch

    from niels_gpt.train.muon import Muon

    C, L, steps = 128, 4, 1 if quick else 20
    torch.manual_seed(0)
    shapes = [shape for _ in range(L) for shape in ((3 * C, C), (C, C), (4 * C, C), (C, 4 * C))]
    matrices = [torch.randn(shape, requires_grad=True) for shape in shapes]
    for p in matrices:
        p.grad = torch.randn_like(p)
    optimizer: torch.optim.Optimizer
    if ours:
        optimizer = Muon(matrices, lr=0.01, weight_decay=0.1)
    else:
        optimizer = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")

    def run() -> None:
        for _ in range(steps):
            optimizer.step()

    return Work(run, amount=steps)


OURS = Contender("niels-gpt", lambda quick: _work(quick, ours=True), role="ours")
CASE = Case("muon", "ms", (OURS, Contender("torch.optim.Muon", lambda quick: _work(quick, ours=False))))
