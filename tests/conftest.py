"""Double precision, strict promotion, and type checks on request, before gnlin is
imported."""

import gc
import os
import pathlib


# Before SciPy is: the threads of several workers wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Most of the time goes into compiling. With `0` in its place XLA optimises as for users:
# so .ci/run tests the core a second time.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# To note where in the sources each operation is takes a twentieth of the time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# JAX promotes neither dtypes nor ranks by itself: users may forbid it. Here, not in JAX's
# configuration, so that what tests start in other processes is as strict.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")

import hypothesis
import jax
import jaxtyping
import pytest


quick = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0"
if quick and jax.__version_info__ < (0, 11):
    # The older of XLA's two ways to write a loop for the CPU compiles in a quarter of the
    # time. And each program as a whole: the other cores have tests of their own. XLA ends
    # at a flag that it does not know, so only where it is known.
    os.environ["XLA_FLAGS"] = (
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
        + os.environ.get("XLA_FLAGS", "")
    )
jax.config.update("jax_enable_x64", True)
# The types and shapes of every call are checked only on request, because that takes a
# large part of the time. `.ci/run` requests it for the core.
if os.environ.get("GNLIN_TYPECHECK") == "1":
    jaxtyping.install_import_hook("gnlin", "beartype.beartype")

# The same examples each time: a failure is a change of the code, not of the draw.
hypothesis.settings.register_profile(
    "gnlin", deadline=None, derandomize=True, max_examples=15, database=None
)
hypothesis.settings.load_profile("gnlin")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Each worker goes through files of its own: what one test has compiled serves the
    next."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection_finish():
    """Collect garbage less often: JAX's tracing makes many objects and little garbage,
    and spends a sixth of its time on looking for it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture
def unchecked():
    """gnlin as a user runs it: a value of a wrong type is met by gnlin's own checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# Linux allows 65,530 in a process.
_MANY_MAPPINGS = 10_000


@pytest.fixture(autouse=True, scope="module")
def forgotten():
    """Forget what was compiled, from time to time: each program keeps some memory
    mappings, and XLA crashes where it gets no more of them."""
    yield
    mappings = pathlib.Path("/proc/self/maps")
    if not mappings.exists() or mappings.read_bytes().count(b"\n") > _MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()
