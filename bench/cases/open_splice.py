"""Opening a splice dataset: one with 1,000,000 starts, and one with 1,000,000 documents."""

from __future__ import annotations

from bench.case import Case, Contender, Work

S = 4096


def _starts(quick: bool) -> Work:
    import numpy as np

    from niels_gpt.splice import MultiSpliceDocumentDataset

    length = 5_000 if quick else 54_095  # 50,000 starts each
    documents = [np.zeros(length, dtype=np.uint16)] * 20

    def run() -> int:
        dataset = MultiSpliceDocumentDataset(
            S=S, doc_tokens_list=documents, pad_token_id=0, balance_mode="by_temperature", balance_tau=0.7, alpha=0.8
        )
        return len(dataset)

    return Work(run, facts={"starts": run()})


def _documents(quick: bool) -> Work:
    import numpy as np

    from niels_gpt.splice import MultiSpliceDocumentDataset

    class Lengths:
        """Lengths of documents whose tokens are never read."""

        lengths = np.random.default_rng(0).integers(100, 10_000, 1_000 if quick else 1_000_000)

        def read(self, doc: int, t: int, out: np.ndarray) -> None:
            raise NotImplementedError

    def run() -> None:
        MultiSpliceDocumentDataset(
            S=S,
            doc_tokens_list=(),
            documents=Lengths(),
            pad_token_id=0,
            balance_mode="by_temperature",
            sampler="stream",
        )

    return Work(run)


CASE = Case(
    "open_splice",
    "ms",
    (
        Contender("niels-gpt, 1,000,000 starts", _starts, role="ours", target=50.0),
        Contender("niels-gpt, 1,000,000 documents, alias table", _documents, role="ours"),
    ),
)
