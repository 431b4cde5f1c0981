"""The sources of batches: arrays, shuffled in each epoch, or the user's iterable."""

import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree, ScalarLike

from .._common._checks import check_takes
from .._common._identity import checksum, named
from .._common._quickly import quickly
from .._common._warn import warn
from .._training._data import a_kind_of, as_batch, as_tuple, not_finite
from .._training._residuals import GroupsByName, where_not_finite


Data = tuple[PyTree[Array], PyTree[Array], Array | None]
Check = Callable[[Data], Any]

# The most numbers of an array that enter the checksum of a batch: its first examples
# distinguish it from others, and large ones would take long.
_MOST_COMPARED = 2**16
# This is a warning, not an error, because a loader that draws its order itself could not
# be resumed at all, and the steps so far would be lost.
_OTHER_BATCHES = (
    "The data do not yield the batches that the interrupted run took, so the resumed run "
    "goes on with others, and differs from an uninterrupted one: pass a function of the "
    "epoch, such as `lambda epoch: batches(np.random.default_rng(epoch))`."
)


class Batch(NamedTuple):
    """The data of a step, and the choice of its examples."""

    data: Data
    order: Array | None = None  # the shuffled order of all examples in the epoch
    index: int = 0  # of the batch in that order
    seen: "Seen | None" = None  # of the batches up to this one

    def arrays(self, number: int) -> tuple:
        """Return the arguments of the compiled step of this number."""
        return self.data, self.order, np.array([self.index, number], np.int32)


class Seen(NamedTuple):
    """Checksums of the user's batches, by which a resumed run compares its own.

    - `start`: that of the first batch of the epoch, or of the first batch of the run if
        the data are a function of the epoch.
    - `epoch`: that of the batches of the epoch so far.
    """

    start: str = ""
    epoch: str = ""

    def after(self, batch: Data, is_start: bool) -> "Seen":
        own = _checksum(batch)
        both = zlib.crc32(own.encode(), int(self.epoch or "0", 16))
        return Seen(own if is_start else self.start, f"{both:08x}")


class DataEnded(ValueError):
    """Raised if the data end before the run does."""


class ArrayStream:
    """Batches of a data set in memory, drawn without replacement within an epoch.

    - `example`: all data.
    - `has_all`: whether all batches are in memory.
    """

    has_all = True
    seen = None  # nothing is compared batch by batch

    def __init__(
        self, data, batch_size: int | None, key: Key[Array, ""] | None, name: str
    ):
        self.example = as_batch(data, name)
        self.num_examples = jax.tree.leaves(self.example[0])[0].shape[0]
        if batch_size is not None and batch_size > self.num_examples:
            raise ValueError(
                f"`batch_size` is {batch_size}, more than the number of examples, "
                f"{self.num_examples}: pass `batch_size=None` to use all in each step."
            )
        self.batch_size = batch_size
        self.num_batches = self.num_examples // (batch_size or self.num_examples)
        self._key = key

    def first(self) -> Batch:
        return next(self.epoch(0, 0))

    def some(self, number: int) -> Iterator[Batch]:
        """Return at most so many batches, at any time."""
        return itertools.islice(self.epoch(0, 0), number)

    def at_hand(self) -> Iterator[Data]:
        """Return the batches known before the first step, to check their targets."""
        yield self.example

    def epoch(self, epoch: int, first: int, seen: Seen | None = None) -> Iterator[Batch]:
        """Return the batches of an epoch, starting with the `first`."""
        order = None
        if self.batch_size is not None:
            assert self._key is not None
            order = _permutation(self._key, np.asarray(epoch), self.num_examples)
        for index in range(first, self.num_batches):
            yield Batch(self.example, order, index)

    def at_fault(self, check: Check) -> str:
        """Say which example is not finite, in a sentence; or return "".

        - `check`: raises `ValueError` if the targets of a batch do not fit.
        """
        return not_finite(*self.example)

    def identity(self) -> str:
        """Describe the data, so that a resumed run can compare them."""
        return f"arrays of checksum {checksum(self.example)}"


class GroupStream(ArrayStream):
    """Groups of residuals. A step takes all residuals or draws some of each group, and
    counts as an epoch."""

    batch_size = None
    num_batches = 1

    def __init__(self, groups: GroupsByName, data: tuple):
        self._groups = groups
        self.example = data

    def at_fault(self, check: Check) -> str:
        return where_not_finite(self._groups)


class IterableStream:
    """The user's batches: a list, a loader, or a function of the epoch.

    - `example`: the first batch.
    """

    batch_size = None
    num_batches = None

    def __init__(self, data: Any, name: str):
        self._data = data
        self._name = name
        self.has_all = isinstance(data, list)
        self.seen = None if self.has_all else Seen()
        if callable(data):
            check_takes(f"{name}(epoch)", data, 1)
        batches = iter(self._iterable(0))
        try:
            first = next(batches)
        except StopIteration:
            raise ValueError(
                f"There is no data: the iterable `{name}` holds no batch."
            ) from None
        if not isinstance(first, tuple | list):
            hint = ""
            if isinstance(first, Mapping) and len(first) in (2, 3):
                entries = ", ".join(f"b[{key!r}]" for key in first)
                hint = f": pass `[({entries}) for b in {name}]`"
            raise _no_data(name, f"it holds {a_kind_of(first)}{hint}")
        self.example = self._checked(first)
        self._latest: deque[Data] = deque(maxlen=2)
        # The iterable may not yield its first batch a second time.
        self._begun: Iterator | None = itertools.chain([first], batches)

    def _checked(self, batch: Any) -> Data:
        return as_batch(batch, self._name, is_whole=False)

    def _iterable(self, epoch: int) -> Any:
        return self._data(epoch) if callable(self._data) else self._data

    def first(self) -> Batch:
        return Batch(self.example)

    def some(self, number: int) -> Iterator[Batch]:
        """Return at most so many batches of a list, or of those that are kept."""
        kept = self.at_hand() if self.has_all else (*self._latest, self.example)
        return itertools.islice(map(Batch, kept), number)

    def at_hand(self) -> Iterator[Data]:
        """Return all batches of a list, or the first of any other iterable."""
        batches = self._data if self.has_all else [self.example]
        return map(self._checked, batches)

    def epoch(self, epoch: int, first: int, seen: Seen | None = None) -> Iterator[Batch]:
        """Return the batches of an epoch, starting with the `first`. Warn if those before
        it are not the ones that an interrupted run has seen.

        - `seen`: checksums of the run's batches so far, or `None` if none are kept.
        """
        begun, self._begun, num_batches = self._begun, None, 0
        is_resumed = bool(begun) and epoch > 0 and first == 0  # between two epochs
        if is_resumed and seen and _checksum(self.example) != seen.start:
            warn(_OTHER_BATCHES)
        own = None if seen is None else seen._replace(epoch="")
        batches = begun if begun and epoch == 0 else self._iterable(epoch)
        for num_batches, batch in enumerate(batches, start=1):
            if own is None and num_batches <= first:
                continue
            batch = self._checked(batch)
            if own is not None:
                is_start = num_batches == 1 and not (epoch and callable(self._data))
                own = own.after(batch, is_start)
                if seen and num_batches == first and own.epoch != seen.epoch:
                    warn(_OTHER_BATCHES)
            if num_batches > first:
                self._latest.append(batch)
                yield Batch(batch, seen=own)
        if num_batches < max(first, 1):
            raise DataEnded(
                f"The data ended in epoch {epoch} after {num_batches} batches: pass "
                "something that can be iterated repeatedly, such as a list, a loader, or "
                "a function of the epoch that returns an iterable."
            )

    def at_fault(self, check: Check) -> str:
        """Look at the latest two batches: the next batch has already been taken when a
        step is judged."""
        for batch in self._latest:
            try:
                check(batch)
            except ValueError as error:
                return str(error)
        found = (not_finite(*batch) for batch in self._latest)
        return next((f"In its batch: {said}" for said in found if said), "")

    def identity(self) -> str:
        """Describe the data. Batches that are not in a list cannot be compared before
        they are yielded."""
        if self.has_all:
            return f"batches of checksum {checksum(list(self.at_hand()))}"
        return named(self._data)


def make_stream(
    data: Any, batch_size: int | None, key: Key[Array, ""] | None, name: str = "data"
):
    """Return a stream of the examples of arrays, or of an iterable's batches."""
    data = as_tuple(data)
    if isinstance(data, tuple):
        if len(data) > 2 and all(isinstance(x, tuple | list) for x in data):
            words = "a tuple of tuples was given: put batches into a list"
            raise _no_data(name, f"{words}, `list({name})`")
        return ArrayStream(data, batch_size, key, name)
    no_batches = isinstance(data, Mapping | str) or hasattr(data, "shape")
    if no_batches or not (isinstance(data, Iterable) or callable(data)):
        raise _no_data(name, f"{a_kind_of(data)} was given")
    if batch_size is not None:
        raise ValueError(
            "An iterable of batches has its own batch size: leave `batch_size` out."
        )
    return IterableStream(data, name)


def _no_data(name: str, found: str) -> ValueError:
    return ValueError(
        f"`{name}` must be a tuple of arrays, `(inputs, targets)`, or an iterable of "
        f"such batches, but {found}."
    )


def _checksum(batch: Data) -> str:
    def some(x):
        return x[: max(_MOST_COMPARED * len(x) // max(x.size, 1), 1)]

    return checksum(jax.tree.map(some, batch))


@quickly  # A sort takes long to compile.
def _permutation(key: Key[Array, ""], epoch: ScalarLike, num_examples: int) -> Array:
    return jax.random.permutation(jax.random.fold_in(key, epoch), num_examples)


def gather(data, order: Array | None, index: Array, size: int, wider: int):
    """Return the batch `index` of `size` examples, extended to `wider` examples."""
    if order is None:
        return data
    positions = index * size + jnp.arange(wider, dtype=index.dtype)
    chosen = order[positions % order.shape[0]]
    return jax.tree.map(lambda x: x[chosen], data)
