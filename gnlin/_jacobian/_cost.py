"""What a Jacobian costs, from shapes and programs before anything runs."""

import math
from typing import NamedTuple

from .._common._cost import rates
from .._common._passes import Passes


# A Jacobian of at most this many bytes stays in the nearest cache: products with it are
# cheaper than passes through any function.
_SMALL = 2**16
# Up to this number of parameters, making all columns takes fewer passes than the products
# of conjugate gradients (100,000 rows of 4 parameters: 0.6 of the time).
_FEW_PARAMETERS = 16


class Reads(NamedTuple):
    """How many parameters each example of a group reads.

    - `num_examples`, `num_outputs`: numbers of examples, and of outputs of one example.
    - `arrays`: for each array of parameters, the number of its rows, the number of rows
        that one example reads, and the number of entries in a row.
    - `factor_operations`: upper bound on the operations of a sparse Cholesky
        factorisation of the curvature; infinite if the sparsity pattern is unknown.
    """

    num_examples: int
    num_outputs: int
    arrays: tuple[tuple[int, int, int], ...]
    factor_operations: float = math.inf


class Cost(NamedTuple):
    """The costs of a Jacobian, computed from shapes and programs before anything runs.

    - `shape`, `itemsize`: (m, p), and the bytes of one entry.
    - `rows`: passes needed to make all blocks.
    - `gram`: passes needed to make the kernel within the memory budget.
    - `one_pass`: operations of one product with the Jacobian or its transpose.
    - `gram_operations`: operations of the kernel, not counting the passes.
    - `num_bytes`: size of the blocks.
    - `memory_budget`: limit, in bytes, on the blocks and on matrices made of them.
    - `in_parts`: whether the curvature can be summed over parts of the rows.
    - `reads`: see [`AbstractJacobian.reads`][].
    """

    shape: tuple[int, int]
    itemsize: int
    rows: Passes
    gram: Passes
    one_pass: float
    gram_operations: float
    num_bytes: int
    memory_budget: int
    in_parts: bool = False
    reads: tuple[Reads, ...] = ()

    def holds(self, num_numbers: int | float) -> bool:
        """Whether so many numbers fit in the memory budget."""
        return num_numbers * self.itemsize <= self.memory_budget

    @property
    def fits(self) -> bool:
        """Whether the blocks fit in the memory budget."""
        return self.num_bytes <= self.memory_budget

    @property
    def rows_fit(self) -> bool:
        """Whether the m x p matrix fits in the memory budget."""
        return self.holds(math.prod(self.shape))

    @property
    def columns_fit(self) -> bool:
        """Whether the columns' norms can be computed within the memory budget."""
        return self.rows_fit or bool(self.reads)

    @property
    def is_cheaper_at_hand(self) -> bool:
        """Whether many products are cheaper with the matrix in memory."""
        m, p = self.shape
        small = m * p * self.itemsize <= _SMALL or p <= _FEW_PARAMETERS
        return self.fits and small

    @property
    def one_product(self) -> float:
        """Seconds for one `mv` and one `rmv`, inside a loop."""
        rate = rates()
        slower = rate.gathered if self.reads else 1.0
        return rate.step + 2 * self.one_pass * rate.passed * slower

    @property
    def all_rows(self) -> float:
        """Seconds to make all blocks."""
        return self._seconds(self.rows)

    @property
    def whole_gram(self) -> float:
        """Seconds to make the kernel, including its passes."""
        return self._seconds(self.gram) + self.gram_operations * rates().product

    @property
    def whole_curvature(self) -> float:
        """Seconds to make the curvature, including its passes."""
        m, p = self.shape
        return self.all_rows + 2.0 * m * float(p) ** 2 * rates().product

    def _seconds(self, passes: Passes) -> float:
        return passes.number() * self.one_pass * rates().passed
