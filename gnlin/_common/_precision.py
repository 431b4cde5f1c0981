"""The precision in which the user's functions multiply matrices."""

import contextlib
from collections.abc import Iterator

import jax


def matmul_precision() -> str | None:
    """Return JAX's setting, or `None` if it was left at its default."""
    return jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute matrix products of single precision to all their digits, unless the user
    has set `jax_default_matmul_precision`. By default a GPU rounds their factors to three
    digits, and no loss falls below that error."""
    given = matmul_precision()
    with jax.default_matmul_precision("highest" if given is None else given):
        yield
