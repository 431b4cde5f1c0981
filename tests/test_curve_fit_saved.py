"""Fits that are saved by pickle and copied."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import decay

import gnlin


X = np.linspace(0, 4, 50)
Y = 2.5 * np.exp(-1.3 * X) + 0.5 + 0.05 * np.random.default_rng(0).normal(size=50)
START = {"a": 1.0, "rate": 0.5, "c": 0.0}


def is_equal(tree, other):
    return jax.tree.all(jax.tree.map(np.array_equal, tree, other))


def test_a_saved_fit():
    """It is printed and read as before, and its refits run the program of the fit."""
    fit = gnlin.curve_fit(decay, X, Y, START, bounds={"c": (0.0, 9.0)})
    for same in (pickle.loads(pickle.dumps(fit)), copy.deepcopy(fit)):
        assert str(same) == str(fit)
        assert is_equal(same.parameters, fit.parameters)
        assert is_equal(same.band(X[:3]), fit.band(X[:3]))
        assert jax.tree.structure(same._setting) == jax.tree.structure(fit._setting)
    assert is_equal(same.confidence_intervals(), fit.confidence_intervals())


@pytest.mark.exhaustive
def test_saved_fits_of_several_data_sets_and_in_parts():
    ys = np.stack([Y, Y + 1])
    for fit in (
        gnlin.curve_fit(decay, X, ys, {k: np.full(2, v) for k, v in START.items()}),
        gnlin.curve_fit(decay, X, Y, START, in_parts=True),
    ):
        same = pickle.loads(pickle.dumps(fit))
        assert str(same) == str(fit)
        assert is_equal(same.covariance, fit.covariance)


def test_a_function_that_cannot_be_imported():
    fit = gnlin.curve_fit(lambda p, x: decay(p, x), X, Y, START)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        pickle.dumps(fit)


def test_a_saved_solution():
    model = {"a": jnp.array(1.0), "rate": jnp.array(0.5), "c": jnp.array(0.0)}
    solution = gnlin.solve((decay, model), (X, Y), max_steps=3)
    same = pickle.loads(pickle.dumps(solution))
    assert is_equal(same.model[1], solution.model[1])
    assert str(same) == str(solution)
