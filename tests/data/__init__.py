"""What the tests of loaders share: stand-ins for the Hub that serve real `datasets` objects."""

import functools
import inspect

import datasets

SHUFFLE = datasets.IterableDataset.shuffle


class RowHub:
    """Serves `rows` as a real stream or table, and notes what was asked for and how many rows were pulled."""

    def __init__(self, rows):
        self.rows, self.calls, self.shuffles, self.pulled = rows, [], [], 0

    def load_dataset(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        if not kwargs.get("streaming"):
            return datasets.Dataset.from_list(self.rows)

        def generate():
            for row in self.rows:
                self.pulled += 1
                yield row

        return datasets.IterableDataset.from_generator(generate)

    def install(self, patch):
        @functools.wraps(SHUFFLE)
        def spy(dataset, *args, **kwargs):
            given = dict(inspect.signature(SHUFFLE).bind(dataset, *args, **kwargs).arguments)
            del given["self"]
            self.shuffles.append(given)
            return SHUFFLE(dataset, *args, **kwargs)

        patch.setattr(datasets, "load_dataset", self.load_dataset)
        patch.setattr(datasets.IterableDataset, "shuffle", spy)
        return self


def serve_in_turn(patch, *made):
    """Let `datasets.load_dataset` give these (or raise them), one per call, the last ever after; the calls to come."""
    calls, queue = [], list(made)

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        item = queue.pop(0) if len(queue) > 1 else queue[0]
        if isinstance(item, Exception):
            raise item
        return item

    patch.setattr(datasets, "load_dataset", load_dataset)
    return calls
