"""Notes on disk, a run that has memorized two of them, and P(z) as a product of softmaxes."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from niels_gpt.data.roam import list_roam_paths, split_roam_paths
from niels_gpt.model.gpt import GPT
from tests.cli import call
from tests.token_caches import words

WORDS = (24, 40, 28, 44, 32, 20, 36, 48)
"""Words per note; the order of lengths is not that of names."""
VAL_FRAC = 0.25
SPLICE = [
    "--set=task=splice",
    "--set=model={T: 64, C: 64, L: 2, H: 2, dropout: 0.0}",
    "--set=splice.num_docs=2",
    "--set=splice.eval_examples=4",
    f"--set=data.roam_val_frac={VAL_FRAC}",
    "--set=train.B=6",
    "--set=train.warmup_steps=5",
    "--set=train.optimizer=muon",
    "--set=train.base_lr=3e-2",
    "--set=output.sample_every=0",
    "--set=output.sample_tokens=4",
    "--device=cpu",
]
STEPS = (40, 80, 120)
"""Steps of the run's checkpoints."""
WINDOW, PROMPT = 48, 24
SMALL_WINDOWS = ["--window", str(WINDOW), "--prompt", str(PROMPT)]


def write_notes(folder: Path, *, first: int = 0) -> Path:
    """Write notes of made-up words, the same on every machine; return the folder."""
    folder.mkdir(parents=True)
    for i, number in enumerate(WORDS):
        text = f"# note {i}\n\n{words(1000 * first + 17 * i + 5, number)}: é.\n"
        (folder / f"note {i}.md").write_text(text, encoding="utf-8")
    return folder


def split(notes: Path) -> tuple[list[Path], list[Path]]:
    """Return the notes to train on, in order, and those held out."""
    train, held_out = split_roam_paths(list_roam_paths(str(notes)), val_frac=VAL_FRAC, seed=42)
    return [Path(path) for path in train], [Path(path) for path in held_out]


def longest(paths: list[Path], number: int) -> list[str]:
    """Return the names of the longest files."""
    return [path.name for path in sorted(paths, key=lambda path: -path.stat().st_size)[:number]]


@functools.cache
def folder() -> Path:
    """Return a folder with `notes/` and `run/`, a splice run that recites the two longest notes. Do not write to it."""
    root = Path(tempfile.mkdtemp(prefix="niels-gpt-reciting-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    notes = write_notes(root / "notes")
    options = [*SPLICE, f"--roam={notes}", f"--set=data.cache_dir={root / 'streams'}"]
    options += [f"--steps={STEPS[-1]}", f"--checkpoint-every={STEPS[0]}", "--set=output.eval_every=60"]
    with one_thread():
        assert call("train", *options, "--run-dir", root / "run") == 0
    return root


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: so small a model is slower with two, and much slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def copy_to(target: Path) -> Path:
    """Copy the folder; a test may change the notes of its copy."""
    shutil.copytree(folder(), target)
    config = target / "run" / "config.yaml"
    config.write_text(config.read_text(encoding="utf-8").replace(str(folder()), str(target)), encoding="utf-8")
    return target


def naive_p(checkpoint: Path, ids: list[int], prompt: int) -> float:
    """Return P(z) of a window: the product of softmaxes of its suffix, one forward pass per token."""
    saved = torch.load(checkpoint, weights_only=True)
    model = GPT(saved["config"])
    model.load_state_dict(saved["model"])
    model.eval()
    product = 1.0
    with torch.no_grad():
        for i in range(prompt, len(ids)):
            logits = model(torch.tensor([ids[:i]]))[0, -1].double()
            product *= math.exp(float(logits[ids[i]] - logits.logsumexp(0)))
    return product
