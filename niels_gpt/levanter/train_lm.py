"""Train a language model with Levanter on splice data.

`python -m niels_gpt.levanter.train_lm config.yaml [--KEY VALUE ...]`, for example `--data.num_docs 5`. The config is
that of `levanter.main.train_lm`, with `data.type: splice_single_document` or `splice_multi_document`; data of any other
kind works as it does there.
"""

import dataclasses
import sys
from dataclasses import dataclass, field

import levanter.config
from draccus.utils import DecodingError, ParsingError
from levanter.compat.hf_checkpoints import HFCompatConfig
from levanter.main import train_lm

from niels_gpt.levanter.component import SpliceComponent
from niels_gpt.levanter.configs import DataConfig, SpliceDataConfig
from niels_gpt.levanter.sources import ComponentsConfig, LMMixtureDatasetConfig, named_tokenizer


@dataclass
class TrainLmConfig(train_lm.TrainLmConfig):
    """Levanter's config of a run, with the data types of this package."""

    data: DataConfig = field(default_factory=ComponentsConfig)


def prepare(config: train_lm.TrainLmConfig) -> None:
    """Fill in what the data and the rest of the config know of each other.

    The model takes the tokenizer of the data. The order of splice data takes the seed of the run, and the run as many
    steps as `data.epochs` take. Raises ValueError if the vocabularies of data and model differ.
    """
    data = config.data
    if isinstance(data, LMMixtureDatasetConfig) and data.shuffle_per_epoch:
        raise ValueError("data.shuffle_per_epoch has no effect on data.type=mixture: use data.shuffle")
    tokenizer = data.the_tokenizer if isinstance(data, SpliceDataConfig) else named_tokenizer(data.tokenizer)
    if isinstance(config.model, HFCompatConfig) and getattr(config.model, "tokenizer", "") is None:
        config.model = dataclasses.replace(config.model, tokenizer=tokenizer.name_or_path)
    check_vocabulary(config, len(tokenizer))
    if not isinstance(data, SpliceDataConfig):
        return
    if config.data_seed is None:
        config.data_seed = config.trainer.seed
    schedule = config.trainer.batch_schedule
    if data.epochs is not None:
        Pos = config.model.max_Pos.resize(config.train_seq_len or config.model.max_seq_len)
        data.fit_run(batch_size=schedule.batch_size_at_step(0))
        examples = len(data.dataset(Pos, batch_size=1).core) * data.epochs
        steps = schedule.find_step_containing_offset(examples - 1) + 1
        config.trainer = dataclasses.replace(config.trainer, num_train_steps=steps)
        print(f"data.epochs={data.epochs}: {examples:,} examples, so num_train_steps={steps:,}", flush=True)
    data.fit_run(batch_size=schedule.batch_size_at_step(0), steps=config.trainer.num_train_steps)


def check_vocabulary(config: train_lm.TrainLmConfig, size: int) -> None:
    """Raise ValueError if a component, the model's tokenizer or the initial weights have another number of ids."""
    for key, component in config.data.components.items():
        if isinstance(component, SpliceComponent) and len(component.the_tokenizer) != size:
            own = len(component.the_tokenizer)
            raise ValueError(
                f"data.tokenizer has {size} token ids, but the documents of data.components.{key} have {own}: "
                "use one tokenizer for all"
            )
    model, fix = config.model, "use one tokenizer for data and model"
    name = getattr(model, "tokenizer", None)
    other = size if name is None else len(named_tokenizer(name, "model.tokenizer"))
    if other != size:
        raise ValueError(f"the data has {size} token ids, but model.tokenizer={name} has {other}: {fix}")
    if config.initialize_from_hf and not config.pad_tokenizer_to_match_model:
        reference = config.initialize_from_hf
        try:
            converter = model.hf_checkpoint_converter(*([reference] if isinstance(reference, str) else []))
            other = converter.default_hf_config.vocab_size
        except OSError as err:
            raise ValueError(f"initialize_from_hf={reference} cannot be loaded: {one_line(err)}") from None
        if other != size:
            raise ValueError(f"the data has {size} token ids, but the model {reference} has {other}: {fix}")


def main(config: TrainLmConfig) -> None:
    """Train. Raises ValueError for a config that does not fit together."""
    prepare(config)
    train_lm.main(config)


def one_line(err: BaseException) -> str:
    """The message of an error. One of the parser gets the option, and the message of the error that caused it."""
    option = ""
    while isinstance(err, ParsingError):
        if isinstance(err, DecodingError):
            option = f"{'.'.join(err.key_path)}: " if err.key_path else option
        if err.__cause__ is None or isinstance(err.__cause__, KeyError):
            break
        err = err.__cause__
    message = err.message if isinstance(err, DecodingError) else str(err)
    return option + next(iter(message.splitlines()), type(err).__name__)


def run(args: list[str]) -> None:
    """Parse the command line and train; what the user can change is one line on stderr and exit code 1."""
    if args and not args[0].startswith("-"):
        args = ["--config_path", *args]
    try:
        levanter.config.main(main, args=args)()
    except (ValueError, OSError, ParsingError) as err:
        raise SystemExit(f"error: {one_line(err)}") from None


if __name__ == "__main__":
    run(sys.argv[1:])
