"""Loaders: raw text from the Hub, from files, from the package itself. No tokens here."""
