"""What kernels and decoders replace in the model, and whether it still is what they compute.

`replaced.json` has a digest of each function of the model that some kernel computes in its stead, as it was when the
kernels were compared with it. A function whose digest differs was edited, and a module of another class, with a hook or
with a replaced method computes something else: then `gpt.py` itself computes the model. Functions are looked up
anew each time, and each is hashed once per process.

After a deliberate edit and a check of the kernels, `python -m scripts.renew_replaced` stores the new digests.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import json
import os
import pkgutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

VARIABLE = "NIELS_GPT_BACKEND"
"""The environment variable: `plain` computes every model by its own code; `auto`, the default, uses kernels."""
DATA = "replaced.json"

_MODEL = "niels_gpt.model"
GPT_FORWARD = f"{_MODEL}.gpt:GPT.forward"
BRANCHES = (
    f"{_MODEL}.gpt:Norm.forward",
    f"{_MODEL}.gpt:Attention.forward",
    f"{_MODEL}.gpt:attend",
    f"{_MODEL}.gpt:rotate",
    f"{_MODEL}.gpt:MLP.forward",
    f"{_MODEL}.gpt:Block.attention_branch",
    f"{_MODEL}.gpt:Block.mlp_branch",
    f"{_MODEL}.gpt:GPT.logits",
    GPT_FORWARD,
    f"{_MODEL}.loss:loss_fn",
    f"{_MODEL}.loss:summed_loss",
    f"{_MODEL}.lora:LoRALinear.forward",
)
"""What the backends replace: the branches of a block, norms, head and loss. A name is MODULE:NAME in that module."""
FORWARD = (
    *BRANCHES,
    f"{_MODEL}.gpt:Block.forward",
    f"{_MODEL}.gpt:GPT.hidden",
    f"{_MODEL}.gpt:GPT.embed",
    f"{_MODEL}.gpt:token_positions",
    f"{_MODEL}.dropout:Dropout.forward",
    f"{_MODEL}.kv_cache:KVCache.advance",
    f"{_MODEL}.kv_cache:KVCache.extend",
)
"""What the decoders replace: all of a forward pass with a KV cache."""

CLASSES = {
    *(f"{_MODEL}.gpt:{name}" for name in ("GPT", "Block", "Norm", "Attention", "MLP")),
    *(f"torch.nn.modules.{name}" for name in ("linear:Linear", "sparse:Embedding", "container:ModuleList")),
    f"{_MODEL}.dropout:Dropout",
    f"{_MODEL}.lora:LoRALinear",
    "niels_gpt.inference.int8:Int8GPT",
}
"""Classes of the modules of a model; a module of another class, also of one derived from these, is not replaced."""

_forced: list[bool] = []


@contextlib.contextmanager
def plain_inside(wanted: bool) -> Iterator[None]:
    """Compute every model by its own code inside the block, if wanted."""
    _forced.extend([True] * wanted)
    try:
        yield
    finally:
        del _forced[len(_forced) - wanted :]


def plain_wanted() -> bool:
    """Whether all acceleration is off: `VARIABLE`, or `plain_inside`. Raises ValueError for another value."""
    if _forced:
        return True
    value = os.environ.get(VARIABLE) or "auto"
    if value not in ("auto", "plain"):
        raise ValueError(f"{VARIABLE} must be auto or plain, got {value!r}: unset it for auto")
    return value == "plain"


# --- code ---------------------------------------------------------------------------------------------

_verified: dict[tuple[str, ...], list[tuple[Mapping[str, Any], str, Any]]] = {}
"""Names of which all were known -> where each function was found, and the function: comparing these takes 2 us."""


def changed(names: tuple[str, ...]) -> list[str]:
    """The functions among `names` (BRANCHES or FORWARD) that are not those that the kernels know."""
    verified = _verified.get(names)
    if verified is not None and all(space.get(last) is function for space, last, function in verified):
        return []
    places = [_place(name) for name in names]
    wrong = [name for name, (_, _, function) in zip(names, places, strict=True) if not _known(name, function)]
    if not wrong:
        _verified[names] = places
    return wrong


def explain(names: Iterable[str]) -> str:
    """The files and functions of `changed`, for a message."""
    files: dict[str, list[str]] = {}
    for name in names:
        module, _, function = name.partition(":")
        source = getattr(find(name), "__module__", None) or module
        source = source if source.startswith("niels_gpt.") else module  # gpt.py imports some of them
        files.setdefault(source.removeprefix("niels_gpt.").replace(".", "/") + ".py", []).append(function)
    return ", ".join(f"{file} was changed ({', '.join(functions)})" for file, functions in files.items())


def find(name: str) -> Any:
    """The function that has this name now; None if there is none, or if its module is not loaded."""
    return _place(name)[2]


def _place(name: str) -> tuple[Mapping[str, Any], str, Any]:
    """The namespace of a function, its name there, and what that is; of a module that is not loaded, sys.modules."""
    module, _, path = name.partition(":")
    space: Mapping[str, Any] = sys.modules
    last, found = module, space.get(module)
    for part in path.split("."):
        if found is None:
            break
        space, last = vars(found), part
        found = space.get(part)
    return space, last, found


@functools.cache
def _known(name: str, function: Any) -> bool:
    if function is None:  # lora.py is loaded for models with adapters only
        return name.partition(":")[0] not in sys.modules
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return False
    found = digest(function)
    if found is None:  # a package without sources cannot have been edited, but a function may have been replaced
        return function.__module__.startswith(f"{_MODEL}.") and function.__qualname__ == name.partition(":")[2]
    return found == stored().get(name)


@functools.cache
def stored() -> dict[str, str]:
    """Name -> digest."""
    data = pkgutil.get_data(__package__, DATA)
    known: dict[str, str] = json.loads(data or b"{}")
    return known


def digest(function: Callable[..., Any]) -> str | None:
    """A hash of the source without comments, layout and docstring; None if there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if isinstance(tree, ast.FunctionDef) and ast.get_docstring(tree) is not None:
        del tree.body[0]
    return hashlib.sha256(_text(tree).encode("utf-8")).hexdigest()[:16]


def _text(node: Any) -> str:
    """A syntax tree as text, without empty fields: these differ between versions of Python."""
    if isinstance(node, list):
        return f"[{','.join(map(_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
    return f"{type(node).__name__}({','.join(f'{name}={_text(value)}' for name, value in fields)})"


# --- modules ------------------------------------------------------------------------------------------

_METHODS = {"forward", "attention_branch", "mlp_branch", "hidden", "embed", "logits"}


def replaceable_parts(model: nn.Module, *, blocks: bool) -> bool:
    """Whether the modules that backends replace are those of the model's code, without hooks: final norm and head, and
    with `blocks` those of the blocks."""
    tree: dict[str, Any] = model._modules
    parts = [tree["norm"], tree["lm_head"]]
    for block in tree["blocks"]._modules.values() if blocks else ():
        if not vars(block).keys().isdisjoint(_METHODS):
            return False
        parts += [part for name, part in block._modules.items() if name != "drop"]
    return vars(model).keys().isdisjoint(_METHODS) and _inherits(type(model)) and _unhooked(parts)  # type: ignore[arg-type]


def replaceable(model: nn.Module) -> bool:
    """Whether all modules of a model are those of the model's code, without hooks."""
    return all(vars(module).keys().isdisjoint(_METHODS) for module in model.modules()) and _unhooked([model])


def _unhooked(modules: list[nn.Module]) -> bool:
    """Whether the modules and those in them are of known classes and have neither hooks nor a forward of their own.

    Every forward pass asks this, so it visits a module in half a microsecond.
    """
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return False
    for module in modules:  # it grows
        state = module.__dict__
        if (
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
            or "forward" in state
            or not _is_ours(type(module))  # type: ignore[arg-type]
        ):
            return False
        modules += [each for each in state["_modules"].values() if each is not None]
    return True


@functools.cache
def _is_ours(kind: type) -> bool:
    return f"{kind.__module__}:{kind.__qualname__}" in CLASSES


@functools.cache
def _inherits(kind: type) -> bool:
    """Whether a class of models has the methods of GPT that backends replace."""
    names = ("forward", "logits")
    return all(getattr(kind, name, None) is find(f"{_MODEL}.gpt:GPT.{name}") for name in names)


@functools.cache
def warn_once(text: str) -> None:
    """Print a warning, once per process."""
    warnings.warn(text, stacklevel=2)
