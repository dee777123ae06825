"""Token caches for the tests: one small tokenizer and a folder of caches, built once, and readers of the files.

The readers and masks are naive references, written token by token.
"""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import torch

from niels_gpt.cache.build_cache import build_pretrain_cache, build_sft_cache
from niels_gpt.cache.meta import read_meta, write_meta
from niels_gpt.config import RunConfig
from niels_gpt.config.yaml_file import load_config
from niels_gpt.tokenizer import SPECIAL_TOKENS, Tokenizer, load_tokenizer, train_tokenizer
from tests.cache import masked_row, read_offsets, read_tokens
from tests.training import sentence

VOCAB_SIZE = 400
"""Vocabulary of the tokenizer, without the four special tokens."""
PRETRAIN, SFT = ("fineweb_edu", "roam"), ("dolly15k", "oasst1", "primer")
"""Names of the caches, as in the default shares."""
UNSEEN = "日本 🙂"
"""Characters that are not in the tokenizer's training text: they are encoded as bytes."""
SHARD_BYTES = 1400
"""fineweb_edu has several shards."""
SYLLABLES = [first + rest for first in "bdfgklmnprst" for rest in ("a", "e", "i", "o", "u", "ei")]


def words(number: int, amount: int) -> str:
    """Made-up words, determined by the numbers."""
    result = []
    for _ in range(amount):
        word = ""
        for _ in range(1 + (number >> 7) % 3):
            number = (number * 1103515245 + 12345) % 2**31
            word += SYLLABLES[(number >> 16) % len(SYLLABLES)]
        result.append(word)
    return " ".join(result)


def documents(name: str) -> list[str]:
    """The documents of a pretrain cache."""
    if name == "roam":
        return [f"# note {i}\n\n{sentence(i, 20 + 3 * i)}\n  - {words(i, 6)} {UNSEEN}\n" for i in range(10)]
    texts = [f"{words(50 + i, 5 + 9 * (i % 6))}. {sentence(90 + i, 12)}, {i}." for i in range(60)]
    return [text + (f" {UNSEEN}!" if i % 7 == 0 else "") for i, text in enumerate(texts)]


def chats(name: str) -> list[list[dict[str, str]]]:
    """The conversations of an SFT cache, of one and several turns, with and without a system message."""
    result = []
    for i in range({"dolly15k": 24, "oasst1": 30, "primer": 12}[name]):
        talk = [("user", sentence(i + len(name), 2 + i % 4) + "?"), ("assistant", sentence(7 * i, 2 + i % 9))]
        if name == "oasst1":
            reply = f"{words(i + 3, 3)} {UNSEEN if i % 2 else 'é'}"
            talk += [("user", words(i, 2)), ("assistant", reply)] * (i % 3)
        if i % 4 == 3:
            talk.insert(0, ("system", sentence(31 * i, 3)))
        if i % 8 == 5:  # the reply starts too late for a small T
            talk[0] = (talk[0][0], words(i, 60))
        result.append([{"role": role, "content": text} for role, text in talk])
    return result


@functools.cache
def folder() -> Path:
    """The folder of all caches; do not change it (see `copy_to`)."""
    root = Path(tempfile.mkdtemp(prefix="niels-gpt-caches-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    corpus = [text for name in PRETRAIN for text in documents(name)]
    corpus += [message["content"] for name in SFT for talk in chats(name) for message in talk]
    corpus = [text.replace(UNSEEN, "") for text in corpus]
    tokenizer = load_tokenizer(train_tokenizer(corpus, root / "tokenizer", vocab_size=VOCAB_SIZE))
    for name in PRETRAIN:
        build_pretrain(root, name, tokenizer)
    for name in SFT:
        build_sft(root, name, tokenizer)
    return root


def build_pretrain(root: Path, name: str, model: Tokenizer, texts: list[str] | None = None) -> None:
    build_pretrain_cache(
        documents(name) if texts is None else texts,
        root / "pretrain" / name,
        tokenizer=model,
        max_train_tokens=1 << 40,
        max_val_tokens=400,
        shard_bytes=SHARD_BYTES if name == "fineweb_edu" else 1 << 20,
        seed=1,
        shuffle_buffer=None,
        workers=1,
    )


def build_sft(root: Path, name: str, model: Tokenizer, talks: list[list[dict[str, str]]] | None = None) -> None:
    talks = chats(name) if talks is None else talks
    build_sft_cache(talks, root / "sft" / name, tokenizer=model, val_frac=0.25, seed=1, workers=1)


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(folder() / "tokenizer" / "spm.model")


def special(name: str) -> int:
    """The id of sys, usr, asst or eot."""
    names = ("sys", "usr", "asst", "eot")
    (i,) = tokenizer().encode(SPECIAL_TOKENS[names.index(name)])
    return i


def copy_to(target: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(folder(), target)
    return target


@functools.cache
def other_tokenizer() -> Tokenizer:
    """A tokenizer of the same size that differs from that of the caches."""
    with tempfile.TemporaryDirectory() as temporary:
        texts = [words(1000 + i, 40) + "." for i in range(200)]
        return load_tokenizer(train_tokenizer(texts, temporary, vocab_size=tokenizer().vocab_size - 4))


# --- files on disk -----------------------------------------------------------------------------------


def shards(name: str, split: str = "train", root: Path | None = None) -> list[list[int]]:
    paths = sorted(((root or folder()) / "pretrain" / name / split).glob("shard_*.bin"))
    return [read_tokens(path) for path in paths]


def stream(name: str, split: str = "train", root: Path | None = None) -> list[int]:
    """All tokens of a pretrain cache."""
    return [token for shard in shards(name, split, root) for token in shard]


def windows(name: str, split: str, T: int, root: Path | None = None) -> list[tuple[int, list[int]]]:
    """(offset in the stream, T + 1 tokens) of every window; windows do not cross shards."""
    found, first = [], 0
    for shard in shards(name, split, root):
        found += [(first + i, shard[i : i + T + 1]) for i in range(len(shard) - T)]
        first += len(shard)
    return found


def examples(name: str, split: str = "train", root: Path | None = None) -> list[list[int]]:
    """The tokens of every example of an SFT cache."""
    path = (root or folder()) / "sft" / name
    tokens, starts = read_tokens(path / f"{split}_tokens.bin"), read_offsets(path / f"{split}_idx.npy")
    return [tokens[a:b] for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True)]


# --- targets -----------------------------------------------------------------------------------------


def sft_row(ids: list[int], T: int) -> tuple[list[int], list[int]]:
    """(x, targets) of an example, truncated or padded to T."""
    x, _, targets = masked_row(ids, T, eot=special("eot"), asst=special("asst"))
    return x, targets


def usable(talks: list[list[int]], T: int) -> list[int]:
    """The examples with a target among their first T + 1 tokens."""
    return [i for i, ids in enumerate(talks) if any(target != -100 for target in sft_row(ids, T)[1])]


def nats(model: torch.nn.Module, x: list[list[int]], targets: list[list[int]]) -> list[float]:
    """The loss of every target in order, in float64."""
    with torch.no_grad():
        logits = model(torch.tensor(x)).double()
    found = []
    for row, wanted in zip(logits, targets, strict=True):
        for scores, target in zip(row, wanted, strict=True):
            if target != -100:
                found.append((scores.exp().sum().log() - scores[target]).item())
    return found


# --- configs -----------------------------------------------------------------------------------------

SMALL = [
    "model.T=16",
    "model.C=16",
    "model.L=1",
    "model.H=2",
    "model.dropout=0.1",
    "train.total_steps=12",
    "train.warmup_steps=2",
    "train.base_lr=1e-2",
    "train.min_lr=1e-3",
    "train.B=6",
    "train.seed=7",
    "output.checkpoint_every=4",
    "output.eval_every=3",
    "output.eval_steps=2",
    "output.sample_every=0",
    "output.sample_tokens=4",
]
"""Options of a tiny model."""


def small_config(task: str, *overrides: str, root: Path | None = None) -> RunConfig:
    """A small model on the caches, with the default shares unless others are given."""
    paths = [f"task={task}", f"model.V={tokenizer().vocab_size}", f"data.token_cache={root or folder()}"]
    return load_config(None, overrides=[*SMALL, *paths, *overrides])


def options(overrides: list[str], section: str = "") -> list[str]:
    """Overrides as options of a command; those of a pipeline have a section."""
    return [part for item in overrides for part in ("--set", f"{section}{item}")]


def meta(kind: str, name: str, root: Path) -> Path:
    return root / kind / name / "meta.json"


def change_meta(kind: str, name: str, root: Path, **changes: object) -> None:
    path = meta(kind, name, root)
    write_meta(path, {**read_meta(path), **changes})


def forget_checksums(kind: str, name: str, root: Path) -> None:
    """Remove the list of files from a meta, so that changed tokens are read: only their ids are checked."""
    path = meta(kind, name, root)
    write_meta(path, {key: value for key, value in read_meta(path).items() if key != "files"})
