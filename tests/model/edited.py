"""Run as a program: what a copy of niels_gpt computes, by every way to use a model, with kernels and by plain torch.

    python tests/model/edited.py DEVICE FOLDER...

Each FOLDER holds a copy of the package. It prints one JSON line per folder: for kernels ("auto") and plain torch
("plain"), name of the entry point -> numbers, or the error as text. A process per copy is forked from one that has
imported torch, which takes longer than the rest.
"""

import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import numpy
import pydantic
import torch

del numpy, pydantic  # imported before the fork
PROMPTS = ["the cat ", "a model of notes reads"]
SIZES = {"V": 256, "T": 48, "C": 32, "L": 2, "H": 2, "dropout": 0.0}


def make(device, **options):
    """Return a model whose every weight matters to the logits."""
    from niels_gpt import GPT

    model = GPT({**SIZES, **options}).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_((weight.dim() == 1) + 0.2 * torch.randn(weight.shape, generator=generator))
    model.sampled_ids = 127  # so that every byte is a character
    return model.to(device)


def forward(model, device, folder):
    with torch.no_grad():
        return model(torch.arange(40, device=device)[None])[0, -1, :8].tolist()


def train(model, device, folder):
    from niels_gpt import DataConfig, OutputConfig, RunConfig, TrainConfig, save_checkpoint, train

    save_checkpoint(f"{folder}/base.pt", model, None, 0, model.config)
    source = {"primer": 1.0}
    precision = "bf16" if device == "cuda" else "fp32"  # those that have kernels
    config = RunConfig(
        init_from=f"{folder}/base.pt",
        model=model.config,
        train=TrainConfig(total_steps=3, warmup_steps=1, B=4, p_train=source, p_val=source, precision=precision),
        data=DataConfig(wiki="embedded", roam="embedded", primer="embedded", cache_dir=f"{folder}/streams"),
        output=OutputConfig(eval_steps=1, sample_tokens=4),
    )
    result = train(config, f"{folder}/run", device=device)
    lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    return [*losses, *result.evals.values()]


def evaluate(model, device, folder):
    from niels_gpt import score_stream

    return [score_stream(model, "".join(PROMPTS * 9).encode()).bits_per_byte]


def generate_one(model, device, folder):
    from niels_gpt import generate

    return list(generate(model, PROMPTS[0], max_new_tokens=30, temperature=0.0).encode())


def generate_many(model, device, folder):
    from niels_gpt import Sampling, generate_batch

    texts = generate_batch(model, PROMPTS, max_new_tokens=30, sampling=Sampling(temperature=0.0))
    return list("".join(texts).encode())


def chat(model, device, folder):
    from niels_gpt import Conversation, Sampling

    talk = Conversation(model, sampling=Sampling(temperature=0.0), max_new_tokens=30, system="be brief")
    return list("".join(talk.reply("hello")).encode())


def serve(model, device, folder):
    from fastapi.testclient import TestClient

    from niels_gpt import ByteTokenizer, Engine
    from niels_gpt.serve.app import create_app
    from niels_gpt.serve.limits import Admission, Limits
    from niels_gpt.serve.model_worker import ModelWorker
    from niels_gpt.serve.served_model import ServedModel

    limits = Limits(slots=2)
    engine = Engine(model, slots=2, prefix_tokens=64, context_overflow="half")
    engine.wait_until_ready()
    one = ServedModel("m", model, ByteTokenizer(), ModelWorker(engine, "m"), Admission(limits))
    with TestClient(create_app([one], limits=limits), base_url="http://localhost") as client:
        request = {"model": "m", "prompt": PROMPTS[1], "max_tokens": 12, "temperature": 0, "logprobs": 1}
        answer = client.post("/v1/completions", json=request)
    if answer.status_code != 200:
        raise RuntimeError(answer.text)
    return answer.json()["choices"][0]["logprobs"]["token_logprobs"]


ENTRY_POINTS = (forward, train, evaluate, generate_one, generate_many, chat, serve)


def numbers(device, options):
    """Return name of the entry point -> its numbers, or the text of its error."""
    found = {}
    for entry in ENTRY_POINTS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[entry.__name__] = entry(make(device, **options), device, folder)
            except Exception as err:
                found[entry.__name__] = f"{type(err).__name__}: {err}"
                if os.environ.get("NIELS_GPT_DEBUG"):
                    traceback.print_exc()
    return found


def run(device, package):
    """Return what the copy in a folder computes. A file `options.json` beside it has options of the model."""
    sys.path.insert(0, package)
    import niels_gpt

    assert niels_gpt.__file__.startswith(package)
    options = json.loads(Path(package, "options.json").read_text(encoding="utf-8"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = {"auto": numbers(device, options)}
    found["warnings"] = sorted({str(each.message) for each in caught if ".py was changed" in str(each.message)})
    os.environ["NIELS_GPT_BACKEND"] = "plain"
    found["plain"] = numbers(device, options)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    device, *packages = sys.argv[1:]
    for package in packages:
        sys.stdout.flush()
        if not os.fork():
            try:
                print(json.dumps(run(device, package)), flush=True)
            finally:
                os._exit(0)
        os.wait()
