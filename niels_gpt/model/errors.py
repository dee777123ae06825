"""What goes wrong with checkpoints, of one file or of many."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says which and why."""
