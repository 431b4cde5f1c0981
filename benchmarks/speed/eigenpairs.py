"""The largest eigenpairs of a kernel by products alone, beside ARPACK and LOBPCG."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse.linalg import lobpcg_standard
from jaxtyping import Array, Float
from scipy.sparse.linalg import eigsh, LinearOperator

import gnlin

from ..data import digits
from .report import Comparison, Figure, Row, timed_row
from .task import in_double
from .timing import alternate, Case


TOLERANCE = 1e-5
LOBPCG_TOLERANCE = 1e-10
"""LOBPCG stops by another rule. With this tolerance it reaches the same residual."""
MOST_AT_ONCE = 20
"""LOBPCG is run for at most this many eigenpairs, because each of its iterations makes a
product for every one."""


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """Images of digits, with ten outputs each, and a network with two hidden layers."""

    num_images: int
    width: int
    num_pairs: int

    def linearised(self) -> gnlin.Linearisation:
        model = eqx.nn.MLP(64, digits.NUM_CLASSES, self.width, 2, key=jax.random.key(0))
        (images, _), _ = digits.classification()
        images = jnp.asarray(images[: self.num_images])
        return eqx.filter_jit(gnlin.features.linearise_model)(in_double(model), images)


LARGE, SMALL, QUICK = Setting(1000, 963, 100), Setting(200, 270, 20), Setting(20, 20, 4)


def comparisons(quick: bool) -> Iterator[Comparison]:
    for setting in (QUICK,) if quick else (SMALL, LARGE):
        lin = setting.linearised()
        m, p = lin.shape
        rows, products = of_kernel(lin, setting.num_pairs, 1 if setting is LARGE else 3)
        what = f"products of gnlin over ARPACK's, {setting.num_pairs} eigenpairs"
        more = products["gnlin"] / products["SciPy"]
        figure = Figure(f"{what}, p = {p:,}", "< 2", None if quick else more)
        title = (
            f"The {setting.num_pairs} largest eigenpairs to {TOLERANCE:g}, "
            f"p = {p:,}, m = {m:,}"
        )
        yield Comparison(title, rows, "gnlin", figures=[figure])


@dataclasses.dataclass(frozen=True)
class Found:
    """Eigenvalues, eigenvectors in columns, and the number of products that they took."""

    eigenvalues: Float[Array, " k"]
    vectors: Float[Array, "m k"]
    num_products: int


def of_kernel(
    lin: gnlin.Linearisation, k: int, num_rounds: int
) -> tuple[list[Row], dict[str, int]]:
    """Return the rows, with gnlin's first, and the number of products of each library."""
    ways: dict[tuple[str, str], Callable[[], Found]] = {
        ("gnlin", "spectra.leading"): lambda: _ours(lin, k),
        ("SciPy", "eigsh (ARPACK)"): lambda: _arpack(lin, k),
    }
    if k <= MOST_AT_ONCE:
        ways["jax", "lobpcg_standard"] = lambda: _lobpcg(lin, k)
    cases, residuals, products = [], [], {}
    for (library, variant), way in ways.items():
        found = way()  # this also compiles
        products[library] = found.num_products
        residuals.append(worst_residual(lin, found))
        note = f"{found.num_products:,} products"
        run = lambda way=way: way().vectors
        cases.append(Case(library, variant, run, compile=lambda: None, note=note))
    timings = alternate(cases, num_rounds)
    return [
        dataclasses.replace(
            timed_row("leading eigenpairs", timing, timings[0]),
            linear_residual=residual,
            tolerance=TOLERANCE,
        )
        for timing, residual in zip(timings, residuals, strict=True)
    ], products


def worst_residual(lin: gnlin.Linearisation, found: Found) -> float:
    """Return the largest |K u - w u| / w, by new products."""
    images = jax.lax.map(lambda u: _product(lin, u), jnp.asarray(found.vectors).T).T
    left = np.asarray(images) - np.asarray(found.vectors) * np.asarray(found.eigenvalues)
    return float(np.max(np.linalg.norm(left, axis=0) / np.asarray(found.eigenvalues)))


@eqx.filter_jit
def _product(lin: gnlin.Linearisation, u: Float[Array, " m"]) -> Float[Array, " m"]:
    return lin.push_forward(lin.pull_back(u))


def _ours(lin: gnlin.Linearisation, k: int) -> Found:
    pairs = gnlin.spectra.leading(lin, k, tolerance=TOLERANCE)
    return Found(pairs.eigenvalues, pairs.on_outputs(), int(pairs.num_products))


def _arpack(lin: gnlin.Linearisation, k: int) -> Found:
    m, _ = lin.shape
    count = 0

    def product(u):
        nonlocal count
        count += 1
        return np.asarray(_product(lin, jnp.asarray(u.ravel())))

    operator: Any = LinearOperator((m, m), product, dtype=float)  # pyright: ignore
    start = np.random.default_rng(0).standard_normal(m)
    tolerance: Any = TOLERANCE
    w, u = eigsh(operator, k, tol=tolerance, v0=start)
    return Found(jnp.asarray(w[::-1]), jnp.asarray(u[:, ::-1]), count)


@eqx.filter_jit
def _lobpcg_program(lin, start):
    products = lambda x: jax.vmap(lambda u: _product(lin, u), 1, 1)(x)
    return lobpcg_standard(products, start, 200, LOBPCG_TOLERANCE)


def _lobpcg(lin: gnlin.Linearisation, k: int) -> Found:
    m, _ = lin.shape
    start = jax.random.normal(jax.random.key(0), (m, k))
    w, u, num_iterations = _lobpcg_program(lin, start)
    return Found(w, u, k * (int(num_iterations) + 1))
