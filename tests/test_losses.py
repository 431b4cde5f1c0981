"""Each loss, compared with SciPy, dense matrices and many-digit decimals."""

import dataclasses
import decimal
import fractions
import functools
import itertools
import math
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np
import optax
import optimistix as optx
import pytest
import scipy.optimize
import scipy.special
from jax.flatten_util import ravel_pytree
from problems import each_once, equations, num_compiled, numbers

import gnlin
from gnlin._linearisation._group_loss import GroupLoss
from gnlin._linearisation._objective import BatchLoss


# Use the optimisations of user programs for comparisons of the last digits, whatever
# conftest.py sets.
OPTIONS = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
if "xla_cpu_use_fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
    OPTIONS["xla_cpu_use_fusion_emitters"] = True
as_for_users = functools.partial(jax.jit, compiler_options=OPTIONS)


class Hinge(gnlin.authoring.AbstractLoss):
    """A user-defined loss that defines only its value."""

    reduction: str = "sum"

    def value(self, outputs, target):
        margin = jnp.where(jnp.arange(outputs.size) == target, 0.0, 1.0)
        return jax.nn.logsumexp(outputs + margin) - outputs[target]


class Quartic(gnlin.authoring.AbstractElementwiseLoss):
    """A user-defined loss that defines only its value in each output."""

    reduction: str = "sum"

    def elementwise(self, output, target):
        return (output - target) ** 4 / 4


class Case(NamedTuple):
    """A loss of one example, the same value in SciPy and naively in JAX, and targets."""

    loss: gnlin.authoring.AbstractLoss
    scipy: Callable
    naive: Callable
    target: Callable
    shape: tuple[int, ...] = (4,)
    optax: Callable | None = None


def softmax_case(loss, target, shape=(4,)):
    """Labels and probabilities, smoothed or not, are cross-entropies with some y."""

    def y_of(t):
        y = jnp.asarray(t)
        if jnp.issubdtype(y.dtype, jnp.integer):
            y = jnp.eye(shape[-1])[y]
        return smooth(y, loss.label_smoothing)

    return Case(
        loss,
        lambda f, t: -np.sum(y_of(t) * scipy.special.log_softmax(f, axis=-1)),
        lambda f, t: jnp.sum(
            y_of(t) * (jnp.log(jnp.sum(jnp.exp(f), -1, keepdims=True)) - f)
        ),
        target,
        shape,
        lambda f, t: optax.softmax_cross_entropy(f, y_of(t)),
    )


def smooth(y, smoothing):
    return (1 - smoothing) * y + smoothing / y.shape[-1]


def labels(generator, shape):
    return generator.integers(0, shape[-1], shape[:-1])


def probabilities(generator, shape):
    return generator.dirichlet(np.ones(shape[-1]), shape[:-1])


def normal(generator, shape):
    return generator.normal(size=shape)


DELTA = 0.7
CASES = {
    "squared error": Case(
        gnlin.SquaredError(),
        lambda f, t: 0.5 * np.sum((f - t) ** 2),
        lambda f, t: 0.5 * jnp.sum((f - t) ** 2),
        normal,
        optax=optax.l2_loss,
    ),
    "softmax, labels": softmax_case(gnlin.SoftmaxCrossEntropy(), labels),
    "softmax, smoothed labels": softmax_case(gnlin.SoftmaxCrossEntropy(0.3), labels),
    "softmax, a sequence of probabilities": softmax_case(
        gnlin.SoftmaxCrossEntropy(0.1), probabilities, (2, 3)
    ),
    "sigmoid": Case(
        gnlin.SigmoidCrossEntropy(),
        lambda f, t: (
            -np.sum(
                t * scipy.special.log_expit(f) + (1 - t) * scipy.special.log_expit(-f)
            )
        ),
        lambda f, t: jnp.sum(jnp.log(1 + jnp.exp(f)) - t * f),
        lambda generator, shape: generator.uniform(size=shape),
        optax=optax.sigmoid_binary_cross_entropy,
    ),
    "huber": Case(
        gnlin.losses.Huber(DELTA, reweighted=0),
        lambda f, t: np.sum(scipy.special.huber(DELTA, f - t)),
        lambda f, t: jnp.sum(
            jnp.where(
                jnp.abs(f - t) <= DELTA,
                0.5 * (f - t) ** 2,
                DELTA * (jnp.abs(f - t) - 0.5 * DELTA),
            )
        ),
        normal,
        optax=lambda f, t: optax.huber_loss(f, t, delta=DELTA),
    ),
    "pseudo-huber": Case(
        gnlin.losses.PseudoHuber(DELTA, reweighted=0),
        lambda f, t: np.sum(scipy.special.pseudo_huber(DELTA, f - t)),
        lambda f, t: DELTA**2 * jnp.sum(jnp.sqrt(1 + ((f - t) / DELTA) ** 2) - 1),
        normal,
    ),
    "log-cosh": Case(
        gnlin.losses.LogCosh(DELTA, reweighted=0),
        lambda f, t: DELTA**2 * np.sum(np.log(np.cosh((f - t) / DELTA))),
        lambda f, t: DELTA**2 * jnp.sum(jnp.log(jnp.cosh((f - t) / DELTA))),
        normal,
        optax=lambda f, t: DELTA**2 * optax.log_cosh(f / DELTA, t / DELTA),
    ),
    "isotropic": Case(
        gnlin.losses.Isotropic(gnlin.losses.PseudoHuber(DELTA, reweighted=0)),
        lambda f, t: np.sum(
            scipy.special.pseudo_huber(DELTA, np.linalg.norm(f - t, axis=-1))
        ),
        lambda f, t: (
            DELTA**2 * jnp.sum(jnp.sqrt(1 + jnp.sum((f - t) ** 2, -1) / DELTA**2) - 1)
        ),
        normal,
        (3, 2),
    ),
    "poisson": Case(
        gnlin.losses.PoissonNLL(),
        lambda f, t: np.sum(np.exp(f) - t * f - t + scipy.special.xlogy(t, t)),
        lambda f, t: jnp.sum(jnp.exp(f) - t * f - t + jax.scipy.special.xlogy(t, t)),
        lambda generator, shape: generator.poisson(1.5, shape).astype(float),
    ),
    "a user's value": Case(
        Hinge(),
        lambda f, t: scipy.special.logsumexp(f + 1.0 * (np.arange(4) != t)) - f[t],
        lambda f, t: (
            jnp.log(jnp.sum(jnp.exp(f + jnp.where(jnp.arange(4) == t, 0.0, 1.0)))) - f[t]
        ),
        lambda generator, shape: generator.integers(0, 4),
    ),
    "a user's function of each output": Case(
        Quartic(),
        lambda f, t: np.sum((f - t) ** 4) / 4,
        lambda f, t: jnp.sum((f - t) ** 2 * (f - t) ** 2) / 4,
        normal,
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def examples(case, num=3, seed=0):
    """Return (outputs, target) of moderate size in NumPy."""
    generator = np.random.default_rng(seed)
    for _ in range(num):
        yield 1.5 * generator.normal(size=case.shape), case.target(generator, case.shape)


def dense(product, like):
    """Return the matrix of a linear map between trees of the structure of `like`."""
    flat, unravel = ravel_pytree(like)
    columns = jax.vmap(lambda v: ravel_pytree(product(unravel(v)))[0], 1, 1)
    return columns(jnp.eye(flat.size, dtype=flat.dtype))


def everything(loss, naive, outputs, target):
    """Return all results of the loss as flat vectors and dense matrices, and the naive
    ones."""
    flat, unravel = ravel_pytree(outputs)
    value = lambda flat: naive(unravel(flat), target)
    factor, gradient = loss.factor(outputs, target), loss.gradient(outputs, target)
    residual, remainder = factor.whiten(gradient)
    assert isinstance(factor, gnlin.authoring.AbstractFactor)
    assert jax.tree.structure(gradient) == jax.tree.structure(outputs)
    assert jax.tree.structure(residual) == jax.tree.structure(outputs)
    if isinstance(loss, gnlin.SquaredError):
        assert remainder is None
    if remainder is None:
        remainder = jax.tree.map(jnp.zeros_like, outputs)
    return {
        "value": loss.value(outputs, target),
        "gradient": ravel_pytree(gradient)[0],
        "root": dense(factor.mv, outputs),
        "transpose": dense(factor.transpose_mv, outputs),
        "residual": ravel_pytree(residual)[0],
        "remainder": ravel_pytree(remainder)[0],
        "naive gradient": jax.grad(value)(flat),
        "naive hessian": jax.hessian(value)(flat),
    }


@pytest.fixture(scope="module")
def everything_of():
    """Compile once for each case; all tests share the result."""
    compiled = {}

    def of(case, outputs, target):
        if id(case) not in compiled:
            run = lambda f, t: everything(case.loss, case.naive, f, t)
            compiled[id(case)] = jax.jit(run)
        return jax.tree.map(np.asarray, compiled[id(case)](outputs, target))

    return of


#
# Moderate outputs
#


@every_case
def test_value_matches_scipy_and_optax(case, everything_of):
    for outputs, target in examples(case):
        value = everything_of(case, outputs, target)["value"]
        assert value.shape == ()
        np.testing.assert_allclose(value, case.scipy(outputs, target), rtol=1e-13)
        if case.optax is not None:
            expected = jnp.sum(case.optax(jnp.asarray(outputs), target))
            np.testing.assert_allclose(value, expected, rtol=1e-12)


@every_case
def test_gradient_matches_the_naive_formula(case, everything_of):
    for example in examples(case):
        of = everything_of(case, *example)
        np.testing.assert_allclose(
            of["gradient"], of["naive gradient"], rtol=1e-11, atol=1e-14
        )


@every_case
def test_factor_against_dense_matrices(case, everything_of):
    for outputs, target in examples(case):
        of = everything_of(case, outputs, target)
        root = of["root"]
        np.testing.assert_allclose(
            root.T @ root, of["naive hessian"], rtol=1e-10, atol=1e-13
        )
        np.testing.assert_allclose(of["transpose"], root.T, atol=1e-14)
        gradient, remainder = of["gradient"], of["remainder"]
        if isinstance(case.loss, gnlin.losses.Huber):  # an outlier's full influence
            outlier = np.abs(outputs - target) > DELTA
            assert outlier.any()
            np.testing.assert_array_equal(remainder, np.where(outlier, gradient, 0))
        else:
            assert not remainder.any()
        whole = root.T @ of["residual"] + remainder
        np.testing.assert_allclose(whole, gradient, rtol=1e-9, atol=1e-13)
        shortest = np.linalg.pinv(root.T, rcond=1e-10) @ (gradient - remainder)
        np.testing.assert_allclose(of["residual"], shortest, rtol=1e-8, atol=1e-12)


def reweighted(matrix, values, start, delta, axis, num_steps):
    """Literal iteratively reweighted least squares with Huber's weights."""
    y = start
    for _ in range(num_steps):
        residual = matrix @ y - values
        vectors = residual if axis is None else np.linalg.norm(residual, axis=axis)
        size = np.abs(vectors) if axis is None else vectors[..., None]
        root = np.sqrt(np.minimum(1, delta / size)) * np.ones_like(residual)
        rows = (root[..., None] * matrix).reshape(-1, len(y))
        y = np.linalg.lstsq(rows, (root * values).ravel())[0]
    return y


@pytest.mark.parametrize("axis", [None, -1])
def test_steps_with_reweighted_curvature_are_those_of_reweighted_least_squares(axis):
    generator = np.random.default_rng(0)
    matrix = generator.normal(size=(12, 2, 3))
    values = 3 * generator.normal(size=(12, 2)) ** 3
    start = generator.normal(size=3)
    loss = gnlin.losses.Huber(DELTA, reweighted=1)
    if axis is not None:
        loss = gnlin.losses.Isotropic(loss, axis)
    found = gnlin.solve(
        (lambda y, a: a @ y, jnp.asarray(start)),
        (jnp.asarray(matrix), jnp.asarray(values)),
        gnlin.GaussNewton(),
        loss=loss,
        max_steps=5,
    )
    expected = reweighted(matrix, values, start, DELTA, axis, 5)
    np.testing.assert_allclose(found.model[1], expected, rtol=1e-10)
    # Each step minimises an upper bound, so that none raises the loss.
    assert (np.diff(found.history.loss) < 0).all()


def test_the_curvature_of_a_vectors_length_at_any_length():
    """A vector of length 0 has no direction, and no component may overflow."""
    loss = gnlin.losses.Isotropic(gnlin.losses.Huber(DELTA, reweighted=1))
    outputs = np.array([[0.0, 0.0], [1e-200, 0.0], [3e200, 4e200]])
    target = jnp.zeros(outputs.shape)

    @jax.jit
    def run(f):
        root = dense(loss.factor(f, target).mv, f)
        slope = jax.jacobian(loss.plain)(f, target)
        return root, loss.gradient(f, target), loss.plain(f, target), slope

    root, pull, z, slope = map(np.asarray, run(outputs))
    weights = np.array([1, 1, DELTA / 5e200])
    np.testing.assert_allclose(
        root @ root, np.diag(np.repeat(weights, 2)), rtol=1e-14, atol=1e-200
    )
    np.testing.assert_allclose(pull, [[0, 0], [1e-200, 0], [0.6 * DELTA, 0.8 * DELTA]])
    assert np.isfinite(slope).all()
    np.testing.assert_allclose(slope[0, :, 0], np.eye(2))
    np.testing.assert_allclose(0.5 * np.sum(z[:2] ** 2), 0, atol=1e-300)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_vector_that_is_not_finite_is_no_perfect_fit(wrong):
    loss = gnlin.losses.Isotropic(gnlin.losses.Huber(DELTA))
    target, before = jnp.zeros(2), jnp.array([9.0, 9.0])

    @jax.jit
    def run(f):
        of = loss.value(f, target), loss.gradient(f, target)
        return *of, loss.decrease(before, f, target)

    value, gradient, decrease = run(np.array([wrong, 1.0]))
    assert not np.isfinite(value)
    assert not np.isfinite(gradient).any()
    assert not decrease > 0


class TreeOfSquares(gnlin.authoring.AbstractLoss):
    reduction: str = "sum"

    def value(self, outputs, target):
        a, b = outputs["a"] - target["a"], outputs["b"] - target["b"]
        return jnp.sum(a**2) + jnp.sum(b**2) * (1 + jnp.sum(jnp.exp(a)))


@pytest.mark.parametrize(
    "loss",
    [gnlin.losses.PseudoHuber(), gnlin.SigmoidCrossEntropy(), TreeOfSquares()],
    ids=repr,
)
def test_outputs_may_be_a_tree(loss):
    generator = np.random.default_rng(1)
    outputs = {"a": jnp.asarray(generator.normal(size=3)), "b": jnp.asarray(0.3)}
    target = {"a": jnp.asarray(generator.uniform(size=3)), "b": jnp.asarray(0.1)}
    of = jax.jit(lambda f, t: everything(loss, loss.value, f, t))(outputs, target)
    np.testing.assert_allclose(of["gradient"], of["naive gradient"], rtol=1e-9)
    root = np.asarray(of["root"])
    w, v = np.linalg.eigh(of["naive hessian"])
    convex = v * np.maximum(w, 0) @ v.T
    np.testing.assert_allclose(root.T @ root, convex, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(of["transpose"], root.T, rtol=1e-13, atol=1e-15)
    whole = root.T @ of["residual"] + of["remainder"]
    np.testing.assert_allclose(whole, of["gradient"], rtol=1e-10)


def test_negative_curvature_counts_as_none():
    class Wave(gnlin.authoring.AbstractElementwiseLoss):
        reduction: str = "sum"

        def elementwise(self, output, target):
            return jnp.cos(output - target)

    class WaveByValue(gnlin.authoring.AbstractLoss):
        reduction: str = "sum"

        def value(self, outputs, target):
            return jnp.sum(jnp.cos(outputs - target))

    outputs, target = jnp.asarray([0.1, 3.0]), jnp.zeros(2)
    for loss in (Wave(), WaveByValue()):
        of = jax.jit(lambda f, t, loss=loss: everything(loss, loss.value, f, t))
        of = jax.tree.map(np.asarray, of(outputs, target))
        root, expected = of["root"], np.diag([0, -np.cos(3.0)])
        np.testing.assert_allclose(root.T @ root, expected, rtol=1e-14, atol=1e-15)
        np.testing.assert_allclose(of["remainder"], [-np.sin(0.1), 0], rtol=1e-14)
        within = root.T @ of["residual"]
        np.testing.assert_allclose(within, [0, -np.sin(3.0)], rtol=1e-14)


@pytest.mark.parametrize(
    ("loss", "dtype"),
    each_once(
        [
            gnlin.SquaredError(),
            gnlin.SigmoidCrossEntropy(),
            gnlin.losses.Huber(),
            gnlin.losses.PseudoHuber(),
            gnlin.losses.LogCosh(),
            gnlin.losses.PoissonNLL(),
            Quartic(),
        ],
        [np.int32, np.int64, bool],
    ),
    ids=lambda x: "" if isinstance(x, type) else type(x).__name__,
)
def test_whole_numbers_as_targets_leave_the_outputs_precision(loss, dtype):
    outputs = jnp.asarray([0.5, -1.5, 2.0], jnp.float32)
    target = np.array([0, 1, 1])
    whole = jnp.asarray(target, dtype)
    real = jnp.asarray(target, jnp.float32)
    value = loss.value(outputs, whole)
    np.testing.assert_allclose(value, loss.value(outputs, real), rtol=1e-6)
    np.testing.assert_array_equal(
        loss.gradient(outputs, whole), loss.gradient(outputs, real)
    )
    assert loss.gradient(outputs, whole).dtype == jnp.float32
    assert loss.decrease(outputs, 2 * outputs, whole).dtype == jnp.float32
    assert value.dtype == jnp.float32


#
# Saturated outputs, in as many digits as necessary
#

D = decimal.Decimal
_DIGITS = 700


@pytest.fixture(autouse=True)
def _many_digits():
    with decimal.localcontext() as context:
        context.prec = _DIGITS
        context.Emin, context.Emax = -(10**6), 10**6
        yield


def exact(x):
    return [D(float(v)) for v in np.ravel(x)]


class Exact(NamedTuple):
    """Value, gradient and Hessian-vector product in many digits. `size` is the sum of the
    absolute values of the product's terms."""

    value: Any
    gradient: list
    product: list
    size: list


def exact_softmax(outputs, y, v):
    f, y, v = exact(outputs), exact(y), exact(v)
    top = f.index(max(f))
    e = [(x - f[top]).exp() for x in f]
    p = [x / sum(e) for x in e]
    log_total = sum(e).ln() + f[top]
    total = sum(y)
    mean = sum(a * b for a, b in zip(p, v, strict=True))
    spread = sum(a * abs(b - v[top]) for a, b in zip(p, v, strict=True))
    return Exact(
        sum(a * (log_total - x) for a, x in zip(y, f, strict=True)),
        [total * a - b for a, b in zip(p, y, strict=True)],
        [total * a * (b - mean) for a, b in zip(p, v, strict=True)],
        [total * a * (abs(b - v[top]) + spread) for a, b in zip(p, v, strict=True)],
    )


def exact_sigmoid(f, t):
    e = (-f).exp()
    p = 1 / (1 + e)
    return t * (1 + e).ln() + (1 - t) * (1 + f.exp()).ln(), p - t, p * (1 - p)


def exact_huber(f, t, delta):
    r = f - t
    if abs(r) <= delta:
        return r * r / 2, r, D(1)
    return delta * (abs(r) - delta / 2), delta.copy_sign(r), D(0)


def exact_pseudo_huber(f, t, delta):
    r = f - t
    slope = (1 + (r / delta) ** 2).sqrt()
    return delta**2 * (slope - 1), r / slope, slope**-3


def exact_log_cosh(f, t, delta):
    x = (f - t) / delta
    cosh = (x.exp() + (-x).exp()) / 2
    sinh = (x.exp() - (-x).exp()) / 2
    return delta**2 * cosh.ln(), delta * sinh / cosh, cosh**-2


def exact_poisson(f, t):
    return f.exp() - t * f - t + (t * t.ln() if t > 0 else 0), f.exp() - t, f.exp()


def assert_near(actual, expected, rtol, size=None):
    """Compare to `rtol` of `size`, by default the expected number itself. A number that
    the precision cannot hold may be zero or its neighbour."""
    actual = np.asarray(actual)
    tiny = 4 * D(float(np.finfo(actual.dtype).smallest_normal))
    assert np.all(np.isfinite(actual))
    expected = [expected] if isinstance(expected, D) else expected
    size = expected if size is None else size
    for a, e, s in zip(exact(actual), expected, size, strict=True):
        assert abs(a - e) <= D(rtol) * abs(s) + tiny, f"{a:.20e} is not {e:.20e}"


# Halves and powers of two, whose differences are exact in single precision too.
LOGITS = {
    "the likeliest by 30": [30.0, 0.0, -30.0, 8.5],
    "the likeliest by 80": [-80.0, 80.0, 0.5, 0.0],
    "the likeliest by 150": [-150.0, 0.0, 150.0, 64.0],
    "two nearly as likely": [80.0, 80.0625, -80.0, 0.0],
    "two alike": [150.0, -30.0, 150.0, -150.0],
    "moderate": [0.5, -1.25, 2.0, 0.0],
}
LOGITS_IN_DOUBLE = {
    "the likeliest by 300": [-300.0, 300.0, 0.0, 299.0],
    "the likeliest by 700": [700.0, -700.0, 0.0, 350.0],
    "seven hundred below": [-700.0, 0.0, -700.0, 0.0],
}


def tolerance(dtype, roundings):
    return roundings * float(np.finfo(dtype).eps)


def softmax_tolerance(outputs):
    """Allow a few roundings of the result, and one of each log-probability."""
    return tolerance(outputs.dtype, 8 + float(np.ptp(outputs)))


def derivatives(loss, f, t, v):
    """Return (value, gradient, second derivative times v)."""
    factor = loss.factor(f, t)
    product = factor.transpose_mv(factor.mv(v))
    return loss.value(f, t), loss.gradient(f, t), product


@pytest.mark.parametrize(
    ("dtype", "smoothing"),
    [(np.float32, 0.25), (np.float64, 0.0)],
    ids=["single", "double"],
)
def test_saturated_softmax(dtype, smoothing):
    loss = gnlin.SoftmaxCrossEntropy(smoothing)
    generator = np.random.default_rng(2)
    cases = LOGITS if dtype == np.float32 else LOGITS | LOGITS_IN_DOUBLE
    run = as_for_users(functools.partial(derivatives, loss))
    for logits in cases.values():
        outputs = np.array(logits, dtype)
        rtol = softmax_tolerance(outputs)
        for label in range(4):
            v = generator.normal(size=4).astype(dtype)
            y = smooth(np.eye(4)[label], smoothing)
            expected = exact_softmax(outputs, y, v)
            value, gradient, product = run(outputs, jnp.asarray(label), v)
            assert value.dtype == gradient.dtype == product.dtype == dtype
            assert_near(value, expected.value, rtol)
            # p - y is a difference if two classes are both likely.
            size = [
                abs(g)
                if j == int(np.argmax(outputs)) or y[j] == 0
                else max(abs(g), D(y[j]))
                for j, g in enumerate(expected.gradient)
            ]
            if smoothing > 0:
                size = [max(size)] * 4
            assert_near(gradient, expected.gradient, rtol, size)
            assert_near(product, expected.product, rtol, expected.size)


def test_loss_of_a_nearly_certain_class_keeps_all_digits():
    """1 - p, for a class that is nearly certain."""
    loss = gnlin.SoftmaxCrossEntropy()
    outputs = jnp.asarray([40.0, 0.0, -3.0], jnp.float32)
    tail = math.exp(-40) + math.exp(-43)
    run = as_for_users(functools.partial(derivatives, loss))
    first = jnp.asarray([1.0, 0.0, 0.0], jnp.float32)
    value, gradient, product = run(outputs, jnp.asarray(0), first)
    np.testing.assert_allclose(value, tail, rtol=1e-6)
    np.testing.assert_allclose(gradient[0], -tail, rtol=1e-6)
    np.testing.assert_allclose(product, [tail, -math.exp(-40), -math.exp(-43)], rtol=1e-6)


ELEMENTWISE = {
    "sigmoid": (gnlin.SigmoidCrossEntropy(), exact_sigmoid, (0.0, 1.0, 0.25)),
    "huber": (
        gnlin.losses.Huber(0.75, reweighted=0),
        lambda f, t: exact_huber(f, t, D("0.75")),
        (0.0, 30.0, -79.5),
    ),
    "pseudo-huber": (
        gnlin.losses.PseudoHuber(0.75, reweighted=0),
        lambda f, t: exact_pseudo_huber(f, t, D("0.75")),
        (0.0, 30.0, -79.5),
    ),
    "log-cosh": (
        gnlin.losses.LogCosh(0.5, reweighted=0),  # dividing by 0.5 does not round
        lambda f, t: exact_log_cosh(f, t, D("0.5")),
        (0.0, 30.0, -79.5),
    ),
    "poisson": (gnlin.losses.PoissonNLL(), exact_poisson, (0.0, 1.0, 5.0)),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    each_once(list(ELEMENTWISE), [np.float64, np.float32]),
)
def test_saturated_outputs_one_by_one(name, dtype):
    loss, formula, targets = ELEMENTWISE[name]
    sizes = [0.0, 0.125, 2**-10, 1.0, 30.0, 80.0, 150.0]
    sizes += [300.0, 700.0] if dtype == np.float64 else []
    outputs = np.array(sizes + [-x for x in sizes], dtype)
    rtol = tolerance(dtype, 8)
    run = as_for_users(
        lambda f, t: (loss.elementwise(f, t), loss.derivative(f, t), loss.root(f, t))
    )
    for target in targets:
        given = jnp.full(outputs.shape, target, dtype)
        values, slopes, roots = map(np.asarray, run(outputs, given))
        assert values.dtype == slopes.dtype == roots.dtype == dtype
        for i, f in enumerate(exact(outputs)):
            value, slope, curvature = formula(f, D(target))
            size = abs(value), abs(slope)
            if target == 0.25 or isinstance(loss, gnlin.losses.PoissonNLL):
                # Differences of terms of the target's size
                size = (
                    max(value, abs(D(target) * f), D(target)),
                    max(abs(slope), D(target)),
                )
            assert_near(values[i], value, rtol, [size[0]])
            assert_near(slopes[i], slope, rtol, [size[1]])
            assert_near(roots[i], curvature.sqrt(), rtol)


SATURATED = {
    "softmax": (gnlin.SoftmaxCrossEntropy(), np.array(0)),
    "softmax, probabilities": (
        gnlin.SoftmaxCrossEntropy(),
        np.array([0.5, 0.5, 0.0, 0.0]),
    ),
    "smoothed softmax": (gnlin.SoftmaxCrossEntropy(0.125), np.array(0)),
    "sigmoid": (gnlin.SigmoidCrossEntropy(), np.array([0.0, 1.0, 0.0, 1.0])),
    "huber": (gnlin.losses.Huber(0.75), np.array([0.0, 30.0, -79.5, 0.5])),
    "pseudo-huber": (gnlin.losses.PseudoHuber(0.75), np.array([0.0, 30.0, -79.5, 0.5])),
    "log-cosh": (gnlin.losses.LogCosh(0.75), np.array([0.0, 30.0, -79.5, 0.5])),
    "poisson": (gnlin.losses.PoissonNLL(), np.array([0.0, 1.0, 5.0, 100.0])),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    each_once(list(SATURATED), [np.float32, np.float64]),
)
def test_the_gradient_is_whitened_whole(name, dtype):
    """R^T r~ + e is the gradient, and r~ leaves room for other examples."""
    loss, target = SATURATED[name]
    target = jnp.asarray(target, dtype if target.dtype.kind == "f" else int)

    @as_for_users
    def run(outputs):
        gradient, factor = loss.gradient(outputs, target), loss.factor(outputs, target)
        residual, remainder = factor.whiten(gradient)
        return gradient, factor.transpose_mv(residual) + remainder, residual

    eps = float(np.finfo(dtype).eps)
    scales = [1.0, 30.0, 80.0, 150.0] + ([300.0, 700.0] if dtype == np.float64 else [])
    for scale in scales:
        for direction in ([1, 0, -1, 0.5], [-1, 1, 0, 0.25], [0, -1, -1, 1]):
            outputs = np.array(direction, dtype) * dtype(scale)
            gradient, whole, residual = run(outputs)
            assert np.all(np.isfinite(gradient))
            assert np.all(np.isfinite(residual))
            largest = float(np.max(np.abs(gradient)))
            error = np.abs(np.asarray(whole, float) - np.asarray(gradient, float))
            assert np.all(error <= 16 * eps * largest)
            if isinstance(loss, gnlin.losses.PoissonNLL):
                continue  # whose gradient is unbounded
            assert np.all(np.abs(residual) <= 100 / eps**0.5)


@hypothesis.given(
    st.lists(st.integers(-400, 400), min_size=3, max_size=3),
    st.integers(0, 2),
    st.lists(st.floats(-1, 1), min_size=3, max_size=3),
)
def test_softmax_at_any_outputs(halves, label, v):
    with decimal.localcontext() as context:
        context.prec = _DIGITS
        context.Emin, context.Emax = -(10**6), 10**6
        outputs, v = 0.5 * np.array(halves, float), np.array(v, float)
        expected = exact_softmax(outputs, np.eye(3)[label], v)
        value, gradient, product = softmax_parts(outputs, jnp.asarray(label), v)
        rtol = softmax_tolerance(outputs)
        assert_near(value, expected.value, rtol)
        size = [
            max(abs(g), D(1) if j == label else D(0))
            for j, g in enumerate(expected.gradient)
        ]
        size[int(np.argmax(outputs))] = abs(expected.gradient[int(np.argmax(outputs))])
        assert_near(gradient, expected.gradient, rtol, size)
        assert_near(product, expected.product, rtol, expected.size)


#
# Properties
#


softmax_parts = jax.jit(functools.partial(derivatives, gnlin.SoftmaxCrossEntropy()))


def three(most):
    return st.lists(st.floats(-most, most), min_size=3, max_size=3).map(np.array)


@hypothesis.given(three(30), three(5), st.floats(-100, 100), st.integers(0, 2))
def test_softmax_does_not_see_a_shift(outputs, v, shift, label):
    label = jnp.asarray(label)
    here = softmax_parts(outputs, label, v)
    there = softmax_parts(outputs + shift, label, v + shift)
    for a, b in zip(here, there, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


@hypothesis.given(three(30), three(5), st.integers(0, 2**32 - 1), st.floats(0.01, 100))
def test_softmax_is_homogeneous_in_the_target(outputs, v, seed, size):
    y = np.random.default_rng(seed).dirichlet(np.ones(3))
    once, scaled = softmax_parts(outputs, y, v), softmax_parts(outputs, size * y, v)
    for a, b in zip(once, scaled, strict=True):
        np.testing.assert_allclose(size * np.asarray(a), b, rtol=1e-11, atol=1e-12 * size)


@hypothesis.given(three(300), st.integers(0, 2))
def test_softmax_curvature_is_semidefinite_and_flat_along_ones(outputs, label):
    label = jnp.asarray(label)
    columns = [softmax_parts(outputs, label, v)[2] for v in np.eye(3)]
    hessian = np.array(columns)
    np.testing.assert_allclose(hessian, hessian.T, rtol=1e-13, atol=1e-300)
    assert np.all(np.linalg.eigvalsh(hessian) >= -1e-15 * np.abs(hessian).max())
    np.testing.assert_array_equal(
        softmax_parts(outputs, label, np.ones(3))[2], np.zeros(3)
    )


def test_without_any_target_there_is_nothing_to_minimise():
    value, gradient, product = softmax_parts(np.arange(3.0), np.zeros(3), np.ones(3))
    for x in (value, gradient, product):
        np.testing.assert_array_equal(x, np.zeros_like(x))
    factor = gnlin.SoftmaxCrossEntropy().factor(jnp.arange(3.0), jnp.zeros(3))
    for x in factor.whiten(jnp.zeros(3)):
        np.testing.assert_array_equal(x, np.zeros(3))


def test_a_class_that_is_impossible():
    """Its probability underflows, and nothing divides by it."""
    loss = gnlin.SoftmaxCrossEntropy()
    outputs = jnp.asarray([0.0, -2000.0, -1.0])
    for label in range(3):
        target = jnp.asarray(label)
        gradient, factor = loss.gradient(outputs, target), loss.factor(outputs, target)
        residual, remainder = factor.whiten(gradient)
        whole = factor.transpose_mv(residual) + remainder
        np.testing.assert_allclose(whole, gradient, rtol=1e-14, atol=1e-15)
        assert np.all(np.isfinite(loss.value(outputs, target)))


# log(1 + exp(-f)) at f = 25 and 25.5
SMALL = np.log1p(np.exp([-25.0, -25.5]))


@every_case
def test_decrease_is_the_difference_of_values(case):
    @jax.jit
    def run(here, there, target):
        values = [case.loss.value(f, target) for f in (here, there)]
        return case.loss.decrease(here, there, target), *values

    pairs = list(examples(case, 4))
    for (here, target), (there, _) in itertools.pairwise(pairs):
        fall, before, after = map(np.asarray, run(here, there, target))
        np.testing.assert_allclose(fall, before - after, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("loss", "before", "after", "target", "expected"),
    [
        (gnlin.losses.PoissonNLL(), -95, 0, 1, 95 - 1),
        (gnlin.losses.PoissonNLL(), -60, 40, 1, 100 - math.exp(40)),
        (gnlin.losses.BinomialNLL(9), 25, 25.5, 9, 9 * (SMALL[0] - SMALL[1])),
        (gnlin.losses.BinomialNLL(9), -25, -25.5, 0, 9 * (SMALL[0] - SMALL[1])),
    ],
)
def test_a_decrease_far_from_the_minimum(loss, before, after, target, expected):
    given = (jnp.asarray([x], jnp.float32) for x in (before, after, target))
    np.testing.assert_allclose(loss.decrease(*given), expected, rtol=1e-6)


def test_the_derivative_of_a_value_at_zero():
    # A loss of your own may contain this one.
    loss, outputs = gnlin.SigmoidCrossEntropy(), jnp.zeros(3)
    targets = jnp.array([0.0, 0.3, 1.0])
    derivative = jax.grad(lambda f: loss.value(f, targets))(outputs)
    np.testing.assert_allclose(derivative, 0.5 - targets, rtol=1e-15)
    second = jax.hessian(lambda f: loss.value(f, targets))(outputs)
    np.testing.assert_allclose(second, 0.25 * np.eye(3), rtol=1e-15)


def test_a_certain_label_that_is_right_has_no_loss():
    outputs, targets = jnp.array([np.inf, -np.inf, np.inf]), jnp.array([1.0, 0.0, 0.0])
    found = gnlin.SigmoidCrossEntropy().elementwise(outputs, targets)
    np.testing.assert_array_equal(found, [0, 0, np.inf])


@hypothesis.given(three(10), three(10), three(1), st.integers(-14, -1))
def test_a_small_decrease_of_squared_error_is_known_to_rounding(f, y, change, exponent):
    g = f + 10.0**exponent * change

    def squares(x):
        pairs = zip(x, y, strict=True)
        return sum((fractions.Fraction(a) - fractions.Fraction(b)) ** 2 for a, b in pairs)

    expected = (squares(f) - squares(g)) / 2
    size = float(np.sum(np.abs(f - g) * (np.abs(f - y) + np.abs(g - y))))
    actual = gnlin.SquaredError().decrease(*map(jnp.asarray, (f, g, y)))
    assert abs(float(actual) - float(expected)) <= 2e-15 * size


#
# A thousand classes
#


def all_sizes(jaxpr):
    for equation in equations(jaxpr):
        for variable in equation.outvars:
            yield math.prod(variable.aval.shape)


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (gnlin.SquaredError(), np.zeros((3, 1000))),
        (gnlin.SoftmaxCrossEntropy(), np.zeros(3, int)),
        (gnlin.SoftmaxCrossEntropy(0.1), np.ones((3, 1000))),
        (gnlin.SigmoidCrossEntropy(), np.zeros((3, 1000))),
        (gnlin.losses.Huber(), np.zeros((3, 1000))),
        (gnlin.losses.PseudoHuber(), np.zeros((3, 1000))),
        (gnlin.losses.LogCosh(), np.zeros((3, 1000))),
        (gnlin.losses.PoissonNLL(), np.zeros((3, 1000))),
        (Quartic(), np.zeros((3, 1000))),
    ],
    ids=lambda x: repr(x) if isinstance(x, gnlin.authoring.AbstractLoss) else "",
)
def test_no_block_of_classes_times_classes(loss, target):
    def everything(outputs, target):
        factor = loss.factor(outputs, target)
        residual, remainder = factor.whiten(loss.gradient(outputs, target))
        return residual, remainder, factor.mv(outputs), factor.transpose_mv(outputs)

    outputs = jnp.zeros((3, 1000))
    jaxpr = jax.make_jaxpr(jax.vmap(everything))(outputs, jnp.asarray(target)).jaxpr
    assert max(all_sizes(jaxpr), default=0) <= outputs.size


#
# Batches
#


def batch(case, num_examples, seed=5):
    pairs = list(examples(case, num_examples, seed))
    return tuple(jnp.asarray(np.stack(part)) for part in zip(*pairs, strict=True))


def parts(loss, outputs, targets, weights, v):
    objective = BatchLoss(loss, jax.eval_shape(lambda: outputs), targets, weights)
    fall = objective.decrease(outputs, outputs + v)
    curved = objective.curvature(outputs)(v)
    return objective.value(outputs), fall, objective.gradient(outputs), curved


@every_case
def test_weights_and_reduction_of_a_batch(case):
    outputs, targets = batch(case, 5)
    v = jnp.asarray(np.random.default_rng(1).normal(size=outputs.shape))
    mean = dataclasses.replace(case.loss, reduction="mean")

    @jax.jit
    def run(outputs, targets, weights):
        each = jax.vmap(case.loss.value)(outputs, targets)
        summed = parts(case.loss, outputs, targets, weights, v)
        return each, summed, parts(mean, outputs, targets, weights, v)

    ones, weights = jnp.ones(5), jnp.asarray([1.0, 2.0, 0.0, 0.5, 1.0])
    each, plain, plain_mean = run(outputs, targets, ones)
    _, weighted, weighted_mean = run(outputs, targets, weights)
    np.testing.assert_allclose(plain[0], np.sum(each), rtol=1e-13)
    np.testing.assert_allclose(weighted[0], np.sum(weights * each), rtol=1e-13)
    by_example = weights.reshape(-1, *[1] * (outputs.ndim - 1))
    for a, b in zip(plain[2:], weighted[2:], strict=True):
        np.testing.assert_allclose(by_example * a, b, rtol=1e-13)
    softmax = isinstance(case.loss, gnlin.SoftmaxCrossEntropy)
    # For one example.
    num_targets = float(np.prod(outputs.shape[1:-1])) if softmax else 1
    for total, summed, averaged in (
        (5, plain, plain_mean),
        (4.5, weighted, weighted_mean),
    ):
        for a, b in zip(summed, averaged, strict=True):
            expected = a / (total * num_targets)
            np.testing.assert_allclose(expected, b, rtol=1e-12, atol=1e-15)


def test_without_weights_all_count_alike():
    case = CASES["softmax, labels"]
    outputs, targets = batch(case, 5)

    @jax.jit
    def run(weights):
        losses = case.loss, gnlin.SoftmaxCrossEntropy(reduction="mean")
        return [
            [parts(loss, outputs, targets, w, outputs) for loss in losses]
            for w in (None, weights)
        ]

    for a, b in zip(*map(jax.tree.leaves, run(jnp.ones(5))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-14, atol=1e-16)


class Affine(eqx.Module):
    """A model that is small and quick to compile."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return jnp.tanh(self.weight @ x) + self.bias


def affine(num_outputs=3, num_inputs=2, seed=0):
    generator = np.random.default_rng(seed)
    return Affine(
        jnp.asarray(generator.normal(size=(num_outputs, num_inputs))),
        jnp.asarray(generator.normal(size=num_outputs)),
    )


SOLVED = {
    "softmax": (
        gnlin.SoftmaxCrossEntropy,
        np.array([0, 2, 1, 1, 0, 2]),
        lambda unit: gnlin.DampedGaussNewton(0.3 * unit),
    ),
    "poisson, prox-linear": (
        gnlin.losses.PoissonNLL,
        np.random.default_rng(3).poisson(2, (6, 3)).astype(float),
        lambda unit: gnlin.IterativeLinearisation(20, 0.01 / unit, damping=0.3 * unit),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("loss", "targets", "build"),
    [
        pytest.param(*SOLVED["softmax"], id="softmax"),
        pytest.param(*SOLVED["poisson, prox-linear"], id="poisson, prox-linear"),
    ],
)
def test_weights_and_reduction_in_a_solution(loss, targets, build):
    x = np.random.default_rng(4).normal(size=(6, 2))
    weights = np.array([1.0, 2.0, 0.0, 1.0, 1.0, 1.0])
    instead = np.array([0, 1, 1, 3, 4, 5])  # one example twice, one left out

    def run(data, loss, unit):
        solution = gnlin.solve(affine(), data, build(unit), loss=loss, max_steps=2)
        return numbers(solution.model), np.append(solution.history.loss, solution.loss)

    twice = (x[instead], targets[instead], np.ones(6))
    expected, losses = run(twice, loss(), 1.0)
    actual, weighted_losses = run((x, targets, weights), loss(), 1.0)
    np.testing.assert_allclose(actual, expected, rtol=1e-9)
    np.testing.assert_allclose(weighted_losses, losses, rtol=1e-9)
    # The mean is the sum, if all settings that refer to the loss are divided by n.
    actual, mean_losses = run((x, targets, weights), loss(reduction="mean"), 1 / 6)
    np.testing.assert_allclose(actual, expected, rtol=1e-9)
    np.testing.assert_allclose(mean_losses, losses / 6, rtol=1e-9)


@pytest.mark.parametrize("kind", ["several labels", "probabilities", "counts", "zeros"])
def test_targets_that_do_not_sum_to_one(kind):
    soft = np.random.default_rng(0).dirichlet(np.ones(3), size=4).astype(np.float32)
    targets = {
        "several labels": np.array([[1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 1, 1.0]]),
        "probabilities": np.round(soft, 4),
        "counts": np.array([[3, 1, 0], [0, 2, 0], [5, 0, 0], [1, 1, 1.0]]),
        "zeros": np.array([[0, 0, 0], [0, 1, 0], [0, 0, 0], [1, 0, 0.0]]),
    }[kind]
    loss, outputs = gnlin.SoftmaxCrossEntropy(), jax.ShapeDtypeStruct((4, 3), float)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss.check(outputs, jnp.asarray(targets))
    said = [str(warning.message) for warning in caught]
    assert len(said) == (kind in ("several labels", "counts"))
    assert all("use `gnlin.SigmoidCrossEntropy()`" in words for words in said)
    # Counts weight each target by its total.
    f = np.array([[0.1, -0.4, 0.2], [0.3, 0.0, 1.0], [0.0, 0.0, 0.0], [2.0, -1.0, 0.5]])
    log_p = f - scipy.special.logsumexp(f, axis=1, keepdims=True)
    value = loss.value(jnp.asarray(f), jnp.asarray(targets, float))
    np.testing.assert_allclose(value, -np.sum(targets * log_p), rtol=1e-12)


#
# Errors
#

X = np.linspace(-1.0, 1.0, 10).reshape(5, 2)
SOFTMAX_LOSS = gnlin.SoftmaxCrossEntropy()
SIGMOID, POISSON = gnlin.SigmoidCrossEntropy(), gnlin.losses.PoissonNLL()
WRONG_TARGETS = {
    "one-hot integers": (
        SOFTMAX_LOSS,
        np.eye(3, dtype=int)[[0, 1, 2, 0, 1]],
        "Labels must",
    ),
    "labels in a column": (SOFTMAX_LOSS, np.zeros((5, 1), int), r"`targets\[..., 0\]`"),
    "labels as floats": (SOFTMAX_LOSS, np.zeros(5), "labels must be integers"),
    "too few probabilities": (SOFTMAX_LOSS, np.ones((5, 2)), r"\(5, 3\).*\(5, 2\)"),
    "label too large": (SOFTMAX_LOSS, np.array([0, 1, 2, 3, 0]), "between 0 and 2.* 3"),
    "label negative": (SOFTMAX_LOSS, np.array([0, 1, 2, -1, 0]), "between 0 and 2.* -1"),
    "negative probability": (
        SOFTMAX_LOSS,
        np.full((5, 3), -0.5),
        "probabilities.*counts.*not negative.*-0.5",
    ),
    "missing probability": (SOFTMAX_LOSS, np.full((5, 3), np.nan), "probabilities.*nan"),
    "booleans": (SOFTMAX_LOSS, np.ones((5, 3), bool), "dtype bool"),
    "a tree of labels": (SOFTMAX_LOSS, {"a": np.zeros(5, int)}, "one array"),
    "complex": (SOFTMAX_LOSS, np.ones((5, 3)) * 1j, "complex"),
    "other number of examples": (SOFTMAX_LOSS, np.zeros(4, int), "same number"),
    "sigmoid, of labels": (SIGMOID, np.zeros(5), "SoftmaxCrossEntropy"),
    "sigmoid, above one": (SIGMOID, np.full((5, 3), 1.5), "between 0 and 1.*1.5"),
    "sigmoid, below zero": (SIGMOID, np.full((5, 3), -1), "between 0 and 1.*-1"),
    "sigmoid, missing": (SIGMOID, np.full((5, 3), np.nan), "between 0 and 1.*nan"),
    "sigmoid, complex": (SIGMOID, np.ones((5, 3)) * 1j, "complex"),
    "negative count": (POISSON, np.full((5, 3), -2.0), "counts.*-2"),
    "negative whole count": (POISSON, np.full((5, 3), -2), "counts.*-2"),
    "missing count": (POISSON, np.full((5, 3), np.nan), "counts.*nan"),
    "counts of another shape": (POISSON, np.ones((5, 1)), r"\(5, 3\).*\(5, 1\)"),
    "huber": (gnlin.losses.Huber(), np.ones(5), r"\(5, 3\).*\(5,\)"),
    "pseudo-huber": (gnlin.losses.PseudoHuber(), np.ones((5, 4)), r"\(5, 3\).*\(5, 4\)"),
    "log-cosh": (gnlin.losses.LogCosh(), np.ones((5, 3, 1)), r"\(5, 3\).*\(5, 3, 1\)"),
    "log-cosh, a tree": (gnlin.losses.LogCosh(), {"a": np.ones((5, 3))}, "shape"),
    "squared error": (gnlin.SquaredError(), np.ones(5), r"\(5, 3\).*\(5,\)"),
    "isotropic": (
        gnlin.losses.Isotropic(gnlin.losses.Huber()),
        np.ones((5, 4)),
        r"\(5, 3\).*\(5, 4\)",
    ),
    "isotropic, of a number": (
        gnlin.losses.Isotropic(gnlin.losses.Huber(), axis=-2),
        np.ones((5, 3)),
        r"shape \(3,\), without the axis -2",
    ),
    "a user's own": (Quartic(), np.ones(5), r"\(5, 3\).*\(5,\)"),
}


def is_one_sentence(message):
    return message.endswith(".") and "\n" not in message and ". " not in message


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("loss", "targets", "words"), WRONG_TARGETS.values(), ids=WRONG_TARGETS
)
def test_a_wrong_target_is_named_in_one_sentence(loss, targets, words):
    solver = gnlin.DampedGaussNewton(1.0)
    with pytest.raises(ValueError, match=words) as caught:
        gnlin.solve(affine(), (X, targets), solver, loss=loss)
    assert is_one_sentence(str(caught.value)), str(caught.value)


@pytest.mark.usefixtures("unchecked")
def test_outputs_that_have_no_classes():
    solver = gnlin.DampedGaussNewton(1.0)

    class Tree(Affine):
        def __call__(self, x):
            return {"a": super().__call__(x), "b": x}

    class Number(Affine):
        def __call__(self, x):
            return self.bias[0] + self.weight[0] @ x

    for model in (Tree(*jax.tree.leaves(affine())), Number(*jax.tree.leaves(affine()))):
        with pytest.raises(ValueError, match="last axis is over the classes"):
            gnlin.solve(model, (X, np.zeros(5, int)), solver, loss=SOFTMAX_LOSS)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (SOFTMAX_LOSS, "two classes use `gnlin.SigmoidCrossEntropy"),
        (SIGMOID, r"pass `targets\[..., None\]`"),
        (gnlin.SquaredError(), r"pass `targets\[..., None\]`"),
    ],
)
def test_one_output_for_two_classes(loss, words):
    """The message does not lead to another loss that does not work either."""
    model = eqx.nn.Linear(2, 1, key=jax.random.key(0))
    with pytest.raises(ValueError, match=words) as caught:
        gnlin.solve(model, (X, np.array([0, 1, 1, 0, 1])), loss=loss)
    assert is_one_sentence(str(caught.value)), str(caught.value)


WRONG_LOSSES = {
    "reduction": [
        lambda: gnlin.SquaredError(reduction="average"),
        lambda: gnlin.SoftmaxCrossEntropy(reduction="tokens"),
        lambda: gnlin.SigmoidCrossEntropy("none"),
        lambda: gnlin.losses.Huber(reduction="max"),
        lambda: gnlin.losses.PoissonNLL(""),
        lambda: Hinge("mena"),
        lambda: Quartic("SUM"),
        lambda: gnlin.losses.Isotropic(gnlin.losses.Huber(reduction="mean")),
    ],
    "delta": [
        lambda build=build, v=v: build(v)
        for build in (gnlin.losses.Huber, gnlin.losses.PseudoHuber, gnlin.losses.LogCosh)
        for v in (0, 0.0, -1.0, math.nan, math.inf, "1", None)
    ],
    "reweighted": [
        lambda: gnlin.losses.Huber(reweighted="yes"),
        lambda: gnlin.losses.Cauchy(reweighted=True),
        lambda: gnlin.losses.PseudoHuber(reweighted=1.1),
        lambda: gnlin.losses.Huber(reweighted=np.full(3, 0.1)),
    ],
    "axis": [lambda: gnlin.losses.Isotropic(gnlin.losses.Huber(), 0.5)],
    "loss": [
        lambda: gnlin.losses.Isotropic(0.1),
        lambda: gnlin.losses.Isotropic(gnlin.SquaredError()),
    ],
    "label_smoothing": [
        *(lambda v=v: gnlin.SoftmaxCrossEntropy(v) for v in (-0.1, 1, 1.0, 2, math.nan)),
    ],
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "build"),
    [(name, build) for name in WRONG_LOSSES for build in WRONG_LOSSES[name]],
)
def test_errors_of_a_losses_hyperparameters(name, build):
    with pytest.raises(ValueError, match=f"`{name}`") as caught:
        build()
    assert is_one_sentence(str(caught.value)), str(caught.value)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "loss", ["softmax", None, optax.l2_loss, gnlin.SoftmaxCrossEntropy]
)
def test_errors_of_losses(loss):
    with pytest.raises(ValueError, match=r"`loss` must be (one of gnlin's|an instance)"):
        gnlin.solve(affine(), (X, np.zeros(5, int)), gnlin.GaussNewton(), loss=loss)


@pytest.mark.parametrize("label", [-1, 3, 100])
def test_a_label_out_of_range_has_no_loss(label):
    outputs, target = jnp.zeros(3), jnp.asarray(label)
    loss = gnlin.SoftmaxCrossEntropy(0.1)
    assert np.isnan(loss.value(outputs, target))
    assert np.all(np.isnan(loss.gradient(outputs, target)))


@pytest.mark.slow
def test_a_label_that_is_out_of_range_inside_jit_is_never_a_success():
    solver = gnlin.DampedGaussNewton(0.1)

    @jax.jit
    def run(labels):
        model = affine()
        data = (jnp.asarray(X), labels)
        solution = gnlin.solve(model, data, solver, loss=SOFTMAX_LOSS, max_steps=2)
        return solution.model, solution.result == optx.RESULTS.nonfinite

    model, nonfinite = run(jnp.asarray([0, 1, 2, 3, 0]))
    assert nonfinite
    np.testing.assert_array_equal(numbers(model), numbers(affine()))
    assert not run(jnp.asarray([0, 1, 2, 2, 0]))[1]


FORGETTING = {
    "cauchy": (gnlin.losses.Cauchy, lambda u: 0.5 * np.log1p(u**2)),
    "arctan": (gnlin.losses.Arctan, lambda u: 0.5 * np.arctan(u**2)),
    "tukey": (gnlin.losses.Tukey, lambda u: (1 - np.maximum(1 - u**2, 0) ** 3) / 6),
}


@pytest.mark.parametrize("name", FORGETTING)
def test_redescending_losses(name):
    """Compare with formulas, and derivatives with differences; negative curvature becomes
    zero."""
    kind, formula = FORGETTING[name]
    loss = kind(0.75, reweighted=0)
    residual = np.array([-40.0, -1.5, -0.7, -0.3, 0.0, 1e-4, 0.2, 0.5, 0.8, 3.0, 1e6])
    value = lambda r: 0.75**2 * formula(np.asarray(r) / 0.75)
    outputs, targets = jnp.asarray(residual + 2), jnp.full(residual.shape, 2.0)
    near = np.abs(residual) < 1e-2
    found = loss.elementwise(outputs, targets)
    np.testing.assert_allclose(found, value(residual), rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(found[near], residual[near] ** 2 / 2, rtol=1e-6)
    step = 1e-4
    ahead, here, behind = (value(residual + k * step) for k in (1, 0, -1))
    slope = loss.derivative(outputs, targets)
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), atol=1e-5)
    curvature = np.maximum((ahead - 2 * here + behind) / step**2, 0)
    root = loss.root(outputs, targets)
    np.testing.assert_allclose(root**2, curvature, atol=1e-4)
    assert slope[-1] < 1e-5 * residual[-1]


@pytest.mark.parametrize("name", [*FORGETTING, "huber", "pseudo-huber", "log-cosh"])
def test_the_curvature_of_steps_is_at_least_a_part_of_the_weight(name):
    """... of iteratively reweighted least squares."""
    kinds = {name: kind for name, (kind, _) in FORGETTING.items()}
    kinds |= {
        "huber": gnlin.losses.Huber,
        "pseudo-huber": gnlin.losses.PseudoHuber,
        "log-cosh": gnlin.losses.LogCosh,
    }
    residual = jnp.array([-1e4, -3.0, -0.7, -1e-3, 0.2, 0.8, 2.0, 60.0])
    here = residual, jnp.zeros(8)
    own = kinds[name](0.75, reweighted=0).root(*here) ** 2
    weight = kinds[name](0.75).derivative(*here) / residual
    for part in (0.05, 0.3, 1):
        root = kinds[name](0.75, reweighted=part).root(*here)
        np.testing.assert_allclose(root**2, np.maximum(own, part * weight), rtol=1e-12)
    np.testing.assert_array_equal(
        kinds[name](0.75).root(*here), kinds[name](0.75, reweighted=0.05).root(*here)
    )


@pytest.mark.slow
def test_the_first_steps_are_reweighted_and_the_last_ones_are_newtons():
    """From a start with large residuals, a line is fitted by reweighted steps until these
    are slow; then the part of the weights is halved at each step."""
    x = np.linspace(0.0, 1.0, 40)
    y = 2 + 3 * x + 0.1 * np.random.default_rng(0).normal(size=40)
    y[::7] += 30.0
    line = lambda p, _: p[0] + p[1] * x - y

    def run(max_steps, **options):
        group = gnlin.Residuals(line, loss=gnlin.losses.Huber(0.1, **options))
        start, solver = jnp.array([1e3, -1e3]), gnlin.GaussNewton(search=None)
        return gnlin.solve(start, group, solver, max_steps=max_steps, throw=False)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        ours, first, always = run(60), run(4, reweighted=1), run(60, reweighted=1)
    np.testing.assert_allclose(ours.history.loss[:4], first.history.loss, rtol=1e-9)
    assert ours.result == optx.RESULTS.successful
    assert len(ours.history.loss) < len(always.history.loss)
    known = scipy.optimize.minimize(
        lambda p: np.sum(scipy.special.huber(0.1, line(p, None))),
        np.array([2.0, 3.0]),
        method="Nelder-Mead",
        options={"xatol": 1e-9, "fatol": 1e-13},
    )
    np.testing.assert_allclose(ours.loss, known.fun, rtol=1e-9)


class Constant(gnlin.authoring.AbstractElementwiseLoss):
    """A loss that does not depend on the outputs."""

    constant: jax.Array
    reduction: str | None = None

    def elementwise(self, output, target):
        return self.constant + 0 * output


@functools.partial(jax.jit, static_argnames="reweighted")
def line_and_constant(x, y, constant, **options):
    """Fit a line with outliers, beside a constant part of the loss."""
    loss = gnlin.losses.Isotropic(gnlin.losses.Huber(0.1, **options))
    line = lambda p, d: (p[0] + p[1] * d[0] - d[1])[None]
    groups = {
        "line": gnlin.Residuals(line, (x, y), loss=loss),
        "constant": gnlin.Residuals(lambda p, _: p[:1], loss=Constant(constant)),
    }
    start, solver = jnp.array([1e3, -1e3]), gnlin.LevenbergMarquardt()
    solution = optx.least_squares(gnlin.Groups(groups), solver, start, throw=False)
    return solution.value, solution.result, solution.stats["num_steps"]


lines_and_constant = jax.jit(jax.vmap(line_and_constant, (None, 0, None)))


@pytest.mark.slow
@pytest.mark.parametrize("constant", [0.0, -1e3])
def test_the_part_of_the_weights_fades_in_each_run(constant):
    """... of many at once, of groups, of vectors' lengths, and of losses below zero."""
    x = np.linspace(0.0, 1.0, 30)
    ys = 0.1 * np.random.default_rng(0).normal(size=(4, 30)) + (2 + 3 * x)[None]
    ys[:, ::7] += 30.0
    values, results, numbers_of_steps = lines_and_constant(x, ys, constant)
    assert np.all(results == optx.RESULTS.successful)
    for k, y in enumerate(ys):
        one, _, num_steps = line_and_constant(x, y, constant)
        always, _, most_steps = line_and_constant(x, y, constant, reweighted=1)
        np.testing.assert_allclose(values[k], one, rtol=1e-6)
        np.testing.assert_allclose(one, always, rtol=1e-6)
        assert numbers_of_steps[k] == num_steps
        assert num_steps < most_steps


def test_an_outlier_whose_square_overflows():
    outputs = jnp.asarray([1e20, -1e20], jnp.float32)
    found = gnlin.losses.Cauchy().elementwise(outputs, jnp.zeros_like(outputs))
    np.testing.assert_allclose(found, math.log(1e20), rtol=1e-6)


@pytest.mark.parametrize("name", FORGETTING)
def test_redescending_losses_need_a_scale(name):
    with pytest.raises(ValueError, match="`delta` must be greater than 0"):
        FORGETTING[name][0](0.0)


def test_the_delta_of_a_loss_within_a_model_is_not_trained():
    class Model(eqx.Module):
        weight: jax.Array
        loss: gnlin.losses.Huber

        def __call__(self, x):
            return self.loss.elementwise(self.weight * x, jnp.zeros_like(x))

    loss = gnlin.losses.Huber(0.5)
    assert hash(loss) == hash(gnlin.losses.Huber(0.5))
    x = jnp.linspace(0.0, 1.0, 5)
    start, solver = Model(jnp.ones(()), loss), gnlin.DampedGaussNewton(1.0)
    model = gnlin.solve(start, (x, x), solver, loss=loss, max_steps=1).model
    assert model.weight != 1
    assert model.loss.delta == 0.5


@pytest.mark.slow
def test_delta_is_a_number_like_any_other():
    """Another delta compiles nothing, many are one call, and it has a derivative."""
    of_delta, solver = gnlin.losses.Cauchy, gnlin.GaussNewton(rtol=1e-12)
    x = jnp.linspace(0.0, 2.0, 20)
    y = 2 * jnp.exp(-x) + 2.0 * (np.arange(20) == 3)

    def found(delta):
        fn = lambda p, d: p[0] * jnp.exp(-p[1] * d[0]) - d[1]
        group = gnlin.Residuals(fn, (x, y), loss=of_delta(delta))
        return optx.least_squares(group, solver, jnp.array([1.5, 0.7])).value

    def solved(delta):
        pair, damped = (line, jnp.ones(2)), gnlin.DampedGaussNewton(0.1)
        return gnlin.solve(pair, (x, y), damped, loss=of_delta(delta), max_steps=3).model

    line = lambda p, x: p[0] + p[1] * x
    one = solved(0.1)[1]
    assert num_compiled(lambda: solved(0.2)) == 0
    both = jax.vmap(lambda delta: solved(delta)[1])(jnp.array([0.1, 0.2]))
    np.testing.assert_allclose(both, [one, solved(0.2)[1]], rtol=1e-6)
    assert np.all(np.isnan(jax.jit(lambda d: of_delta(d).elementwise(x, y))(-1.0)))

    step = 1e-5
    both = jax.jit(lambda delta: jax.jvp(found, (delta,), (1.0,)))
    expected = (both(0.3 + step)[0] - both(0.3 - step)[0]) / (2 * step)
    np.testing.assert_allclose(both(0.3)[1], expected, rtol=1e-5)


@pytest.mark.slow
def test_factors_of_many_columns_at_once():
    """With more than 32,768 numbers in single precision, jax 0.10.2, which is excluded,
    computes sums of products wrongly."""
    num_examples, num_classes, num_columns = 100, 10, 40
    rng = np.random.default_rng(0)
    outputs, columns = (
        rng.normal(size=(*shape, num_examples, num_classes)).astype(np.float32)
        for shape in ((), (num_columns,))
    )
    isotropic = gnlin.losses.Isotropic(gnlin.losses.PseudoHuber(DELTA, reweighted=0))
    for loss, targets in (
        (gnlin.SoftmaxCrossEntropy(), np.arange(num_examples) % num_classes),
        (isotropic, np.zeros_like(outputs)),
    ):

        def product(outputs, columns, loss=loss, targets=targets):
            factors = jax.vmap(loss.factor)(outputs, jnp.asarray(targets))
            of_one = lambda column: jax.vmap(lambda r, v: r.mv(v))(factors, column)
            return jax.vmap(of_one)(columns)

        exact = product(jnp.asarray(outputs, float), jnp.asarray(columns, float))
        found = as_for_users(product)(outputs, columns)
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5)


def test_effective_number_of_examples():
    labels = jnp.array([0, 0, 1, -1])
    outputs = jax.ShapeDtypeStruct((4, 2), float)

    def number(weights=None, **options):
        loss = gnlin.SoftmaxCrossEntropy(**options)
        return BatchLoss(loss, outputs, labels, weights).num_examples()

    for reduction in ("sum", "mean"):
        ignores = {"ignore_index": -1, "reduction": reduction}
        assert number(**ignores) == pytest.approx(3)
        weighted = number(class_weights=[1.0, 4.0], **ignores)
        assert weighted == pytest.approx((1 + 1 + 4) ** 2 / (1 + 1 + 16))
        assert number(jnp.array([1.0, 1.0, 4.0, 9.0]), **ignores) == weighted
        assert number(jnp.zeros(4), **ignores) == 1  # not zero, by which one divides


def test_the_largest_group_gives_the_number_of_examples():
    shapes = {"few": (2, 1), "many": (7, 1)}
    parts = {
        name: BatchLoss(
            gnlin.SquaredError(), jax.ShapeDtypeStruct(shape, float), jnp.zeros(shape)
        )
        for name, shape in shapes.items()
    }
    assert GroupLoss(parts=parts, is_sample=True).num_examples() == 7
