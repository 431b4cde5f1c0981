"""Estimates of run time: operations are counted in programs before compilation, and
converted to seconds by a table of measured rates."""

import math
from typing import NamedTuple

import jax
from jax.extend.core import Jaxpr, Primitive


class Factorisation(NamedTuple):
    """Seconds for factorising an n x n matrix: call + square n^2 + cube n^3."""

    call: float
    square: float
    cube: float

    def __call__(self, n: int) -> float:
        return self.call + self.square * float(n) ** 2 + self.cube * float(n) ** 3


class Rates(NamedTuple):
    """Seconds that a machine takes.

    - `product`: for an operation in a product of large matrices.
    - `passed`: for an operation in a pass through a network.
    - `step`: for the overhead of one iteration of a loop.
    - `gathered`: a factor for operations in passes that gather few parameters.
    - `cholesky`, `eigh`, `svd`: for the factorisation of a square matrix.
    - `accuracy`: what accurate small singular values are worth, where no damping hides
        them.
    """

    product: float
    passed: float
    step: float
    gathered: float
    cholesky: Factorisation
    eigh: Factorisation
    svd: Factorisation
    accuracy: float


# Measured by `python -m benchmarks speed costs` in double precision, "cpu" on a processor
# with two cores, "gpu" on an H100. Only the ratios matter, and only roughly.
_RATES = {
    "cpu": Rates(
        product=1.1e-11,
        passed=2.5e-11,
        step=1e-5,
        gathered=25.0,
        cholesky=Factorisation(1.5e-5, 1e-8, 1.7e-11),
        eigh=Factorisation(3e-5, 1.2e-7, 1.3e-10),
        svd=Factorisation(3e-5, 2.5e-7, 2.5e-10),
        accuracy=3.0,
    ),
    "gpu": Rates(
        product=1.8e-14,
        passed=1.7e-13,
        step=1.3e-5,
        gathered=1.0,
        cholesky=Factorisation(1e-4, 2.8e-10, 1e-14),
        eigh=Factorisation(7e-4, 8e-9, 0),
        svd=Factorisation(8e-4, 1.06e-7, 0),
        accuracy=0.05,
    ),
}


def rates() -> Rates:
    """Return the rates of the default platform."""
    return _RATES.get(jax.default_backend(), _RATES["gpu"])


def num_flops(jaxpr: Jaxpr) -> float:
    """Count the floating-point operations of one run: twice the multiplications of matrix
    products and convolutions, and one for each element of every other result."""
    return sum((_of_equation(equation) for equation in jaxpr.eqns), 0.0)


def primitives_of(jaxpr: Jaxpr) -> set[Primitive]:
    """Return all primitives of a program, and of the programs within it."""
    found = {equation.primitive for equation in jaxpr.eqns}
    inner = (inner_jaxprs(equation.params) for equation in jaxpr.eqns)
    return found.union(*(primitives_of(each) for every in inner for each in every))


def bytes_made(jaxpr) -> tuple[int, int]:
    """Return the bytes of all intermediate results of a program, and of the largest."""
    total, largest = 0, 0
    for equation in jaxpr.eqns:
        inner = [bytes_made(inner) for inner in inner_jaxprs(equation.params)]
        own = [v.aval.size * v.aval.dtype.itemsize for v in equation.outvars]
        made = equation.params.get("length", 1) * sum(x for x, _ in inner)
        total += made if inner else sum(own)
        largest = max([largest, *own, *(x for _, x in inner)])
    return total, largest


def _of_equation(equation) -> float:
    inner = [num_flops(jaxpr) for jaxpr in inner_jaxprs(equation.params)]
    if inner:
        return sum(inner) * equation.params.get("length", 1)  # the length of a scan
    size = sum(math.prod(v.aval.shape) for v in equation.outvars)
    match equation.primitive.name:
        case "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            return 2.0 * size * math.prod(shape[axis] for axis in contracted)
        case "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            out_axis = equation.params["dimension_numbers"].rhs_spec[0]
            return 2.0 * size * math.prod(kernel) / kernel[out_axis]
    return float(size)


def inner_jaxprs(params) -> list:
    found = []
    for value in params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(part, "jaxpr", part)
            if hasattr(jaxpr, "eqns"):
                found.append(jaxpr)
    return found
