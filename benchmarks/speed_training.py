"""Training steps with cross-entropy beside plain SGD and literal steps.

This benchmark measures three costs in single precision: a mini-batch step of gnlin, in
time and in memory, relative to the SGD step of the same network on the same batch; K
inner steps with the kernel, relative to the same steps on the parameters; and the time
that `gnlin.fit` adds.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from rich.table import Table

import gnlin

from ._options import Options
from ._results import circumstances, write_csv, write_json
from .data import digits
from .networks.cnn import digits_cnn, lenet
from .networks.mlp import digits_mlp
from .speed.report import wide_console
from .speed.timing import alternate, Case, ratio


LOSS = gnlin.SoftmaxCrossEntropy(reduction="mean")
PERIOD = 1000
NUM_CURVED = 64
NUM_STREAMED = 256
NUM_KERNEL = 50


@dataclasses.dataclass(frozen=True)
class Figure:
    what: str
    required: str
    measured: float
    met: bool | None
    """`None` if nothing is required."""
    seconds: float
    """Seconds per step of gnlin, or per K steps."""
    reference_seconds: float
    note: str = ""


def run(options: Options) -> None:
    """Measure, print, and write speed_training.csv and settings.json."""
    with jax.enable_x64(False):
        rounds = 3 if options.quick else 9
        channels = 5 if options.quick else 50
        figures = [
            *inner_step(channels, rounds),
            *kernel_steps(10 if options.quick else PERIOD, rounds),
            flow(1000 if options.quick else 10**5),
            fit_overhead(200 if options.quick else 2000, rounds),
            damped_step(channels, rounds),
        ]
    title = "Required figures"
    if options.quick:
        title += ", at sizes too small to judge them by"
    wide_console().print(_table(title, figures))
    write_csv(options.out / "speed_training.csv", figures)
    settings = {
        **circumstances(),
        "quick": options.quick,
        "rounds": rounds,
        "figures": [dataclasses.asdict(figure) for figure in figures],
    }
    write_json(options.out / "settings.json", settings)


def inner_step(channels: int, num_rounds: int) -> list[Figure]:
    """Measure a step of iterative linearisation across batches: one forward, one tangent
    and one transposed pass, where SGD has no tangent."""
    network = _lenet(channels, NUM_STREAMED)
    sgd = network.sgd_step()
    step = network.stream_step(gnlin.IterativeLinearisation(PERIOD, 1e-3))
    taken, plain = _alternate(step, sgd, num_rounds)
    what = f"inner step on {NUM_STREAMED} images, LeNet, over SGD's"
    return [
        _figure(f"{what}: time", "<= 1.4", taken / plain, taken, plain),
        _figure(
            f"{what}: peak memory",
            "<= 1.5",
            step.num_bytes / sgd.num_bytes,
            taken,
            plain,
            f"{step.num_bytes / 2**20:.0f} MiB over {sgd.num_bytes / 2**20:.0f}",
        ),
    ]


def damped_step(channels: int, num_rounds: int) -> Figure:
    """Measure a step of damped Gauss-Newton: a per-example Jacobian and a kernel."""
    network = _lenet(channels, NUM_CURVED)
    sgd = network.sgd_step()
    step = network.stream_step(gnlin.DampedGaussNewton(1.0, search=None))
    taken, plain = _alternate(step, sgd, num_rounds)
    return _figure(
        f"damped step on {NUM_CURVED} images, LeNet, over SGD's",
        "<= 20",
        taken / plain,
        taken,
        plain,
        f"{step.num_bytes / 2**20:.0f} MiB over {sgd.num_bytes / 2**20:.0f}",
    )


def kernel_steps(period: int, num_rounds: int) -> list[Figure]:
    """Measure K inner steps in the outputs, with the kernel included, against the same
    steps on the parameters. The latter run in a compiled loop, and with a call for each
    step, since convolutions on a CPU are slower inside a loop."""
    network = _digits_network()
    inputs, targets = network.inputs, network.targets
    eta = 1e-2
    solver = gnlin.IterativeLinearisation(period, eta)
    outer = network.outer_step(solver)
    looped = network.outer_step(
        gnlin.IterativeLinearisation(period, eta, method="matrix-free")
    )
    lin = eqx.filter_jit(gnlin.linearise)(network.fn, network.parameters, inputs)
    arrays, static = eqx.partition(lin, eqx.is_array)

    @jax.jit
    def literal(arrays, delta, targets):
        lin = eqx.combine(arrays, static)
        outputs = lin.outputs + lin.jvp(delta)
        gradient = lin.vjp(network.objective(targets).gradient(outputs))
        return jax.tree.map(lambda d, g: d - eta * g, delta, gradient)

    def steps():
        delta = jax.tree.map(jnp.zeros_like, network.parameters)
        for _ in range(period):
            delta = literal(arrays, delta, targets)
        return delta

    few = min(3, num_rounds)
    cases = [
        Case("gnlin", "in the outputs", outer.run),
        Case("gnlin", "on the parameters", looped.run, max_rounds=few),
        Case("gnlin", "on the parameters, called", steps, max_rounds=few),
    ]
    ours, theirs, called = alternate(cases, num_rounds)
    what = f"{period:,} inner steps on the parameters over those in the outputs, "
    what += f"{NUM_KERNEL} digits, CNN"
    return [
        _figure(what, ">= 50", ratio(theirs, ours), ours.median, theirs.median),
        Figure(
            f"{what}: with a call for each step",
            "",
            ratio(called, ours),
            None,
            ours.median,
            called.median,
        ),
    ]


def flow(period: int) -> Figure:
    """Measure gradient flow against the many small steps that it replaces, taken one by
    one in the outputs."""
    network = _digits_network()

    def stepped(method):
        solver = gnlin.IterativeLinearisation(period, 1e-3, method=method)
        return network.outer_step(solver)

    by_flow, literal = stepped("flow"), stepped("kernel")
    end, expected = by_flow.run()[0], literal.run()[0]
    start = network.parameters
    distance = gnlin.features.parameter_distance
    error = distance(end, expected) / distance(expected, start)
    cases = [
        Case("gnlin", "gradient flow", by_flow.run),
        Case("gnlin", "one by one", literal.run, max_rounds=1),
    ]
    ours, theirs = alternate(cases, 3)
    return Figure(
        f"{period:,} small inner steps one by one over gradient flow, {NUM_KERNEL} "
        "digits, CNN",
        "",
        ratio(theirs, ours),
        None,
        ours.median,
        theirs.median,
        f"steps differ by {error:.1e}",
    )


def fit_overhead(num_steps: int, num_rounds: int) -> Figure:
    """Measure the milliseconds that a step of `gnlin.fit` takes beyond the compiled
    step."""
    (inputs, targets), _ = digits.classification()
    inputs = jnp.asarray(inputs, jnp.float32)
    targets = jnp.asarray(targets)
    size = 32
    network = _Network(digits_mlp(jax.random.key(0)), inputs[:size], targets[:size])
    solver = gnlin.IterativeLinearisation(PERIOD, 1e-2)
    step = network.stream_step(solver)

    def fitted(steps: int) -> float:
        start = time.perf_counter()
        gnlin.fit(
            network.model,
            (inputs, targets),
            solver,
            loss=LOSS,
            batch_size=size,
            steps=steps,
            progress=False,
        )
        return time.perf_counter() - start

    def called(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            jax.block_until_ready(step.run())
        return time.perf_counter() - start

    fitted(2)
    called(2)
    totals, bare = [], []
    for _ in range(num_rounds):
        # Costs that do not depend on the number of steps cancel.
        totals.append((fitted(2 * num_steps) - fitted(num_steps)) / num_steps)
        bare.append(called(num_steps) / num_steps)
    extra = statistics.median(a - b for a, b in zip(totals, bare, strict=True))
    return _figure(
        "fit beyond the compiled step, milliseconds a step",
        "<= 0.2",
        1000 * extra,
        statistics.median(totals),
        statistics.median(bare),
    )


@dataclasses.dataclass(frozen=True)
class _Step:
    run: Callable[[], Any]
    num_bytes: int
    """The memory of the compiled program's temporaries, arguments and results."""


class _Network:
    """A network and a batch. Its steps are compiled with both as arguments."""

    def __init__(self, model, inputs, targets):
        self.model = model
        self.inputs, self.targets = inputs, targets
        self.parameters, frozen = eqx.partition(model, eqx.is_inexact_array)
        self.fn = gnlin.PerExample(lambda y, x: eqx.combine(y, frozen)(x))
        self.outputs = jax.eval_shape(self.fn, self.parameters, inputs)

    def objective(self, targets) -> gnlin.authoring.BatchLoss:
        return gnlin.authoring.BatchLoss(LOSS, self.outputs, targets)

    def sgd_step(self) -> _Step:
        optimiser = optax.sgd(1e-3)

        def step(y, state, inputs, targets):
            def loss(y):
                each = optax.softmax_cross_entropy_with_integer_labels(
                    self.fn(y, inputs), targets
                )
                return each.mean()

            value, gradient = jax.value_and_grad(loss)(y)
            updates, state = optimiser.update(gradient, state, y)
            return optax.apply_updates(y, updates), state, value

        state = optimiser.init(self.parameters)
        return _compiled(step, self.parameters, state, self.inputs, self.targets)

    def stream_step(self, solver) -> _Step:
        def step(y, state, inputs, targets):
            objective = self.objective(targets)
            y, state, outputs, _ = solver.advance_stream(
                objective, self.fn, y, inputs, state, has_aux=False
            )
            return y, state, objective.value(outputs)

        state = solver.start_stream(self.parameters, self.outputs)
        return _compiled(step, self.parameters, state, self.inputs, self.targets)

    def outer_step(self, solver) -> _Step:
        def step(y, state, inputs, targets):
            evaluate = lambda y: self.fn(y, inputs)
            lin = gnlin.linearise(self.fn, y, inputs)
            return solver.advance(self.objective(targets), lin, evaluate, state)

        state = solver.start(self.parameters, self.outputs)
        return _compiled(step, self.parameters, state, self.inputs, self.targets)


def _digits_network() -> _Network:
    (images, labels), _ = digits.classification(flat=False)
    inputs = jnp.asarray(images[:NUM_KERNEL], jnp.float32)
    targets = jnp.asarray(labels[:NUM_KERNEL])
    return _Network(digits_cnn(jax.random.key(0)), inputs, targets)


def _lenet(channels: int, num_images: int) -> _Network:
    keys = jax.random.split(jax.random.key(0), 3)
    images = jax.random.normal(keys[1], (num_images, 3, 32, 32))
    labels = jax.random.randint(keys[2], (num_images,), 0, 10)
    return _Network(lenet(keys[0], channels), images, labels)


def _compiled(step: Callable, *args) -> _Step:
    leaves, structure = jax.tree.flatten(args)
    flat = jax.jit(lambda leaves: step(*jax.tree.unflatten(structure, leaves)))
    program = flat.lower(leaves).compile()
    memory = program.memory_analysis()
    num_bytes = 0
    if memory is not None:
        num_bytes = (
            memory.temp_size_in_bytes
            + memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
        )
    return _Step(lambda: flat(leaves), num_bytes)


def _alternate(step: _Step, reference: _Step, num_rounds: int) -> tuple[float, float]:
    """Return the seconds of both. The reference's are scaled so that the ratio is the
    median of the ratios.

    Each program is run once more just before it is timed, since a program that has held a
    gigabyte of memory slows the next one by the caches and pages that it leaves behind.
    """
    pairs = []
    for _ in range(num_rounds):
        pairs.append((_warm_seconds(step), _warm_seconds(reference)))
    seconds = statistics.median(a for a, _ in pairs)
    return seconds, seconds / statistics.median(a / b for a, b in pairs)


def _warm_seconds(step: _Step) -> float:
    jax.block_until_ready(step.run())
    start = time.perf_counter()
    jax.block_until_ready(step.run())
    return time.perf_counter() - start


def _figure(what, required, measured, seconds, reference_seconds, note="") -> Figure:
    comparison, bound = required.split()
    met = measured <= float(bound) if comparison == "<=" else measured >= float(bound)
    return Figure(what, required, measured, met, seconds, reference_seconds, note)


def _table(title: str, figures: list[Figure]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("what", "required", "measured", "", "gnlin", "reference", "note"):
        justify = "left" if name in ("what", "", "note") else "right"
        table.add_column(name, justify=justify)
    for figure in figures:
        table.add_row(
            figure.what,
            figure.required,
            f"{figure.measured:,.3g}",
            {True: "met", False: "missed", None: ""}[figure.met],
            _milliseconds(figure.seconds),
            _milliseconds(figure.reference_seconds),
            figure.note,
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.3g} ms"
