"""The data that the experiments fit: computed, scikit-learn's, or standard files."""
