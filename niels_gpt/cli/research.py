"""`niels-gpt research ...`: studies of memorization, and what caches and batches hold."""

from niels_gpt.cli.command_line import App
from niels_gpt.cli.groups import Entry, group

SECTIONS = {
    "Memorization": {
        "memorize": Entry("memorize:memorize", "How much of its documents a model can recite, measured."),
        "trace": Entry("trace:trace", "Which parts of a text are verbatim in the training text."),
        "splice": Entry("splice:app", "Train on chosen documents at chosen positions."),
    },
    "Data": {
        "batch": Entry("batch:app", "What a training step learned from."),
        "lint": Entry("data:lint", "Supervised tokens of the caches for chat, and an example."),
        "inspect": Entry("cache:inspect", "Metadata, sizes and a decoded sample of a cache."),
        "diff": Entry("cache:diff", "How two caches differ; exit code 1 if they do."),
    },
}

app = App(help="Studies of memorization, and what caches and batches hold.", cls=group(SECTIONS))
