"""Tasks: the batches of a run, from byte streams, token caches, conversations or splice spans."""
