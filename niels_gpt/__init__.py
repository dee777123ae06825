"""niels-gpt."""
__version__ = "0.1.0"
