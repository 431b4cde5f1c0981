"""Print a line for each step, also within a compiled program."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Bool, Int

from .._common._checks import shown


# The columns of the history that are printed.
_PRINTED = "loss", "gradient_norm", "step_norm", "damping"


def check_verbose(verbose: Any) -> None:
    if not isinstance(verbose, bool) and not callable(verbose):
        raise ValueError(
            "`verbose` must be `True`, `False` or a function that is called with the "
            "figures of a step, such as `lambda loss, **others: jax.debug.print('{}', "
            f"loss[1])`, but {shown(verbose)} was given."
        )


def print_row(
    verbose: bool | Callable[..., None],
    row: Mapping[str, Any],
    num_steps: Int[Array, ""],
    moved: Bool[Array, ""],
) -> None:
    """Print a row of the history if `verbose` is set and a step was made."""
    if verbose is False:
        return
    values = {"num_steps": num_steps} | {name: row[name] for name in _PRINTED}
    titles = {name: name.replace("_", " ").capitalize() for name in values}

    def show() -> None:
        if callable(verbose):
            verbose(**{name: (titles[name], values[name]) for name in values})
        else:
            line = ", ".join(f"{title}: {{:.6g}}" for title in titles.values())
            jax.debug.print(line, *values.values())

    jax.lax.cond(moved, show, lambda: None)
