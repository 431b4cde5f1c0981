"""Bounds in lists, tuples and dictionaries, compared with the closed formula."""

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

import gnlin
from gnlin._curve_fit._parameters import limits
from gnlin._linearisation._bounds import Box


ones = np.ones
# The start, its bounds, and the upper bounds of all entries written out. The residuals
# are the distances of all entries from 2, so that the minimum is at the bounds.
CASES = {
    "one array for each leaf of its shape": (
        [ones(2), ones(2), ones(2)],
        (None, np.array([1.5, 1.2])),
        [1.5, 1.2, 1.5, 1.2, 1.5, 1.2],
    ),
    "arrays of several shapes": (
        [ones(3), ones(2)],
        ([np.zeros(3), np.zeros(2)], [np.full(3, 1.5), np.array([1.2, 3])]),
        [1.5, 1.5, 1.5, 1.2, 3],
    ),
    "a tuple of JAX's arrays": (
        (ones(3), ones(2)),
        ((jnp.zeros(3), jnp.zeros(2)), (jnp.full(3, 1.5), jnp.full(2, 1.2))),
        [1.5, 1.5, 1.5, 1.2, 1.2],
    ),
    "None beside an array": (
        [ones(3), ones(2)],
        ([None, np.zeros(2)], [np.full(3, 1.5), None]),
        [1.5, 1.5, 1.5, np.inf, np.inf],
    ),
    "a number beside an array": (
        [ones(3), ones(2)],
        ([0.0, np.zeros(2)], [1.5, np.full(2, 1.2)]),
        [1.5, 1.5, 1.5, 1.2, 1.2],
    ),
    "nested lists": (
        [[ones(2)], ones(2)],
        ([[0.0], 0.0], [[1.5], 1.2]),
        [1.5, 1.5, 1.2, 1.2],
    ),
    "a prefix of nested lists": (
        [[ones(2), ones(1)], ones(2)],
        (None, [1.5, 1.2]),
        [1.5, 1.5, 1.5, 1.2, 1.2],
    ),
    "a dictionary of lists": (
        {"a": [ones(2), ones(3)], "b": ones(1)},
        ({"a": [0, np.zeros(3)]}, {"a": [np.array([1.5, 1.4]), np.full(3, 1.2)]}),
        [1.5, 1.4, 1.2, 1.2, 1.2, np.inf],
    ),
    "lists for the arrays of a list": (
        [ones(3), ones(2)],
        (None, [[1.5, None, 1.4], (1.2, 1.1)]),
        [1.5, np.inf, 1.4, 1.2, 1.1],
    ),
    "numbers for an array": (ones(3), ([0, None, 0], (1.5, None, 1)), [1.5, np.inf, 1]),
    "rows for an array of two axes": (
        ones((2, 2)),
        ([[0, None], None], [[1.5, None], np.array([1.2, 1.1])]),
        [1.5, np.inf, 1.2, 1.1],
    ),
    "numbers for a nested tuple of numbers": (
        ((1.0, 1.0), 1.0),
        (np.zeros(3), [1.5, 1.2, 1.1]),
        [1.5, 1.2, 1.1],
    ),
}


def flat(tree):
    return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])


def residuals(p, _=None):
    return flat(p) - 2


def by_optimistix(bounds, start):
    solver = gnlin.LevenbergMarquardt(bounds=bounds)
    return flat(optx.least_squares(residuals, solver, start).value)


def by_curve_fit(bounds, start):
    x = np.arange(flat(start).size)
    fit = gnlin.curve_fit(lambda p, _: flat(p), x, 0.0 * x + 2, start, bounds=bounds)
    return flat(fit.parameters)


def bounds_by_optimistix(bounds, start):
    return Box.of(bounds, start)


def bounds_by_curve_fit(bounds, start):
    return Box.of(limits(bounds, start), start)


@pytest.mark.parametrize("by_door", [bounds_by_optimistix, bounds_by_curve_fit])
def test_bounds_in_trees_of_each_entry(by_door):
    """... before and within a compiled program."""
    for name, (start, bounds, uppers) in CASES.items():
        start = jax.tree.map(jnp.asarray, start)
        for of in (
            by_door,
            lambda *pair: jax.jit(lambda y: by_door(pair[0], y))(pair[1]),
        ):
            box = of(bounds, start)
            np.testing.assert_array_equal(flat(box.upper), uppers, err_msg=name)
            lowers = flat(box.lower)
            assert np.all((lowers == 0) | np.isneginf(lowers)), name
            assert jax.tree.structure(box.lower) == jax.tree.structure(start), name
            shapes = [jnp.shape(x) for x in jax.tree.leaves(start)]
            assert [x.shape for x in jax.tree.leaves(box.upper)] == shapes, name


SOME = ("a dictionary of lists",)


@pytest.mark.filterwarnings("ignore")  # Nothing is left to estimate the noise from.
@pytest.mark.parametrize(
    "name",
    [
        *SOME,
        *(pytest.param(k, marks=pytest.mark.exhaustive) for k in CASES if k not in SOME),
    ],
)
def test_bounds_in_trees(name):
    start, bounds, uppers = CASES[name]
    start = jax.tree.map(jnp.asarray, start)
    expected = np.minimum(2, uppers)
    solver = gnlin.LevenbergMarquardt(bounds=bounds)
    by_solve = gnlin.solve(start, gnlin.Residuals(residuals), solver).model
    found = {
        "optimistix": by_optimistix(bounds, start),
        "solve": flat(by_solve),
        "curve_fit": by_curve_fit(bounds, start),
        "jit": jax.jit(by_optimistix)(bounds, start),
    }
    for door, value in found.items():
        np.testing.assert_allclose(value, expected, atol=1e-6, err_msg=door)


@pytest.mark.filterwarnings("ignore")
def test_an_array_that_may_be_the_bound_of_each_array_or_hold_a_number_for_each():
    start = [jnp.ones(2), jnp.ones(2)]
    bounds = (None, np.array([1.5, 1.2]))
    upper = lambda of, bounds: flat(of(bounds, start).upper)
    of_each, of_leaves = [1.5, 1.2, 1.5, 1.2], [1.5, 1.5, 1.2, 1.2]
    np.testing.assert_array_equal(upper(bounds_by_optimistix, bounds), of_each)
    np.testing.assert_array_equal(upper(bounds_by_curve_fit, bounds), of_leaves)
    numbers = (None, [1.5, 1.2])
    np.testing.assert_array_equal(upper(bounds_by_optimistix, numbers), of_leaves)
    # curve_fit itself, whose bounds these are
    np.testing.assert_allclose(by_curve_fit(bounds, start), of_leaves, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("None beside an array", marks=pytest.mark.slow),
        "rows for an array of two axes",
        pytest.param("nested lists", marks=pytest.mark.slow),
    ],
)
def test_derivatives_by_bounds_in_trees(name):
    """An entry at its bound moves with it."""
    start, (lower, upper), uppers = CASES[name]
    start = jax.tree.map(jnp.asarray, start)

    def scaled(scale):
        larger = jax.tree.map(lambda bound: scale * bound, upper)
        return by_curve_fit((lower, larger), start)

    expected = np.where(np.isfinite(uppers), uppers, 0)
    np.testing.assert_allclose(jax.jacfwd(scaled)(1.0), expected, atol=1e-6)
    through_jit = jax.jit(jax.jacfwd(scaled))(1.0)
    np.testing.assert_allclose(through_jit, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("start", "upper"),
    [
        ([ones(3), ones(2)], [ones(2), ones(3)]),
        ([ones(3), ones(2)], [2.0, 2.0, 2.0]),
        ([ones(3), ones(2)], 2 * ones(3)),
        (ones((2, 2)), [2 * ones(3), None]),
        (ones(2), [[2.0, 2.0], 2.0]),
        (ones(2), [2.0]),
        ({"a": [ones(3), ones(2)]}, {"a": (ones(3), ones(3))}),
    ],
)
def test_errors_of_bounds_in_trees(start, upper):
    start = jax.tree.map(jnp.asarray, start)
    with pytest.raises(ValueError, match="upper bounds must be a number, or have the"):
        by_optimistix((None, upper), start)
    with pytest.raises(ValueError, match="upper bounds must be a number, or have the"):
        by_curve_fit((None, upper), start)
