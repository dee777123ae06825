"""One token for every row of a batch on CUDA, as a captured graph: five kernels per layer, the head, the sampling.

Nothing returns to the host between two steps: the token is sampled on the device, its embedding is the next input, and
lengths, random numbers and sampling options of every slot are on the device too. So a graph may hold several steps, and
the host may launch the next before it has read the last.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from niels_gpt.config import ModelConfig
from niels_gpt.kernels.weights import ModelWeights

RING = 64
"""Steps whose tokens stay on the device."""
STOCK = 1024
"""Uniform random numbers per slot on the device."""

TILE = 16
"""Rows and columns of a matmul's output that one program computes."""
COLUMNS = 8
"""Columns of the residual stream that one program adds to; each program writes one part of the sums of a norm."""
STORE, GELU, SWIGLU, ADD = range(4)
"""Epilogues of a matmul."""
WARPS = 8, 64
"""Warps, and columns per warp, if K is processed in pieces."""
PIECES = 4
"""Pieces of K that fit into registers at once."""
LOW = 2048.0
"""Factor of the second float16 of a pair, which gives it the range of the first; the same as matmul.LOW."""
REGISTERS = 168
"""Registers per thread of paired_kernel: few enough that three programs of four warps share a multiprocessor."""
WIDE = 8192
"""Columns of a head from which on wide_kernel computes it."""
WIDE_TILE = {"M": 32, "BN": 128, "BK": 64, "STAGES": 3, "num_warps": 8}
"""Constants of wide_kernel."""
WIDE_SHARED = 90112
"""Bytes of shared memory that a program of wide_kernel uses."""

Hidden = Callable[[torch.Tensor], torch.Tensor]
Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]
"""Kernel, grid, arguments, constants."""


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def triton_kernels() -> Any:
    """The kernels by name. Imported here, because Triton is installed only with CUDA."""
    from niels_gpt.kernels.decoding import attention, matmul, sample

    names = ("vector_kernel", "paired_kernel", "wide_kernel", "lean_kernel", "deep_kernel")
    kernels = {name: getattr(matmul, name) for name in names}
    return SimpleNamespace(**kernels, attend_kernel=attention.attend_kernel, sample_kernel=sample.sample_kernel)


def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 101376)


class Weights:
    """A model's weights as the kernels read them.

    A matrix after a norm is multiplied by the norm's weight; rows of up and gate alternate. For more than one row these
    are also stored as pairs of float16, whose matmuls are faster. The other matrices are the model's own memory. The
    model itself is not referenced. `refresh` recomputes the copies after a change of the weights.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.norm_kind = 2 if weights.norm.kind == "rmsnorm" else 1
        self.eps = weights.norm.eps
        self.embedding, self.head = weights.embedding.detach(), weights.head.detach()
        self.positions = None if weights.positions is None else weights.positions.detach()
        unused = self.embedding
        self.sin = unused if weights.sin is None else weights.sin
        self.cos = unused if weights.cos is None else weights.cos
        self._sources: list[tuple[list[torch.Tensor], torch.Tensor]] = []  # matrices, norm before them
        self.normed: list[tuple[torch.Tensor, torch.Tensor]] = []  # matrix times norm, row sums
        self.plain: list[tuple[torch.Tensor, torch.Tensor]] = []  # out and down of each layer
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # of `normed`, from `paired`
        for block in weights.blocks:
            self._add([block.qkv], block.norm_attn.weight)
            self._add([block.up] if block.gate is None else [block.up, block.gate], block.norm_mlp.weight)
            self.plain.append((block.out.detach(), block.down.detach()))
        self._add([weights.head], weights.norm.weight)
        self.refresh()

    def _add(self, matrices: list[torch.Tensor], norm: torch.Tensor) -> None:
        self._sources.append(([matrix.detach() for matrix in matrices], norm.detach()))
        N, K = len(matrices) * matrices[0].shape[0], matrices[0].shape[1]
        self.normed.append((norm.new_empty((N, K), requires_grad=False), norm.new_empty(N, requires_grad=False)))

    def paired(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """`normed` as pairs of float16 (2, N, K), and a factor for each of the N rows; see `_pair`.

        Computed at the first call: a batch of one row does not use them.
        """
        if not self.pairs:
            for folded, _ in self.normed:
                both = folded.new_empty((2, *folded.shape), dtype=torch.float16)
                self.pairs.append((both, folded.new_empty(len(folded))))
                _pair(folded, *self.pairs[-1])
        return self.pairs

    @torch.inference_mode()  # inside it, both inference tensors and normal ones may be written
    def refresh(self) -> None:
        """Recompute everything derived from the weights."""
        for (matrices, norm), (folded, sums) in zip(self._sources, self.normed, strict=True):
            for i, matrix in enumerate(matrices):
                torch.mul(matrix, norm, out=folded[i :: len(matrices)])
            torch.sum(folded, dim=1, out=sums)
        for (folded, _), pair in zip(self.normed, self.pairs, strict=False):  # empty before `paired`
            _pair(folded, *pair)


@torch.inference_mode()
def _pair(matrix: torch.Tensor, both: torch.Tensor, factor: torch.Tensor) -> None:
    """Write a matrix (N, K) as factor[n] (both[0] + both[1] / LOW), with 22 bits of every element.

    The factor of a row is the power of two that scales its absolute maximum to 2^14..2^15: every finite element fits
    float16, and much smaller ones keep their bits. A row with an infinity or a NaN becomes NaN.
    """
    peak = torch.linalg.vector_norm(matrix, torch.inf, dim=1).clamp_(min=2.0**-100)
    exponent = peak.view(torch.int32) & 0x7F800000
    torch.mul(exponent.view(torch.float32), 2.0**-14, out=factor)
    rest = matrix / factor[:, None]
    both[0] = rest
    rest -= both[0]
    both[1] = rest.mul_(LOW)


class SlotState:
    """The state of every request while it is decoded. Idle rows of a batch use the extra slot number `slots`."""

    def __init__(self, config: ModelConfig, slots: int, device: torch.device) -> None:
        self.slots = slots
        shape = (config.L, slots + 1, 2, config.kv_heads, config.T, config.D)
        self.cache = torch.zeros(shape, device=device)  # as KVCache.buffer
        self.lengths = torch.zeros(slots + 1, device=device, dtype=torch.int32)  # tokens in the cache
        self.tokens = torch.zeros(slots + 1, device=device, dtype=torch.int64)  # the next input
        self.uniform = torch.zeros((slots + 1, STOCK), device=device, dtype=torch.float64)
        self.drawn = torch.zeros(slots + 1, device=device, dtype=torch.int32)  # random numbers used
        self.numbers = torch.zeros((slots + 1, 3), device=device, dtype=torch.float64)  # temperature, top_p, min_p
        self.counts = torch.full((slots + 1,), config.V, device=device, dtype=torch.int32)  # top_k


class DecodeRows:
    """The rows of a batch, each a slot of the state or idle. `ring` (RING, batch) receives their tokens by step."""

    launches: list[Launch]

    def __init__(self, weights: Weights, state: SlotState, batch: int) -> None:
        self.weights, self.state, self.batch = weights, state, batch
        config, self.device = weights.config, weights.embedding.device
        self.slots = torch.full((batch,), state.slots, device=self.device, dtype=torch.int32)
        self.ring = torch.zeros((RING, batch), device=self.device, dtype=torch.int64)
        self.clock = torch.zeros(batch, device=self.device, dtype=torch.int32)
        self.h = torch.zeros((batch, config.C), device=self.device)
        self.parts = -(-config.C // COLUMNS)
        self.moments = torch.zeros((batch, self.parts, 2), device=self.device)  # partial sums over h and h^2
        self.logits = torch.zeros((batch, len(weights.head)), device=self.device)
        self.shared = _shared_memory(self.device)
        # Programmatic dependent launch: a kernel may start while the one before it ends.
        self.pdl = torch.cuda.get_device_capability(self.device)[0] >= 9
        self.extra: dict[str, Any] = {"PDL": True, "launch_pdl": True} if self.pdl else {"PDL": False}

    def sampling(self) -> Launch:
        """The launch that samples the next token from the logits and writes its embedding into h."""
        w, s, V, C = self.weights, self.state, len(self.weights.head), self.weights.config.C
        VP = power(V)
        scratch = torch.zeros((self.batch, VP), device=self.device, dtype=torch.float64)
        args = (
            self.logits, w.embedding, w.embedding if w.positions is None else w.positions, self.h, self.moments,
            s.lengths, s.tokens, self.slots, self.ring, self.clock, s.uniform, s.drawn, s.numbers, s.counts, scratch,
            V, w.config.T, C, self.parts, RING, s.slots, STOCK,
        )  # fmt: skip
        constants = {
            "VP": VP, "BITS": VP.bit_length() - 1, "GROUP": 1 << VP.bit_length() // 2, "CP": power(C),
            "PARTS": power(self.parts), "LEARNED": w.positions is not None,
            "num_warps": 4 if VP <= 1024 else (8 if VP <= 4096 else 32),
        }  # fmt: skip
        return triton_kernels().sample_kernel, (self.batch,), args, constants | self.extra

    def assign(self, slots: list[int]) -> None:
        """Assign the first rows to these slots; the others are idle."""
        rows = slots + [self.state.slots] * (self.batch - len(slots))
        self.slots.copy_(torch.tensor(rows, dtype=torch.int32), non_blocking=True)

    def __call__(self) -> None:
        for kernel, grid, args, options in self.launches:
            kernel[grid](*args, **options)

    def compile(self) -> None:
        """Compile all kernels in parallel threads. Nothing runs: the grids are empty."""
        from triton.runtime import driver  # type: ignore[import-not-found,unused-ignore]

        torch.cuda.set_device(self.device)
        driver.active.get_current_target()  # initialize once, not in every thread
        chosen = {}
        for kernel, _, args, options in self.launches:
            numbers = [
                a % 16 == 0
                for a, p in zip(args, kernel.params, strict=False)
                if type(a) is int and not p.do_not_specialize
            ]
            chosen[kernel.__name__, str(options), str(numbers)] = kernel, args, options

        def make(kernel: Any, args: Any, options: Any) -> None:
            torch.cuda.set_device(self.device)
            kernel[(0,)](*args, **options)

        with ThreadPoolExecutor(len(chosen)) as pool:
            for done in [pool.submit(make, *each) for each in chosen.values()]:
                done.result()

    def capture(self, steps: int) -> torch.cuda.CUDAGraph:
        """Capture several steps as a graph; nothing is decoded by this."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(steps):
                self()
        return graph


class DecodeStep(DecodeRows):
    """A step of `batch` rows with the KV cache."""

    def __init__(self, weights: Weights, state: SlotState, batch: int) -> None:
        super().__init__(weights, state, batch)
        kernels = triton_kernels()
        w, s, config = weights, state, weights.config
        C, H, G, D, T = config.C, config.H, config.kv_heads, config.D, config.T
        qkv, y, u = (torch.zeros((batch, n), device=self.device) for n in ((H + 2 * G) * D, H * D, config.d_ff))
        # The keys of a row are split among programs.
        span = max(256, power(-(-T // 32)))
        splits = power(-(-T // span))
        part, edges = (torch.zeros((batch, H, splits, n), device=self.device) for n in (D, 2))
        arrived = torch.zeros(batch * H, device=self.device, dtype=torch.int32)
        self.launches = []
        # Warps, and columns per warp: enough that a warp holds its share of C columns in registers.
        split = max(4, power(C) // 128)
        self._warps = split, max(16, power(C) // split)
        fits = 4 * split * TILE * (2 * self._warps[1] + TILE) <= self.shared
        if not fits:
            self._warps = WARPS
        matrices = iter(w.paired() if fits and batch > 1 else w.normed)
        for cache, (out, down) in zip(s.cache, w.plain, strict=True):
            self._linear(self.h, *next(matrices), qkv, STORE, norm=True)
            args = (qkv, w.sin, w.cos, cache, part, edges, arrived, y, s.lengths, self.slots, T, H, G, span, D**-0.5)
            constants = {"D": D, "DP": power(D), "BS": 64, "SPLITS": splits, "ROPE": w.positions is None}
            # After vector_kernel the next kernel starts before that one has waited: it must not read early.
            constants |= {"EARLY": batch > 1}
            block = 2 * 4 * constants["BS"] * power(D)  # bytes of keys and values; up to two blocks are prefetched
            stages = 1 + min(2, (self.shared - 2048) // block)
            constants |= {"STAGES": stages, "num_warps": 8} if batch == 1 else {"STAGES": 1, "num_warps": 4}
            self.launches.append((kernels.attend_kernel, (batch, H, -(-T // span)), args, constants | self.extra))
            self._linear(y, out, out, self.h, ADD)
            self._linear(self.h, *next(matrices), u, SWIGLU if config.mlp == "swiglu" else GELU, norm=True)
            self._linear(u, down, down, self.h, ADD)
        self._linear(self.h, *next(matrices), self.logits, STORE, norm=True)
        self.launches.append(self.sampling())

    def _linear(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        shift: torch.Tensor,
        out: torch.Tensor,
        epilogue: int,
        *,
        norm: bool = False,
    ) -> None:
        """Append the launch of out = epilogue(w norm(x))."""
        kernels = triton_kernels()
        assert not (norm and epilogue == ADD)  # a norm reads the sums that an addition writes
        B, C, (N, K) = self.batch, self.weights.config.C, w.shape[-2:]
        kind = self.weights.norm_kind if norm else 0
        args = (x, w, shift, out, self.moments, N, K, B, self.parts, self.weights.eps, kind, epilogue)
        if B == 1:
            BK = power(C)
            BN = 4 if N <= 4096 else min(16, max(4, 8192 // BK))
            constants = {"BN": BN, "BK": BK, "num_warps": 4 if C <= 2048 else 8}
            self.launches.append((kernels.vector_kernel, (-(-N // BN),), args, constants | self.extra))
            return
        # Nothing below may depend on the number of rows: kernels are compiled before it is known.
        M, BN = TILE, COLUMNS if epilogue == ADD else TILE
        split, BK = self._warps
        if split * BK < K:
            split, BK = WARPS
        pieces = -(-K // (split * BK))
        constants = {"M": M, "BN": BN, "BK": BK, "SPLIT": split, "num_warps": split}
        if w.dtype == torch.float16 and out is self.logits and N >= WIDE and self.shared >= WIDE_SHARED:
            kernel = kernels.wide_kernel  # only for the head: attend_kernel after it would start too early
            M, BN = WIDE_TILE["M"], WIDE_TILE["BN"]
            constants = WIDE_TILE | {"PARTS": power(self.parts)}
        elif w.dtype == torch.float16:
            kernel = kernels.paired_kernel
            constants |= {"PARTS": power(self.parts), "maxnreg": REGISTERS}
        elif not norm and pieces <= PIECES:
            kernel = kernels.lean_kernel
            constants |= {"PIECES": pieces}
        else:
            kernel = kernels.deep_kernel
            constants |= {"PARTS": power(self.parts), "STAGES": 2}
        self.launches.append((kernel, (-(-B // M), -(-N // BN)), args, constants | self.extra))

    def load(self, slots: list[int]) -> None:
        """Assign the rows to these slots and load their next input. Not part of a step."""
        self.assign(slots)
        at = self.slots.long()
        torch.index_select(self.weights.embedding, 0, self.state.tokens[at], out=self.h)
        if self.weights.positions is not None:
            self.h += self.weights.positions[self.state.lengths[at].long()]
        exact = self.h.double()  # in float32 the last bit of the sums would depend on the number of rows
        self.moments.zero_()
        self.moments[:, 0, 0] = exact.sum(1)
        self.moments[:, 0, 1] = exact.square().sum(1)


class WindowStep(DecodeRows):
    """A step of `batch` rows past T tokens: each row recomputes its last T tokens."""

    def __init__(self, hidden: Hidden, weights: Weights, state: SlotState, batch: int) -> None:
        """`hidden` maps ids (batch, T) to the input of the head (batch, T, C)."""
        super().__init__(weights, state, batch)
        self.ids = torch.zeros((batch, weights.config.T), device=self.device, dtype=torch.int64)
        self.launches = [self.sampling()]
        self._hidden: Hidden | None = hidden

    def load(self, slots: list[int], windows: list[list[int]], drawn: list[int]) -> None:
        """Assign the rows to these slots; `windows` are their last T tokens, `drawn` the random numbers they used."""
        state = self.state
        self.assign(slots)
        self.ids[: len(slots)] = torch.tensor(windows).to(self.device)
        at = self.slots[: len(slots)].long()
        state.drawn[at] = torch.tensor(drawn, dtype=torch.int32).to(self.device)
        state.lengths[at] = self.weights.config.T

    def __call__(self) -> None:
        assert self._hidden is not None
        torch.mm(self._hidden(self.ids)[:, -1], self.weights.head.t(), out=self.logits)
        super().__call__()
        self.ids[:, :-1] = self.ids[:, 1:].clone()
        self.ids[:, -1] = self.state.tokens[self.slots.long()]

    def capture(self, steps: int) -> torch.cuda.CUDAGraph:
        """Capture, once: afterwards the model is not referenced."""
        self()  # libraries initialize at the first call, which cannot be captured
        graph = super().capture(steps)
        self._hidden = None
        return graph
