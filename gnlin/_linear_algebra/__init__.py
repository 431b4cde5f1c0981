"""Linear algebra: factorisations, conjugate gradients, and random methods."""
