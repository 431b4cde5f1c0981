"""The choice of the cheapest way to solve a linearised problem.

A *way* is a class that solves a linearised problem by one method; `choose` picks the
cheapest.
"""

import math
from typing import Any, get_args, Literal

import equinox as eqx
import lineax as lx

from .._common import _tree
from .._common._checks import check_one_of
from .._linearisation._linearisation import Linearisation
from .._linearisation._objective import AbstractObjective
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ..preconditioners import AbstractPreconditioner
from ._base import AbstractMethod, Answer, does_not_serve
from ._cholesky import OnOutputs, OnParameters
from ._cholesky_qr import CholeskyQR
from ._fallbacks import EigenvaluesFirst, FactorisedFirst, ProductsFirst
from ._lineax import ByLineax
from ._matrix_free import MatrixFree
from ._nystrom_kernel import NystromKernel, OfLowRank
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
    "cholesky-qr",
    "schur",
    "sparse",
    "matrix-free",
    "products-first",
    "eigh-first",
]
Method = (
    MethodName
    | type[AbstractMethod]
    | NystromKernel
    | AbstractPreconditioner
    | lx.AbstractLinearSolver
)
# Methods for damped problems only: those with parameters, and those that are names.
_DAMPED_OBJECTS = NystromKernel | AbstractPreconditioner
_DAMPED = ("kernel", "curvature", "cholesky-qr", "schur", "sparse", "products-first")

Form = Literal["quadratic", "prox-linear"]

WAYS: tuple[type[AbstractMethod], ...] = (
    SingularValues,
    Eigenvalues,
    OnOutputs,
    OnParameters,
    CholeskyQR,
    SchurComplement,
    SparseLU,
    ProductsFirst,
    MatrixFree,
    EigenvaluesFirst,
    FactorisedFirst,
    ProxLinearOnOutputs,
    ProxLinearOnParameters,
)


# Methods with parameters, and the ways that they select.
_OBJECTS: tuple[tuple[type, Any], ...] = (
    (NystromKernel, OfLowRank),
    (AbstractPreconditioner, MatrixFree),
    (lx.AbstractLinearSolver, ByLineax),
)


def check_method(method: Any, *, damped: bool = True, also: tuple[str, ...] = ()) -> None:
    """Raise unless a method is one that a solver takes.

    - `damped`: whether the solver's problems are damped.
    - `also`: further names, for a solver that does not take lineax's solvers.
    """
    if (damped and isinstance(method, _DAMPED_OBJECTS)) or _is_own(method):
        return
    if not also and isinstance(method, lx.AbstractLinearSolver):
        return
    methods = get_args(MethodName)
    if not damped:
        methods = tuple(m for m in methods if m not in _DAMPED)
    methods = (*methods, *also)
    if method not in methods:
        others = "" if also else " or a solver of lineax"
        objects = "one of `gnlin.preconditioners`, a `gnlin.methods.NystromKernel`"
        others = f", {objects}" * damped + others
        raise ValueError(
            f"`method` must be one of {', '.join(map(repr, methods))}{others} here, but "
            f"{method!r} was given."
        )


def _is_own(method: Any) -> bool:
    """Whether a method is a way of the user's own; raise if it is not complete."""
    is_own = isinstance(method, type) and issubclass(method, AbstractMethod)
    if missing := is_own and sorted(method.__abstractmethods__):
        names = " and ".join(map(repr, missing))
        raise ValueError(f"`method={method.__name__}` lacks {names}: define each there.")
    return is_own


def check_form(form: str, method: Any) -> None:
    check_one_of("form", form, get_args(Form))
    by_passes = method in ("auto", "kernel", "matrix-free")
    if form == "prox-linear" and not by_passes:
        raise ValueError(
            f"The method {method!r} is for quadratic problems; pass "
            '`method="auto"`, "kernel" or "matrix-free" with `form="prox-linear"`.'
        )


def problem_of(
    form: Form, objective: AbstractObjective, lin: Linearisation
) -> Quadratic | ProxLinear:
    """Return the linearised problem in either form; for squared error both agree."""
    if form == "prox-linear" and not objective.is_quadratic:
        return ProxLinear(lin.jacobian, lin.outputs, objective)
    return objective.expand(lin)


def by_products(
    problem: Quadratic | ProxLinear, preconditioner: AbstractPreconditioner | None = None
) -> MatrixFree | ProxLinearOnParameters:
    """Set up a linearised problem for iterations by products with the Jacobian."""
    if isinstance(problem, Quadratic):
        return MatrixFree(problem, preconditioner)
    return ProxLinearOnParameters(problem)


def choose(
    problem: Quadratic | ProxLinear,
    filter: Filter,
    num_trials: int = 1,
    method: Any = "auto",
) -> AbstractMethod:
    """Set up a linearised problem, by default for the cheapest way to solve it.

    **Arguments:**

    - `problem`: a [`gnlin.authoring.Quadratic`][], such as `objective.expand(lin)`.
    - `filter`: a filter of the kind that the problem will be solved for. If their damping
        may vanish, pass an undamped one.
    - `num_trials`: the approximate number of filters it will be solved for.
    - `method`: `"auto"` for the cheapest way, or the name of a way; a
        [`gnlin.methods.NystromKernel`][] or one of [`gnlin.preconditioners`][]; a solver
        of lineax; or a [`gnlin.authoring.AbstractMethod`][] of your own.

    **Returns:** a [`gnlin.authoring.AbstractSubproblem`][].

    **Raises:** `ValueError` if the method cannot solve the problem for this filter, or if
    `"auto"` finds no way within the memory budget.
    """
    way = way_of(problem, filter, num_trials, method)
    settings = () if isinstance(method, str | type) else (method,)
    subproblem = way.of(problem, problem.jacobian.cost(), *settings)
    if _is_own(method):
        _check_answer(way.__name__, subproblem, filter)
    return subproblem


def _check_answer(name: str, subproblem: Any, filter: Filter) -> None:
    """Raise `ValueError` unless a way of the user's own answers with a step."""
    if not isinstance(subproblem, AbstractMethod):
        raise ValueError(
            f"`of` of `method={name}` must return a `{name}`, such as "
            f"`cls(problem.at_hand(), cost.rows)`, but returns {subproblem!r}."
        )
    answer = eqx.filter_eval_shape(lambda: subproblem.solve(filter))
    what = f"`solve` of `method={name}` must return a `gnlin.authoring.Answer`"
    if not isinstance(answer, Answer):
        raise ValueError(f"{what}, such as `gnlin.authoring.Answer(step)`.")
    gradient = subproblem.gradient()
    if not _tree.alike(answer.step, gradient):
        raise ValueError(
            f"{what} whose step has the structure and the shapes of the parameters, "
            f"{_tree.listed_shapes(gradient)}, but it has the shapes "
            f"{_tree.listed_shapes(answer.step)}."
        )


def way_of(
    problem: Quadratic | ProxLinear, filter: Filter, num_trials: int, method: Any
) -> type[AbstractMethod]:
    """Return the class of the way that `choose` takes."""
    ways = (way for kind, way in _OBJECTS if isinstance(method, kind))
    given = method if _is_own(method) else next(ways, None)
    if given is not None:
        if not given.fits(problem, filter):
            raise does_not_serve(given, filter)
        return given
    serving = [way for way in WAYS if way.fits(problem, filter)]
    if method != "auto":
        asked = [way for way in serving if way.method == method]
        if not asked:
            raise _does_not_serve_here(method, problem, filter, serving)
        return asked[0]
    cost, name = problem.jacobian.cost(), type(filter).__name__
    costs = [way.cost(cost, filter, num_trials) for way in serving]
    if min(costs, default=math.inf) == math.inf:
        raise ValueError(
            f"Solving a {_form(problem)} problem for `{name}` takes more than the memory "
            f"budget of {cost.memory_budget:,} bytes: raise `memory_budget`."
            if serving
            else f"`{name}` cannot be used with `form={_form(problem)}`: use "
            '`form="quadratic"`.'
        )
    return serving[costs.index(min(costs))]


def _does_not_serve_here(
    method: Any,
    problem: Quadratic | ProxLinear,
    filter: Filter,
    serving: list[type[AbstractMethod]],
) -> ValueError:
    others = [f'"{way.method}"' for way in serving]
    if isinstance(problem, ProxLinear):
        others.append('`form="quadratic"`')
    why = f"cannot be used for `{type(filter).__name__}` on a {_form(problem)} problem"
    if OnParameters in serving:
        if method == SchurComplement.method:
            why = (
                "eliminates an array of which each example reads one row, but no array "
                "is declared to be such by `select=` of every group"
            )
        if method == SparseLU.method:
            why = (
                "is for examples that read few of the parameters, declared by `select=` "
                "of every group or by `gnlin.Sparsity`"
            )
    if method == SparseLU.method and not has_factorisation():
        why = (
            "needs klujax (`pip install gnlin[sparse]`), the CPU, and double precision "
            '(`jax.config.update("jax_enable_x64", True)`)'
        )
    return ValueError(f'The method {method!r} {why}: use "auto", or {", ".join(others)}.')


def _form(problem: Quadratic | ProxLinear) -> str:
    return '"quadratic"' if isinstance(problem, Quadratic) else '"prox-linear"'
