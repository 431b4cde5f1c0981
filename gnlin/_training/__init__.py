"""A model and its data as a problem for a solver, and one training step."""
