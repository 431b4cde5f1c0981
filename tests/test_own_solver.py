"""User-defined solvers, as in the documentation's example."""

import dataclasses
import functools
import inspect
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from problems import as_jax, example, EXAMPLES, sines, sines_data, sines_numpy

import gnlin
from gnlin.authoring import DenseFactor, DiagonalFactor


@pytest.fixture(scope="module")
def own():
    return example("own_solver").ProportionalDamping


class Cooled(gnlin.authoring.AbstractFilteredGaussNewton):
    damping: float

    def filter_at(self, num_steps):
        return gnlin.filters.Tikhonov(self.damping * 0.5**num_steps)


def test_in_under_forty_lines():
    assert len((EXAMPLES / "own_solver.py").read_text().splitlines()) < 40


def test_a_step_is_its_formula(own):
    y, args = sines_data((7, 3))
    solution = optx.least_squares(
        sines, own(0.5), *as_jax((y, args)), max_steps=1, throw=False
    )
    r, jacobian = sines_numpy(y, args)
    gradient = jacobian.T @ r
    damped = jacobian.T @ jacobian + 0.5 * np.linalg.norm(gradient) * np.eye(3)
    step = -np.linalg.solve(damped, gradient)
    np.testing.assert_allclose(solution.value, y + step, rtol=1e-10)
    assert int(solution.stats["num_feature_updates"]) == 1


def test_convergence_is_reported(own):
    y, args = sines_data((7, 3))
    solution = optx.least_squares(sines, own(), *as_jax((y, args)), throw=False)
    assert solution.result == optx.RESULTS.successful
    r, jacobian = sines_numpy(np.asarray(solution.value), args)
    assert np.linalg.norm(jacobian.T @ r) < 1e-7


@pytest.mark.exhaustive
def test_on_a_model_and_on_batches(own):
    key = jax.random.key(0)
    model = eqx.nn.MLP(1, 1, 8, 1, jnp.tanh, key=key, dtype=float)
    x = jnp.linspace(-1, 1, 40)[:, None]
    data = x, jnp.sin(3 * x)
    whole = gnlin.solve(model, data, own(), max_steps=30)
    assert whole.history.loss[-1] < 0.01 * whole.history.loss[0]
    batches = gnlin.fit(model, data, own(), batch_size=20, steps=40, progress=False)
    assert batches.history["loss"][-5:].mean() < 0.1 * batches.history["loss"][0]


def test_a_filter_is_enough():
    y, args = sines_data((7, 3))
    with jax.numpy_dtype_promotion("standard"):  # user code may leave promotion to JAX
        solution = optx.least_squares(
            sines, Cooled(1.0, search=None), *as_jax((y, args)), max_steps=2, throw=False
        )
    for damping in (1.0, 0.5):
        r, jacobian = sines_numpy(y, args)
        curvature = jacobian.T @ jacobian + damping * np.eye(3)
        y = y - np.linalg.solve(curvature, jacobian.T @ r)
    np.testing.assert_allclose(solution.value, y, rtol=1e-10)
    with pytest.raises(ValueError, match="`form` must be"):
        Cooled(1.0, form="cubic")
    with pytest.raises(ValueError, match="`rtol` must not be negative"):
        Cooled(1.0, rtol=-1.0)


class Descent(gnlin.authoring.AbstractGaussNewton):
    """Gradient descent, as in the docstring of its base class."""

    learning_rate: float

    def update(self, objective, lin, evaluate, memory, num_steps):
        gradient = lin.vjp(objective.gradient(lin.outputs))
        step = jax.tree.map(lambda g: -self.learning_rate * g, gradient)
        y = jax.tree.map(jnp.add, lin.point, step)
        return gnlin.authoring.Update(y, evaluate(y))


def exponential(b, x):
    return b[0] * jnp.exp(b[1] * x)


@pytest.mark.slow
@pytest.mark.parametrize("max_steps", [1, 3, 50])
def test_a_step_to_a_point_that_is_not_finite_is_refused(max_steps):
    x = jnp.linspace(0.0, 3.0, 20)
    start, data = jnp.ones(2), (x, 2 * jnp.exp(1.3 * x))
    with pytest.warns(UserWarning, match="still that of the start"):
        solution = gnlin.solve(
            (exponential, start), data, Descent(0.1), max_steps=max_steps
        )
    assert solution.result == optx.RESULTS.nonfinite
    np.testing.assert_array_equal(solution.model[1], start)
    assert float(solution.loss) == solution.history.loss[0]
    counts = solution.stats
    assert counts["num_accepted_steps"] == 0
    assert counts["num_rejected_steps"] == 1
    residuals = lambda b, data: exponential(b, data[0]) - data[1]
    found = optx.least_squares(
        residuals, Descent(0.1), start, data, max_steps=max_steps, throw=False
    )
    assert found.result == optx.RESULTS.nonfinite
    np.testing.assert_array_equal(found.value, start)
    with pytest.warns(UserWarning, match="not finite"):
        batches = gnlin.fit(
            (exponential, start),
            data,
            Descent(0.1),
            loss=gnlin.SquaredError(reduction="sum"),
            steps=max_steps,
            progress=False,
        )
    np.testing.assert_array_equal(batches.model[1], start)


def test_points_are_moved_between_the_bounds():
    group = gnlin.Residuals(lambda p, _: p - jnp.array([3.0, 0.2]))
    solver = Descent(0.4, bounds=(0.0, 1.0))
    solution = gnlin.solve(jnp.array([0.5, 0.5]), group, solver, max_steps=60)
    np.testing.assert_allclose(solution.model, [1.0, 0.2], rtol=1e-6)
    np.testing.assert_allclose(solution.loss, 2.0)
    assert solution.result == optx.RESULTS.successful


class Remembering(Descent):
    """A solver whose memory begins in double precision and goes on in single."""

    def first_memory(self, y, dtype):
        return jnp.zeros((), jnp.float64)

    def update(self, objective, lin, evaluate, memory, num_steps):
        update = super().update(objective, lin, evaluate, memory, num_steps)
        return dataclasses.replace(update, memory=jnp.ones((), jnp.float32))


def test_a_memory_keeps_its_precision():
    x = jnp.linspace(0.0, 1.0, 5)
    residuals = lambda b, data: exponential(b, data) - data
    solution = optx.least_squares(
        residuals, Remembering(0.1), jnp.ones(2), x, max_steps=2, throw=False
    )
    assert solution.stats["num_steps"] == 2


class Faulty(gnlin.authoring.AbstractGaussNewton):
    """Returns an update of wrong shapes, or a memory that it did not announce."""

    fault: str

    def first_memory(self, y, dtype):
        return jnp.array(0) if self.fault == "dtype" else None

    def update(self, objective, lin, evaluate, memory_before, num_steps):
        y, outputs, memory = lin.point, lin.outputs, None
        match self.fault:
            case "y":
                y = jnp.zeros(3)
            case "outputs":
                outputs = jnp.zeros(3)
            case "memory":
                memory = jnp.zeros(())
            case "dtype":
                memory = memory_before + 0.5
        return gnlin.authoring.Update(y, outputs, memory)


class Filtered(gnlin.authoring.AbstractFilteredGaussNewton):
    found: object

    def filter_at(self, num_steps):
        return self.found


class NoFactor(gnlin.authoring.AbstractLoss):
    reduction: str | None = None

    def value(self, outputs, target):
        return jnp.sum((outputs - target) ** 4)

    def factor(self, outputs, target):
        return jnp.eye(1)


class OfEachOutput(gnlin.authoring.AbstractLoss):
    reduction: str | None = None

    def value(self, outputs, target):
        return (outputs - target) ** 2


class NoOperator(gnlin.preconditioners.AbstractPreconditioner):
    def inverse(self, jacobian, damping):
        return lambda v: v

    def passes(self, jacobian):
        return gnlin.authoring.Passes()


@pytest.mark.parametrize(
    ("solver", "said"),
    [
        (
            Faulty("y"),
            r"`y` of the `Update` of Faulty .* `lin.point`, \[\(2,\)\], but",
        ),
        (Faulty("outputs"), r"`outputs` of the `Update` of Faulty .* `lin.outputs`"),
        (Faulty("memory"), r"`memory` of the `Update` of Faulty .* `first_memory`"),
        (Faulty("dtype"), r"`first_memory` returns, .*int.*, but is .*float"),
        (Filtered(0.3), r"`filter_at\(num_steps\)` must be a function .* 0.3 was given"),
        (
            Filtered(lambda w: w.sum()),
            r"value for each eigenvalue, and so an array of the shape \(2,\)",
        ),
        (
            Filtered(lambda w: 1 / w if w > 0.5 else 0.0),
            "called with the array of all eigenvalues, but .* failed: .* `jnp.where`",
        ),
        (Filtered(lambda w: (w, w)), r"shape \(2,\), but .* returned \("),
        (
            gnlin.TruncatedGaussNewton(0.1, preconditioner=NoOperator()),
            r"`inverse` of NoOperator must return a linear operator",
        ),
    ],
)
def test_mistakes_in_a_solver_of_ones_own(solver, said):
    x = jnp.linspace(0.0, 1.0, 5)
    with pytest.raises((TypeError, ValueError), match=said):
        gnlin.solve((exponential, jnp.ones(2)), (x, x), solver, max_steps=2)


def of_the_docstring():
    """The class in the docstring of `AbstractMethod`."""
    text = inspect.cleandoc(gnlin.authoring.AbstractMethod.__doc__)
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    names = {"gnlin": gnlin, "jax": jax, "jnp": jnp}
    exec(inspect.cleandoc("\n" + block), names)
    return names["Dense"]


@pytest.mark.parametrize(
    "solver",
    [
        functools.partial(gnlin.DampedGaussNewton, 0.1),
        pytest.param(
            functools.partial(gnlin.LevenbergMarquardt, damping=0.1),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_method_of_ones_own(solver):
    x, own = jnp.linspace(0.0, 1.0, 9), of_the_docstring()
    model = exponential, jnp.ones(2)
    found, expected = (
        gnlin.solve(model, (x, jnp.sin(x)), solver(method=method), max_steps=5)
        for method in (own, "curvature")
    )
    np.testing.assert_allclose(found.model[1], expected.model[1], rtol=1e-9)
    assert found.stats == expected.stats
    with pytest.raises(ValueError, match="'Dense' cannot be used for `PseudoInverse`"):
        gnlin.solve(model, (x, x), gnlin.GaussNewton(method=own))


def test_a_method_that_is_not_complete():
    class Nothing(gnlin.authoring.AbstractMethod):
        pass

    with pytest.raises(ValueError, match="method=Nothing` lacks 'of' and 'solve'"):
        gnlin.DampedGaussNewton(0.1, method=Nothing)


@pytest.mark.parametrize(
    ("of", "solve", "said"),
    [
        (
            None,
            lambda self: self.gradient(),
            "must return a `gnlin.authoring.Answer`, su",
        ),
        (None, lambda self: None, "must return a `gnlin.authoring.Answer`, such as"),
        (
            None,
            lambda self: gnlin.authoring.Answer(self.gradient()[:1]),
            r"the shapes of the parameters, \(2,\), but it has the shapes \(1,\)",
        ),
        (
            None,
            lambda self: gnlin.authoring.Answer([self.gradient()]),
            "the structure and the shapes of the parameters",
        ),
        (lambda: 3, lambda self: None, "must return a `Own`, such as .* returns 3"),
    ],
)
@pytest.mark.parametrize("solver", [gnlin.LevenbergMarquardt, gnlin.DampedGaussNewton])
def test_a_method_whose_answer_is_no_step(of, solve, said, solver):
    class Own(gnlin.authoring.AbstractMethod):
        @classmethod
        def of(cls, problem, cost):
            return cls(problem.at_hand(), cost.rows) if of is None else of()

        def solve(self, filter):
            return solve(self)

    x = jnp.linspace(0.0, 1.0, 5)
    with pytest.raises(ValueError, match=f"of `method=Own` .*{said}"):
        gnlin.solve((exponential, jnp.ones(2)), (x, x), solver(damping=0.1, method=Own))


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (lambda: DenseFactor(jnp.eye(3), 1.0), "but failed: dot_general requires"),
        (lambda: DenseFactor(jnp.ones((3, 2)), 1.0), r"square matrix .* shape \(3, 2\)"),
        (lambda: DiagonalFactor(jnp.ones(3)), "but failed: le got incompatible shapes"),
        (lambda: DiagonalFactor(jnp.ones((2, 1))), r"one example, .* shapes \(2,\), but"),
    ],
)
def test_a_factor_of_another_shape(factor, said):
    class Own(gnlin.authoring.AbstractLoss):
        reduction: str | None = None

        def value(self, output, target):
            return jnp.sum((output - target) ** 2)

        def factor(self, output, target):
            return factor()

    x = jnp.linspace(0.0, 1.0, 5)
    model = lambda y, x: x * y, jnp.ones(2)
    with pytest.raises(ValueError, match=said):
        gnlin.solve(model, (x, jnp.ones((5, 2))), loss=Own(), max_steps=2)


def test_a_gradient_of_another_shape():
    class Own(gnlin.authoring.AbstractLoss):
        reduction: str | None = None

        def value(self, output, target):
            return jnp.sum((output - target) ** 2)

        def gradient(self, output, target):
            return jnp.sum(2 * (output - target))

    x = jnp.linspace(0.0, 1.0, 5)
    model = lambda y, x: x * y, jnp.ones(2)
    said = r"`gradient` of Own must suit .* the shapes \(2,\), but it has \(\)"
    with pytest.raises(ValueError, match=said):
        gnlin.solve(model, (x, jnp.ones((5, 2))), loss=Own(), max_steps=2)


def test_a_filter_that_is_nan_at_zero():
    solver = gnlin.methods.FilteredGaussNewton(lambda w: (1 - jnp.exp(-w)) / w)
    x = jnp.linspace(0.0, 1.0, 5)
    model = lambda b, x: b.sum() * x, jnp.ones(2)  # of rank one
    with pytest.warns(UserWarning, match="is not finite"):
        solution = gnlin.solve(model, (x, jnp.sin(x)), solver)
    assert solution.result == optx.RESULTS.nonfinite


def test_a_filter_of_all_eigenvalues_under_jit():
    """The filter needs the spectrum, and not single numbers."""

    @jax.jit
    def step(weights):
        solver = gnlin.methods.FilteredGaussNewton(lambda w: weights / (w + w.max()))
        residuals = lambda b, _: jnp.diag(jnp.array([2.0, 1.0])) @ b - 1
        return optx.least_squares(
            residuals, solver, jnp.zeros(2), max_steps=1, throw=False
        ).value

    found = step(jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(found, [2 / 8, 3 / 5], rtol=1e-6)


def test_a_factor_that_is_none():
    x = jnp.linspace(0.0, 1.0, 5)
    said = r"`value` of OfEachOutput must return one number, .* shape \(3,\)"
    model = lambda y, x: x * y, jnp.ones(3)
    with pytest.raises(ValueError, match=said):
        gnlin.solve(model, (x, jnp.ones((x.size, 3))), loss=OfEachOutput(), max_steps=2)
    with pytest.raises(TypeError, match="`factor` of NoFactor must return a factor"):
        gnlin.solve((exponential, jnp.ones(2)), (x, x), loss=NoFactor(), max_steps=2)


def test_a_loss_that_sums_its_outputs_is_named():
    class Summed(gnlin.authoring.AbstractElementwiseLoss):
        reduction: str | None = None

        def elementwise(self, output, target):
            return jnp.sum((output - target) ** 2)

    class Counted(Summed):
        def elementwise(self, output, target):
            return (output > target).astype(int)

    data = jnp.ones((8, 1)), jnp.zeros((8, 1))
    for loss in Summed(), Counted():
        said = f"`elementwise` of {type(loss).__name__} must return a floating-point loss"
        with pytest.raises(ValueError, match=said):
            gnlin.solve((lambda p, x: p * x, 1.0), data, loss=loss)


def test_a_negative_damping_of_a_rule_is_out_of_range():
    class Negative(gnlin.damping.Nielsen):
        def damping(self, state, subproblem, point):
            return -1.0

    x = jnp.linspace(0.0, 1.0, 10)
    solver = gnlin.LevenbergMarquardt(damping=Negative(1e-3))
    with pytest.warns(
        UserWarning, match="its damping, or another setting .* out of rang"
    ):
        gnlin.solve((exponential, jnp.ones(2)), (x, x), solver)


def test_a_factor_may_have_fewer_rows_than_outputs():
    class Difference(gnlin.authoring.AbstractFactor):
        def mv(self, v):
            return (v[0] - v[1])[None]

        def transpose_mv(self, u):
            return jnp.concatenate([u, -u])

        def whiten(self, gradient):
            return gradient[:1], None

    class OfDifference(gnlin.authoring.AbstractLoss):
        reduction: str | None = None

        def value(self, outputs, target):
            return 0.5 * (outputs[0] - outputs[1] - target) ** 2

        def factor(self, outputs, target):
            return Difference()

    x = jnp.linspace(0.1, 1.0, 10)
    model = lambda p, x: jnp.stack([p[0] * x, p[1] * x**2]), jnp.ones(2)
    solution = gnlin.solve(model, (x, x - 2 * x**2), loss=OfDifference())
    np.testing.assert_allclose(solution.model[1], [1, 2], rtol=1e-6)
