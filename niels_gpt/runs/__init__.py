"""Run folders (config, metrics, checkpoints), and loading a model with its tokenizer."""
