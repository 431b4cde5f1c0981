r"""Theory of a network whose linearisation stays constant: its effective dimension, and
the squared bias and variance when it learns the targets.

Starting at outputs $f_0$, a filter $g$ (`gnlin.filters`) of the kernel
$\phi\phi^\top = U\,\mathrm{diag}(w)\,U^\top$ gives $f_0 - A g(w) U^\top r$ on test
inputs, with $A = \phi_t\phi^\top U$ and the training targets' residual $r = f_0 - y$. The
test targets are the truth; independent noise on the training targets gives the variance.

Compare gradient flow for the time $1/\lambda$ with ridge regression with $\lambda$. In
each eigencomponent, with $x = w/\lambda$, flow leaves a smaller part of the truth,
$e^{-x} \le 1/(1 + x)$, and passes on at most 1.2985 times the noise,
$1 - e^{-x} \le 1.2985\,x/(1 + x)$. Its risk is thus at most 1.6862 times the risk of
ridge. On the training inputs this holds for any truth, and on other inputs on average
over truths without a preferred direction. After T solutions, each starting at the end of
the last one, the two are nearer: their remainders, $e^{-Tx}$ and $(1 + x)^{-T}$, differ
by at most about $0.27/T$.

??? cite "Reference"

    A. Ali, J. Z. Kolter and R. J. Tibshirani, *A Continuous-Time View of Early Stopping
    for Least Squares Regression*, AISTATS (2019).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Scalar, ScalarLike

import gnlin


Data = tuple[Float[Array, "n ..."], Float[Array, "n c"]]


class Repeated(gnlin.filters.AbstractFilter):
    """Ridge regression repeated this many times, each time on what the last one has
    left."""

    damping: ScalarLike
    times: int

    def __call__(self, eigenvalues: Float[Array, "*k"]) -> Float[Array, "*k"]:
        w = eigenvalues
        solved = -jnp.expm1(-self.times * jnp.log1p(w / self.damping))
        at_zero = self.times / jnp.asarray(self.damping)
        return jnp.where(w == 0, at_zero, solved / jnp.where(w == 0, 1, w))


class LinearProblem(eqx.Module):
    """A linearised network with its training and test data."""

    spectrum: gnlin.Spectrum
    """The spectrum of the kernel, with the residual of the training data."""
    test_residual: Float[Array, " t"]
    """The initial outputs minus the targets, on the test data."""
    test_features: Float[Array, "t k"]
    """A: the change of the outputs by a step along each eigenvector."""

    def squared_bias(self, filter: gnlin.filters.AbstractFilter) -> Scalar:
        """Return the mean squared error over test outputs, without noise."""
        solved = filter(self.spectrum.eigenvalues) * self.spectrum.coefficients
        return jnp.mean((self.test_residual - self.test_features @ solved) ** 2)

    def variance(self, filter: gnlin.filters.AbstractFilter) -> Scalar:
        """Return the mean variance of test outputs, for noise of unit variance."""
        passed_on = self.test_features * filter(self.spectrum.eigenvalues)[None]
        return jnp.mean(jnp.sum(passed_on**2, axis=1))


def linear_problem(
    model: PyTree, initial: PyTree, train: Data, test: Data
) -> LinearProblem:
    """Make the linear problem with the kernel of `model` and the outputs of `initial`."""
    (x, y), (test_x, test_y) = train, test
    here, there = (
        gnlin.features.linearise_model(model, inputs) for inputs in (x, test_x)
    )
    spectrum = here.with_outputs(jax.vmap(initial)(x) - y).spectrum()
    return LinearProblem(
        spectrum,
        jnp.ravel(jax.vmap(initial)(test_x) - test_y),
        jax.vmap(spectrum.project)(there.kernel(here)),
    )


def ridge_and_flow(
    problem: LinearProblem, damping: ScalarLike, times: int
) -> dict[str, Scalar]:
    """Compare ridge regression and gradient flow at matched strength, and ridge
    regression repeated."""
    ridge = gnlin.filters.Tikhonov(damping)
    flow = gnlin.filters.GradientFlow(1 / jnp.asarray(damping))
    return {
        "effective_dimension": problem.spectrum.effective_dimension(damping),
        "squared_bias_ridge": problem.squared_bias(ridge),
        "squared_bias_flow": problem.squared_bias(flow),
        "squared_bias_repeated": problem.squared_bias(Repeated(damping, times)),
        "variance_ridge": problem.variance(ridge),
        "variance_flow": problem.variance(flow),
    }
