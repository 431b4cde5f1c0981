"""Groups of residuals give the same numbers as one stacked problem by hand."""

import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pandas as pd
import pytest
from jax.flatten_util import ravel_pytree
from problems import drawn, interrupt_at_second_call, numbers

import gnlin
from gnlin._jacobian import PerGroup, Stacked


def second(net, x, e):
    """The second derivative in the direction `e`."""
    return jax.jvp(lambda x: jax.jvp(net, (x,), (e,))[1], (x,), (e,))[1]


def uniform(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).uniform(size=shape))


def source(x):
    return jnp.sin(jnp.pi * x[0]) * x[1]


NET = drawn(eqx.nn.MLP, 2, "scalar", 8, 1, jnp.tanh)
INSIDE = uniform(1, 12, 2)
EDGES = uniform(2, 5, 2)


def interior(net, x):
    return second(net, x, jnp.array([0.8, 0.6])) + source(x)


def boundary(net, x):
    return jnp.stack([net(x), net(x) ** 2])


GROUPS = {
    "interior": gnlin.Residuals(interior, INSIDE, weight=1 / 12),
    "boundary": gnlin.Residuals(boundary, EDGES, weight=3.0),
}


def by_hand(net):
    """Return the residuals as one vector that includes the weights."""
    within = jax.vmap(lambda x: interior(net, x))(INSIDE) / np.sqrt(12)
    at_edges = jax.vmap(lambda x: boundary(net, x))(EDGES) * np.sqrt(3)
    return jnp.concatenate([at_edges.reshape(-1), within.reshape(-1)])


PARAMETERS, STATIC = eqx.partition(NET, eqx.is_inexact_array)
FLAT, UNRAVEL = ravel_pytree(PARAMETERS)


@jax.jit
def dense_by_hand(y):
    fn = lambda y: by_hand(eqx.combine(UNRAVEL(y), STATIC))
    return fn(y), jax.jacobian(fn)(y)


def difference(model):
    return numbers(model) - np.asarray(FLAT)


def damped_step_by_hand():
    residual, matrix = map(np.asarray, dense_by_hand(FLAT))
    damped = matrix.T @ matrix + 0.1 * np.eye(matrix.shape[1])
    return -np.linalg.solve(damped, matrix.T @ residual)


@pytest.mark.parametrize(
    "method", ["svd", pytest.param("matrix-free", marks=pytest.mark.slow)]
)
def test_a_damped_step(method):
    expected = damped_step_by_hand()
    residual = np.asarray(dense_by_hand(FLAT)[0])
    solver = gnlin.DampedGaussNewton(0.1, method=method)
    solution = gnlin.solve(NET, GROUPS, solver, max_steps=1)
    np.testing.assert_allclose(difference(solution.model), expected, atol=1e-7)
    loss = 0.5 * residual @ residual
    np.testing.assert_allclose(solution.history.loss, [loss], rtol=1e-12)


def linearised(budget=2**31):
    def fn(group):
        return lambda y, x: group(eqx.combine(y, STATIC), x)

    both = PerGroup({"interior": fn(interior), "boundary": fn(boundary)})
    args = {"interior": INSIDE, "boundary": EDGES}
    return gnlin.linearise(both, PARAMETERS, args, memory_budget=budget), both, args


@functools.cache
def dense():
    def flat(y):
        net = eqx.combine(UNRAVEL(y), STATIC)
        at_edges = jax.vmap(lambda x: boundary(net, x))(EDGES)
        return jnp.concatenate(
            [at_edges.reshape(-1), jax.vmap(lambda x: interior(net, x))(INSIDE)]
        )

    return np.asarray(jax.jit(jax.jacobian(flat))(FLAT))


@pytest.mark.parametrize("budget", [pytest.param(20_000, marks=pytest.mark.slow), 1])
def test_the_stacked_jacobian(budget):
    matrix = dense()
    rng = np.random.default_rng(0)
    vector, cotangent = rng.normal(size=matrix.shape[1]), rng.normal(size=len(matrix))

    @jax.jit
    def found():
        jacobian = linearised(budget)[0].jacobian
        assert isinstance(jacobian, Stacked)
        assert jacobian.shape == matrix.shape
        flat = lambda tree: ravel_pytree(tree)[0]
        here, direction = jacobian.at_hand(), UNRAVEL(jnp.asarray(vector))
        return [
            (jacobian.gram(), matrix @ matrix.T),
            (here.gram(), matrix @ matrix.T),
            (jacobian.curvature(), matrix.T @ matrix),
            (jacobian.as_matrix(), matrix),
            (flat(jacobian.squared_columns()), (matrix**2).sum(axis=0)),
            (jacobian.squared_rows(), (matrix**2).sum(axis=1)),
            (jacobian.push_forward(direction), matrix @ vector),
            (here.push_forward(direction), matrix @ vector),
            (flat(jacobian.pull_back(jnp.asarray(cotangent))), matrix.T @ cotangent),
        ]

    for ours, expected in found():
        np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-9)


def test_the_kernel_between_two_sets():
    matrix = dense()
    rows = {"boundary": matrix[:10], "interior": matrix[10:], "both": matrix}

    @jax.jit
    def kernels():
        whole = linearised(budget=1)[0].jacobian
        sets = {**whole.parts, "both": whole}
        pairs = [("interior", "boundary"), ("boundary", "both"), ("both", "both")]
        return {(a, b): sets[a].gram_with(sets[b]) for a, b in pairs}

    for (a, b), kernel in kernels().items():
        np.testing.assert_allclose(kernel, rows[a] @ rows[b].T, atol=1e-9)


def test_kernel_of_test_and_training_images():
    net, x = drawn(eqx.nn.MLP, 4, 3, 8, 1, jnp.tanh), uniform(1, 9, 4)

    @eqx.filter_jit
    def kernels(net, x):
        of = lambda part: gnlin.features.linearise_model(net, part)
        return of(x).kernel(), of(x[:2]).kernel(of(x[2:]))

    every, between = kernels(net, x)
    np.testing.assert_allclose(between, every[:6, 6:], rtol=1e-5, atol=1e-5)


def test_a_model_linearised_on_groups():
    @eqx.filter_jit
    def found(net):
        lin = gnlin.features.linearise_model(net, gnlin.Groups(GROUPS))
        assert isinstance(lin.jacobian, Stacked)
        expected = {
            name: jax.vmap(lambda x, fn=group.fn: fn(net, x))(group.data)
            for name, group in GROUPS.items()
        }
        inner, outer = (
            gnlin.features.linearise_model(net, GROUPS[name])
            for name in ("interior", "boundary")
        )
        return lin.outputs, expected, lin.matrix(), lin.kernel(), inner.kernel(outer)

    outputs, expected, matrix, kernel, between = found(NET)
    for name in GROUPS:
        np.testing.assert_allclose(outputs[name], expected[name], rtol=1e-12)
    np.testing.assert_allclose(matrix, dense(), atol=1e-9)
    np.testing.assert_allclose(kernel, dense() @ dense().T, atol=1e-9)
    # The groups are sorted by name: the boundary is the first.
    np.testing.assert_allclose(between, dense()[10:] @ dense()[:10].T, atol=1e-9)


def test_groups_that_draw_their_data_have_no_linearisation():
    drawn = gnlin.Residuals(boundary, lambda key: EDGES)
    with pytest.raises(
        ValueError, match="group 'residuals' draws its data for each step"
    ):
        gnlin.features.linearise_model(NET, drawn)


def test_one_group_is_a_model_on_its_data():
    x = jnp.linspace(-1, 1, 9)[:, None]
    net = drawn(eqx.nn.Linear, 1, 1)
    target, solver = jnp.sin(3 * x), gnlin.DampedGaussNewton(0.1)
    aimed = gnlin.Residuals(lambda net, x: net(x), x, targets=target)
    plain, end = (
        gnlin.solve(net, data, solver, max_steps=5) for data in ((x, target), [aimed])
    )
    np.testing.assert_allclose(end.history.loss, plain.history.loss, rtol=1e-4)
    assert end.history.columns == plain.history.columns


@pytest.mark.slow
def test_other_losses_and_parameters_that_are_no_model():
    x = jnp.linspace(0, 1, 20)
    labels = (x > 0.5).astype(int)
    parameters = {"a": jnp.array(0.3), "w": jnp.array([[0.1], [0.2]])}
    groups = {
        "curve": gnlin.Residuals(
            lambda p, xy: p["a"] * xy[0] - xy[1], (x, 2 * x), loss=gnlin.losses.Huber(0.1)
        ),
        "classes": gnlin.Residuals(
            lambda p, x: p["w"] @ x[None],
            x,
            targets=labels,
            loss=gnlin.SoftmaxCrossEntropy(),
            weight=0.5,
        ),
    }
    solution = gnlin.solve(parameters, groups, max_steps=30)
    history = solution.history
    assert set(history.columns) >= {"loss/curve", "loss/classes"}
    total = history["loss/curve"] + history["loss/classes"]
    np.testing.assert_allclose(history.loss, total, rtol=1e-5)
    assert abs(float(solution.model["a"]) - 2) < 0.05
    assert history["loss/curve"][-1] < 1e-2 * history["loss/curve"][0]
    assert history["loss/classes"][-1] < history["loss/classes"][0]


@pytest.mark.slow
def test_zero_weights_and_traced_weights():
    def end(weight):
        groups = {
            "interior": GROUPS["interior"],
            "boundary": gnlin.Residuals(boundary, EDGES, weight=weight),
        }
        return gnlin.solve(
            NET, groups, gnlin.DampedGaussNewton(0.1, method="kernel"), max_steps=1
        ).model

    # The interior's residuals follow the ten of the boundary.
    residual, matrix = (np.asarray(x)[10:] for x in dense_by_hand(FLAT))
    damped = matrix.T @ matrix + 0.1 * np.eye(matrix.shape[1])
    alone = -np.linalg.solve(damped, matrix.T @ residual)
    swept = eqx.filter_jit(eqx.filter_vmap(end))(jnp.array([0.0, 3.0]))
    for i, expected in enumerate((alone, damped_step_by_hand())):
        one = jax.tree.map(lambda x, i=i: x[i] if eqx.is_array(x) else x, swept)
        np.testing.assert_allclose(difference(one), expected, atol=1e-8)


@pytest.mark.slow
def test_poissons_equation():
    """The accuracy is that of energy natural gradients (Mueller and Zeinhofer, 2023)."""
    exact = lambda x: jnp.sin(jnp.pi * x[..., 0]) * jnp.sin(jnp.pi * x[..., 1])
    side = (jnp.arange(12.0) + 0.5) / 12
    points = jnp.stack(jnp.meshgrid(side, side), -1).reshape(-1, 2)
    t, zero = side, jnp.zeros(12)
    edges = [(t, zero), (t, zero + 1), (zero, t), (zero + 1, t)]
    edges = jnp.concatenate([jnp.stack(edge, -1) for edge in edges])
    groups = {
        "interior": gnlin.Residuals(
            lambda net, x: (
                sum(second(net, x, e) for e in jnp.eye(2)) + 2 * jnp.pi**2 * exact(x)
            ),
            points,
            weight=1 / len(points),
        ),
        "boundary": gnlin.Residuals(lambda net, x: net(x), edges, weight=1 / len(edges)),
    }
    net = drawn(eqx.nn.MLP, 2, "scalar", 16, 1, jnp.tanh)
    solution = gnlin.solve(net, groups, max_steps=60)
    new = jax.random.uniform(jax.random.key(9), (500, 2))
    error = jax.vmap(solution.model)(new) - exact(new)
    assert jnp.linalg.norm(error) < 1e-3 * jnp.linalg.norm(exact(new))


#
# fit
#


def test_points_drawn_for_each_step():
    seen = []

    def points(key):
        drawn = jax.random.uniform(key, (6, 2))
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), drawn)
        return drawn

    groups = {
        "interior": gnlin.Residuals(interior, points),
        "boundary": gnlin.Residuals(boundary, EDGES),
    }
    result = gnlin.fit(NET, groups, gnlin.DampedGaussNewton(1.0), steps=3, progress=False)
    jax.effects_barrier()
    assert len({x.tobytes() for x in seen}) == 3
    assert len(result.history.loss) == 3
    total = result.history["loss/interior"] + result.history["loss/boundary"]
    np.testing.assert_allclose(result.history.loss, total, rtol=1e-6)
    again = gnlin.fit(NET, groups, gnlin.DampedGaussNewton(1.0), steps=3, progress=False)
    np.testing.assert_array_equal(result.history.loss, again.history.loss)


@pytest.mark.parametrize(
    "points",
    [
        lambda key: np.random.default_rng().uniform(size=(6, 2)),
        pytest.param(lambda key: EDGES, marks=pytest.mark.slow),
    ],
)
def test_points_that_are_the_same_in_each_step(points):
    groups = {"inside": gnlin.Residuals(boundary, points)}
    with pytest.warns(UserWarning, match="group 'inside' does not use its key") as caught:
        gnlin.fit(NET, groups, gnlin.DampedGaussNewton(1.0), steps=1, progress=False)
    assert caught[0].filename == __file__


@pytest.mark.slow
def test_fit_on_all_examples_matches_solve():
    means = {
        "interior": gnlin.Residuals(interior, INSIDE, loss=gnlin.SquaredError("mean")),
        "boundary": gnlin.Residuals(boundary, EDGES, loss=gnlin.SquaredError("mean")),
    }
    solver = gnlin.DampedGaussNewton(1.0)
    fitted = gnlin.fit(NET, means, solver, steps=4, progress=False)
    solved = gnlin.solve(NET, means, solver, max_steps=4)
    np.testing.assert_allclose(fitted.history.loss, solved.history.loss, rtol=1e-8)
    assert fitted.history.columns[-2:] == ["loss/boundary", "loss/interior"]


@pytest.mark.slow
def test_batches_of_each_group(tmp_path):
    solver, sizes = gnlin.LevenbergMarquardt(), {"interior": 4}
    settings = {"batch_size": sizes, "progress": False}
    whole = gnlin.fit(NET, GROUPS, solver, steps=6, **settings)
    gnlin.fit(NET, GROUPS, solver, steps=3, checkpoint=tmp_path, **settings)
    resumed = gnlin.fit(
        NET, GROUPS, solver, steps=6, checkpoint=tmp_path, resume=True, **settings
    )
    np.testing.assert_array_equal(resumed.history.loss, whole.history.loss)
    assert whole.result == optx.RESULTS.nonlinear_max_steps_reached


SOFTMAX = gnlin.SoftmaxCrossEntropy()
MISTAKES = {
    "no examples": (
        lambda: {"a": gnlin.Residuals(boundary, EDGES[:0])},
        "group 'a' holds 0 examples",
    ),
    "another kind": (
        lambda: {"a": gnlin.Residuals(boundary, EDGES), "b": (EDGES, EDGES)},
        "a tuple of 2 was given under 'b'",
    ),
    "lengths": (
        lambda: {"a": gnlin.Residuals(boundary, (EDGES, INSIDE))},
        r"All arrays of the group 'a' .* \(5, 2\) and \(12, 2\)",
    ),
    "a list of numbers": (
        lambda: {"a": gnlin.Residuals(boundary, EDGES.tolist())},
        "data of the group 'a' must have a leading axis .* by `jnp.array`",
    ),
    "lengths of many": (
        lambda: {"a": gnlin.Residuals(boundary, [EDGES, EDGES, INSIDE, INSIDE])},
        r"but have the shapes \(5, 2\) and \(12, 2\)\.$",
    ),
    "a masked array": (
        lambda: {"a": gnlin.Residuals(boundary, np.ma.masked_less(EDGES, 0.5))},
        "data of the group 'a' .* hold a masked array, whose mask would be lost",
    ),
    "no arrays": (
        lambda: {"a": gnlin.Residuals(boundary, "points")},
        "data of the group 'a' must be arrays",
    ),
    "a function that fails": (
        lambda: {"a": gnlin.Residuals(lambda net, x: net(x[0]), EDGES)},
        "function of the group 'a' is called with the model and one example",
    ),
    "a function that returns nothing": (
        lambda: {"a": gnlin.Residuals(lambda net, x: None, EDGES)},
        "function of the group 'a' must return arrays",
    ),
    "targets of another shape": (
        lambda: {"a": gnlin.Residuals(boundary, EDGES, targets=jnp.ones((5, 3)))},
        "In the group 'a': The targets must have the shape",
    ),
    "classes without targets": (
        lambda: {"a": gnlin.Residuals(boundary, EDGES, loss=SOFTMAX)},
        "outputs of a `SoftmaxCrossEntropy` are compared with classes: pass `targets`",
    ),
    "several weights": (
        lambda: {"a": gnlin.Residuals(boundary, EDGES, weight=jnp.ones(5))},
        r"`weight` of the group 'a' must be one number, but has the shape \(5,\)",
    ),
    "a sampler": (
        lambda: {"a": gnlin.Residuals(boundary, lambda key: EDGES)},
        "group 'a' draws its data for each step",
    ),
    "a sampler of nothing": (
        lambda: {"a": gnlin.Residuals(boundary, lambda key: jnp.array(1.0))},
        "group 'a' must draw arrays",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("make", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(make, words):
    with pytest.raises(ValueError, match=words):
        gnlin.solve(NET, make(), gnlin.DampedGaussNewton(1.0))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": gnlin.losses.Huber()}, "`loss` is not for groups"),
        ({"batch_size": {"inside": 3}}, "`batch_size` names 'inside'"),
        ({"batch_size": {"interior": 13}}, "'interior' has 12 examples"),
        ({"batch_size": 6}, "'boundary' has 5 examples"),
        (
            {"validation": (EDGES, EDGES)},
            "`validation` is not .* by `gnlin.callbacks.Me",
        ),
    ],
)
def test_mistakes_of_fit(options, words):
    with pytest.raises(ValueError, match=words):
        gnlin.fit(NET, GROUPS, steps=1, progress=False, **options)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("weight", [-1.0, jnp.inf, jnp.nan])
def test_errors_of_weights(weight):
    with pytest.raises(ValueError, match="`weight` must"):
        gnlin.Residuals(boundary, EDGES, weight=weight)


def test_a_data_frame_is_its_columns():
    x, y = np.linspace(0, 1, 10), np.linspace(0, 2, 10)
    fn = lambda p, row: p * row["x"] - row["y"]
    start, columns = jnp.array(0.0), {"x": x, "y": y}
    frame = gnlin.Residuals(fn, pd.DataFrame(columns))
    groups, solver = (frame, gnlin.Residuals(fn, columns)), gnlin.GaussNewton()
    np.testing.assert_array_equal(*(gnlin.solve(start, g, solver).model for g in groups))


@pytest.mark.parametrize(
    "run",
    [
        gnlin.solve,
        pytest.param(
            functools.partial(gnlin.fit, steps=2, progress=False), marks=pytest.mark.slow
        ),
    ],
)
def test_what_is_not_finite_is_named(run):
    x, fn, start = np.arange(5.0), lambda p, x: p * x, jnp.array(1.0)

    def warned(words, **groups):
        with pytest.warns(UserWarning, match=words):
            run(start, groups, gnlin.DampedGaussNewton(1.0))

    targets = np.where(x == 2, np.nan, 0)
    measured = gnlin.Residuals(fn, x, targets=targets)
    warned("The target of example 2 of the group 'a' is", a=measured)
    bad = gnlin.Residuals(lambda p, x: jnp.log(-(p**2)) * x, x)
    words = "The loss of the group 'b' is not finite"
    warned(words, a=gnlin.Residuals(fn, x), b=bad)
    if run is gnlin.solve:
        holes = gnlin.Residuals(fn, np.where(x == 3, np.nan, x))
        warned("Example 3 of the group 'a' is not finite", a=holes)


@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(gnlin.LevenbergMarquardt(), marks=pytest.mark.slow),
        gnlin.IterativeLinearisation(10, 1e-2),
    ],
)
def test_the_losses_of_groups_across_batches_add_up(solver):
    noisy = jnp.sin(40 * INSIDE[:, 0])
    groups = {
        "inside": gnlin.Residuals(lambda net, e: net(e[0]) - e[1], (INSIDE, noisy)),
        "edges": gnlin.Residuals(boundary, EDGES, weight=3.0),
    }
    sizes = {"inside": 2, "edges": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of losses that rise
        history = gnlin.fit(NET, groups, solver, batch_size=sizes, steps=30).history
    each = history["loss/inside"] + history["loss/edges"]
    np.testing.assert_allclose(each, history.loss, rtol=1e-9)


SLOPE = gnlin.Residuals(lambda m, x: m["u"](x) - m["k"] * x, jnp.linspace(0.0, 1.0, 9))
LINE = drawn(eqx.nn.MLP, "scalar", "scalar", 4, 1, jnp.tanh)


@pytest.mark.parametrize(
    ("whole", "words"),
    [
        ({"k": 1}, "The parameter 'k' is a whole number"),
        ({"k": jnp.array(1)}, "The parameter 'k' is a whole number"),
        (
            {"k": 1.0, "n": jnp.arange(3)},
            "'n' holds whole numbers, and is not trained",
        ),
    ],
)
def test_whole_numbers_are_not_trained(whole, words):
    with pytest.raises(UserWarning, match=words):  # before the first step
        gnlin.solve({"u": LINE, **whole}, SLOPE)


def test_some_parts_of_a_model_are_trained():
    model, solver = {"u": LINE, "k": jnp.ones(())}, gnlin.DampedGaussNewton(1.0)
    with pytest.raises(ValueError, match=r"`equinox\.is_inexact_array`, not `True`"):
        gnlin.solve(model, SLOPE, solver, filter_spec={"u": True, "k": False})
    spec = {"u": eqx.is_inexact_array, "k": False}
    solved = gnlin.solve(model, SLOPE, solver, max_steps=1, filter_spec=spec).model
    assert solved["k"] == 1
    assert np.any(solved["u"].layers[0].weight != LINE.layers[0].weight)


@pytest.mark.slow
def test_a_group_that_does_not_depend_on_the_parameters():
    bent = lambda u, x: jax.grad(jax.grad(u))(x) + 1.0
    ends = gnlin.Residuals(lambda u, x: u(x), jnp.array([0.0, 1.0]))
    groups = {"bent": gnlin.Residuals(bent, jnp.linspace(0.0, 1.0, 9)), "ends": ends}
    net = drawn(eqx.nn.MLP, "scalar", "scalar", 8, 1, jax.nn.relu)
    with pytest.warns(UserWarning, match="not changed the loss of the group 'bent'"):
        gnlin.solve(net, groups, gnlin.DampedGaussNewton(1.0), max_steps=5)


@pytest.mark.slow
def test_points_have_at_least_the_precision_of_the_parameters():
    slope = lambda u, x: jax.grad(u)(x) - jnp.cos(3 * x)
    points = jnp.linspace(0.0, 1.0, 9)

    def loss(points):
        groups = {
            "slope": gnlin.Residuals(slope, points),
            "start": gnlin.Residuals(lambda u, x: u(x), jnp.zeros(1)),
        }
        return gnlin.solve(LINE, groups, gnlin.DampedGaussNewton(0.1), max_steps=3).loss

    coarse = points.astype(jnp.float32)
    assert loss(coarse) == loss(coarse.astype(float))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray])
def test_drawn_points_have_at_least_the_precision_of_the_parameters(kind):
    slope = lambda u, d: jax.grad(u)(d["x"]) - jnp.cos(3 * d["x"])
    points = jnp.linspace(0.0, 1.0, 9, dtype=jnp.float32)

    def loss(points):
        draw = lambda key: {"x": kind(points), "drawn": jax.random.uniform(key, 9)}
        groups = gnlin.Residuals(slope, draw)
        solver = gnlin.DampedGaussNewton(0.1)
        return gnlin.fit(LINE, groups, solver, steps=3, progress=False).history.loss

    np.testing.assert_array_equal(loss(points), loss(points.astype(float)))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [jnp.float32, jnp.float64])
def test_parameters_in_single_precision_at_points_in_double(rate):
    decay = lambda m, x: jax.grad(m["u"])(x) + m["rate"] * m["u"](x)
    groups = {
        "decay": gnlin.Residuals(decay, jnp.linspace(0.0, 1.0, 9)),
        "start": gnlin.Residuals(lambda m, x: m["u"](x) - 1, jnp.zeros(1)),
    }
    cast = lambda x: x.astype(jnp.float32) if eqx.is_array(x) else x
    single = {"u": jax.tree.map(cast, LINE), "rate": jnp.ones((), rate)}
    with jax.numpy_dtype_promotion("standard"):  # which is JAX's default
        solution = gnlin.solve(single, groups, max_steps=3)
        double = gnlin.solve({"u": LINE, "rate": jnp.ones(())}, groups, max_steps=3)
    np.testing.assert_allclose(solution.loss, double.loss, rtol=0.02)
    assert solution.model["u"].layers[0].weight.dtype == jnp.float32
    assert solution.model["rate"].dtype == rate


@pytest.mark.slow
def test_ctrl_c_is_noticed_between_steps_without_data(monkeypatch):
    """All steps of a small run are one call of its program, but a function without data
    may be slow."""
    shown = interrupt_at_second_call(monkeypatch)
    x = jnp.linspace(-1.0, 1.0, 9)
    group = gnlin.Residuals(lambda u, _: jax.vmap(u)(x) - jnp.sin(3 * x))
    with pytest.warns(UserWarning, match="was interrupted after step"):
        solution = gnlin.solve(LINE, group, gnlin.LevenbergMarquardt(), max_steps=500)
    assert len(solution.history.step) == shown[1] < 10


def test_a_pair_is_no_model_of_groups():
    group = gnlin.Residuals(lambda model, x: model(x), jnp.ones(3))
    with pytest.raises(ValueError, match="pass the parameters instead of a pair"):
        gnlin.solve((lambda p, x: p * x, jnp.ones(())), group)


@pytest.mark.parametrize(
    "slope",
    [jax.grad, jax.jacfwd, jax.hessian, lambda u: lambda x: jax.jvp(u, (x,), (1.0,))[1]],
    ids=["grad", "jacfwd", "hessian", "jvp"],
)
def test_whole_numbers_have_no_derivatives(slope):
    group = gnlin.Residuals(lambda u, x: slope(u)(x), jnp.array([0, 1]))
    words = "group 'residuals' is .* by whole numbers, which must be floats"
    with pytest.raises(ValueError, match=words):
        gnlin.solve(LINE, group)


def test_a_tangent_of_another_dtype_is_no_matter_of_whole_numbers():
    group = gnlin.Residuals(
        lambda u, x: jax.jvp(u, (x,), (x.astype("f2"),))[1], jnp.ones(2)
    )
    with pytest.raises(ValueError, match="got tangent dtype float16"):
        gnlin.solve(LINE, group)


def test_dropout_in_a_group():
    group = gnlin.Residuals(lambda u, x: eqx.nn.Dropout(0.5)(u(x)), jnp.ones(3))
    with pytest.raises(ValueError, match="'residuals' uses dropout, which needs a key"):
        gnlin.solve(LINE, group)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_what_a_run_returned_is_not_a_model():
    x = jnp.linspace(0, 1, 5)
    group = gnlin.Residuals(lambda m, x: m["a"] * x - 1, x)
    start = {"a": jnp.array(1.0)}
    fit = functools.partial(gnlin.fit, steps=2)
    solution = gnlin.solve(start, group)
    of_optimistix = optx.least_squares(group, gnlin.GaussNewton(), start)
    of_curve = gnlin.curve_fit(lambda p, x: p["a"] * x, x, x, start)
    for driver in (gnlin.solve, fit):
        with pytest.raises(
            ValueError, match=r"a Solution was given: pass `solution.model`\.$"
        ):
            driver(solution, group)
        with pytest.raises(
            ValueError, match=r"a Solution was given: pass its `.value`\.$"
        ):
            driver(of_optimistix, group)
        with pytest.raises(
            ValueError, match=r"CurveFit was given: pass `fit.parameters`\.$"
        ):
            driver(of_curve, group)


@pytest.mark.parametrize("driver", [gnlin.solve, functools.partial(gnlin.fit, steps=2)])
def test_a_function_that_fails_is_named_once(driver):
    group = gnlin.Residuals(lambda m, x: m["a"](x), jnp.linspace(0, 1, 5))
    with pytest.raises(ValueError, match="The function of the group 'b'") as caught:
        driver({"a": jnp.array(1.0)}, {"b": group})
    assert str(caught.value).count("The function of the group") == 1


def test_data_in_place_of_the_function_are_not_printed():
    data, fn = np.zeros((100, 3)), lambda model, x: model * x
    for given, said in (
        ((data, fn), r"`gnlin.Residuals\(fn, data\)`, but an array of float64 of the"),
        (({"x": data}, fn), "but a dict was given"),
        ((data,), r"but an array of float64 of the shape \(100, 3\) was given"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            gnlin.Residuals(*given)
        assert len(str(caught.value)) < 200
