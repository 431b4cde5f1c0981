"""The data that the experiments fit, each read or computed without a download."""
