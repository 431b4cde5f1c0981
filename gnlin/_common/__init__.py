"""Helpers that do not import other parts of this library."""
