"""Reading rows: from the Hugging Face Hub or from local files, with retries, diagnosis and counted drops."""
