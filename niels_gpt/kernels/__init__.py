"""Fast implementations of single operations: tensors in, tensors out. Nothing here imports the model."""
