"""The operations and bytes per second that the device reaches, beside its peak."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

import gnlin

from .report import Comparison, Row
from .task import DAMPING, quintic, Task
from .timing import alternate, Case, Timing


class Peak(NamedTuple):
    """The maker's figures, without sparsity: operations per second in full precision, on
    the vector or matrix units that the dtype uses, and bytes per second."""

    float32: float
    float64: float
    bytes: float


PEAKS = {
    "NVIDIA H200": Peak(67e12, 67e12, 4.8e12),
    "NVIDIA H100 80GB HBM3": Peak(67e12, 67e12, 3.35e12),
    "NVIDIA A100-SXM4-80GB": Peak(19.5e12, 19.5e12, 2.04e12),
    "NVIDIA A100-SXM4-40GB": Peak(19.5e12, 19.5e12, 1.56e12),
    "Tesla V100-SXM2-32GB": Peak(15.7e12, 7.8e12, 0.9e12),
}


class Work(NamedTuple):
    """A program, with the operations and bytes of one call."""

    case: Case
    flops: float
    bytes: float


def comparisons(quick: bool) -> Iterator[Comparison]:
    (device,) = jnp.zeros(()).devices()
    large = device.platform != "cpu" and not quick
    size, width, num_outputs = (8192, 1825, 2000) if large else (1024, 182, 500)
    if quick:
        size, width, num_outputs = 128, 18, 20
    for dtype in (jnp.float32, jnp.float64):
        work = [
            product(size, dtype),
            copy(size, dtype),
            *of_gnlin(quintic(width, num_outputs), width, dtype),
        ]
        timings = alternate([one.case for one in work], 3 if quick else 7)
        rates = [_rates(one, timing) for one, timing in zip(work, timings, strict=True)]
        (flops, _), (_, num_bytes), *_ = rates
        reached = Peak(flops, flops, num_bytes)
        nominal = PEAKS.get(device.device_kind)
        rows = [
            _row(one, timing, rate, reached, nominal, dtype)
            for one, timing, rate in zip(work, timings, rates, strict=True)
        ]
        name = jnp.dtype(dtype).name
        yield Comparison(f"{device.device_kind}, {name}", rows, "a product")


def product(size: int, dtype) -> Work:
    a = jax.random.normal(jax.random.key(0), (size, size), dtype)
    multiply = jax.jit(lambda a: jnp.matmul(a, a, precision=jax.lax.Precision.HIGHEST))
    case = Case("jax", f"product of {size:,} x {size:,}", lambda: multiply(a))
    return Work(case, 2.0 * size**3, 3.0 * a.nbytes)


def copy(size: int, dtype) -> Work:
    x = jnp.zeros(16 * size**2, dtype)
    add = jax.jit(lambda x: x + 1)
    case = Case("jax", f"copy of {x.nbytes / 2**20:,.0f} MiB", lambda: add(x))
    return Work(case, float(x.size), 2.0 * x.nbytes)


def of_gnlin(task: Task, width: int, dtype) -> list[Work]:
    """Return the kernel by layers, and the damped step, for four hidden layers of one
    width."""
    cast = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)
    y, args = cast(task.parameters), cast(task.args)
    m, p = task.num_outputs, task.num_parameters
    # Count only the products: S S^T and A A^T of each layer, and two passes.
    kernel_flops = 2.0 * m**2 * (9 * width + 2) + 4.0 * m * p
    step_flops = kernel_flops + m**3 / 3 + 2.0 * m * p
    itemsize = jnp.dtype(dtype).itemsize
    kernel_bytes = itemsize * (2.0 * p + 10 * m * width + 20.0 * m**2)
    step_bytes = kernel_bytes + itemsize * (4.0 * p + 4.0 * m**2)
    residuals = task.per_example()

    @jax.jit
    def kernel(y, args):
        return gnlin.linearise(residuals, y, args).kernel()

    @jax.jit
    def step(y, args):
        lin = gnlin.linearise(residuals, y, args)
        damped = lin.kernel() + DAMPING * jnp.eye(m, dtype=dtype)
        factor = jax.scipy.linalg.cho_factor(damped)
        return lin.pull_back(jax.scipy.linalg.cho_solve(factor, lin.outputs.ravel()))

    name = f"p = {p:,}, m = {m:,}"
    return [
        Work(
            Case("gnlin", f"kernel, {name}", lambda: kernel(y, args)),
            kernel_flops,
            kernel_bytes,
        ),
        Work(
            Case("gnlin", f"damped step, {name}", lambda: step(y, args)),
            step_flops,
            step_bytes,
        ),
    ]


def _rates(work: Work, timing: Timing) -> tuple[float, float]:
    return work.flops / timing.median, work.bytes / timing.median


def _row(
    work: Work,
    timing: Timing,
    rate: tuple[float, float],
    reached: Peak,
    nominal: Peak | None,
    dtype,
) -> Row:
    flops, num_bytes = rate
    said = [
        f"{flops / 1e9:,.3g} GFLOP/s ({flops / reached.float32:.0%} of a product)",
        f"{num_bytes / 1e9:,.3g} GB/s ({num_bytes / reached.bytes:.0%} of a copy)",
    ]
    if nominal is not None:
        peak = getattr(nominal, jnp.dtype(dtype).name)
        said.append(
            f"of the device's peak {flops / peak:.0%} and {num_bytes / nominal.bytes:.0%}"
        )
    return Row(
        "device",
        work.case.library,
        work.case.variant,
        timing.median,
        compile_seconds=timing.compile_seconds,
        peak_bytes=timing.peak_bytes,
        note="; ".join(said),
    )
