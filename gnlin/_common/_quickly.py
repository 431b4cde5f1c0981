"""Programs that take longer to compile than to run."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp


# Options that select the older of XLA's two CPU emitters, which halves the compilation.
# Curves, a thousand of them at once, and small networks run as fast; a step of a
# convolutional or recurrent network on a batch takes up to a third longer.
_EMITTERS = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# With few of LLVM's optimisations the compilation takes a tenth less time, and runs take
# as long as with all.
_FEW_PASSES = {
    "xla_backend_optimization_level": 1,
    "xla_llvm_disable_expensive_passes": True,
}
# Without any, the compilation takes half the time, and arithmetic on large arrays takes
# three times as long.
_NO_PASSES = _FEW_PASSES | {"xla_backend_optimization_level": 0}
# XLA spends a sixth of the compilation on moving invariant code out of loops, and a half
# if the function has loops of its own, such as the solution of a differential equation.
_LOOPS = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}


def quickly(fn: Callable, *, has_loops: bool = False, is_brief: bool = False) -> Callable:
    """Return `fn` compiled by options of XLA that shorten the compilation, where this
    version of XLA knows them.

    - `has_loops`: whether `fn` may have loops within the loop of a solver.
    - `is_brief`: whether `fn` computes so few numbers that optimisations take longer than
        they save.
    """
    plain = eqx.filter_jit(fn)

    @functools.cache
    def quick() -> Callable:  # asks for the backend, which must not happen at the import
        passes = few_passes()
        options = _EMITTERS | (_NO_PASSES if is_brief and passes else passes)
        if has_loops or is_brief:
            options |= _LOOPS
        settings: Any = {"compiler_options": options}
        return eqx.filter_jit(fn, **settings)

    @functools.wraps(fn)
    def call(*args):
        if not are_known():
            return plain(*args)
        try:
            return quick()(*args)
        except ValueError as error:
            if "compiler_options" not in str(error):
                raise
            # JAX rejects compiler options in an inner program, which this is if `fn`
            # closes over traced values.
            return plain(*args)

    return call


def few_passes() -> dict[str, bool | int]:
    """Return XLA's options for few optimisations by LLVM, if the device is a CPU, on
    which they were measured, this version of XLA knows them, and JAX is not set to make
    fewer."""
    on_cpu = jax.default_backend() == "cpu"
    fewer = jax.config.read("jax_disable_most_optimizations")
    return dict(_FEW_PASSES) if on_cpu and not fewer and are_known() else {}


@functools.cache
def are_known() -> bool:
    """Whether this version of XLA accepts the options."""
    try:
        options = _EMITTERS | _LOOPS | _FEW_PASSES
        jax.jit(jnp.negative, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
