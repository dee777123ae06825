"""One model on several processes: a copy on each (DDP), or its weights, gradients and optimiser state in parts (FSDP2).

Both wrap a module whose forward is the loss, so that an update is the same code for one process and for many. Both
divide the sum of the gradients by the number of processes; the engine divides the loss by as much less.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from niels_gpt.model.gpt import GPT
from niels_gpt.system.processes import World


class LossModule(nn.Module):
    """The loss of a model as a module."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, targets: torch.Tensor, **options: torch.Tensor | None) -> torch.Tensor:
        return self.model.loss(x, targets, **options)


def spread(model: GPT, world: World, *, shard: bool) -> nn.Module | None:
    """What several processes compute the loss with; None for one, which needs nothing."""
    if world.size == 1:
        return None
    return in_parts(model, world.device) if shard else as_copies(model)


def as_copies(model: GPT) -> nn.Module:
    """The model on its device, with the weights of the main process; gradients are exchanged while others are made."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*broadcast_buffers")  # torch 2.13 renames it; 2.9 does not yet
        # Without device_ids nothing is moved: segments stay on the CPU.
        return nn.parallel.DistributedDataParallel(
            LossModule(model), gradient_as_bucket_view=True, broadcast_buffers=False
        )


def in_parts(model: GPT, device: str) -> nn.Module:
    """The model with its weights cut over the processes (DTensor). They go to the device block by block, so that all of
    them are never there at once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Weights travel as float32 and autocast rounds them, as it does on one device: the same numbers.
    module = LossModule(model)
    mesh = init_device_mesh(torch.device(device).type, (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)  # the head needs the embedding again at once
    return module


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a part of one that lies on several processes."""
    return hasattr(tensor, "full_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part that lies here; in the same memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def gathered(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor of which each process has a part, cut as `like` is; called by all together."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    placed: Any = like
    found = DTensor.from_local(
        part, placed.device_mesh, placed.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return found.full_tensor()


def cut(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that this process holds of `like`. Nothing is sent: all have the whole."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    placed: Any = like
    return distribute_tensor(whole, placed.device_mesh, placed.placements, src_data_rank=None).to_local()


def clip_gradients(parameters: Iterable[torch.Tensor], limit: float) -> torch.Tensor:
    """Scale the gradients down to a norm of at most `limit`, over all of them on all processes; the norm before."""
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if is_sharded(norm) else norm  # type: ignore[attr-defined]
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


@contextlib.contextmanager
def without_exchange(module: nn.Module | None, wanted: bool) -> Iterator[None]:
    """A block whose gradients stay here if wanted: those of a later part of the update take them along."""
    if wanted and isinstance(module, nn.parallel.DistributedDataParallel):
        with module.no_sync():
            yield
    else:
        yield


def whole_model(model: GPT) -> GPT:
    """The model itself; of a sharded one a copy with all its weights, on every process. Called by all together."""
    if not any(map(is_sharded, model.parameters())):
        return model
    with torch.device("meta"):
        copy = GPT(model.config)
    for name, buffer in model.named_buffers():
        copy.register_buffer(name, buffer, persistent=False)
    for module, theirs in zip(copy.modules(), model.modules(), strict=True):
        for name, weight in theirs.named_parameters(recurse=False):
            if copy.lm_head is not module or not model.config.tie_embeddings:
                setattr(module, name, nn.Parameter(gathered(local(weight.detach()), weight), requires_grad=False))
    if model.config.tie_embeddings:
        copy.lm_head.weight = copy.tok_emb.weight
    return copy.eval()


# --- state for checkpoints ---------------------------------------------------------------------------


def state_tensors(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The very tensors of a model and its optimiser, by path: what is copied into them is in the run. Tied ones once.

    Before the first update the optimiser has none; a step without gradient and learning rate makes them.
    """
    from niels_gpt.runs.sharded_checkpoint import flat

    if not flat(optimizer.state_dict()):
        _make_state(optimizer)
    tied = ties(model)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return flat({"model": weights, "optimizer": optimizer.state_dict()})


def ties(model: GPT) -> dict[str, str]:
    """The weights that are another's, and whose: {"lm_head.weight": "tok_emb.weight"}."""
    first: dict[torch.Tensor, str] = {}
    weights = model.state_dict(keep_vars=True)
    return {name: owner for name, tensor in weights.items() if (owner := first.setdefault(tensor, name)) != name}


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def fill(tensors: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]) -> None:
    """Copy whole tensors into those of a run, each process its parts."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            here = local(tensor)
            here.copy_(cut(whole[name].to(here.device), tensor))
