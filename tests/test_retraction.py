"""Parameters on manifolds: steps by a retraction, for rotations and poses."""

import functools
import warnings

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import jaxlie
import numpy as np
import optimistix as optx
import pytest
import scipy.optimize
from scipy.spatial.transform import Rotation

import gnlin
from gnlin._linearisation._retraction import check_fits, Retraction


@pytest.fixture(autouse=True)
def as_a_user():
    """Allow promotion, on which jaxlie relies."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def moved(pose, step):
    """A retraction of seven numbers, the last of which no step uses."""
    there = jaxlie.SE3(pose) @ jaxlie.SE3.exp(step[:6])
    return there.normalize().parameters()


def between(pair, edge):
    relative = jaxlie.SE3(pair[0]).inverse() @ jaxlie.SE3(pair[1])
    return (jaxlie.SE3(edge["measured"]).inverse() @ relative).log()


@functools.partial(jax.jit, static_argnums=(0, 1))
def loop(n, dtype=jnp.float64):
    """Poses that turn far around, each measured from the last; the start is far off."""
    rng = np.random.default_rng(0)
    steps = jnp.asarray(np.tile([0.3, 0, 0.1, 0.4, 0.9, 0.2], (n - 1, 1)), dtype)
    first = jaxlie.SE3.identity().parameters().astype(dtype)

    def ahead(pose, step):
        # jaxlie computes in double precision wherever JAX allows it.
        pose = (jaxlie.SE3(pose) @ jaxlie.SE3.exp(step)).parameters().astype(dtype)
        return pose, pose

    true = jnp.concatenate([first[None], jax.lax.scan(ahead, first, steps)[1]])
    k = jnp.arange(n - 1)
    ends = jnp.concatenate(
        [jnp.stack([k, k + 1], 1), jnp.stack([k[:-2], k[:-2] + 3], 1)[::2]]
    )
    measured = jax.vmap(
        lambda e: (jaxlie.SE3(true[e[0]]).inverse() @ jaxlie.SE3(true[e[1]])).parameters()
    )(ends)
    noise = jnp.asarray(0.3 * rng.normal(size=(n, 7)), dtype).at[0].set(0)
    edges = {"ends": ends, "measured": measured}
    return true, jax.vmap(moved)(true, noise), edges


def groups(edges, true):
    to_first = jaxlie.SE3(true[0]).inverse()
    held = lambda pose, k: 10 * (to_first @ jaxlie.SE3(pose)).log()
    return {
        "edges": gnlin.Residuals(between, edges, select=lambda e: e["ends"]),
        "first": gnlin.Residuals(held, jnp.zeros(1, int), select=lambda k: k),
    }


def all_residuals(poses, edges, true):
    of_edges = jax.vmap(lambda e: between(poses[e["ends"]], e))(edges)
    held = 10 * (jaxlie.SE3(true[0]).inverse() @ jaxlie.SE3(poses[0])).log()
    return of_edges, held


@jax.jit
def literal_problem(true, start, edges):
    """Return the residuals and their Jacobian with respect to a step of `moved`."""

    def ahead(step):
        there = jax.vmap(moved)(start, step.reshape(start.shape))
        return jax.flatten_util.ravel_pytree(all_residuals(there, edges, true))[0]

    zero = jnp.zeros(start.size)
    return ahead(zero), jax.jacfwd(ahead)(zero)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["svd", "matrix-free"])
def test_a_step_is_the_literal_one(method):
    true, start, edges = loop(12)
    group = groups(edges, true)
    solver = gnlin.DampedGaussNewton(0.1, method=method, retraction=moved)
    found = gnlin.solve(start, group, solver, max_steps=1).model
    residual, jacobian = map(np.asarray, literal_problem(true, start, edges))
    curvature = jacobian.T @ jacobian + 0.1 * np.eye(start.size)
    step = -np.linalg.solve(curvature, jacobian.T @ residual).reshape(start.shape)
    np.testing.assert_array_equal(step[:, 6], 0)
    expected = jax.jit(jax.vmap(moved))(start, jnp.asarray(step))
    np.testing.assert_allclose(found, expected, atol=1e-8)


@pytest.mark.parametrize(
    "dtype", [jnp.float64, pytest.param(jnp.float32, marks=pytest.mark.slow)]
)
def test_poses_are_found_and_stay_poses(dtype):
    true, start, edges = loop(12, dtype)
    solver = gnlin.LevenbergMarquardt(retraction=moved)
    found = gnlin.solve(start, groups(edges, true), solver, max_steps=40)
    tolerance = 1e-9 if dtype == jnp.float64 else 1e-3
    poses, true = np.asarray(found.model), np.asarray(true)
    signs = np.sign(np.sum(poses[:, :4] * true[:, :4], axis=1, keepdims=True))
    np.testing.assert_allclose(poses[:, :4] * signs, true[:, :4], atol=tolerance)
    np.testing.assert_allclose(poses[:, 4:], true[:, 4:], atol=tolerance)
    norms = np.linalg.norm(poses[:, :4], axis=1)
    np.testing.assert_allclose(norms, 1, atol=1e-6)
    assert found.result == optx.RESULTS.successful


@pytest.mark.slow
def test_a_start_off_the_space_is_moved_onto_it():
    """Its second-order correction would otherwise see the jump to the first step."""
    rng = np.random.default_rng(0)
    true = jaxlie.SE3.exp(jnp.array([0.5, -1, 0.3, 0.9, -0.4, 2.0]))
    points = jnp.asarray(rng.normal(size=(30, 3)))
    seen = jax.vmap(lambda x: true @ x)(points)
    group = gnlin.Residuals(
        lambda pose, d: jaxlie.SE3(pose) @ d[0] - d[1], (points, seen)
    )
    solver = gnlin.LevenbergMarquardt(retraction=moved)
    start = true.parameters() + 0.1 * jnp.asarray(rng.normal(size=7))
    solution = gnlin.solve(start, group, solver)
    assert solution.result == optx.RESULTS.successful
    assert solution.loss < 1e-20

    def residuals(pose, _):
        return jax.vmap(lambda x: jaxlie.SE3(pose) @ x)(points) - seen

    found = optx.least_squares(residuals, solver, start, max_steps=40)
    assert jnp.linalg.norm(found.value[:4]) == pytest.approx(1)
    assert jnp.linalg.norm(residuals(found.value, None)) < 1e-10


@pytest.mark.slow
def test_what_is_not_trained_needs_no_function():
    pose, solver = jaxlie.SE3.identity().parameters(), gnlin.GaussNewton
    points = jnp.asarray(np.random.default_rng(0).normal(size=(9, 3)))
    seen = jax.vmap(jaxlie.SE3.exp(jnp.arange(6.0)).apply)(points)
    fn = lambda p, x: p["sign"] * jaxlie.SE3(p["pose"]).apply(x)
    tree = {"pose": moved, "sign": None}
    start = {"pose": pose, "sign": 1}
    with pytest.warns(UserWarning, match="'sign' is a whole number, and is not trained"):
        solution = gnlin.solve((fn, start), (points, seen), solver(retraction=tree))
    assert solution.loss < 1e-20
    every = lambda p, x: jax.vmap(lambda row: fn(p, row))(x)
    options = {"fixed": ["sign"], "solver": solver(retraction=moved)}
    fit = gnlin.curve_fit(every, points, seen, start, **options)
    assert fit.chi_squared < 1e-20


def test_a_prior_of_single_numbers_is_refused():
    fn = lambda pose, x: jaxlie.SE3(pose).apply(x)
    pose, data = jaxlie.SE3.identity().parameters(), (jnp.ones((5, 3)), jnp.ones((5, 3)))
    solver = gnlin.LevenbergMarquardt(retraction=moved)
    with pytest.raises(ValueError, match="does not suit a `retraction`"):
        gnlin.solve((fn, pose), data, solver, prior=1.0)


@pytest.mark.slow
def test_through_optimistix_and_for_some_arrays():
    """Rotations of a body have a retraction; the position and the scale are added to."""
    rng = np.random.default_rng(1)
    body = jnp.asarray(rng.normal(size=(10, 3)))

    @jax.jit
    def turned(twist):
        turn = jaxlie.SO3.exp(twist)
        return turn.as_matrix(), jax.vmap(lambda x: turn.apply(x))(body)

    turn, seen = map(np.asarray, turned(jnp.array([1.5, -1.2, 0.8])))
    seen = 1.7 * seen + np.array([0.3, 0.1, -2.0])

    def residuals(y, _):
        turned = jax.vmap(lambda x: jaxlie.SO3(y["turn"][0]).apply(x))(body)
        return y["scale"] * turned + y["shift"] - seen

    y0 = {
        "turn": jaxlie.SO3.identity().parameters()[None],
        "scale": jnp.array(1.0),
        "shift": jnp.zeros(3),
    }

    def of_turns(turn, step):
        return (jaxlie.SO3(turn) @ jaxlie.SO3.exp(step[:3])).normalize().parameters()

    retraction = {"turn": of_turns, "scale": None, "shift": None}
    solver = gnlin.LevenbergMarquardt(retraction=retraction)
    found = optx.least_squares(residuals, solver, y0, max_steps=100).value
    np.testing.assert_allclose(found["scale"], 1.7, atol=1e-8)
    matrix = jax.jit(lambda turn: jaxlie.SO3(turn).as_matrix())(found["turn"][0])
    np.testing.assert_allclose(matrix, turn, atol=1e-8)


@pytest.mark.slow
def test_a_single_pose():
    """A pose of shape (7,) takes the same steps as one of shape (1, 7)."""
    rng = np.random.default_rng(3)
    body = jnp.asarray(rng.normal(size=(6, 3)))

    @jax.jit
    def true(twist):
        pose = jaxlie.SE3.exp(twist)
        return pose.as_matrix(), jax.vmap(pose.apply)(body)

    expected, seen = true(jnp.array([0.3, -1.0, 2.0, 1.5, -0.7, 0.4]))
    fit = lambda pose: (jax.vmap(jaxlie.SE3(pose).apply)(body) - seen).ravel()
    start = jaxlie.SE3.identity().parameters()
    solver = gnlin.LevenbergMarquardt(retraction=moved)
    alone = optx.least_squares(lambda y, _: fit(y), solver, start, max_steps=50)
    row = optx.least_squares(lambda y, _: fit(y[0]), solver, start[None], max_steps=50)
    np.testing.assert_allclose(alone.value, row.value[0], atol=1e-9)
    matrix = jax.jit(lambda pose: jaxlie.SE3(pose).as_matrix())(alone.value)
    np.testing.assert_allclose(matrix, expected, atol=1e-7)


@pytest.mark.slow
def test_angles_are_rows_one_by_one():
    wrapped = lambda angle, step: jnp.mod(angle + step, 2 * jnp.pi)
    solver = gnlin.LevenbergMarquardt(retraction=wrapped)
    target = jnp.array([0.1, 6.2, 3.0])
    residuals = lambda y, _: jnp.concatenate(
        [jnp.sin(y - target), 1 - jnp.cos(y - target)]
    )
    found = optx.least_squares(
        residuals, solver, jnp.array([6.0, 0.2, 2.0]), max_steps=50
    )
    np.testing.assert_allclose(found.value, target, atol=1e-7)


@pytest.mark.slow
def test_cameras_turn_where_points_are_eliminated():
    rng = np.random.default_rng(2)
    camera, point = np.repeat(np.arange(4), 9), np.tile(np.arange(9), 4)
    true = {
        "camera": jax.vmap(lambda x: jaxlie.SE3.exp(x).parameters())(
            jnp.asarray(np.append(rng.normal(size=(4, 2)), np.full((4, 1), 8.0), 1))
            @ jnp.eye(3, 6)
        ),
        "point": jnp.asarray(rng.normal(size=(9, 3))),
    }

    def seen(y, _):
        x = jaxlie.SE3(y["camera"]).apply(y["point"])
        return x[:2] / x[2]

    pairs = {k: true[k][i] for k, i in (("camera", camera), ("point", point))}
    data = {"camera": camera, "point": point, "at": jax.vmap(seen, (0, None))(pairs, 0)}
    group = gnlin.Residuals(
        lambda y, x: seen(y, x) - x["at"],
        jax.tree.map(jnp.asarray, data),
        select=lambda x: {"camera": x["camera"], "point": x["point"]},
    )
    start = {
        "camera": jax.vmap(moved)(
            true["camera"], jnp.asarray(0.1 * rng.normal(size=(4, 7)))
        ),
        "point": true["point"] + 0.1,
    }
    ours, known = (
        gnlin.solve(
            start,
            group,
            gnlin.DampedGaussNewton(
                1e-2, method=method, retraction={"camera": moved, "point": None}
            ),
            max_steps=3,
        )
        for method in ("schur", "curvature")
    )
    np.testing.assert_allclose(ours.model["camera"], known.model["camera"], atol=1e-9)
    assert ours.loss < 1e-2 * ours.history.loss[0]


def test_errors_of_retractions():
    residuals = lambda y, _: (y["a"].sum() + y["b"])[None]
    y = {"a": jnp.ones((2, 3)), "b": jnp.ones(())}
    solve = lambda r: optx.least_squares(
        residuals, gnlin.LevenbergMarquardt(retraction=r), y
    )
    add = lambda row, step: row + 1.0 * step
    with pytest.raises(ValueError, match="a parameter is a scalar: pass `None`"):
        solve(add)
    with pytest.raises(ValueError, match=r"must return a row of the shape \(3,\)"):
        solve({"a": lambda row, step: row[:2], "b": None})
    with pytest.raises(ValueError, match=r"shape \(7,\).* but returned the shape \(6,\)"):
        Retraction.of(lambda row, step: row[:6], jnp.ones(7))
    with pytest.raises(ValueError, match="or have the parameters' structure"):
        solve({"a": add})
    with pytest.raises(ValueError, match="must be a function of a row and its step"):
        solve({"a": 3.0, "b": None})
    with pytest.raises(ValueError, match="does not stay between `bounds`"):
        gnlin.LevenbergMarquardt(retraction=add, bounds=(0.0, None))
    with pytest.raises(ValueError, match="`retraction` needs full batches"):
        gnlin.fit(
            jnp.ones((2, 3)),
            {"a": gnlin.Residuals(lambda y, x: y[0] - x, jnp.ones((4, 3)))},
            gnlin.LevenbergMarquardt(retraction=add),
            steps=1,
        )


def test_a_retraction_that_only_adds():
    solver = gnlin.LevenbergMarquardt(retraction=lambda row, step: row + step)
    with pytest.raises(ValueError, match="only adds the step to the row"):
        optx.least_squares(lambda y, _: y - 1, solver, jnp.zeros(7))


@pytest.mark.slow
@pytest.mark.parametrize("solver", [gnlin.GaussNewton, gnlin.LevenbergMarquardt])
def test_a_rotation_of_points_on_its_axis(solver):
    """The column of the undetermined angle is a sum of terms that cancel to rounding. If
    it counts as more, the noise of the data becomes steps of 1e15."""

    def turned(q, step):
        half = jnp.concatenate([jnp.ones(1), 0.5 * step[:3]])
        (a, u), (b, v) = (q[:1], q[1:]), (half[:1], half[1:])
        parts = a * b - jnp.sum(u * v), a * v + b * u + jnp.cross(u, v)
        return jnp.concatenate(parts) / jnp.linalg.norm(half)

    def misfits(p, point):
        (place, seen), u = point, p["turn"][1:]
        twice = jnp.cross(u, jnp.cross(u, place) + p["turn"][:1] * place)
        return place + 2 * twice + p["shift"] - seen

    places = np.outer(np.linspace(1, 2, 20), [0, 0, 1])
    points = places, places + 0.01 * np.random.default_rng(1).normal(size=places.shape)
    by_vector = lambda p: Rotation.from_rotvec(p[:3]).apply(places) + p[3:] - points[1]
    least = scipy.optimize.least_squares(lambda p: by_vector(p).ravel(), np.zeros(6)).cost

    start = {"turn": jnp.array([1.0, 0, 0, 0]), "shift": jnp.zeros(3)}
    solver = solver(retraction={"turn": turned, "shift": None})
    of_all = lambda p, points: jax.vmap(misfits, (None, 0))(p, points)
    found = optx.least_squares(of_all, solver, start, points)
    loss = 0.5 * jnp.sum(of_all(found.value, points) ** 2)
    np.testing.assert_allclose(loss, least, rtol=1e-9)
    in_groups = gnlin.solve(start, {"points": gnlin.Residuals(misfits, points)}, solver)
    np.testing.assert_allclose(in_groups.loss, least, rtol=1e-9)
    assert in_groups.result == optx.RESULTS.successful


@pytest.mark.slow
def test_a_retraction_that_forgets_the_row():
    turned = lambda step: jnp.stack([jnp.cos(step[0]), jnp.sin(step[0])])
    residuals = lambda y, _: y - turned(jnp.array([2.0]))
    solver = gnlin.LevenbergMarquardt(retraction=lambda row, step: turned(step))
    with pytest.warns(UserWarning, match="must return the row itself for a step of zero"):
        gnlin.solve(jnp.array([1.0, 0.0]), gnlin.Residuals(residuals), solver)


def divided(u, s):
    length = jnp.linalg.norm(s)
    return jnp.cos(length) * u + jnp.sin(length) * s / length


def finite(u, s):
    """Its value is finite, and its derivative NaN."""
    length = jnp.linalg.norm(s)
    return jnp.cos(length) * u + jnp.sinc(length / jnp.pi) * s


def constant(u, s):
    """One `jnp.where`: the derivative is zero."""
    return jnp.where(jnp.any(s != 0), divided(u, s), u)


@pytest.mark.slow
@pytest.mark.parametrize("fn", [divided, finite, constant])
def test_a_retraction_that_is_not_finite_at_a_zero_step(fn):
    row = jnp.array([1.0, 0.0])
    retraction = Retraction.of(lambda u, s: fn(u, s - u * (u @ s)), row)
    assert "must be finite for a step of zero" in retraction.flaw(row)
    if fn is constant:  # The run ends well, at its start.
        group = gnlin.Residuals(lambda u, _: u - jnp.array([0.6, 0.8]))
        solver = gnlin.GaussNewton(retraction=fn)
        with pytest.warns(UserWarning, match="must be finite for a step of zero"):
            gnlin.solve(row, group, solver)


def test_a_retraction_that_fails_on_a_row():
    of_matrix = lambda u, s: jnp.linalg.qr(u + s)[0]
    with pytest.raises(ValueError, match=r"row, of the shape \(2,\) .* \(5, 2\), .*qr"):
        Retraction.of(of_matrix, jnp.ones((5, 2)))
    assert Retraction.of(of_matrix, jnp.ones((1, 5, 2))).whole == [False]

    def of_four(row, step):
        a, b, c, d = row + step
        return jnp.stack([a, b, c, d])

    def of_three(row, step):
        if step.shape != (3,):
            raise AssertionError  # without a message, as jaxlie does
        return row.at[:3].add(step)

    with pytest.raises(ValueError, match=r"a step of the same shape, .*AssertionError"):
        Retraction.of(of_three, jnp.ones((5, 4)))
    with pytest.raises(ValueError, match=r"one row, of the shape \(3,\).*`None`"):
        Retraction.of(of_four, {"turn": jnp.ones(4), "shift": jnp.ones(3)})


def along_its_axes(pose, step):
    """Move the position of a pose along its own axes, which are turned by an angle."""
    c, s = jnp.cos(pose[2]), jnp.sin(pose[2])
    ahead = jnp.stack([c * step[0] - s * step[1], s * step[0] + c * step[1], step[2]])
    return pose + ahead


def bent_valley(pose, turn):
    x, y, angle = pose
    return jnp.stack([10 * (y - x**2), 1 - x, 0.1 * (angle - turn)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"search": optx.BacktrackingArmijo()},
        {"search": optx.BacktrackingArmijo(), "momentum": 0.3},
        {"momentum": 0.3},
    ],
)
def test_steps_do_not_depend_on_the_frame(settings):
    def losses(turn):
        start = jnp.array([-1.2, 1.0, turn])
        solver = gnlin.DampedGaussNewton(1e-2, retraction=along_its_axes, **settings)
        group = gnlin.Residuals(bent_valley, jnp.array([turn]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of runs that rise
            return gnlin.solve(
                start, group, solver, max_steps=8, divergence=None
            ).history.loss

    first = losses(0.0)
    for turn in (2.1, np.pi):
        np.testing.assert_allclose(losses(turn), first, rtol=1e-6)


def test_a_retraction_may_hold_arrays():
    def moved(scale, row, step):
        return row + jnp.sin(scale * step)

    solver = gnlin.LevenbergMarquardt(retraction=eqx.Partial(moved, jnp.array(0.5)))
    fit = optx.least_squares(lambda y, _: y**2 - 2, solver, jnp.ones(3))
    np.testing.assert_allclose(fit.value, 2**0.5 * np.ones(3), rtol=1e-8)


@pytest.mark.parametrize(
    ("fn", "is_a_row"),
    [
        (lambda row, step: (row + step) / jnp.linalg.norm(row + step), True),
        (lambda row, step: row + step - jnp.mean(step), True),
        (lambda x, d: jnp.mod(x + d, 2 * jnp.pi), False),
        (lambda x, d: jnp.where(d > 0, x * jnp.exp(d), x + jnp.asarray(1.0) * d), False),
        *(
            pytest.param(fn, False, marks=pytest.mark.slow)
            for fn in (
                lambda x, d: x + jax.lax.cond(d > 0, jnp.sin, jnp.tanh, d),
                lambda x, d: jax.lax.fori_loop(0, 3, lambda _, y: y + d / 3, x),
                lambda x, d: jnp.arctan2(*jnp.stack([jnp.sin(x + d), jnp.cos(x + d)])),
            )
        ),
    ],
)
def test_a_row_and_entries_are_told_apart(fn, is_a_row):
    row, step = jnp.array([0.36, 0.48, 0.8]), jnp.array([0.3, -0.2, 0.1])
    retraction = Retraction.of(fn, row)
    assert retraction.whole == [is_a_row]
    inside = []  # in a compiled program too
    jax.eval_shape(lambda row: inside.extend(Retraction.of(fn, row).whole), row)
    assert inside == [is_a_row]
    one_by_one = [fn(x, d) for x, d in zip(row, step, strict=True)]
    expected = fn(row, step) if is_a_row else one_by_one
    np.testing.assert_allclose(retraction.moved(row, step), expected, rtol=1e-12)
    assert retraction.flaw(row) == "" or not is_a_row


@pytest.mark.slow
def test_the_derivative_of_an_entry_that_is_zero():
    """The Jacobian along the retraction has an entry a, which is zero at a = 0. The step
    depends on a all the same."""

    def moved(row, step):
        angle = jnp.arctan2(row[1], row[0]) + step[0]
        return jnp.stack([jnp.cos(angle), jnp.sin(angle)])

    def residuals(y, a):
        return jnp.stack([a * y[0, 1] - 0.3, y[0, 1] - 0.5, 0.2 * y[0, 0]])

    def stepped(a):
        lin = gnlin.linearise(residuals, jnp.array([[1.0, 0.0]]), a)
        lin = lin.along(Retraction([moved], [False])).materialise()
        return lin.spectrum().step(gnlin.filters.Tikhonov(0.1))[0, 0]

    # The rows are (a, 1, 0), and the residuals (-0.3, -0.5, 0.2).
    by_hand = lambda a: (0.3 * a + 0.5) / (a**2 + 1.1)
    np.testing.assert_allclose(stepped(0.0), by_hand(0.0), rtol=1e-12)
    np.testing.assert_allclose(jax.jacfwd(stepped)(0.0), 0.3 / 1.1, rtol=1e-9)


STILL = {
    "by its norm": (
        lambda p, s: p + s / jnp.linalg.norm(s) * jnp.linalg.norm(s),
        "finite",
    ),
    "away": (lambda p, s: p - 0.5 * s + 0.1, "moves the start by 0.1:"),
    "shrunk": (lambda p, s: 0.9 * p + s * p[0], "moves the start by"),
}


@pytest.mark.parametrize("name", STILL)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_retraction_that_moves_the_start_is_refused(name, dtype):
    fn, said = STILL[name]
    solver = gnlin.LevenbergMarquardt(retraction=fn)
    start, group = jnp.ones((3, 2), dtype), gnlin.Residuals(lambda p, _: p - 2.0)
    with pytest.raises(ValueError, match=f"`retraction` must .*{said}"):
        gnlin.solve(start, group, solver)
    x, line = np.linspace(0, 1, 5), lambda p, x: p[0, 0] + p[0, 1] * x
    with pytest.raises(ValueError, match=f"`retraction` must .*{said}"):
        gnlin.curve_fit(line, x, 2 * x, start[:1], solver=solver)


@pytest.mark.slow
def test_a_retraction_may_normalise_the_start():
    normalised = lambda p, s: (p + s * p[::-1]) / jnp.linalg.norm(p + s * p[::-1])
    solver = gnlin.LevenbergMarquardt(retraction=normalised)
    group = gnlin.Residuals(lambda p, _: p - jnp.array([0.6, 0.8]))
    solution = gnlin.solve(jnp.array([30.0, 1.0]), group, solver)
    np.testing.assert_allclose(solution.model, [0.6, 0.8], rtol=1e-9)
    # Inside a compiled program the start is not known, and nothing is checked.
    moves = gnlin.LevenbergMarquardt(retraction=STILL["away"][0])
    run = lambda y: gnlin.solve(y, group, moves, max_steps=2).loss
    assert jnp.isfinite(jax.jit(run)(jnp.ones(2)))


def turned(pose, step):
    return (jaxlie.SE2(pose) @ jaxlie.SE2.exp(step[:3])).normalize().parameters()


def _planar(seed=0):
    """Points, and the same points after a motion that is known."""
    points = jnp.asarray(np.random.default_rng(seed).normal(size=(30, 2)))
    motion = jaxlie.SE2.from_xy_theta(0.5, -0.3, 1.0)
    there = jax.vmap(motion.apply)(points)
    start = jaxlie.SE2.identity().parameters().astype(float)
    residuals = lambda pose, _: jax.vmap(jaxlie.SE2(pose).apply)(points) - there
    return residuals, start, motion.parameters()


ROTATED = {
    "pose": (turned, 4),
    "quaternion": (
        lambda q, d: (jaxlie.SO3(q) @ jaxlie.SO3.exp(d[:3])).normalize().wxyz,
        4,
    ),
    "matrix": (
        lambda row, d: (row.reshape(3, 3) @ jaxlie.SO3.exp(d[:3]).as_matrix()).ravel(),
        9,
    ),
}


@pytest.mark.parametrize("name", ROTATED)
@pytest.mark.parametrize(
    "dtype", [jnp.float32, pytest.param(jnp.float64, marks=pytest.mark.slow)]
)
def test_a_retraction_that_takes_the_step_first_is_refused(name, dtype):
    fn, size = ROTATED[name]
    start = jnp.eye(3).ravel() if size == 9 else jnp.eye(size)[0]
    start, residuals = start.astype(dtype), lambda row, _: row - 0.5
    swapped = lambda step, row: fn(row, step)
    solver = gnlin.LevenbergMarquardt(retraction=swapped)
    for run in (
        lambda: optx.least_squares(residuals, solver, start),
        lambda: jax.jit(lambda y: optx.least_squares(residuals, solver, y).value)(start),
        lambda: gnlin.solve(start, gnlin.Residuals(residuals), solver),
    ):
        with pytest.raises(ValueError, match="exchange its arguments"):
            run()
    check_fits(fn, start)
    check_fits(fn, jnp.stack([start, start]))


@pytest.mark.parametrize(
    "fn",
    [
        lambda row, step: (row + step) / jnp.linalg.norm(row + step),
        lambda row, step: jnp.mod(row + step, 2 * jnp.pi),
        lambda row, step: jnp.exp(step) * row,
        lambda row, step: row * jnp.cos(jnp.linalg.norm(step)) + step,
    ],
)
def test_retractions_in_the_right_order_are_not_refused(fn):
    check_fits(fn, jnp.array([[0.6, 0.8, 0.0]]))


def test_poses_through_optimistix_after_the_check():
    residuals, start, expected = _planar()
    solver = gnlin.LevenbergMarquardt(retraction=turned)
    found = optx.least_squares(residuals, solver, start).value
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver", [gnlin.LevenbergMarquardt, functools.partial(gnlin.DampedGaussNewton, 1.0)]
)
def test_a_retraction_that_is_not_finite_at_zero_ends_at_the_start(solver):
    """Traced starts cannot be checked before the run."""
    residuals, start, _ = _planar()
    endless = lambda pose, step: turned(pose, step) / jnp.sqrt(jnp.sum(step**2))
    run = optx.least_squares(residuals, solver(retraction=endless), start, throw=False)
    assert run.result == optx.RESULTS.nonfinite
    np.testing.assert_array_equal(run.value, start)
