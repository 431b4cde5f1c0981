"""The tangent kernel between two sets of inputs."""
