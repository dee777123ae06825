"""Open the caches of a folder for training; they share one tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from niels_gpt.cache.formats import SPLITS, CacheError, cache_folders
from niels_gpt.cache.meta import read_meta
from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from niels_gpt.cache.remote import local_folder
from niels_gpt.cache.sft_dataset import SFTExampleDataset
from niels_gpt.system.program import command
from niels_gpt.tokenizer import SubwordTokenizer, load_tokenizer


class CacheFolder:
    """A folder with a tokenizer and caches pretrain/NAME and sft/NAME."""

    def __init__(self, path: str | Path, *, build: Callable[[Sequence[str]], str] | None = None) -> None:
        """build: what to type to build the caches of these sources (none: all), for messages.

        Raises CacheError if the folder or its tokenizer is missing.
        """
        self.location = path
        """As given: a path, or a URL."""
        self.path = local_folder(path)
        self._build_command = build or self._default_command
        try:
            self.tokenizer: SubwordTokenizer = load_tokenizer(self.path / "tokenizer")
        except FileNotFoundError:
            raise CacheError(
                f"no token caches in {self.location} (no tokenizer/spm.model): build them with "
                f"{self._build_command(())}, or set another data.token_cache"
            ) from None

    def names(self, kind: str) -> list[str]:
        """Names of the finished caches of a kind (`pretrain`, `sft`)."""
        folders = cache_folders(self.path, kind)
        return [folder.name for folder in folders if read_meta(folder / "meta.json").get("built") is not False]

    def check(self, kind: str, names: Iterable[str], *, option: str) -> None:
        """Raise CacheError that names the missing caches and the remedies; `option` sets the shares of the caches."""
        have = self.names(kind)
        missing = [name for name in names if name not in have]
        if missing:
            raise CacheError(
                f"no {kind} cache {', '.join(missing)} in {self.location}: build it "
                f"({self._build_command(missing)}), or give {option} only caches that exist: "
                f"{', '.join(have) or 'there are none'}"
            )

    def _default_command(self, names: Sequence[str]) -> str:
        words = ["build", *names] if names else ["build-all"]
        return command("cache", *words, "--cache-dir", self.location)

    def pretrain(self, name: str, split: str, *, T: int, verify: bool = False) -> PretrainTokenStreamDataset:
        """Open the windows of a pretrain cache. Raises CacheError."""
        assert split in SPLITS
        folder = self.path / "pretrain" / name / split
        return PretrainTokenStreamDataset(
            folder, T=T, device="cpu", tokenizer_sha256=self.tokenizer.sha256, verify=verify
        )

    def sft(self, name: str, split: str, *, T: int, verify: bool = False) -> SFTExampleDataset:
        """Open the examples of an SFT cache. Raises CacheError."""
        assert split in SPLITS
        folder = self.path / "sft" / name
        special = self.tokenizer.special_token_ids()
        return SFTExampleDataset(
            folder / f"{split}_tokens.bin",
            folder / f"{split}_idx.npy",
            T=T,
            device="cpu",
            eot_id=special["eot"],
            asst_id=special.get("asst"),
            tokenizer_sha256=self.tokenizer.sha256,
            verify=verify,
        )
