"""Data configs that name where documents come from: the values of `data.base.type`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from draccus import ChoiceRegistry
from draccus.utils import ParsingError
from levanter.data.text import DatasetComponent, LmDataConfig, LmDatasetSourceConfigBase, UrlDatasetSourceConfig
from levanter.data.text.formats import LmDatasetFormatBase, TextLmDatasetFormat
from levanter.store.cache import TreeCache
from levanter.tokenizers import MarinTokenizer, load_tokenizer

from niels_gpt.levanter.documents import DocumentSource, LevanterDocuments, TokenCacheDocuments


class TypedData:
    """What data configs with a `type` share: without one it is Levanter's own data config; errors list the types."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        return "components"

    @classmethod
    def get_choice_class(cls, name: str) -> Any:
        known = cls.get_known_choices()  # type: ignore[attr-defined]
        if name not in known:
            raise ParsingError(f"there is no type {name!r}, but these: {', '.join(known)}")
        return known[name]


@dataclass(frozen=True)
class SourceConfig(TypedData, LmDataConfig, ChoiceRegistry):
    """The base of splice data."""


@SourceConfig.register_subclass("components")
@dataclass(frozen=True)
class ComponentsConfig(SourceConfig):
    """Levanter's data config, unchanged: named components and their weights."""


@SourceConfig.register_subclass("mixture")
@dataclass(frozen=True)
class LMMixtureDatasetConfig(SourceConfig):
    """Named sources and their weights, as Levanter wrote them before components: `configs` become components."""

    configs: dict[str, LmDatasetSourceConfigBase] = field(default_factory=dict)
    shuffle_per_epoch: bool = False
    """Accepted as a base of splice data, which has an order of its own."""

    def __post_init__(self) -> None:
        if self.configs and self.components:
            raise ValueError("data has both configs and components: they are two names of the same, use one")
        if self.configs:
            object.__setattr__(self, "components", {name: _component(c) for name, c in self.configs.items()})
        super().__post_init__()


@SourceConfig.register_subclass("url_single_dataset")
@dataclass(frozen=True)
class UrlSingleDatasetLMConfig(SourceConfig):
    """One dataset of files; its cache is in `cache_dir`/train."""

    train_urls: list[str] = field(default_factory=list)
    validation_urls: list[str] = field(default_factory=list)
    format: LmDatasetFormatBase = field(default_factory=TextLmDatasetFormat)
    tags: list[str] | None = None

    def __post_init__(self) -> None:
        if not self.components:
            source = UrlDatasetSourceConfig(
                tags=self.tags,
                cache_dir=self.cache_dir,
                format=self.format,
                train_urls=self.train_urls,
                validation_urls=self.validation_urls,
            )
            object.__setattr__(self, "components", {"data": _component(source)})
        super().__post_init__()


def _component(source: LmDatasetSourceConfigBase) -> DatasetComponent:
    """The component of a source. One without files or a name is only a cache that exists already."""
    only_cache = isinstance(source, UrlDatasetSourceConfig) and not (source.train_urls or source.validation_urls)
    return DatasetComponent(
        source=None if only_cache else source, cache_dir=source.cache_dir, format=source.format, tags=source.tags
    )


@SourceConfig.register_subclass("token_cache")
@dataclass(frozen=True)
class TokenCacheConfig(SourceConfig):
    """A folder of token caches that `niels-gpt cache build` wrote: the documents of splice data, token for token."""

    path: str = ""
    """The folder with tokenizer/ and pretrain/."""
    tokenizer: str | None = None
    """A Hugging Face tokenizer with as many ids; None: one that only knows the number of ids and the EOT."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("data.base.path is missing: the folder of token caches, with tokenizer/ and pretrain/")
        super().__post_init__()

    def train_set(self, *args: Any, **options: Any) -> Any:
        raise ValueError("data.type=token_cache is a base of splice data: put it under data.base of a splice type")


def named_tokenizer(name: str, option: str = "data.tokenizer") -> MarinTokenizer:
    """Load a tokenizer. Raises ValueError that names the option if it is neither a folder nor on the Hub."""
    try:
        return load_tokenizer(name)
    except (OSError, ValueError) as err:
        reason = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise ValueError(
            f"{option}={name} cannot be loaded: it is neither a folder with tokenizer.json nor a name that the Hub "
            f"answered to ({reason})"
        ) from None


def open_source(base: LmDataConfig, name: str | None, tokenizer: MarinTokenizer) -> DocumentSource:
    """The training documents of the dataset called `name`; None: the only one.

    Raises ValueError if there is no such dataset, or if its vocabulary is not the tokenizer's.
    """
    if not isinstance(base, TokenCacheConfig):
        name, caches = named_caches(base, name, tokenizer, "train")
        if name not in caches:
            raise ValueError(f"{name} has no training documents: give it train_urls, or a cache_dir with a train cache")
        return LevanterDocuments(caches[name], name, tokenizer)
    source = TokenCacheDocuments(base.path, name)
    if source.vocabulary != len(tokenizer):
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} ids, but the token cache {source.name} in {base.path} has "
            f"{source.vocabulary}: leave data.tokenizer out to use the cache's"
        )
    return source


def named_caches(
    base: LmDataConfig, name: str | None, tokenizer: MarinTokenizer, split: str
) -> tuple[str, dict[str, TreeCache[dict]]]:
    """(name of the dataset, its cache by that name, if it has this split). Other datasets are not built."""
    names = [key for key, component in base.components.items() if isinstance(component, DatasetComponent)]
    listed = ", ".join(names) or "none"
    if isinstance(base, UrlSingleDatasetLMConfig):
        key, name = names[0], name or names[0]
    elif name is None and len(names) == 1:
        key = name = names[0]
    elif name is None:
        raise ValueError(f"data.dataset_name is missing: the base has these datasets: {listed}")
    elif name not in names:
        raise ValueError(f"data.dataset_name={name}: the base has no such dataset, but these: {listed}")
    else:
        key = name
    one = LmDataConfig(
        tokenizer=tokenizer.name_or_path,
        cache_dir=base.cache_dir,
        cache_options=base.cache_options,
        enforce_eos=base.enforce_eos,
        auto_build_caches=base.auto_build_caches,
        components={key: base.components[key]},
    )
    one.__dict__["the_tokenizer"] = tokenizer  # a cached property: loaded once
    try:
        cache = one.build_caches(split).get(key)
    except RuntimeError as err:  # what workers of the build raise, such as for a file that does not exist
        cause: BaseException = err
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ValueError(f"the cache of {name} could not be built: {str(cause).strip().splitlines()[-1]}") from err
    if cache is not None:
        built_with = (cache.ledger.metadata.preprocessor_metadata or {}).get("vocab_size", len(tokenizer))
        if built_with != len(tokenizer):
            raise ValueError(
                f"the cache of {name} in {cache.cache_dir} was built with a tokenizer of {built_with} ids, but "
                f"{tokenizer.name_or_path} has {len(tokenizer)}: use that tokenizer, or another cache_dir"
            )
    return name, {} if cache is None else {name: cache}
