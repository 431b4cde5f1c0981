"""Functions that allow only one direction of differentiation."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from problems import drawn

import gnlin
from gnlin._common._passes import Passes
from gnlin._jacobian import Layer


@jax.custom_vjp
def reverse_sin(x):
    return jnp.sin(x)


reverse_sin.defvjp(lambda x: (jnp.sin(x), x), lambda x, d: (d * jnp.cos(x),))


def looped_cube(x):
    """Use a loop with a traced number of steps, which reverse mode cannot
    differentiate."""
    step = lambda s: (s[0] + 1, s[1] * x)
    return jax.lax.while_loop(lambda s: s[0] < 3, step, (jnp.array(0), x * 0 + 1))[1]


@jax.custom_jvp
def bisected_root(a):
    """Find the root of x + x^3 = a by bisection, which has no derivative."""

    def halve(ends):
        low, high = ends
        middle = (low + high) / 2
        below = middle + middle**3 < a
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    width = jnp.finfo(a.dtype).eps * 8
    goes_on = lambda ends: jnp.any(ends[1] - ends[0] > width)
    return jax.lax.while_loop(goes_on, halve, (a * 0 - 4, a * 0 + 4))[0]


@bisected_root.defjvp
def _(primals, tangents):
    """Solve the linear equation of the implicit function theorem by a loop."""
    (a,), (t,) = primals, tangents
    x = bisected_root(a)
    step = lambda s: (s[0] + 1, s[1] + (t - (1 + 3 * x**2) * s[1]) / (1 + 3 * x**2))
    return x, jax.lax.while_loop(lambda s: s[0] < 2, step, (jnp.array(0), t * 0))[1]


INNER = {
    "loop": (looped_cube, lambda x: 3 * x**2),
    "root": (bisected_root, lambda a: 1 / (1 + 3 * bisected_root(a) ** 2)),
    "custom_vjp": (reverse_sin, jnp.cos),
}
ONLY = {"loop": "fwd", "root": "fwd", "custom_vjp": "bwd"}
SHAPES = {"tall": (7, 3), "wide": (3, 5)}


def problem(kind, shape, dtype=float):
    """Return residuals of parameters in a dictionary, the start, and the Jacobian by
    hand."""
    inner, slope = INNER[kind]
    m, p = SHAPES[shape]
    weights = jnp.asarray(np.random.default_rng(3).normal(size=(m, p)) / p, dtype)
    y = {"a": jnp.asarray(np.linspace(0.4, 0.9, p - 1), dtype), "b": jnp.ones((), dtype)}

    def joined(y):
        return jnp.concatenate([y["a"], y["b"][None]])

    def fn(y, args):
        # The target can be reached, so a tall problem has a zero too.
        return inner(weights @ joined(y)) - inner(weights @ jnp.full(p, 0.7, dtype))

    @jax.jit
    def oracle(y):
        return slope(weights @ joined(y))[:, None] * weights

    return fn, y, oracle


PAIRWISE = [
    ("loop", "tall", jnp.float64, False),
    ("root", "wide", jnp.float32, True),
    ("custom_vjp", "tall", jnp.float32, True),
    ("custom_vjp", "wide", jnp.float64, True),
]


@pytest.mark.parametrize(("kind", "shape", "dtype", "jitted"), PAIRWISE)
def test_products_are_those_of_the_dense_jacobian(kind, shape, dtype, jitted):
    fn, y, oracle = problem(kind, shape, dtype)
    m, _ = SHAPES[shape]
    v = jax.tree.map(
        lambda x: jnp.asarray(np.cos(np.arange(x.size)).reshape(x.shape), dtype), y
    )
    u = jnp.asarray(np.sin(1 + np.arange(m)), dtype)

    def found(y):
        lin = gnlin.linearise(fn, y)
        return lin.matrix(), lin.jvp(v), lin.vjp(u), lin.kernel(), lin.curvature()

    found = jax.jit(found) if jitted else found
    matrix, pushed, pulled, kernel, curvature = found(y)
    expected = np.asarray(oracle(y))
    pulled = np.append(pulled["a"], pulled["b"])
    rtol = 1e-10 if dtype == jnp.float64 else 1e-4
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=0.1 * rtol)
    same(matrix, expected)
    same(pushed, expected @ np.append(v["a"], v["b"]))
    same(pulled, np.asarray(u) @ expected)
    same(kernel, expected @ expected.T)
    same(curvature, expected.T @ expected)


@pytest.mark.parametrize("kind", ["loop", "custom_vjp"])
def test_rows_of_examples_take_passes_of_one_example(kind):
    """This holds for parts, for chosen rows and by colouring too."""
    inner, slope = INNER[kind]
    y, x = jnp.linspace(0.4, 0.9, 4), jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
    weights = jnp.cos(jnp.arange(12.0)).reshape(4, 3)

    def fn(y, args):
        example, weight = args
        return inner(jnp.dot(example, y[:3])) * weight

    expected = np.zeros((4, 3, 4))
    expected[..., :3] = np.asarray(slope(x @ y[:3]))[:, None, None] * np.einsum(
        "nc,nk->nck", weights, x
    )
    for part_size in (None, 3):

        @jax.jit
        def run(y, args, part_size=part_size):
            lin = gnlin.linearise(gnlin.PerExample(fn, part_size), y, args)
            return lin.matrix(), lin.outputs, lin.vjp(lin.outputs)

        matrix, outputs, pulled = map(np.asarray, run(y, (x, weights)))
        np.testing.assert_allclose(matrix, expected.reshape(12, 4), rtol=1e-12)
        np.testing.assert_allclose(pulled, outputs.ravel() @ matrix)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["loop", "custom_vjp"])
def test_groups_with_selections_and_colours(kind):
    inner, _ = INNER[kind]
    plain = {"loop": lambda x: x**3, "custom_vjp": jnp.sin}[kind]
    chain = lambda f: lambda y, _: f(y[1:]) - 0.5 * y[:-1]
    y0 = jnp.linspace(0.2, 0.6, 6)

    def groups(f, jac):
        sparsity = gnlin.Sparsity(chain(f), y0, jac=jac)
        ends = jnp.stack([jnp.arange(5), jnp.arange(5) + 1], axis=1)
        step = lambda pair, _: f(pair[1]) * pair[0] - 0.1
        return {
            "chain": gnlin.Residuals(chain(f), sparsity=sparsity),
            "steps": gnlin.Residuals(step, ends, select=lambda pair: pair),
        }

    def history(f, jac):
        solver = gnlin.DampedGaussNewton(0.1)
        return gnlin.solve(y0, groups(f, jac), solver, max_steps=4, throw=False).history

    mine, other = ("fwd", "bwd") if ONLY[kind] == "fwd" else ("bwd", "fwd")
    expected = history(plain, None)
    np.testing.assert_allclose(
        history(inner, mine)["loss"], expected["loss"], rtol=1e-9, atol=1e-20
    )
    with pytest.raises(
        ValueError, match=rf'make it with `gnlin.Sparsity\(..., jac="{mine}'
    ):
        history(inner, other)


SOLVERS = [
    ("loop", "wide", jnp.float64, gnlin.LevenbergMarquardt()),
    ("custom_vjp", "tall", jnp.float64, gnlin.LevenbergMarquardt(bounds=(0.0, 2.0))),
    ("custom_vjp", "wide", jnp.float32, gnlin.DampedGaussNewton(1e-6, method="kernel")),
    ("root", "tall", jnp.float64, gnlin.TruncatedGaussNewton(1e-4)),
]


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "solver"),
    SOLVERS,
    ids=[f"{s[0]}-{s[1]}-{type(s[3]).__name__}" for s in SOLVERS],
)
def test_solvers_find_the_zero(kind, shape, dtype, solver):
    fn, y, _ = problem(kind, shape, dtype)
    found = optx.least_squares(fn, solver, y, max_steps=300, throw=False)
    accuracy = 1e-6 if dtype == jnp.float64 else 2e-3
    assert found.result == optx.RESULTS.successful
    assert jnp.max(jnp.abs(fn(found.value, None))) < accuracy


@pytest.mark.exhaustive
def test_networks_with_a_reverse_derivative_only():
    """Dense layers are still found."""
    model = drawn(eqx.nn.MLP, 2, 1, 30, 1, activation=reverse_sin)
    plain = eqx.tree_at(lambda m: m.activation, model, jnp.sin)

    @eqx.filter_jit
    def kernels(*models):
        x = jnp.linspace(-1, 1, 12).reshape(6, 2)
        lins = [gnlin.features.linearise_model(each, x) for each in models]
        for lin in lins:
            assert any(isinstance(block, Layer) for block in lin.jacobian.blocks())
        return [lin.kernel() for lin in lins]

    np.testing.assert_allclose(*kernels(model, plain), rtol=1e-10)


@pytest.mark.exhaustive
def test_many_fits_are_one_program():
    x = jnp.linspace(0.1, 1.0, 8)
    curve = lambda p, x: p["a"] * reverse_sin(p["b"] * x)
    true = {"a": 2.0, "b": 1.5}
    y = jnp.stack([curve(true, x), curve(true | {"a": 3.0}, x)])
    solver = gnlin.LevenbergMarquardt()
    fit = gnlin.curve_fit(curve, x, y, {"a": 1.0, "b": 1.0}, solver)
    np.testing.assert_allclose(fit.parameters["a"], [2, 3], rtol=1e-6)
    np.testing.assert_allclose(fit.parameters["b"], 1.5, rtol=1e-6)
    assert jnp.all(jnp.isfinite(fit.standard_errors["b"]))


@pytest.mark.exhaustive
def test_the_minimum_is_differentiated_as_with_solvers_of_optimistix():
    def minimum(shift, solver):
        fn = lambda y, s: jnp.append(reverse_sin(y) - s, 0.1 * jnp.sum(y))
        y0, options = jnp.array([0.1, 0.4]), {"jac": "bwd"}
        return optx.least_squares(fn, solver, y0, shift, options=options).value

    shift = jnp.array([0.3, 0.5])
    mine = lambda s: minimum(s, gnlin.DampedGaussNewton(1e-3))
    others = lambda s: minimum(s, optx.LevenbergMarquardt(1e-10, 1e-10))
    found, expected = (jax.jit(jax.jacrev(f))(shift) for f in (mine, others))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


#
# Both directions
#


def test_a_function_with_both_directions_is_traced_once():
    fn = lambda y, _: jnp.sin(jax.lax.erf_inv(y))
    y = jnp.linspace(-0.5, 0.5, 4)
    lin = gnlin.linearise(fn, y)
    assert lin.jacobian.a_product() == Passes(1, 1)  # the Jacobian is not in memory
    program = str(jax.make_jaxpr(lambda y: gnlin.linearise(fn, y))(y))
    assert program.count("erf_inv ") == 1
    assert program.count("sin ") == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_a_direction_can_be_asked_for(shape):
    m, p = SHAPES[shape]
    weights = jnp.cos(jnp.arange(float(m * p))).reshape(m, p)
    fn = lambda y, _: jnp.tanh(weights @ y) - 0.1
    of_one = lambda y, w: jnp.tanh(w @ y)
    y = jnp.linspace(-0.5, 0.5, p)
    rows = {"fwd": Passes(jvps=p), "bwd": Passes(vjps=m)}

    @jax.jit
    def matrices(y):
        fewest = gnlin.linearise(fn, y)
        assert fewest.jacobian.cost().rows == rows["fwd" if p < m else "bwd"]
        found = []
        for jac, passes in rows.items():
            lin = gnlin.linearise(fn, y, jac=jac)
            assert lin.jacobian.cost().rows == passes
            each = gnlin.linearise(gnlin.PerExample(of_one), y, weights, jac=jac)
            one = {"fwd": Passes(jvps=p), "bwd": Passes(vjps=1)}[jac]
            assert each.jacobian.cost().rows == one
            found += [lin.matrix(), each.matrix()]
        return fewest.matrix(), found

    expected, found = matrices(y)
    for matrix in found:
        np.testing.assert_allclose(matrix, expected, rtol=1e-12)


def test_options_are_those_of_optimistix():
    fn = lambda y, args: jnp.stack([10 * (y[1] - y[0] ** 2), 1 - y[0]])
    solver, y = gnlin.DampedGaussNewton(1e-3), jnp.array([0.5, 0.5])
    found = (
        optx.least_squares(fn, solver, y, options={"jac": jac}).value
        for jac in ("fwd", "bwd")
    )
    np.testing.assert_allclose(*found, rtol=1e-9)
    looped = lambda y, _: looped_cube(y) - 8.0
    with pytest.raises(ValueError, match=r'no reverse-mode derivative, .* `jac="fwd"`'):
        optx.least_squares(looped, solver, jnp.ones(2), options={"jac": "bwd"})
    reverse = lambda y, _: reverse_sin(y) - 0.5
    with pytest.raises(ValueError, match=r'no forward-mode derivative, .* `jac="bwd"`'):
        optx.least_squares(reverse, solver, jnp.ones(2), options={"jac": "fwd"})


@pytest.mark.parametrize("wrong", ["rev", 1])
def test_other_directions_are_refused(wrong, unchecked):
    fn, y = lambda y, _: jnp.sin(y), jnp.ones(2)
    sentence = '`jac` must be "fwd" or "bwd", but'
    with pytest.raises(ValueError, match=sentence):
        gnlin.linearise(fn, y, jac=wrong)
    with pytest.raises(ValueError, match=sentence):
        gnlin.Sparsity(fn, y, jac=wrong)
    solver = gnlin.DampedGaussNewton(1e-3)
    with pytest.raises(ValueError, match=sentence):
        optx.least_squares(fn, solver, y, options={"jac": wrong})


#
# Errors
#


def test_a_function_without_a_derivative_is_refused():
    both = lambda y, _: reverse_sin(looped_cube(y))
    with pytest.raises(ValueError, match=r"has no derivative: .* the same mode\.$"):
        gnlin.linearise(both, jnp.ones(3))


@pytest.mark.parametrize("kind", ["loop", "custom_vjp"])
def test_a_jacobian_beyond_the_memory_budget_is_refused(kind):
    inner, _ = INNER[kind]
    fn = lambda y, _: inner(y[:50])
    missing = "reverse" if kind == "loop" else "forward"
    sentence = rf"no {missing}-mode derivative, and needs its 50 x 100 .*`memory_budget`"
    with pytest.raises(ValueError, match=sentence):
        gnlin.linearise(fn, jnp.ones(100), memory_budget=30_000)
    solver = gnlin.TruncatedGaussNewton(0.1, memory_budget=30_000)
    with pytest.raises(ValueError, match=sentence):
        optx.least_squares(fn, solver, jnp.ones(100))


#
# diffrax
#

ADJOINTS = {
    "direct": diffrax.DirectAdjoint(),
    "forward": diffrax.ForwardMode(),
    "default": diffrax.RecursiveCheckpointAdjoint(),
}
TRUE = {"ab": 1.5, "bc": 0.7}


def seen(adjoint, k):
    """A reaction A -> B -> C, of which B is measured."""

    def rates(t, y, k):
        return jnp.stack([-k["ab"] * y[0], k["ab"] * y[0] - k["bc"] * y[1]])

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(rates),
        diffrax.Euler(),
        t0=0.0,
        t1=2.0,
        dt0=0.25,
        y0=jnp.array([1.0, 0.0]),
        args=k,
        saveat=diffrax.SaveAt(steps=True),
        adjoint=adjoint,
        max_steps=8,
    )
    return solution.ys[:, 1]


def seen_by_hand(k):
    a, b, found = 1.0, 0.0, []
    for _ in range(8):
        a, b = a - 0.25 * k["ab"] * a, b + 0.25 * (k["ab"] * a - k["bc"] * b)
        found.append(b)
    return jnp.stack(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ADJOINTS)
def test_differential_equations_by_each_adjoint(name):
    def fn(k, data):
        return seen(ADJOINTS[name], k) - data

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        data, k = seen_by_hand(TRUE), {"ab": 1.0, "bc": 1.0}
        rows = jax.jit(lambda k: gnlin.linearise(fn, k, data).rows())(k)
        expected = jax.jit(jax.jacfwd(seen_by_hand))(k)
        found = optx.least_squares(fn, gnlin.DampedGaussNewton(1e-3), k, data).value
    for name, rate in TRUE.items():
        np.testing.assert_allclose(rows[name], expected[name], rtol=1e-10)
        np.testing.assert_allclose(found[name], rate, rtol=1e-6)


def test_a_loop_of_unknown_length_is_compiled_once():
    def both(y):
        lin = gnlin.linearise(lambda y, _: jax.vmap(looped_cube)(y), y)
        return lin.outputs, lin.matrix()

    y = jnp.array([0.5, 1.5])
    compiled = jax.jit(both).lower(y).compile()
    outputs, matrix = compiled(y)
    np.testing.assert_allclose(outputs, y**3, rtol=1e-12)
    np.testing.assert_allclose(matrix, jnp.diag(3 * y**2), rtol=1e-12)
    assert compiled.as_text().count(" while(") == 1
