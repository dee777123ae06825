"""What the tests of the commands share."""

import warnings

from niels_gpt.cli.main import main

SMALL = [
    "--set=model={T: 32, C: 16, L: 1, H: 2, dropout: 0.1}",
    "--set=train.warmup_steps=0",
    "--set=train.B=4",
    "--set=train.base_lr=1e-2",
    "--set=train.p_train={roam: 0.6, primer: 0.4}",
    "--set=train.p_val={roam: 0.5, primer: 0.5}",
    "--set=output.eval_steps=2",
    "--set=output.sample_tokens=5",
]
"""Options of `train` for a model that is trained in a moment."""


def call(*arguments: object) -> int:
    """Run the command line as a shell would; its exit code."""
    with warnings.catch_warnings():  # main replaces warnings.showwarning
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            return end.code or 0
    return 0


def data(folder) -> list[str]:
    """Options for the texts that tests.training.write_texts made."""
    return ["--roam", str(folder / "notes"), "--primer", str(folder / "primer.txt")]


def error_of(capsys) -> str:
    """The error message, which must be one line on stderr without a traceback."""
    errors = capsys.readouterr().err
    assert errors.startswith("error: "), errors
    assert errors.count("\n") == 1, errors
    assert errors.endswith("\n")
    assert "Traceback" not in errors
    return errors.removeprefix("error: ").rstrip("\n")
