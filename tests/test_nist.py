"""NIST's certified nonlinear regressions, at the defaults."""

import jax.numpy as jnp
import numpy as np
import pytest
from problems import least_squares

import gnlin
from benchmarks.data import nist


@pytest.mark.slow
def test_all_of_nists_problems_are_solved():
    solver, lres = gnlin.LevenbergMarquardt(), {}
    for name in nist.MODELS:
        problem = nist.load(name)
        args = (jnp.asarray(problem.x), jnp.asarray(problem.y))
        for start, y0 in enumerate(problem.starts):
            solution = least_squares(
                problem.residuals, solver, jnp.asarray(y0), args, max_steps=5000
            )
            lres[name, start] = problem.lre(solution.value)
    assert len(lres) == 54
    unsolved = {case: lre for case, lre in lres.items() if lre < nist.SOLVED_LRE}
    assert not unsolved
    assert np.mean(list(lres.values())) >= 10
