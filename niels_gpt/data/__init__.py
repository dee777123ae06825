"""Loaders: raw text and chats from the Hub, from local files, and from the package. No tokens."""
