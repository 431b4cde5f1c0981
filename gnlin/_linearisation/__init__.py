"""Linearisations of functions, and the quadratic problems made from them."""
