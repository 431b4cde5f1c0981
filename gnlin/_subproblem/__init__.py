"""The linearised problem, solved as far as a filter asks, the cheapest way."""

from ._base import AbstractSubproblem as AbstractSubproblem, Answer as Answer
from ._matrix_free import MatrixFree as MatrixFree
from ._prepare import (
    check_method as check_method,
    Method as Method,
    prepare as prepare,
)
