"""The solvers share one loop, and differ in how far they solve a linearised problem."""

from ._adaptive_linearisation import AdaptiveLinearisation as AdaptiveLinearisation
from ._as_solver import as_solver as as_solver
from ._base import AbstractGaussNewton as AbstractGaussNewton
from ._damped_gauss_newton import DampedGaussNewton as DampedGaussNewton
from ._divergence import check_divergence as check_divergence, Watch as Watch
from ._gauss_newton import (
    FilteredGaussNewton as FilteredGaussNewton,
    GaussNewton as GaussNewton,
)
from ._grid_search import GridSearch as GridSearch
from ._iterative_linearisation import IterativeLinearisation as IterativeLinearisation
from ._levenberg_marquardt import LevenbergMarquardt as LevenbergMarquardt
from ._state import State as State, Update as Update
from ._stepping import (
    AbstractFilteredGaussNewton as AbstractFilteredGaussNewton,
    take_step as take_step,
)
from ._termination import (
    LAST_FINITE as LAST_FINITE,
    result_name as result_name,
    RESULT_NAMES as RESULT_NAMES,
    WELL as WELL,
    why_it_ended as why_it_ended,
)
from ._truncated_gauss_newton import TruncatedGaussNewton as TruncatedGaussNewton
from ._verbose import print_row as print_row
