"""Which way a linearised problem is solved: the one that costs the least."""

import math
from typing import Any, get_args, Literal

import lineax as lx

from .._jacobian import AbstractJacobian, Cost
from .._linearisation import Linearisation
from .._objective import AbstractObjective
from .._problem import Quadratic
from .._spectrum import Filter
from ..filters import Tikhonov
from ._base import AbstractWay, does_not_serve
from ._cheap_first import EigenvaluesFirst, ProductsFirst
from ._lineax import ByLineax
from ._matrix_free import MatrixFree
from ._mixed_precision import MixedPrecision, Refined
from ._nystrom_kernel import NystromKernel, OfLowRank
from ._on_outputs import OnOutputs
from ._on_parameters import OnParameters
from ._prox_linear import ProxLinear, ProxLinearOnOutputs, ProxLinearOnParameters
from ._schur import SchurComplement
from ._sparse import has_factorisation, SparseLU
from ._spectral import Eigenvalues, SingularValues


MethodName = Literal[
    "auto",
    "svd",
    "eigh",
    "kernel",
    "curvature",
    "schur",
    "sparse",
    "matrix-free",
    "products-first",
    "eigh-first",
]
Method = MethodName | MixedPrecision | NystromKernel | lx.AbstractLinearSolver
# Those that serve for damped problems only.
_DAMPED = ("kernel", "curvature", "schur", "sparse", "products-first")

Form = Literal["quadratic", "prox-linear"]

WAYS: tuple[type[AbstractWay], ...] = (
    SingularValues,
    Eigenvalues,
    OnOutputs,
    OnParameters,
    SchurComplement,
    SparseLU,
    MatrixFree,
    ProductsFirst,
    EigenvaluesFirst,
    ProxLinearOnOutputs,
    ProxLinearOnParameters,
)


# Ways that come with parameters of their own.
_OBJECTS: tuple[tuple[type, Any], ...] = (
    (MixedPrecision, Refined),
    (NystromKernel, OfLowRank),
    (lx.AbstractLinearSolver, ByLineax),
)


def check_method(method: Any, *, damped: bool = True, also: tuple[str, ...] = ()) -> None:
    """`damped`: whether the problem is, so that Cholesky factorisations serve. `also`:
    names of a solver's own, where it does not take lineax's solvers."""
    if damped and isinstance(method, MixedPrecision | NystromKernel):
        return
    if not also and isinstance(method, lx.AbstractLinearSolver):
        return
    methods = get_args(MethodName)
    if not damped:
        methods = tuple(m for m in methods if m not in _DAMPED)
    methods = (*methods, *also)
    if method not in methods:
        others = "" if also else " or a solver of lineax"
        others = ", a `gnlin.MixedPrecision`, a `gnlin.NystromKernel`" * damped + others
        raise ValueError(
            f"`method` must be one of {', '.join(map(repr, methods))}{others} here, but "
            f"{method!r} was given."
        )


def check_form(form: str, method: Any) -> None:
    if form not in get_args(Form):
        raise ValueError(
            f'`form` must be "quadratic" or "prox-linear", but {form!r} was given.'
        )
    by_passes = method in ("auto", "kernel", "matrix-free")
    if form == "prox-linear" and not by_passes:
        raise ValueError(
            f"The method {method!r} is for quadratic problems: with "
            '`form="prox-linear"` use "auto", "kernel" or "matrix-free".'
        )


def problem_of(
    form: Form, objective: AbstractObjective, lin: Linearisation
) -> Quadratic | ProxLinear:
    """The linearised problem in either form; for squared error they are one."""
    if form == "prox-linear" and not objective.is_quadratic:
        return ProxLinear(lin.jacobian, lin.outputs, objective)
    return objective.expand(lin)


def choose(
    problem: Quadratic | ProxLinear,
    filter: Filter,
    num_trials: int = 1,
    method: Any = "auto",
) -> AbstractWay:
    """A problem made ready for filters, the cheapest way.

    **Arguments:**

    - `problem`: a [`gnlin.Quadratic`][], such as `objective.expand(lin)`.
    - `filter`: one of the kind that will be asked for; where their damping may vanish,
        one without.
    - `num_trials`: how many of them will be, about.
    - `method`: a way that is asked for, by its name; a [`gnlin.MixedPrecision`][] or a
        [`gnlin.NystromKernel`][]; or a solver of lineax.

    **Returns:** a [`gnlin.AbstractSubproblem`][].

    **Raises:** `ValueError` if no way serves for the problem and the filter, or, where
    none is asked for, none within the memory budget.
    """
    cost = problem.jacobian.cost()
    name = type(filter).__name__
    for kind, way in _OBJECTS:
        if isinstance(method, kind):
            if not way.fits(problem, filter):
                raise does_not_serve(way.method, filter)
            return way.of(problem, cost, method)
    serving = [way for way in WAYS if way.fits(problem, filter)]
    if method != "auto":
        asked = [way for way in serving if way.method == method]
        if not asked:
            others = [f'"{way.method}"' for way in serving]
            if isinstance(problem, ProxLinear):
                others.append('`form="quadratic"`')
            why = f"does not serve for `{name}` on a problem of the form {_form(problem)}"
            if method == SchurComplement.method and OnParameters in serving:
                why = (
                    "eliminates an array of which each example reads one row, as "
                    "`select=` of every group says, and here is none"
                )
            if method == SparseLU.method and not has_factorisation():
                why = (
                    "needs klujax (`pip install gnlin[sparse]`), the CPU, and double "
                    'precision (`jax.config.update("jax_enable_x64", True)`)'
                )
            elif method == SparseLU.method and OnParameters in serving:
                why = (
                    "is for examples that read few of the parameters, as `select=` of "
                    "every group says, or `gnlin.Sparsity`"
                )
            raise ValueError(
                f'The method {method!r} {why}: use "auto", or {", ".join(others)}.'
            )
        return asked[0].of(problem, cost)
    costs = [way.cost(cost, filter, num_trials) for way in serving]
    if min(costs, default=math.inf) == math.inf:
        raise ValueError(
            f"For `{name}` on a problem of the form {_form(problem)} there is no way "
            f"within the memory budget of {cost.memory_budget:,} bytes: raise "
            "`memory_budget`."
            if serving
            else f"`{name}` is no filter for a problem of the form {_form(problem)}: use "
            '`form="quadratic"`.'
        )
    return serving[costs.index(min(costs))].of(problem, cost)


# A step by conjugate gradients that stop early takes about so many products.
_PRODUCTS = 20
_SPARSE_STEP = 2e-3


_SPARSE = SchurComplement, SparseLU
_EXACT = SingularValues, Eigenvalues, OnOutputs, OnParameters, *_SPARSE


def is_exactly_by(
    ways: tuple[type[AbstractWay], ...], cost: Cost, filter: Filter, num_trials: int
) -> bool:
    """Whether an exact step is cheapest by one of these."""
    costs = {way: way.cost(cost, filter, num_trials) for way in _EXACT}
    best = min(costs, key=lambda way: costs[way])
    return best in ways and math.isfinite(costs[best])


def is_factorised_anew(cost: Cost, filter: Filter, num_trials: int) -> bool:
    """Whether it is by what is sparse, where each solution is another factorisation."""
    return is_exactly_by(_SPARSE, cost, filter, num_trials)


def without_factorisation(
    cost: Cost, filter: Filter, num_trials: int, worth: float, times: float
) -> Any:
    """The method where an exact step is dear: products, and of what is sparse the
    factorisation where these do not arrive. Else `"auto"`.

    - `worth`: what an exact step is, in seconds, of what is not sparse. There it is
        cheap, or products are.
    - `times`: what it is, as a multiple of one by conjugate gradients that stop early.
    """
    sparse = bool(cost.reads)
    if sparse and not is_exactly_by((SchurComplement,), cost, filter, num_trials):
        worth = min(worth, _SPARSE_STEP)
    if not exact_is_dear(cost, num_trials, worth, times):
        return "auto"
    return "products-first" if sparse and has_factorisation() else "matrix-free"


def exact_is_dear(cost: Cost, num_trials: int, worth: float, times: float) -> bool:
    """Whether a step that is solved exactly costs more than it is worth: so many seconds,
    and so many times one that is not."""
    exactly = min(way.cost(cost, Tikhonov(1.0), num_trials) for way in _EXACT)
    early = _PRODUCTS * cost.one_product
    return not cost.fits or exactly > max(worth, times * early)


# A Jacobian of up to this many bytes stays in the nearest cache: products with it cost
# less than passes through any function.
_SMALL_JACOBIAN = 2**16
# All columns of so few parameters are fewer passes than conjugate gradients' products:
# with 100,000 rows of four it takes 0.6 of the time.
_FEW_PARAMETERS = 16


def at_hand_is_cheaper(jacobian: AbstractJacobian) -> bool:
    """Whether many products with a Jacobian are cheaper with it in memory."""
    cost, (m, p) = jacobian.cost(), jacobian.shape
    small = m * jacobian.domain.nbytes <= _SMALL_JACOBIAN or p <= _FEW_PARAMETERS
    return cost.fits and small


def _form(problem: Quadratic | ProxLinear) -> str:
    return '"quadratic"' if isinstance(problem, Quadratic) else '"prox-linear"'
