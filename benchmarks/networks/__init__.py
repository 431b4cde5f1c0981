"""The reference networks, as Equinox models of one example."""
