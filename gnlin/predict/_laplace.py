"""The posterior of a linearised model, given data (linearised Laplace)."""

import warnings
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, ScalarLike

from .._common._checks import is_whole
from .._jacobian import DEFAULT_MEMORY_BUDGET
from .._training._model import in_inference
from .._training._solution import model_and_spec, Solution
from ..losses import AbstractLoss, SquaredError
from ..losses._base import check_loss, with_reduction
from ..losses._robust import reweighted
from ._eigenbasis import Eigenbasis
from ._kronecker import Kronecker
from ._linearised import check_finite, LinearisedModel
from ._posterior import check_deviation, Posterior


Curvature = Literal["full", "kronecker"] | int


def posterior(
    model: PyTree,
    data: Any,
    *,
    noise: ScalarLike | None = None,
    prior: ScalarLike | None = None,
    about: PyTree | None = None,
    loss: AbstractLoss = SquaredError(),
    curvature: Curvature = "full",
    from_zero: bool = False,
    filter_spec: PyTree | Callable[[Any], bool] | None = None,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> Posterior:
    r"""Compute the posterior of a linearised model's outputs, given data (linearised
    Laplace).

    With a normal prior of standard deviation $s$ about the model's parameters, and normal
    noise of standard deviation $\sigma$, the linearised model is a Gaussian process with
    the kernel $s^2\Theta$. On inputs x its mean and variance are

    $$\mu = f(x) - \Theta(x, X)(\Theta + \lambda I)^{-1}(f(X) - Y), \qquad
    v = s^2\bigl(\Theta(x, x) - \Theta(x, X)(\Theta + \lambda I)^{-1}\Theta(X, x)\bigr),$$

    where $\lambda = \sigma^2/s^2$ is the damping that finds this mean. They are exact, by
    one factorisation: singular values of the Jacobian if they fit into memory and are
    cheap enough, or eigenvalues of the smaller of kernel and curvature.

    With another loss this is Laplace's approximation about a trained model: the mean is
    the model's output, and $\Theta$ is weighted by the loss's second derivative. It holds
    at the minimum of loss plus prior, so train the model with its prior, and pass the
    result of the training. The prior is about zero, unless `about` is given.

    **Arguments:**

    - `model`: a [`gnlin.Solution`][] of [`gnlin.solve`][] or [`gnlin.fit`][], whose prior
        is then used, or a model of one example's input. A solution is used in inference
        mode, without dropout and with a fixed state, such as that of batch normalisation.
    - `data`: `(inputs, targets)`, or `(inputs, targets, weights)` with weights of the
        examples, which are inverse variances in units of the noise's.
    - `noise`: $\sigma$, in units of the targets, for squared error only, which needs it.
        [`gnlin.predict.Posterior.tuned`][] finds a better one.
    - `prior`: $s$, in units of the parameters; by default that of the training, or else
        1. (For squared error that of the training times `noise`.)
    - `about`: a model whose parameters are the prior's mean. By default the mean is zero
        after training with a prior, and for another loss; else it is `model`. For a
        trained `model`, pass the model before training: a prior about parameters that
        were fitted to the data would count the data twice. There is a warning for a
        solution that was trained without a prior.
    - `loss`: the loss of one example. Its sum over the examples is the negative
        log-likelihood, whatever its `reduction`.
    - `curvature`: `"full"` is exact. For large networks there are two approximations. A
        number k keeps the k largest eigenpairs of the curvature. `"kronecker"` replaces
        the curvature of each array of parameters by the Kronecker product with the same
        partial traces, and neglects that between two arrays; the mean is then the output
        of the trained model, with any loss.
    - `from_zero`: whether to replace the model's own outputs by zero. The result is a
        Gaussian process with the tangent kernel, independent of the initial outputs.
    - `filter_spec`: the uncertain parameters, as for [`gnlin.solve`][]. By default these
        are the parameters that were trained, or all parameters if a model is passed. The
        others count as known. For a large network take those of
        [the last layer](../uncertainty.md#a-large-network).
    - `memory_budget`: the maximum bytes of a matrix.

    **Returns:** a [`gnlin.predict.Posterior`][].

    **Raises:** `ValueError` if the data or an argument makes no sense, if anything is not
    finite, or if the matrix does not fit into the memory budget.

    !!! example

        ```python
        model = eqx.nn.MLP(3, 1, 64, 2, activation=jnp.tanh, key=jax.random.key(0))
        train = inputs[:4], targets[:4, None]
        posterior = gnlin.predict.posterior(model, train, noise=0.1).tuned()
        mean, variance = posterior(inputs[4:])
        low, high = posterior(inputs[4:]).interval(0.95, noise=posterior.noise)
        ```

    ??? cite "Reference"

        A. Immer, M. Korzepa and M. Bauer, *Improving predictions of Bayesian neural nets
        via local linearization*, AISTATS (2021), equations 8 and 9. For the Kronecker
        product: H. Ritter, A. Botev and D. Barber, *A Scalable Laplace Approximation for
        Neural Networks*, ICLR (2018); C. Van Loan and N. Pitsianis, *Approximation with
        Kronecker Products* (1993), for one from traces.
    """
    check_loss(loss)
    is_rank = not isinstance(curvature, str) and is_whole(curvature) and curvature >= 1
    if not is_rank and curvature not in ("full", "kronecker"):
        raise ValueError(
            '`curvature` must be "full", "kronecker" or a whole number of at least 1, '
            f"but {curvature!r} was given."
        )
    moves = loss.is_quadratic and curvature != "kronecker"
    if loss.is_quadratic:
        if noise is None:
            raise ValueError(
                "Squared error needs `noise`, the targets' standard deviation about the "
                "model: pass a guess, which `.tuned()` can improve."
            )
        check_deviation("noise", noise)
    elif noise is not None:
        raise ValueError("`noise` is for squared error only: leave it out.")
    if from_zero and not moves:
        raise ValueError(
            "`from_zero` is for squared error only, without "
            '`curvature="kronecker"`: leave it out.'
        )
    if about is not None and from_zero:
        raise ValueError(
            "With `from_zero` the outputs at the start are zero and `about` has no "
            "effect: leave one of them out."
        )
    is_solution = isinstance(model, Solution)
    counts_twice = is_solution and moves and about is None and not from_zero
    trained_with, state = (model.prior, model.state) if is_solution else (None, None)
    model, filter_spec = model_and_spec(model, filter_spec)
    if is_solution:
        model = in_inference(model, state)
    if trained_with is not None:
        unit = 1.0 if noise is None else noise
        prior = trained_with * unit if prior is None else prior
        if about is None and not from_zero:
            about = jax.tree.map(_zero, model)
    prior = 1.0 if prior is None else prior
    check_deviation("prior", prior)
    # The likelihood sums over all examples, however the loss was reduced in training.
    loss = reweighted(with_reduction(loss, "sum"), 0.0, every=True)
    linearised = LinearisedModel.of(
        model, data, loss, filter_spec, memory_budget, from_zero, about, moves
    )
    if counts_twice and trained_with is None:
        _warn_of_data_counted_twice()
    jacobian = linearised.train.jacobian
    if curvature == "kronecker" and not Kronecker.fits(jacobian):
        raise ValueError(
            "The Kronecker factors of an array do not fit into the memory budget of "
            f"{memory_budget:,} bytes: raise `memory_budget`, or leave the array out by "
            "`filter_spec`."
        )
    if curvature == "full" and not Eigenbasis.fits(jacobian):
        raise ValueError(
            "The smaller of kernel and curvature, of "
            f"{min(linearised.train.shape):,} rows, does not fit into the memory budget "
            f'of {memory_budget:,} bytes: pass `curvature="kronecker"`, or a '
            "`filter_spec` of fewer parameters, such as those of the last layer."
        )
    basis, slope = _set_up(linearised, curvature)
    check_finite(
        (basis.eigenvalues, slope, basis.misfit(jnp.ones((), basis.eigenvalues.dtype)))
    )
    dtype = basis.eigenvalues.dtype
    noise = jnp.asarray(1.0 if noise is None else noise, dtype)
    return Posterior(linearised, basis, slope, noise, jnp.asarray(prior, dtype))


def _zero(leaf: Any) -> Any:
    return jnp.zeros_like(leaf) if eqx.is_inexact_array(leaf) else leaf


@eqx.filter_jit
def _set_up(
    linearised: LinearisedModel, curvature: Curvature
) -> tuple[Eigenbasis | Kronecker, PyTree[Array]]:
    train = linearised.train
    problem = linearised.objective.expand(train)
    basis: Eigenbasis | Kronecker
    if curvature == "kronecker":
        basis = Kronecker.of(problem, linearised.moved())
    elif curvature == "full":
        basis = Eigenbasis.of(problem)
    else:
        basis = Eigenbasis.of_rank(problem, train.point, curvature)
    return basis, problem.gradient()


def _warn_of_data_counted_twice() -> None:
    """Warn that the prior is about parameters that were fitted to the data."""
    warnings.warn(
        "The model was trained without a prior, so that the prior is about the "
        "parameters that were fitted. This counts data twice on which the model was "
        "trained: pass `about`, the model before training, or train with `prior`; for "
        "other data pass `solution.model`.",
        stacklevel=3,
    )
