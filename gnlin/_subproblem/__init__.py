"""Ways to solve the linearised problem, and the choice of the cheapest."""

from ._base import (
    AbstractMethod as AbstractMethod,
    AbstractSubproblem as AbstractSubproblem,
    Answer as Answer,
    InexactTikhonov as InexactTikhonov,
    undamped as undamped,
)
from ._choose import (
    by_products as by_products,
    check_form as check_form,
    check_method as check_method,
    choose as choose,
    Form as Form,
    Method as Method,
    problem_of as problem_of,
    way_of as way_of,
)
from ._descent import Momentum as Momentum, updated as updated
from ._iteration import AbstractIteration as AbstractIteration
from ._nystrom_kernel import NystromKernel as NystromKernel
from ._prox_linear import OnSpace as OnSpace, ProxLinear as ProxLinear
from ._spaces import Outputs as Outputs
from ._wrappers import pulled as pulled, Rescaled as Rescaled
