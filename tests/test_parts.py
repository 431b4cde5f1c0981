"""A batch in parts gives the same numbers to rounding, in the memory of one part."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import numbers

import gnlin
from benchmarks.speed import parts


MODEL = jax.tree.map(
    lambda x: x.astype(float) if eqx.is_inexact_array(x) else x,
    eqx.nn.MLP(3, 2, 4, 1, activation=jnp.tanh, key=jax.random.key(0)),
)
X = jax.random.normal(jax.random.key(1), (23, 3))
DATA = X, jnp.sin(X[:, :2])


@pytest.mark.parametrize(
    ("size", "outputs"),
    [(1, "tree"), (5, "array"), (100, "tree")],
)
def test_all_products_in_parts_match_the_whole(size, outputs):
    parameters, static = eqx.partition(MODEL, eqx.is_inexact_array)

    def fn(y, x):
        found = eqx.combine(y, static)(x)
        return found if outputs == "array" else {"first": found[0], "both": found}

    def products(part_size):
        lin = gnlin.linearise(gnlin.PerExample(fn, part_size), parameters, X)
        pushed, curved = lin.jvp(parameters), lin.jacobian.curvature_mv(parameters)
        matrices = lin.jacobian.gram(), lin.jacobian.curvature(), lin.jacobian.as_matrix()
        return lin.outputs, pushed, lin.vjp(pushed), curved, matrices

    whole, parts = (jax.jit(products, static_argnums=0)(k) for k in (None, size))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(gnlin.LevenbergMarquardt(), marks=pytest.mark.slow),
        gnlin.IterativeLinearisation(20, 0.02, method="matrix-free"),
    ],
    ids=["levenberg-marquardt", "products"],
)
def test_a_run_in_parts_matches_the_whole(solver):
    whole, parts = (
        gnlin.solve(MODEL, DATA, solver, max_steps=3, part_size=size)
        for size in (None, 5)
    )
    np.testing.assert_allclose(numbers(parts.model), numbers(whole.model), atol=1e-10)
    np.testing.assert_allclose(parts.history.loss, whole.history.loss, rtol=1e-10)
    for count in ("num_jvps", "num_vjps"):
        assert parts.stats[count] == whole.stats[count]


def test_fit_in_parts():
    run = lambda size: gnlin.fit(
        MODEL,
        DATA,
        gnlin.IterativeLinearisation(3, 0.02),
        batch_size=10,
        steps=4,
        part_size=size,
        progress=False,
    )
    np.testing.assert_allclose(
        numbers(run(4).model), numbers(run(None).model), atol=1e-12
    )


@pytest.mark.slow
def test_groups_in_parts():
    groups = {
        "values": gnlin.Residuals(lambda m, x: m(x) - jnp.sin(x[:2]), X),
        "slopes": gnlin.Residuals(lambda m, x: jax.jacfwd(m)(x)[0], X[:7], weight=0.1),
    }
    solver = gnlin.DampedGaussNewton(0.1)
    whole, parts = (
        gnlin.solve(MODEL, groups, solver, max_steps=2, part_size=size)
        for size in (None, 3)
    )
    np.testing.assert_allclose(numbers(parts.model), numbers(whole.model), atol=1e-10)


@pytest.mark.slow
def test_dropout_is_drawn_the_same():
    model = eqx.nn.Sequential([MODEL, eqx.nn.Dropout(0.5)])
    whole, parts = (
        gnlin.solve(
            model, DATA, gnlin.DampedGaussNewton(0.1), max_steps=2, part_size=size
        )
        for size in (None, 5)
    )
    np.testing.assert_allclose(numbers(parts.model), numbers(whole.model), atol=1e-10)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_batch():
    model = eqx.nn.MLP(4, 2, 128, 2, activation=jnp.tanh, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)

    def memory(n, part_size):
        @jax.jit
        def run(arrays, x, y):
            solution = gnlin.solve(
                eqx.combine(arrays, static),
                (x, y),
                gnlin.TruncatedGaussNewton(0.1, 0.1, method="matrix-free"),
                max_steps=1,
                part_size=part_size,
            )
            return eqx.filter(solution.model, eqx.is_array)

        x, y = jnp.zeros((n, 4)), jnp.zeros((n, 2))
        compiled = run.lower(arrays, x, y).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    one, many, unsplit = memory(64, None), memory(1024, 64), memory(1024, None)
    inputs_and_outputs = 1024 * (4 + 2) * 8
    assert many < one + 10 * inputs_and_outputs
    assert unsplit > 3 * many


@pytest.mark.slow
def test_nor_do_convolutions_keep_all_images_twice():
    few, many = (parts._case("", n, 64)[1] for n in (128, 1024))
    assert many - few < 0.75 * (1024 - 128) * 64 * 4


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("size", [0, -1, 1.5, True, "5"])
def test_invalid_sizes_are_refused(size):
    for run in (
        lambda: gnlin.solve(MODEL, DATA, part_size=size),
        lambda: gnlin.fit(MODEL, DATA, steps=1, part_size=size, progress=False),
    ):
        with pytest.raises(ValueError, match="`part_size` must be a whole number"):
            run()


def test_batch_normalisation_in_parts_is_refused():
    class Normalised(eqx.Module):
        norm: eqx.nn.BatchNorm
        last: eqx.nn.Linear

        def __call__(self, x, state):
            x, state = self.norm(x, state)
            return self.last(x), state

    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    model = Normalised(norm, eqx.nn.Linear(3, 2, key=jax.random.key(0)))
    with pytest.raises(ValueError, match="`part_size` is for independent examples"):
        gnlin.solve(model, DATA, state=state, part_size=5)
