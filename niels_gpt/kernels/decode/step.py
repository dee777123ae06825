"""One token for every row of a batch on CUDA, as a captured graph: five kernels per layer, the head, the choice.

Nothing goes back to the host between two steps: a token is chosen on the device, its embedding is the next input, and
lengths, drawn numbers and settings of every slot lie there too. So a graph may hold several steps, and the host may
launch before it has read.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from niels_gpt.config import ModelConfig
from niels_gpt.kernels.weights import ModelWeights

RING = 64
"""Steps whose tokens are kept on the device."""
STOCK = 1024
"""Uniform numbers of a slot that lie on the device."""

TILE = 16
"""Rows and columns of a product that are one program's."""
COLUMNS = 8
"""Columns of the residual stream that one program adds to: so many make a part of the sums of a norm."""
STORE, GELU, SWIGLU, ADD = range(4)
"""What becomes of a product."""
WARPS = 8, 64
"""Where K is divided into pieces: warps, and columns of each in a piece."""
PIECES = 4
"""So many pieces they can hold in registers at once."""
LOW = 2048.0
"""The second of a pair of float16 is multiplied by this, to have the range of the first; decode_products.LOW."""
REGISTERS = 168
"""Of a thread of paired_kernel: so few that three programs of four warps share a multiprocessor."""
WIDE = 8192
"""A head of so many columns has wide_kernel."""
WIDE_TILE = {"M": 32, "BN": 128, "BK": 64, "STAGES": 3, "num_warps": 8}
"""Its constants."""
WIDE_SHARED = 90112
"""Bytes of shared memory that a program of it takes with these."""

Hidden = Callable[[torch.Tensor], torch.Tensor]
Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]
"""Kernel, grid, arguments, constants."""


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def _shared_memory(device: torch.device) -> int:
    """The bytes of it that a program may have."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 101376)


class Weights:
    """A model's weights as the kernels read them: what follows a norm holds its weight too, and up and gate take turns.

    For more than one row that is kept as pairs of float16 too, whose products are faster. The rest is the model's own
    memory. Does not keep the model. `refresh` takes over weights that have changed since.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.norm_kind = 2 if weights.norm.rms else 1
        self.eps = weights.norm.eps
        self.embedding, self.head = weights.embedding.detach(), weights.head.detach()
        self.positions = None if weights.positions is None else weights.positions.detach()
        unused = self.embedding
        self.sin = unused if weights.sin is None else weights.sin
        self.cos = unused if weights.cos is None else weights.cos
        self._sources: list[tuple[list[torch.Tensor], torch.Tensor]] = []  # matrices, the norm before them
        self.normed: list[tuple[torch.Tensor, torch.Tensor]] = []  # their product, and the sums of its rows
        self.plain: list[tuple[torch.Tensor, torch.Tensor]] = []  # out and down of every layer
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # `normed` again, once `paired` was called
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
        """`normed` as pairs of float16 (2, N, K), and a factor for each of their N rows; see `_pair`.

        Made at the first call: a batch of one row has no need of them.
        """
        if not self.pairs:
            for product, _ in self.normed:
                both = product.new_empty((2, *product.shape), dtype=torch.float16)
                self.pairs.append((both, product.new_empty(len(product))))
                _pair(product, *self.pairs[-1])
        return self.pairs

    @torch.inference_mode()  # which may write to what was made in it, and to what was not
    def refresh(self) -> None:
        """Make anew what is derived from the weights."""
        for (matrices, norm), (product, sums) in zip(self._sources, self.normed, strict=True):
            for i, matrix in enumerate(matrices):
                torch.mul(matrix, norm, out=product[i :: len(matrices)])
            torch.sum(product, dim=1, out=sums)
        for (product, _), pair in zip(self.normed, self.pairs, strict=False):  # none before `paired`
            _pair(product, *pair)


@torch.inference_mode()
def _pair(matrix: torch.Tensor, both: torch.Tensor, factor: torch.Tensor) -> None:
    """Write a matrix (N, K) as factor[n] (both[0] + both[1] / LOW), with 22 bits of every number.

    The factor of a row is the power of two that puts its largest number between 2^14 and 2^15: whatever is finite fits
    float16, and what is much smaller keeps its bits. Of a row with an infinity or a NaN only NaN is left.
    """
    peak = torch.linalg.vector_norm(matrix, torch.inf, dim=1).clamp_(min=2.0**-100)
    exponent = peak.view(torch.int32) & 0x7F800000
    torch.mul(exponent.view(torch.float32), 2.0**-14, out=factor)
    rest = matrix / factor[:, None]
    both[0] = rest
    rest -= both[0]
    both[1] = rest.mul_(LOW)


class SlotState:
    """What is kept of every request while it is decoded. Slot number `slots` is nobody's: idle rows live there."""

    def __init__(self, config: ModelConfig, slots: int, device: torch.device) -> None:
        self.slots = slots
        shape = (config.L, slots + 1, 2, config.H, config.T, config.D)
        self.cache = torch.zeros(shape, device=device)  # as KVCache.buffer
        self.lengths = torch.zeros(slots + 1, device=device, dtype=torch.int32)  # tokens in the cache
        self.tokens = torch.zeros(slots + 1, device=device, dtype=torch.int64)  # the next input
        self.uniform = torch.zeros((slots + 1, STOCK), device=device, dtype=torch.float64)
        self.drawn = torch.zeros(slots + 1, device=device, dtype=torch.int32)  # numbers used
        self.numbers = torch.zeros((slots + 1, 3), device=device, dtype=torch.float64)  # temperature, top_p, min_p
        self.counts = torch.full((slots + 1,), config.V, device=device, dtype=torch.int32)  # top_k


class DecodeRows:
    """Rows of a batch, each a slot of a state or idle. `ring` (RING, batch) takes their tokens, step by step."""

    launches: list[Launch]

    def __init__(self, weights: Weights, state: SlotState, batch: int) -> None:
        self.weights, self.state, self.batch = weights, state, batch
        config, self.device = weights.config, weights.embedding.device
        self.slots = torch.full((batch,), state.slots, device=self.device, dtype=torch.int32)
        self.ring = torch.zeros((RING, batch), device=self.device, dtype=torch.int64)
        self.clock = torch.zeros(batch, device=self.device, dtype=torch.int32)
        self.h = torch.zeros((batch, config.C), device=self.device)
        self.parts = -(-config.C // COLUMNS)
        self.moments = torch.zeros((batch, self.parts, 2), device=self.device)  # sums over h and its squares, in parts
        self.logits = torch.zeros((batch, config.V), device=self.device)
        self.shared = _shared_memory(self.device)
        # A kernel may come up while the one before it ends.
        self.pdl = torch.cuda.get_device_capability(self.device)[0] >= 9
        self.extra: dict[str, Any] = {"PDL": True, "launch_pdl": True} if self.pdl else {"PDL": False}

    def choice(self) -> Launch:
        """From the logits to the next token, and its embedding into h."""
        from niels_gpt.kernels.decode import triton_kernels as kernels

        w, s, V, C = self.weights, self.state, self.weights.config.V, self.weights.config.C
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
        return kernels.choose_kernel, (self.batch,), args, constants | self.extra

    def seat(self, slots: list[int]) -> None:
        """Let the rows be these slots; the others are idle."""
        rows = slots + [self.state.slots] * (self.batch - len(slots))
        self.slots.copy_(torch.tensor(rows, dtype=torch.int32), non_blocking=True)

    def __call__(self) -> None:
        for kernel, grid, args, options in self.launches:
            kernel[grid](*args, **options)

    def compile(self) -> None:
        """Compile what is not yet, all kernels at once, in threads. Launches nothing: the grids are empty."""
        from triton.runtime import driver  # type: ignore[import-not-found,unused-ignore]

        torch.cuda.set_device(self.device)
        driver.active.get_current_target()  # set up once, not by every thread
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
        """A graph of several steps; nothing is decoded by this."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(steps):
                self()
        return graph


class DecodeStep(DecodeRows):
    """A step of `batch` rows from the cache."""

    def __init__(self, weights: Weights, state: SlotState, batch: int) -> None:
        super().__init__(weights, state, batch)
        from niels_gpt.kernels.decode import triton_kernels as kernels

        w, s, config = weights, state, weights.config
        C, H, D, T = config.C, config.H, config.D, config.T
        qkv, y, u = (torch.zeros((batch, n), device=self.device) for n in (3 * C, C, config.d_ff))
        # Keys of a row are divided among programs, more of them where there are few rows.
        span = max(256, power(-(-T // 32)))
        splits = power(-(-T // span))
        part, edges = (torch.zeros((batch, H, splits, n), device=self.device) for n in (D, 2))
        arrived = torch.zeros(batch * H, device=self.device, dtype=torch.int32)
        self.launches = []
        # Warps, and columns of each: so many that one can hold what it multiplies of C columns in registers.
        split = max(4, power(C) // 128)
        self._warps = split, max(16, power(C) // split)
        whole = 4 * split * TILE * (2 * self._warps[1] + TILE) <= self.shared
        if not whole:
            self._warps = WARPS
        products = iter(w.paired() if whole and batch > 1 else w.normed)
        for kept, (out, down) in zip(s.cache, w.plain, strict=True):
            self._linear(self.h, *next(products), qkv, STORE, norm=True)
            args = (qkv, w.sin, w.cos, kept, part, edges, arrived, y, s.lengths, self.slots, T, H, span, D**-0.5)
            constants = {"D": D, "DP": power(D), "BS": 64, "SPLITS": splits, "ROPE": w.positions is None}
            # What follows vector_kernel comes up before that has waited, so nothing may be read early.
            constants |= {"EARLY": batch > 1}
            block = 2 * 4 * constants["BS"] * power(D)  # bytes of keys and values; up to two are on their way
            stages = 1 + min(2, (self.shared - 2048) // block)
            constants |= {"STAGES": stages, "num_warps": 8} if batch == 1 else {"STAGES": 1, "num_warps": 4}
            self.launches.append((kernels.attend_kernel, (batch, H, -(-T // span)), args, constants | self.extra))
            self._linear(y, out, out, self.h, ADD)
            self._linear(self.h, *next(products), u, SWIGLU if config.mlp == "swiglu" else GELU, norm=True)
            self._linear(u, down, down, self.h, ADD)
        self._linear(self.h, *next(products), self.logits, STORE, norm=True)
        self.launches.append(self.choice())

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
        """Add out = epilogue(w norm(x)) to the launches."""
        from niels_gpt.kernels.decode import triton_kernels as kernels

        assert not (norm and epilogue == ADD)  # the sums that a norm reads are those that an addition writes
        B, C, (N, K) = self.batch, self.weights.config.C, w.shape[-2:]
        kind = self.weights.norm_kind if norm else 0
        args = (x, w, shift, out, self.moments, N, K, B, self.parts, self.weights.eps, kind, epilogue)
        if B == 1:
            BK = power(C)
            BN = 4 if N <= 4096 else min(16, max(4, 8192 // BK))
            constants = {"BN": BN, "BK": BK, "num_warps": 4 if C <= 2048 else 8}
            self.launches.append((kernels.vector_kernel, (-(-N // BN),), args, constants | self.extra))
            return
        # Nothing here may depend on the number of rows: kernels are compiled before it is known.
        M, BN = TILE, COLUMNS if epilogue == ADD else TILE
        split, BK = self._warps
        if split * BK < K:
            split, BK = WARPS
        pieces = -(-K // (split * BK))
        constants = {"M": M, "BN": BN, "BK": BK, "SPLIT": split, "num_warps": split}
        if w.dtype == torch.float16 and out is self.logits and N >= WIDE and self.shared >= WIDE_SHARED:
            kernel = kernels.wide_kernel  # for the head alone: attend_kernel after it would come up too early
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
        """Seat these slots, and take up their next input. Not part of a step."""
        self.seat(slots)
        at = self.slots.long()
        torch.index_select(self.weights.embedding, 0, self.state.tokens[at], out=self.h)
        if self.weights.positions is not None:
            self.h += self.weights.positions[self.state.lengths[at].long()]
        exact = self.h.double()  # in float32 torch's order, and so the last bit, would depend on the number of rows
        self.moments.zero_()
        self.moments[:, 0, 0] = exact.sum(1)
        self.moments[:, 0, 1] = exact.square().sum(1)


class WindowStep(DecodeRows):
    """A step of `batch` rows past T: each from its last T tokens, all computed anew."""

    def __init__(self, hidden: Hidden, weights: Weights, state: SlotState, batch: int) -> None:
        """`hidden` maps ids (batch, T) to the input of the head (batch, T, C)."""
        super().__init__(weights, state, batch)
        self.ids = torch.zeros((batch, weights.config.T), device=self.device, dtype=torch.int64)
        self.launches = [self.choice()]
        self._hidden: Hidden | None = hidden

    def load(self, slots: list[int], windows: list[list[int]], drawn: list[int]) -> None:
        """Seat these slots, with their last T tokens and how many numbers each has used."""
        state = self.state
        self.seat(slots)
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
        """Once: the model is not kept."""
        self()  # what the libraries set up at first cannot be captured
        graph = super().capture(steps)
        self._hidden = None
        return graph
