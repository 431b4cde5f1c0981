r"""Measures of feature learning: how far a network's kernel and parameters have moved.

Each is a function of models or of kernels. [`gnlin.callbacks.Measure`][] adds any
function of a model to the history of a training run:

```python
first = gnlin.TangentKernel(model)(inputs)
measures = {
    "distance": lambda now: gnlin.features.parameter_distance(now, model),
    "alignment": lambda now: gnlin.features.kernel_alignment(
        gnlin.TangentKernel(now)(inputs), first
    ),
}
gnlin.fit(..., callbacks=gnlin.callbacks.Measure(measures, every="feature_update"))
```

A kernel is an array of shape `(n, c, n, c)`, for n examples and c outputs, as
[`gnlin.TangentKernel`][] returns it.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, Num, PyTree, Scalar

from ._common import _tree
from ._common._checks import as_key, check_count, says_where
from ._common._complex import check_real
from ._common._tree import ravel_pytree
from ._jacobian import DEFAULT_MEMORY_BUDGET
from ._linearisation._linearisation import Linearisation, linearise
from ._training._data import as_inputs
from ._training._group_network import of_groups
from ._training._model import make_network
from ._training._residuals import as_groups
from ._training._solution import Solution
from .losses._base import check_between
from .losses._cross_entropy import is_label


__all__ = [
    "kernel_alignment",
    "kernel_distance",
    "kernel_drift",
    "linearise_model",
    "parameter_distance",
    "relative_distances",
    "target_alignment",
]


__getattr__ = says_where(
    __name__,
    direction_alignment="the experiment `xor-features` of the benchmarks has it",
)

Kernel = Float[Array, "n c n c"]


def linearise_model(
    model: PyTree,
    inputs: Any,
    *,
    filter_spec: PyTree | Callable[[Any], bool] = eqx.is_inexact_array,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> Linearisation:
    """Linearise the outputs of an Equinox model at its parameters.

    **Arguments:**

    - `model`: a model as in [`gnlin.solve`][].
    - `inputs`: a batch of inputs; or groups of [`gnlin.Residuals`][], whose residuals, by
        name and without weights and losses, are then the outputs.
    - `filter_spec`: the leaves that are parameters, as in [`gnlin.solve`][].
    - `memory_budget`: the maximum bytes of a matrix that is computed from it.

    **Returns:** a [`gnlin.Linearisation`][].

    **Raises:** `ValueError` if there is no parameter, if a group draws its data, or if
    the inputs are not arrays of the same number of examples.

    !!! example

        ```python
        lin = gnlin.features.linearise_model(model, inputs)
        lin.shape, lin.spectrum().eigenvalues
        ```
    """
    groups = as_groups(inputs)
    if groups is None:
        parameters, network = make_network(model, filter_spec)
        inputs = jax.tree.map(jnp.asarray, as_inputs(inputs))
        args = network.args(inputs, None, None)
    else:
        parameters, network, (args, *_), _ = of_groups(model, groups, filter_spec)
    fn = network.function()
    return linearise(fn, parameters, args, memory_budget=memory_budget)


def kernel_alignment(a: Kernel, b: Kernel) -> Scalar:
    r"""Return the centred alignment of two kernels,

    $$\frac{\langle HaH, HbH\rangle}{\lVert HaH\rVert\,\lVert HbH\rVert},$$

    with Frobenius' inner product, where H subtracts the features' means over examples. It
    is 1 if the kernels are multiples of each other.

    ??? cite "Reference"

        C. Cortes, M. Mohri and A. Rostamizadeh, *Algorithms for Learning Kernels Based on
        Centered Alignment*, JMLR 13, 2012, definition 4; for tangent kernels: A. Baratin
        et al., *Implicit Regularization via Neural Feature Alignment*, 2021.
    """
    _check_kernels(a, b)
    return _tree.dot(*_normalised(_centred(a), _centred(b)))


def kernel_distance(a: Kernel, b: Kernel) -> Scalar:
    r"""Return $1 - \langle a, b\rangle / (\lVert a\rVert\,\lVert b\rVert)$, which is 0 if
    the kernels are multiples of each other.

    ??? cite "Reference"

        S. Fort et al., *Deep Learning versus Kernel Learning*, 2020, equation 3.
    """
    _check_kernels(a, b)
    # Written as a distance, it does not cancel where the kernels are nearly the same.
    apart = jnp.subtract(*_normalised(a, b))
    return 0.5 * _tree.dot(apart, apart)


def target_alignment(
    kernel: Kernel, targets: Float[Array, "n c"] | Num[Array, " n"]
) -> Scalar:
    """Return the centred alignment of a kernel with the kernel of its targets, $y y^T$
    over examples. It measures how well the directions that the kernel learns fast match
    the targets. Labels count as one-hot targets; for one output, targets may have the
    shape `(n,)`.

    ??? cite "Reference"

        N. Cristianini et al., *On Kernel-Target Alignment*, 2001.
    """
    _check_kernels(kernel)
    check_real("The targets", targets)
    num_examples, num_outputs = kernel.shape[:2]
    if targets.shape == (num_examples,) and num_outputs == 1:
        targets = targets[:, None]
    elif targets.shape == (num_examples,) and is_label(targets):
        check_between("labels", targets, 0, num_outputs - 1)
        targets = jax.nn.one_hot(targets, num_outputs, dtype=kernel.dtype)
    if targets.shape != (num_examples, num_outputs):
        raise ValueError(
            f"Targets for a kernel of the shape {kernel.shape} must have the shape "
            f"{(num_examples, num_outputs)}, or be integer labels of the shape "
            f"{(num_examples,)}, but are {targets.dtype.name} of the shape "
            f"{targets.shape}."
        )
    targets = targets.astype(kernel.dtype)
    return kernel_alignment(kernel, jnp.einsum("ic,jd->icjd", targets, targets))


def kernel_drift(
    now: Linearisation, then: Linearisation, *, key: Key[Array, ""], num_probes: int = 1
) -> Scalar:
    r"""Estimate the relative change of the kernel, without forming it:

    $$\frac{\lVert\Theta - \Theta_s\rVert_F}{\lVert\Theta_s\rVert_F},$$

    where $\Theta$ is the kernel of the first linearisation, `now`, and $\Theta_s$ that of
    the second, `then`, which was earlier.

    Both norms are estimated by $E\,\lVert\Theta u\rVert^2 = \lVert\Theta\rVert_F^2$ with
    the same standard normal probes u. A probe takes a transposed and a tangent pass of
    each linearisation.

    ??? cite "Reference"

        M. Hutchinson, *A Stochastic Estimator of the Trace of the Influence Matrix for
        Laplacian Smoothing Splines*, 1990.
    """
    check_count("num_probes", num_probes)
    key = as_key(key)
    _check_alike("linearisations' outputs", now.outputs, then.outputs)
    _, unravel = ravel_pytree(then.outputs)
    m, _ = then.shape

    def probe(key):
        u = unravel(jax.random.normal(key, (m,), _tree.dtype(then.outputs)))
        of_now, of_then = now.jvp(now.vjp(u)), then.jvp(then.vjp(u))
        moved = jax.tree.map(jnp.subtract, of_now, of_then)
        return _tree.dot(moved, moved), _tree.dot(of_then, of_then)

    moved, was = jax.lax.map(probe, jax.random.split(key, num_probes))
    return jnp.sqrt(jnp.sum(moved) / jnp.sum(was))


def parameter_distance(a: PyTree, b: PyTree) -> Scalar:
    """Return the 2-norm of the difference of two models' parameters, which are all their
    floating-point arrays."""
    a, b = map(_parameters, (a, b))
    _check_alike("models' parameters", a, b)
    a, b = _tree.promoted((a, b))
    return _tree.norm(jax.tree.map(jnp.subtract, a, b))


def relative_distances(now: PyTree, then: PyTree) -> PyTree[Scalar]:
    r"""Return $\lVert\theta - \theta_s\rVert/\lVert\theta_s\rVert$ for each array of
    parameters, in the models' structure, to see which layers have moved. The first model,
    `now`, has the parameters $\theta$, and the second, `then`, $\theta_s$. It is 0 for an
    unchanged array, and infinite for a changed one that was zero, such as a bias.

    !!! example

        ```python
        moved = gnlin.features.relative_distances(model, model)
        moved.layers[0].weight
        measures = {
            "first layer": lambda now: gnlin.features.relative_distances(now, model)
            .layers[0]
            .weight
        }
        gnlin.callbacks.Measure(measures)
        ```
    """
    now, then = map(_parameters, (now, then))
    _check_alike("models' parameters", now, then)

    def of_array(a: Array, b: Array) -> Scalar:
        a, b = (x.astype(_tree.at_least_single((a, b))) for x in (a, b))
        moved, was = _tree.norm(a - b), _tree.norm(b)
        return jnp.where(moved == 0, 0, moved / was)

    return jax.tree.map(of_array, now, then)


def _parameters(model: PyTree) -> PyTree[Array]:
    if isinstance(model, Solution):  # which holds other arrays, too
        raise ValueError("A `gnlin.Solution` was given as a model: pass its `.model`.")
    return eqx.filter(model, eqx.is_inexact_array)


def _check_kernels(*kernels: Kernel) -> None:
    shapes = [kernel.shape for kernel in kernels]
    n, c = (*shapes[0], 0, 0)[:2]
    if any(shape != (n, c, n, c) for shape in shapes):
        raise ValueError(
            "Kernels must have the shape `(n, c, n, c)`, the same if two are compared (a "
            "trace over the outputs has it as `kernel[:, None, :, None]`), but have the "
            f"shapes {' and '.join(map(str, shapes))}."
        )


def _check_alike(name: str, a: PyTree[Array], b: PyTree[Array]) -> None:
    if not _tree.alike(a, b):
        raise ValueError(f"The {name} must have the same structure and shapes.")


def _centred(kernel: Kernel) -> Kernel:
    kernel = kernel - kernel.mean(axis=0, keepdims=True)
    return kernel - kernel.mean(axis=2, keepdims=True)


def _normalised(*kernels: Kernel) -> list[Kernel]:
    """Return kernels of norm 1."""
    each = [kernel / _tree.unit(kernel) for kernel in _tree.promoted(kernels)]
    return [kernel / _tree.norm(kernel) for kernel in each]
