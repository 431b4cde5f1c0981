"""The kernel of convolutional networks, beside rows of the Jacobian; its memory."""

from collections.abc import Callable, Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

import gnlin

from ..data import digits
from ..networks.cnn import digits_cnn
from ..networks.resnet import resnet18
from .report import Comparison, Figure, find, Row, timed_row
from .task import cast
from .timing import alternate, Case


NUM_DIGITS = 200
NUM_IMAGES = 64
CHUNK = 250
_GIB = 2**30


def comparisons(quick: bool) -> Iterator[Comparison]:
    num_images = 20 if quick else NUM_DIGITS
    for dtype in (jnp.float32, jnp.float64):
        (images, _), _ = digits.classification(flat=False)
        images = jnp.asarray(images[:num_images], dtype)
        model = cast(digits_cnn(jax.random.key(0)), dtype)
        rows = of_digits(model, images, 3 if quick else 5)
        m = 10 * num_images
        passes = find(rows, "jax", lambda row: row.variant.startswith("m reverse"))
        figure = Figure(
            f"m reverse passes over the kernel, digits CNN, m = {m:,}, {dtype.__name__}",
            ">= 10",
            passes.ratio,
        )
        title = f"Kernel of the digits CNN, p = 6,090, m = {m:,}, {dtype.__name__}"
        yield Comparison(title, rows, "gnlin", figures=[figure])
    width, num_images = (4, 2) if quick else (64, NUM_IMAGES)
    rows = of_resnet(width, num_images)
    peak = rows[0].peak_bytes
    figure = Figure(
        "GiB, kernel of ResNet-18, 64 images of 10 outputs",
        "< 6",
        None if quick or peak is None else peak / _GIB,
    )
    title = f"Kernel of ResNet-18, width {width}, {num_images} images, float32"
    yield Comparison(title, rows, "gnlin", figures=[figure])


def of_digits(model: eqx.Module, images: Array, num_rounds: int) -> list[Row]:
    parameters, network = _network(model)
    compiled = {
        ("gnlin", "kernel"): jax.jit(_kernel(network)),
        ("jax", "jacrev of each example, J J^T"): jax.jit(_per_example(network)),
        ("jax", f"m reverse passes, {CHUNK} at once, J J^T"): _all_rows(network),
    }
    cases = [
        Case(*name, lambda way=way: way(parameters, images))
        for name, way in compiled.items()
    ]
    timings = alternate(cases, num_rounds)
    exact = np.asarray(cases[1].run(), float)
    return [
        timed_row(
            "kernel of the digits CNN",
            timing,
            timings[0],
            step_error=float(np.linalg.norm(timing.case.run() - exact))
            / float(np.linalg.norm(exact)),
        )
        for timing in timings
    ]


def of_resnet(width: int, num_images: int) -> list[Row]:
    """Measure the kernel, and its error in a few rows, each of which is computed by
    passes through the whole batch."""
    model = resnet18(jax.random.key(0), normalise=False, width=width)
    parameters, network = _network(model)
    images = jax.random.normal(jax.random.key(1), (num_images, 3, 32, 32))
    images = images.astype(jnp.float32)
    parameters = jax.tree.map(lambda x: x.astype(jnp.float32), parameters)
    kernel = jax.jit(_kernel(network))
    (timing,) = alternate(
        [Case("gnlin", "kernel", lambda: kernel(parameters, images))], 1
    )
    some = np.linspace(0, 10 * num_images - 1, 3).astype(int)
    exact = np.asarray(_some_rows(network)(parameters, images, some))
    error = np.linalg.norm(np.asarray(timing.case.run())[some] - exact)
    relative = float(error) / float(np.linalg.norm(exact))
    return [timed_row("kernel of ResNet-18", timing, timing, step_error=relative)]


def _network(model):
    parameters, frozen = eqx.partition(model, eqx.is_inexact_array)
    return parameters, lambda parameters, x: eqx.combine(parameters, frozen)(x)


def _kernel(network: Callable) -> Callable:
    fn = gnlin.PerExample(network)
    return lambda parameters, images: gnlin.linearise(fn, parameters, images).kernel()


def _per_example(network: Callable) -> Callable:
    def kernel(parameters, images) -> Float[Array, "m m"]:
        flat, unravel = ravel_pytree(parameters)
        rows = jax.vmap(jax.jacrev(lambda v, x: network(unravel(v), x)), (None, 0))
        jacobian = rows(flat, images).reshape(-1, flat.size)
        return jacobian @ jacobian.T

    return kernel


def _all_rows(network: Callable) -> Callable:
    """Return a kernel from rows in chunks. All m rows at once would take tens of GiB, and
    a compiled loop would slow down the convolutions."""

    @jax.jit
    def rows(parameters, images, units):
        flat, unravel = ravel_pytree(parameters)

        def outputs(v):
            return jax.vmap(lambda x: network(unravel(v), x))(images).ravel()

        _, pull = jax.vjp(outputs, flat)
        return jax.vmap(lambda unit: pull(unit)[0])(units)

    product = jax.jit(lambda *rows: jnp.concatenate(rows) @ jnp.concatenate(rows).T)

    def kernel(parameters, images) -> Float[Array, "m m"]:
        units = np.eye(10 * len(images), dtype=images.dtype)
        chunks = np.split(units, range(CHUNK, len(units), CHUNK))
        return product(*[rows(parameters, images, chunk) for chunk in chunks])

    return kernel


def _some_rows(network: Callable) -> Callable:
    """Return a function that computes some rows of the kernel, one after the other,
    through the whole batch."""

    @jax.jit
    def rows(parameters, images, indices):
        def outputs(parameters):
            return jax.vmap(lambda x: network(parameters, x))(images).ravel()

        values, push = jax.linearize(outputs, parameters)
        pull = jax.linear_transpose(push, parameters)
        units = jax.nn.one_hot(indices, values.size, dtype=values.dtype)
        return jnp.stack([push(*pull(unit)) for unit in units])

    return lambda parameters, images, some: rows(parameters, images, tuple(some.tolist()))
