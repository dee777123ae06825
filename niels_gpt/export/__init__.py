"""Write a trained model in the formats of other programs: Hugging Face folders and GGUF files."""
