"""Shared by the tests of token caches: a byte tokenizer, naive reference builders, killed builds, and readers of files
on disk."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import signal
import struct
import sys
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import xxhash

from niels_gpt.cache import build_cache
from niels_gpt.cache.writing import encoding, input_batches
from niels_gpt.tokenizer import load_tokenizer, train_tokenizer

IDS = {"sys": 256, "usr": 257, "asst": 258, "eot": 259}
EOT, ASST = IDS["eot"], IDS["asst"]
SPECIAL_STRINGS = [f"<|ngpt_{name}_84a5023f67d74cf29cc4001becde983c|>" for name in ("sys", "usr", "asst", "eot")]
SPLITS = ("train", "val")
UNLIMITED = 1 << 40
BYTES_META = {"token_dtype": "uint16-le", "tokenizer_sha256": None, "vocab_size": 260, "special_token_ids": IDS}
"""What a meta records of `ByteTokenizer`."""


class ByteTokenizer:
    """Ids 0..255 are bytes, followed by the special ids. Records the texts it encoded."""

    vocab_size = 260

    def __init__(self):
        self.encoded = []

    def encode(self, text):
        self.encoded.append(text)
        return list(text.encode("utf-8"))

    def decode(self, ids):
        return bytes(ids).decode("utf-8")

    def special_token_ids(self):
        return dict(IDS)


WIDE_IDS = {"sys": 259_996, "usr": 259_997, "asst": 259_998, "eot": 259_999}


class WideTokenizer(ByteTokenizer):
    """Byte b has the id 1000 * b + 7: with ids past 65,535, a cache stores uint32."""

    vocab_size = 260_000

    def encode(self, text):
        return [1000 * byte + 7 for byte in super().encode(text)]

    def decode(self, ids):
        return bytes(i // 1000 for i in ids).decode("utf-8")

    def special_token_ids(self):
        return dict(WIDE_IDS)


@functools.cache
def real_tokenizer():
    """A SentencePiece tokenizer, trained once."""
    text = "the a note model byte loss step learns from reads writes small large never again and so then é ß"
    words = text.split()
    texts = [" ".join(words[(i * j + j) % len(words)] for j in range(1, 12)) + f".\n{i}" for i in range(200)]
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(train_tokenizer(texts, folder, vocab_size=400))


@contextlib.contextmanager
def no_waiting():
    """Write files without fsync."""
    with mock.patch.object(os, "fsync", lambda descriptor: None):
        yield


@contextlib.contextmanager
def quick_folder():
    """A temporary folder, in memory if possible, without fsync."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with no_waiting(), tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def resident():
    """Resident memory of this process in bytes (Linux)."""
    with Path("/proc/self/status").open(encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) * 1024


def memory_growth(dataset):
    """Maximum growth of the resident memory while 4,000 rows are drawn."""
    generator = torch.Generator().manual_seed(0)
    dataset.get_batch(B=4, generator=generator)
    before = most = resident()
    for _ in range(80):
        dataset.get_batch(B=50, generator=generator)
        most = max(most, resident())
    return most - before


# --- references --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Expected:
    """The expected content of a pretrain cache."""

    streams: dict
    starts: dict
    dropped: Counter
    read: dict


def drop_reason(text):
    if not isinstance(text, str) or any("\ud800" <= character <= "\udfff" for character in text):
        return encoding.NOT_TEXT
    if any(special in text for special in SPECIAL_STRINGS):
        return encoding.SPECIAL
    return None if text else encoding.EMPTY


def expected_pretrain(texts, *, max_train_tokens, max_val_tokens, val_texts=None):
    """The reference: document by document and token by token, for the byte tokenizer."""
    budgets = {"train": max_train_tokens, "val": max_val_tokens}
    streams, starts = {"train": [], "val": []}, {"train": [], "val": []}
    dropped, read = Counter(), {}

    def write(name, documents, order):
        read[name] = 0
        for text in documents:
            unfilled = [split for split in order if len(streams[split]) < budgets[split]]
            if not unfilled:
                break
            read[name] += 1
            reason = drop_reason(text)
            if reason:
                dropped[reason] += 1
                continue
            stream = streams[unfilled[0]]
            starts[unfilled[0]].append(len(stream))
            for token in [*text.replace("\r\n", "\n").encode("utf-8"), EOT]:
                if len(stream) < budgets[unfilled[0]]:
                    stream.append(token)

    if val_texts is None:
        write("texts", texts, ("val", "train"))
    else:
        write("val_texts", val_texts, ("val",))
        write("texts", texts, ("train",))
    return Expected(streams, starts, dropped, read)


def chat_ids(messages, tokenizer):
    """The chat template."""
    special = tokenizer.special_token_ids()
    roles = {"system": special["sys"], "user": special["usr"], "assistant": special["asst"]}
    ids = []
    for message in messages:
        ids.append(roles[message["role"]])
        ids.extend(tokenizer.encode(message["content"]))
        ids.append(special["eot"])
    return ids


def split_rule(items, val_frac, seed):
    """Return {"train": items, "val": items} by the split of the specification."""
    n = len(items)
    n_val = 0 if n < 2 or val_frac == 0 else min(n - 1, max(1, int(n * val_frac)))
    generator = torch.Generator()
    generator.manual_seed(seed)
    held_out = torch.randperm(n, generator=generator).tolist()[:n_val]
    return {
        "train": [item for i, item in enumerate(items) if i not in held_out],
        "val": [item for i, item in enumerate(items) if i in held_out],
    }


def masked_row(tokens, T, *, eot=EOT, asst=ASST):
    """(x, y, y_masked) of one example, token by token."""
    row = list(tokens[: T + 1])
    length = len(row)
    row += [eot] * (T + 1 - length)
    target = [False] * (T + 1)
    speaking = False
    for i in range(length):
        if speaking:
            target[i] = True
            if row[i] == eot:
                speaking = False
        elif row[i] == asst:
            speaking = True
    masked = [token if wanted else -100 for token, wanted in zip(row[1:], target[1:], strict=True)]
    return row[:-1], row[1:], masked


# --- files on disk -----------------------------------------------------------------------------------


def read_tokens(path):
    data = path.read_bytes()
    assert len(data) % 2 == 0
    return list(struct.unpack(f"<{len(data) // 2}H", data))


def stream_of(folder, split="train"):
    """All tokens of a split of a pretrain cache."""
    return [token for path in sorted((folder / split).glob("shard_*.bin")) for token in read_tokens(path)]


def write_tokens(path, tokens):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    return path


def read_offsets(path):
    array = np.load(path, allow_pickle=False)
    assert array.dtype.str == "<i8"
    assert array.ndim == 1
    return array.tolist()


def tree(folder):
    """{relative path: bytes} of all files."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def digests(folder):
    return {name: hashlib.sha256(data).hexdigest() for name, data in tree(folder).items()}


def meta_of(folder):
    """The content of a meta.json, without its checksum."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    meta.pop("checksum", None)
    return meta


def check_checksums(path, contents):
    """Compare a table of checksums with the blocks of 64 KB of these files."""
    blocks = [data[at : at + 65_536] for data in contents for at in range(0, len(data), 65_536)]
    table = np.load(path)
    assert table.dtype.str == "<u8" and table.tolist() == [xxhash.xxh3_64_intdigest(block) for block in blocks]


def check_listing(folder):
    """Check that meta.json lists all files, with sizes and hashes."""
    found = tree(folder)
    found.pop("meta.json")
    listed = meta_of(folder)["files"]
    assert sorted(listed) == sorted(found)
    for name, data in found.items():
        assert listed[name]["bytes"] == len(data)
        assert listed[name]["sha256"] == hashlib.sha256(data).hexdigest()
        if name.endswith(".bin"):
            assert listed[name]["tokens"] * 2 == len(data)


def check_pretrain(folder, expected, shard_bytes):
    """Compare every file of a pretrain cache with the reference."""
    assert sorted(path.name for path in folder.iterdir()) == ["meta.json", "train", "val"]
    meta = meta_of(folder)
    for split in SPLITS:
        stream = expected.streams[split]
        data = struct.pack(f"<{len(stream)}H", *stream)
        shards = {
            f"shard_{i:05d}.bin": data[at : at + shard_bytes] for i, at in enumerate(range(0, len(data), shard_bytes))
        }
        found = tree(folder / split)
        found.pop("documents.npy")
        found.pop("checksums.npy")
        assert found == shards
        check_checksums(folder / split / "checksums.npy", shards.values())
        assert read_offsets(folder / split / "documents.npy") == expected.starts[split]
        assert meta[f"{split}_tokens"] == len(stream)
        assert meta[f"{split}_documents"] == len(expected.starts[split])
    assert meta["dropped"] == expected.dropped
    assert {name: run["items"] for name, run in meta["inputs"].items()} == expected.read
    check_listing(folder)


def check_sft(folder, kept, *, tokenizer, val_frac, seed):
    """Compare an SFT cache with the reference; `kept` are the examples that are not dropped."""
    names = {f"{split}_{what}" for split in SPLITS for what in ("checksums.npy", "idx.npy", "tokens.bin")}
    assert {path.name for path in folder.iterdir()} == names | {"meta.json"}
    meta = meta_of(folder)
    for split, examples in split_rule(kept, val_frac, seed).items():
        sequences = [chat_ids(example, tokenizer) for example in examples]
        starts, stream = [], []
        for sequence in sequences:
            starts.append(len(stream))
            stream += sequence
        assert read_tokens(folder / f"{split}_tokens.bin") == stream
        check_checksums(folder / f"{split}_checksums.npy", [(folder / f"{split}_tokens.bin").read_bytes()])
        assert read_offsets(folder / f"{split}_idx.npy") == starts
        assert meta[f"{split}_examples"] == len(examples)
        assert meta[f"{split}_tokens"] == len(stream)
    check_listing(folder)


# --- builds ------------------------------------------------------------------------------------------


def build_pretrain(texts, out_dir, **changes):
    """Build a pretrain cache, by default with small shards and without budgets."""
    options = {
        "tokenizer": ByteTokenizer(),
        "max_train_tokens": UNLIMITED,
        "max_val_tokens": 0,
        "shard_bytes": 32,
        "seed": 42,
        "shuffle_buffer": None,
    }
    build_cache.build_pretrain_cache(texts, str(out_dir), **{**options, **changes})
    return Path(out_dir)


def build_sft(examples, out_dir, **changes):
    options = {"tokenizer": ByteTokenizer(), "val_frac": 0.25, "seed": 42}
    build_cache.build_sft_cache(examples, str(out_dir), **{**options, **changes})
    return Path(out_dir)


NOTES = [f"note {i}: the model reads a note again and again" for i in range(20)]
HELD_OUT = [f"held out {i}" for i in range(4)]


def notes_cache(folder, texts=NOTES, **changes):
    """Build a pretrain cache of several shards with `real_tokenizer`."""
    options = {"tokenizer": real_tokenizer(), "max_val_tokens": UNLIMITED, "shard_bytes": 200, "seed": 1}
    return build_pretrain(texts, folder, **{**options, "val_texts": HELD_OUT, **changes})


def talk_cache(folder, examples=None, **changes):
    """Build an SFT cache with `real_tokenizer`."""
    examples = conversations(20) if examples is None else examples
    return build_sft(examples, folder, **{"tokenizer": real_tokenizer(), "val_frac": 0.2, "seed": 1, **changes})


# --- interrupted builds --------------------------------------------------------------------------------


@contextlib.contextmanager
def small_steps(*, batch_items=3, sft_step_bytes=64):
    """Batches of a few items, and SFT builds that save their state after a few examples."""
    with (
        mock.patch.object(input_batches, "BATCH_ITEMS", batch_items),
        mock.patch.object(build_cache, "SFT_CHECKPOINT_BYTES", sft_step_bytes),
    ):
        yield


@dataclasses.dataclass(frozen=True)
class Case:
    """The input and options of a repeatable build with small steps."""

    kind: str
    items: tuple
    val_items: tuple | None = None
    shuffle_buffer: int | None = None
    shard_bytes: int = 64
    max_train_tokens: int = UNLIMITED
    max_val_tokens: int = 100
    val_frac: float = 0.25
    seed: int = 7
    make_tokenizer: type = ByteTokenizer

    def build(self, out_dir, *, tokenizer=None, workers=2, batch_items=3, wrap=list, **changes):
        """`wrap` converts the items to the input: list, iter, or a generator function."""
        tokenizer = tokenizer or self.make_tokenizer()
        case = dataclasses.replace(self, **changes)
        with small_steps(batch_items=batch_items):
            options = {"tokenizer": tokenizer, "seed": case.seed, "workers": workers}
            if case.kind == "sft":
                build_sft(wrap(case.items), out_dir, val_frac=case.val_frac, **options)
            else:
                build_pretrain(
                    wrap(case.items),
                    out_dir,
                    max_train_tokens=case.max_train_tokens,
                    max_val_tokens=case.max_val_tokens,
                    shard_bytes=case.shard_bytes,
                    shuffle_buffer=case.shuffle_buffer,
                    val_texts=None if case.val_items is None else wrap(case.val_items),
                    **options,
                )
        return tokenizer


def documents(number, word="note"):
    """Unique documents of different lengths; some are dropped."""
    odd = {5: "", 11: f"forged {SPECIAL_STRINGS[3]}", 17: None, 23: "half \ud800"}
    made = [odd.get(i, f"{word} {i}:" + " and so on" * (i % 4) + "\r\n") for i in range(number)]
    return tuple(made)


def conversations(number, word="note"):
    """Unique conversations of different lengths; some are dropped."""
    made = []
    for i in range(number):
        turns = [("system", "be brief")] if i % 3 == 0 else []
        turns += [("user", f"{word} {i}?"), ("assistant", "yes" * (1 + i % 5))] * (1 + i % 2)
        made.append([{"role": role, "content": content} for role, content in turns])
    for i in range(5, number, 12):
        made[i] = []
    return tuple(made)


CASES = {
    "pretrain": Case("pretrain", documents(60)),
    "pretrain, shuffled": Case("pretrain", documents(60), shuffle_buffer=8),
    "pretrain, val given": Case(
        "pretrain", documents(45), val_items=documents(9, "held out"), max_val_tokens=UNLIMITED
    ),
    "pretrain, val given and full": Case("pretrain", documents(45), val_items=documents(9, "held out")),
    "pretrain, train full": Case("pretrain", documents(60), max_train_tokens=333),
    "sft": Case("sft", conversations(30)),
}


@functools.cache
def _server():
    """A fork server with this module preloaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.cache"])
    return context


def start(target, *arguments):
    """Start a function of this module in another process."""
    process = _server().Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def pipe():
    """A pipe between processes."""
    return _server().Pipe()


_TOUCHING = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.link", "shutil.rmtree"}


def build_and_die(case, out_dir, when):
    """Build, and die by SIGKILL right before a file or folder beside `out_dir` is touched.

    `when`: the number of the touch, or the end of the path (with the prefix "rename ": the target of a rename).
    """
    count = 0
    parent = str(Path(out_dir).parent)

    def hook(event, arguments):
        nonlocal count
        if event not in _TOUCHING or not str(arguments[0]).startswith(parent):
            return
        path = str(arguments[0])
        if isinstance(when, str):
            name, wanted = when.removeprefix("rename "), "os.rename" if when.startswith("rename ") else event
            path = str(arguments[1]) if event == "os.rename" else path
            dies = event == wanted and path.endswith(name)
        else:
            dies = count == when
        count += 1
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    case.build(out_dir)


def build_with_limited_files(case, out_dir, limit, connection):
    """Build with a file size limit of `limit` bytes; sends the error."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        case.build(out_dir)
    except Exception as err:
        connection.send((getattr(err, "errno", None), str(err)))
    else:
        connection.send(None)


def exit_code(process):
    """The exit code of a process that ends or was killed."""
    process.join(60)
    if process.exitcode is None:
        process.kill()
        raise AssertionError("a build did not end")
    return process.exitcode
