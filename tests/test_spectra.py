"""Spectra of large kernels, compared with dense ones in NumPy."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import num_compiled
from scipy.sparse.linalg import eigsh, LinearOperator

import gnlin
from gnlin import spectra


RNG = np.random.default_rng(0)


def of_spectrum(eigenvalues, m, p):
    """Return a Jacobian whose kernel has these eigenvalues, and zeros."""
    k = len(eigenvalues)
    u, v = (np.linalg.qr(RNG.standard_normal((size, k)))[0] for size in (m, p))
    return u * np.sqrt(eigenvalues) @ v.T


def linear(jacobian, dtype=jnp.float64, **options):
    jacobian = jnp.asarray(jacobian, dtype)
    point = jnp.ones(jacobian.shape[1], dtype)
    return gnlin.linearise(lambda y, args: args @ y, point, jacobian, **options)


@functools.partial(
    jax.jit,
    static_argnums=1,
    static_argnames=("memory_budget", "tolerance", "max_products"),
)
def leading(jacobian, k, memory_budget=2**31, **options):
    """Return the eigenvalues, their residuals, the number of products, and whether they
    have converged."""
    lin = linear(jacobian, memory_budget=memory_budget)
    pairs = spectra.leading(lin, k, **options)
    return pairs.eigenvalues, pairs.residuals, pairs.num_products, pairs.converged


DECAYING = 1 / np.arange(1, 81.0) ** 1.5
CASES = {
    "more parameters": (of_spectrum(DECAYING, 80, 100), 9),
    "more outputs": (of_spectrum(DECAYING, 100, 80), 9),
    "repeated": (of_spectrum(np.repeat(DECAYING[:16], 5), 80, 100), 9),
    "rank below k": (of_spectrum([3.0, 2.0, 1.0], 80, 100), 9),
    "rank below k, more outputs": (of_spectrum([3.0, 2.0, 1.0], 40, 30), 5),
    "all of them": (RNG.standard_normal((7, 9)), 7),
    "one output": (RNG.standard_normal((1, 9)), 1),
    "one parameter": (RNG.standard_normal((9, 1)), 1),
    "zero": (np.zeros((80, 100)), 9),
    "tiny": (1e-12 * of_spectrum(DECAYING, 80, 100), 9),
    "huge": (1e12 * of_spectrum(DECAYING, 80, 100), 9),
}


@functools.partial(jax.jit, static_argnums=(1, 2))
def eigenpairs(jacobian, k, dtype):
    pairs = spectra.leading(linear(jacobian, dtype), k, tolerance=1e-5)
    vectors = pairs.on_outputs(), pairs.on_parameters()
    return pairs.converged, pairs.eigenvalues, *vectors


QUICK = "more parameters", "more outputs", "repeated", "rank below k", "zero"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            pytest.param(
                name,
                jnp.float64,
                marks=() if name in QUICK else pytest.mark.exhaustive,
            )
            for name in CASES
            if name not in ("tiny", "huge")
        ),
        ("tiny", jnp.float32),
        ("huge", jnp.float32),
    ],
)
def test_leading_eigenpairs_are_the_dense_ones(name, dtype):
    jacobian, k = CASES[name]
    converged, *arrays = eigenpairs(jacobian, k, dtype)
    assert converged
    w, u, v = (np.asarray(x, float) for x in arrays)
    v = v.T
    exact = np.linalg.svd(jacobian, compute_uv=False)[:k] ** 2
    scale = exact[0] or 1
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(w, exact, rtol=0, atol=(1e-9 + 30 * eps) * scale)
    np.testing.assert_array_equal(w == 0, exact < 1e-12 * scale)
    known = w > 0
    for square, x in ((jacobian @ jacobian.T, u), (jacobian.T @ jacobian, v)):
        residuals = np.linalg.norm(square @ x - w * x, axis=0)
        assert np.all(residuals <= 2e-5 * w + 60 * eps * scale)
        np.testing.assert_allclose(
            x[:, known].T @ x[:, known], np.eye(sum(known)), rtol=0, atol=100 * eps + 1e-9
        )
    smaller = u if u.shape[0] <= v.shape[0] else v
    np.testing.assert_allclose(smaller.T @ smaller, np.eye(k), rtol=0, atol=100 * eps)


@pytest.mark.slow
def test_every_copy_of_an_eigenvalue_is_found():
    """A copy that a random vector reveals between two checks also counts as new."""

    @jax.jit
    def largest(jacobian):
        pairs = spectra.leading(linear(jacobian), 10)
        return pairs.eigenvalues, pairs.converged

    for _ in range(6):
        values = np.repeat(1 / np.arange(1, 31.0), 10)
        w, converged = largest(of_spectrum(values, 300, 300))
        assert converged
        np.testing.assert_allclose(w, 1, rtol=1e-9)


@pytest.mark.slow
def test_leading_eigenpairs_of_groups_in_two_precisions():
    def outputs(y, x):
        return {"a": jnp.tanh(x @ y["w"]), "b": y["v"].astype(jnp.float64) ** 2}

    y = {"w": jnp.arange(1.0, 4), "v": jnp.ones((2, 2), jnp.float32)}

    @jax.jit
    def run(y):
        lin = gnlin.linearise(outputs, y, X)
        pairs = spectra.leading(lin, 5)
        parts = pairs.on_parameters(), pairs.on_outputs()
        found = pairs.converged, pairs.eigenvalues, *parts
        return *found, lin.matrix(), pairs.spectrum().shares(lin.outputs)

    converged, eigenvalues, v, u, matrix, shares = run(y)
    assert converged
    matrix = np.asarray(matrix, float)
    exact = np.linalg.svd(matrix, compute_uv=False)[:5] ** 2
    np.testing.assert_allclose(eigenvalues, exact, rtol=0, atol=1e-5 * exact[0])
    assert v["w"].shape == (5, 3)
    assert v["v"].shape == (5, 2, 2)
    assert v["v"].dtype == jnp.float32
    u = np.asarray(u, float)
    assert np.all(np.isfinite(shares))
    left = matrix @ (matrix.T @ u) - exact * u
    np.testing.assert_allclose(left, 0, rtol=0, atol=1e-4 * exact[0])


def test_as_many_products_as_arpack():
    jacobian = of_spectrum(1 / np.arange(1, 401.0), 400, 450)
    kernel = jacobian @ jacobian.T
    count = 0

    def product(u):
        nonlocal count
        count += 1
        return kernel @ u

    start = RNG.standard_normal(400)
    w, _ = eigsh(LinearOperator((400, 400), product), 10, tol=1e-5, v0=start)
    found, _, num_products, _ = leading(jacobian, 10)
    np.testing.assert_allclose(found, w[::-1], rtol=1e-8)
    assert num_products < 2 * count


def test_a_basis_beyond_the_budget_restarts():
    jacobian = of_spectrum(1 / np.arange(1, 201.0), 200, 220)
    w, _, restarted, converged = leading(jacobian, 6, memory_budget=2 * 20 * 200 * 8)
    assert converged
    assert restarted > 20
    np.testing.assert_allclose(w, 1 / np.arange(1, 7), rtol=1e-9)


def test_too_few_products_do_not_converge():
    jacobian = of_spectrum(DECAYING, 80, 100)
    w, residuals, num_products, converged = leading(
        jacobian, 9, tolerance=1e-10, max_products=10
    )
    assert not converged
    assert num_products < 20
    assert residuals[-1] > 1e-10 * w[-1]


def test_nonfinite_kernels_do_not_converge():
    jacobian = RNG.standard_normal((20, 30))
    jacobian[3, 4] = np.nan
    w, _, num_products, converged = leading(jacobian, 3)
    assert not converged
    assert np.all(np.isnan(w))
    assert num_products < 20


@pytest.mark.slow
def test_leading_eigenpairs_of_a_batch():
    jacobians = np.stack([of_spectrum(c * DECAYING, 80, 100) for c in (1.0, 2.0)])

    @jax.jit
    @jax.vmap
    def largest(jacobian):
        pairs = spectra.leading(linear(jacobian), 4)
        return pairs.eigenvalues, pairs.on_outputs(), pairs.converged

    w, u, converged = largest(jacobians)
    assert np.all(converged)
    np.testing.assert_allclose(w, np.outer([1, 2], DECAYING[:4]), rtol=1e-9)
    for c, jacobian, x in zip((1, 2), jacobians, np.asarray(u), strict=True):
        found = jacobian @ jacobian.T @ x
        np.testing.assert_allclose(found, c * DECAYING[:4] * x, rtol=0, atol=1e-5)


def network(seed=0):
    return eqx.nn.MLP(3, 2, 8, 1, activation=jnp.tanh, key=jax.random.key(seed))


X = jax.random.normal(jax.random.key(1), (10, 3))


def test_the_leading_part_of_a_spectrum():
    largest = lambda w: jnp.where(jnp.arange(w.size) < 5, 1 / (w + 0.1), 0)

    @eqx.filter_jit
    def run(model, targets):
        lin = gnlin.features.linearise_model(model, X)
        whole, pairs = lin.spectrum("svd"), spectra.leading(lin, 5, tolerance=1e-10)
        told = lambda spectrum: (
            spectrum.eigenvalues[:5],
            abs(spectrum.coefficients[:5]),
            spectrum.shares(targets)[:5],
        )
        of_part = pairs.spectrum(targets).step(gnlin.filters.Tikhonov(0.1))
        of_whole = whole.with_residual(targets).step(largest)
        return (*told(pairs.spectrum()), of_part), (*told(whole), of_whole)

    part, whole = run(network(), jnp.sin(X[:, :2]))
    np.testing.assert_allclose(part[0], whole[0], rtol=1e-9)
    np.testing.assert_allclose(part[1], whole[1], rtol=1e-6)
    np.testing.assert_allclose(part[2], whole[2], rtol=1e-6, atol=1e-12)
    for a, b in zip(jax.tree.leaves(part[3]), jax.tree.leaves(whole[3]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


def test_the_leading_part_with_more_outputs():
    jacobian = of_spectrum(DECAYING[:6], 20, 6)
    tikhonov = gnlin.filters.Tikhonov(0.1)

    @jax.jit
    def run(r):
        lin = linear(jacobian)
        whole = lin.spectrum("svd")
        part = spectra.leading(lin, 6, tolerance=1e-10).spectrum(r)
        of_whole = whole.shares(r), whole.with_residual(r).step(tikhonov)
        return (part.shares(r), part.step(tikhonov)), of_whole

    for part, whole in zip(*run(RNG.standard_normal(20)), strict=True):
        np.testing.assert_allclose(part, whole)


#
# Quantities computed from a spectrum
#


def test_effective_dimension_and_condition_number():
    w = np.array([4.0, 1.0, 0.25])
    dampings = np.array([0.1, 1.0])

    @jax.jit
    def run(jacobian):
        spectrum = linear(jacobian).spectrum("svd")
        dimensions = [spectrum.effective_dimension(damping) for damping in (0.5, 0.0)]
        conditions = [spectrum.condition_number(), spectrum.condition_number(0.5)]
        return dimensions + conditions, jax.vmap(spectrum.effective_dimension)(dampings)

    found, several = run(of_spectrum(w, 5, 4))
    np.testing.assert_allclose(found, [np.sum(w / (w + 0.5)), 3, 16, 4.5 / 0.5], 1e-6)
    np.testing.assert_allclose(several, [np.sum(w / (w + d)) for d in dampings])


def test_condition_number_of_a_square_that_is_damped():
    condition = jax.jit(lambda phi: linear(phi).spectrum("svd").condition_number(0.5))
    assert float(condition(np.diag([2.0, 1.0]))) == pytest.approx(4.5 / 1.5)


def test_steps_until_half_is_learnt():
    w = np.array([40.0, 15.0, 1.0, 0.01, 0.0])
    eta = 0.1
    steps = jax.jit(lambda phi: linear(phi).spectrum("svd").steps_to_half(eta))
    found = np.asarray(steps(np.diag(np.sqrt(w))))
    assert np.all(np.isinf(found[[0, 4]]))
    left = np.abs(1 - eta * w[1:4]) ** found[1:4]
    np.testing.assert_allclose(left, 0.5, rtol=1e-12)
    # The filter agrees: the learnt part is w g(w).
    filter = gnlin.filters.GradientDescent(round(float(found[3])), eta)
    learnt = w[3] * filter(jnp.array(w[3]))
    assert float(learnt) == pytest.approx(0.5, abs=1e-3)


def test_shares_of_targets():
    jacobian = of_spectrum([3.0, 2.0, 1.0], 6, 5)
    spectrum = linear(jacobian).spectrum("eigh")
    _, u = np.linalg.eigh(jacobian @ jacobian.T)
    u = u[:, ::-1]  # the largest eigenvalue first
    targets = RNG.standard_normal(6)
    shares = np.asarray(spectrum.shares(jnp.asarray(1e150 * targets)))
    expected = (u.T @ targets) ** 2 / np.sum(targets**2)
    np.testing.assert_allclose(shares[:3], expected[:3], rtol=1e-9)
    assert np.sum(shares) <= 1 + 1e-12
    assert np.all(np.asarray(spectrum.shares(jnp.zeros(6))) == 0)


#
# Sums over all eigenvalues
#


ESTIMATES = {
    "trace": (lambda lin, key: spectra.trace(lin, key=key), lambda w: np.sum(w)),
    "log-determinant": (
        lambda lin, key: spectra.log_determinant(lin, 0.1, key=key, num_steps=40),
        lambda w: np.sum(np.log(w + 0.1)),
    ),
    "effective dimension": (
        lambda lin, key: spectra.effective_dimension(lin, 0.1, key=key, num_steps=40),
        lambda w: np.sum(w / (w + 0.1)),
    ),
}
SQUARES = {
    "more parameters": of_spectrum(DECAYING, 80, 100),
    "more outputs": of_spectrum(DECAYING, 100, 80),
    "low rank": of_spectrum([3.0, 2.0, 1.0], 60, 70),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimate", "square", "dtype"),
    [
        ("trace", "more outputs", jnp.float32),
        ("log-determinant", "more parameters", jnp.float32),
        ("effective dimension", "low rank", jnp.float64),
    ],
)
def test_estimated_errors_are_right(estimate, square, dtype):
    (estimate, exact), jacobian = ESTIMATES[estimate], SQUARES[square]
    expected = exact(np.linalg.eigvalsh(jacobian @ jacobian.T))
    draw = jax.jit(lambda jacobian, key: estimate(linear(jacobian, dtype), key))
    found = [draw(jacobian, key) for key in jax.random.split(jax.random.key(0), 60)]
    values = np.array([float(one.value) for one in found])
    said = np.array([float(one.standard_error) for one in found])
    rounding = 1e3 * float(jnp.finfo(dtype).eps) * abs(expected)
    # Root mean squares over all draws.
    errors = np.sqrt(np.mean((values - expected) ** 2))
    assert errors <= 1.3 * np.sqrt(np.mean(said**2)) + rounding
    # The jackknife's error of a trace is too large if eigenvalues fall fast.
    least = 0.2 if estimate is ESTIMATES["trace"][0] else 0.6
    assert errors >= least * np.sqrt(np.mean(said**2)) - rounding


def test_a_trace_from_as_many_probes_as_dimensions():
    jacobian = RNG.standard_normal((6, 9))
    found = spectra.trace(linear(jacobian), key=jax.random.key(0))
    assert float(found.value) == pytest.approx(np.sum(jacobian**2), rel=1e-10)
    assert float(found.standard_error) < 1e-9 * float(found.value)


def test_estimates_for_zero_matrices():
    @jax.jit
    def run(jacobian, key):
        lin = linear(jacobian)
        trace = spectra.trace(lin, key=key).value
        log_determinant = spectra.log_determinant(lin, 2.0, key=key).value
        return (
            trace,
            log_determinant,
            spectra.effective_dimension(lin, 2.0, key=key).value,
        )

    trace, log_determinant, dimension = run(np.zeros((5, 7)), jax.random.key(0))
    assert float(trace) == pytest.approx(0, abs=1e-12)
    assert float(log_determinant) == pytest.approx(5 * np.log(2))
    assert float(dimension) == 0


@pytest.mark.parametrize(
    "estimate", [one for one, _ in ESTIMATES.values()], ids=ESTIMATES
)
def test_estimates_for_nonfinite_matrices(estimate):
    jacobian = np.ones((5, 7))
    jacobian[1, 2] = np.inf
    found = estimate(linear(jacobian), jax.random.key(0))
    assert np.isnan(found.value)


LIN = linear(np.eye(3, 4))
MISTAKES = {
    "too many": (lambda: spectra.leading(LIN, 4), "3 x 4 has 3 eigenpairs, but 4"),
    "none": (lambda: spectra.leading(LIN, 0), "`k` must be a whole number"),
    "a tolerance of zero": (
        lambda: spectra.leading(LIN, 1, tolerance=0.0),
        "`tolerance` must be greater than 0",
    ),
    "no products": (
        lambda: spectra.leading(LIN, 1, max_products=0),
        "`max_products` must be a whole number",
    ),
    "no memory": (
        lambda: spectra.leading(linear(np.eye(30, 40), memory_budget=2000), 8),
        "Two copies of 8 eigenvectors of 30 numbers take more than the memory budget",
    ),
    "one probe": (
        lambda: spectra.trace(LIN, key=jax.random.key(0), num_probes=1),
        "`num_probes` must be at least 2",
    ),
    "no key": (lambda: spectra.trace(LIN, key=0), "`key` must be one key"),
    "no damping": (
        lambda: spectra.log_determinant(LIN, 0.0, key=jax.random.key(0)),
        "`damping` must be greater than 0",
    ),
    "no steps": (
        lambda: spectra.effective_dimension(LIN, 1.0, key=jax.random.key(0), num_steps=0),
        "`num_steps` must be a whole number",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("run", "words"), MISTAKES.values(), ids=MISTAKES)
def test_error_messages(run, words):
    with pytest.raises(ValueError, match=words) as caught:
        run()
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert ". " not in message


def test_a_model_in_place_of_its_linearisation():
    model = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    with pytest.raises(TypeError, match="`lin` must be a linearisation, such as"):
        gnlin.spectra.leading(model, 1)


@pytest.mark.parametrize("slow_decay", [True, False])
def test_the_standard_error_of_a_trace_is_not_too_small(slow_decay):
    powers = np.arange(1.0, 101) ** (-0.25 if slow_decay else -1.0)
    jacobian = of_spectrum(powers, 100, 120)
    expected = np.sum(powers)

    def draw(key):
        found = spectra.trace(linear(jacobian), key=key, num_probes=12)
        return found.value, found.standard_error

    keys = jax.random.split(jax.random.key(3), 200)
    values, said = map(np.asarray, jax.jit(jax.vmap(draw))(keys))
    error = np.sqrt(np.mean((values - expected) ** 2))
    assert 0.3 * np.mean(said) < error < 1.2 * np.mean(said)
    assert np.mean(np.abs(values - expected) > 2 * said) < 0.1


@pytest.mark.slow
def test_leading_eigenvalues_have_no_reverse_mode():
    phi = np.random.default_rng(0).normal(size=(6, 4))

    def largest(scale):
        lin = gnlin.linearise(lambda y, _: scale * phi @ y, jnp.zeros(4))
        return gnlin.spectra.leading(lin, 1).eigenvalues[0]

    expected = 2 * np.linalg.norm(phi, 2) ** 2
    along = jax.jit(lambda scale: jax.jvp(largest, (scale,), (1.0,))[1])(1.0)
    assert along == pytest.approx(expected, rel=1e-9)
    with pytest.raises(RuntimeError, match=r"no reverse-mode .* use `jax.jvp`"):
        jax.eval_shape(jax.grad(largest), 1.0)


@pytest.mark.slow
def test_another_damping_runs_the_same_program():
    lin = gnlin.linearise(lambda y, _: jnp.sin(y), jnp.arange(5.0))
    for fn in (spectra.log_determinant, spectra.effective_dimension):
        estimate = lambda damping, fn=fn: fn(lin, damping, key=jax.random.key(0))
        estimate(0.1)
        assert num_compiled(lambda estimate=estimate: estimate(0.2)) == 0
    spectra.leading(lin, 1, tolerance=1e-3)
    assert num_compiled(lambda: spectra.leading(lin, 1, tolerance=1e-4)) == 0


def test_the_effective_dimension_for_a_large_damping():
    ones = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (20, 20)))[0]
    ones = ones.astype(jnp.float32)
    lin = gnlin.linearise(lambda y, a: a @ y, jnp.zeros(20, jnp.float32), ones)
    damping = 1e7
    found = spectra.effective_dimension(lin, damping, key=jax.random.key(1))
    np.testing.assert_allclose(found.value, 20 / (1 + damping), rtol=1e-5)


@pytest.mark.slow
def test_a_standard_error_does_not_depend_on_units():
    matrix = jax.random.normal(jax.random.key(0), (50, 80), jnp.float32)

    def error(unit):
        product = lambda y, a: a @ y
        lin = gnlin.linearise(product, jnp.zeros(80, jnp.float32), unit * matrix)
        value, error = spectra.trace(lin, key=jax.random.key(1), num_probes=8)
        return error / value

    np.testing.assert_allclose([error(1e-12), error(1e12)], error(1.0), rtol=1e-3)
