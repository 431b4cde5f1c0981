"""Groups whose examples read few parameters give the same numbers as dense ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

import gnlin
from gnlin._jacobian import PerExample, Selected


RNG = np.random.default_rng(0)
POSES = jnp.asarray(RNG.normal(size=(9, 3)))
ENDS = jnp.asarray([[0, 1], [1, 2], [2, 8], [3, 3], [4, 0], [5, 6], [7, 1], [8, 0]])
MEASURED = jnp.asarray(RNG.normal(size=(8, 3)))
EDGES = {"ends": ENDS, "measured": MEASURED}


def misfit(pair, edge):
    turned = jnp.sin(pair[1] - pair[0]) + 0.1 * pair[0] * pair[1]
    return turned - edge["measured"]


def in_all(poses, edge):
    return misfit(poses[edge["ends"]], edge)


SPARSE = {
    "edges": gnlin.Residuals(misfit, EDGES, select=lambda edge: edge["ends"]),
    "prior": gnlin.Residuals(
        lambda pose, k: 0.3 * pose, jnp.arange(9), weight=0.5, select=lambda k: k
    ),
}
DENSE = {
    "edges": gnlin.Residuals(in_all, EDGES),
    "prior": gnlin.Residuals(lambda poses, k: 0.3 * poses[k], jnp.arange(9), weight=0.5),
}


def as_tree(y, example):
    found = misfit(y["poses"], example) * y["scale"]
    return {"first": found[0], "rest": found[1:]}


@pytest.mark.parametrize(
    ("outputs", "dtype"),
    [pytest.param("number", jnp.float64, marks=pytest.mark.slow), ("tree", jnp.float32)],
)
def test_the_jacobian_is_the_dense_one(outputs, dtype):
    """The residuals read poses, one pair of them twice, and a scale that all share."""

    def fn(y, edge):
        found = as_tree(y, edge)
        whole = jnp.append(found["first"], found["rest"])
        return {"array": whole, "number": whole.sum(), "tree": found}[outputs]

    select = lambda edge: {"poses": edge["ends"], "scale": 0 * edge["ends"][0]}
    y = {"poses": POSES.astype(dtype), "scale": jnp.asarray([[1.1], [0.0]], dtype)}
    edges = {"ends": ENDS, "measured": MEASURED.astype(dtype)}
    selected = Selected(fn, select)

    with_itself = lambda block: block.gram_with(block)

    @jax.jit
    def both():
        sparse = gnlin.linearise(PerExample(selected), y, edges)
        dense = gnlin.linearise(
            lambda y, x: jax.vmap(lambda e: selected(y, e))(x), y, edges
        )
        found = []
        for lin in (sparse, dense):
            jacobian = lin.jacobian
            n = jacobian.shape[0] // len(ENDS)
            u = jnp.cos(jnp.arange(jacobian.shape[0], dtype=dtype))
            found.append(
                (
                    lin.outputs,
                    jacobian.as_matrix(),
                    jacobian.mv(y),
                    jacobian.pull_back(u),
                    jacobian.squared_columns(),
                    jacobian.gram(),
                    jacobian.curvature(),
                    jacobian.curvature_mv(y),
                    jacobian.gram_with(sparse.jacobian),
                    jacobian.squared_rows(),
                    [with_itself(block.merged(n)) for block in jacobian.blocks()],
                    [with_itself(block.of_output(0, n)) for block in jacobian.blocks()],
                )
            )
        grams = [block.row_grams() for block in sparse.jacobian.blocks()]
        return found, grams

    (sparse, dense), grams = both()
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-12
    for a, b in zip(jax.tree.leaves(sparse), jax.tree.leaves(dense), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    curvature = np.asarray(dense[6])
    for k in range(9):
        block = curvature[3 * k : 3 * k + 3, 3 * k : 3 * k + 3]
        np.testing.assert_allclose(grams[0][k], block, rtol=tolerance, atol=tolerance)


def test_steps_are_those_of_all_parameters():
    solver = gnlin.LevenbergMarquardt(damping=1e-3)
    ours, known = (
        gnlin.solve(POSES, groups, solver, max_steps=3) for groups in (SPARSE, DENSE)
    )
    np.testing.assert_allclose(ours.model, known.model, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(ours.history.loss, known.history.loss, rtol=1e-9)


@pytest.mark.slow
def test_a_robust_loss():
    """The curvature differs between examples."""
    ours, known = (
        gnlin.solve(
            POSES,
            gnlin.Residuals(
                fn, EDGES, loss=gnlin.losses.PseudoHuber(delta=0.3), **options
            ),
            gnlin.DampedGaussNewton(0.1, method="curvature"),
            max_steps=3,
        )
        for fn, options in (
            (misfit, {"select": lambda edge: edge["ends"]}),
            (in_all, {}),
        )
    )
    np.testing.assert_allclose(ours.model, known.model, rtol=1e-8, atol=1e-9)


@pytest.mark.slow
def test_a_batch_of_edges_a_step():
    ours, known = (
        gnlin.fit(
            POSES,
            groups,
            gnlin.DampedGaussNewton(1.0, method="curvature"),
            steps=4,
            batch_size={"edges": 3},
            progress=False,
        )
        for groups in (SPARSE, DENSE)
    )
    np.testing.assert_allclose(ours.model, known.model, rtol=1e-8, atol=1e-9)


@pytest.mark.slow
def test_in_a_program_whose_data_are_traced():
    solver = gnlin.DampedGaussNewton(0.1, method="curvature")

    def solved(measured):
        edges = {"ends": ENDS, "measured": measured}
        group = gnlin.Residuals(misfit, edges, select=lambda edge: edge["ends"])
        both = {"edges": group, "prior": SPARSE["prior"]}
        return gnlin.solve(POSES, both, solver, max_steps=2).model

    known = solved(MEASURED)
    many = jax.jit(jax.vmap(solved))(jnp.stack([MEASURED, 0 * MEASURED]))
    np.testing.assert_allclose(many[0], known, atol=1e-12)


def chain(n):
    """A line of n poses: each is measured from the one before, the first from zero."""
    ends = jnp.stack([jnp.arange(n - 1), jnp.arange(1, n)], axis=1)
    edges = {"ends": ends, "measured": jnp.ones((n - 1, 3))}
    first = gnlin.Residuals(lambda pose, k: pose, jnp.zeros(1, int), select=lambda k: k)
    fn = lambda pair, edge: pair[1] - pair[0] - edge["measured"]
    return [first, gnlin.Residuals(fn, edges, select=lambda edge: edge["ends"])]


@pytest.mark.slow
def test_large_problems_are_solved_without_a_matrix():
    """Levenberg-Marquardt chooses products, and preconditions them by diagonal blocks."""
    n = 2000
    start = jnp.zeros((n, 3))
    run = jax.jit(lambda start: gnlin.solve(start, chain(n), max_steps=30).model)
    compiled = run.lower(start).compile()
    dense = (3 * n) ** 2 * 8
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < dense / 20
    expected = np.arange(n)[:, None] * np.ones(3)
    np.testing.assert_allclose(compiled(start), expected, atol=1e-9)


@pytest.mark.parametrize(
    ("select", "said"),
    [
        (lambda e: e["ends"] + 5, "Example 2 of the group 'edges' selects row 13 of"),
        (lambda e: e["ends"] - 1, "Example 0 of the group 'edges' selects row -1 of"),
        (lambda e: e["ends"].astype(float), "'edges' must return whole numbers"),
        (lambda e: e["end"], "`select` of the group 'edges' is called with one example"),
        (lambda e: {"poses": e["ends"]}, "'edges' must return the structure"),
    ],
)
def test_errors_of_select(select, said):
    groups = {"edges": gnlin.Residuals(misfit, EDGES, select=select)}
    with pytest.raises(ValueError, match=said):
        gnlin.solve(POSES, groups)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [9, -1])
def test_a_traced_row_that_does_not_exist_is_not_finite(wrong):
    def group(rows):
        return gnlin.Residuals(
            lambda pose, e: pose - e["to"],
            {"row": rows, "to": POSES},
            select=lambda e: e["row"],
        )

    @jax.jit
    def run(rows):
        solution = gnlin.solve(POSES + 1, group(rows))
        covariance = gnlin.predict.covariance(POSES, group(rows))
        well = solution.result == optx.RESULTS.successful
        bad = solution.result == optx.RESULTS.nonfinite
        return well, bad, covariance.standard_errors

    rows = jnp.arange(9)
    well, _, errors = run(rows)
    assert well
    np.testing.assert_allclose(errors, 1)
    _, bad, errors = run(rows.at[4].set(wrong))
    assert bad
    assert not np.any(np.isfinite(errors))


@pytest.mark.slow
def test_a_drawn_row_that_does_not_exist_is_not_finite():
    draw = lambda key: jax.random.randint(key, (5,), 5, 15)
    group = gnlin.Residuals(lambda pose, k: pose, draw, select=lambda k: k)
    with pytest.warns(UserWarning, match="is not finite"):
        solution = gnlin.fit(POSES, group, steps=3)
    assert solution.result == optx.RESULTS.nonfinite


def test_select_of_a_list():
    groups = {"edges": gnlin.Residuals(misfit, EDGES, select=lambda e: e["ends"])}
    with pytest.raises(ValueError, match="holds 27 single numbers: convert lists by"):
        gnlin.solve(np.ones((9, 3)).tolist(), groups)


def test_a_function_of_other_rows_names_the_group():
    one = gnlin.Residuals(lambda pair, e: pair["a"], EDGES, select=lambda e: e["ends"])
    with pytest.raises(ValueError, match="The function of the group 'edges'"):
        gnlin.solve(POSES, {"edges": one})


@pytest.mark.usefixtures("unchecked")
def test_select_must_be_a_function():
    with pytest.raises(ValueError, match="`select` must be a function of one example"):
        gnlin.Residuals(misfit, EDGES, select=ENDS)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_passes_are_counted_once_also_with_scales():
    found = []
    for scaling in ("identity", "root"):
        solver = gnlin.DampedGaussNewton(0.1, scaling=scaling)
        stats = gnlin.solve(POSES, SPARSE, solver, max_steps=5).stats
        found.append((int(stats["num_jvps"]), int(stats["num_vjps"])))
    assert found[0] == found[1]
