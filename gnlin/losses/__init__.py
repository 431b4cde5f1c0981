"""Losses of a model's outputs, each with a factor of its Hessian."""

from ._base import (
    AbstractElementwiseLoss as AbstractElementwiseLoss,
    AbstractLoss as AbstractLoss,
    check_between as check_between,
    check_loss as check_loss,
    Reduction as Reduction,
)
from ._binomial import (
    BinomialNLL as BinomialNLL,
    NegativeBinomialNLL as NegativeBinomialNLL,
)
from ._cross_entropy import (
    is_label as is_label,
    SigmoidCrossEntropy as SigmoidCrossEntropy,
    SoftmaxCrossEntropy as SoftmaxCrossEntropy,
)
from ._factors import (
    AbstractFactor as AbstractFactor,
    DenseFactor as DenseFactor,
    DiagonalFactor as DiagonalFactor,
    IdentityFactor as IdentityFactor,
    SoftmaxFactor as SoftmaxFactor,
)
from ._poisson import PoissonNLL as PoissonNLL
from ._robust import (
    AbstractRobust as AbstractRobust,
    Arctan as Arctan,
    Cauchy as Cauchy,
    Huber as Huber,
    LogCosh as LogCosh,
    PseudoHuber as PseudoHuber,
    Tukey as Tukey,
)
from ._squared_error import SquaredError as SquaredError
from ._tobit import TobitNLL as TobitNLL
