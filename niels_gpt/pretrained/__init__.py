"""Public models in the Hugging Face format: their configs and tensors as ours, and ours as theirs."""
