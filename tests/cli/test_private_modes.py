"""Everything that is made from private notes is private; see docs/notes.md."""

import os
import stat
import subprocess
import sys

import pytest

SMALL = [
    *("model.T=16", "model.C=16", "model.L=1", "model.H=2", "train.B=2", "train.total_steps=2"),
    *("train.warmup_steps=0", "train.p_train={roam: 1.0}", "train.p_val={roam: 1.0}", "output.eval_steps=1"),
    *("output.sample_every=2", "output.sample_tokens=4", "output.eval_every=2", "output.checkpoint_every=2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "note"), [(0o755, 0o644), (0o700, 0o600), (0o755, 0o600)])
def test_modes_of_what_is_made_from_notes(tmp_path, folder, note):
    vault, work, cache = tmp_path / "vault", tmp_path / "work", tmp_path / "work" / "cache"
    for path in (vault, work):
        path.mkdir()
        path.chmod(0o755)
    for i in range(12):
        (vault / f"{i}.md").write_text(f"note {i} is about the number {i * i}. " * 9, encoding="utf-8")
        (vault / f"{i}.md").chmod(note)
    vault.chmod(folder)
    options = [word for item in SMALL for word in ("--set", item)]
    run(work, "train", "--roam", vault, "--run-dir", "runs/a", *options)
    run(work, "train", "runs/a", "--resume", "--steps", "4", "--allow-config-change")
    run(work, "eval", "runs/a")
    run(work, "memorize", "runs/a", "--out", "memorize")
    run(work, "audit", "runs/a", "--out", "audit")
    run(work, "report", "runs/a")
    made = [path for path in work.rglob("*") if not path.is_symlink()]
    names = {path.name for path in made}
    assert names >= {"roam_train.bin", "roam_train.meta.json", "config.yaml", "metrics.jsonl", "latest.pt", "best.pt"}
    assert names >= {
        "step_00000002.txt",
        "loss.png",
        "eval.json",
        "report.json",
        "report.html",
        "audit.json",
        "report.md",
    }
    assert names >= {"environment.json"}
    # The user's cache folder is always private, and so is what names private files.
    private = {"skipped.json", "notes.json", "last-audit.json"}
    made = [path for path in made if path.name not in private and not (path.is_dir() and path.is_relative_to(cache))]
    expected = (0o700, 0o600) if note == 0o600 else (0o755, 0o644)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in made}
    assert {path: oct(mode) for path, mode in modes.items() if mode != expected[path.is_file()]} == {}
    assert stat.S_IMODE(next(cache.rglob("roam_train.bin")).parent.stat().st_mode) == 0o700


def run(folder, *words):
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "niels_gpt", *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=env, umask=0o022, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
