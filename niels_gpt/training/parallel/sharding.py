"""One model on several processes: replicated (DDP), or with weights, gradients and optimizer state sharded (FSDP2).

Both wrap a module whose forward is the loss, so a step is the same code for one process and for many. Both divide the
summed gradients by the number of processes; `StepRunner` compensates by dividing the number of targets.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from niels_gpt.model.gpt import GPT
from niels_gpt.model.lora import has_adapters, merged_model
from niels_gpt.system.processes import World


class LossModule(nn.Module):
    """A module whose forward is the loss of a model."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, targets: torch.Tensor, **options: torch.Tensor | None) -> torch.Tensor:
        return self.model.loss(x, targets, **options)


def distribute(model: GPT, world: World, *, shard: bool) -> nn.Module | None:
    """The DDP or FSDP module whose forward is the loss; None for a single process."""
    if world.size == 1:
        return None
    return shard_model(model, world.device) if shard else replicate_model(model)


def replicate_model(model: GPT) -> nn.Module:
    """The DDP module of a model, with the weights of the main process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*broadcast_buffers")  # torch 2.13 renames it; 2.9 does not yet
        # Without device_ids DDP moves no inputs: segments stay on the CPU.
        return nn.parallel.DistributedDataParallel(
            LossModule(model), gradient_as_bucket_view=True, broadcast_buffers=False
        )


def shard_model(model: GPT, device: str) -> nn.Module:
    """The FSDP2 module of a model; its weights become DTensors, sharded over the processes.

    They move to the device block by block, so the full model is never on one device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Gather weights in float32 and let autocast round them, as on a single device: the same values.
    module = LossModule(model)
    mesh = init_device_mesh(torch.device(device).type, (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)  # the head needs the embedding again
    return module


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sharded over processes (a DTensor)."""
    return hasattr(tensor, "full_tensor")


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of this process, sharing memory with the tensor; the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def gather_shards(shard: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The full tensor whose shards, laid out as those of `like`, the processes hold. A collective call."""
    if not is_sharded(like):
        return shard
    from torch.distributed.tensor import DTensor

    layout: Any = like
    tensor = DTensor.from_local(
        shard, layout.device_mesh, layout.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return tensor.full_tensor()


def take_shard(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The shard of a full tensor that this process holds of `like`. No communication: all processes have `full`."""
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    layout: Any = like
    return distribute_tensor(full, layout.device_mesh, layout.placements, src_data_rank=None).to_local()


def clip_gradients(parameters: Iterable[torch.Tensor], limit: float) -> torch.Tensor:
    """Clip the global gradient norm, over all parameters and processes, to `limit`; returns the norm before."""
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if is_sharded(norm) else norm  # type: ignore[attr-defined]
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


@contextlib.contextmanager
def no_gradient_sync(module: nn.Module | None, wanted: bool) -> Iterator[None]:
    """A block in which DDP does not all-reduce gradients, if wanted: a later micro-batch of the step does."""
    if wanted and isinstance(module, nn.parallel.DistributedDataParallel):
        with module.no_sync():
            yield
    else:
        yield


def full_model(model: GPT) -> GPT:
    """The model itself; for a sharded model a copy with its full weights on every process. A collective call.

    For a model with adapters it is the merged model.
    """
    if has_adapters(model):
        return merged_model(model)
    if not any(map(is_sharded, model.parameters())):
        return model
    with torch.device("meta"):
        copy = GPT(model.config)
    for name, buffer in model.named_buffers():
        copy.register_buffer(name, buffer, persistent=False)
    for module, sharded in zip(copy.modules(), model.modules(), strict=True):
        for name, weight in sharded.named_parameters(recurse=False):
            if copy.lm_head is not module or not model.config.tie_embeddings:  # a tied head is set below
                full = gather_shards(local_shard(weight.detach()), weight)
                setattr(module, name, nn.Parameter(full, requires_grad=False))
    if model.config.tie_embeddings:
        copy.lm_head.weight = copy.tok_emb.weight
    return copy.eval()


# --- state for checkpoints ---------------------------------------------------------------------------


def state_tensors(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The tensors of a model and its optimizer by path, not copies; tied weights once.

    An optimizer without state (before the first step) gets it from a step with zero gradients and learning rate 0.
    """
    from niels_gpt.runs.sharded_checkpoint import flat

    if not flat(optimizer.state_dict()):
        _create_state(optimizer)
    tied = ties(model)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return flat({"model": weights, "optimizer": optimizer.state_dict()})


def ties(model: GPT) -> dict[str, str]:
    """The tied weights, and the weight that owns each tensor: {"lm_head.weight": "tok_emb.weight"}."""
    first: dict[torch.Tensor, str] = {}
    weights = model.state_dict(keep_vars=True)
    return {name: owner for name, tensor in weights.items() if (owner := first.setdefault(tensor, name)) != name}


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def fill(tensors: Mapping[str, torch.Tensor], full: Mapping[str, torch.Tensor]) -> None:
    """Copy full tensors into the (possibly sharded) tensors of a run; each process copies its shards."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            shard = local_shard(tensor)
            shard.copy_(take_shard(full[name].to(shard.device), tensor))
