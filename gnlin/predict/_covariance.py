"""The covariance of parameters that were fitted to groups of residuals, or to data."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree, Scalar

from .._common import _tree
from .._common._checks import (
    check_callable,
    check_count,
    check_flag,
    is_traced,
    nan_unless,
)
from .._common._tree import ravel_pytree, Structure
from .._jacobian import DEFAULT_MEMORY_BUDGET
from .._linear_algebra._covariance import Covariance, rounded
from .._linearisation._group_loss import GroupLosses
from .._linearisation._linearisation import Linearisation, linearise
from .._linearisation._objective import AbstractObjective
from .._linearisation._retraction import flaw_of, Retraction
from .._training._data import as_batch
from .._training._group_network import GroupNetwork, of_groups
from .._training._model import Frozen, in_inference, make_network, Network
from .._training._prior import Prior
from .._training._residuals import as_groups, Groups, GroupsByName, Residuals
from .._training._solution import model_and_spec, Solution
from .._training._step import StepSettings
from ..losses import AbstractLoss, SquaredError
from ..losses._base import check_loss, with_reduction
from ..losses._of_examples import loss_beside
from ..losses._robust import reweighted
from ..spectra import Estimate
from ._inverse import by_singular_values, BySolves


# The model counts as at the minimum within this many standard deviations, measured by the
# length of a Newton step. The errors change little over a fraction of themselves.
_AT_MINIMUM = 0.1
# Sparse problems of more parameters than this are solved for each function. Singular
# values of a matrix of 2,000 parameters take some ten seconds.
_MANY = 2000


def covariance(
    model: PyTree,
    data: GroupsByName | Groups | Sequence[Residuals] | Residuals | tuple[PyTree, ...],
    *,
    loss: AbstractLoss = SquaredError(),
    absolute_sigma: bool = True,
    retraction: Any = None,
    filter_spec: PyTree | Callable[[Any], bool] | None = None,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> "ParameterCovariance":
    r"""Compute the covariance of parameters that were fitted to groups of residuals, such
    as cameras and points, poses of a graph, or curves that share parameters.

    It is the inverse of the Gauss-Newton curvature at the minimum,
    $\bigl(\sum_g w_g\,\phi_g^\top H_g\,\phi_g\bigr)^{-1}$, with $H_g$ the second
    derivatives of the loss of group g. For squared error and weights that are inverse
    variances, and for negative log-likelihoods, these are the usual standard errors. If a
    loss defines its `factor` or `root`, that is its curvature, and robust losses have
    none where it would be negative. For a fit of one curve, [`gnlin.curve_fit`][] has
    more, such as profiles. For the uncertainty of a network's outputs, use
    [`gnlin.predict.posterior`][].

    A parameter that the residuals do not determine has an infinite error, such as the
    place of a pose if only differences between poses were measured. A function of the
    parameters that they do determine, such as the distance between two poses, still has a
    finite error. Directions whose singular values are below rounding count as not
    measured. If a singular value is small, a second Jacobian at parameters that differ by
    rounding shows what that is. Many singular values of a network are close to rounding,
    so use double precision for the errors of a network and of coefficients that are
    trained with it.

    **Arguments:**

    - `model`: the [`gnlin.Solution`][] of [`gnlin.solve`][] or [`gnlin.fit`][], or a
        model at the minimum. The prior of a solution counts as further residuals.
    - `data`: the groups of residuals, as for [`gnlin.solve`][]; or `(inputs, targets)` or
        `(inputs, targets, weights)`.
    - `loss`: the loss of one example, if `data` are inputs and targets. Its sum over the
        examples counts, whatever its `reduction`.
    - `absolute_sigma`: whether the weights are inverse variances. If not, the covariance
        is multiplied by $2L/(m - k)$, with L the loss, m the number of residuals of
        positive weight, and k the number of parameters that they determine. This works
        only for squared error, without a prior.
    - `retraction`: that of the solver, as in [`gnlin.LevenbergMarquardt`][], for
        rotations and poses. Errors are then those of the step from the minimum.
    - `filter_spec`: the uncertain parameters, as for [`gnlin.solve`][]. By default these
        are the parameters that were trained, or all parameters if a model is passed. The
        others count as known. Leave out parameters at a bound.
    - `memory_budget`: the maximum bytes of a matrix.

    **Returns:** a [`gnlin.predict.ParameterCovariance`][].

    **Raises:** `ValueError` if an argument makes no sense, or if anything is not finite;
    also for sparse residuals of more than 2,000 parameters in single precision, which
    does not resolve what they determine. For so many parameters, only the positive part
    of each example's curvature counts.

    !!! example

        ```python
        peak = lambda p, x: p["height"] * jnp.exp(-(x / p["width"]) ** 2)
        x = jnp.linspace(-3, 3, 60)
        y = 2 * jnp.exp(-(x**2)) + 0.01 * jnp.cos(40 * x)
        groups = {
            "peak": gnlin.Residuals(lambda p, d: (peak(p, d[0]) - d[1]) / 0.01, (x, y)),
            "width": gnlin.Residuals(lambda p, _: (p["width"] - 1.02) / 0.05),
        }
        start = {"height": jnp.array(1.0), "width": jnp.array(2.0)}
        solution = gnlin.solve(start, groups)
        known = gnlin.predict.covariance(solution, groups)
        known.standard_errors["width"]
        area, error = known.derived(lambda p: jnp.sqrt(jnp.pi) * p["height"] * p["width"])
        ```

    ??? cite "Reference"

        G. Seber and C. Wild, *Nonlinear Regression* (1989), section 2.1; for what the
        data do not determine: Å. Björck, *Numerical methods for least squares problems*
        (1996), section 2.8.
    """
    check_loss(loss)
    check_flag("absolute_sigma", absolute_sigma)
    check_count("memory_budget", memory_budget)
    solution = model if isinstance(model, Solution) else None
    deviation = None if solution is None else solution.prior
    if deviation is not None and not absolute_sigma:
        raise ValueError(
            "The model was trained with a prior in units of the noise: pass weights that "
            "are inverse variances, and leave `absolute_sigma` out."
        )
    model, filter_spec = model_and_spec(model, filter_spec, retraction)
    groups, prior = as_groups(data), None
    network: Network | GroupNetwork
    losses: AbstractLoss | GroupLosses
    if groups is None:
        if solution is not None:
            model = in_inference(model, solution.state)
        batch = as_batch(data)
        parameters, network = make_network(model, filter_spec)
        batch = network.args(batch[0], None, None), *batch[1:]
        losses, batch = loss_beside(with_reduction(loss, "sum"), batch)
        if deviation is not None:
            prior = Prior.of(deviation, losses, batch)
    else:
        if not eqx.tree_equal(loss, SquaredError()):
            raise ValueError("`loss` is not for groups, each of which has its own.")
        parameters, network, batch, losses = of_groups(model, groups, filter_spec)
    curved = None
    if retraction is not None:
        if flaw := flaw_of(retraction, parameters):
            raise ValueError(flaw)
        curved = Retraction.of(retraction, parameters)
    fixed = curved, absolute_sigma, memory_budget
    losses = reweighted(losses, 0.0, every=True)  # second derivatives only
    setting = StepSettings(None, losses, network, prior=prior)
    known = _at(setting, parameters, batch, *fixed)
    is_inside, inverse = is_traced(known._distance), known._inverse
    if isinstance(inverse, Covariance) and (is_inside or inverse.is_doubtful):
        known = _at(setting, parameters, batch, *fixed, is_doubtful=True)
    distance = known._distance
    if is_inside:
        return known
    if not jnp.isfinite(distance):
        raise ValueError(
            "The residuals or their derivatives are not finite at the model, so that the "
            "parameters have no covariance: pass finite data, and a model at a minimum."
        )
    if distance > _AT_MINIMUM:
        warnings.warn(
            f"The model is {float(distance):.2g} standard deviations from the minimum, "
            "where the covariance holds: train it further, leave parameters at a bound "
            "out by `filter_spec`, and pass the `retraction` if the solver had one.",
            stacklevel=2,
        )
    if not known._inverse.is_whole:
        warnings.warn(
            "The standard errors are too small, because they leave out the negative "
            "curvature of the loss, which is too large: train the model further, or "
            "give the loss its expected curvature as `factor`.",
            stacklevel=2,
        )
    return known


@eqx.filter_jit
def _at(
    setting: StepSettings,
    parameters: PyTree[Array],
    batch: tuple,
    retraction: Retraction | None,
    absolute_sigma: bool,
    memory_budget: int,
    is_doubtful: bool = False,
) -> "ParameterCovariance":
    """Return the covariance at a model's parameters.

    - `is_doubtful`: whether a second Jacobian is evaluated, which shows the rounding of
        the first. It is needed only if a singular value is small.
    """

    def at(parameters: PyTree[Array]) -> tuple[Linearisation, AbstractObjective]:
        lin, objective = setting.linearised(parameters, batch, memory_budget)
        return lin if retraction is None else lin.along(retraction), objective

    lin, objective = at(parameters)
    if not absolute_sigma and not objective.is_quadratic:
        raise ValueError("`absolute_sigma=False` is for squared error only.")
    problem, moving = objective.expand(lin), _moving(lin)
    slope = problem.gradient()
    p, cost = problem.jacobian.domain.size, problem.jacobian.cost()
    fits = cost.rows_fit and p**2 * cost.itemsize <= memory_budget
    inverse: Covariance | BySolves
    # `newton` is the length of a Newton step in standard deviations.
    if fits and not (problem.jacobian.is_sparse and p > _MANY):
        nearby = None
        if is_doubtful:
            other, there = at(_nearby(parameters, retraction))
            nearby = there.expand(other)
        concave = _concave(objective, lin)
        inverse = by_singular_values(problem, moving, concave, nearby)
        newton = jnp.linalg.norm(_tree.matmul(ravel_pytree(slope)[0], inverse.factor))
    else:
        inverse = BySolves.of(problem, moving)
        newton = inverse.newton_decrement(slope)
    loss = objective.value(lin.outputs)
    number = objective.num_targets(lin.outputs).astype(loss.dtype)
    dof = number - inverse.rank.astype(loss.dtype)
    estimated = jnp.where(dof > 0, 2 * loss / dof, jnp.inf)
    scale = jnp.ones_like(loss) if absolute_sigma else estimated
    scale = nan_unless(jnp.isfinite(loss), scale)
    newton = newton.astype(scale.dtype)
    # In an exact fit the residuals, and so the distance, are rounding.
    size = _tree.norm(problem.jacobian.mv(parameters)).astype(scale.dtype)
    newton = jnp.where(newton <= _tree.eps(parameters) ** 0.5 * size, 0, newton)
    distance = newton / jnp.sqrt(jnp.where(scale > 0, scale, 1))
    known = scale, dof, parameters, retraction, inverse, distance
    return ParameterCovariance(*known, setting.network.frozen)


def _nearby(parameters: PyTree[Array], retraction: Retraction | None) -> PyTree[Array]:
    """Return the parameters, moved by a few roundings."""
    flat, unravel = ravel_pytree(jax.lax.stop_gradient(parameters))
    if retraction is None:
        return unravel(flat + rounded(flat))
    return retraction.moved(parameters, unravel(rounded(flat)))


def _concave(
    objective: AbstractObjective, lin: Linearisation
) -> Float[Array, "p p"] | None:
    """Return the negative curvature of the loss in the parameters, with its sign changed;
    `None` if there is none."""
    product = objective.concave(lin.outputs)
    if product is None:
        return None
    matrix, outputs = lin.matrix(), Structure.of(lin.outputs)

    def column(tangent: Float[Array, " m"]) -> Float[Array, " p"]:
        flat = ravel_pytree(product(outputs.unravel(tangent)))[0]
        return _tree.matmul(matrix.T, flat)

    return jax.lax.map(column, matrix.T)  # one after the other, to save memory


def _moving(lin: Linearisation) -> Bool[Array, " p"]:
    """Return which entries of a step move the parameters. A retraction, such as that of a
    pose of seven numbers, may use fewer entries than there are."""
    leaves = jax.tree.leaves(lin.point)
    moving = [jnp.ones(x.size, bool) for x in leaves]
    if lin.retraction is not None:
        for k, tangents in enumerate(lin.retraction.tangents(lin.point)):
            if tangents is not None:
                moving[k] = jnp.any(tangents != 0, axis=1).ravel()
    return jnp.concatenate(moving)


class ParameterCovariance(eqx.Module):
    """The covariance of fitted parameters, from [`gnlin.predict.covariance`][].

    **Attributes:**

    - `scale`: the factor of the inverse curvature; 1 if the weights are inverse
        variances.
    - `degrees_of_freedom`: the number of residuals of positive weight minus the number of
        parameters that they determine. With many parameters all count as determined.
    """

    scale: Scalar
    degrees_of_freedom: Scalar
    _parameters: PyTree[Array]
    _retraction: Retraction | None
    _inverse: Covariance | BySolves
    _distance: Scalar  # to the minimum
    _frozen: Frozen

    def __repr__(self) -> str:
        return f"ParameterCovariance(of {_tree.size(self._parameters):,} parameters)"

    @property
    def standard_errors(self) -> PyTree[Array]:
        """The standard error of each parameter, in the structure of the parameters, with
        `None` for other leaves. It is infinite if the residuals do not determine the
        parameter, and zero for an entry of a step that the retraction does not use.

        Sparse residuals of more than 2,000 parameters take a solve for each parameter,
        and no p x p matrix. With a sparse factorisation of a chain of states this is
        0.4 s for 3,000 parameters, 7 s for 10,000 and 71 s for 30,000.

        **Raises:** `ValueError` if a p x p matrix or the Jacobian does not fit into the
        memory budget."""
        variances = _variances(self._inverse, self.scale)
        return Structure.of(self._parameters).unravel(jnp.sqrt(variances))

    def derived(self, fn: Callable[[Any], PyTree[Array]]) -> Estimate:
        """Return a function of the model with its standard error, by linear propagation
        of the covariance.

        **Arguments:**

        - `fn`: a function of the model, or of the parameters of a pair
            `(fn, parameters)`, by JAX operations, that returns a pytree of floating-point
            arrays.

        **Returns:** `(value, standard_error)`. An error is infinite if the residuals do
        not determine the value.
        """
        lin = self._linearised(fn)
        variances = _variances_of(self._inverse, lin.matrix(), self.scale)
        errors = jnp.sqrt(variances)
        return Estimate(lin.outputs, Structure.of(lin.outputs).unravel(errors))

    def matrix(self, fn: Callable[[Any], PyTree[Array]]) -> Float[Array, "k k"]:
        """Return the covariance of the k numbers that a function of the model returns, in
        `ravel_pytree` order: infinite on the diagonal and NaN elsewhere for those that
        the residuals do not determine."""
        return _covariance_of(self._inverse, self._linearised(fn).matrix(), self.scale)

    def _linearised(self, fn: Callable[[Any], PyTree[Array]]) -> Linearisation:
        check_callable("fn", fn, "a function of the model", 'lambda p: p["a"] ** 2')

        def value(parameters: PyTree[Array], _: None) -> PyTree[Array]:
            model = self._frozen.in_training(parameters)
            found = fn(model if self._frozen.fn is None else model[1])
            for leaf in jax.tree.leaves(found):
                if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                    raise ValueError(
                        "`fn` must return floating-point arrays, but returned the dtype "
                        f"{jnp.result_type(leaf)}: convert it with `astype(float)`."
                    )
            return jax.tree.map(jnp.asarray, found)

        lin = linearise(value, self._parameters)
        return lin if self._retraction is None else lin.along(self._retraction)


@eqx.filter_jit
def _covariance_of(
    inverse: Covariance | BySolves, rows: Float[Array, "k p"], scale: Scalar
) -> Float[Array, "k k"]:
    finite, rows = _finite(rows)
    found = inverse.covariance_of(rows, scale)
    return jnp.where(finite[:, None] & finite[None], found, jnp.nan)


@eqx.filter_jit
def _variances_of(
    inverse: Covariance | BySolves, rows: Float[Array, "k p"], scale: Scalar
) -> Float[Array, " k"]:
    finite, rows = _finite(rows)
    return jnp.where(finite, inverse.variances(rows, scale), jnp.nan)


def _finite(
    rows: Float[Array, "k p"],
) -> tuple[Bool[Array, " k"], Float[Array, "k p"]]:
    """Return which rows are finite, and the rows with zeros in place of the others."""
    finite = jnp.all(jnp.isfinite(rows), axis=1)
    return finite, jnp.where(finite[:, None], rows, 0)


@eqx.filter_jit
def _variances(inverse: Covariance | BySolves, scale: Scalar) -> Float[Array, " p"]:
    if isinstance(inverse, BySolves):
        return inverse.variances_of_parameters(scale)
    identity = jnp.eye(len(inverse.factor), dtype=inverse.factor.dtype)
    return inverse.variances(identity, scale)
