"""Shared by the tests of loaders: fake Hubs that serve real `datasets` objects, and files with rows."""

import functools
import gzip
import inspect
import json

import datasets
import pyarrow
import pyarrow.parquet

SHUFFLE = datasets.IterableDataset.shuffle


class RowHub:
    """Serves `rows` as a real stream or table; records the calls and the number of rows pulled."""

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
            arguments = dict(inspect.signature(SHUFFLE).bind(dataset, *args, **kwargs).arguments)
            del arguments["self"]
            self.shuffles.append(arguments)
            return SHUFFLE(dataset, *args, **kwargs)

        patch.setattr(datasets, "load_dataset", self.load_dataset)
        patch.setattr(datasets.IterableDataset, "shuffle", spy)
        return self


def serve_in_turn(patch, *results):
    """Make `datasets.load_dataset` return (or raise) one result per call, then the last forever; return the calls."""
    calls, queue = [], list(results)

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        item = queue.pop(0) if len(queue) > 1 else queue[0]
        if isinstance(item, Exception):
            raise item
        return item

    patch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def write_rows(path, rows):
    """Write rows in the format of the suffix (.jsonl, .jsonl.gz, .parquet); return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def dropped_lines(caplog):
    """Return the log lines of the loaders."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("niels_gpt")]
