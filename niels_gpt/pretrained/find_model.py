"""Find a public model: a folder, or a repository of the Hugging Face Hub.

Importing this module does not import torch: a wrong name or config.json is reported before that.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

from niels_gpt.config.public_model import folder_or_id
from niels_gpt.pretrained.families import read_options
from niels_gpt.system import files

WANTED = [
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "README.md",
    "vocab.json", "merges.txt", "added_tokens.json", "SHA256SUMS",
]  # fmt: skip
"""What is downloaded of a repository: weights as safetensors, tokenizer, options. No pickles and no code."""
MOST_CONTEXT = 8192
"""Context of an imported model unless another is asked for. A KV cache is as long as it, on a GPU from the start."""
COPIES = ["*/*", "consolidated*"]
"""What is not: sub-folders, and the same weights under other names."""
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def is_repository(name: str) -> bool:
    """Whether a name has the form of a repository of the Hub: NAME/MODEL."""
    return _REPOSITORY.fullmatch(name) is not None


def find_folder(name: str, *, revision: str | None = None) -> Path:
    """The folder of a model: `name` itself if it is one, else a repository of the Hub, downloaded unless it is cached.

    name: a path or NAME/MODEL, with or without `hf:`. revision: of a repository; a folder has none.
    Raises ValueError or OSError with a reason.
    """
    check_model(name, revision=revision, context=1)
    name = folder_or_id(name)
    folder = files.expand_home(name)
    return folder if folder.is_dir() else _download(name, revision, WANTED)


def check_model(name: str, *, revision: str | None = None, context: int | None = None) -> None:
    """Raise ValueError or OSError if config.json has a model that is not supported. Of a repository, only it is read.

    context: as for `families.Family.read`.
    """
    check_name(name, revision=revision)
    name = folder_or_id(name)
    folder = files.expand_home(name)
    read_options(folder if folder.is_dir() else _download(name, revision, ["config.json"]), context=context)


def local_folder(name: str) -> Path | None:
    """The folder of a model without a download: `name` itself, or the cached main branch of a repository, or None."""
    name = folder_or_id(name)
    folder = files.expand_home(name)
    if folder.is_dir():
        return folder
    if not is_repository(name):
        return None
    import huggingface_hub

    config = huggingface_hub.try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def check_name(name: str, *, revision: str | None = None) -> None:
    """Raise ValueError if a name is neither a folder nor has the form of a repository, or a folder has a revision."""
    name = folder_or_id(name)
    folder = files.expand_home(name)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(
                f"--revision {revision}: {name} is a folder, which has no revisions; omit it, or name a repository "
                "of the Hub (NAME/MODEL)"
            )
        return
    if folder.is_file():
        raise ValueError(f"{name} is a file: name the folder that contains config.json and *.safetensors")
    if not is_repository(name):
        raise ValueError(f"{name} is neither a folder nor the name of a repository (NAME/MODEL)")


def _download(name: str, revision: str | None, wanted: list[str]) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=wanted, ignore_patterns=COPIES
        )
        return Path(folder)
    except GatedRepoError:
        raise ValueError(f"{name} is gated: accept its terms on its page, and log in with `hf auth login`") from None
    except RepositoryNotFoundError:
        raise ValueError(f"there is no folder {name} here, and no repository {name} on the Hugging Face Hub") from None
    except RevisionNotFoundError:
        raise ValueError(f"the repository {name} has no revision {revision}") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as err:
        if isinstance(err, OSError) and err.errno in _DISK_ERRORS:
            raise
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            reason, remedy = "HF_HUB_OFFLINE is set", "unset it"
        else:
            reason, remedy = (str(err).strip().splitlines() or [type(err).__name__])[0], "connect to the network"
        raise ValueError(
            f"{name} is neither a folder nor in the cache of the Hugging Face Hub, and it cannot be downloaded "
            f"({reason}): {remedy}, or name a folder with config.json and *.safetensors"
        ) from None
