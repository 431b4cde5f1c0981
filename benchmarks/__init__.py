"""Experiments and benchmarks of gnlin, run by `python -m benchmarks`."""
