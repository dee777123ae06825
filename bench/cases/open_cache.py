"""Opening a cache of 1,000 shards: file sizes are checked against the meta, contents are not hashed."""

from __future__ import annotations

from bench.case import Case, Contender, Work, temporary_folder

SHARDS = 1000


def _work(quick: bool) -> Work:
    from niels_gpt.cache.build_cache import build_pretrain_cache
    from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset

    class Bytes:
        vocab_size = 260

        def encode(self, text: str) -> list[int]:
            return list(text.encode("utf-8"))

        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode("utf-8")

        def special_token_ids(self) -> dict[str, int]:
            return {"sys": 256, "usr": 257, "asst": 258, "eot": 259}

    root, shards = temporary_folder(), 10 if quick else SHARDS
    build_pretrain_cache(
        ["x" * 999] * shards,
        root / "cache",
        tokenizer=Bytes(),
        max_train_tokens=1 << 40,
        max_val_tokens=0,
        shard_bytes=2000,
        seed=0,
        shuffle_buffer=None,
    )
    return Work(lambda: PretrainTokenStreamDataset(root / "cache" / "train", T=64, device="cpu"))


CASE = Case("open_cache", "ms", (Contender("niels-gpt, 1,000 shards", _work, role="ours", target=100.0),))
