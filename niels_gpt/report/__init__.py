"""Figures, tables and HTML pages about runs and measurements."""
