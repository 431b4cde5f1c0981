"""The data that the experiments fit: computed, from scikit-learn, or in standard
files."""
