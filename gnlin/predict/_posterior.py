"""The posterior of a linearised model's outputs, and the evidence."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import check_finite_positive, check_scalar, is_traced
from .._common._tree import matmul
from .._jacobian import DEFAULT_MEMORY_BUDGET
from ..filters import Tikhonov
from ..losses import AbstractLoss, SigmoidCrossEntropy, SoftmaxCrossEntropy, SquaredError
from ..losses._base import check_loss
from ._eigenbasis import Eigenbasis
from ._gaussian import Gaussian
from ._linearised import check_finite, LinearisedModel


# The search for the damping of most evidence: points of a grid, the number of its
# refinements, and its upper end as a multiple of the largest eigenvalue.
_TRIED, _ROUNDS, _BEYOND = 65, 5, 1e4
# A prediction warns if the model is farther from the minimum, in standard deviations of
# the posterior; no output is off by more of its own. Measured on 150 points and 522
# parameters: 1e-5 if trained with the prior, 0.2 after the prior was tuned, 3 to 40 if
# trained without it.
_AT_MINIMUM = 1.0


def posterior(
    model: PyTree,
    data: Any,
    *,
    noise: ScalarLike | None = None,
    prior: ScalarLike = 1.0,
    about: PyTree | None = None,
    loss: AbstractLoss = SquaredError(),
    from_zero: bool = False,
    filter_spec: PyTree | Callable[[Any], bool] = eqx.is_inexact_array,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> "Posterior":
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
    at the minimum of loss plus prior, so train the model with the prior, as a group of
    residuals (see below). The prior is about zero, unless `about` is given.

    **Arguments:**

    - `model`: a model of one example's input, as for [`gnlin.solve`][].
    - `data`: `(inputs, targets)`, or `(inputs, targets, weights)` with weights of the
        examples, which are inverse variances in units of the noise's.
    - `noise`: $\sigma$, in units of the targets, for squared error only, which needs it.
        [`gnlin.predict.Posterior.tuned`][] finds a better one.
    - `prior`: $s$, in units of the parameters.
    - `about`: a model whose parameters are the prior's mean, if it is not `model`. For a
        trained `model`, pass the model before training: a prior about parameters that
        were fitted to the data would count the data twice.
    - `loss`: the loss of one example. Its sum over the examples is the negative
        log-likelihood, whatever its `reduction`.
    - `from_zero`: whether to replace the model's own outputs by zero. The result is a
        Gaussian process with the tangent kernel, independent of the initial outputs.
    - `filter_spec`: the uncertain parameters, as for [`gnlin.solve`][]. The others count
        as known. For a large network take those of the last layer (see below).
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

        A classifier, trained with its prior:

        ```python
        def arrays(model, _):
            return eqx.filter(model, eqx.is_inexact_array)

        model = eqx.nn.MLP(3, 2, 8, 1, activation=jnp.tanh, key=jax.random.key(0))
        labels, loss = (targets > 0).astype(int), gnlin.SoftmaxCrossEntropy()
        groups = {
            "data": gnlin.Residuals(
                lambda model, x: model(x), inputs, targets=labels, loss=loss
            ),
            "prior": gnlin.Residuals(arrays, weight=1 / 0.5**2),
        }
        trained = gnlin.solve(model, groups, max_steps=100).model
        posterior = gnlin.predict.posterior(
            trained, (inputs, labels), loss=loss, prior=0.5
        )
        posterior.probabilities(inputs)
        ```

        The last layer only, for a network too large for the others:

        ```python
        model = eqx.nn.MLP(3, 1, 64, 2, activation=jnp.tanh, key=jax.random.key(0))
        last = jax.tree.map(lambda _: False, model)
        last = eqx.tree_at(lambda m: m.layers[-1], last, True)
        posterior = gnlin.predict.posterior(
            model, (inputs, targets[:, None]), noise=0.1, filter_spec=last
        )
        ```

    ??? cite "Reference"

        A. Immer, M. Korzepa and M. Bauer, *Improving predictions of Bayesian neural nets
        via local linearization*, AISTATS (2021), equations 8 and 9.
    """
    check_loss(loss)
    if loss.is_quadratic:
        if noise is None:
            raise ValueError(
                "Squared error needs `noise`, the targets' standard deviation about the "
                "model: pass a guess, which `.tuned()` can improve."
            )
        _check_deviation("noise", noise)
    elif noise is not None:
        raise ValueError("`noise` is for squared error only: leave it out.")
    elif from_zero:
        raise ValueError("`from_zero` is for squared error only: leave it out.")
    if about is not None and from_zero:
        raise ValueError(
            "With `from_zero` the outputs at the start are zero and `about` has no "
            "effect: leave one of them out."
        )
    _check_deviation("prior", prior)
    # The likelihood sums over all examples, however the loss was reduced in training.
    loss = dataclasses.replace(loss, reduction="sum")
    linearised = LinearisedModel.of(
        model, data, loss, filter_spec, memory_budget, from_zero, about
    )
    if not Eigenbasis.fits(linearised.train.jacobian):
        raise ValueError(
            "The smaller of kernel and curvature, of "
            f"{min(linearised.train.shape):,} rows, does not fit into the memory budget "
            f"of {memory_budget:,} bytes: raise `memory_budget`, or pass fewer data or a "
            "`filter_spec` of fewer parameters, such as those of the last layer."
        )
    basis, slope = _set_up(linearised)
    check_finite((basis.eigenvalues, basis.coefficients, basis.outside))
    dtype = basis.eigenvalues.dtype
    noise = jnp.asarray(1.0 if noise is None else noise, dtype)
    return Posterior(linearised, basis, slope, noise, jnp.asarray(prior, dtype))


class Posterior(eqx.Module):
    """The posterior of a linearised model's outputs, from [`gnlin.predict.posterior`][].

    **Attributes:**

    - `noise`, `prior`: the standard deviations. The noise is 1 if the loss is not squared
        error.
    """

    _linearised: LinearisedModel = eqx.field(repr=False)
    _basis: Eigenbasis = eqx.field(repr=False)
    _slope: PyTree[Array] = eqx.field(repr=False)  # the gradient of the loss
    noise: Scalar
    prior: Scalar

    def __repr__(self) -> str:
        return _tree.in_words(self)

    @property
    def damping(self) -> Scalar:
        r"""The damping $\lambda = \sigma^2/s^2$."""
        return (self.noise / self.prior) ** 2

    def __call__(self, inputs: PyTree[ArrayLike] | None = None) -> Gaussian:
        """Return the mean and variance of the outputs, without noise, on n inputs with a
        leading axis; `None` for the training inputs.

        This warns if the noise is so small compared to the prior that rounding dominates
        the mean. For losses other than squared error it warns if the model is more than
        one standard deviation of the posterior from the minimum of loss plus prior."""
        _warn_of_rounding(self)
        _warn_of_slope(self, stacklevel=3)
        return _predicted(self, inputs)

    def probabilities(self, inputs: PyTree[ArrayLike] | None = None) -> PyTree[Array]:
        r"""Return the probabilities of classes on n inputs,
        $\mathrm{softmax}(\mu / \sqrt{1 + \pi v/8})$, or the sigmoid if the loss has one.

        **Raises:** `ValueError` if the loss is not one of classes.

        ??? cite "Reference"

            D. MacKay, *The Evidence Framework Applied to Classification Networks*, Neural
            Computation 4 (1992), equation 11; for several classes: Z. Lu, E. Ie and F.
            Sha, *Mean-Field Approximation to Gaussian-Softmax Integral* (2020).
        """
        loss = self._linearised.loss
        if not isinstance(loss, SoftmaxCrossEntropy | SigmoidCrossEntropy):
            raise ValueError(
                "`probabilities` needs a loss of classes, such as "
                f"`gnlin.SoftmaxCrossEntropy()`, but the loss is {type(loss).__name__}: "
                "use mean and variance instead."
            )
        of_classes = isinstance(loss, SoftmaxCrossEntropy)
        squash = jax.nn.softmax if of_classes else jax.nn.sigmoid
        moderated = lambda m, v: squash(m / jnp.sqrt(1 + math.pi / 8 * v))
        return jax.tree.map(moderated, *self(inputs))

    def at(
        self, *, noise: ScalarLike | None = None, prior: ScalarLike | None = None
    ) -> "Posterior":
        """Return the posterior with another noise or prior, without factorising again.

        !!! example

            ```python
            model = eqx.nn.MLP(3, 1, 16, 1, key=jax.random.key(0))
            posterior = gnlin.predict.posterior(
                model, (inputs, targets[:, None]), noise=0.1
            )
            evidence = jax.vmap(lambda s: posterior.at(noise=s).log_evidence())
            evidence(jnp.logspace(-3, 1, 50))
            ```
        """
        for name, value in (("noise", noise), ("prior", prior)):
            if value is not None:
                _check_deviation(name, value)
        if noise is not None and not self._is_quadratic:
            raise ValueError("`noise` is for squared error only: leave it out.")
        dtype = self._basis.eigenvalues.dtype
        new = [
            old if value is None else jnp.asarray(value, dtype)
            for old, value in ((self.noise, noise), (self.prior, prior))
        ]
        return eqx.tree_at(lambda p: (p.noise, p.prior), self, tuple(new))

    def log_evidence(self) -> Scalar:
        r"""Return the logarithm of the marginal likelihood, $\log p(Y \mid \sigma, s)$.
        It needs the eigenvalues only, so it is cheap for another noise or prior, and so
        is its derivative.

        For squared error it is $-\frac12 r^\top(s^2\Theta + \sigma^2 I)^{-1} r -
        \frac12\log\det 2\pi(s^2\Theta + \sigma^2 I)$; with another loss it is
        $-L - \frac{1}{2s^2}\lVert\theta\rVert^2 - \frac12\log\det(I + s^2\Theta)$,
        with $\theta$ relative to the mean of the prior.

        ??? cite "Reference"

            C. Rasmussen and C. Williams, *Gaussian Processes for Machine Learning*
            (2006), equation 2.30; A. Immer et al., *Scalable Marginal Likelihood
            Estimation for Model Selection in Deep Learning*, ICML (2021), equation 8.
        """
        w = self._basis.eigenvalues
        variance, scale = self.noise**2, self.prior**2
        if not self._is_quadratic:
            train = self._linearised.train
            loss = self._linearised.objective.value(train.outputs).astype(w.dtype)
            moved = self._moved()
            squared = _tree.dot(moved, moved).astype(w.dtype)
            return -loss - squared / (2 * scale) - 0.5 * jnp.sum(jnp.log1p(scale * w))
        m, log_weights = self._counted()
        left = (m - w.size) * jnp.log(variance)
        log_det = jnp.sum(jnp.log(scale * w + variance)) + left - log_weights
        misfit = self._basis.misfit(self.damping)
        return -0.5 * (misfit / scale + log_det + m * math.log(2 * math.pi))

    def _moved(self) -> PyTree[Array]:
        """Return the parameters relative to the mean of the prior."""
        point, about = self._linearised.train.point, self._linearised.about
        return point if about is None else _tree.axpy(-1, about, point)

    def _counted(self) -> tuple[Scalar, Scalar]:
        """Return the number of targets of positive weight, and the sum of the logarithms
        of their weights, which are inverse variances in units of the noise's."""
        linearised, dtype = self._linearised, self._basis.eigenvalues.dtype
        m, weights = linearised.train.shape[0], linearised.objective.weights
        if weights is None:
            return jnp.array(m, dtype), jnp.zeros((), dtype)
        counts = weights > 0
        logs = jnp.where(counts, jnp.log(jnp.where(counts, weights, 1)), 0)
        of_each = m // weights.size
        return of_each * jnp.sum(counts).astype(dtype), of_each * jnp.sum(logs)

    def tuned(self) -> "Posterior":
        """Return the posterior with the noise and prior of most evidence; for losses
        other than squared error, with the prior of most evidence.

        For each damping the best scale of both is known,
        $s^2 = r^\\top(\\Theta + \\lambda I)^{-1} r / m$. The damping is found on a grid
        that is refined about its best point.

        For losses other than squared error the model was trained with another prior than
        the tuned one. This warns, as a prediction does, if the model is then too far from
        the minimum: train again with the tuned prior, and compare the evidence of both.
        """
        tuned = _tuned(self)
        _warn_of_slope(tuned, stacklevel=4)  # one more level: Equinox wraps the method
        return tuned

    @property
    def _is_quadratic(self) -> bool:
        return self._linearised.objective.is_quadratic

    def _scaled(self) -> "Posterior":
        """Return the posterior with the same damping and the scale of most evidence."""
        if not self._is_quadratic:
            return self
        scale = jnp.sqrt(self._basis.misfit(self.damping) / self._counted()[0])
        scale = jnp.where(scale > 0, scale, self.prior)
        return self.at(noise=scale * jnp.sqrt(self.damping), prior=scale)

    def _damped(self, damping: Scalar) -> "Posterior":
        if self._is_quadratic:
            return self.at(noise=jnp.sqrt(damping) * self.prior)._scaled()
        return self.at(prior=1 / jnp.sqrt(damping))


def _check_deviation(name: str, value: ScalarLike) -> None:
    check_scalar(name, value)
    check_finite_positive(name, value)


def _warn_of_rounding(posterior: Posterior) -> None:
    """Warn if rounding dominates the mean, unless the numbers are traced."""
    damping, least = posterior.damping, posterior._basis.least_damping
    if is_traced((damping, least)) or not posterior._is_quadratic or damping >= least:
        return
    precision = "double precision, " if jnp.finfo(damping.dtype).bits < 64 else ""
    smallest = float(posterior.prior * jnp.sqrt(least))
    warnings.warn(
        f"The noise, {float(posterior.noise):.2g}, is below {smallest:.2g}, where "
        f"rounding decides the mean: use {precision}more noise or a narrower prior.",
        stacklevel=3,
    )


def _warn_of_slope(posterior: Posterior, stacklevel: int) -> None:
    """Warn if the model is not at the minimum, unless the numbers are traced."""
    if posterior._is_quadratic or is_traced(posterior):
        return
    distance = float(_distance(posterior))
    if not distance <= _AT_MINIMUM:
        warnings.warn(
            f"The model is {distance:.2g} standard deviations of the posterior from the "
            "minimum of loss plus prior, where Laplace's approximation holds: train it "
            f"with the prior of {float(posterior.prior):.3g}, as a group of residuals "
            "(see `gnlin.predict.posterior`).",
            stacklevel=stacklevel,
        )


@eqx.filter_jit
def _distance(posterior: Posterior) -> Scalar:
    r"""Return the length of a Newton step in standard deviations of the posterior,
    $\sqrt{g^\top H^{-1} g}$ with the gradient and curvature of loss plus prior. No output
    moves by more of its own standard deviations."""
    scale = posterior.prior**2
    slope = _tree.axpy(1 / scale, posterior._moved(), posterior._slope)
    return jnp.sqrt(scale * posterior._basis.inverse_norm(slope, 1 / scale))


@eqx.filter_jit
def _set_up(linearised: LinearisedModel) -> tuple[Eigenbasis, PyTree[Array]]:
    problem = linearised.objective.expand(linearised.train)
    return Eigenbasis.of(problem), problem.gradient()


@eqx.filter_jit
def _predicted(posterior: Posterior, inputs: PyTree | None) -> Gaussian:
    linearised, basis = posterior._linearised, posterior._basis
    on, damping = linearised.on(inputs), posterior.damping
    seen = basis.seen_from(on.jacobian)
    unravel = on.jacobian.codomain.unravel
    mean = on.outputs
    if posterior._is_quadratic:
        change = unravel(matmul(seen, basis.filtered(Tikhonov(damping))))
        mean = jax.tree.map(jnp.add, mean, change)
    left = basis.variance(on.jacobian, seen, damping)
    variance = posterior.prior**2 * jnp.maximum(left, 0)
    return Gaussian(mean, unravel(variance))


@eqx.filter_jit
def _tuned(posterior: Posterior) -> Posterior:
    w = posterior._basis.eigenvalues
    largest = jnp.where(jnp.max(w) > 0, jnp.max(w), 1)
    eps = jnp.finfo(w.dtype).eps
    ends = jnp.log(eps**2 * largest), jnp.log(_BEYOND * largest)

    def finer(_, ends):
        low, high = ends
        logs = low + (high - low) * jnp.linspace(0, 1, _TRIED, dtype=w.dtype)
        evidence = jax.vmap(lambda x: posterior._damped(jnp.exp(x)).log_evidence())(logs)
        best = logs[jnp.argmax(jnp.where(jnp.isfinite(evidence), evidence, -jnp.inf))]
        spacing = (high - low) / (_TRIED - 1)
        return jnp.maximum(best - spacing, low), jnp.minimum(best + spacing, high)

    low, high = jax.lax.fori_loop(0, _ROUNDS, finer, ends)
    return posterior._damped(jnp.exp((low + high) / 2))
