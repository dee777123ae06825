"""Input files of all sources, and readers of the caches built from them, independent of the package."""

import functools
import itertools
import json
import os
from pathlib import Path

import sentencepiece

from niels_gpt.cache.sources.build import BuildSettings, build
from niels_gpt.config import DataConfig, SourceConfig
from niels_gpt.data.registry import sources
from tests.cache import SPECIAL_STRINGS, read_offsets, real_tokenizer, stream_of

PAGES = [f"page {i}: " + "the model reads the page. " * (1 + i % 4) for i in range(30)]
BOOKS = [f"book {i}\n\n" + "a large book of a small model. " * (3 + i) for i in range(8)]
LINES = {
    "train": ["= heading =", "", " a line of train with é ß and 日本", " another line\r\n", "  "],
    "validation": [" a held-out line", "", "= more ="],
    "test": [" never cached"],
}
DOLLY = [
    {
        "instruction": f"what is note {i}?",
        "context": f"of note {i}" if i % 3 == 0 else "",
        "response": f"note {i} is small." * (1 + i % 2),
        "category": "open_qa",
    }
    for i in range(23)
]
OASST1 = [
    {"message_id": i, "parent_id": p, "message_tree_id": t, "role": r, "text": text, "lang": "en"}
    for i, p, t, r, text in [
        ("a", None, "a", "prompter", "why is the loss large?"),
        ("b", "a", "a", "assistant", "the model is small."),
        ("c", "a", "a", "assistant", "it learns."),
        ("d", "c", "a", "prompter", "and then?"),
        ("e", "d", "a", "assistant", "it learns again."),
        ("x", None, "x", "prompter", "what is a step?"),
        ("y", "x", "x", "assistant", "a small one."),
    ]
]
THREADS = [["a", "b"], ["a", "c", "d", "e"], ["x", "y"]]
DIALOGUES = [[("user", f"ask {i}"), ("assistant", f"a small answer {i}")] for i in range(12)]
DIALOGUES[4] = [("system", "be brief"), *DIALOGUES[4], ("user", "again?"), ("assistant", "never again")]


# --- the input, written and read without the package ---------------------------------------------------


def write(path, text):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return path


def write_rows(path, rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def as_rows(texts):
    return [{"text": text} for text in texts]


def write_notes(folder="notes"):
    """Write notes in folders, some of them blank; {path: text}."""
    notes = {
        f"{'abc'[i % 3]}/note {i}.md": f"# note {i}\n\nthe model never reads it é\r\n" * (1 + i % 3) for i in range(21)
    }
    notes |= {"b/blank.md": " \n\t\n", "empty.md": "", "b.md": "between the folders"}
    for name, text in notes.items():
        write(Path(folder) / name, text)
    write(Path(folder) / "a/picture.txt", "no note")
    return notes


def write_dialogues(path="primer.txt"):
    return write(path, "\n\n<dialogue>\n\n".join("\n".join(f"{r}: {c}" for r, c in turns) for turns in DIALOGUES))


def write_everything(folder="data"):
    """Write local files of all Hub sources."""
    root = Path(folder)
    write_rows(root / "fineweb-edu" / "train.jsonl", as_rows(PAGES))
    for split, lines in LINES.items():
        write_rows(root / "wikitext" / "wikitext-103-raw-v1" / f"{split}.jsonl", as_rows(lines))
        write_rows(root / "wikitext" / "wikitext-2-raw-v1" / f"{split}.jsonl", as_rows([*lines, "of the small one"]))
    write_rows(root / "gutenberg_clean_en_splits" / "train.jsonl", as_rows(BOOKS))
    write_rows(root / "databricks-dolly-15k" / "train.jsonl", DOLLY)
    write_rows(root / "oasst1" / "train.jsonl", OASST1)
    return root


def messages(turns):
    return [{"role": role, "content": content} for role, content in turns]


class Reference:
    """SentencePiece with the same model. (It decodes U+2581 as a space: no text here has one.)"""

    def __init__(self, model):
        self.sp = sentencepiece.SentencePieceProcessor(model_proto=model)

    def encode(self, text):
        return self.sp.encode(text)

    def special_token_ids(self):
        return {
            name: self.sp.piece_to_id(s) for name, s in zip(("sys", "usr", "asst", "eot"), SPECIAL_STRINGS, strict=True)
        }

    def decode(self, ids):
        parts = []
        for i in ids:
            piece = self.sp.id_to_piece(int(i))
            parts.append(bytes([int(piece[3:5], 16)]) if self.sp.is_byte(int(i)) else piece.replace("▁", " ").encode())
        return b"".join(parts).decode(errors="replace")  # a sample may cut a character


@functools.cache
def reference():
    return Reference(real_tokenizer().model)


def documents_of(folder, split):
    """The texts of a cache; each document must end with an EOT."""
    stream = stream_of(folder, split)
    starts = [*read_offsets(folder / split / "documents.npy"), len(stream)]
    eot = reference().special_token_ids()["eot"]
    texts = []
    for begin, end in itertools.pairwise(starts):
        assert stream[end - 1] == eot
        ids = stream[begin : end - 1]
        texts.append(reference().decode(ids))
        assert ids == reference().encode(texts[-1])
    return texts


def by_budget(texts, *, train, val):
    """{split: tokens}: documents go to val until its budget is full, then to train; the last one is cut."""
    streams = {"val": [], "train": []}
    budgets = {"val": val, "train": train}
    eot = reference().special_token_ids()["eot"]
    for text in texts:
        unfilled = [split for split in streams if len(streams[split]) < budgets[split]]
        if unfilled:
            left = budgets[unfilled[0]] - len(streams[unfilled[0]])
            streams[unfilled[0]] += [*reference().encode(text), eot][:left]
    return streams


# --- building ----------------------------------------------------------------------------------------

SMALL = {
    "fineweb_train_tokens": 400,
    "fineweb_val_tokens": 50,
    "gutenberg_train_tokens": 600,
    "gutenberg_val_tokens": 100,
    "shard_bytes": 256,
    "workers": 1,
}


def settings(cache_dir="cache", **changes):
    return BuildSettings(cache_dir=Path(cache_dir), **{**SMALL, **changes})


def build_source(name, data=None, *, cache_dir="cache", tokenizer=None, force=False, **changes):
    """Build the cache of one source."""
    source = sources(data)[name]
    return build(source, settings(cache_dir, **changes), tokenizer or real_tokenizer(), force=force)


def folder_of(name, cache_dir="cache"):
    return Path(cache_dir) / ("sft" if name in ("dolly15k", "oasst1", "primer", "chats") else "pretrain") / name


def dolly_example(row):
    context = f"\n\ncontext:\n{row['context']}" if row["context"] else ""
    return messages([("user", row["instruction"] + context), ("assistant", row["response"])])


def user_config(**sources):
    return DataConfig(sources={name: SourceConfig(**config) for name, config in sources.items()})


def swap(path, old, new):
    """Change the content, but not the size or the time."""
    path = Path(path)
    state = path.stat()
    data = path.read_bytes()
    assert data.count(old) and len(old) == len(new)
    path.write_bytes(data.replace(old, new))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
