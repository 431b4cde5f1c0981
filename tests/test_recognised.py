"""Groups and robust losses through optimistix, compared with SciPy and `gnlin.solve`."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
import scipy.optimize
from problems import each_once

import gnlin
from gnlin._linearisation._recognised import recognised


T = np.linspace(0, 3, 40)
TRUE = np.array([2.0, 1.3, 0.4])
START = np.array([1.0, 0.5, 0.0])


def decay(p, args):
    t, y = args
    return p[0] * jnp.exp(-p[1] * t) + p[2] - y


def measured():
    y = TRUE[0] * np.exp(-TRUE[1] * T) + TRUE[2]
    y += 0.02 * np.random.default_rng(0).normal(size=T.size)
    y[[3, 20]] += 3
    return T, y


LOSSES = {
    "huber": gnlin.losses.Huber(0.1),
    "soft_l1": gnlin.losses.PseudoHuber(0.1),
    "cauchy": gnlin.losses.Cauchy(0.1),
    "arctan": gnlin.losses.Arctan(0.1),
    "linear": gnlin.SquaredError(),
}
OTHERS = {
    "gnlin": gnlin.LevenbergMarquardt(),
    "optimistix": optx.LevenbergMarquardt(rtol=1e-8, atol=1e-8),
    "best": optx.BestSoFarLeastSquares(gnlin.LevenbergMarquardt()),
    "a minimiser": optx.BFGS(rtol=1e-10, atol=1e-10),
}


@pytest.mark.parametrize(
    ("name", "solver"),
    [
        ("huber", "optimistix"),
        ("soft_l1", "a minimiser"),
        pytest.param("cauchy", "best", marks=pytest.mark.slow),
        ("arctan", "gnlin"),
    ],
)
def test_robust_losses_of_a_residual_function(name, solver):
    data = measured()

    def flat(p):
        return p[0] * np.exp(-p[1] * data[0]) + p[2] - data[1]

    tight = {"xtol": 1e-12, "ftol": 1e-12, "gtol": 1e-12}
    expected = scipy.optimize.least_squares(flat, START, loss=name, f_scale=0.1, **tight)
    robust = gnlin.Residuals(decay, loss=LOSSES[name])
    data = tuple(map(jnp.asarray, data))
    solution = optx.least_squares(robust, OTHERS[solver], jnp.asarray(START), data)
    np.testing.assert_allclose(solution.value, expected.x, atol=3e-7)


@pytest.mark.exhaustive
def test_tukeys_loss_matches_solve():
    data, start = tuple(map(jnp.asarray, measured())), jnp.asarray(TRUE)
    solved = gnlin.solve(
        start, gnlin.Residuals(decay, data, loss=gnlin.losses.Tukey(0.3))
    ).model
    robust = gnlin.Residuals(decay, loss=gnlin.losses.Tukey(0.3))
    found = optx.least_squares(robust, OTHERS["optimistix"], start, data, max_steps=1000)
    np.testing.assert_allclose(found.value, solved, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, jnp.float32) for name in LOSSES),
        ("soft_l1", jnp.float64),
        ("arctan", jnp.float64),
    ],
)
def test_plain_residuals(name, dtype):
    """Half the square of a residual is the loss, and its derivative is the loss's divided
    by the residual."""
    loss = LOSSES[name]
    r = jnp.asarray([-5.0, -0.1, -1e-3, -1e-30, 0.0, 1e-30, 1e-9, 0.05, 0.2, 7.0], dtype)

    @jax.jit
    def run(r, zero):
        slope = jax.grad(lambda r: jnp.sum(0.5 * loss.plain(r, zero) ** 2))(r)
        slopes = jax.grad(lambda r, t: jnp.sum(loss.plain(r, t)), (0, 1))(r, zero)
        known = loss.elementwise(r, zero), loss.derivative(r, zero)
        return loss.plain(r, zero), slope, slopes, known

    z, slope, (by_r, by_target), known = run(r, jnp.zeros_like(r))
    assert z.dtype == dtype
    np.testing.assert_allclose(0.5 * np.asarray(z) ** 2, known[0], rtol=1e-6)
    np.testing.assert_allclose(slope, known[1], rtol=1e-5, atol=1e-29)
    np.testing.assert_array_equal(by_target, -np.asarray(by_r))


#
# Groups
#

X = jnp.linspace(0, 1, 12)
PARAMETERS = {"rate": jnp.array([0.5, -2.0]), "size": jnp.array(0.3)}


def interior(p, x):
    return jnp.sum(jnp.exp(p["rate"] * x)) - p["size"]


def start(p, x):
    return p["size"] * jnp.sum(p["rate"]) + x - 1


GROUPS = {
    "interior": gnlin.Residuals(interior, X, weight=1 / 12, loss=gnlin.losses.Huber(0.5)),
    "start": gnlin.Residuals(start, jnp.zeros(1), weight=3.0),
}


def test_groups_match_solve():
    solver = gnlin.DampedGaussNewton(0.1, method="kernel")
    solved = gnlin.solve(PARAMETERS, GROUPS, solver, max_steps=2).model
    found = optx.least_squares(
        gnlin.Groups(list(GROUPS.values())), solver, PARAMETERS, max_steps=2, throw=False
    ).value
    for a, b in zip(*map(jax.tree.leaves, (found, solved)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)


@pytest.mark.exhaustive
def test_other_solvers_find_the_same_minimum():
    p = {"a": jnp.array(0.3), "b": jnp.zeros(2)}
    groups = gnlin.Groups(
        {
            "curve": gnlin.Residuals(
                lambda p, x: p["a"] * x - jnp.sin(3 * x), X, loss=gnlin.losses.Cauchy(0.2)
            ),
            "mean": gnlin.Residuals(
                lambda p, x: p["b"] + p["a"],
                X,
                loss=gnlin.SquaredError("mean"),
                weight=2.0,
            ),
            "ridge": gnlin.Residuals(lambda p, _: p, weight=0.1),
        }
    )
    solved = gnlin.solve(p, groups).model
    for name in ("optimistix", "a minimiser"):
        found = optx.least_squares(groups, OTHERS[name], p, max_steps=1000).value
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, solved
        )


@pytest.mark.exhaustive
def test_a_penalty_is_a_group_without_data():
    """Ridge regression, whose solution is known."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(20, 4)), rng.normal(size=20)
    expected = np.linalg.solve(a.T @ a + 0.5 * np.eye(4), a.T @ b)
    groups = {
        "data": gnlin.Residuals(lambda w, row: row[0] @ w - row[1], (a, b)),
        "ridge": gnlin.Residuals(lambda w, _: w, weight=0.5),
    }
    w = jnp.zeros(4)
    solution = gnlin.solve(w, groups)
    np.testing.assert_allclose(solution.model, expected, atol=1e-9)
    assert {"loss/data", "loss/ridge"} <= set(solution.history.columns)
    found = optx.least_squares(gnlin.Groups(groups), gnlin.LevenbergMarquardt(), w)
    np.testing.assert_allclose(found.value, expected, atol=1e-9)
    fitted = gnlin.fit(w, groups, steps=60, batch_size={"data": 20}, progress=False)
    assert fitted.history["loss/ridge"].shape == (60,)


def test_targets_of_a_group_without_data():
    group = gnlin.Residuals(
        lambda p, x: p * x,
        loss=gnlin.losses.Huber(1.0),
        targets=np.array([2.0, 4.0, 60.0]),
    )
    x, solver = jnp.array([1.0, 2.0, 1.0]), gnlin.DampedGaussNewton(1e-9)
    found = optx.least_squares(group, solver, jnp.array(1.0), x)
    # (p - 2) + 2 (2 p - 4) = 1: the third pulls with its delta.
    np.testing.assert_allclose(found.value, 2.2, rtol=1e-8)


@pytest.mark.slow
def test_errors_in_x_match_odrpack():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import scipy.odr as odr

        rng = np.random.default_rng(1)
        t = T + 0.05 * rng.normal(size=T.size)
        y = TRUE[0] * np.exp(-TRUE[1] * T) + TRUE[2] + 0.05 * rng.normal(size=T.size)
        model = odr.Model(lambda p, t: p[0] * np.exp(-p[1] * t) + p[2])
        data = odr.RealData(t, y, sx=0.05, sy=0.05)
        expected = odr.ODR(data, model, START, sstol=1e-15, partol=1e-15).run()
    groups = gnlin.Groups(
        [
            gnlin.Residuals(lambda q, ty: decay(q["p"], (q["t"], ty[1])) / 0.05),
            gnlin.Residuals(lambda q, ty: (q["t"] - ty[0]) / 0.05),
        ]
    )
    begin = {"p": jnp.asarray(START), "t": jnp.asarray(t)}
    solver = gnlin.LevenbergMarquardt()
    found = optx.least_squares(groups, solver, begin, (jnp.asarray(t), jnp.asarray(y)))
    np.testing.assert_allclose(found.value["p"], expected.beta, rtol=1e-6)


@pytest.mark.slow
def test_labels_are_for_gnlins_solvers():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(10, 3)))
    labels = np.arange(10) % 3
    group = gnlin.Residuals(
        lambda w, x: w @ x, x, targets=labels, loss=gnlin.SoftmaxCrossEntropy()
    )
    w, solver = jnp.zeros((3, 3)), gnlin.DampedGaussNewton(0.1, method="curvature")
    solved = gnlin.solve(w, group, solver, max_steps=2).model
    found = optx.least_squares(group, solver, w, max_steps=2, throw=False).value
    np.testing.assert_allclose(found, solved, atol=1e-10)
    with pytest.raises(ValueError, match="SoftmaxCrossEntropy` is not a sum of squares"):
        optx.least_squares(group, OTHERS["optimistix"], w)


@pytest.mark.slow
def test_the_derivative_of_a_likelihoods_minimum():
    """A likelihood is no sum of squares, so the default adjoint of optimistix, which
    differentiates one, raises an error that names gnlin's."""
    x = np.linspace(-1.0, 2.0, 12)
    successes = np.array([0.0, 0, 1, 0, 1, 0, 1, 1, 0, 1, 1, 1])
    solver = gnlin.DampedGaussNewton(1e-3, rtol=1e-12, atol=1e-12)

    def minimum(scale, **options):
        log_odds = lambda b, x: b[0] + b[1] * x
        loss = gnlin.losses.BinomialNLL(1)
        groups = {
            "trials": gnlin.Residuals(log_odds, scale * x, loss=loss, targets=successes),
            "penalty": gnlin.Residuals(lambda b, _: b),
        }
        start = jnp.zeros(2)
        return optx.least_squares(gnlin.Groups(groups), solver, start, **options).value

    @jax.jit
    def by_the_score(b, scale):
        def score(b, scale):
            rows = jnp.stack([jnp.ones_like(x), scale * x], axis=-1)
            return rows.T @ (jax.nn.sigmoid(rows @ b) - successes) + b

        by_b, by_scale = jax.jacfwd(score, (0, 1))(b, scale)
        return -jnp.linalg.solve(by_b, by_scale)

    with pytest.raises(ValueError, match=r"adjoint=gnlin\.methods\.ImplicitAdjoint"):
        jax.jacfwd(minimum)(1.5)
    along = lambda scale: minimum(scale, adjoint=gnlin.methods.ImplicitAdjoint())

    @jax.jit
    def both(scale):
        b, pulled = jax.vjp(along, scale)
        forwards = jax.jvp(along, (scale,), (jnp.ones_like(scale),))[1]
        return b, forwards, jax.vmap(pulled)(jnp.eye(2))[0]

    b, *found = both(1.5)
    for derivative in found:
        np.testing.assert_allclose(derivative, by_the_score(b, 1.5), rtol=1e-8)


@pytest.mark.exhaustive
def test_bounds_precision_and_many_at_once():
    x, y = (jnp.asarray(v, jnp.float32) for v in measured())
    solver = gnlin.LevenbergMarquardt(
        bounds=(0.0, jnp.array([9.0, 9.0, 0.3])), acceleration=False
    )

    @jax.jit
    @jax.vmap
    def fitted(y):
        robust = gnlin.Residuals(decay, loss=gnlin.losses.Huber(0.1))
        found = optx.least_squares(robust, solver, jnp.asarray(START, x.dtype), (x, y))
        return found.value

    ends = fitted(jnp.stack([y, y + 0.1]))
    assert ends.dtype == jnp.float32
    with_sums = scipy.optimize.least_squares(
        lambda p: np.asarray(p[0] * np.exp(-p[1] * T) + p[2] - measured()[1]),
        [1, 0.5, 0.1],
        bounds=(0, [9, 9, 0.3]),
        loss="huber",
        f_scale=0.1,
        xtol=1e-12,
        ftol=1e-12,
    )
    np.testing.assert_allclose(ends[0], with_sums.x, rtol=2e-3)


@pytest.mark.exhaustive
def test_derivatives_by_the_data_and_the_weight():
    x = jnp.asarray(T)

    def end(y, weight):
        groups = gnlin.Groups(
            [
                gnlin.Residuals(decay, (x, y), loss=gnlin.losses.PseudoHuber(0.1)),
                gnlin.Residuals(lambda p, _: p, weight=weight),
            ]
        )
        solver = gnlin.LevenbergMarquardt(1e-13, 1e-13)
        return optx.least_squares(groups, solver, jnp.asarray(START)).value[1]

    with_derivatives = jax.jit(jax.value_and_grad(end, argnums=(0, 1)))
    value = lambda y, weight: float(with_derivatives(jnp.asarray(y), weight)[0])
    y, weight, step = measured()[1], 0.1, 1e-5
    _, (by_y, by_weight) = with_derivatives(jnp.asarray(y), weight)
    along = step * (np.arange(y.size) == 5)
    expected = (value(y + along, weight) - value(y - along, weight)) / (2 * step)
    np.testing.assert_allclose(by_y[5], expected, rtol=1e-4)
    expected = (value(y, weight + step) - value(y, weight - step)) / (2 * step)
    np.testing.assert_allclose(by_weight, expected, rtol=1e-4)


def is_recognised(fn, y, args=None):
    """Look from within a solver whose program is not compiled."""
    found = []

    class Solver(gnlin.GaussNewton):
        def step(self, fn, y, args, options, state, tags):
            found.append(recognised(fn, y, args) is not None)
            return super().step(fn, y, args, options, state, tags)

    run = lambda y: optx.least_squares(fn, Solver(), y, args, max_steps=2, throw=False)
    eqx.filter_eval_shape(run, y)
    return found[0]


def test_recognised_residual_functions():
    y = {"a": jnp.ones(2), "b": jnp.zeros(2)}
    group = gnlin.Residuals(lambda p, x: x * p["a"] - p["b"] - 1, X)
    assert is_recognised(group, y)
    assert is_recognised(lambda y, args: group(y), y)
    # With parameters other than the solver's it is plain arithmetic.
    assert not is_recognised(lambda y, args: group({"a": y["b"], "b": y["a"]}), y)
    assert not is_recognised(lambda y, args: jax.tree.map(jnp.sin, group(y)), y)
    assert not is_recognised(lambda y, args: y, y)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_a_group_serves_again_outside_of_the_program_that_first_used_it():
    """A NumPy array that its function closes over belongs to no trace."""
    t = np.linspace(0, 1, 5)
    group = gnlin.Residuals(lambda p, _: p[0] * jnp.exp(p[1] * t) - t**2)
    solver = gnlin.GaussNewton()
    run = lambda y: optx.least_squares(group, solver, y).value
    found = jax.jit(run)(jnp.ones(2))
    solved = gnlin.solve(jnp.ones(2), group, solver).model
    np.testing.assert_allclose(solved, found, rtol=1e-6)
    (residuals,) = jax.tree.leaves(group(found))
    np.testing.assert_allclose(residuals[0], found[0] * np.exp(found[1] * t) - t**2)
    other = run(found)
    np.testing.assert_allclose(other, found, rtol=1e-6)


MISTAKES = {
    "args beside data": (
        lambda: (gnlin.Residuals(decay, measured()), measured()),
        "leave `args` out",
    ),
    "args that do not fit": (
        lambda: (gnlin.Residuals(decay), None),
        "with the model and `args`, as the group has no `data`, but failed",
    ),
    "points drawn anew": (
        lambda: (gnlin.Residuals(decay, lambda key: jnp.ones((3, 2))), None),
        "draws its data for each step",
    ),
    "targets of another shape": (
        lambda: (gnlin.Residuals(decay, targets=jnp.ones(3)), measured()),
        "targets must have the shape",
    ),
    "nothing returned": (
        lambda: (gnlin.Residuals(lambda p, args: None), None),
        "must return arrays",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "solver"), each_once(list(MISTAKES), ["gnlin", "optimistix"])
)
def test_mistakes(name, solver):
    make, words = MISTAKES[name]
    group, args = make()
    with pytest.raises(ValueError, match=words):
        optx.least_squares(group, OTHERS[solver], jnp.asarray(START), args)


@pytest.mark.usefixtures("unchecked")
def test_mistakes_of_groups():
    with pytest.raises(ValueError, match=r"must be `gnlin.Residuals` in a dictionary"):
        gnlin.Groups({"a": decay})
    with pytest.raises(ValueError, match="a tuple of 2 was given under 'b'"):
        gnlin.Groups({"a": gnlin.Residuals(decay), "b": (1, 2)})
    with pytest.raises(ValueError, match="`select` is a function of one example"):
        gnlin.Residuals(decay, select=lambda x: x)
    with pytest.raises(ValueError, match="has no examples: leave its `batch_size`"):
        gnlin.fit(
            jnp.ones(3),
            gnlin.Residuals(lambda p, _: p),
            batch_size={"residuals": 2},
            steps=1,
            progress=False,
        )


def test_arguments_that_are_not_arrays():
    fn = lambda p, args: args["f"](p - args["x"] * args["n"])
    given = {"x": jnp.array(2.0), "n": 3, "f": jnp.tanh, "name": "a"}
    solver, start = gnlin.GaussNewton(), jnp.array(5.5)
    found = optx.least_squares(gnlin.Residuals(fn), solver, start, given)
    np.testing.assert_allclose(found.value, 6.0)


def test_arguments_that_depend_on_the_parameters():
    group = gnlin.Residuals(lambda y, z: y * z - 3.0)
    found = optx.least_squares(
        lambda y, _: group(y, y), gnlin.GaussNewton(), jnp.array([1.0])
    )
    np.testing.assert_allclose(found.value, 3.0**0.5)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["gnlin", "optimistix", "a minimiser"])
def test_a_function_around_groups_may_have_auxiliary_data(solver):
    groups = gnlin.Groups({"data": gnlin.Residuals(lambda p, _: p**2 - 2)})

    def with_sum(p, args):
        return groups(p, args), jnp.sum(p)

    found = optx.least_squares(with_sum, OTHERS[solver], jnp.ones(2), has_aux=True)
    np.testing.assert_allclose(found.value, 2**0.5, rtol=1e-6)
    np.testing.assert_allclose(found.aux, 2 * 2**0.5, rtol=1e-6)


@pytest.mark.slow
def test_the_residuals_of_groups_are_a_plain_dictionary():
    groups = gnlin.Groups(
        {
            "b": gnlin.Residuals(lambda p, _: p - 3),
            "a": gnlin.Residuals(lambda p, _: 2 * p - 5),
        }
    )
    by_name = groups(jnp.ones(2))
    assert type(by_name) is dict
    assert sorted(by_name) == ["a", "b"]
    assert {k: float(v.sum()) for k, v in by_name.items()} == {"a": -6, "b": -4}
    weights = {"a": 1.0, "b": 2.0}
    functions = {
        "map": lambda p, _: jax.tree.map(jnp.multiply, groups(p), weights),
        "iterate": lambda p, _: [weights[k] * groups(p)[k] for k in sorted(groups(p))],
        "cond": lambda p, _: jax.lax.cond(
            p[0] > -9,
            lambda p: {k: weights[k] * r for k, r in groups(p).items()},
            lambda p: {"a": p[None], "b": p[None]},
            p,
        ),
    }
    expected = np.linalg.lstsq(np.array([[2.0], [2.0]]), np.array([5.0, 6.0]))[0]
    for fn in functions.values():
        found = optx.least_squares(fn, gnlin.LevenbergMarquardt(), jnp.ones(2))
        np.testing.assert_allclose(found.value, np.repeat(expected, 2), rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 2])
def test_the_state_of_groups_has_the_structure_of_their_outputs(factor):
    """The default keeps outputs in its state. A multiple of groups is not recognised."""
    data = tuple(map(jnp.asarray, measured()))
    groups = gnlin.Groups([gnlin.Residuals(decay), gnlin.Residuals(decay)])
    multiple = lambda p, args: jax.tree.map(lambda r: factor * r, groups(p, args))
    start = jnp.asarray(START)
    found = optx.least_squares(multiple, gnlin.LevenbergMarquardt(), start, data).value
    expected = scipy.optimize.least_squares(
        lambda p: np.asarray(decay(p, data)), START, xtol=1e-14, ftol=1e-14, gtol=1e-14
    )
    np.testing.assert_allclose(found, expected.x, atol=1e-6)
