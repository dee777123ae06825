"""The options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import typer

from niels_gpt.cache.cli import Offline
from niels_gpt.cache.cli import OptionalInt as Count
from niels_gpt.cache.cli import OptionalPath as Place
from niels_gpt.cache.cli import OptionalText as Text
from niels_gpt.config import LAST_SEED, MOST_TOKENS
from niels_gpt.system import files

Share = Optional[float]  # noqa: UP045 (typer reads these at run time)
OfflineOption = Offline


def output_option(name: str, text: str, *, folder: bool = False) -> Any:
    """The option for a file or a folder to be written, refused before any work where it cannot be."""

    def checked(path: Place) -> Place:
        if path is not None:
            files.check_output_path(path, name, folder=folder)
        return path

    return typer.Option(name, callback=checked, help=text)


RunOption = Annotated[Place, typer.Option("--run", help="Run folder; default: the newest in runs/.")]
CheckpointOption = Annotated[Place, typer.Option("--checkpoint", help="A .pt file instead of a run's best one.")]
TokenizerOption = Annotated[
    Place, typer.Option("--tokenizer", help="The model's tokenizer; default: tokenizer.model of the run.")
]
VerifyOption = Annotated[bool, typer.Option("--verify", help="Re-hash the token caches before training.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
WikiOption = Annotated[Text, typer.Option("--wiki", help="hub, embedded, or a folder with wikitext files.")]
RoamOption = Annotated[Text, typer.Option("--roam", help="Your folder of markdown notes, or embedded.")]
PrimerOption = Annotated[Text, typer.Option("--primer", help="Your file of dialogues, or embedded.")]
SourceOption = Annotated[
    list[str],
    typer.Option("--source", metavar="NAME=PATH", help="Where a source of the config lies (data.sources.NAME.path)."),
]
EncodingOption = Annotated[
    Text, typer.Option("--encoding-errors", help="Files that are not utf-8: strict (stop) or replace (go on).")
]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a config value, e.g. train.base_lr=1e-3.")
]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 is greedy; higher is wilder.")]
TopKOption = Annotated[int, typer.Option("--top-k", help="Only the k likeliest tokens; 0 for all.")]
TopPOption = Annotated[Share, typer.Option("--top-p", help="Only the likeliest tokens that make up this share.")]
MinPOption = Annotated[Share, typer.Option("--min-p", help="Only tokens at least this likely, next to the likeliest.")]
SeedOption = Annotated[Count, typer.Option("--seed", min=0, max=LAST_SEED, help="For the same text again.")]
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", min=1, max=MOST_TOKENS, help="Longest continuation, in tokens (or bytes).")
]
WeightsOption = Annotated[
    str, typer.Option("--weights", help="float32, or int8: rounded, and faster for few texts at a time on a CPU.")
]
SplitOption = Annotated[str, typer.Option("--split", help="train, validation, test: what the source has.")]
SubsetOption = Annotated[Text, typer.Option("--subset", help="The dataset's config, e.g. wikitext-2-raw-v1.")]
PathOption = Annotated[Place, typer.Option("--path", help="A local file or folder with the source's rows.")]
SourceConfigOption = Annotated[
    Place, typer.Option("--config", help="YAML file with sources of your own (data.sources).")
]
WindowOption = Annotated[
    Count, typer.Option("--window", min=2, help="Tokens (or bytes) of a passage; default: 100, or what fits the model.")
]
PromptOption = Annotated[
    Count, typer.Option("--prompt", min=1, help="How many of them are given to the model; default: half.")
]
StrideOption = Annotated[int, typer.Option("--stride", min=1, help="From the start of one passage to the next.")]
GreedyOption = Annotated[
    Count,
    typer.Option("--greedy", min=0, help="Tokens given and decoded greedily; 0: none; default: 32, or what fits."),
]
