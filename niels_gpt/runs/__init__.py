"""The folder of a run: config, metrics and checkpoints, and loading a model with its tokenizer."""
