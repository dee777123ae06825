"""Splice datasets for Levanter: the classes of `niels_gpt.splice` as Levanter datasets and data configs.

Needs the extra `levanter`. Importing the package also registers the components `splice_single_document` and
`splice_multi_document`, which mix splice data with other data in Levanter's own configs.
"""

from niels_gpt.levanter.installed import check_levanter

check_levanter()

from niels_gpt.levanter.component import SpliceMultiDocumentComponent, SpliceSingleDocumentComponent  # noqa: E402
from niels_gpt.levanter.configs import SpliceMultiDocumentLMConfig, SpliceSingleDocumentLMConfig  # noqa: E402
from niels_gpt.levanter.datasets import MultiSpliceDocumentDataset, SpliceDocumentDataset  # noqa: E402
from niels_gpt.levanter.sources import (  # noqa: E402
    LMMixtureDatasetConfig,
    TokenCacheConfig,
    UrlSingleDatasetLMConfig,
)

__all__ = [
    "LMMixtureDatasetConfig",
    "MultiSpliceDocumentDataset",
    "SpliceDocumentDataset",
    "SpliceMultiDocumentComponent",
    "SpliceMultiDocumentLMConfig",
    "SpliceSingleDocumentComponent",
    "SpliceSingleDocumentLMConfig",
    "TokenCacheConfig",
    "UrlSingleDatasetLMConfig",
]
