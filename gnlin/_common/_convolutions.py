"""Convolutions that are as fast inside a compiled loop as outside, on a CPU.

XLA's fast routine takes convolutions with channels last, and XLA changes to this layout
only in a program's outermost computation. Elsewhere it uses plain scalar loops
(https://github.com/jax-ml/jax/issues/12868). This module rewrites convolutions, and their
derivatives, in that layout.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun, JaxprEqn, primitives
from jaxtyping import Array

from ._cost import primitives_of


def channels_last(fn: Callable) -> Callable:
    """Rewrite a function of pytrees of arrays so that convolutions have channels last.

    Its values and derivatives stay the same. Functions are rewritten only on a CPU. There
    six products through a small network, in a loop, take as long as 4 to 6 gradients
    instead of 17 to 100 (four networks, 128 images each).
    """

    @functools.wraps(fn)
    def run(*args):
        if jax.default_backend() != "cpu":
            return fn(*args)
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        jaxpr = closed.jaxpr
        if primitives.conv_general_dilated_p in primitives_of(jaxpr):
            jaxpr = _rewritten(jaxpr)
        outs = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), map(jnp.asarray, outs))

    return run


def _rewritten(jaxpr: Jaxpr) -> Jaxpr:
    return jaxpr.replace(eqns=[_equation(equation) for equation in jaxpr.eqns])


def _equation(equation: JaxprEqn) -> JaxprEqn:
    params = equation.params
    if equation.primitive is not primitives.conv_general_dilated_p:
        params = {name: _within(value) for name, value in params.items()}
        return equation.replace(params=params)
    dimensions = params["dimension_numbers"]
    specs = dimensions.lhs_spec, dimensions.rhs_spec, dimensions.out_spec
    if specs == _last(len(dimensions.lhs_spec)) and not _crops(params):
        return equation
    avals: list[Any] = [x.aval for x in equation.invars]
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    convolve = jax.jit(functools.partial(_convolve, params))
    (call,) = jax.make_jaxpr(convolve)(*operands).eqns
    return call.replace(invars=equation.invars, outvars=equation.outvars)


def _within(value: Any) -> Any:
    """Rewrite all programs in a parameter of an equation."""
    if isinstance(value, ClosedJaxpr):
        return ClosedJaxpr(_rewritten(value.jaxpr), value.consts)
    if isinstance(value, Jaxpr):
        return _rewritten(value)
    if type(value) in (tuple, list):
        return type(value)(map(_within, value))
    return value


def _crops(params: dict[str, Any]) -> bool:
    return any(low < 0 or high < 0 for low, high in params["padding"])


def _last(ndim: int) -> tuple[tuple[int, ...], ...]:
    """Return the axes of the images, the kernel and the output with channels last: for
    each the batch (of a kernel, output channels), the channels, and the other axes."""
    others = range(1, ndim - 1)
    images = (0, ndim - 1, *others)
    return images, (ndim - 1, ndim - 2, *range(ndim - 2)), images


def _convolve(params: dict[str, Any], images: Array, kernel: Array) -> Array:
    dimensions = params["dimension_numbers"]
    of_images, of_kernel, _ = _last(images.ndim)
    images = images.transpose(_inverse(of_images, dimensions.lhs_spec))
    kernel = kernel.transpose(_inverse(of_kernel, dimensions.rhs_spec))
    params = params | {
        "dimension_numbers": jax.lax.ConvDimensionNumbers(of_images, of_kernel, of_images)
    }
    if _crops(params):
        # Crop before the convolution: with negative padding XLA's routine reads outside
        # of the images (https://github.com/openxla/xla/issues/48713).
        edges = zip(params["padding"], params["lhs_dilation"], strict=True)
        cropped = [(min(low, 0), min(high, 0), d - 1) for (low, high), d in edges]
        whole = (0, 0, 0)
        images = jax.lax.pad(
            images, jnp.zeros((), images.dtype), [whole, *cropped, whole]
        )
        params["padding"] = [(max(a, 0), max(b, 0)) for a, b in params["padding"]]
        params["lhs_dilation"] = [1] * len(cropped)
    out = jax.lax.conv_general_dilated(images, kernel, **params)
    return jnp.transpose(out, _inverse(dimensions.out_spec, of_images))


def _inverse(new: tuple[int, ...], old: tuple[int, ...]) -> list[int]:
    """Return the permutation that moves the axes `old` to the axes `new`."""
    return [old[k] for k in np.argsort(new)]
