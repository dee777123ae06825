"""One update of v0 in fp32: forward, loss, backward, clipping, AdamW; and the matmul peak beside it.

Every contender gets the same loss and fused AdamW; the share of the peak counts 6 N + 12 L C T operations
per token, N being the parameters without the embedding but with the head (tied: all parameters).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.case import Case, Contender, Work
from bench.cases import peers


def _work(make: Callable[[], Any], quick: bool) -> Work:
    import torch
    from torch.nn.functional import cross_entropy

    torch.manual_seed(0)
    model = make().train()
    ours = type(model).__module__.startswith("niels_gpt")
    hf = type(model).__module__.startswith("transformers")
    if ours:
        from niels_gpt.config import TrainConfig
        from niels_gpt.train.optimizer import make_optimizer

        optimizer = make_optimizer(model, TrainConfig())
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    B, T, steps = (2, 32, 1) if quick else (32, 256, 3)
    ids = torch.randint(0, 256, (B, T + 1))
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def run() -> None:
        for _ in range(steps):
            logits = model(x, use_cache=False).logits if hf else model(x)
            cross_entropy(logits.reshape(-1, 256), y.reshape(-1)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    tokens, parameters, gflop = B * T * steps, sum(p.numel() for p in model.parameters()), None
    if ours:
        gflop = (6 * parameters + 12 * model.config.L * model.config.C * T) * tokens / 1e9
    return Work(run, tokens, gflop, {"parameters": parameters, "threads": torch.get_num_threads()})


def _peak(quick: bool) -> Work:
    import torch

    n = 256 if quick else 2048
    a, b, out = torch.randn(n, n), torch.randn(n, n), torch.empty(n, n)
    return Work(lambda: torch.mm(a, b, out=out), gflop=2 * n**3 / 1e9)


def _contender(name: str, make: Callable[[], Any], group: str, **options: Any) -> Contender:
    return Contender(f"{name}, {group}", lambda quick: _work(make, quick), group=group, **options)


CASE = Case(
    "train_step",
    "an update of v0 on 32 x 256 tokens",
    "tokens/s",
    (
        _contender("niels-gpt", peers.niels_gpt, "dropout 0", role="ours", at_least=1.2),
        _contender("transformers GPT-2", peers.gpt2, "dropout 0", needs="transformers"),
        _contender("transformers Llama", peers.llama, "dropout 0", needs="transformers"),
        _contender("litgpt", peers.litgpt, "dropout 0", needs="litgpt"),
        _contender("niels-gpt", lambda: peers.niels_gpt(0.1), "dropout 0.1", role="ours", at_least=1.2),
        _contender("transformers GPT-2", lambda: peers.gpt2(0.1), "dropout 0.1", needs="transformers"),
        Contender("matmul peak", _peak, role="peak"),
    ),
)
