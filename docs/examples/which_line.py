"""The results of one line of gnlin, and of Adam on the same budget.

    python docs/examples/which_line.py [--quick]

The tasks are one small fit, a thousand fits, a differential equation and a graph. gnlin
and Adam start at the same point, and Adam has the best of five learning rates and as many
passes through the residuals. A plain, a tangent or a transposed pass counts one, and a
step of Adam two. The last task is 10^8 steps of gradient descent on a linearised network,
by formula and literally.
"""

import argparse
import time

import fit
import jax
import jax.numpy as jnp
import linearised
import optax
import optimistix as optx
import poisson
import pose_graph

import gnlin


jax.config.update("jax_enable_x64", True)

RATES = jnp.array([1e-3, 3e-3, 1e-2, 3e-2, 1e-1])


def by_gnlin(residuals, start, data, solver, steps):
    """The final point, and the numbers of steps and passes. Passes are products with the
    Jacobian, and one evaluation for each trial."""
    solution = optx.least_squares(
        residuals, solver, start, data, max_steps=steps, throw=False
    )
    counted = ("num_jvps", "num_vjps", "num_accepted_steps", "num_rejected_steps")
    passes = sum(solution.stats[name] for name in counted)
    return solution.value, solution.stats["num_feature_updates"], passes


def by_adam(residuals, start, data, steps):
    """The final point of each learning rate."""

    def run(rate):
        optimiser = optax.adam(rate)

        def loss(y):
            return 0.5 * sum(jnp.sum(r**2) for r in jax.tree.leaves(residuals(y, data)))

        def step(_, carry):
            y, state = carry
            update, state = optimiser.update(jax.grad(loss)(y), state)
            return optax.apply_updates(y, update), state

        return jax.lax.fori_loop(0, steps, step, (start, optimiser.init(start)))[0]

    return jax.vmap(run)(RATES)


def small_fit(quick):
    t = jnp.linspace(0.0, 4.0, 40)
    y = fit.curve(fit.TRUE, t) + fit.NOISE * jax.random.normal(jax.random.key(0), (40,))
    start = {"height": 1.0, "rate": 0.1, "background": 0.0}
    return fit.residuals, start, (t, y), gnlin.LevenbergMarquardt(), 256


def many_fits(quick):
    residuals, start, (t, _), _, _ = small_fit(quick)
    noise = jax.random.normal(jax.random.key(1), (100 if quick else 1000, 40))
    y = fit.curve(fit.TRUE, t) + fit.NOISE * noise
    solver = gnlin.LevenbergMarquardt(method="curvature", acceleration=False)
    return residuals, start, (t, y), solver, 256


def equation(quick):
    network = poisson.make_network()
    trained, rest = poisson.eqx.partition(network, poisson.eqx.is_inexact_array)
    residuals = lambda y, x: poisson.residuals(poisson.eqx.combine(y, rest), x)
    solver, steps = gnlin.LevenbergMarquardt(), 40 if quick else 200
    return residuals, trained, jnp.linspace(0, 1, 50), solver, steps


def graph(quick):
    num_poses = 60 if quick else 160
    measured = pose_graph.measure(pose_graph.drive(num_poses), 2, jax.random.key(1))
    start = pose_graph.dead_reckoning(measured[1], num_poses)
    return pose_graph.residuals, start, measured, gnlin.LevenbergMarquardt(), 256


def compare(name, task, quick):
    """Print the final sums of squares, relative to the start. With noise, Adam's is the
    excess over gnlin's. With many fits, it is the worst of them."""
    residuals, start, data, solver, steps = task(quick)

    def each(fn, *axes):
        return jax.vmap(fn, ((None, 0), *axes)) if task is many_fits else fn

    def beyond(data, found, adams):
        loss = lambda y: sum(jnp.sum(r**2) for r in jax.tree.leaves(residuals(y, data)))
        first, least = loss(start), loss(found)
        left = 0.0 if task is equation else least
        return least / first, (jax.vmap(loss)(adams) - left) / first

    ours = each(lambda data: by_gnlin(residuals, start, data, solver, steps))
    found, updates, passes = jax.jit(ours)(data)
    budget = int(jnp.mean(passes))
    adams = jax.jit(each(lambda data: by_adam(residuals, start, data, budget // 2)))(data)
    least, adam = each(beyond, 0, 0)(data, found, adams)
    adam = adam.reshape(-1, len(RATES)).max(0)
    best = int(jnp.nanargmin(adam))
    reached = f"{least:.0e}" if task is equation else "converged"
    print(
        f"| {name} | {jnp.mean(updates):.0f} | {budget:,} | {reached} | "
        f"{adam[best]:.0e} | {float(RATES[best]):g} |",
        flush=True,
    )


def kernel(quick):
    """Print the CPU seconds of 10^8 steps by formula, and of one literal step."""
    network = poisson.eqx.nn.MLP(1, 1, 256, 1, activation=jnp.tanh, key=jax.random.key(0))
    steps = 1_000 if quick else 10_000
    predict = poisson.eqx.filter_jit(linearised.linearised_predictions)
    _, eta = predict(network, (10, 10**8))
    begin = time.process_time()
    jax.block_until_ready(predict(network, (10, 10**8)))
    formula = time.process_time() - begin
    seconds = []
    for number in (1, steps, 11 * steps):  # all three take equally long to compile
        begin = time.process_time()
        jax.block_until_ready(linearised.trained_predictions(network, eta, [number]))
        seconds.append(time.process_time() - begin)
    literal = (seconds[2] - seconds[1]) / (10 * steps)
    print(f"10^8 steps: {formula:.1e} s by formula; literally, {literal:.1e} s each")


def main(quick: bool):
    print("| | steps | passes | gnlin | Adam: above gnlin's, relative | its best rate |")
    print("|---|---|---|---|---|---|")
    compare("a small fit", small_fit, quick)
    compare("many fits, the worst", many_fits, quick)
    compare("a differential equation", equation, quick)
    compare("a graph", graph, quick)
    kernel(quick)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller")
    main(parser.parse_args().quick)
