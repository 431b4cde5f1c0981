"""The solvers share one loop, and differ in how far they solve a linearised problem."""

from ._base import AbstractGaussNewton as AbstractGaussNewton
from ._damped_gauss_newton import DampedGaussNewton as DampedGaussNewton
from ._gauss_newton import (
    FilteredGaussNewton as FilteredGaussNewton,
    GaussNewton as GaussNewton,
)
from ._iterative_linearisation import (
    as_solver as as_solver,
    IterativeLinearisation as IterativeLinearisation,
)
from ._levenberg_marquardt import LevenbergMarquardt as LevenbergMarquardt
from ._search import GridSearch as GridSearch
from ._state import State as State, Update as Update
from ._stepping import (
    AbstractFilteredGaussNewton as AbstractFilteredGaussNewton,
    take_step as take_step,
)
from ._truncated_gauss_newton import TruncatedGaussNewton as TruncatedGaussNewton
from ._verbose import print_row as print_row
