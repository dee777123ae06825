"""Convert a Llama in the Hugging Face format, as Levanter exports it, into a checkpoint of this project.

`python -m niels_gpt.levanter.hf_checkpoint FOLDER OUT.pt --tokenizer spm.model`; all commands that take a checkpoint
(`memorize`, `generate`) then work on it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

import torch

from niels_gpt.model.gpt import GPT
from niels_gpt.pretrained.model_folder import open_folder
from niels_gpt.runs.checkpoint import save_checkpoint


def convert(folder: Path, out: Path, tokenizer: Path | None = None) -> GPT:
    """Write the model of a folder as a checkpoint; `tokenizer` is copied beside it. Returns the model.

    Raises ValueError for a model that this project's GPT cannot compute, OSError for a missing file.
    """
    opened = open_folder(folder)
    model = GPT(opened.config).eval()
    model.load_state_dict(opened.read_state(dtype=torch.float32))
    step = re.search(r"step-(\d+)$", folder.name)
    save_checkpoint(out, model, None, int(step[1]) if step else 0, model.config)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, out.with_name("tokenizer.model"))
    return model


def main(arguments: list[str]) -> None:
    """Convert as the command line asks; print one line."""
    parser = argparse.ArgumentParser(prog="python -m niels_gpt.levanter.hf_checkpoint", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with config.json and model.safetensors")
    parser.add_argument("out", type=Path, help="checkpoint to write (.pt)")
    parser.add_argument("--tokenizer", type=Path, help="spm.model of the token cache; none for bytes")
    options = parser.parse_args(arguments)
    try:
        model = convert(options.folder, options.out, options.tokenizer)
    except (ValueError, OSError) as err:
        raise SystemExit(f"error: {err}") from None
    print(f"{options.out}: {sum(p.numel() for p in model.parameters()):,} weights, V={model.config.V}")


if __name__ == "__main__":
    main(sys.argv[1:])
