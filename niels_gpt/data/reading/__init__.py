"""Read rows from the Hugging Face Hub or from local files: retries, error diagnosis, counts of dropped rows."""
