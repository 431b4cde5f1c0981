"""Programs that take longer to compile than to run."""

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp


# Options that select the older of XLA's two CPU emitters: they halve the compilation and
# do not slow the run.
OPTIONS = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# For a function with loops, such as the solution of a differential equation, XLA spends
# half of the compilation on moving invariant code out of nested loops.
OF_LOOPS = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}


@functools.cache
def is_known() -> bool:
    """Whether this version of XLA accepts the options."""
    options = OPTIONS | OF_LOOPS
    try:
        jax.jit(jnp.negative, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def quickly(fn: Callable) -> Callable:
    """Compile a function with these options. It must not be called in another program."""

    @functools.cache
    def program() -> Callable:
        return eqx.filter_jit(fn, compiler_options=OPTIONS if is_known() else None)

    @functools.wraps(fn)
    def call(*args):
        return program()(*args)

    return call
