"""One optimiser update, on one device or its share on one of many: forward, backward, clipping, step.

On CUDA the first updates run as they are written (compiled, if the run is long enough for that to pay); then one is
captured as a CUDA graph and replayed, so that nothing is left to do for Python but to hand over batches. A compile or a
capture that fails costs one line in the terminal and some speed, never the run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from niels_gpt.config import RunConfig
from niels_gpt.kernels.cpu import native
from niels_gpt.model.backend import Use, choose, use_backend
from niels_gpt.model.gpt import GPT
from niels_gpt.system.device import bf16_autocast, check_precision, emulates_bf16
from niels_gpt.system.processes import SINGLE_PROCESS, World
from niels_gpt.system.rng import derive_seed, set_seed
from niels_gpt.training.memory_limits import (
    NO_MEMORY,
    OutOfMemory,
    gib,
    is_out_of_memory,
    machine_memory,
    reporting_out_of_memory,
    weights_text,
)
from niels_gpt.training.optim.optimizer import set_lr
from niels_gpt.training.parallel.sharding import clip_gradients, is_sharded, without_exchange
from niels_gpt.training.tasks.base import Batch

COMPILE_FROM = 500
"""Updates of a run from which on compiling pays, where it is not asked for or forbidden."""
WARM_UP = 3
"""Updates before a capture: libraries choose their kernels and allocate their buffers in the first ones."""


class StepResult(NamedTuple):
    """What an update measured; numbers on the device, which may still be working on them."""

    loss: torch.Tensor
    norm: torch.Tensor
    """Of the gradient, before it was clipped."""


class StepRunner:
    """Makes the updates of a run. `note` takes what a person should know."""

    def __init__(
        self,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        config: RunConfig,
        device: str,
        *,
        world: World = SINGLE_PROCESS,
        module: nn.Module | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`module`: what several processes compute the loss with (`spread`).

        Raises ValueError for an arithmetic that the device does not have.
        """
        check_precision(config.train.precision, device)
        if config.train.precision == "bf16" and emulates_bf16(device):
            slow = "torch imitates it, in products hundreds of times slower than float32: use fp32"
            note(f"train.precision=bf16: this processor has no bfloat16; {slow}")
        self.model, self.optimizer, self.config, self.device = model, optimizer, config, torch.device(device)
        self.parts = config.train.accumulate or 1
        """Forward passes per update."""
        self._note = note
        self._world, self._module = world, module
        self._sharded = any(map(is_sharded, model.parameters()))
        self._cuda = self.device.type == "cuda"
        settings = config.engine
        long_enough = config.train.total_steps >= COMPILE_FROM
        self._compile = self._cuda and long_enough if settings.compile is None else settings.compile
        self._graphs = self._cuda and world.size == 1 and settings.graphs is not False
        self._compiled: Callable[..., torch.Tensor] | None = None
        self._compile_works = False
        self._graph: _Graph | None = None
        self._done = 0
        model.checkpoint_activations = settings.checkpoint_activations

    @contextlib.contextmanager
    def arithmetic(self, use: Use = "training") -> Iterator[None]:
        """Compute in train.precision, with the fastest kernels for it, inside the block."""
        before = torch.get_float32_matmul_precision()
        precision = self.config.train.precision
        if self._cuda:
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        # The rounded weights that autocast keeps for the next pass are none of the gathered ones of a sharded model:
        # their gradients would be lost.
        half = bf16_autocast(self.device.type, precision in ("bf16", "fp8"), keep_casts=not self._sharded)
        try:
            with (
                half,
                use_backend(self.model, choose(self.device, precision=precision, use=use)),
                sdpa_kernel(_BACKENDS, set_priority=True) if self._cuda else contextlib.nullcontext(),
            ):
                yield
        finally:
            torch.set_float32_matmul_precision(before)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """On CUDA the arithmetic of training, which is many times as fast; elsewhere float32."""
        with self.arithmetic("scoring") if self._cuda else contextlib.nullcontext():
            yield

    def update(self, batch: Batch, *, step: int, lr: float) -> StepResult:
        """Learn from a batch. Raises OutOfMemory, or ValueError if already the first batch does not fit."""
        set_lr(self.optimizer, lr)
        rank = [self._world.rank] if self._world.rank else []  # other masks for other rows
        seed = derive_seed(self.config.train.seed, "dropout", step, *rank)
        if self._graph is not None and self._graph.takes(batch):
            set_seed(seed)
            return self._graph.replay(batch)
        try:
            if self._world.size > 1 and not (self._done or self._sharded):
                self._rehearse(batch)
            set_seed(seed)
            made = self._step(batch)
        except NO_MEMORY as err:
            if not is_out_of_memory(err):
                raise
            made = None  # what the error still holds is free only after this block
        if made is None:
            self._free()
            if self._done or self._world.size > 1:
                raise OutOfMemory(self._no_room(batch))
            self._find_room(batch)
            return self.update(batch, step=step, lr=lr)
        self._done += 1
        if self._done == 1 and (why := native.problem()):
            self._note(f"attention and GELU are torch's own, and updates up to a fifth slower: {why}")
        if self._graphs and self._done == WARM_UP and not batch.structure():
            self._capture(batch)
        return made

    def _step(self, batch: Batch) -> StepResult:
        self.model.train()
        with self.arithmetic():
            loss = self._backward(batch)
        norm = clip_gradients(self.model.parameters(), self.config.train.clip_norm)
        what = f"what {self.config.train.optimizer} keeps of {weights_text(self.config.model)}: take a smaller model"
        with reporting_out_of_memory(what, ValueError):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm.detach())

    def _backward(self, batch: Batch) -> torch.Tensor:
        """`_gradients`, of which what is compiled may fail the first time: then it is done again as it is written."""
        try:
            loss = self._gradients(batch)
            self._compile_works = self._compiled is not None
            return loss
        except Exception as err:  # what it still holds is free only after this block
            if not self._compile or self._compile_works or is_out_of_memory(err):
                raise
            why = first_line(err)
        self._compile = False
        self._note(f"torch.compile failed, so the model runs as it is, slower: {why}")
        self.optimizer.zero_grad(set_to_none=True)
        return self._gradients(batch)

    def _gradients(self, batch: Batch) -> torch.Tensor:
        """Add the gradient of the mean loss over the targets of all processes, in `parts` forward passes; that loss."""
        several = self._world.size > 1
        total = (batch.targets != -100).sum() if self.parts > 1 or several else None
        if several and total is not None:
            total = self._world.sum(total) / self._world.size  # as the sum of the gradients is divided
        parts = batch.parts(self.parts)
        if self._sharded:  # every pass gathers weights, so all processes need as many: the rest learns nothing
            parts += [parts[0]._replace(targets=torch.full_like(parts[0].targets, -100))] * (self.parts - len(parts))
        mean: torch.Tensor | None = None
        for number, part in enumerate(parts, 1):
            with without_exchange(self._module, number < len(parts)):
                loss = self._loss(part, total)
                loss.backward()
            mean = loss.detach() if mean is None else mean + loss.detach()
        assert mean is not None
        return self._world.sum(mean) / self._world.size if several else mean

    def _loss(self, part: Batch, total: torch.Tensor | None) -> torch.Tensor:
        """The loss of a part of a batch, compiled if that is wanted."""
        plain: Callable[..., torch.Tensor] = self.model.loss if self._module is None else self._module
        if not self._compile or part.segments is not None:
            return plain(part.x, part.targets, total=total, **part.structure())
        if self._compiled is None:
            self._compiled = torch.compile(plain, dynamic=False)
        return self._compiled(part.x, part.targets, total=total, **part.structure())

    # --- memory ----------------------------------------------------------------------------------

    def _rehearse(self, batch: Batch) -> None:
        """Before the first update of several processes, with a copy of the model each.

        DDP lays the gradients out anew after its first backward pass, and with the place of a number the order in which
        it is summed: without a pass before, a run that goes on would differ in its first bits.
        """
        if self._cuda:
            self._agree_on_parts(batch)
        if not self._cuda or self.config.engine.deterministic:
            with self.arithmetic():
                self._backward(batch)
            self.optimizer.zero_grad(set_to_none=True)

    def _agree_on_parts(self, batch: Batch) -> None:
        """As many parts as the process with the least room needs."""
        alone = StepRunner(self.model, self.optimizer, self.config, str(self.device), note=self._note)
        alone._compile = False
        if not alone._fits(batch):
            alone._find_room(batch)
        self.parts = self._world.highest(alone.parts)

    def _find_room(self, batch: Batch) -> None:
        """Raise `parts` until an update fits. Raises ValueError if it may not, with what would; or if nothing does."""
        rows, asked = len(batch.x), self.config.train.accumulate
        for parts in (n for n in range(self.parts + 1, rows + 1) if rows % n == 0):
            self.parts = parts
            if not self._fits(batch):
                continue
            if asked:
                would = f"train.accumulate={parts} would fit, 0 finds it by itself"
                raise ValueError(f"{self._no_room(batch, asked)} {would}")
            self._note(f"{rows} rows do not fit into the device's memory at once: {parts} parts of {rows // parts} do")
            return
        raise ValueError(
            f"not even one row of T={self.config.model.T} fits into the memory of {self.device} ({self._memory()}): "
            "take a smaller model or T, or engine.checkpoint_activations=true"
        )

    def _fits(self, batch: Batch) -> bool:
        """Whether there is room for the gradient of a batch, in `parts`."""
        fits = True
        try:
            with self.arithmetic():
                self._backward(batch)
        except NO_MEMORY as err:
            if not is_out_of_memory(err):
                raise
            fits = False  # what the error still holds is free only after this block
        self._free()
        return fits

    def _no_room(self, batch: Batch, parts: int | None = None) -> str:
        rows = -(-len(batch.x) // (parts or self.parts))
        size = f"{rows} rows of T={batch.x.shape[1]} at once"
        return f"{self.device} is out of memory ({self._memory()}) with {size};"

    def _memory(self) -> str:
        if not self._cuda:
            return gib(machine_memory())
        free, whole = (amount / 2**30 for amount in torch.cuda.mem_get_info(self.device))
        return f"{whole:.0f} GiB, {free:.1f} free"

    def _free(self) -> None:
        """After a failed update: no gradients, and no memory kept for it."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()

    # --- graphs ----------------------------------------------------------------------------------

    def _capture(self, batch: Batch) -> None:
        try:
            self._graph = _Graph(batch, self._step)
        except Exception as err:
            self._graphs = False
            self._free()
            self._note(f"the update could not be captured as a CUDA graph, so Python launches it: {first_line(err)}")


class _Graph:
    """A whole update, recorded once and played again with other rows."""

    def __init__(self, batch: Batch, step: Callable[[Batch], StepResult]) -> None:
        """Record; nothing is computed yet."""
        torch.cuda.empty_cache()  # what the updates before have left would lie beside the graph's own memory
        self._batch = Batch(batch.x.clone(), batch.targets.clone())
        self._graph = torch.cuda.CUDAGraph()
        # The feeder goes on allocating in its thread, which a capture in the usual mode would forbid to all threads.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._made = step(self._batch)

    def takes(self, batch: Batch) -> bool:
        """Whether a batch has the shape that was recorded."""
        return batch.x.shape == self._batch.x.shape and not batch.structure()

    def replay(self, batch: Batch) -> StepResult:
        self._batch.x.copy_(batch.x)
        self._batch.targets.copy_(batch.targets)
        self._graph.replay()
        return StepResult(*(number.clone() for number in self._made))  # the next replay writes over them


_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Attention on CUDA, the fastest first."""


@contextlib.contextmanager
def deterministic(wanted: bool, device: str) -> Iterator[None]:
    """Only algorithms that give the same bits every time, for the block. On a CPU they all do."""
    if not wanted or torch.device(device).type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def first_line(err: Exception) -> str:
    """What an error says, without the page that may follow."""
    return next((line.strip() for line in str(err).splitlines() if line.strip()), type(err).__name__)[:200]
