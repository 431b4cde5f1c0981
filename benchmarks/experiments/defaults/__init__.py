"""Ordinary networks, trained by `gnlin.fit` as it comes."""
