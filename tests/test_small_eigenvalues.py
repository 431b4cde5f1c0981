"""Small eigenvalues of a spectrum: by default they are resolved up to ordinary sizes, and
a figure that they would change is not returned without a warning."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gnlin
from gnlin._linearisation._decompositions import default_method


EPS = float(np.finfo(np.float32).eps)


def singular(m, p, s):
    """Return a matrix with singular values s, in single precision."""
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(n, len(s))))[0] for n in (m, p))
    return jnp.asarray((u * s) @ v.T, jnp.float32)


def lin_of(matrix, **options):
    y = jnp.zeros(matrix.shape[1], matrix.dtype)
    return gnlin.linearise(lambda y, a: a @ y, y, matrix, **options)


def dimension(s, damping):
    return np.sum(s**2 / (s**2 + damping))


@pytest.mark.parametrize(
    ("m", "p"),
    [
        (72, 123),
        *(pytest.param(*n, marks=pytest.mark.slow) for n in [(123, 72), (200, 400)]),
    ],
)
def test_single_precision_resolves_small_eigenvalues(m, p):
    s = np.logspace(0, -3, min(m, p))
    spectrum = lin_of(singular(m, p, s)).spectrum()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(spectrum.condition_number(), 1e6, rtol=0.02)
        for damping in (1e-2, 1e-6, 0.0):
            found = spectrum.effective_dimension(damping)
            np.testing.assert_allclose(found, dimension(s, damping), rtol=1e-3)
        halves = spectrum.steps_to_half(0.5)
    expected = np.log(0.5) / np.log1p(-0.5 * s[1:] ** 2)
    np.testing.assert_allclose(halves[1:], expected, rtol=0.02)


def is_svd(lin):
    """Whether the default resolves an eigenvalue of 1e-8, between 1 and zero."""
    return int(jnp.sum(lin.spectrum().eigenvalues > 0)) == 2


def test_the_default_depends_on_precision_size_and_memory():
    matrix = singular(72, 123, np.array([1, 1e-4]))
    assert is_svd(lin_of(matrix))
    assert not is_svd(lin_of(matrix, memory_budget=30_000))
    few, many = (jnp.zeros((m, 2), jnp.float32) for m in (320, 120_000))
    wide = gnlin.linearise(
        lambda y, a: a @ (y @ many), jnp.zeros(120_000, np.float32), few
    )
    assert default_method(wide.jacobian) == "eigh"  # 1.2e10 multiplications
    double = np.asarray(matrix, np.float64) + 0.0
    u, _, vt = np.linalg.svd(double, full_matrices=False)
    double = jnp.asarray((u[:, :2] * [1, 1e-9]) @ vt[:2])
    assert not is_svd(lin_of(double)), "double precision keeps `eigh`"


@pytest.mark.parametrize(("m", "p"), [(72, 123), (123, 72)])
def test_figures_that_lost_eigenvalues_would_change_are_doubted(m, p):
    s = np.logspace(0, -3, 72)
    spectrum = lin_of(singular(m, p, s)).spectrum("eigh")
    lost = int(np.sum(np.asarray(spectrum.eigenvalues) == 0))
    assert lost > 0
    least = 72 * EPS
    doubted = rf"{lost} eigenvalues count as zero .* below {least:.2g} are unresolved"
    for damping in (0.0, 1e-6, 1e-5):
        with pytest.warns(UserWarning, match=doubted) as told:
            found = float(spectrum.effective_dimension(damping))
        assert found < 0.99 * dimension(s, damping)
        assert told[0].filename == __file__
        with pytest.warns(UserWarning, match="would change the condition number"):
            spectrum.condition_number(damping)
    with pytest.warns(UserWarning, match="number of steps infinite"):
        assert np.isinf(spectrum.steps_to_half(0.5)).any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for damping in (1e-2, 1e-1):
            found = spectrum.effective_dimension(damping)
            np.testing.assert_allclose(found, dimension(s, damping), rtol=1e-3)
            expected = (1 + damping) / (1e-6 + damping)
            np.testing.assert_allclose(
                spectrum.condition_number(damping), expected, rtol=1e-3
            )


@pytest.mark.parametrize("rank", [36, 72])
def test_figures_that_eigh_resolves_are_not_doubted(rank):
    s = np.logspace(0, -1, rank)
    spectrum = lin_of(singular(72, 123, s)).spectrum("eigh")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(spectrum.condition_number(), 100, rtol=1e-3)
        for damping in (0.0, 1e-7):
            found = spectrum.effective_dimension(damping)
            np.testing.assert_allclose(found, dimension(s, damping), rtol=1e-4)
        spectrum.steps_to_half(0.5)


@pytest.mark.slow
def test_figures_of_traced_and_infinite_spectra_have_no_warning():
    matrix = singular(72, 123, np.logspace(0, -3, 72))

    def figures(matrix, damping=0.0):
        spectrum = lin_of(matrix).spectrum("eigh")
        halves = spectrum.steps_to_half(0.5)
        known = spectrum.effective_dimension(damping)
        return known, spectrum.condition_number(damping), halves

    spectrum = lin_of(matrix).spectrum("eigh")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(figures)(matrix)
        jax.vmap(figures)(jnp.stack([matrix, 2 * matrix]))
        found = jax.vmap(spectrum.effective_dimension)(jnp.array([0.01, 0.1]))
        expected = [spectrum.effective_dimension(damping) for damping in (0.01, 0.1)]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert all(np.isnan(x).any() for x in figures(matrix.at[0, 0].set(jnp.inf))[:2])
        figures(jnp.zeros((72, 123), jnp.float32))
