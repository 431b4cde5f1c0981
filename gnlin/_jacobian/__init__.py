"""Jacobians as objects. Only this package knows how a Jacobian is represented."""

from ._at_hand import AtHand as AtHand
from ._base import (
    AbstractJacobian as AbstractJacobian,
    DEFAULT_MEMORY_BUDGET as DEFAULT_MEMORY_BUDGET,
    grouped as grouped,
    matrix_of as matrix_of,
    multiplied as multiplied,
    plain_operator as plain_operator,
)
from ._block import (
    AbstractBlock as AbstractBlock,
    Rows as Rows,
    StackedBlock as StackedBlock,
)
from ._by_passes import ByPasses as ByPasses
from ._change_of_variables import Retracted as Retracted, ScaledColumns as ScaledColumns
from ._coloured import Sparsity as Sparsity
from ._cost import Cost as Cost, Reads as Reads
from ._directions import (
    check_jac as check_jac,
    Direction as Direction,
    is_zero_map as is_zero_map,
    only_direction as only_direction,
)
from ._gathered import (
    Gathered as Gathered,
    gathered as gathered,
    in_few_rows as in_few_rows,
    Selected as Selected,
    Sparse as Sparse,
)
from ._layer import Layer as Layer
from ._of_examples import OfExamples as OfExamples, PerExample as PerExample
from ._stacked import (
    AtOnce as AtOnce,
    itself as itself,
    PerGroup as PerGroup,
    Stacked as Stacked,
    WithPrior as WithPrior,
)
