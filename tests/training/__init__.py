"""Helpers for tests of training: texts on disk, a small config, reporters, and the results of a run."""

import hashlib
import json
from pathlib import Path

import torch

from niels_gpt.config import RunConfig
from niels_gpt.config.yaml_file import load_config
from niels_gpt.training.progress import Silent

WORDS = ["the", "a", "note", "model", "byte", "loss", "step", "learns", "from", "reads", "writes", "small", "large"]
WORDS += ["never", "again", "and", "so", "then", "é", "ß"]
DELIMITER = "\n\n<dialogue>\n\n"

SMALL = ["model.T=16", "model.C=16", "model.L=1", "model.H=2", "model.dropout=0.1", "train.B=4", "train.seed=7"]
SMALL += ["train.total_steps=12", "train.warmup_steps=2", "train.base_lr=1e-2", "train.min_lr=1e-3"]
SMALL += ["train.p_train={roam: 0.6, primer: 0.4}", "train.p_val={roam: 0.25, primer: 0.75}"]
SMALL += ["output.checkpoint_every=4", "output.eval_every=3", "output.eval_steps=2"]
SMALL += ["output.sample_every=0", "output.sample_tokens=4"]


def sentence(number: int, words: int) -> str:
    """The same words for the same numbers, on every machine."""
    picked = []
    for _ in range(words):
        number = (number * 1103515245 + 12345) % 2**31
        picked.append(WORDS[(number >> 16) % len(WORDS)])
    return " ".join(picked)


def write_texts(folder: Path) -> Path:
    """Write notes/*.md and primer.txt, always the same, into a folder; returns the folder."""
    notes = folder / "notes"
    notes.mkdir(parents=True)
    for i in range(12):
        text = f"# note {i}\n\n{sentence(i, 60 + 7 * i)}\n"
        (notes / f"note_{i:02d}.md").write_text(text, encoding="utf-8")
    dialogues = [
        f"user: {sentence(100 + i, 6 + i % 5)}?\nassistant: {sentence(200 + i, 12 + i % 7)}." for i in range(40)
    ]
    (folder / "primer.txt").write_text(DELIMITER.join(dialogues), encoding="utf-8")
    return folder


def data_options(folder: Path) -> list[str]:
    """The overrides that select the texts of `write_texts`."""
    return [
        f"data.roam={folder / 'notes'}",
        f"data.primer={folder / 'primer.txt'}",
        f"data.cache_dir={folder / 'cache'}",
    ]


def small_config(folder: Path, *overrides: str) -> RunConfig:
    """A model of 7,000 weights on the texts of the folder."""
    return load_config(None, overrides=[*SMALL, *data_options(folder), *overrides])


def weights_sha256(checkpoint: Path) -> str:
    """The hash of the names and bits of all weights."""
    state = torch.load(checkpoint, weights_only=True)["model"]
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def metric_lines(run_dir: Path) -> list[dict]:
    """metrics.jsonl without the speed, which differs between runs."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines:
        assert line.pop("tokens_per_s") > 0
    return lines


def same(a, b) -> bool:
    """Whether nested lists and dicts are equal, with the same types; tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


class Spy(Silent):
    """Calls `at_step` with the number of steps done, after each; records notes and sources."""

    def __init__(self, at_step=lambda done: None):
        self.at_step, self.notes, self.sources, self.closed = at_step, [], [], False

    def data(self, task):
        self.sources = [row.source for row in task.describe()]

    def step(self, line):
        self.at_step(line["step"] + 1)

    def note(self, text):
        self.notes.append(text)

    def close(self):
        self.closed = True


class Crash(Exception):
    """Stands for a kill: nothing catches it."""


def crash_at(step):
    """Return a reporter that raises Crash after this many steps."""

    def at_step(done):
        if done == step:
            raise Crash

    return Spy(at_step)
