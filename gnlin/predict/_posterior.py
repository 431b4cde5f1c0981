"""The posterior of a linearised model's outputs, and the evidence."""

import math
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import (
    as_key,
    check_count,
    check_finite_positive,
    check_scalar,
    is_traced,
)
from .._jacobian import multiplied
from ..losses import SigmoidCrossEntropy, SoftmaxCrossEntropy
from ._eigenbasis import Eigenbasis
from ._gaussian import Gaussian
from ._kronecker import Kronecker
from ._linearised import LinearisedModel


# The search for the damping of the largest evidence: points of a grid, the number of its
# refinements, and its upper end as a multiple of the largest eigenvalue.
_TRIED, _ROUNDS, _BEYOND = 65, 5, 1e4
# A prediction warns if the model is farther than this from the minimum, in standard
# deviations of the posterior. No output is off by more than that many of its own.
# Measured on 150 points and 522 parameters: 1e-5 if trained with the prior, 0.2 after the
# prior was tuned, 3 to 40 if trained without it.
_AT_MINIMUM = 1.0


class Posterior(eqx.Module):
    """The posterior of a linearised model's outputs, from [`gnlin.predict.posterior`][].

    **Attributes:**

    - `noise`, `prior`: the standard deviations. The noise is 1 if the loss is not squared
        error.
    """

    _linearised: LinearisedModel = eqx.field(repr=False)
    _basis: Eigenbasis | Kronecker = eqx.field(repr=False)
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
        the mean. If the mean is the model's output, it warns if the model is more than
        one standard deviation of the posterior from the minimum of loss plus prior."""
        _warn_of_rounding(self)
        _warn_of_slope(self, stacklevel=3)
        return _predicted(self, inputs)

    def sample(
        self,
        inputs: PyTree[ArrayLike] | None = None,
        num_samples: int = 1,
        *,
        key: Key[Array, ""],
    ) -> PyTree[Array]:
        r"""Draw functions from the posterior, and return their outputs on n inputs, with
        leading axes `(num_samples, n)`. The outputs of a draw belong to one linearised
        model, so they have the posterior's correlations, between inputs as well. They are
        without noise.

        A draw takes a pass through the linearised model on the inputs, and two on the
        training inputs if the kernel was factorised. It has derivatives by the inputs,
        the noise and the prior.

        !!! example

            ```python
            model = eqx.nn.MLP(3, 2, 16, 1, jnp.tanh, key=jax.random.key(0))
            labels = jnp.array([0, 1, 1, 0, 1, 0])
            data, loss = (inputs, labels), gnlin.SoftmaxCrossEntropy()
            solution = gnlin.solve(model, data, loss=loss, prior=1.0)
            posterior = gnlin.predict.posterior(solution, data, loss=loss)
            logits = posterior.sample(inputs, 1000, key=jax.random.key(1))
            probabilities = jnp.mean(jax.nn.softmax(logits), axis=0)
            ```
        """
        check_count("num_samples", num_samples)
        _warn_of_rounding(self, stacklevel=4)  # Equinox wraps this method, and the next
        _warn_of_slope(self, stacklevel=4)
        return _sampled(self, inputs, num_samples, as_key(key))

    def probabilities(self, inputs: PyTree[ArrayLike] | None = None) -> PyTree[Array]:
        r"""Return the probabilities of C classes on n inputs. They approximate the
        integral of the softmax over the logits. With $d$, each logit less the mean of the
        others, they are

        $$\mathrm{softmax}\Bigl(\frac{(1 - 1/C)\,\mathbb{E}\,d}
        {\sqrt{1 + \tfrac{\pi}{8}\operatorname{var} d}}\Bigr).$$

        With two classes, or if the loss has a sigmoid, this is MacKay's formula. For the
        integral itself, average over draws of [`gnlin.predict.Posterior.sample`][].

        **Raises:** `ValueError` if the loss is not one of classes.

        ??? cite "Reference"

            D. MacKay, *The Evidence Framework Applied to Classification Networks*, Neural
            Computation 4 (1992), equation 11; for several classes, but with the variances
            of the logits themselves: Z. Lu, E. Ie and F. Sha, *Mean-Field Approximation
            to Gaussian-Softmax Integral* (2020).
        """
        loss = self._linearised.objective.loss
        if not isinstance(loss, SoftmaxCrossEntropy | SigmoidCrossEntropy):
            raise ValueError(
                "`probabilities` needs a loss of classes, such as "
                f"`gnlin.SoftmaxCrossEntropy()`, but the loss is {type(loss).__name__}: "
                "use mean and variance instead."
            )
        _warn_of_slope(self, stacklevel=4)
        moderated = lambda m, v: m / jnp.sqrt(1 + math.pi / 8 * v)
        if isinstance(loss, SigmoidCrossEntropy):
            predicted = _predicted(self, inputs)
            return jax.nn.sigmoid(jax.tree.map(moderated, *predicted))
        # A constant added to all logits changes no probability, so the data say nothing
        # about it, and its variance is the prior's.
        differences = moderated(*_predicted(self, inputs, differences=True))
        num_classes = differences.shape[-1]
        return jax.nn.softmax((1 - 1 / num_classes) * differences)

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
                check_deviation(name, value)
        if noise is not None and not self._is_quadratic:
            raise ValueError("`noise` is for squared error only: leave it out.")
        new = [
            old if value is None else jnp.asarray(value, old.dtype)
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
        with $\theta$ relative to the mean of the prior. $L$ is the negative
        log-likelihood, with all constants for gnlin's counts and successes, so that
        dispersions can be compared.

        ??? cite "Reference"

            C. Rasmussen and C. Williams, *Gaussian Processes for Machine Learning*
            (2006), equation 2.30; A. Immer et al., *Scalable Marginal Likelihood
            Estimation for Model Selection in Deep Learning*, ICML (2021), equation 8.
        """
        w = self._basis.eigenvalues
        variance, scale = self.noise**2, self.prior**2
        if not self._is_quadratic:
            train = self._linearised.train
            objective = self._linearised.objective
            loss = objective.value(train.outputs) - objective.left_out(train.outputs)
            loss = loss.astype(w.dtype)
            moved = self._linearised.moved()
            squared = _tree.dot(moved, moved).astype(w.dtype)
            return -loss - squared / (2 * scale) - 0.5 * jnp.sum(jnp.log1p(scale * w))
        m, log_weights = self._counted()
        left = (m - w.size) * jnp.log(variance)
        log_det = jnp.sum(jnp.log(scale * w + variance)) + left - log_weights
        misfit = self._basis.misfit(self.damping)
        return -0.5 * (misfit / scale + log_det + m * math.log(2 * math.pi))

    def _counted(self) -> tuple[Scalar, Scalar]:
        """Return the number of targets of positive weight, and the sum of the logarithms
        of their weights, which are inverse variances in units of the noise's."""
        train, objective = self._linearised.train, self._linearised.objective
        dtype, weights = self._basis.eigenvalues.dtype, objective.weights
        number = objective.num_targets(train.outputs).astype(dtype)
        if weights is None:
            return number, jnp.zeros((), dtype)
        logs = jnp.log(jnp.where(weights > 0, weights, 1))
        return number, train.shape[0] // weights.size * jnp.sum(logs)

    def tuned(self) -> "Posterior":
        """Return the posterior with the noise and prior of the largest evidence; for
        losses other than squared error, with the prior of the largest evidence.

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

    @property
    def _moves(self) -> bool:
        """Whether the mean differs from the model's output."""
        return self._is_quadratic and self._basis.moves

    def _damped(self, damping: Scalar) -> "Posterior":
        """Return the posterior with this damping, and for squared error with the scale of
        the largest evidence."""
        if not self._is_quadratic:
            return self.at(prior=1 / jnp.sqrt(damping))
        scale = jnp.sqrt(self._basis.misfit(damping) / self._counted()[0])
        scale = jnp.where(scale > 0, scale, self.prior)
        return self.at(noise=scale * jnp.sqrt(damping), prior=scale)


class _Contrast(eqx.Module):
    """The matrix that subtracts from each logit the mean of the others."""

    def mv(self, logits: Float[Array, "*positions classes"]) -> Array:
        c = logits.shape[-1]
        return (c * logits - jnp.sum(logits, -1, keepdims=True)) / max(1, c - 1)


def check_deviation(name: str, value: ScalarLike) -> None:
    check_scalar(name, value)
    check_finite_positive(name, value)


@eqx.filter_jit
def _predicted(
    posterior: Posterior, inputs: PyTree | None, *, differences: bool = False
) -> Gaussian:
    """Return the mean and variance of the outputs, or of each output less the mean of the
    others."""
    linearised, basis = posterior._linearised, posterior._basis
    on, damping = linearised.on(inputs), posterior.damping
    mean, jacobian = on.outputs, on.jacobian
    if differences:
        matrix = _Contrast()
        mean = multiplied(matrix, mean)
        jacobian = jacobian.transformed(matrix, jacobian.codomain)
    unravel = jacobian.codomain.unravel
    change, left = basis.predicted(jacobian, damping)
    if posterior._moves:
        mean = jax.tree.map(jnp.add, mean, unravel(change))
    variance = posterior.prior**2 * jnp.maximum(left, 0)
    return Gaussian(mean, unravel(variance))


@eqx.filter_jit
def _sampled(
    posterior: Posterior, inputs: PyTree | None, num_samples: int, key: Key[Array, ""]
) -> PyTree[Array]:
    mean, basis = _predicted(posterior, inputs).mean, posterior._basis
    jacobian = posterior._linearised.on(inputs).jacobian
    domain, unravel = jacobian.domain, jacobian.codomain.unravel

    def draw(key: Key[Array, ""]) -> PyTree[Array]:
        normal = domain.unravel(jax.random.normal(key, (domain.size,), domain.dtype))
        about_mean = basis.narrowed(normal, posterior.damping)
        change = unravel(jacobian.push_forward(about_mean))
        return jax.tree.map(lambda m, c: m + posterior.prior * c, mean, change)

    keys = jax.random.split(key, num_samples)
    read = [jacobian, posterior._linearised.train.jacobian]
    at_once = min(x.passes_at_once(domain.dtype.itemsize) for x in read)
    return jax.lax.map(draw, keys, batch_size=min(num_samples, at_once))


@eqx.filter_jit
def _tuned(posterior: Posterior) -> Posterior:
    w = posterior._basis.eigenvalues
    largest = jnp.where(jnp.max(w) > 0, jnp.max(w), 1)
    info, of_largest = jnp.finfo(w.dtype), jnp.log(largest)
    # The products themselves may underflow.
    least = jnp.maximum(2 * math.log(info.eps) + of_largest, math.log(info.tiny))
    ends = least, math.log(_BEYOND) + of_largest

    def finer(_, ends):
        low, high = ends
        logs = low + (high - low) * jnp.linspace(0, 1, _TRIED, dtype=w.dtype)
        evidence = jax.vmap(lambda x: posterior._damped(jnp.exp(x)).log_evidence())(logs)
        best = logs[jnp.argmax(jnp.where(jnp.isfinite(evidence), evidence, -jnp.inf))]
        spacing = (high - low) / (_TRIED - 1)
        return jnp.maximum(best - spacing, low), jnp.minimum(best + spacing, high)

    low, high = jax.lax.fori_loop(0, _ROUNDS, finer, ends)
    return posterior._damped(jnp.exp((low + high) / 2))


def _warn_of_rounding(posterior: Posterior, stacklevel: int = 3) -> None:
    """Warn if rounding dominates the mean, unless the numbers are traced."""
    basis = posterior._basis
    if not (posterior._moves and isinstance(basis, Eigenbasis)):
        return
    damping, least = posterior.damping, basis.least_damping
    if is_traced((damping, least)) or damping >= least:
        return
    precision = "double precision, " if jnp.finfo(damping.dtype).bits < 64 else ""
    smallest = float(posterior.prior * jnp.sqrt(least))
    warnings.warn(
        f"The noise, {float(posterior.noise):.2g}, is below {smallest:.2g}, where "
        f"rounding decides the mean: use {precision}more noise or a narrower prior.",
        stacklevel=stacklevel,
    )


def _warn_of_slope(posterior: Posterior, stacklevel: int) -> None:
    """Warn if the model is not at the minimum, unless the numbers are traced."""
    if posterior._moves or is_traced(posterior):
        return
    distance = float(_distance(posterior))
    if not distance <= _AT_MINIMUM:
        warnings.warn(
            f"The model is {distance:.2g} standard deviations of the posterior from the "
            "minimum of loss plus prior, where Laplace's approximation holds: train it, "
            "or train it further, with "
            f"`prior={float(posterior.prior / posterior.noise):.3g}` in `gnlin.solve` or "
            "`gnlin.fit`.",
            stacklevel=stacklevel,
        )


@eqx.filter_jit
def _distance(posterior: Posterior) -> Scalar:
    r"""Return the length of a Newton step in standard deviations of the posterior,
    $\sqrt{g^\top H^{-1} g}$ with the gradient and curvature of loss plus prior. No output
    moves by more than this many of its own standard deviations."""
    damping = posterior.damping
    slope = _tree.axpy(damping, posterior._linearised.moved(), posterior._slope)
    return jnp.sqrt(posterior._basis.inverse_norm(slope, damping) / damping) / (
        posterior.noise
    )
