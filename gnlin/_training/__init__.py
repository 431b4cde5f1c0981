"""Models and data as problems for a solver, and a single training step."""
