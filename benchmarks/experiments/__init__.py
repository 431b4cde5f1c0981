"""Experiments, one a file: each has an `EXPERIMENT` or a function `run(options)`."""
