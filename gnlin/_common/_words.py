"""Counts, names and values with their errors, as reports and messages print them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree


# Significant digits of a value without an error, the fewest of a value with one, and
# those of an error.
_DIGITS, _OF_ERROR = 8, 3
# The most lines of a table of parameters.
_MOST_LINES = 40


def how_many(number: int | str, what: str) -> str:
    """Return a number of things in words, such as "1 step" or "2 steps"."""
    return f"{number} {what}" + "s" * (str(number) != "1")


def name_of(path: tuple) -> str:
    """Return a leaf's name, such as `peak.width`, or "" if it is the whole tree."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def names_of(tree: PyTree, whole: str = "p") -> tuple[str, ...]:
    """Return the names of all entries, such as `rate` or `rate[0]`.

    - `whole`: the name of a tree that is one array.
    """
    names = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name, shape = name_of(path) or whole, np.shape(leaf)
        names += [name + "".join(f"[{k}]" for k in index) for index in np.ndindex(*shape)]
    return tuple(names)


def rounded(value: Any, error: Any = math.nan) -> str:
    """Return a real number with all the digits that its error leaves: as many decimals as
    three digits of the error, and at least eight digits."""
    kind = np.finfo(getattr(value, "dtype", float))
    value, error = float(value), float(error)
    if not (math.isfinite(value) and math.isfinite(error) and error > 0):
        return f"{value:.{_DIGITS}g}"
    last = math.floor(math.log10(error)) - _OF_ERROR + 1
    first = math.floor(math.log10(abs(value))) if value != 0 else last
    # Further digits would be those of the binary number.
    most = math.ceil(1 + (kind.nmant + 1) * math.log10(2))
    digits = min(max(_DIGITS, first - last + 1), most)
    text, e, exponent = f"{value:#.{digits}g}".partition("e")
    whole, _, part = text.partition(".")
    # Zeros at the end stay up to the last digit of the error.
    decimals = max(0, (first if e else 0) - last)
    part = part.rstrip("0").ljust(min(decimals, len(part)), "0")
    return whole + ("." + part if part else "") + e + exponent


def with_error(value: Any, error: Any) -> str:
    """Return a value with its standard error, such as "1.4255303 ± 0.0934". The error of
    a complex number holds those of its two parts."""
    if np.iscomplexobj(value):
        real, imaginary = (
            with_error(v, e)
            for v, e in ((value.real, error.real), (value.imag, error.imag))
        )
        return f"({real}) + ({imaginary})j"
    return f"{rounded(value, error)} ± {float(error):.3g}"


def by_name(of_entry: Callable[..., str], *trees: PyTree) -> str:
    """Return a table with a line for each entry of trees of one structure.

    - `of_entry`: what the line of entries says after their name; "" for no line.
    """
    names, rows, sizes = iter(names_of(trees[0], "")), [], []
    for leaves in zip(*map(jax.tree.leaves, trees), strict=True):
        entries = zip(*map(np.ravel, leaves), strict=True)
        found = [(next(names), of_entry(*entry)) for entry in entries]
        rows += [row for row in found if row[1]]
        sizes.append(sum(bool(text) for _, text in found))
    return "\n".join(abridged(aligned(rows), sizes)).strip()


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([x.ljust(w) for x, w in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(row).rstrip() for row in padded]


def abridged(lines: Sequence[str], sizes: Sequence[int], others: str = "") -> list[str]:
    """Return the lines, at most some 40 of them, with the first and last ones of a long
    array.

    - `sizes`: the numbers of lines of each array.
    - `others`: where the other lines are to be found.
    """
    if len(lines) <= _MOST_LINES:
        return list(lines)

    def cut(part: Sequence[str], most: int) -> list[str]:
        if len(part) <= most:
            return list(part)
        head, tail = most // 2, (most - 1) // 2
        more = f"... {len(part) - head - tail} more{others}"
        return [*part[:head], more, *part[len(part) - tail :]]

    # The longest arrays are cut until all lines fit.
    most = max(
        (k for k in range(3, _MOST_LINES) if _total(sizes, k) <= _MOST_LINES), default=0
    )
    if not most:  # There are many short arrays.
        return cut(lines, _MOST_LINES)
    ends = np.cumsum(sizes)
    parts = (lines[end - size : end] for end, size in zip(ends, sizes, strict=True))
    return [line for part in parts for line in cut(part, most)]


def _total(sizes: Sequence[int], most: int) -> int:
    return sum(min(size, most) for size in sizes)
