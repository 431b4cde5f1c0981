"""Preconditioners match their formulas in NumPy, and do not change the solution."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
import scipy.optimize
from problems import numbers

import gnlin
from gnlin.preconditioners import BlockDiagonal, Nystrom


P, M = 30, 50
SCALES = np.geomspace(1, 1e-4, P)


def problem(m=M, p=P, dtype=float):
    """Residuals whose Jacobian at zero has the given singular values."""
    generator = np.random.default_rng(0)
    k = min(m, p)
    u, _ = np.linalg.qr(generator.normal(size=(m, k)))
    v, _ = np.linalg.qr(generator.normal(size=(p, k)))
    matrix = jnp.asarray(u @ np.diag(SCALES[:k]) @ v.T, dtype)
    target = jnp.asarray(generator.normal(size=m), dtype)
    fn = lambda y, args: jnp.concatenate([args[0] @ y["a"], jnp.zeros(0, dtype)])
    residual = lambda y, args: fn(y, args) - args[1]
    return residual, {"a": jnp.zeros(p, dtype)}, (matrix, target)


def dense_inverse(preconditioner, lin, damping):
    inverse = lambda lin: preconditioner.inverse(lin.jacobian, damping).as_matrix()
    return np.asarray(eqx.filter_jit(inverse)(lin))


def nystrom_numpy(a, omega, damping):
    """Frangella, Tropp and Udell (2023), from the definition, without its shift."""
    core = omega.T @ a @ omega
    approximation = a @ omega @ np.linalg.pinv(core) @ omega.T @ a
    w, u = np.linalg.eigh(approximation)
    w, u = w[::-1][: omega.shape[1]], u[:, ::-1][:, : omega.shape[1]]
    inverse = u @ np.diag((w[-1] + damping) / (w + damping)) @ u.T
    return inverse + np.eye(len(a)) - u @ u.T


@pytest.mark.parametrize("rank", [1, 5])
def test_nystrom_is_its_formula(rank):
    residual, y, args = problem()
    lin = gnlin.linearise(residual, y, args)
    omega = np.asarray(jax.random.normal(jax.random.key(3), (P, rank), float))
    phi = np.asarray(args[0])
    expected = nystrom_numpy(phi.T @ phi, omega, 1e-3)
    found = dense_inverse(Nystrom(rank, seed=3), lin, 1e-3)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    assert Nystrom(rank).passes(lin.jacobian) == gnlin.authoring.Passes(rank, rank)


def test_nystrom_of_full_rank_is_the_inverse():
    """This holds up to a factor, for every rank of at least p."""
    residual, y, args = problem()
    lin = gnlin.linearise(residual, y, args)
    inverse = dense_inverse(Nystrom(10 * P), lin, 0.1)
    phi = np.asarray(args[0])
    product = inverse @ (phi.T @ phi + 0.1 * np.eye(P))
    np.testing.assert_allclose(product / product[0, 0], np.eye(P), atol=1e-6)


class Scaled(eqx.Module):
    """A network whose neurons have very different scales."""

    weights: jax.Array
    bias: jax.Array

    def __call__(self, x):
        z = self.weights @ x + self.bias
        return jnp.sin(z) * 10.0 ** -jnp.arange(z.size, dtype=z.dtype)


def scaled_network(dtype=float):
    generator = np.random.default_rng(1)
    model = Scaled(jnp.asarray(generator.normal(size=(4, 6)), dtype), jnp.zeros(4, dtype))
    x = jnp.asarray(generator.normal(size=(20, 6)), dtype)
    return model, x


@pytest.mark.parametrize(
    ("max_size", "blocks", "memory_budget"),
    [
        (100, [slice(0, 24), slice(24, 28)], 2**31),
        (6, [*(slice(k, k + 6) for k in range(0, 24, 6)), slice(24, 28)], 1),
        (3, [slice(k, k + 1) for k in range(28)], 2**31),
        (1, [slice(k, k + 1) for k in range(28)], 1),
    ],
)
def test_block_diagonal_is_the_inverse_of_the_blocks(max_size, blocks, memory_budget):
    model, x = scaled_network()
    fn = gnlin.PerExample(lambda model, x: model(x))

    @eqx.filter_jit
    def run(model, x):
        lin = gnlin.linearise(fn, model, x, memory_budget=memory_budget)
        inverse = BlockDiagonal(max_size).inverse(lin.jacobian, 0.1)
        return lin.matrix(), inverse.as_matrix()

    jacobian, found = map(np.asarray, run(model, x))
    curvature = jacobian.T @ jacobian + 0.1 * np.eye(28)
    expected = np.zeros((28, 28))
    for block in blocks:
        expected[block, block] = np.linalg.inv(curvature[block, block])
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)


@eqx.filter_jit
def advance(solver, fn, y, args, state):
    lin = gnlin.linearise(fn, y, args)
    return solver.advance(
        gnlin.authoring.SumOfSquares(), lin, lambda y: fn(y, args), state
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "preconditioner"),
    [
        ((M, P), jnp.float64, Nystrom(8)),
        ((10, P), jnp.float32, BlockDiagonal()),
        pytest.param((1, P), jnp.float64, Nystrom(8), marks=pytest.mark.exhaustive),
        ((M, 1), jnp.float32, BlockDiagonal(1)),
    ],
)
def test_the_solution_is_the_same(shape, dtype, preconditioner):
    residual, y, args = problem(*shape, dtype=dtype)
    damping = 1e-2
    phi, target = (np.asarray(x, float) for x in args)
    p = shape[1]
    expected = np.linalg.solve(phi.T @ phi + damping * np.eye(p), phi.T @ target)
    solver = gnlin.TruncatedGaussNewton(
        1e-5, damping, preconditioner=preconditioner, method="matrix-free"
    )
    state = solver.start(y, jax.eval_shape(residual, y, args))
    new, state = advance(solver, residual, y, args, state)
    np.testing.assert_allclose(new["a"], expected, rtol=2e-2, atol=2e-3)
    left = (phi.T @ phi + damping * np.eye(p)) @ np.asarray(new["a"], float)
    left -= phi.T @ target
    assert np.linalg.norm(left) <= 1.5e-5 * np.linalg.norm(phi.T @ target)


@pytest.mark.slow
def test_as_a_method_of_the_other_damped_solvers():
    preconditioner = Nystrom(8)
    residual, y, args = problem()
    phi, target = (np.asarray(x) for x in args)
    damped = gnlin.DampedGaussNewton(1e-2, method=preconditioner)
    one = optx.least_squares(residual, damped, y, args, max_steps=1, throw=False)
    expected = np.linalg.solve(phi.T @ phi + 1e-2 * np.eye(P), phi.T @ target)
    np.testing.assert_allclose(one.value["a"], expected, rtol=1e-8)
    extra = preconditioner.passes(gnlin.linearise(residual, y, args).jacobian)
    assert one.stats["num_vjps"] >= one.stats["num_inner_steps"] + extra.vjps

    adapting = gnlin.LevenbergMarquardt(method=preconditioner)
    many = optx.least_squares(residual, adapting, y, args)
    least = np.linalg.norm(target - phi @ np.linalg.lstsq(phi, target)[0])
    found = np.linalg.norm(target - phi @ many.value["a"])
    assert least * (1 - 1e-12) <= found <= least * (1 + 1e-9)


def test_errors_of_solvers_that_do_not_support_preconditioners():
    with pytest.raises(ValueError, match="`method` must be one of"):
        gnlin.GaussNewton(method=Nystrom(8))
    with pytest.raises(ValueError, match='use `scaling="identity"`, or another method'):
        gnlin.LevenbergMarquardt(method=Nystrom(8), scaling="marquardt")


def num_inner_steps(preconditioner, fn, y, args, tolerance, damping):
    solver = gnlin.TruncatedGaussNewton(
        tolerance, damping, preconditioner=preconditioner, method="matrix-free"
    )
    state = solver.start(y, jax.eval_shape(fn, y, args))
    _, state = advance(solver, fn, y, args, state)
    return float(state.report.num_inner_steps), state.counts


@pytest.mark.exhaustive
def test_preconditioners_save_iterations():
    residual, y, args = problem()
    few = Nystrom(15)
    plain, _ = num_inner_steps(None, residual, y, args, 1e-8, 1e-6)
    helped, counts = num_inner_steps(few, residual, y, args, 1e-8, 1e-6)
    assert helped < 0.6 * plain
    assert float(counts.num_jvps) >= 15 + helped
    model, x = scaled_network()
    fn = gnlin.PerExample(lambda model, x: model(x))
    plain, _ = num_inner_steps(None, fn, model, x, 1e-8, 1e-8)
    helped, _ = num_inner_steps(BlockDiagonal(), fn, model, x, 1e-8, 1e-8)
    assert helped < 0.5 * plain


def two_steps(preconditioner, method):
    """Two steps of a layer with cross-entropy."""
    model = eqx.nn.Linear(3, 4, dtype=float, key=jax.random.key(0))
    x = np.random.default_rng(1).normal(size=(12, 3))
    labels = np.arange(12) % 4
    solver = gnlin.TruncatedGaussNewton(
        1e-9, 0.1, preconditioner=preconditioner, method=method
    )
    solution = gnlin.solve(
        model, (x, labels), solver, loss=gnlin.SoftmaxCrossEntropy(), max_steps=2
    )
    return numbers(solution.model)


@pytest.mark.exhaustive
def test_with_a_loss_and_a_layer():
    """Whole whitened runs with chosen methods."""
    expected = two_steps(BlockDiagonal(), "matrix-free")
    found = two_steps(Nystrom(8), "dense")
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("preconditioner", [Nystrom(8), BlockDiagonal()])
def test_zero_and_nonfinite_jacobians(preconditioner):
    residual, y, (matrix, target) = problem()
    zero = gnlin.linearise(residual, y, (0 * matrix, target))
    inverse = dense_inverse(preconditioner, zero, 0.0)
    assert np.all(np.isfinite(inverse))
    assert np.all(np.linalg.eigvalsh((inverse + inverse.T) / 2) > 0)
    solver = gnlin.TruncatedGaussNewton(0.1, 0.1, preconditioner=preconditioner)
    args = (matrix.at[0, 0].set(jnp.nan), target)
    state = solver.start(y, jax.eval_shape(residual, y, args))
    new, state = advance(solver, residual, y, args, state)
    assert state.result != gnlin._solver._base.optx.RESULTS.successful
    np.testing.assert_array_equal(new["a"], y["a"])


@pytest.mark.slow
@pytest.mark.parametrize("preconditioner", [Nystrom(3), BlockDiagonal()])
def test_without_damping_a_null_space_is_not_entered_far(preconditioner):
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(12, 2)) @ rng.normal(size=(2, 5)), rng.normal(size=12)
    residual = lambda x, args: args[0] @ x + 0.3 * jnp.tanh(args[0] @ x) - args[1]
    solver = gnlin.TruncatedGaussNewton(1e-3, preconditioner=preconditioner)
    args = jnp.asarray(a), jnp.asarray(b)
    found = optx.least_squares(residual, solver, jnp.zeros(5), args, throw=False)
    reference = scipy.optimize.least_squares(residual, np.zeros(5), args=(args,))
    np.testing.assert_allclose(residual(found.value, args), reference.fun, atol=1e-7)
    assert jnp.linalg.norm(found.value) < 1e6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Nystrom(0), "`rank` must be a whole number of at least 1"),
        (lambda: Nystrom(2.5), "`rank` must be a whole number of at least 1"),
        (lambda: BlockDiagonal(0), "`max_size` must be a whole number of at least 1"),
        (
            lambda: gnlin.TruncatedGaussNewton(
                0.1, form="prox-linear", preconditioner=Nystrom(3)
            ),
            'The "prox-linear" form has no preconditioner',
        ),
        (
            lambda: gnlin.TruncatedGaussNewton(0.1, preconditioner="jacobi"),
            "`preconditioner` must be one of `gnlin.preconditioners`",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_nystrom_takes_its_products_within_the_memory_budget(monkeypatch):
    chunks, original = [], jax.lax.map

    def spy(fn, xs, *, batch_size):
        chunks.append(batch_size)
        return original(fn, xs, batch_size=batch_size)

    monkeypatch.setattr(jax.lax, "map", spy)
    residual, y, args = problem()
    lin, small = (
        gnlin.linearise(residual, y, args, memory_budget=budget) for budget in (2**31, 1)
    )
    expected, found = (dense_inverse(Nystrom(5), each, 1e-3) for each in (lin, small))
    assert chunks == [1]
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)


def test_block_diagonal_with_empty_arrays():
    matrix = np.random.default_rng(0).normal(size=(7, 3))
    y = {
        "a": jnp.ones(3),
        "b": jnp.zeros(0),
        "c": jnp.zeros((0, 2)),
        "d": jnp.ones((3, 0)),
    }
    fn = lambda y, a: a @ y["a"] + y["b"].sum() + y["c"].sum() + y["d"].sum()
    lin = gnlin.linearise(fn, y, jnp.asarray(matrix))
    expected = np.linalg.inv(matrix.T @ matrix + 0.1 * np.eye(3))
    np.testing.assert_allclose(dense_inverse(BlockDiagonal(), lin, 0.1), expected)
