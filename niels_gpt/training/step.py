"""One training step: forward, backward, gradient clipping, optimizer step; on one device or on each rank.

On CUDA the first steps run eagerly, or compiled if the run is long enough for that to pay. Then a step is captured as a
CUDA graph and replayed, so that Python only hands over batches. If compilation or capture fails, the run prints a note
and continues more slowly.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple, get_args

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from niels_gpt.config import RunConfig
from niels_gpt.kernels.cpu import native
from niels_gpt.kernels.replaced import plain_wanted
from niels_gpt.model.backend import Backend, Use, choose, name_of, usable, use_backend
from niels_gpt.model.gpt import GPT
from niels_gpt.system.device import bf16_autocast, check_precision, emulates_bf16
from niels_gpt.system.host_limits import gib, is_out_of_memory, machine_memory
from niels_gpt.system.processes import SINGLE_PROCESS, World
from niels_gpt.system.rng import derive_seed, set_seed
from niels_gpt.training.memory_limits import MEMORY_ERRORS, OutOfMemory, reporting_out_of_memory, weights_text
from niels_gpt.training.optim.optimizer import set_lr
from niels_gpt.training.parallel.sharding import clip_gradients, is_sharded, no_gradient_sync
from niels_gpt.training.tasks.base import Batch

COMPILE_FROM = 500
"""Runs of at least this many steps are compiled, unless engine.compile says otherwise: then it pays."""
GRAPH_WARM_UP = 3
"""Steps before a graph is captured: in the first ones libraries choose kernels and allocate buffers."""


class StepResult(NamedTuple):
    """The loss and gradient norm of a step, as scalars on the device, which may still be computing them."""

    loss: torch.Tensor
    norm: torch.Tensor
    """The norm of the gradient before clipping."""


class StepRunner:
    """Runs the steps of a run. `note` receives messages for the user."""

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
        """`module`: the distributed module whose forward is the loss (`sharding.distribute`).

        Raises ValueError for a precision that the device does not support.
        """
        check_precision(config.train.precision, device)
        if config.train.precision == "bf16" and emulates_bf16(device):
            slow = "torch emulates it, and matmuls are hundreds of times slower than in float32: use fp32"
            note(f"train.precision=bf16: this processor has no bfloat16; {slow}")
        self.model, self.optimizer, self.config, self.device = model, optimizer, config, torch.device(device)
        self.micro_batches = config.train.accumulate or 1
        """Forward passes per step."""
        self._backends: dict[Use, Backend] = {
            use: choose(device, precision=config.train.precision, use=use) for use in get_args(Use)
        }
        self._note = note
        self._world, self._module = world, module
        self._sharded = any(map(is_sharded, model.parameters()))
        self._cuda = self.device.type == "cuda"
        settings = config.engine
        long_enough = config.train.total_steps >= COMPILE_FROM
        self._compile = self._cuda and long_enough if settings.compile is None else settings.compile
        self._graphs = self._cuda and world.size == 1 and settings.graphs is not False
        if plain_wanted():
            self._compile = self._graphs = False
        self._compiled: Callable[..., torch.Tensor] | None = None
        self._compile_works = False
        self._graph: _Graph | None = None
        self._done = 0
        model.checkpoint_activations = settings.checkpoint_activations

    @property
    def backend(self) -> str:
        """The name of the backend that computes the steps."""
        return name_of(usable(self.model, self._backends["training"]))

    @contextlib.contextmanager
    def precision_context(self, use: Use = "training") -> Iterator[None]:
        """Compute in train.precision, with the fastest kernels for it, inside the block."""
        before = torch.get_float32_matmul_precision()
        precision = self.config.train.precision
        if self._cuda:
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        # No autocast weight cache for a sharded model: its weights are gathered anew for each pass, and the gradients
        # of cached casts would be lost.
        half = bf16_autocast(self.device.type, precision in ("bf16", "fp8"), keep_casts=not self._sharded)
        try:
            with (
                half,
                use_backend(self.model, self._backends[use]),
                sdpa_kernel(_BACKENDS, set_priority=True) if self._cuda else contextlib.nullcontext(),
            ):
                yield
        finally:
            torch.set_float32_matmul_precision(before)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Compute in the training precision on CUDA, where it is many times faster; in float32 elsewhere."""
        with self.precision_context("scoring") if self._cuda else contextlib.nullcontext():
            yield

    def step(self, batch: Batch, *, step: int, lr: float) -> StepResult:
        """Train on a batch. Raises OutOfMemory, or ValueError if not even the first batch fits."""
        set_lr(self.optimizer, lr)
        rank = [self._world.rank] if self._world.rank else []  # each rank draws different dropout masks
        seed = derive_seed(self.config.train.seed, "dropout", step, *rank)
        if self._graph is not None and self._graph.accepts(batch):
            set_seed(seed)
            return self._graph.replay(batch)
        try:
            if self._world.size > 1 and not (self._done or self._sharded):
                self._warm_up_ddp(batch)
            set_seed(seed)
            result = self._eager_step(batch)
        except MEMORY_ERRORS as err:
            if not is_out_of_memory(err):
                raise
            result = None  # the exception keeps tensors alive until this block ends
        if result is None:
            self._free()
            if self._done or self._world.size > 1:
                raise OutOfMemory(self._out_of_memory_text(batch))
            self._find_micro_batches(batch)
            return self.step(batch, step=step, lr=lr)
        self._done += 1
        if self._done == 1 and self.backend == "cpu" and (why := native.problem()):
            self._note(f"warning: attention and GELU run in torch, and steps are up to a fifth slower: {why}")
        if self._graphs and self._done == GRAPH_WARM_UP and not batch.structure():
            self._capture(batch)
        return result

    def _eager_step(self, batch: Batch) -> StepResult:
        self.model.train()
        with self.precision_context():
            loss = self._backward(batch)
        norm = clip_gradients(self.model.parameters(), self.config.train.clip_norm)
        weights = weights_text(self.config.model)
        what = f"the {self.config.train.optimizer} state of a model of {weights}: use a smaller model"
        with reporting_out_of_memory(what, ValueError):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm.detach())

    def _backward(self, batch: Batch) -> torch.Tensor:
        """`_gradients`; if the compiled model fails the first time, repeat it without compilation."""
        try:
            loss = self._gradients(batch)
            self._compile_works = self._compiled is not None
            return loss
        except Exception as err:  # it keeps tensors alive until this block ends
            if not self._compile or self._compile_works or is_out_of_memory(err):
                raise
            why = first_line(err)
        self._compile = False
        self._note(f"warning: torch.compile failed, so the model runs uncompiled, which is slower: {why}")
        self.optimizer.zero_grad(set_to_none=True)
        return self._gradients(batch)

    def _gradients(self, batch: Batch) -> torch.Tensor:
        """Accumulate the gradient of the mean loss over the targets of all processes; returns that loss."""
        distributed = self._world.size > 1
        parts = batch.micro_batches(self.micro_batches)
        if not (self._cuda or distributed):  # on CUDA one shape is worth more: a step is compiled and captured once
            parts = [group for part in parts for group in part.by_length()]
        total = (batch.targets != -100).sum() if len(parts) > 1 or distributed else None
        if distributed and total is not None:
            # DDP and FSDP divide the summed gradients by the number of processes; so divide the targets too.
            total = self._world.all_reduce(total) / self._world.size
        if self._sharded:
            # Every pass gathers weights, so all ranks need the same number of passes: add some without targets.
            padding = parts[0]._replace(targets=torch.full_like(parts[0].targets, -100))
            parts += [padding] * (self.micro_batches - len(parts))
        mean: torch.Tensor | None = None
        for number, part in enumerate(parts, 1):
            with no_gradient_sync(self._module, number < len(parts)):
                loss = self._loss(part, total)
                loss.backward()
            mean = loss.detach() if mean is None else mean + loss.detach()
        assert mean is not None
        return self._world.all_reduce(mean) / self._world.size if distributed else mean

    def _loss(self, part: Batch, total: torch.Tensor | None) -> torch.Tensor:
        """The loss of a micro-batch, compiled if wanted."""
        plain: Callable[..., torch.Tensor] = self.model.loss if self._module is None else self._module
        if not self._compile or part.segments is not None:
            return plain(part.x, part.targets, total=total, **part.structure())
        if self._compiled is None:
            self._compiled = torch.compile(plain, dynamic=False)
        return self._compiled(part.x, part.targets, total=total, **part.structure())

    # --- memory ----------------------------------------------------------------------------------

    def _warm_up_ddp(self, batch: Batch) -> None:
        """Run one backward pass before the first step of DDP, and discard its gradients.

        DDP rebuilds its gradient buckets after the first backward pass, which changes the order of summation. Without
        this pass a resumed run would differ in the last bits from an uninterrupted one.
        """
        if self._cuda:
            self._agree_on_micro_batches(batch)
        if not self._cuda or self.config.engine.deterministic:
            with self.precision_context():
                self._backward(batch)
            self.optimizer.zero_grad(set_to_none=True)

    def _agree_on_micro_batches(self, batch: Batch) -> None:
        """Use the number of micro-batches that the rank with the least memory needs."""
        single = StepRunner(self.model, self.optimizer, self.config, str(self.device), note=self._note)
        single._compile = False
        if not single._fits(batch):
            single._find_micro_batches(batch)
        self.micro_batches = self._world.max(single.micro_batches)

    def _find_micro_batches(self, batch: Batch) -> None:
        """Raise `micro_batches` until a step fits into memory.

        Raises ValueError if train.accumulate fixes the number (the message has one that fits), or if nothing fits.
        """
        rows, wanted = len(batch.x), self.config.train.accumulate
        for number in (n for n in range(self.micro_batches + 1, rows + 1) if rows % n == 0):
            self.micro_batches = number
            if not self._fits(batch):
                continue
            if wanted:
                remedy = f"train.accumulate={number} fits; 0 finds a number that fits automatically"
                raise ValueError(f"{self._out_of_memory_text(batch, wanted)} {remedy}")
            self._note(
                f"{rows} rows do not fit into the memory of {self.device} at once: using {number} micro-batches of "
                f"{rows // number}"
            )
            return
        raise ValueError(
            f"not even one row of T={self.config.model.T} fits into the memory of {self.device} ({self._memory()}): "
            "use a smaller model or T, or engine.checkpoint_activations=true"
        )

    def _fits(self, batch: Batch) -> bool:
        """Whether forward and backward of a batch fit into memory, in `micro_batches` passes."""
        fits = True
        try:
            with self.precision_context():
                self._backward(batch)
        except MEMORY_ERRORS as err:
            if not is_out_of_memory(err):
                raise
            fits = False  # the exception keeps tensors alive until this block ends
        self._free()
        return fits

    def _out_of_memory_text(self, batch: Batch, micro_batches: int | None = None) -> str:
        rows = -(-len(batch.x) // (micro_batches or self.micro_batches))
        size = f"{rows} rows of T={batch.x.shape[1]} at once"
        return f"{self.device} is out of memory ({self._memory()}) with {size};"

    def _memory(self) -> str:
        if not self._cuda:
            return gib(machine_memory())
        free, total = (amount / 2**30 for amount in torch.cuda.mem_get_info(self.device))
        return f"{total:.0f} GiB, {free:.1f} free"

    def _free(self) -> None:
        """Drop the gradients of a failed step, and return cached memory to the device."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()

    # --- graphs ----------------------------------------------------------------------------------

    def _capture(self, batch: Batch) -> None:
        try:
            self._graph = _Graph(batch, self._eager_step)
        except Exception as err:
            self._graphs = False
            self._free()
            why = first_line(err)
            self._note(f"warning: capturing a step as a CUDA graph failed, so Python launches each step: {why}")


class _Graph:
    """A step that was captured once and is replayed with other batches."""

    def __init__(self, batch: Batch, step: Callable[[Batch], StepResult]) -> None:
        """Capture a step; this computes nothing."""
        gc.collect()
        torch.cuda.empty_cache()  # the graph has its own memory pool and cannot use what earlier steps cached
        self._batch = Batch(batch.x.clone(), batch.targets.clone())
        self._graph = torch.cuda.CUDAGraph()
        # The prefetch thread keeps allocating, which the default mode forbids to all threads during a capture.
        with _no_garbage_collection(), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = step(self._batch)

    def accepts(self, batch: Batch) -> bool:
        """Whether a batch has the captured shape."""
        return batch.x.shape == self._batch.x.shape and not batch.structure()

    def replay(self, batch: Batch) -> StepResult:
        self._batch.x.copy_(batch.x)
        self._batch.targets.copy_(batch.targets)
        self._graph.replay()
        return StepResult(*(scalar.clone() for scalar in self._result))  # the next replay overwrites them


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause the collector in the block: freeing a CUDA object of a dead cycle would invalidate a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention backends on CUDA, the fastest first."""


@contextlib.contextmanager
def deterministic(wanted: bool, device: str) -> Iterator[None]:
    """Use only deterministic algorithms in the block, if wanted and on CUDA. On a CPU all are deterministic."""
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
    """The first line of an error message, at most 200 characters."""
    return next((line.strip() for line in str(err).splitlines() if line.strip()), type(err).__name__)[:200]
