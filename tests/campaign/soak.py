"""A soak test: one process trains, rebuilds a cache, chats and audits in a loop.

    python -m tests.campaign.soak --minutes 120 --json soak.json

After every round it records its resident memory, the part of it that malloc has handed out, the number of Python's
objects, open files, threads, temporary files and the bytes of its work folder. At the end it compares the last quarter
of the rounds with the second: the first quarter is the warm-up. The commands run inside one process, because a leak
ends with its process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import io
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from niels_gpt.cli.main import main as niels_gpt

ALLOWED = {
    "memory_mb": 0.02,
    "in_use_mb": 0.02,
    "objects": 0.02,
    "files": 0.0,
    "threads": 0.0,
    "temporaries": 0.0,
    "disk_mb": 0.02,
}
"""Growth from the second quarter of the rounds to the last that still counts as flat."""
WORDS = ("garden", "river", "winter", "letter", "bread", "window", "music", "paper", "stone", "morning", "market")


def write_notes(folder: Path, seed: int, count: int = 40) -> None:
    """Write a folder of notes; the seed decides their text."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        text = ". ".join(" ".join(draw.choices(WORDS, k=8)) for _ in range(12))
        (folder / f"note {i}.md").write_text(f"# {draw.choice(WORDS)} {i}\n\n{text}.\n", encoding="utf-8")


def run(*arguments: str, typed: str = "", expect: tuple[int, ...] = (0,)) -> str:
    """Run a command in this process; returns what it printed. Raises RuntimeError for another exit code."""
    printed = io.StringIO()
    before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(typed.encode()), encoding="utf-8")
    code = 0
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            niels_gpt(list(arguments))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdin = before
    if code not in expect:
        raise RuntimeError(f"niels-gpt {' '.join(arguments)} exited with {code}: {printed.getvalue()[-500:]}")
    return printed.getvalue()


SMALL = ("--steps", "20", "--set", "model.T=64", "--set", "model.C=32", "--set", "model.L=1", "--set", "model.H=2",
         "--set", "model.D=16",
         "--set", "model.d_ff=64", "--set", "train.B=4", "--set", "output.eval_every=10", "--quiet")  # fmt: skip


def one_round(folder: Path, number: int) -> None:
    """One round of the loop. The notes, and so the caches, change with every round."""
    notes, cache = folder / "notes", folder / "cache"
    write_notes(notes, seed=number)
    bytes_run, tokens_run = folder / "runs" / "bytes", folder / "runs" / "tokens"
    for path in (bytes_run, tokens_run):
        shutil.rmtree(path, ignore_errors=True)
    tokenizer = ("--vocab-size", "300") if not (cache / "tokenizer").exists() else ()
    run("cache", "build", "roam", "--path", str(notes), "--cache-dir", str(cache), *tokenizer)
    rebuilding = threading.Thread(target=_rebuild, args=(folder, number))
    run("train", "--config", "debug", "--set", "task=pretrain", "--run-dir", str(tokens_run),
        "--set", f"data.token_cache={cache}",
        "--set", "train.p_train={roam: 1.0}", "--set", "train.p_val={roam: 1.0}", *SMALL)  # fmt: skip
    rebuilding.start()
    run("train", "--config", "debug", "--notes", str(notes), "--run-dir", str(bytes_run), *SMALL)
    rebuilding.join()
    for path in (bytes_run, tokens_run):
        run("train", str(path), "--resume", "--steps", "24", "--quiet")
        run("generate", str(path), "The garden", "--max-tokens", "20", "--seed", "1")
        run("chat", str(path), "--max-tokens", "20", typed="hello\nand the river?\n/exit\n")
        run("eval", str(path))
    run("audit", str(bytes_run), "--notes", str(notes), "--stride", "200", expect=(0, 3, 4))


def _rebuild(folder: Path, number: int) -> None:
    """Rebuild another cache while a run trains in the main thread."""
    from niels_gpt.cache.build_cache import build_pretrain_cache
    from niels_gpt.tokenizer import load_tokenizer

    texts = [path.read_text(encoding="utf-8") for path in sorted((folder / "notes").glob("*.md"))]
    tokenizer = load_tokenizer(folder / "cache" / "tokenizer" / "spm.model")
    build_pretrain_cache(
        iter(texts), folder / "other", tokenizer=tokenizer, max_train_tokens=20_000, max_val_tokens=1_000,
        shard_bytes=8192, seed=number, shuffle_buffer=10,
    )  # fmt: skip


def measure(folder: Path) -> dict[str, float]:
    """What must not grow from round to round."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("ascii").splitlines())
    found = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    temporaries = [path for root in (folder, Path(tempfile.gettempdir())) for path in _temporaries(root)]
    return {
        "memory_mb": int(status["VmRSS"].split()[0]) / 1024,
        "in_use_mb": _allocated() / 1e6,
        "objects": sys.getallocatedblocks(),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": int(status["Threads"]),
        "temporaries": len(temporaries),
        "disk_mb": sum(path.stat().st_size for path in found) / 1e6,
    }


def _allocated() -> int:
    """The bytes that malloc has handed out. Resident memory also holds freed pieces that it keeps."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2  # glibc 2.33
    mallinfo2.restype = _Mallinfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                                                      "fsmblks", "uordblks", "fordblks", "keepcost")]  # fmt: skip


def _temporaries(root: Path) -> Iterator[Path]:
    yield from (path for path in root.rglob("*.tmp*") if path.exists())
    yield from root.rglob("*.partial")


def quarters(rounds: list[dict[str, float]]) -> dict[str, tuple[float, float, bool]]:
    """Per quantity: its median in the second quarter of the rounds, in the last, and whether it is flat."""
    quarter = max(len(rounds) // 4, 1)
    result = {}
    for name, allowed in ALLOWED.items():
        early = statistics.median(each[name] for each in rounds[quarter : 2 * quarter] or rounds[:1])
        late = statistics.median(each[name] for each in rounds[-quarter:])
        result[name] = (early, late, late <= early * (1 + allowed))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--json", type=Path, help="write the figures of every round")
    options = parser.parse_args()
    rounds: list[dict[str, float]] = []
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="niels-gpt-soak-tmp-")
    tempfile.tempdir = os.environ["TMPDIR"]
    folder = Path(tempfile.mkdtemp(prefix="work-"))
    end = time.monotonic() + 60 * options.minutes
    try:
        while time.monotonic() < end or len(rounds) < 4:
            one_round(folder, len(rounds))
            rounds.append(measure(folder))
            print(len(rounds), *(f"{name} {value:.1f}" for name, value in rounds[-1].items()), flush=True)
            if options.json:
                options.json.write_text(json.dumps(rounds), encoding="utf-8")
    finally:
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    table = quarters(rounds)
    print(f"{len(rounds)} rounds in {options.minutes:g} minutes")
    for name, (early, late, flat) in table.items():
        print(f"{name:12} second quarter {early:10.1f}   last quarter {late:10.1f}   {'flat' if flat else 'GROWS'}")
    return int(not all(flat for _, _, flat in table.values()))


if __name__ == "__main__":
    sys.exit(main())
