"""Evaluate a model: sampled loss, exact bits per byte, and baselines that need no model."""
