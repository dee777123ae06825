"""How good is a model: sampled loss, exact bits per byte, and what needs no model to reach."""
