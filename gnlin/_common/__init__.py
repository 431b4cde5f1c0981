"""Helpers that know nothing of this library: checks, trees, costs, devices."""
