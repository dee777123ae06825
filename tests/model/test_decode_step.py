"""The decode step: its kernels against what they compute in plain torch, and the whole against the model."""

from __future__ import annotations

import sys

import pytest
import torch

from niels_gpt import GPT, ModelConfig
from niels_gpt.inference.sampling import Sampling, choose
from niels_gpt.model import decode_step
from niels_gpt.model.decode_step import ADD, GELU, STORE, SWIGLU, DecodeStep, SlotState, Weights, power
from niels_gpt.model.kv_cache import KVCache
from tests.model import decode_reference

needs_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
KINDS = {"v0": {}, "v1": {"norm": "rmsnorm", "mlp": "swiglu", "d_ff": 176}, "learned": {"positions": "learned"}}


def build(kind: str, device: str, **changes: int) -> GPT:
    torch.manual_seed(0)
    sizes = {"V": 260, "T": 96, "C": 96, "L": 2, "H": 3, "d_ff": 200, "dropout": 0.0}
    made = GPT(ModelConfig(**{**sizes, **KINDS[kind], **changes})).eval()
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(6) if p.dim() > 1 else p.add_(0.3 * torch.randn_like(p))
    return made.to(device)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request, monkeypatch):
    if request.param == "cpu":
        import niels_gpt.model

        monkeypatch.setitem(sys.modules, "niels_gpt.model.decode_kernels", decode_reference.kernels)
        monkeypatch.setattr(niels_gpt.model, "decode_kernels", decode_reference.kernels, raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
        monkeypatch.setattr(decode_step, "_shared_memory", lambda _: 166912)
    return request.param


def test_power():
    assert [power(n) for n in (1, 2, 3, 4, 5, 1000)] == [1, 2, 4, 4, 8, 1024]


@pytest.mark.parametrize("kind", list(KINDS))
def test_weights_that_follow_a_norm_hold_its_weight(kind):
    model = build(kind, "cpu")
    weights = Weights(model)
    x = torch.randn(5, model.config.C)
    flat = torch.nn.functional.rms_norm if weights.norm_kind == 2 else torch.nn.functional.layer_norm
    block = model.layers()[1]
    product, sums = weights.normed[2]  # qkv of layer 1
    torch.testing.assert_close(
        flat(x, (model.config.C,), eps=1e-5) @ product.t(), block.attn.qkv(block.norm_attn(x)), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(sums, product.sum(1))
    with torch.no_grad():
        block.norm_attn.weight.mul_(2)
    weights.refresh()
    torch.testing.assert_close(weights.normed[2][0], block.attn.qkv.weight * block.norm_attn.weight)
    if kind == "v1":
        torch.testing.assert_close(weights.normed[3][0][1::2], block.mlp.gate.weight * block.norm_mlp.weight)
        torch.testing.assert_close(weights.normed[3][0][0::2], block.mlp.up.weight * block.norm_mlp.weight)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("batch", [1, 2, 5, 33])
@torch.inference_mode()
def test_logits_of_ragged_rows_are_the_models(device, kind, batch):
    model = build(kind, device)
    C = model.config
    state = SlotState(model, batch + 2)
    step = DecodeStep(Weights(model), state, power(batch))
    prompts = [[(11 * row + 3 * j) % C.V for j in range(1 + 13 * row % (C.T - 4))] for row in range(batch)]
    slots = [(row + 2) % (batch + 2) for row in range(batch)]  # any, not those of the rows
    for slot, prompt in zip(slots, prompts, strict=True):
        n = len(prompt) - 1
        if n:
            cache = KVCache(C, 1, device=model.device, dtype=torch.float32)
            model.hidden(torch.tensor([prompt[:-1]], device=device), cache=cache)
            state.cache[:, slot, :, :, :n] = cache.buffer[:, 0, :, :, :n]
        state.lengths[slot], state.tokens[slot] = n, prompt[-1]
    step.load(slots)
    for number in range(3):
        step()
        for row, prompt in enumerate(prompts):
            exact = model(torch.tensor([prompt], device=device))[0, -1]
            torch.testing.assert_close(step.logits[row], exact, atol=2e-4, rtol=2e-4)
            token = int(step.ring[number, row])
            assert token == int(exact.argmax())
            prompt.append(token)
    assert [int(state.lengths[slot]) for slot in slots] == [len(prompt) - 1 for prompt in prompts]


def _cuda_kernels():
    from niels_gpt.model import decode_kernels

    return decode_kernels


def linear_case(kernel: str, rows: int, N: int, K: int, norm: int, epilogue: int):
    """The arguments of a product twice: for the kernel and for the reference."""
    torch.manual_seed(rows * N + K + norm)
    parts = -(-N // 16)
    x = torch.randn(rows, K, device="cuda") * 2 + 0.5
    w = torch.randn(N, K, device="cuda") / K**0.5
    out = torch.randn(rows, N // 2 if epilogue == SWIGLU else N, device="cuda")
    moments = torch.zeros(rows, parts, 2, device="cuda")
    moments[:, 0, 0], moments[:, 0, 1] = x.sum(1), x.square().sum(1)
    return [(x, w, w.sum(1), out.clone(), moments.clone(), N, K, rows, parts, 1e-5, norm, epilogue) for _ in range(2)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("epilogue", [STORE, GELU, SWIGLU, ADD])
@pytest.mark.parametrize("norm", [0, 1, 2])
@pytest.mark.parametrize(("kernel", "rows"), [("vector", 1), ("wide", 2), ("wide", 16), ("wide", 45), ("deep", 33)])
def test_products(kernel, rows, norm, epilogue, pdl):
    if pdl and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs sm_90")
    if norm and epilogue == ADD and kernel != "vector":
        pytest.skip("never launched: a program would read the sums that another writes")
    for N, K in ((96, 96), (250, 72), (48, 128), (1100, 128)):
        mine, reference = linear_case(kernel, rows, N, K, norm, epilogue)
        extra = {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
        kernels = _cuda_kernels()
        if kernel == "vector":
            kernels.vector_kernel[(-(-N // 4),)](*mine, BN=4, BK=128, num_warps=4, **extra)
        else:
            options = {"M": 16, "BN": 16, "SPLIT": 4, "PARTS": power(mine[8]), "num_warps": 4, **extra}
            grid = (-(-rows // 16), -(-N // 16))
            if kernel == "wide":
                kernels.wide_kernel[grid](*mine, BK=32, **options)
            else:
                kernels.deep_kernel[grid](*mine, BK=16, STAGES=3, **options)
        decode_reference.linear(*reference)
        torch.testing.assert_close(mine[3], reference[3], atol=2e-5, rtol=2e-5)
        if epilogue == ADD and kernel != "vector":
            torch.testing.assert_close(mine[4].sum(1), reference[4].sum(1), atol=1e-2, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("span", [64, 128, 512])
@pytest.mark.parametrize(("D", "rope"), [(64, True), (24, True), (32, False)])
def test_attention(D, rope, span):
    torch.manual_seed(D + span)
    B, H, T, slots = 9, 3, 512, 12
    cache = torch.randn(slots + 1, 2, H, T, D, device="cuda")
    lengths = torch.tensor([0, 1, 63, 64, 65, 127, 128, 300, 511, 512, 5, 17, 0], device="cuda", dtype=torch.int32)
    rows = torch.tensor([11, 0, 1, 2, 3, 4, 7, 8, 9], device="cuda", dtype=torch.int32)
    angles = torch.rand(T, D // 2, device="cuda") * 6
    qkv = torch.randn(B, 3 * H * D, device="cuda")
    splits = power(-(-T // span))
    results = []
    for run in (_cuda_kernels().attend_kernel, decode_reference.kernels.attend_kernel):
        mine, y = cache.clone(), torch.zeros(B, H * D, device="cuda")
        part, edges = torch.zeros(B, H, splits, D, device="cuda"), torch.zeros(B, H, splits, 2, device="cuda")
        arrived = torch.zeros(B * H, device="cuda", dtype=torch.int32)
        for _ in range(2):  # the counters of the programs are as before at the end
            args = (qkv, angles.sin(), angles.cos(), mine, part, edges, arrived, y, lengths, rows, T, H, span, D**-0.5)
            run[(B, H, -(-T // span))](
                *args, D=D, DP=power(D), BS=64, SPLITS=splits, STAGES=3, ROPE=rope, PDL=False, num_warps=4
            )
        results.append((y, mine))
    torch.testing.assert_close(results[0][0], results[1][0], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("V", [2, 100, 256, 5000, 16004, 50257])
@torch.inference_mode()
def test_every_filter_chooses_as_the_plain_one(V):
    model = build("v0", "cuda", V=V)
    B = 16
    state = SlotState(model, B)
    step = DecodeStep(Weights(model), state, B)
    step.slots.copy_(torch.arange(B))
    kernel, grid, args, constants = step.launches[-1]
    g = torch.Generator().manual_seed(V)
    filters = [
        Sampling(t, k, p, m) for t in (0.4, 1.5) for k in (None, 1, 50) for p in (None, 0.3, 0.95) for m in (None, 0.05)
    ]
    for sampling in [*filters, Sampling(0.0, None)]:
        logits = (3 * torch.randn((B, V), generator=g)).cuda()
        logits[:, ::3] = logits[:, ::3].round()  # ties
        uniform = torch.rand(B, generator=g, dtype=torch.float64).cuda()
        state.uniform[:B, 0] = uniform
        settings = [sampling.temperature, sampling.top_p or 1.0, sampling.min_p or 0.0]
        state.numbers[:] = torch.tensor(settings, dtype=torch.float64)
        state.counts.fill_(min(sampling.top_k or V, V))
        for counter in (state.drawn, state.lengths, step.clock):
            counter.zero_()
        step.logits.copy_(logits)
        kernel[grid](*args, **constants)
        assert step.ring[0].tolist() == choose(logits, sampling, uniform).tolist(), sampling
        torch.testing.assert_close(step.h, model.tok_emb.weight[step.ring[0]])
        torch.testing.assert_close(step.moments.sum(1)[:, 1], step.h.square().sum(1))
