"""Conjugate gradients, compared with the textbook's in NumPy and with their
definition."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import gnlin
from gnlin.methods import ConjugateGradients


TOLERANCES = [0.9, 0.5, 0.1, 1e-2, 1e-4, 1e-6, 1e-8, 1e-10]


def textbook(matrix, b, tolerance, x=None):
    """Hestenes and Stiefel's iteration; (x, number of iterations)."""
    x = np.zeros_like(b) if x is None else x
    residual = b - matrix @ x
    direction = residual
    for k in range(100 * len(b)):
        if np.linalg.norm(residual) <= tolerance * np.linalg.norm(b):
            return x, k
        product = matrix @ direction
        alpha = residual @ residual / (direction @ product)
        x = x + alpha * direction
        new = residual - alpha * product
        direction = new + (new @ new) / (residual @ residual) * direction
        residual = new
    raise AssertionError("The textbook's iteration has not ended.")


def with_eigenvalues(eigenvalues, seed=0):
    generator = np.random.default_rng(seed)
    n = len(eigenvalues)
    q, _ = np.linalg.qr(generator.normal(size=(n, n)))
    return q * eigenvalues @ q.T, generator.normal(size=n)


@eqx.filter_jit
def solve(matrix, b, solver, options=None):
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
    return lx.linear_solve(operator, b, solver, options=options, throw=False)


def counts(solution):
    return int(solution.stats["num_steps"]), int(solution.stats["num_products"])


MATRICES = {
    "condition 1e2": with_eigenvalues(np.logspace(-1, 1, 12)),
    "condition 1e3": with_eigenvalues(np.linspace(0.01, 10, 60)),
    "one eigenvalue": (3 * np.eye(12), np.arange(1.0, 13.0)),
}


@pytest.mark.parametrize("tolerance", TOLERANCES)
@pytest.mark.parametrize("case", MATRICES.values(), ids=MATRICES)
def test_the_definition_is_met_in_as_many_steps_as_the_textbooks(case, tolerance):
    matrix, b = case
    solution = solve(matrix, b, ConjugateGradients(jnp.asarray(tolerance)))
    assert solution.result == lx.RESULTS.successful
    x = np.asarray(solution.value)
    assert np.linalg.norm(b - matrix @ x) <= tolerance * np.linalg.norm(b)
    expected, num_steps = textbook(matrix, b, tolerance)
    steps, products = counts(solution)
    assert steps <= num_steps + 1
    assert steps < products <= steps + 3
    if steps == num_steps and steps <= 8:
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-12)


def test_a_residual_that_drifts_is_looked_at():
    """At a condition number of 1e12 the recurrence's residual is smaller than the true
    one."""
    matrix, b = with_eigenvalues(np.logspace(-8, 4, 40), seed=1)
    for tolerance in (1e-2, 1e-6):
        solution = solve(matrix, b, ConjugateGradients(jnp.asarray(tolerance), 20000))
        distance = np.linalg.norm(b - matrix @ np.asarray(solution.value))
        met = distance <= tolerance * np.linalg.norm(b) * (1 + 1e-6)
        assert (solution.result == lx.RESULTS.successful) == met


def test_a_tolerance_below_the_precision_is_reported():
    matrix, b = with_eigenvalues(np.logspace(-6, 6, 12))
    solution = solve(matrix, b, ConjugateGradients(0.0))
    assert solution.result != lx.RESULTS.successful
    assert np.all(np.isfinite(solution.value))


def test_zero_right_hand_side():
    matrix, b = MATRICES["condition 1e2"]
    solution = solve(matrix, 0 * b, ConjugateGradients(0.1))
    assert solution.result == lx.RESULTS.successful
    np.testing.assert_array_equal(solution.value, 0 * b)
    assert counts(solution)[0] == 0


def test_warm_start():
    matrix, b = MATRICES["condition 1e2"]
    exact = np.linalg.solve(matrix, b)
    cold = solve(matrix, b, ConjugateGradients(jnp.asarray(1e-8)))
    near = exact + 1e-6 * np.cos(np.arange(12.0))
    warm = solve(matrix, b, ConjugateGradients(jnp.asarray(1e-8)), {"y0": near})
    assert warm.result == lx.RESULTS.successful
    assert np.linalg.norm(b - matrix @ warm.value) <= 1e-8 * np.linalg.norm(b)
    assert counts(warm)[0] < counts(cold)[0]
    assert abs(counts(warm)[0] - textbook(matrix, b, 1e-8, near)[1]) <= 1
    there = solve(matrix, b, ConjugateGradients(jnp.asarray(1e-8)), {"y0": exact})
    assert counts(there) == (0, 1)
    np.testing.assert_array_equal(there.value, exact)


def test_preconditioner():
    generator = np.random.default_rng(5)
    diagonal = np.logspace(-2, 4, 30)
    noise = 0.002 * generator.normal(size=(30, 30))
    matrix = np.diag(diagonal) + noise @ noise.T
    b = generator.normal(size=30)
    inverse = lx.DiagonalLinearOperator(jnp.asarray(1 / diagonal))
    plain = solve(matrix, b, ConjugateGradients(1e-8))
    options = {"preconditioner": inverse}
    faster = solve(matrix, b, ConjugateGradients(1e-8), options)
    assert faster.result == lx.RESULTS.successful
    assert np.linalg.norm(b - matrix @ faster.value) <= 1e-8 * np.linalg.norm(b)
    assert 3 * counts(faster)[0] < counts(plain)[0]


def test_exact_preconditioner_needs_one_step():
    matrix, b = MATRICES["condition 1e2"]
    inverse = lx.MatrixLinearOperator(
        jnp.linalg.inv(matrix), lx.positive_semidefinite_tag
    )
    solution = solve(matrix, b, ConjugateGradients(1e-8), {"preconditioner": inverse})
    assert counts(solution)[0] == 1


def test_singular_but_consistent_gives_the_minimum_norm_solution():
    eigenvalues = np.concatenate([np.zeros(5), np.linspace(0.5, 4.0, 7)])
    matrix, x = with_eigenvalues(eigenvalues)
    b = matrix @ x
    solution = solve(matrix, b, ConjugateGradients(1e-10))
    assert solution.result == lx.RESULTS.successful
    expected = np.linalg.pinv(matrix, rcond=1e-10) @ b
    np.testing.assert_allclose(solution.value, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "matrix",
    [np.zeros((3, 3)), -np.eye(3), np.diag([1.0, -1.0, 0.5])],
    ids=["zero", "negative", "indefinite"],
)
def test_breakdown_is_reported(matrix):
    b = np.array([1.0, 2.0, 0.5])
    solution = solve(matrix, b, ConjugateGradients(1e-8))
    assert solution.result == lx.RESULTS.breakdown
    assert np.all(np.isfinite(solution.value))
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
    with pytest.raises(RuntimeError, match="breakdown"):
        lx.linear_solve(operator, jnp.asarray(b), ConjugateGradients(1e-8))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_numbers_are_not_reported_as_success(bad):
    matrix, b = MATRICES["condition 1e2"]
    for args in ((matrix, b * bad), (matrix * bad, b)):
        solution = solve(*args, ConjugateGradients(1e-8))
        assert solution.result != lx.RESULTS.successful


def test_most_steps():
    matrix, b = MATRICES["condition 1e3"]
    for most in (1, 3):
        solution = solve(matrix, b, ConjugateGradients(1e-10, max_steps=most))
        assert counts(solution) == (most, most)
        assert solution.result == lx.RESULTS.max_steps_reached
    # The Cauchy step, by hand.
    solution = solve(matrix, b, ConjugateGradients(1e-10, max_steps=1))
    np.testing.assert_allclose(solution.value, b @ b / (b @ matrix @ b) * b, rtol=1e-12)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e12])
def test_single_precision_at_any_scale_of_the_operator(scale):
    """A Rayleigh quotient is small here, but that alone is no breakdown."""
    n = 10_000
    diagonal = scale * np.linspace(1.0, 50.0, n)
    b = jnp.asarray(np.cos(np.arange(n)), jnp.float32)
    operator = lx.DiagonalLinearOperator(jnp.asarray(diagonal, jnp.float32))
    solution = lx.linear_solve(
        lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag),
        b,
        ConjugateGradients(1e-4),
        throw=False,
    )
    assert solution.result == lx.RESULTS.successful
    x = np.asarray(solution.value, float)
    assert solution.value.dtype == jnp.float32
    distance = np.linalg.norm(np.asarray(b, float) - diagonal * x)
    assert distance <= 1.05e-4 * np.linalg.norm(b)
    assert counts(solution)[0] < 60


@pytest.mark.parametrize("scale", [1e-23, 1e23])
def test_single_precision_at_any_scale_of_the_right_hand_side(scale):
    """Squares leave the range of single precision here, but the numbers do not. The
    system is solved, or reported as not solved."""
    diagonal = np.linspace(1.0, 5.0, 6)
    b = jnp.asarray(scale * np.cos(np.arange(6)), jnp.float32)
    solution = solve(jnp.diag(diagonal).astype(jnp.float32), b, ConjugateGradients(1e-4))
    if solution.result == lx.RESULTS.successful:
        x = np.asarray(solution.value, float)
        np.testing.assert_allclose(x, np.asarray(b, float) / diagonal, rtol=1e-3)


def test_vmap_over_the_tolerance():
    matrix, b = MATRICES["condition 1e3"]
    tolerances = jnp.asarray(TOLERANCES[:6])
    together = jax.vmap(lambda beta: solve(matrix, b, ConjugateGradients(beta)))(
        tolerances
    )
    for i, tolerance in enumerate(tolerances):
        alone = solve(matrix, b, ConjugateGradients(tolerance))
        np.testing.assert_allclose(together.value[i], alone.value, rtol=1e-3, atol=1e-3)
        assert abs(int(together.stats["num_steps"][i]) - counts(alone)[0]) <= 1
        distance = np.linalg.norm(b - matrix @ np.asarray(together.value[i]))
        assert distance <= tolerance * np.linalg.norm(b)


def test_pytrees():
    b = {"a": jnp.asarray([1.0, 2.0]), "b": jnp.asarray(3.0)}
    operator = lx.FunctionLinearOperator(
        lambda v: {"a": 2 * v["a"] + v["b"], "b": 5 * v["b"] + jnp.sum(v["a"])},
        jax.eval_shape(lambda: b),
        lx.positive_semidefinite_tag,
    )
    solution = lx.linear_solve(operator, b, ConjugateGradients(1e-12))
    matrix = np.array([[2.0, 0, 1], [0, 2, 1], [1, 1, 5]])
    expected = np.linalg.solve(matrix, [1.0, 2.0, 3.0])
    np.testing.assert_allclose(solution.value["a"], expected[:2], rtol=1e-10)
    np.testing.assert_allclose(solution.value["b"], expected[2], rtol=1e-10)


def test_derivative_of_the_solution():
    matrix, b = MATRICES["condition 1e2"]

    def total(b):
        return jnp.sum(solve(jnp.asarray(matrix), b, ConjugateGradients(1e-12)).value)

    expected = np.linalg.solve(matrix, np.ones(12))
    np.testing.assert_allclose(jax.grad(total)(jnp.asarray(b)), expected, rtol=1e-8)


def test_mistakes():
    with pytest.raises(ValueError, match="`tolerance`"):
        ConjugateGradients(-0.1)
    with pytest.raises(ValueError, match="`tolerance`"):
        ConjugateGradients(float("nan"))
    untagged = lx.MatrixLinearOperator(jnp.eye(2))
    with pytest.raises(ValueError, match="positive_semidefinite_tag"):
        lx.linear_solve(untagged, jnp.ones(2), ConjugateGradients(0.1))
    tall = lx.MatrixLinearOperator(jnp.ones((3, 2)))
    with pytest.raises(ValueError, match="square"):
        lx.linear_solve(tall, jnp.ones(3), ConjugateGradients(0.1))


@jax.tree_util.register_pytree_node_class
class Incomparable:
    """A container, as in some libraries, whose instances are never equal."""

    def __init__(self, weights):
        self.weights = weights

    def __eq__(self, other):
        raise TypeError("Cannot be compared.")

    __hash__ = None

    def tree_flatten(self):
        return (self.weights,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

    def __call__(self, x):
        return jnp.tanh(self.weights @ x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "solver", "loss"),
    [
        (
            Incomparable(jnp.ones((1, 2))),
            gnlin.TruncatedGaussNewton(
                0.1, 0.1, preconditioner=gnlin.preconditioners.Nystrom(1)
            ),
            gnlin.SquaredError(),
        ),
        (
            jax.tree_util.Partial(lambda w, x: jnp.tanh(w @ x), jnp.ones((1, 2))),
            gnlin.TruncatedGaussNewton(0.1, 0.1, form="prox-linear"),
            gnlin.losses.Huber(),
        ),
    ],
    ids=["incomparable", "partial"],
)
def test_models_that_are_pytrees_of_any_kind(model, solver, loss):
    inputs = jnp.array([[1.0, 2.0], [0.5, -1.0], [0.3, 0.1]])
    targets = jnp.array([[0.5], [-0.5], [0.1]])
    solution = gnlin.solve(model, (inputs, targets), solver, loss=loss, max_steps=3)
    assert type(solution.model) is type(model)
    assert solution.loss < solution.history.loss[0]
