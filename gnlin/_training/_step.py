"""One training step of a network on a batch, used by both drivers."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, Float, Key, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._canonical import are_read
from .._common._history import columns_of
from .._common._sharding import Places, sharded
from .._jacobian import WithPrior
from .._linearisation._group_loss import GroupLosses, objective_of
from .._linearisation._linearisation import Linearisation, linearise, linearised
from .._linearisation._objective import AbstractObjective
from .._solver import print_row, State
from ..losses import AbstractLoss
from ._divergence import Watch
from ._group_network import GroupNetwork
from ._model import Network
from ._prior import Prior


Shapes = PyTree[jax.ShapeDtypeStruct]


class Kept(NamedTuple):
    """The last linearisation of a run, with its Jacobian as a matrix."""

    point: PyTree[Array]
    outputs: PyTree[Array]
    matrix: Float[Array, "m p"]

    def is_at(self, y: PyTree[Array]) -> Bool[Array, ""]:
        """Whether the linearisation is at this point."""
        return ~_tree.any_nonzero(jax.tree.map(jnp.subtract, self.point, y))


class Carry(NamedTuple):
    """The state that one step passes to the next."""

    parameters: PyTree[Array]
    solver_state: State
    model_state: PyTree
    watch: Watch | None
    kept: Kept | None = None
    # The model's state before the last step, and the number of that step, which are those
    # of `loss`; None without state, and across batches
    before: tuple[PyTree, Array] | None = None

    @property
    def loss(self) -> Scalar:
        """The loss at `parameters`, if each step sees all examples."""
        loss, watch = self.solver_state.report.loss, self.watch
        return loss if watch is None else jnp.where(watch.diverges, watch.best, loss)

    def at_the_best(self) -> "Carry":
        """Return the state at the best point, with the result, if the run diverges."""
        state, watch = self.solver_state, self.watch
        if watch is None:
            return self
        result = optx.RESULTS.where(
            watch.diverges, optx.RESULTS.nonlinear_divergence, state.result
        )
        return self._replace(
            parameters=_tree.where(watch.diverges, watch.y, self.parameters),
            solver_state=eqx.tree_at(lambda s: s.result, state, result),
        )

    def after_all_steps(
        self, factor: float | None, is_last: ScalarLike = True
    ) -> "Carry":
        """Return the state of a full batch after the last step, which no further step
        judges: if its loss is far above the first one, the run has diverged.

        - `factor`: the largest loss, in multiples of the first one.
        - `is_last`: whether no step is left.
        """
        watch, state = self.watch, self.solver_state
        if watch is None or factor is None:
            return self
        far = watch.is_far(state.report.loss, factor) & (watch.size > 0)
        watch = watch.ended_if(far & is_last & ~state.is_over)
        return self._replace(watch=watch).at_the_best()


class StepSettings(NamedTuple):
    """The settings of a whole run."""

    solver: Any  # an `AbstractGaussNewton`; `None` if no step is made
    loss: AbstractLoss | GroupLosses
    network: Network | GroupNetwork
    key: Key[Array, ""] | None = None  # from `key_of_steps`; None for the default key
    divergence: float | None = None  # largest loss, in multiples of the first one
    augment: Callable[..., PyTree[Array]] | None = None
    batch_size: int | None = None
    curvature_batch_size: int | None = None
    streaming: bool = False  # whether each step sees another batch
    places: Places = Places()
    prior: Prior | None = None
    keeps: bool = False  # whether to keep the last linearisation

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the objective's parts, if it has several."""
        if self.prior is not None:
            return "data", "prior"
        return self.loss.names if isinstance(self.loss, GroupLosses) else ()

    def function(self) -> Callable[[PyTree, Any], Any]:
        """Return the function whose outputs the objective takes: the network's, beside
        the prior's if there is one."""
        fn, has_state = self.network.function(), self.network.has_state
        return fn if self.prior is None else WithPrior(fn, has_state)

    def objective(self, outputs: Shapes, data: tuple, **options) -> AbstractObjective:
        """Return the objective of a batch; `options` are those of `objective_of`."""
        if self.prior is None:
            return objective_of(self.loss, outputs, data, **options)
        of_data: Any = objective_of(self.loss, outputs["data"], data, **options)
        return self.prior.beside(of_data, outputs["prior"])

    def check(self, outputs: Shapes, targets: PyTree[Array]) -> None:
        """Raise `ValueError` if the targets do not suit the outputs."""
        self.loss.check(outputs if self.prior is None else outputs["data"], targets)

    def linearised(
        self, parameters: PyTree[Array], batch: tuple, memory_budget: int
    ) -> tuple[Linearisation, AbstractObjective]:
        """Linearise the function on a batch; return also the objective, after a check of
        the targets."""
        fn = self.function()
        lin = linearise(fn, parameters, batch[0], memory_budget=memory_budget)
        outputs = _tree.Structure.of(lin.outputs).tree
        self.check(outputs, batch[1])
        return lin, self.objective(outputs, batch)

    def args(self, inputs: PyTree[Array], number: ScalarLike, state: PyTree) -> Any:
        """Return the network's `args` for step `number`. Keys and augmentation differ
        between steps, and are the same in all evaluations within a step."""
        key, augment_key = jax.random.split(self._key(number))

        def of_each(key: Key[Array, ""]) -> Key[Array, " n"]:
            return jax.random.split(key, jax.tree.leaves(inputs)[0].shape[0])

        if self.augment is not None:
            inputs = jax.vmap(self.augment)(inputs, of_each(augment_key))
        keys = of_each(key) if self.network.takes_key else None
        return self.network.args(inputs, keys, state)

    def drawn(self, data: tuple, number: ScalarLike) -> tuple:
        """Return the data of step `number`, for which groups may draw new examples."""
        return self.network.drawn(data, self._key(number))

    def _key(self, number: ScalarLike) -> Key[Array, ""]:
        key = key_of_steps(jax.random.key(0)) if self.key is None else self.key
        return jax.random.fold_in(key, number)

    def outputs(self, parameters: PyTree[Array], args: Any) -> PyTree[Array]:
        """Return the outputs, without the model's state."""
        found = self.function()(parameters, args)
        return found[0] if self.network.has_state else found

    def is_random(self, parameters: PyTree[Array], args: Any) -> bool:
        """Whether outputs of the same examples differ between steps, according to the
        jaxpr."""
        if self.augment is not None or not self.network.takes_key:
            return self.augment is not None
        inputs, keys, *state = args
        of_keys = lambda keys: self.outputs(parameters, (inputs, keys, *state))
        return any(are_read(jax.make_jaxpr(of_keys)(keys).jaxpr))


def key_of_steps(key: Key[Array, ""]) -> Key[Array, ""]:
    """Return the key of the steps; the other half of the split shuffles the data."""
    return jax.random.split(key)[1]


def checked_outputs(
    setting: StepSettings, parameters: PyTree, model_state: PyTree, example: tuple
) -> Shapes:
    """Return the shapes of the outputs, after checking the targets against them."""
    inputs, drawn, _ = jax.eval_shape(setting.drawn, example, 0)

    def leading(x, like):
        return x if x.shape == like.shape else x[: len(like)]

    # Take as many targets as are drawn. The drawn ones are traced, and these have values
    # that can be checked.
    targets = jax.tree.map(leading, example[1], drawn)

    def forward(parameters, inputs, state):
        return setting.outputs(parameters, setting.args(inputs, 0, state))

    outputs = eqx.filter_eval_shape(forward, parameters, inputs, model_state)
    setting.check(outputs, targets)
    return outputs


def all_checked(
    setting: StepSettings,
    parameters: PyTree,
    model_state: PyTree,
    batches: Iterable[tuple],
) -> Shapes:
    """Check the targets of all batches, and return the first batch's output shapes."""
    outputs: dict[tuple, Shapes] = {}
    for batch in batches:
        kind = tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(batch[0]))
        if kind in outputs:
            setting.check(outputs[kind], batch[1])
        else:
            outputs[kind] = checked_outputs(setting, parameters, model_state, batch)
    return next(iter(outputs.values()))


def begin(
    setting: StepSettings, parameters: PyTree[Array], model_state: PyTree, outputs: Shapes
) -> Carry:
    """Return the state before the first step; evaluates nothing."""
    solver = setting.solver
    start = solver.start_stream if setting.streaming else solver.start
    state, watch = start(parameters, outputs), None
    if setting.divergence is not None:
        zero = jnp.zeros((), state.report.loss.dtype)
        best = jnp.full_like(zero, jnp.inf)
        watch = Watch(zero, zero, best, parameters, jnp.zeros((), int))
    kept = None
    if setting.keeps:
        shape = _tree.size(outputs), _tree.size(parameters)
        matrix = jnp.zeros(shape, _tree.dtype(parameters))
        kept = Kept(parameters, _tree.zeros_like(outputs), matrix)
    before = None
    if setting.network.has_state and not setting.streaming:
        before = model_state, jnp.array(0)
    return Carry(parameters, state, model_state, watch, kept, before)


def advanced(
    setting: StepSettings,
    objective: AbstractObjective,
    args: Any,
    carry: Carry,
    number: Array,
    counts: Bool[Array, ""] | None = None,
) -> tuple[Carry, dict[str, Array], Bool[Array, ""]]:
    """Make one step. Return the new state, its row of the history, and whether a step was
    made, which is false if the run has ended.

    - `counts`: whether any target of the batch has a weight. If not, nothing changes, and
        the row has no loss. `None` if each target has one.
    """
    solver, fn, has_aux = setting.solver, setting.function(), setting.network.has_state
    evaluate, kept = lambda y: setting.outputs(y, args), carry.kept
    if setting.streaming:
        with sharded(setting.places):
            y, state, now, aux = solver.advance_stream(
                objective, fn, carry.parameters, args, carry.solver_state, has_aux=has_aux
            )
    else:
        budget, begun = solver.memory_budget, carry.solver_state
        point = solver.next_point(carry.parameters, begun)
        lin, aux = linearised(fn, point, args, has_aux, budget)
        if kept is not None:
            lin = lin.materialise()
            kept = Kept(lin.point, lin.outputs, lin.matrix())
        is_random = setting.is_random(carry.parameters, args)
        with sharded(setting.places):
            y, state = solver.advance(
                objective, lin, evaluate, begun, same_examples=not is_random
            )
        now, detour = solver.outputs_of_run(lin, begun), solver.detour(begun)
        if has_aux and detour is not None:
            aux = _tree.where(detour.is_on, carry.model_state, aux)
    loss = objective.value(now).astype(state.report.loss.dtype)
    watch = carry.watch
    if watch is not None:
        assert setting.divergence is not None
        # `loss` belongs to this point, which is not `parameters` if a step was undone.
        point = carry.parameters if state.stride is None else state.stride.point
        first = Watch.start(objective, watch.y, now, loss)
        watch = _tree.where(number == 0, first, watch)
        watch = watch.look(point, loss, setting.divergence)
        if not setting.streaming:
            # A step that is refused, or that overflows far above the start.
            diverged = state.result == optx.RESULTS.nonlinear_divergence
            lost = (state.result == optx.RESULTS.nonfinite) & (watch.num_far > 0)
            watch = watch.ended_if(diverged | lost & jnp.isfinite(loss))
        ended = Carry(y, state, None, watch).at_the_best()
        y, state = ended.parameters, ended.solver_state
    model_state, of_loss = carry.model_state, carry.before
    if of_loss is not None:
        of_loss = model_state, jnp.asarray(number, of_loss[1].dtype)
    if has_aux:
        failed = state.result != optx.RESULTS.successful
        model_state = _tree.where(failed, model_state, aux)
    row = state.row() | {"loss": loss}
    columns = columns_of(setting.names)
    each = objective.values(now) if columns else {}
    before = carry.solver_state.counts.num_feature_updates
    moved = jnp.array(True)
    if not setting.streaming:
        moved = state.counts.num_feature_updates > before
    row |= {c: each[n].astype(loss.dtype) for n, c in columns.items()}
    new = Carry(y, state, model_state, watch, kept, of_loss)
    if counts is not None:
        new = _tree.where(counts, new, carry)
        none = _no_step(carry, row)  # in the order of the columns
        row = {
            name: jnp.where(counts, x, none[name].astype(x.dtype))
            for name, x in row.items()
        }
    print_row(solver.verbose, row, number + 1, moved)
    return new, row, moved


def _no_step(carry: Carry, row: dict[str, Array]) -> dict[str, Array]:
    """Return the row of a batch in which nothing counts: its losses are NaN."""
    nothing = {name: jnp.full_like(x, jnp.nan) for name, x in row.items()}
    last, zero = carry.solver_state.row(), jnp.zeros_like(row["loss"])
    kept = {name: last[name] for name in ("damping", "num_feature_updates")}
    names = "gradient_norm", "step_norm", "num_inner_steps"
    return nothing | kept | dict.fromkeys(names, zero)
