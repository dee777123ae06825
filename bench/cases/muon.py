"""Steps of Muon on the hidden matrices of a model: ours, and torch's, which handles one matrix after another.

On a CPU the matrices are those of the demo (C=128, L=4), on CUDA those of the enwik8 recipe (C=512, L=12, SwiGLU). On
CUDA ours is replayed from a CUDA graph, as in a run, and also measured with torch's matmuls instead of our kernel.
"""

from __future__ import annotations

from bench.case import Case, Contender, Work


def _shapes(device: str) -> list[tuple[int, int]]:
    C, L, F = (128, 4, 512) if device == "cpu" else (512, 12, 1536)
    into = 1 if device == "cpu" else 2
    return [shape for _ in range(L) for shape in ((3 * C, C), (C, C), *[(F, C)] * into, (C, F))]


def _work(device: str, quick: bool, ours: bool, kernels: bool = True) -> Work:
    import torch

    from niels_gpt.training.optim import muon

    steps = 1 if quick else 20
    torch.manual_seed(0)
    matrices = [torch.randn(shape, device=device, requires_grad=True) for shape in _shapes(device)]
    for p in matrices:
        p.grad = torch.randn_like(p)
    optimizer: torch.optim.Optimizer
    if ours:
        optimizer = muon.Muon(matrices, lr=0.01, weight_decay=0.1)
    else:
        optimizer = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    if not kernels:
        muon._has_kernels = lambda device: False  # type: ignore[assignment]  # this process does nothing else

    step = optimizer.step
    if device == "cuda" and ours:
        step()  # compiles kernels and creates the momentum
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        step = graph.replay

    def run() -> None:
        for _ in range(steps):
            step()
        if device == "cuda":
            torch.cuda.synchronize()

    return Work(run, amount=steps)


def _case(device: str) -> Case:
    ours = Contender("niels-gpt", lambda quick: _work(device, quick, ours=True), role="ours")
    peers = [Contender("torch.optim.Muon", lambda quick: _work(device, quick, ours=False))]
    if device == "cuda":
        peers.append(Contender("torch's matmuls", lambda quick: _work(device, quick, ours=True, kernels=False)))
    return Case("muon", "ms", (ours, *peers), device)


CASES = (_case("cpu"), _case("cuda"))
