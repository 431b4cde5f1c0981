"""Set double precision, strict promotion and optional type checks before gnlin is
imported."""

import gc
import os
import pathlib


# Set this before SciPy is imported: BLAS threads of several workers wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Give XLA one thread, because the other cores run other tests. With as many threads as
# cores, jaxlib 0.10 and 0.11 may wait forever: each of two batched LAPACK calls occupies
# a thread, and waits for another one.
os.environ.setdefault("NPROC", "1")
# Most of the time goes into compiling, so skip most optimisations. With `0` XLA optimises
# as it does for users; .ci/run tests the core a second time in this way.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Recording the source location of each operation takes a twentieth of the time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Programs are not kept on disk, so do not compute the keys by which they would be found.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "0")
# Forbid implicit promotion of dtypes and ranks, because users may. An environment
# variable also reaches the processes that tests start; JAX's configuration would not.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")

import hypothesis
import jax
import jaxtyping
import pytest


quick = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0"
if quick and jax.__version_info__ < (0, 11):
    # XLA's older way of writing loops for the CPU compiles in a quarter of the time.
    # Compile each program as a whole, because the other cores run other tests. Moving
    # invariant code out of loops takes a tenth of the time. XLA aborts at an unknown
    # flag, so set the flags only where they are known.
    os.environ["XLA_FLAGS"] = (
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
        "--xla_disable_hlo_passes=while-loop-invariant-code-motion "
        + os.environ.get("XLA_FLAGS", "")
    )
jax.config.update("jax_enable_x64", True)
# The types and shapes of every call are checked only on request, because that takes a
# large part of the time. `.ci/run` requests it for the core.
if os.environ.get("GNLIN_TYPECHECK") == "1":
    jaxtyping.install_import_hook("gnlin", "beartype.beartype")

# Use the same examples in each run, so that only a change of the code can cause a
# failure.
hypothesis.settings.register_profile(
    "gnlin", deadline=None, derandomize=True, max_examples=15, database=None
)
hypothesis.settings.load_profile("gnlin")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each worker whole files, so that its tests share compiled programs."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection_finish():
    """Collect garbage less often. JAX's tracing makes many objects but little garbage,
    and would spend a sixth of its time on looking for it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture
def unchecked():
    """Disable the type checks, so that gnlin's own checks meet a value of a wrong
    type."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# Linux allows a process 65,530 memory mappings.
_MANY_MAPPINGS = 15_000


@pytest.fixture(autouse=True, scope="module")
def forgotten():
    """Clear the compilation caches from time to time. Each program keeps some memory
    mappings, and XLA crashes when it gets no more."""
    yield
    mappings = pathlib.Path("/proc/self/maps")
    if not mappings.exists() or mappings.read_bytes().count(b"\n") > _MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()
