"""One training loop for every task, and the folder a run leaves behind."""
