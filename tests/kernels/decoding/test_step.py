"""The decode step: its kernels compared with plain torch, and its logits with those of the model."""

from __future__ import annotations

import pytest
import torch

from niels_gpt import GPT, ModelConfig
from niels_gpt.inference.sampling import Sampling, choose
from niels_gpt.kernels.decoding import step
from niels_gpt.kernels.decoding.step import (
    ADD,
    COLUMNS,
    GELU,
    LOW,
    STORE,
    SWIGLU,
    TILE,
    WIDE,
    WIDE_SHARED,
    WIDE_TILE,
    DecodeStep,
    SlotState,
    Weights,
    _pair,
    power,
)
from niels_gpt.model.kv_cache import KVCache
from tests.kernels.decoding import plain_kernels

KINDS = {"v0": {}, "v1": {"norm": "rmsnorm", "mlp": "swiglu", "d_ff": 176}, "learned": {"positions": "learned"}}
KINDS["untied"] = {"tie_embeddings": False, "rope_theta": 50.0}
KINDS["grouped"] = {**KINDS["v1"], "n_kv_heads": 1}
KINDS["wide heads"] = {**KINDS["v1"], "H": 4, "n_kv_heads": 2, "head_dim": 40, "norm_eps": 1e-6}
LONG = {"pieces": {"d_ff": 1100}, "deep": {"d_ff": 2100}, "wide": {"V": 8200, "norm": "rmsnorm"}}


def build(kind: str, device: str, **changes: int) -> GPT:
    torch.manual_seed(0)
    sizes = {"V": 260, "T": 96, "C": 96, "L": 2, "H": 3, "d_ff": 200, "dropout": 0.0}
    made = GPT(ModelConfig(**{**sizes, **(KINDS | LONG)[kind], **changes})).eval()
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(6) if p.dim() > 1 else p.add_(0.3 * torch.randn_like(p))
    return made.to(device)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setattr(step, "triton_kernels", lambda: plain_kernels.kernels)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
        monkeypatch.setattr(step, "_shared_memory", lambda _: 166912)
    return request.param


def test_power():
    assert [power(n) for n in (1, 2, 3, 4, 5, 1000)] == [1, 2, 4, 4, 8, 1024]


@pytest.mark.parametrize("kind", list(KINDS))
def test_matrices_after_a_norm_include_its_weight(kind):
    model = build(kind, "cpu")
    weights = Weights(model.config, model.weights())
    x = torch.randn(5, model.config.C)
    flat = torch.nn.functional.rms_norm if weights.norm_kind == 2 else torch.nn.functional.layer_norm
    block = model.layers()[1]
    matrix, sums = weights.normed[2]  # qkv of layer 1
    torch.testing.assert_close(
        flat(x, (model.config.C,), eps=1e-5) @ matrix.t(), block.attn.qkv(block.norm_attn(x)), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(sums, matrix.sum(1))
    with torch.no_grad():
        block.norm_attn.weight.mul_(2)
    weights.refresh()
    torch.testing.assert_close(weights.normed[2][0], block.attn.qkv.weight * block.norm_attn.weight)
    if kind == "v1":
        torch.testing.assert_close(weights.normed[3][0][1::2], block.mlp.gate.weight * block.norm_mlp.weight)
        torch.testing.assert_close(weights.normed[3][0][0::2], block.mlp.up.weight * block.norm_mlp.weight)


def test_pairs_of_halves_have_22_bits_of_any_row():
    g = torch.Generator().manual_seed(0)
    matrix = torch.randn((9, 70), generator=g) * 10.0 ** torch.tensor([-37, -30, -9, -4, 0, 4, 9, 30, 37])[:, None]
    matrix *= torch.rand((9, 70), generator=g) ** 8  # small elements beside large ones
    matrix = torch.cat((matrix, torch.zeros(1, 70), torch.full((1, 70), torch.finfo().max)))
    both, factor = torch.empty((2, 11, 70), dtype=torch.float16), torch.empty(11)
    _pair(matrix, both, factor)
    made = (both[0].double() + both[1].double() / LOW) * factor[:, None].double()
    allowed = 2.0**-22 * matrix.double().abs() + 2.0**-49 * matrix.double().abs().amax(1, keepdim=True)
    assert ((made - matrix).abs() <= allowed).all()
    for bad in (torch.inf, torch.nan):
        matrix[3, 5] = bad
        _pair(matrix, both, factor)
        again = (both[0].double() + both[1].double() / LOW) * factor[:, None].double()
        assert again[3].isnan().any()
        assert again[:3].equal(made[:3])
        assert again[4:].equal(made[4:])


@torch.inference_mode()
def test_one_row_needs_no_pairs_and_larger_batches_share_them(device):
    model = build("v1", device)
    weights, state = Weights(model.config, model.weights()), SlotState(model.config, 4, model.device)
    DecodeStep(weights, state, 1)
    assert weights.pairs == []
    step = DecodeStep(weights, state, 2)
    pairs = list(weights.pairs)
    assert len(pairs) == len(weights.normed)
    assert step.launches[0][2][1] is pairs[0][0]
    DecodeStep(weights, state, 4)
    assert all(a is b for now, old in zip(weights.pairs, pairs, strict=True) for a, b in zip(now, old, strict=True))


@pytest.mark.parametrize("inference", [False, True])
def test_refresh_updates_pairs_in_place(device, inference):
    model = build("v0", device)
    weights = Weights(model.config, model.weights())
    with torch.inference_mode(inference):
        DecodeStep(weights, SlotState(model.config, 2, model.device), 2)
    held = [(both, factor, both.clone()) for both, factor in weights.pairs]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.rand_like(p) * 1e6)  # beyond float16
    weights.refresh()
    for (both, factor, old), (now, _), (product, _) in zip(held, weights.pairs, weights.normed, strict=True):
        assert now is both
        assert not both.equal(old)
        torch.testing.assert_close(
            (both[0].float() + both[1].float() / LOW) * factor[:, None], product, rtol=1e-6, atol=0
        )


def test_which_kernel_computes_a_matmul(device, monkeypatch):
    def kernels_of(C, d_ff, shared, V=20):
        monkeypatch.setattr(step, "_shared_memory", lambda _: shared)
        model = build("v0", device, V=V, L=1, T=8, C=C, d_ff=d_ff)
        launches = DecodeStep(
            Weights(model.config, model.weights()), SlotState(model.config, 2, model.device), 2
        ).launches
        return [
            (kernel.__name__.removesuffix("_kernel"), options.get("SPLIT"), options.get("PIECES"))
            for kernel, _, _, options in launches
            if "BK" in options
        ]

    if device == "cpu":  # the stand-ins have one name
        for name in ("lean", "deep"):
            monkeypatch.setattr(getattr(plain_kernels.kernels, f"{name}_kernel"), "__name__", f"{name}_kernel")
    paired, deep, head = ("paired", 4, None), ("deep", 8, None), ("paired", 4, None)
    assert kernels_of(192, 768, 166912) == [paired, ("lean", 4, 1), paired, ("lean", 8, 2), head]
    assert kernels_of(192, 2048, 166912) == [paired, ("lean", 4, 1), paired, ("lean", 8, 4), head]
    assert kernels_of(192, 2049, 166912) == [paired, ("lean", 4, 1), paired, deep, head]
    assert kernels_of(768, 1024, 166912)[:4] == [("paired", 8, None), ("lean", 8, 1)] * 2
    assert kernels_of(768, 1024, 101376) == [deep, ("lean", 8, 2), deep, ("lean", 8, 2), deep]  # C columns do not fit
    lean, wide = ("lean", 4, 1), ("wide", None, None)
    assert kernels_of(96, 96, WIDE_SHARED, V=WIDE) == [paired, lean, paired, lean, wide]
    assert kernels_of(96, 96, WIDE_SHARED, V=WIDE - 1) == [paired, lean, paired, lean, head]
    assert kernels_of(96, 96, WIDE_SHARED - 1, V=WIDE) == [paired, lean, paired, lean, head]
    assert kernels_of(96, 4096, WIDE_SHARED)[2] == paired  # only the head
    assert kernels_of(768, 1024, 101376, V=WIDE)[-1] == deep  # no pairs


@pytest.mark.parametrize("kind", ["v1", *LONG])
@pytest.mark.parametrize("batch", [1, 2, 32])
@torch.inference_mode()
def test_grids(device, kind, batch):
    model = build(kind, device, L=1, T=8)
    step = DecodeStep(Weights(model.config, model.weights()), SlotState(model.config, batch, model.device), batch)
    attend = step.launches[1][3]
    assert attend["EARLY"] == (batch > 1)  # with one row qkv may start beside the sampling before it
    for kernel, grid, args, options in step.launches:
        if "M" not in options:
            continue
        N, rows, parts, epilogue = args[5], args[7], args[8], args[11]
        assert grid == (-(-rows // options["M"]), -(-N // options["BN"]))
        if epilogue == ADD:
            assert grid[1] == parts  # each program writes one part of the sums
        elif kernel.__name__ != "wide_kernel":
            assert options["M"] == options["BN"] == TILE


@pytest.mark.parametrize("kind", ["v0", "v1", *LONG])
@torch.inference_mode()
def test_logits_of_a_row_do_not_depend_on_other_rows(device, kind):
    model = build(kind, device)
    weights, C = Weights(model.config, model.weights()), model.config
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(C.T - 8, (41,), generator=g, dtype=torch.int32)
    tokens = torch.randint(C.V, (41,), generator=g)
    seen = []
    for batch, row in ((2, 0), (2, 1), (8, 5), (64, 40)):
        state = SlotState(model.config, 41, model.device)
        cache = torch.randn(state.cache[:, 0].shape, generator=torch.Generator().manual_seed(2))
        state.cache.copy_(cache[:, None] * torch.linspace(1, 2, 42)[None, :, None, None, None, None])
        state.lengths[:41], state.tokens[:41] = lengths.to(device), tokens.to(device)
        step = DecodeStep(weights, state, batch)
        slots = [slot for slot in range(41) if slot != 7][: min(batch, 41) - 1]
        step.load([*slots[:row], 7, *slots[row:]])
        logits = []
        for _ in range(3):
            step()
            logits.append(step.logits[row].clone())
        seen.append(torch.stack(logits))
    for other in seen[1:]:
        if device == "cuda":  # every bit
            assert other.equal(seen[0])
        torch.testing.assert_close(other, seen[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [*KINDS, *LONG])
@pytest.mark.parametrize("batch", [1, 2, 5, 33])
@torch.inference_mode()
def test_logits_of_ragged_rows_are_the_models(device, kind, batch):
    model = build(kind, device)
    C = model.config
    state = SlotState(model.config, batch + 2, model.device)
    step = DecodeStep(Weights(model.config, model.weights()), state, power(batch))
    prompts = [[(11 * row + 3 * j) % C.V for j in range(1 + 13 * row % (C.T - 4))] for row in range(batch)]
    slots = [(row + 2) % (batch + 2) for row in range(batch)]  # slots in another order than the rows
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


def halves(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of float16 as in `Weights.paired`."""
    both, factor = w.new_empty((2, *w.shape), dtype=torch.float16), w.new_empty(len(w))
    _pair(w, both, factor)
    return both, factor


def linear_case(rows: int, N: int, K: int, norm: int, epilogue: int):
    """The arguments of a matmul twice: for the kernel and for the reference."""
    torch.manual_seed(rows * N + K + norm)
    parts = -(-N // COLUMNS)
    x = torch.randn(rows, K, device="cuda") * 2 + 0.5
    w = torch.randn(N, K, device="cuda") / K**0.5
    out = torch.randn(rows, N // 2 if epilogue == SWIGLU else N, device="cuda")
    moments = torch.zeros(rows, parts, 2, device="cuda")
    moments[:, 0, 0], moments[:, 0, 1] = x.sum(1), x.square().sum(1)
    return [(x, w, w.sum(1), out.clone(), moments.clone(), N, K, rows, parts, 1e-5, norm, epilogue) for _ in range(2)]


def multiply(kernel: str, args: tuple, **extra: bool) -> None:
    """Launch a kernel for at most 128 columns of x."""
    kernels = step.triton_kernels()
    N, K, rows, parts = args[5:9]
    BN = COLUMNS if args[11] == ADD else TILE
    grid = (-(-rows // TILE), -(-N // BN))
    options = {"M": TILE, "BN": BN, "SPLIT": 4, "num_warps": 4, **extra}
    if kernel == "vector":
        kernels.vector_kernel[(-(-N // 4),)](*args, BN=4, BK=128, num_warps=4, **extra)
    elif kernel == "paired":
        pairs = args[0], *halves(args[1]), *args[3:]
        kernels.paired_kernel[grid](*pairs, BK=32, PARTS=power(parts), maxnreg=168, **options)
    elif kernel == "wide":
        pairs = args[0], *halves(args[1]), *args[3:]
        grid = (-(-rows // WIDE_TILE["M"]), -(-N // WIDE_TILE["BN"]))
        kernels.wide_kernel[grid](*pairs, PARTS=power(parts), **WIDE_TILE, **extra)
    elif kernel == "lean":
        kernels.lean_kernel[grid](*args, BK=32, PIECES=1, **options)
    elif kernel == "pieces":
        options |= {"SPLIT": 2, "num_warps": 2}
        kernels.lean_kernel[grid](*args, BK=16, PIECES=-(-K // 32), **options)
    else:
        kernels.deep_kernel[grid](*args, BK=16, STAGES=3, PARTS=power(parts), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("epilogue", [STORE, GELU, SWIGLU, ADD])
@pytest.mark.parametrize("norm", [0, 1, 2])
@pytest.mark.parametrize(
    ("kernel", "rows"),
    [("vector", 1), ("deep", 33), ("pieces", 2), ("pieces", 33)]
    + [(kernel, rows) for kernel in ("paired", "wide", "lean") for rows in (2, 16, 45)],
)
def test_matmuls(kernel, rows, norm, epilogue, pdl):
    if pdl and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs sm_90")
    if norm and epilogue == ADD and kernel != "vector":
        pytest.skip("never launched: a program would read the sums that another writes")
    if (norm > 0) != (kernel in ("paired", "wide")) and kernel not in ("vector", "deep"):
        pytest.skip("two are for products after a norm, the others are not")
    if kernel == "wide" and epilogue != STORE:
        pytest.skip("a head stores")
    for N, K in ((96, 96), (250, 72), (48, 128), (1100, 128), (34, 30)):
        mine, reference = linear_case(rows, N, K, norm, epilogue)
        extra = {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
        multiply(kernel, mine, **extra)
        plain_kernels.linear(*reference)
        torch.testing.assert_close(mine[3], reference[3], atol=2e-5, rtol=2e-5)
        if epilogue == ADD and kernel != "vector":
            torch.testing.assert_close(mine[4].sum(1), reference[4].sum(1), atol=1e-2, rtol=1e-4)


def sizes(K: int, count: int) -> torch.Tensor:
    """Rows of K numbers from 1e-4 to 1e4, in different orders."""
    return torch.stack([10.0 ** (8 * torch.rand(count) - 4) for _ in range(K)], 1).to("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "norm"), [("paired", 1), ("paired", 2), ("wide", 1), ("wide", 2), ("lean", 0), ("pieces", 0)]
)
@pytest.mark.parametrize("K", [128, 100, 72])
def test_matmuls_of_numbers_of_any_size(kernel, norm, K):
    """Every result is within the rounding error of a float32 sum of its terms."""
    rows, N = 19, 70
    (x, w, shift, out, moments, *numbers), _ = linear_case(rows, N, K, norm, STORE)
    x *= 10.0 ** torch.linspace(-6, 6, rows, device="cuda")[:, None]
    x[4] *= sizes(K, 1)[0]
    x[9, : K // 2] = 0
    x[11, 3] = 1e6  # much larger than the others
    x[13] = 0
    w *= 10.0 ** torch.linspace(-15, 15, N, device="cuda")[:, None]
    w[20:40] *= sizes(K, 20)
    moments[:, 0, 0], moments[:, 0, 1] = x.sum(1), x.square().sum(1)
    multiply(kernel, (x, w, shift, out, moments, *numbers), PDL=False)
    value, matrix = x.double(), w.double()
    if norm == 1:
        value = torch.nn.functional.layer_norm(value, (K,), eps=1e-5)
    elif norm == 2:
        value = torch.nn.functional.rms_norm(value, (K,), eps=1e-5)
    assert ((out - value @ matrix.t()).abs() <= 3e-6 * (value.abs() @ matrix.abs().t()) + 1e-30).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["paired", "wide", "deep"])
@pytest.mark.parametrize("K", [128, 100])
def test_a_row_with_a_mean_far_above_its_deviation_stays_finite(kernel, K):
    rows, N = 32, 40
    (x, w, shift, out, moments, *numbers), _ = linear_case(rows, N, K, 1, STORE)
    x *= 10.0 ** torch.linspace(-4, 5, rows, device="cuda")[:, None]
    x += 1e6
    x[7] = 1e6
    moments[:, 0, 0], moments[:, 0, 1] = x.sum(1), x.square().sum(1)
    multiply(kernel, (x, w, shift, out, moments, *numbers), PDL=False)
    assert out.isfinite().all()
    assert out.abs().max() <= 2 * K * w.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize(("early", "stages"), [(False, 3), (True, 1)])
@pytest.mark.parametrize("span", [64, 128, 512])
@pytest.mark.parametrize(("D", "rope"), [(64, True), (24, True), (32, False)])
@pytest.mark.parametrize(("H", "G"), [(3, 3), (6, 2), (4, 1)])
def test_attention(H, G, D, rope, span, early, stages):
    torch.manual_seed(D + span)
    B, T, slots = 9, 512, 12
    cache = torch.randn(slots + 1, 2, G, T, D, device="cuda")
    lengths = torch.tensor([0, 1, 63, 64, 65, 127, 128, 300, 511, 512, 5, 17, 0], device="cuda", dtype=torch.int32)
    rows = torch.tensor([11, 0, 1, 2, 3, 4, 7, 8, 9], device="cuda", dtype=torch.int32)
    angles = torch.rand(T, D // 2, device="cuda") * 6
    qkv = torch.randn(B, (H + 2 * G) * D, device="cuda")
    splits = power(-(-T // span))
    results = []
    for run in (step.triton_kernels().attend_kernel, plain_kernels.kernels.attend_kernel):
        mine, y = cache.clone(), torch.zeros(B, H * D, device="cuda")
        part, edges = torch.zeros(B, H, splits, D, device="cuda"), torch.zeros(B, H, splits, 2, device="cuda")
        arrived = torch.zeros(B * H, device="cuda", dtype=torch.int32)
        for _ in range(2):  # the counters of the programs are reset at the end
            tensors = (qkv, angles.sin(), angles.cos(), mine, part, edges, arrived, y, lengths, rows)
            args = (*tensors, T, H, G, span, D**-0.5)
            options = {"STAGES": stages, "ROPE": rope, "EARLY": early, "PDL": False, "num_warps": 4}
            run[(B, H, -(-T // span))](*args, D=D, DP=power(D), BS=64, SPLITS=splits, **options)
        results.append((y, mine))
    torch.testing.assert_close(results[0][0], results[1][0], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("V", [2, 100, 256, 5000, 16004, 50257])
@torch.inference_mode()
def test_sampling_is_that_of_plain_torch(V):
    model = build("v0", "cuda", V=V)
    B = 16
    state = SlotState(model.config, B, model.device)
    step = DecodeStep(Weights(model.config, model.weights()), state, B)
    step.slots.copy_(torch.arange(B))
    kernel, grid, args, constants = step.launches[-1]
    g = torch.Generator().manual_seed(V)
    filters = [
        Sampling(t, k, p, m)
        for t in (0.4, 1.5)
        for k in (None, 1, 7, 50)
        for p in (None, 0.3, 0.95)
        for m in (None, 0.05)
    ]
    for sampling in [*filters, Sampling(0.0, None)]:
        logits = (3 * torch.randn((B, V), generator=g)).cuda()
        logits[:, ::3] = logits[:, ::3].round()  # ties
        logits[:4] = (logits[:4] / 4).round()  # nearly all are ties, also between 0.0 and -0.0
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
