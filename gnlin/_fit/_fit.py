"""Training on batches, as the user calls it."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Key, PyTree

from .._common._checks import as_key, check_count, check_flag, is_traced
from .._common._progress import on_a_terminal
from .._common._sharding import automatic, mesh_of, on_mesh, places
from .._linearisation._bounds import check_start
from .._linearisation._objective import GroupLosses
from .._solver import AbstractGaussNewton, as_solver, check_divergence, LevenbergMarquardt
from .._training._data import as_tuple
from .._training._model import make_network, Network
from .._training._residuals import as_groups, GroupNetwork, of_groups, refuse_for_groups
from .._training._solution import Model, Solution
from .._training._step import all_checked, begin, columns_of, StepSettings
from ..callbacks import Callback, Progress
from ..losses import AbstractLoss, SquaredError
from ..losses._base import check_loss
from ._checkpoint import Checkpoint
from ._run import Run
from ._stream import GroupStream, IterableStream, make_stream
from ._validation import Validation


def fit(
    model: Model,
    data: Any,
    solver: AbstractGaussNewton | Any = LevenbergMarquardt(),
    *,
    loss: AbstractLoss = SquaredError(),
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
    r"""Train an Equinox model on batches of data by a solver of this library.

    One step of a Gauss-Newton solver is an outer step on the batch: it linearises there,
    solves as far as it does, and steps. One step of [`gnlin.IterativeLinearisation`][] is
    an inner step on the batch: $\theta_s$ stays for K of them, across batches, each of
    whose linearised outputs take one forward, one tangent and one transposed pass. On the
    full batch (`batch_size=None`) one step of any solver is an outer step.

    **Arguments:**

    - `model`: any callable pytree from one input to one output, or a pair
        `(fn, parameters)` with `fn(parameters, x)`. A `key` argument, if it has one (for
        dropout), is given a key of its own for each example.
    - `data`: `(inputs, targets)` or `(inputs, targets, weights)`, of arrays (or pytrees,
        such as a dictionary of inputs) with a leading axis over examples; or any iterable
        of such batches, such as a list or a loader of tf.data, grain or torch; or a
        function of the epoch (0, 1, ...) that returns an iterable. Or groups of
        [`gnlin.Residuals`][], in a dictionary, a list, or a single one, whose data may be
        drawn anew for each step.
    - `solver`: any solver of gnlin, of which [`gnlin.LevenbergMarquardt`][] needs no
        number; or an optimiser of optax, whose steps are then the model's own.
    - `loss`: of the outputs, on the targets; unless its `reduction` says otherwise the
        mean, so that damping and learning rate mean the same on batches of any size.
    - `batch_size`: examples a step, drawn anew each epoch without replacement; what is
        left of an epoch, less than a batch, is left out. `None` for all of them. Of
        groups a number, or numbers by their names: so many are drawn in each step, which
        counts as an epoch.
    - `epochs`, `steps`: how long to train; one of the two.
    - `key`: of shuffling, augmentation and dropout; `jax.random.key(0)` by default.
    - `state`: the model's state (as from `equinox.nn.make_with_state`), if it has one.
        The linearisation includes the statistics of the batch.
    - `validation`: data to look at, likewise; in inference mode, on the network and,
        where one is trained across batches, on its linearisation.
    - `validate_every`: steps from one look to the next; by default once an epoch.
    - `metrics`: names and functions of `(outputs, targets)`, of many examples, such as
        [`gnlin.losses.accuracy`][]; means over the validation data go to the history,
        with each batch by the number of its targets that count. Weights of the examples
        are the loss's only.
    - `augment`: `augment(inputs, key)` of one example.
    - `curvature_batch_size`: examples, more than the batch, from which the curvature is
        estimated, while the gradient is the batch's; quadratic form only.
    - `filter_spec`: which leaves to train, as for `equinox.partition`.
    - `axis_name`: of the batch, as the model's batch normalisation was given it.
    - `part_size`: how many examples (of each group) have their activations in memory at
        once; those of the rest are made anew in each product, at some 4/3 of its time.
        `None` for all of them.
    - `callbacks`: of `gnlin.callbacks`, or your own.
    - `progress`: whether to draw a bar, where there is a terminal. Without it and without
        callbacks nothing is printed or called.
    - `checkpoint`: a [`gnlin.Checkpoint`][], or a folder to write one to every ten
        minutes.
    - `resume`: whether to go on from the folder's latest checkpoint, if it has one. Then
        the history and the parameters become, bit for bit, what they had been without the
        interruption, if `data`, `solver` and the rest are what they were.
    - `divergence`: a loss of more than so many times the first, for five steps in a row,
        ends the run, which hands back the best model; `None` for no such end.

    **Returns:** a [`gnlin.Solution`][]. Non-finite numbers and divergence end the run at
    the last finite point, with a warning; so does Ctrl-C.

    **Raises:** `ValueError` if an argument cannot be meant; [`gnlin.CheckpointError`][],
    before training, if a checkpoint cannot be written, is damaged, or is another run's.

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
        result.history["validation_accuracy"][-1]  # 0.92
        ```
    """
    solver = as_solver(solver)
    check_loss(loss)
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
        raise ValueError("Pass one of `epochs` and `steps`: how long to train.")
    if augment is not None and not callable(augment):
        raise ValueError("`augment` must be a function, `augment(inputs, key)`.")
    metrics = {} if metrics is None else metrics
    if not (isinstance(metrics, Mapping) and all(map(callable, metrics.values()))):
        raise ValueError("`metrics` must be functions of `(outputs, targets)`, by name.")
    if (metrics or validate_every) and validation is None:
        raise ValueError(
            "`metrics` and `validate_every` are of validation data: pass `validation`."
        )
    if "loss" in metrics:
        raise ValueError(
            "The validation loss has a column of its own: call the metric other than "
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

    groups = as_groups(data)
    data = as_tuple(data)
    in_memory = groups is not None or isinstance(data, tuple)
    if is_traced((model, solver, data if in_memory else None)):
        raise ValueError(
            "`gnlin.fit` is a loop over compiled steps: inside of a compiled program, as "
            "under `jax.jit` or `jax.vmap`, use `gnlin.solve`."
        )
    mesh = mesh_of((model, data) if in_memory else model)
    key = jax.random.key(0) if key is None else as_key(key)
    data_key, step_key = jax.random.split(key)
    model, state = automatic((model, state))
    network: Network | GroupNetwork
    losses: AbstractLoss | GroupLosses = loss
    if groups is None:
        if isinstance(batch_size, Mapping):
            raise ValueError("A `batch_size` by names is for groups of residuals.")
        size, stream = batch_size, make_stream(data, batch_size, data_key)
        streaming = size is not None or isinstance(stream, IterableStream)
        _check_curvature_batch(curvature_batch_size, stream, solver)
        parameters, network = make_network(
            model, filter_spec, state, axis_name, part_size
        )
    else:
        refuse_for_groups(
            loss=loss,
            state=state,
            augment=augment,
            validation=validation,
            curvature_batch_size=curvature_batch_size,
        )
        posed = of_groups(model, groups, filter_spec, batch_size, part_size)
        parameters, network, batch, losses = posed
        size, stream, streaming = None, GroupStream(groups, batch), network.draws
    check_start(solver.bounds, parameters)
    if solver.retraction is not None:
        raise ValueError(
            "`retraction` is for full batches: use `gnlin.solve`, or leave it out."
        )
    setting = StepSettings(
        solver,
        losses.reduced("mean"),
        network,
        step_key,
        divergence,
        augment,
        size,
        curvature_batch_size,
        streaming,
    )
    outputs = all_checked(setting, parameters, state, stream.at_hand())
    carry = begin(setting, parameters, state, outputs)
    where = places(carry, stream.example())
    if isinstance(stream, IterableStream):  # whose batches are as they are
        where = where._replace(batch=())
    setting = setting._replace(places=where)
    looks = None
    if validation is not None:
        linearised = solver.linearisation_point(carry.solver_state) is not None
        looks = Validation(setting, carry, validation, metrics, linearised)
    if progress and on_a_terminal():
        callbacks.append(Progress())
    names = losses.names if isinstance(losses, GroupLosses) else ()
    parts = list(columns_of(names).values())
    run = Run(
        setting,
        carry,
        stream,
        epochs,
        steps,
        callbacks,
        looks,
        validate_every,
        checkpoint,
        parts,
    )
    run.train(resume)
    if run.complaint:
        warnings.warn(run.complaint, stacklevel=2)
    return on_mesh(run.as_solution(), mesh)


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


def _check_curvature_batch(size, stream, solver) -> None:
    if size is None:
        return
    if stream.batch_size is None or not stream.batch_size < size <= stream.num_examples:
        raise ValueError(
            f"`curvature_batch_size` is {size}, but must be more than `batch_size` and "
            "at most the number of examples, which must be arrays."
        )
    solver.check_curvature_batch()
