"""The linearised problem, solved as far as a filter asks, the cheapest way."""

from ._base import AbstractSubproblem as AbstractSubproblem, Answer as Answer
from ._descent import updated as updated
from ._matrix_free import MatrixFree as MatrixFree
from ._mixed_precision import (
    MixedPrecision as MixedPrecision,
    prepare_refined as prepare_refined,
)
from ._prepare import (
    check_form as check_form,
    check_method as check_method,
    Form as Form,
    Method as Method,
    prepare as prepare,
    prepare_form as prepare_form,
    prepare_once as prepare_once,
    prepare_prox_linear as prepare_prox_linear,
)
from ._prox_linear import ProxLinear as ProxLinear
from ._spaces import Parameters as Parameters
