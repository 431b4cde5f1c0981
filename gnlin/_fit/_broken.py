"""Errors of the user's code that end a run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from .._common._words import how_many
from .._training._solution import Solution
from ._saver import Saver


if TYPE_CHECKING:
    from ._run import Run


@contextmanager
def told(where: str) -> Iterator[None]:
    """Add a note to an error that says where it was raised."""
    try:
        yield
    except Exception as error:
        with suppress(AttributeError):  # Some exceptions take no attributes.
            error.add_note(f"This was raised {where} of `gnlin.fit`.")
        raise


@contextmanager
def explained(
    run: "Run", saver: Saver | None, hand_over: Callable[[Solution], Solution]
) -> Iterator[None]:
    """Add the solution so far to an error as an attribute, and a note that says so.

    - `hand_over`: what is done to a solution before it is returned.
    """
    first = run.step
    try:
        yield
    except Exception as error:
        if run.step > first:
            note = f"`gnlin.fit` had made {how_many(run.step, 'step')}."
            # A solution with batch normalisation may need the broken data.
            with suppress(Exception):
                setattr(error, "solution", hand_over(run.as_solution()))  # noqa: B010
                note += " Its attribute `solution` is the result so far."
            if saver is None:
                note += " With `checkpoint=`, the same call could be resumed."
            else:
                note += f" The same call with `resume=True` goes on from {saver.path}."
            with suppress(AttributeError):
                error.add_note(note)
        raise
