"""Programs that take longer to compile than to run."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp


# Options that select the older of XLA's two CPU emitters, which halves the compilation.
# Curves and small networks run as fast; a step of a convolutional or recurrent network on
# a batch takes up to a third longer.
_EMITTERS = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# For a function with loops, such as the solution of a differential equation, XLA spends
# half of the compilation on moving invariant code out of nested loops.
_LOOPS = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}


def quickly(fn: Callable, *, has_loops: bool = False) -> Callable:
    """Return `fn` compiled by options of XLA that shorten the compilation, where this
    version of XLA knows them.

    - `has_loops`: whether `fn` may have loops within the loop of a solver.
    """
    plain, options = eqx.filter_jit(fn), _EMITTERS | (_LOOPS if has_loops else {})
    settings: Any = {"compiler_options": options}
    quick = eqx.filter_jit(fn, **settings)

    @functools.wraps(fn)
    def call(*args):
        if not are_known():
            return plain(*args)
        try:
            return quick(*args)
        except ValueError as error:
            if "compiler_options" not in str(error):
                raise
            # JAX rejects compiler options in an inner program, which this is if `fn`
            # closes over traced values.
            return plain(*args)

    return call


@functools.cache
def are_known() -> bool:
    """Whether this version of XLA accepts the options."""
    try:
        options = _EMITTERS | _LOOPS
        jax.jit(jnp.negative, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
