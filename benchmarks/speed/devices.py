"""Growth with the number of devices, which are virtual devices of a CPU.

Each number of devices is measured in a process of its own, which prints a line of JSON.
XLA writes its programs into the folder DUMP:

    python -m benchmarks.speed.devices STEPS ROUNDS DUMP TASK...
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .report import Row


TITLE = "Growth with devices: virtual ones, which share the cores of this machine"
DAMPED, SWEEP = "a damped step of divided examples", "a sweep of divided dampings"
NUM_EXAMPLES, WIDTH, NUM_DAMPINGS = 64, 64, 32

_BYTES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "pred": 1}
_COLLECTIVE = re.compile(
    r"= (.*?) (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\(.*while/body"
)


def rows(quick: bool) -> list[Row]:
    """Measure the time of each task, and the bytes that collectives write on a device."""
    if quick:
        numbers, steps, rounds, tasks = (2,), 2, 1, (DAMPED,)
    else:
        numbers, steps, rounds, tasks = (1, 2, 4), 5, 5, (DAMPED, SWEEP)
    found = {n: on_devices(n, steps, rounds, tasks) for n in numbers}
    return [
        Row(
            f"devices: {task}",
            "gnlin",
            f"{task}: {n} {'device' if n == 1 else 'devices'}",
            seconds=found[n][task]["seconds"],
            ratio=found[n][task]["seconds"] / found[numbers[0]][task]["seconds"],
            note=f"communicates {found[n][task]['bytes']:,} bytes a step",
        )
        for task in tasks
        for n in numbers
    ]


def on_devices(number: int, steps: int, rounds: int, tasks: Sequence[str]) -> dict:
    """Return `seconds` and `bytes` for each task, from a new process with `number`
    devices."""
    with tempfile.TemporaryDirectory() as dump:
        flags = f"--xla_force_host_platform_device_count={number} --xla_dump_to={dump}"
        # NPROC sets how many threads the virtual devices share: see docs/scaling.md.
        environment = {**os.environ, "XLA_FLAGS": flags, "NPROC": "32"}
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(steps), str(rounds), dump, *tasks],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(done.stdout)


def measure_all(num_steps: int, num_rounds: int, dump: Path, tasks: Sequence[str]):
    found, seen = {}, set()
    for task in tasks:
        seconds = measure(task, num_steps, num_rounds)
        programs = set(dump.glob("*after_optimizations.txt")) - seen
        sent = sum(bytes_in_loops(path.read_text()) for path in programs)
        found[task] = {"seconds": seconds, "bytes": sent}
        seen |= programs
    return found


def bytes_in_loops(program: str) -> int:
    """Return the bytes of the results of collectives in a compiled program's loops, each
    counted once."""
    total = 0
    for line in program.splitlines():
        match = _COLLECTIVE.search(re.sub(r"/\*.*?\*/", "", line))
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1]) if match else []
        for dtype, sides in shapes:
            total += _BYTES[dtype] * int(np.prod([int(n) for n in sides.split(",") if n]))
    return total


def measure(task: str, num_steps: int, num_rounds: int) -> float:
    """Return the seconds per step on the devices of this process."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    import gnlin

    from .timing import alternate, Case

    jax.config.update("jax_enable_x64", True)
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
    divided, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    model = eqx.nn.MLP(16, 2, WIDTH, 3, activation=jnp.tanh, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (NUM_EXAMPLES, 16))

    def solve(damping, data, method):
        solver = gnlin.DampedGaussNewton(
            damping, rtol=0.0, atol=0.0, search=None, method=method
        )
        return gnlin.solve(model_there, data, solver, max_steps=num_steps).loss

    place = lambda tree, where: jax.tree.map(
        lambda leaf: jax.device_put(leaf, where) if eqx.is_array(leaf) else leaf, tree
    )
    model_there = place(model, everywhere)
    if task == DAMPED:
        data = place((x, jnp.sin(x[:, :2])), divided)
        run = lambda: solve(1.0, data, "kernel")
    else:
        data = place((x[:16], jnp.sin(x[:16, :2])), everywhere)
        dampings = jax.device_put(jnp.logspace(-1, 1, NUM_DAMPINGS), divided)
        run = lambda: jax.vmap(lambda damping: solve(damping, data, "kernel"))(dampings)
    (timing,) = alternate([Case("gnlin", task, run)], num_rounds)
    return statistics.median(timing.seconds) / num_steps


if __name__ == "__main__":
    steps, rounds, dump, *tasks = sys.argv[1:]
    print(json.dumps(measure_all(int(steps), int(rounds), Path(dump), tasks)))
