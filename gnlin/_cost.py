"""What a function costs, counted on its program, before it is compiled."""

import math

import jax
from jaxtyping import PyTree


def num_flops(fn, *args: PyTree) -> float:
    """Multiplications and additions of one call: of matrix products and convolutions
    twice their multiplications, of everything else one an element."""
    return _of_jaxpr(jax.make_jaxpr(fn)(*args).jaxpr)


def loops_slowly(fn, *args: PyTree) -> bool:
    """Whether a function is many times slower inside a loop: XLA's convolutions are, on a
    CPU, where they take fourteen times as long in a `while` as outside (jax 0.10)."""
    return jax.default_backend() == "cpu" and _convolves(jax.make_jaxpr(fn)(*args).jaxpr)


def _convolves(jaxpr) -> bool:
    return any(
        equation.primitive.name == "conv_general_dilated"
        or any(map(_convolves, _inner_jaxprs(equation.params)))
        for equation in jaxpr.eqns
    )


def _of_jaxpr(jaxpr) -> float:
    return sum((_of_equation(equation) for equation in jaxpr.eqns), 0.0)


def _of_equation(equation) -> float:
    inner = [_of_jaxpr(jaxpr) for jaxpr in _inner_jaxprs(equation.params)]
    if inner:
        return sum(inner) * equation.params.get("length", 1)  # of a scan
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


def _inner_jaxprs(params) -> list:
    found = []
    for value in params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(part, "jaxpr", part)
            if hasattr(jaxpr, "eqns"):
                found.append(jaxpr)
    return found
