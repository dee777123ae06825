"""Training: one loop for all tasks, its steps, optimizers, and distribution over processes."""
