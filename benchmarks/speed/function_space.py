"""Tangent kernels between two sets, predictions at many times, and the evidence."""

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import gnlin

from ..data import digits
from ..networks.cnn import digits_cnn
from .report import Comparison, Figure, find, Row, timed_row
from .timing import alternate, Case


NUM_IMAGES, SMALL_BUDGET = 1_000, 2**26
NUM_IN_FILE, WIDTH = 10_000, 256
NUM_TIMES, NUM_POINTS, NUM_NOISES = 1_000, 1_000, 50
_MIB = 2**20
_PRECISE = jax.lax.Precision.HIGHEST


def comparisons(quick: bool) -> Iterator[Comparison]:
    with jax.enable_x64(False):
        rows = of_digits(50 if quick else NUM_IMAGES, 2 if quick else 5)
        structured = find(rows, "jax", lambda row: row.variant.startswith("structured"))
        small = find(rows, "gnlin", lambda row: "budget" in row.variant)
        figures = [
            Figure(
                "structured derivatives by hand over the kernel, digits CNN, trace",
                ">= 3",
                None if quick else structured.ratio,
            ),
            Figure(
                "memory of these over that within a small budget",
                ">= 10",
                _quotient(structured.peak_bytes, small.peak_bytes, quick),
            ),
        ]
        title = f"Kernel of {NUM_IMAGES:,} x {NUM_IMAGES:,} digits, CNN, trace of 10"
        yield Comparison(title, rows, "gnlin", figures=figures)
        rows = to_file(500 if quick else NUM_IN_FILE)
        peak = rows[0].peak_bytes
        figure = Figure(
            f"GiB, kernel of {NUM_IN_FILE:,} x {NUM_IN_FILE:,} to a file",
            "< 1.5",
            None if quick or peak is None else peak / 2**30,
        )
        yield Comparison(
            "A kernel to a file, MLP, trace", rows, "gnlin", figures=[figure]
        )
        rows = of_predictions(100 if quick else NUM_POINTS, 2 if quick else 5)
        figures = [
            Figure(
                f"seconds, {NUM_TIMES:,} times on {NUM_POINTS:,} test points",
                "< 1",
                None if quick else rows[1].seconds,
            ),
            Figure(
                f"evidence and gradient at {NUM_NOISES} noises, in factorisations",
                "<= 1",
                None if quick else rows[2].ratio,
            ),
        ]
        title = f"Predictions from {NUM_POINTS:,} examples, MLP, single precision"
        yield Comparison(title, rows, "the factorisation", figures=figures)


def _quotient(a: int | None, b: int | None, quick: bool) -> float | None:
    return None if quick or a is None or not b else a / b


def of_digits(num_images: int, num_rounds: int) -> list[Row]:
    """Measure the kernel between two sets of images. The error is relative to the
    contracted Jacobians."""
    (images, _), (others, _) = digits.classification(flat=False)
    both = np.concatenate([images, others]).astype(np.float32)
    x1, x2 = jnp.asarray(both[:num_images]), jnp.asarray(both[-num_images:])
    model = digits_cnn(jax.random.key(0))
    kernel = gnlin.TangentKernel(model, outputs="trace")
    small = gnlin.TangentKernel(model, outputs="trace", memory_budget=SMALL_BUDGET)
    structured, contracted = _structured(model), _contracted(model)
    cases = [
        Case("gnlin", "kernel", lambda: kernel(x1, x2)),
        Case(
            "gnlin", f"in a budget of {SMALL_BUDGET // _MIB} MiB", lambda: small(x1, x2)
        ),
        Case("jax", "structured derivatives by hand", lambda: structured(x1, x2)),
        Case("jax", "Jacobians contracted", lambda: contracted(x1, x2)),
    ]
    timings = alternate(cases, num_rounds)
    exact = np.asarray(contracted(x1, x2), float)
    return [
        timed_row(
            "trace of the kernel",
            timing,
            timings[0],
            step_error=float(np.linalg.norm(timing.case.run() - exact))
            / float(np.linalg.norm(exact)),
        )
        for timing in timings
    ]


def _contracted(model: eqx.Module) -> Callable:
    """Contract the examples' Jacobians: Novak, Sohl-Dickstein and Schoenholz (2022),
    section 3.1."""
    parameters, static = eqx.partition(model, eqx.is_inexact_array)

    def rows(x):
        of = lambda parameters: eqx.combine(parameters, static)(x)
        leaves = jax.tree.leaves(jax.jacrev(of)(parameters))
        return jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], 1)

    @jax.jit
    def kernel(x1, x2) -> Float[Array, "n k"]:
        flat = lambda x: jax.vmap(rows)(x).reshape(len(x), -1)
        return jnp.matmul(flat(x1), flat(x2).T, precision=_PRECISE)

    return kernel


def _structured(model: Any) -> Callable:
    """Contract each layer's inputs and the signals that come back to it, in the order of
    products that takes the fewest operations: the same, section 3.3."""

    def layers(x):
        """Return the signals that come back to each layer, and its inputs as patches by
        position. A signal is the derivative by a zero that is added to the layer's
        outputs."""

        def forward(zeros):
            patches, h = [], x
            for convolution, zero in zip(model.convolutions, zeros, strict=False):
                patch = jax.lax.conv_general_dilated_patches(
                    h[None], (3, 3), (1, 1), "SAME"
                )
                patches.append(patch[0].reshape(patch.shape[1], -1).T)
                h = model.activation(convolution(h) + zero)
                c, height, width = h.shape
                h = h.reshape(c, height // 2, 2, width // 2, 2).max(axis=(2, 4))
            h = h.ravel()
            for k, linear in enumerate(model.dense):
                patches.append(h[None])
                h = linear(h) + zeros[len(model.convolutions) + k]
                h = h if linear is model.dense[-1] else model.activation(h)
            return h, patches

        size = 8
        zeros = []
        for convolution in model.convolutions:
            zeros.append(jnp.zeros((convolution.out_channels, size, size)))
            size //= 2
        zeros += [jnp.zeros(linear.out_features) for linear in model.dense]
        signals, patches = jax.jacrev(forward, has_aux=True)(zeros)
        return [s.reshape(*s.shape[:2], -1) for s in signals], patches

    contract = functools.partial(jnp.einsum, precision=_PRECISE, optimize="optimal")

    @jax.jit
    def kernel(x1, x2) -> Float[Array, "n k"]:
        (s1, a1), (s2, a2) = jax.vmap(layers)(x1), jax.vmap(layers)(x2)
        total = jnp.zeros((len(x1), len(x2)), x1.dtype)
        for s, a, z, b in zip(s1, a1, s2, a2, strict=True):
            total += contract("ncot,ntq,kuq,kcou->nk", s, a, b, z)
            # The bias is the weight of an input 1 at each position.
            total += contract("nco,kco->nk", jnp.sum(s, 3), jnp.sum(z, 3))
        return total

    return kernel


def to_file(num_examples: int) -> list[Row]:
    model = eqx.nn.MLP(64, 10, WIDTH, 2, key=jax.random.key(0))
    inputs = np.asarray(jax.random.normal(jax.random.key(1), (num_examples, 64)))
    kernel = gnlin.TangentKernel(model, outputs="trace")
    with tempfile.TemporaryDirectory() as folder:
        files = iter(Path(folder, f"{k}.npy") for k in range(100))
        run = lambda: kernel(inputs, file=next(files))[0]
        (timing,) = alternate([Case("gnlin", f"{num_examples:,} examples", run)], 1)
    return [timed_row("kernel to a file", timing, None)]


def of_predictions(n: int, num_rounds: int) -> list[Row]:
    keys = jax.random.split(jax.random.key(0), 3)
    model = eqx.nn.MLP(8, 1, 128, 2, activation=jnp.tanh, key=keys[0])
    inputs, test = (jax.random.normal(key, (n, 8)) for key in keys[1:])
    data = inputs, jnp.sin(inputs[:, :1])
    times = np.logspace(-4, 4, NUM_TIMES)
    predict = gnlin.predict.gradient_flow(model, data)
    posterior = gnlin.predict.posterior(model, data, noise=0.1)
    noises = jnp.logspace(-3, 1, NUM_NOISES)

    @eqx.filter_jit
    def evidence(posterior):
        of = jax.value_and_grad(lambda s: posterior.at(noise=s).log_evidence())
        return jax.vmap(of)(noises)

    made = lambda: gnlin.predict.gradient_flow(model, data).loss(0.0)
    cases = [
        Case("gnlin", "the factorisation", made),
        Case("gnlin", f"{NUM_TIMES:,} times", lambda: predict(test, times=times)),
        Case("gnlin", f"evidence at {NUM_NOISES}", lambda: evidence(posterior)),
        Case("gnlin", "mean and variance", lambda: posterior(test)),
    ]
    timings = alternate(cases, num_rounds)
    return [timed_row("predictions", timing, timings[0]) for timing in timings]
