"""Trains on several devices and on one; made to be run by itself.

    python sharded_problems.py <group>
    python sharded_problems.py processes <index> <of> <port>

prints a line of JSON a case: by how much the two differ (relative to the largest
parameter), and whether the parameters came back where they were.
"""

import json
import os
import re
import sys
from typing import Any


if __name__ == "__main__":  # before jax starts
    DEVICES = 2 if sys.argv[1] == "processes" else 8
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + f" --xla_force_host_platform_device_count={DEVICES}"
        + " --xla_backend_optimization_level=0"
    )
    # Threads that the virtual devices share. A thread that waits for the others stays
    # occupied, and a batch of LAPACK calls needs one more.
    os.environ["NPROC"] = "32"

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import gnlin
from gnlin._training import _full_batch


jax.config.update("jax_enable_x64", True)

NUM_INPUTS, NUM_OUTPUTS, WIDTH = 4, 2, 8
DRAW = np.random.default_rng(0)


def problem(num_examples, loss):
    x = DRAW.normal(size=(num_examples, NUM_INPUTS))
    if loss == "cross-entropy":
        return x, (x[:, 0] > 0).astype(int)
    return x, np.stack([np.sin(x.sum(1)), np.cos(x[:, 0])], 1)


LOSSES = {
    "squared error": gnlin.SquaredError(),
    "cross-entropy": gnlin.SoftmaxCrossEntropy(),
}
DATA = {
    (shape, loss): problem(n, loss)
    for shape, n in {"wide": 16, "tall": 64}.items()
    for loss in LOSSES
}


def network():
    return eqx.nn.MLP(
        NUM_INPUTS, NUM_OUTPUTS, WIDTH, 1, activation=jnp.tanh, key=jax.random.key(0)
    )


def arrays(model):
    return jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))


def make_mesh(shape, names=("data", "model"), types=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(types,) * len(shape))


def by_rows(model, mesh):
    """Divide weights and biases by their outputs, if the number allows it."""

    def placed(x):
        if not eqx.is_inexact_array(x):
            return x
        spec = P("model") if x.shape[0] % mesh.shape["model"] == 0 else P()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(placed, model)


def by_columns(model, mesh):
    """Divide weights by their inputs; copy biases to every device."""

    def placed(x):
        if not eqx.is_inexact_array(x):
            return x
        spec = P(None, "model") if x.ndim == 2 else P()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(placed, model)


def by_examples(data, mesh):
    return tuple(jax.device_put(x, NamedSharding(mesh, P("data"))) for x in data)


def compared(new, old, placed=None):
    """Compare the two runs; `placed` holds the parameters as they arrived."""
    new, old = arrays(new), arrays(old)
    size = max(np.abs(x).max() for x in old)
    pairs = zip(new, old, strict=True)
    difference = max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in pairs)
    found = {"difference": float(difference / size)}
    if placed is not None:
        pairs = zip(new, arrays(placed), strict=True)
        found["kept"] = all(
            a.sharding.is_equivalent_to(b.sharding, a.ndim)
            and type(a.sharding) is type(b.sharding)
            and a.sharding.mesh == b.sharding.mesh
            for a, b in pairs
        )
    return found


#
# gnlin.solve
#

Damped = gnlin.DampedGaussNewton
Iterative = gnlin.IterativeLinearisation

SOLVERS = {
    "gauss-newton": gnlin.GaussNewton(),
    "damped, auto": Damped(0.3),
    "damped, svd": Damped(0.3, method="svd"),
    "damped, eigh": Damped(0.3, method="eigh"),
    "damped, kernel": Damped(0.3, method="kernel"),
    "damped, curvature": Damped(0.3, method="curvature"),
    "damped, matrix-free": Damped(0.3, method="matrix-free"),
    "damped, kernel in chunks": Damped(0.3, method="kernel", memory_budget=4000),
    "levenberg-marquardt": gnlin.LevenbergMarquardt(),
    "truncated": gnlin.TruncatedGaussNewton(0.1, damping=0.3),
    "truncated, dense": gnlin.TruncatedGaussNewton(0.1, damping=0.3, method="dense"),
    "iterative, spectrum": Iterative(50, 0.01, method="eigh"),
    "iterative, kernel": Iterative(50, 0.01, method="kernel"),
    "iterative, matrix-free": Iterative(50, 0.01, method="matrix-free"),
    "iterative, flow": Iterative(50, 0.01, method="flow"),
}
# On a spectrum the steps are those of the quadratic problem.
FOR_CROSS_ENTROPY = {
    "gauss-newton": None,
    "levenberg-marquardt": gnlin.LevenbergMarquardt(
        scaling="identity", acceleration=False
    ),
    "iterative, spectrum": Iterative(50, 0.01, method="eigh", form="quadratic"),
}
PLACED = {"rows": by_rows, "columns": by_columns}


def solve_case(
    name,
    devices,
    shape="wide",
    loss="squared error",
    placed="rows",
    types=AxisType.Auto,
    part_size=None,
):
    solver = SOLVERS[name]
    if loss == "cross-entropy":
        solver = FOR_CROSS_ENTROPY.get(name, solver)
    mesh = make_mesh(devices, types=types)
    data, options = DATA[shape, loss], {"loss": LOSSES[loss], "max_steps": 2}
    alone = gnlin.solve(network(), data, solver, **options)
    model = PLACED[placed](network(), mesh)
    options["part_size"] = part_size
    solution = gnlin.solve(model, by_examples(data, mesh), solver, **options)
    return compared(solution.model, alone.model, model)


def optimistix_case(name, devices):
    mesh, (x, t) = make_mesh(devices), DATA["wide", "squared error"]

    def solved(model, data):
        parameters, frozen = eqx.partition(model, eqx.is_inexact_array)

        def residuals(y, args):
            return jax.vmap(eqx.combine(y, frozen))(args[0]) - args[1]

        solution = optx.least_squares(
            residuals, SOLVERS[name], parameters, data, max_steps=2, throw=False
        )
        return solution.value

    alone = solved(network(), (jnp.asarray(x), jnp.asarray(t)))
    return compared(solved(by_rows(network(), mesh), by_examples((x, t), mesh)), alone)


#
# gnlin.fit
#


def fit_case(name, devices, batch_size, kind="arrays"):
    data, mesh = DATA["wide", "cross-entropy"], make_mesh(devices)
    validation = DATA["tall", "cross-entropy"]
    options = {"loss": LOSSES["cross-entropy"], "batch_size": batch_size, "steps": 3}

    def batches(put):
        if kind == "arrays":
            return put(data)
        return [put(tuple(x[i : i + 8] for x in data)) for i in (0, 8)]

    def fitted(model, put):
        return gnlin.fit(
            model, batches(put), SOLVERS[name], validation=put(validation), **options
        )

    alone = fitted(network(), lambda data: data)
    model = by_rows(network(), mesh)
    result = fitted(model, lambda data: by_examples(data, mesh))
    found = compared(result.model, alone.model, model)
    losses = [r.history["validation_loss"][-1] for r in (result, alone)]
    found["difference"] = max(found["difference"], abs(losses[0] / losses[1] - 1))
    return found


#
# Sweeps
#


def sweep_case(name, shape, names):
    mesh = make_mesh(shape, names)
    data = DATA["wide", "squared error"]
    solvers = {
        "eigh": lambda damping: Damped(damping, method="eigh"),
        "matrix-free": lambda damping: Damped(damping, method="matrix-free"),
    }

    def swept(dampings, data):
        def one(damping):
            return arrays(gnlin.solve(network(), data, solvers[name](damping)).model)

        return jax.vmap(one)(dampings)

    dampings = jnp.logspace(-1, 1, 16)
    alone = swept(dampings, data)
    placed = jax.device_put(dampings, NamedSharding(mesh, P("grid")))
    if "data" in names:
        data = by_examples(data, mesh)
    found = swept(placed, data)
    kept = all(x.sharding.spec[0] == "grid" for x in found)
    return {**compared(found, alone), "kept": kept}


#
# Communication
#

_BYTES = {"f64": 8, "s64": 8, "f32": 4, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1}
_COLLECTIVES = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\("
)


def communicated(program: str) -> list[tuple[str, int, int]]:
    """Return each collective of a compiled program: its kind, its bytes on a device, and
    the number of loops around it."""
    found = []
    for line in program.splitlines():
        line = re.sub(r"/\*.*?\*/", "", line)
        match = _COLLECTIVES.search(line)
        if match is None:
            continue
        shapes, kind = match.groups()
        size = sum(
            _BYTES[dtype] * int(np.prod([int(d) for d in dims.split(",") if d]))
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        )
        where = re.search(r'op_name="([^"]*)"', line)
        depth = where.group(1).count("while/body") if where else 0
        found.append((kind, size, depth))
    return found


def program_of_solve(model, data, solver) -> str:
    """Return the compiled program of `gnlin.solve`."""
    run: Any = _full_batch._steps
    quick = _full_batch._steps_quickly

    class Compiled(Exception):
        pass

    def compiled(*args):
        raise Compiled(run.lower(*args).compile().compiled.as_text())

    _full_batch._steps = _full_batch._steps_quickly = compiled
    try:
        gnlin.solve(model, data, solver)
    except Compiled as found:
        return found.args[0]
    finally:
        _full_batch._steps, _full_batch._steps_quickly = (
            run,
            quick,
        )
    raise AssertionError("nothing was compiled")


def traffic_case(name):
    """Examples over all devices."""
    mesh, n = make_mesh((8, 1)), 64
    model = eqx.nn.MLP(16, 2, 64, 3, activation=jnp.tanh, key=jax.random.key(0))
    x = DRAW.normal(size=(n, 16))
    data = by_examples((x, np.sin(x[:, :2])), mesh)
    found = communicated(program_of_solve(by_rows(model, mesh), data, SOLVERS[name]))
    num_parameters = sum(x.size for x in arrays(model))
    return {"m": 2 * n, "p": num_parameters, "collectives": found}


#
# Several processes
#


def in_process(index, num_processes, port):
    """Run the same in each process, with the data divided between them."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, index)
    mesh = jax.make_mesh((len(jax.devices()),), ("data",))

    def divided(data):
        mine = (np.array_split(x, num_processes)[index] for x in data)
        by_example = NamedSharding(mesh, P("data"))
        return tuple(jax.make_array_from_process_local_data(by_example, x) for x in mine)

    for name, run in {
        "solve: eigh": lambda data: gnlin.solve(
            network(), data("squared error"), SOLVERS["damped, eigh"], max_steps=3
        ),
        "fit: truncated": lambda data: gnlin.fit(
            network(),
            data("cross-entropy"),
            SOLVERS["truncated"],
            loss=LOSSES["cross-entropy"],
            batch_size=8,
            steps=3,
        ),
    }.items():
        alone = run(lambda loss: DATA["wide", loss])
        together = run(lambda loss: divided(DATA["wide", loss]))
        assert not divided(DATA["wide", "squared error"])[0].is_fully_addressable
        tell(name, compared(together.model, alone.model))


#
# All of it
#


def tell(name, found):
    print(json.dumps([name, found]), flush=True)


ALSO_FOR_CROSS_ENTROPY = (
    "damped, kernel",
    "levenberg-marquardt",
    "truncated",
    "iterative, kernel",
    "iterative, flow",
)

FEW = {
    "solve: eigh": lambda: solve_case("damped, eigh", (4, 2)),
    "traffic: matrix-free": lambda: traffic_case("damped, matrix-free"),
    "traffic: eigh": lambda: traffic_case("damped, eigh"),
}
ALL = {
    **{
        f"solve: {name}": lambda name=name: solve_case(name, (4, 2))
        for name in SOLVERS
        if name != "gauss-newton"  # whose step on a wide problem rounding decides
    },
    **{
        f"solve: {name}, tall": lambda name=name: solve_case(name, (4, 2), shape="tall")
        for name in ("gauss-newton", "damped, eigh", "damped, curvature")
    },
    **{
        f"solve: {name}, cross-entropy": lambda name=name: solve_case(
            name, (4, 2), loss="cross-entropy"
        )
        for name in ALSO_FOR_CROSS_ENTROPY
    },
    "solve: parameters alone": lambda: solve_case("damped, matrix-free", (1, 8)),
    "solve: examples alone": lambda: solve_case("levenberg-marquardt", (8, 1)),
    "solve: by columns": lambda: solve_case("truncated", (4, 2), placed="columns"),
    **{
        f"optimistix: {name}": lambda name=name: optimistix_case(name, (4, 2))
        for name in ("damped, eigh", "truncated")
    },
    "solve: matrix-free, in parts": lambda: solve_case(
        "damped, matrix-free", (4, 2), part_size=8
    ),
    "fit: batches": lambda: fit_case("truncated", (4, 2), 8),
    "fit: full batch": lambda: fit_case("damped, kernel", (4, 2), None),
    "fit: not divisible": lambda: fit_case("damped, eigh", (4, 2), 6),
    "fit: iterable": lambda: fit_case("damped, kernel", (4, 2), None, "iterable"),
    "fit: iterative": lambda: fit_case("iterative, matrix-free", (4, 2), 8),
    "solve: explicit axes": lambda: solve_case(
        "damped, kernel", (4, 2), types=AxisType.Explicit
    ),
    "sweep: grid": lambda: sweep_case("eigh", (8,), ("grid",)),
    "sweep: matrix-free": lambda: sweep_case("matrix-free", (8,), ("grid",)),
    "sweep: grid and data": lambda: sweep_case("eigh", (4, 2), ("grid", "data")),
}


if __name__ == "__main__":
    if sys.argv[1] == "processes":
        in_process(*map(int, sys.argv[2:]))
    else:
        for name, case in {"few": FEW, "all": ALL}[sys.argv[1]].items():
            tell(name, case())
