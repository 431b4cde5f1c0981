"""A function at a point, and the linearised problem of a loss on it."""
