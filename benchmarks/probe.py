"""Linear probes: the accuracy of a linear classifier on the activations of a layer."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Scalar

import gnlin


def linear_probe(
    train: tuple[Float[Array, "n d"], Int[Array, " n"]],
    test: tuple[Float[Array, "k d"], Int[Array, " k"]],
    *,
    damping: float = 1e-3,
    max_steps: int = 20,
) -> Scalar:
    """Return the test accuracy of a linear softmax classifier of given features. The
    features are scaled to unit variance, and the classifier is trained by damped Newton
    steps on the mean cross-entropy.

    - `train`, `test`: features and labels.

    ??? cite "Reference"

        G. Alain and Y. Bengio, *Understanding Intermediate Layers Using Linear Classifier
        Probes*, 2016.
    """
    (features, labels), (test_features, test_labels) = train, test
    num_classes = max(int(jnp.max(labels)), int(jnp.max(test_labels))) + 1
    mean = features.mean(axis=0, keepdims=True)
    deviation = features.std(axis=0, keepdims=True)
    scale = jnp.where(deviation > 0, deviation, 1)
    classifier = eqx.nn.Linear(features.shape[1], num_classes, key=jax.random.key(0))
    classifier = jax.tree.map(lambda x: jnp.zeros(x.shape, features.dtype), classifier)
    solution = gnlin.solve(
        classifier,
        ((features - mean) / scale, labels),
        gnlin.DampedGaussNewton(damping, method="matrix-free"),
        loss=gnlin.SoftmaxCrossEntropy(reduction="mean"),
        max_steps=max_steps,
    )
    scaled = (test_features.astype(mean.dtype) - mean) / scale
    return gnlin.losses.accuracy(jax.vmap(solution.model)(scaled), test_labels)
