"""Fast implementations of the operations of a GPT: tensors in, tensors out. Imports no model."""
