"""Complex numbers: groups split them into real and imaginary parts, and whatever takes a
vector of real numbers refuses them."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
import scipy.optimize as so

import gnlin


W = np.logspace(-1, 2, 30)
NOISE = np.random.default_rng(0).normal(size=(2, 30))
Z = 2 / (1 + 0.3j * W) + 0.05 * (NOISE[0] + 1j * NOISE[1])
Z[4] += 2 + 1j
START = {"R": jnp.array(1.0), "t": jnp.array(0.1)}


@pytest.fixture(autouse=True)
def promotion():
    """Let the functions below mix real and complex numbers, as users do."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def curve(p, w):
    return p["R"] / (1 + 1j * w * p["t"])


def residual(p, example):
    return curve(p, example["w"]) - example["z"]


def known(v):
    return v[0] / (1 + 1j * W * v[1]) - Z


def huber(sizes):
    return np.sum(np.where(sizes < 0.1, sizes**2 / 2, 0.1 * (sizes - 0.05)))


HUBER = gnlin.losses.Huber(0.1)
LOSSES = {
    "squared": (gnlin.SquaredError(), lambda v: 0.5 * np.sum(np.abs(known(v)) ** 2)),
    "each part": (
        HUBER,
        lambda v: huber(np.abs(known(v).real)) + huber(np.abs(known(v).imag)),
    ),
    "modulus": (gnlin.losses.Isotropic(HUBER), lambda v: huber(np.abs(known(v)))),
}


def in_a_row(p):
    return np.array([p["R"], p["t"]])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(
            *case, marks=() if case == ("modulus", "targets") else pytest.mark.slow
        )
        for case in itertools.product(LOSSES, ["data", "targets", "at once"])
    ],
)
def test_complex_groups_minimise_the_loss_of_both_parts(name, kind):
    loss, objective = LOSSES[name]
    setting = {"xatol": 1e-10, "fatol": 1e-14, "maxiter": 4000}
    exact = so.minimize(objective, [1, 0.1], method="Nelder-Mead", options=setting)
    data = {"w": W, "z": Z}
    groups = {
        "data": gnlin.Residuals(residual, data, loss=loss),
        "targets": gnlin.Residuals(curve, W, targets=Z, loss=loss),
        "at once": gnlin.Residuals(lambda p, _: curve(p, W) - Z, loss=loss),
    }
    if kind == "at once":
        found = optx.least_squares(groups[kind], gnlin.LevenbergMarquardt(), START)
        np.testing.assert_allclose(in_a_row(found.value), exact.x, rtol=1e-7)
        return
    solution = gnlin.solve(START, groups[kind])
    np.testing.assert_allclose(in_a_row(solution.model), exact.x, rtol=1e-7)
    np.testing.assert_allclose(solution.history.loss[-1], exact.fun, rtol=1e-10)


@pytest.mark.slow
def test_complex_groups_have_the_errors_of_a_curve_fit():
    group = gnlin.Residuals(residual, {"w": W, "z": Z}, weight=4.0)
    other = gnlin.Residuals(lambda p, _: (p["R"] - 1.9) * (1 + 0j), weight=1e-12)
    solution = gnlin.solve(START, {"data": group, "other": other})
    assert solution.history["loss/data"][-1] == pytest.approx(
        2 * np.sum(np.abs(known(in_a_row(solution.model))) ** 2)
    )
    fit = gnlin.curve_fit(curve, W, Z, START, sigma=0.5, absolute_sigma=True)
    errors = gnlin.predict.covariance(gnlin.solve(START, group), group).standard_errors
    expected = in_a_row(fit.standard_errors)
    np.testing.assert_allclose(in_a_row(errors), expected, rtol=1e-8)
    lin = gnlin.features.linearise_model(fit.parameters, group)
    r, t = in_a_row(fit.parameters)
    slopes = np.stack([1 / (1 + 1j * W * t), -1j * W * r / (1 + 1j * W * t) ** 2], -1)
    exact = np.stack([slopes.real, slopes.imag], 1).reshape(60, 2)
    np.testing.assert_allclose(lin.matrix(), exact, atol=1e-12)


@pytest.mark.slow
def test_a_network_with_complex_residuals():
    net = eqx.nn.MLP(1, 2, 8, 1, jnp.tanh, key=jax.random.key(0))

    def waves(net, x):
        return jax.lax.complex(*net(x[None])) * jnp.exp(1j * x) - x

    def by_hand(net, x):
        return jnp.stack([waves(net, x).real, waves(net, x).imag])

    x = jnp.linspace(0, 1, 12)
    groups = gnlin.Residuals(waves, x), gnlin.Residuals(by_hand, x)
    one, other = (gnlin.features.linearise_model(net, group) for group in groups)
    np.testing.assert_allclose(one.kernel(), other.kernel(), atol=1e-12)
    setting = {"steps": 3, "batch_size": 4, "key": jax.random.key(1), "progress": False}
    ends = [gnlin.fit(net, group, **setting).history.loss for group in groups]
    np.testing.assert_allclose(*ends, rtol=1e-8)


def real_curve(p, w):
    return p["R"] * w + p["t"]


WRONG_GROUPS = {
    "only the targets": (real_curve, {"targets": Z}, "both complex or both real"),
    "only the residuals": (curve, {"targets": Z.real}, "both complex or both real"),
    "classes": (
        lambda p, w: curve(p, w) * jnp.ones(3),
        {"targets": np.zeros(30, int), "loss": gnlin.SoftmaxCrossEntropy()},
        "Labels must have the shape",
    ),
}


@pytest.mark.parametrize("name", WRONG_GROUPS)
def test_groups_that_mix_complex_and_real_numbers(name):
    fn, options, said = WRONG_GROUPS[name]
    with pytest.raises(ValueError, match=said):
        gnlin.solve(START, gnlin.Residuals(fn, W, **options))


A = jnp.array([[1.0, 2.0], [0.0, 1.0], [3.0, 1.0]])
E, V = jnp.array([1 + 5j, 2 - 3j, 3 + 1j]), jnp.array([1j, 1.0])
LIN = gnlin.linearise(lambda p, x: x @ p, jnp.zeros(2), A)


def line(p, x):
    return p * x


def fitted(**options):
    return gnlin.curve_fit(line, np.arange(3.0), np.arange(3.0) + 0.1, 1.0, **options)


def of_groups():
    group = gnlin.Residuals(lambda m, x: m["a"] @ x, A)
    return gnlin.features.linearise_model({"a": jnp.ones(2)}, group)


TAKE_A_VECTOR = {
    "with_outputs": lambda: LIN.with_outputs(E),
    "call": lambda: LIN(V),
    "jvp": lambda: LIN.jvp(V),
    "vjp": lambda: LIN.vjp(E),
    "push_forward": lambda: LIN.push_forward(V),
    "pull_back": lambda: LIN.pull_back(E),
    "traced": lambda: jax.jit(lambda e: LIN.pull_back(e))(E),
    "in memory, jvp": lambda: LIN.materialise().jvp(V),
    "in memory, vjp": lambda: LIN.materialise().vjp(E),
    "in memory, push_forward": lambda: LIN.materialise().push_forward(V),
    "in memory, pull_back": lambda: LIN.materialise().pull_back(E),
    "operator": lambda: LIN.jacobian.mv(V),
    "groups, jvp": lambda: of_groups().jvp({"a": V}),
    "groups, pull_back": lambda: of_groups().pull_back(E),
    "with_residual": lambda: LIN.spectrum().with_residual(E),
    "project": lambda: LIN.spectrum().project(E),
    "shares": lambda: LIN.spectrum().shares(E),
    "lift": lambda: LIN.spectrum("svd").lift(V),
    "lift, eigh": lambda: LIN.spectrum("eigh").lift(V),
    "leading": lambda: gnlin.spectra.leading(LIN, 2).spectrum(E),
    "leading, project": lambda: gnlin.spectra.leading(LIN, 2).spectrum().project(E),
    "target_alignment": lambda: gnlin.features.target_alignment(
        jnp.ones((3, 1, 3, 1)), E[:, None]
    ),
    "loss": lambda: gnlin.losses.Huber(1.0).value(jnp.ones(3), E),
    "trials": lambda: gnlin.losses.BinomialNLL(E),
    "covariance": lambda: fitted(sigma=1j * np.eye(3)),
    "sigma in parts": lambda: fitted(sigma=E, in_parts=True),
    "sigma_x": lambda: fitted(sigma=1.0, sigma_x=E),
    "sparsity": lambda: gnlin.Sparsity(lambda y, _: y * 1j, jnp.ones(3)),
}


@pytest.mark.parametrize("name", TAKE_A_VECTOR)
def test_complex_vectors_are_refused(name):
    with pytest.raises(ValueError, match="must be real: split complex numbers"):
        TAKE_A_VECTOR[name]()


def test_a_complex_problem_in_its_parts_has_the_complex_solution():
    parts = jnp.stack([E.real, E.imag])
    lin, filter = LIN.spectrum(), gnlin.filters.Tikhonov(0.1)
    steps = [lin.with_residual(part).step(filter) for part in parts]
    exact = np.linalg.solve(A.T @ A + 0.1 * np.eye(2), -A.T @ E)
    np.testing.assert_allclose(steps[0] + 1j * steps[1], exact, rtol=1e-12)
