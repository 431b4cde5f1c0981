"""Success is reported at every stationary point, and nowhere else."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from classical_problems import padded, PROBLEMS, start
from verdict_problems import at, FAMILIES, judge, PRECISIONS, problems, run, SETTINGS

import gnlin


LEVENBERG_MARQUARDT = gnlin.LevenbergMarquardt()


def one_by_one(solve, cases):
    """Solve many problems of one shape in one program, none waiting for the slowest."""
    return map(np.asarray, jax.jit(lambda cases: jax.lax.map(solve, cases))(cases))


def told_wrongly(name, family, precision, count, seed=0):
    problem = problems(family, precision, count, seed)
    runs = run(family, SETTINGS[name], problem)
    told = np.flatnonzero(runs.told).tolist()
    verdicts = {i: judge(family, at(problem, i), runs.y[i]) for i in told}
    return {i: verdict for i, verdict in verdicts.items() if verdict.wrong}, len(told)


#
# Many small problems, and a judge
#

# The least number of the 48 problems that must end in success. A criterion by the step
# alone wrongly reported one in five of the successes of the first four settings.
SAMPLE = {
    ("GN", "double"): 20,
    ("damped 1e-8", "single"): 3,
    ("LM", "double"): 30,
}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(*case, marks=pytest.mark.exhaustive if "damped" in case[0] else ())
        for case in SAMPLE
    ],
)
def test_success_is_reported_at_stationary_points(name, precision):
    wrong, num_told = told_wrongly(name, "curves", precision, count=8)
    assert not wrong
    assert num_told >= SAMPLE[name, precision]


# Use half of the set, since compiling takes nearly all of the time. Every setting sees
# both families and both precisions, but only one precision for each family.
CASES = [
    (name, family, precision)
    for i, name in enumerate(SETTINGS)
    for family, precision in zip(
        FAMILIES, PRECISIONS if i % 2 else reversed(PRECISIONS), strict=True
    )
]


# Borderline cases; all but the first occur only if XLA does not optimise. The residuals
# of an undamped run could still fall, although the largest cosine is 2e-5. A network
# stands at a cosine of 0.17 in single precision. Three cosines are between 0.011 and
# 0.015 instead of 0.01. Rounding decides whether the derivative of a hyperbolic tangent
# is zero. The rate of an exponential has fallen to 1e-18, and could gain 1.03 %.
AT_THE_EDGE = {
    ("GN eigh", "curves", "double"): {194},
    ("truncated 0.1", "networks", "single"): {38},
    ("truncated blocks", "curves", "single"): {20},
    ("LM identity", "curves", "single"): {31, 59},
    ("damped scaled", "networks", "single"): {22},
    ("LM no acceleration", "curves", "double"): {17},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "family", "precision"), CASES)
def test_no_setting_reports_success_wrongly(name, family, precision):
    """The constants were chosen on other problems. In 6,440 runs on these, only seven
    borderline ones report success although the cosine exceeds the judge's bound and SciPy
    still gains over 1 %."""
    wrong, _ = told_wrongly(name, family, precision, count=40, seed=1)
    assert set(wrong) <= AT_THE_EDGE.get((name, family, precision), set())


#
# Successes are reported
#


# A minimum that is in no list, from ten times as far: at (0.234, -1.292, -0.836, -0.551)
# the gradient is rounding, and the Hessian's eigenvalues are 1.4e-3 and more.
UNLISTED = {"kowalik_osborne-4": 0.0015943520}


def test_classical_problems_are_solved_and_reported_so():
    branches = [padded(problem) for problem in PROBLEMS]

    def residuals(y, index):
        return jax.lax.switch(index, branches, y)

    def solve(case):
        index, y = case
        solution = optx.least_squares(
            residuals, LEVENBERG_MARQUARDT, y, index, max_steps=500, throw=False
        )
        r = residuals(solution.value, index)
        return solution.result == optx.RESULTS.successful, r @ r

    starts = [start(problem, far) for problem in PROBLEMS for far in (1.0, 10.0)]
    index = jnp.repeat(jnp.arange(len(PROBLEMS)), 2)
    told, squares = one_by_one(solve, (index, jnp.asarray(starts)))
    for problem, is_told, found in zip(
        PROBLEMS, told.reshape(-1, 2), squares.reshape(-1, 2), strict=True
    ):
        assert np.all(is_told), problem.name
        unlisted = np.isclose(found, UNLISTED.get(problem.name, -1.0), rtol=1e-6)
        assert all(map(problem.is_minimum, found[~unlisted])), problem.name


def test_noise_free_fits_in_single_precision_are_successes():
    """The remaining loss at their solutions is rounding."""
    x = np.linspace(0.0, 4.0, 30)
    truths = [
        (a, b)
        for a in (0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 10.0)
        for b in (0.3, 0.5, 0.7, 1.0, 1.3, 1.6, 2.0)
    ]
    targets = np.stack([a * np.exp(-b * x) for a, b in truths]).astype(np.float32)

    def residuals(p, y):
        return p[0] * jnp.exp(-p[1] * x.astype(np.float32)) - y

    def solve(y):
        first = jnp.asarray([1.0, 0.5], jnp.float32)
        solution = optx.least_squares(
            residuals, LEVENBERG_MARQUARDT, first, y, throw=False
        )
        return solution.result == optx.RESULTS.successful, solution.value

    told, values = one_by_one(solve, jnp.asarray(targets))
    np.testing.assert_allclose(values, truths, rtol=1e-5)
    assert np.all(told)


class Ends(gnlin.authoring.AbstractGaussNewton):
    """Halve a number, and report an end at a given step."""

    ends: jax.Array

    def update(self, objective, lin, evaluate, memory, num_steps):
        y = 0.5 * lin.point
        return gnlin.authoring.Update(y, evaluate(y), terminate=num_steps == self.ends)


def test_each_of_many_runs_ends_by_itself():
    def run(ends):
        solution = optx.least_squares(
            lambda y, args: y, Ends(ends), jnp.asarray(1.0), max_steps=64, throw=False
        )
        return solution.value, solution.stats["num_feature_updates"]

    together, steps = jax.vmap(run)(jnp.array([8, 4]))
    np.testing.assert_array_equal(together, 0.5 ** np.array([9, 5]))
    np.testing.assert_array_equal(steps, [9, 5])


class Creeps(gnlin.authoring.AbstractGaussNewton):
    """Lower the loss by two thirds of its rounding in each step."""

    def update(self, objective, lin, evaluate, memory, num_steps):
        y = lin.point * jnp.asarray(1 - 4e-7, jnp.float32)
        return gnlin.authoring.Update(y, evaluate(y))


def test_many_small_steps_are_progress():
    start = jnp.ones((), jnp.float32)
    identity = lambda y, args: y
    end = optx.least_squares(identity, Creeps(), start, max_steps=40, throw=False)
    assert end.result == optx.RESULTS.nonlinear_max_steps_reached
    assert end.stats["num_feature_updates"] == 40


@pytest.mark.slow
def test_probabilities_of_wrong_classes_that_vanish_in_single_precision():
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.normal(size=(256, 3)), jnp.float32)
    labels = (inputs[:, 0] > 0).astype(int)
    layers = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 3), (2, 8))]

    def network(layers, x):
        first, last = layers
        return last @ jnp.tanh(first @ x)

    loss = gnlin.SoftmaxCrossEntropy()
    solution = gnlin.solve((network, layers), (inputs, labels), loss=loss)
    assert solution.result == optx.RESULTS.successful
    assert solution.loss < 1e-30


@pytest.mark.slow
@pytest.mark.parametrize("weight", [None, 1e-3])
def test_a_start_that_fits_to_rounding_in_single_precision(weight):
    inputs = np.random.default_rng(0).normal(size=(256, 3)).astype(np.float32)
    key, single = jax.random.key(0), jnp.float32
    model = eqx.nn.MLP(3, 2, 8, 2, jnp.tanh, key=key, dtype=single)
    data = inputs, jax.vmap(model)(inputs)
    if weight is not None:
        data = *data, np.full(256, weight, np.float32)
    assert gnlin.solve(model, data).result == optx.RESULTS.successful


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver",
    [
        LEVENBERG_MARQUARDT,
        gnlin.GaussNewton(method="svd"),
        gnlin.TruncatedGaussNewton(0.1),
    ],
    ids=["damped", "svd", "truncated"],
)
def test_squares_of_derivatives_out_of_range_are_no_success(solver):
    x = jnp.linspace(0, 3, 12, dtype=jnp.float32)

    def curve(b, x, units):
        b = b / units[0]
        return units[1] * b[0] * jnp.exp(-b[1] * x)

    @jax.jit  # one program for all units
    def found(units):
        y = curve(units[0] * jnp.array([2.5, 1.3], jnp.float32), x, units)
        start = jnp.full(2, units[0])
        residuals = lambda b, y: curve(b, x, units) - y
        ended = optx.least_squares(residuals, solver, start, y, throw=False)
        return ended.value, ended.result == optx.RESULTS.successful

    for units in np.float32([(1e-20, 1.0), (1e9, 1e-15), (1e-12, 1e10)]):
        value, is_success = found(units)
        is_solved = np.allclose(value / units[0], [2.5, 1.3], rtol=1e-3)
        assert is_solved or not is_success, units


@pytest.mark.slow
def test_an_exact_solution_whose_derivatives_vanish_is_a_success():
    unit, target = np.float32(1e-24), jnp.array([1.0, 2.0], jnp.float32)
    group = gnlin.Residuals(lambda p, _: unit * (p - target))
    solution = gnlin.solve(target, group)
    assert solution.result == optx.RESULTS.successful
