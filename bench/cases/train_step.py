"""Updates of v0 on 32 x 256 tokens: forward, loss, backward, clipping, fused AdamW; fp32, and bf16 autocast.

The share of the peak counts 6 N + 12 L C T operations per token, N being the parameters without the
embedding but with the head (tied: all of them); the peak is the best square matmul of the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench import models
from bench.case import Case, Contender, Work


def _work(make: Callable[[], Any], quick: bool, bf16: bool) -> Work:
    import torch
    from torch.nn.functional import cross_entropy

    torch.manual_seed(0)
    model = make().train()
    package = type(model).__module__.partition(".")[0]
    if package == "niels_gpt":
        from niels_gpt.config import TrainConfig
        from niels_gpt.train.optimizer import make_optimizer

        optimizer = make_optimizer(model, TrainConfig())
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    B, T, steps = (2, 32, 1) if quick else (32, 256, 2)
    ids = torch.randint(0, 256, (B, T + 1))
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def run() -> None:
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model(x, use_cache=False).logits if package == "transformers" else model(x)
                loss = cross_entropy(logits.reshape(-1, 256), y.reshape(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    tokens, parameters = B * T * steps, sum(p.numel() for p in model.parameters())
    gflop = (6 * parameters + 12 * 4 * 256 * T) * tokens / 1e9 if package == "niels_gpt" else None
    return Work(run, tokens, gflop, {"parameters": parameters, "threads": torch.get_num_threads()})


def _peak(quick: bool) -> Work:
    import torch

    n = 256 if quick else 2048
    a, b, out = torch.randn(n, n), torch.randn(n, n), torch.empty(n, n)
    return Work(lambda: torch.mm(a, b, out=out), gflop=2 * n**3 / 1e9)


def _contender(name: str, make: Callable[[], Any], group: str, **options: Any) -> Contender:
    return Contender(f"{name}, {group}", lambda quick: _work(make, quick, group == "bf16"), group=group, **options)


# The target is against the fastest peer of all, so it stands in the group that has them all: only GPT-2 drops
# out on the residual branches as v0 does, and being faster than the slowest peer alone is no target met.
CONTENDERS = (
    _contender("niels-gpt", models.niels_gpt, "dropout 0", role="ours", target=1.2),
    _contender("GPT-2", models.gpt2, "dropout 0"),
    _contender("Llama", models.llama, "dropout 0"),
    _contender("litgpt", models.litgpt, "dropout 0"),
    _contender("niels-gpt", lambda: models.niels_gpt(0.1), "dropout 0.1", role="ours"),
    _contender("GPT-2", lambda: models.gpt2(0.1), "dropout 0.1"),
    _contender("niels-gpt", models.niels_gpt, "bf16", role="ours"),
    _contender("GPT-2", models.gpt2, "bf16"),
    _contender("Llama", models.llama, "bf16"),
    _contender("litgpt", models.litgpt, "bf16"),
    Contender("matmul peak (best)", _peak, role="peak"),
)
CASE = Case("train_step", "tokens/s", CONTENDERS)
