"""The data of the experiments: computed, from scikit-learn, or in standard files."""
