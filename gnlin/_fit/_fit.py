"""`fit`, the function that users call to train on batches."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Key, PyTree, ScalarLike

from .._common._checks import as_key, check_count, check_flag, check_takes, is_traced
from .._common._progress import on_a_terminal
from .._common._sharding import automatic, mesh_of, on_mesh, places
from .._linearisation._bounds import check_start
from .._linearisation._group_loss import GroupLosses
from .._solver import (
    AbstractGaussNewton,
    as_solver,
    IterativeLinearisation,
    LevenbergMarquardt,
)
from .._training._curvature import without_curvature
from .._training._data import as_tuple
from .._training._divergence import check_divergence
from .._training._group_network import GroupNetwork, of_groups
from .._training._model import in_single, make_network, Network
from .._training._prior import Prior
from .._training._pulled import only_pulled
from .._training._residuals import as_groups, check_order, refuse_for_groups
from .._training._solution import Model, Solution
from .._training._step import all_checked, begin, StepSettings
from ..callbacks import Callback, Progress
from ..losses import AbstractLoss, SquaredError
from ..losses._base import check_loss
from ..losses._of_examples import loss_beside
from ._checkpoint import Checkpoint
from ._run import Run
from ._step import with_shared_network
from ._stream import ArrayStream, GroupStream, IterableStream, make_stream
from ._validation import Validation


def fit(
    model: Model,
    data: Any,
    solver: AbstractGaussNewton | Any = LevenbergMarquardt(),
    *,
    loss: AbstractLoss = SquaredError(),
    prior: ScalarLike | None = None,
    batch_size: int | Mapping[str, int] | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    key: Key[Array, ""] | None = None,
    state: PyTree = None,
    validation: Any = None,
    validate_every: int | None = None,
    metrics: Mapping[str, Callable] | None = None,
    augment: Callable[..., PyTree[Array]] | None = None,
    curvature_batch_size: int | None = None,
    filter_spec: PyTree | Callable[[Any], bool] = eqx.is_inexact_array,
    axis_name: str = "batch",
    part_size: int | None = None,
    callbacks: Iterable[Callback] | Callback = (),
    progress: bool = True,
    checkpoint: Checkpoint | str | Path | None = None,
    resume: bool = False,
    divergence: float | None = 100.0,
) -> Solution[Model]:
    r"""Train an Equinox model on batches of data with a solver of this library.

    One step of a Gauss-Newton solver is an outer step on the batch: it linearises, solves
    the subproblem, and steps. One step of [`gnlin.IterativeLinearisation`][] is an inner
    step on the batch: the linearisation point $\theta_s$ stays for K steps across
    batches, and each step takes one forward, one tangent and one transposed pass. On the
    full batch (`batch_size=None`) one step of any solver is an outer step.

    **Arguments:**

    - `model`: a callable pytree from one input to one output, or a pair
        `(fn, parameters)` with `fn(parameters, x)`. If it has a `key` argument (for
        dropout), each example gets its own key.
    - `data`: `(inputs, targets)` or `(inputs, targets, weights)`, of arrays (or pytrees,
        such as a dictionary of inputs) with a leading axis over examples; or an iterable
        of such batches, such as a list or a loader of tf.data, grain or torch; or a
        function of the epoch (0, 1, ...) that returns an iterable. The next batch is
        taken while a step runs, before callbacks hear of it. It may also be groups
        of [`gnlin.Residuals`][], in a dictionary, a list, or a single one, whose data may
        be drawn again for each step.
    - `solver`: any solver of gnlin, such as [`gnlin.LevenbergMarquardt`][], which needs
        no settings; or an optimiser of optax, which then trains the model itself.
    - `loss`: the loss of outputs and targets. Unless its `reduction` says otherwise it is
        the mean, so that damping and learning rate do not depend on the batch size.
    - `prior`: the standard deviation of a normal prior of each trained parameter about
        zero, which is weight decay, as in [`gnlin.solve`][]. This needs data in arrays.
    - `batch_size`: the number of examples in a step, or `None` for all. Each epoch
        shuffles the examples and leaves out an incomplete last batch. For groups it is a
        number, or a dictionary of numbers by name. Each step then draws that many
        examples of a group, and counts as an epoch.
    - `epochs`, `steps`: the length of the run; give one of the two.
    - `key`: the key of shuffling, augmentation and dropout, by default
        `jax.random.key(0)`.
    - `validation`: validation data, in the form of `data`. They are evaluated in
        inference mode: on the network and, if a linearisation is trained across batches,
        on the linearised model.
    - `validate_every`: the number of steps between validations; by default one epoch.
    - `metrics`: functions of `(outputs, targets)` of many examples, by name, such as
        [`gnlin.losses.accuracy`][]. Their means over the validation data enter the
        history; each batch is weighted by its number of targets that the loss does not
        ignore. Weights of examples affect the loss only.
    - `augment`: a function `augment(inputs, key)` of one example.
    - `curvature_batch_size`: the number of examples, more than `batch_size`, from which
        the curvature is estimated, while the gradient comes from the batch. This needs
        the quadratic form.
    - `state`, `filter_spec`, `axis_name`, `part_size`: the model's state, the leaves to
        train, the name of the batch axis, and the number of examples whose activations
        are in memory at the same time, as in [`gnlin.solve`][]. Parts change the
        rounding, which conjugate gradients amplify, so that runs with and without them
        differ visibly after some steps.
    - `callbacks`: callbacks of `gnlin.callbacks`, or your own. At each event,
        callbacks with `columns` are called before the others.
    - `progress`: whether to draw a progress bar, if there is a terminal.
    - `checkpoint`: a [`gnlin.Checkpoint`][], or a folder, to which a checkpoint is
        written every ten minutes.
    - `resume`: whether to resume from the folder's latest checkpoint, if there is one.
        With the same arguments, history and parameters are then bit for bit the same as
        without the interruption.
    - `divergence`: the largest loss, in multiples of the first one, as in
        [`gnlin.solve`][].

    **Returns:** a [`gnlin.Solution`][]. Non-finite numbers and divergence end the run at
    the last finite point, with a warning; so does Ctrl-C. If a loader or a callback
    raises an error, its attribute `solution` is the result so far.

    **Raises:** `ValueError` if an argument makes no sense; [`gnlin.CheckpointError`][],
    before training, if a checkpoint cannot be written, is damaged, or belongs to another
    run.

    !!! example

        ```python
        images, labels = sklearn.datasets.load_digits(return_X_y=True)
        images = images / 16
        model = eqx.nn.MLP(
            64, 10, 32, 1, activation=jnp.tanh, key=jax.random.key(0)
        )
        result = gnlin.fit(
            model,
            (images[:1347], labels[:1347]),
            loss=gnlin.SoftmaxCrossEntropy(),
            batch_size=128,
            epochs=5,
            validation=(images[1347:], labels[1347:]),
            metrics={"accuracy": gnlin.losses.accuracy},
        )
        result.history["validation_accuracy"][-1]  # about 0.9
        ```
    """
    by_optax = not isinstance(solver, AbstractGaussNewton)
    solver = as_solver(solver)
    check_loss(loss)
    loss = loss.as_arguments()
    check_divergence(divergence)
    for name, value in (
        ("batch_size", None if isinstance(batch_size, Mapping) else batch_size),
        ("epochs", epochs),
        ("steps", steps),
        ("validate_every", validate_every),
        ("curvature_batch_size", curvature_batch_size),
        ("part_size", part_size),
    ):
        if value is not None:
            check_count(name, value)
    if (epochs is None) == (steps is None):
        raise ValueError("Pass exactly one of `epochs` and `steps`.")
    if augment is not None:
        if not callable(augment):
            raise ValueError("`augment` must be a function, `augment(inputs, key)`.")
        check_takes("augment(inputs, key)", augment, 2)
    metrics = {} if metrics is None else metrics
    if not (isinstance(metrics, Mapping) and all(map(callable, metrics.values()))):
        raise ValueError("`metrics` must be functions of `(outputs, targets)`, by name.")
    if (metrics or validate_every) and validation is None:
        raise ValueError(
            "`metrics` and `validate_every` need validation data: pass `validation`."
        )
    if "loss" in metrics:
        raise ValueError(
            "The validation loss already has a column: give the metric a name other than "
            '"loss".'
        )
    callbacks = _as_list(callbacks)
    check_flag("progress", progress)
    check_flag("resume", resume)
    if resume and checkpoint is None:
        raise ValueError("`resume=True` needs `checkpoint`, the folder to resume from.")
    if isinstance(checkpoint, str | Path):
        checkpoint = Checkpoint(checkpoint)
    if not isinstance(checkpoint, Checkpoint | None):
        raise ValueError(
            "`checkpoint` must be a folder or a `gnlin.Checkpoint`, but "
            f"{checkpoint!r} was given."
        )

    check_order("fit", model, data)
    groups = as_groups(data)
    data = as_tuple(data)
    in_memory = groups is not None or isinstance(data, tuple)
    if is_traced((model, solver, data if in_memory else None)):
        raise ValueError(
            "`gnlin.fit` is a Python loop over compiled steps: use `gnlin.solve` inside "
            "of a compiled program, such as under `jax.jit` or `jax.vmap`."
        )
    mesh = mesh_of((model, data) if in_memory else model)
    key = jax.random.key(0) if key is None else as_key(key)
    data_key, step_key = jax.random.split(key)
    model, state = automatic((model, state))
    network: Network | GroupNetwork
    losses: AbstractLoss | GroupLosses = loss.reduced("mean")
    of_prior = None
    if groups is None:
        if isinstance(batch_size, Mapping):
            raise ValueError(
                "`batch_size` by name needs groups of residuals: pass one number."
            )
        stream = make_stream(data, batch_size, data_key)
        if isinstance(stream, ArrayStream):
            losses, stream.example = loss_beside(losses, stream.example)
        streaming = batch_size is not None or isinstance(stream, IterableStream)
        _check_curvature_batch(curvature_batch_size, stream, solver)
        if prior is not None:
            of_prior = _prior(prior, losses, stream)
        parameters, network = make_network(
            model, filter_spec, state, axis_name, part_size
        )
        state = in_single(state)
    else:
        refuse_for_groups(
            loss=loss,
            state=state,
            augment=augment,
            validation=validation,
            curvature_batch_size=curvature_batch_size,
            prior=prior,
        )
        options = batch_size, part_size
        posed = of_groups(model, groups, filter_spec, *options, may_draw=True)
        parameters, network, batch, losses = posed
        losses = losses.reduced("mean")
        stream, streaming = GroupStream(groups, batch), network.draws
    check_start(solver.bounds, parameters)
    if solver.retraction is not None:
        raise ValueError(
            "`retraction` needs full batches: use `gnlin.solve`, or leave it out."
        )
    setting = StepSettings(
        solver,
        losses,
        network,
        step_key,
        divergence,
        augment,
        stream.batch_size,
        curvature_batch_size,
        streaming,
        prior=of_prior,
    )
    outputs = all_checked(setting, parameters, state, stream.at_hand())
    if flat := without_curvature("fit", setting, outputs, stream.example[1]):
        warnings.warn(flat, stacklevel=2)
    if pulled := only_pulled(setting, parameters, state, stream.example):
        warnings.warn(pulled, stacklevel=2)
    carry = begin(setting, parameters, state, outputs)
    shardings = places(carry, stream.example)
    if isinstance(stream, IterableStream):  # its batches stay where they are
        shardings = shardings._replace(batch=())
    setting = setting._replace(places=shardings)
    evaluation = None
    if validation is not None:
        kept = solver.linearisation_point(carry.solver_state) is not None
        linearised = kept and not by_optax  # with a period of 1 both are the same
        evaluation = Validation(setting, carry, validation, metrics, linearised)
    if augment is None:
        setting = with_shared_network(setting, parameters, stream)
    if progress and on_a_terminal():
        callbacks.append(Progress())
    run = Run(
        setting,
        network.frozen,
        carry,
        stream,
        epochs,
        steps,
        callbacks,
        evaluation,
        validate_every,
        checkpoint,
    )
    hand_over = lambda solution: on_mesh(solution, mesh)
    run.train(resume, hand_over)
    solution = run.as_solution()
    complaint = run.complaint
    if evaluation is not None and evaluation.fault:
        complaint += f" The validation data are not finite. {evaluation.fault}"
    if complaint:
        warnings.warn(complaint.strip(), stacklevel=2)
    return hand_over(solution)


def _as_list(callbacks: Any) -> list[Callback]:
    several = isinstance(callbacks, Iterable)
    callbacks = list(callbacks) if several else [callbacks]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ValueError(
                "`callbacks` must be instances of `gnlin.callbacks.Callback`, such as "
                f"`gnlin.callbacks.Progress()`, but {callback!r} was given."
            )
    return callbacks


def _prior(prior: ScalarLike, loss: AbstractLoss, stream: Any) -> Prior:
    if not isinstance(stream, ArrayStream):
        raise ValueError(
            "`prior` needs to know the number of examples: pass the data as arrays, or "
            "leave it out."
        )
    size = stream.batch_size or stream.num_examples
    return Prior.of(prior, loss, stream.example, size / stream.num_examples)


def _check_curvature_batch(size, stream, solver) -> None:
    if size is None:
        return
    if stream.batch_size is None:
        raise ValueError(
            "`curvature_batch_size` needs a `batch_size`, and the data as arrays."
        )
    if not stream.batch_size < size <= stream.num_examples:
        raise ValueError(
            f"`curvature_batch_size` must be more than `batch_size`, {stream.batch_size},"
            f" and at most the number of examples, {stream.num_examples}, but is {size}."
        )
    if isinstance(solver, IterativeLinearisation):
        what = "An optimiser of optax uses no curvature"
        if solver.learning_rate is not None or solver.period != 1:
            what = "Iterative linearisation uses one batch for each inner step"
        raise ValueError(f"{what}: leave `curvature_batch_size` out.")
    if getattr(solver, "form", "quadratic") != "quadratic":
        raise ValueError(
            f'`curvature_batch_size` cannot be used with `form="{solver.form}"`: pass a '
            'solver with `form="quadratic"`.'
        )
