"""An HTTP server for runs: OpenAI's API over the batching engine. Needs the extra `serve`."""
