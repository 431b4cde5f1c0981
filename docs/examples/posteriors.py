"""Posteriors of a classifier of digits, and those of laplace-torch for the same networks.

    python docs/examples/posteriors.py [--quick] [--large]

A small network is trained on 500 images, with its prior to the minimum and without it.
The other 1,297 images are the test, as they are and with noise. The table has the
negative log-likelihood, the expected calibration error and the share of right classes,
for the prior of the training and for the prior of most evidence, with that prior in
brackets. Without laplace-torch (`pip install laplace-torch`) its cells are empty.
"""

import argparse
import resource
import time
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import sklearn.datasets

import gnlin


jax.config.update("jax_enable_x64", True)

LOSS, PRIOR, RANK = gnlin.SoftmaxCrossEntropy(), 1.0, 50
# The names of gnlin, and those of laplace-torch
CURVATURES = {
    "full": ("all", "full"),
    "Kronecker": ("all", "kron"),
    "last layer": ("last_layer", "full"),
    f"rank {RANK}": None,
}


def trained(data, epochs, max_steps):
    """The network trained without a prior, and with one, to the minimum."""
    start = eqx.nn.MLP(64, 10, 20, 2, jnp.tanh, key=jax.random.key(0))
    options = {"loss": LOSS, "batch_size": 50, "epochs": epochs}
    without = gnlin.fit(start, data, **options).model
    near = gnlin.fit(start, data, prior=PRIOR, **options).model
    at_minimum = gnlin.solve(near, data, loss=LOSS, prior=PRIOR, max_steps=max_steps)
    return {"with its prior": at_minimum.model, "without": without}


def by_gnlin(net, data, test, name):
    """The probabilities with the prior of the training, by a formula and by draws, and
    with the tuned prior."""
    options = {"loss": LOSS, "prior": PRIOR}
    if name == "Kronecker":
        options["curvature"] = "kronecker"
    if name.startswith("rank"):
        options["curvature"] = RANK
    if name == "last layer":
        others = jax.tree.map(lambda _: False, net)
        options["filter_spec"] = eqx.tree_at(lambda m: m.layers[-1], others, True)
    posterior = gnlin.predict.posterior(net, data, **options)
    with warnings.catch_warnings(action="ignore"):  # of the network without its prior
        tuned = posterior.tuned()
        logits = posterior.sample(test, 500, key=jax.random.key(2))
        found = posterior.probabilities(test), jnp.mean(jax.nn.softmax(logits), axis=0)
        return [*found, tuned.probabilities(test)], float(tuned.prior)


def by_laplace_torch(net, data, test, names):
    """The same by laplace-torch, or `None` if it is not installed."""
    try:
        import laplace
        import torch
    except ImportError:
        return None
    torch.set_default_dtype(torch.float64)
    layers = []
    for layer in net.layers:
        linear = torch.nn.Linear(layer.in_features, layer.out_features)
        linear.weight.data = torch.tensor(np.asarray(layer.weight))
        linear.bias.data = torch.tensor(np.asarray(layer.bias))
        layers += [linear, torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers[:-1])
    images, labels = (torch.tensor(np.asarray(x)) for x in data)
    batches = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(images, labels), batch_size=len(labels)
    )
    subset, structure = names
    found = laplace.Laplace(
        model, "classification", subset, structure, prior_precision=1 / PRIOR**2
    )
    found.fit(batches)

    def predicted():  # a few images at a time, as each takes some 10 MB
        parts = torch.tensor(np.asarray(test)).split(50)
        each = [found(x, pred_type="glm", link_approx="probit").detach() for x in parts]
        return torch.cat(each).numpy()

    before = predicted()
    found.optimize_prior_precision(
        pred_type="glm", method="marglik", prior_structure="scalar", n_steps=60
    )
    tuned = float(found.prior_precision.reshape(-1)[0]) ** -0.5
    return [before, predicted()], tuned


def figures(probabilities, labels):
    right = np.asarray(probabilities)[np.arange(len(labels)), labels]
    ece = gnlin.losses.expected_calibration_error(probabilities, labels)
    share = np.mean(np.argmax(probabilities, axis=1) == labels)
    return f"{-np.mean(np.log(right)):.3f}, {100 * ece:.1f} %, {100 * share:.1f} %"


def cells(found, labels):
    if found is None:
        return " | "
    each, prior = found
    return f"{' | '.join(figures(x, labels) for x in each)} ({prior:.2f})"


def main(quick):
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images, labels = images / 16, labels.astype(int)
    n = 100 if quick else 500
    data, test = (jnp.asarray(images[:n]), jnp.asarray(labels[:n])), images[500:]
    labels = labels[500:]
    noise = 0.6 * jax.random.normal(jax.random.key(1), test.shape)
    nets = trained(data, 2 if quick else 20, 3 if quick else 40)
    print("| trained | curvature | gnlin | by draws | tuned | laplace-torch | tuned |")
    print("|---|---|---|---|---|---|---|")
    cases = [(*pair, test) for pair in nets.items()]
    cases.append(("with its prior; noisy images", nets["with its prior"], test + noise))
    for how, net, test in cases:
        alone = figures(jax.nn.softmax(jax.vmap(net)(test)), labels)
        print(f"| {how} | none | {alone} | | | | |")
        for name, theirs in CURVATURES.items():
            ours = cells(by_gnlin(net, data, test, name), labels)
            found = by_laplace_torch(net, data, test, theirs) if theirs else None
            print(f"| {how} | {name} | {ours} | {cells(found, labels)} |", flush=True)


def large(n=1000):
    """Seconds of processor time for a network of 10^6 parameters, in single precision,
    with compilation and without. It is not trained, and the labels are random."""
    jax.config.update("jax_enable_x64", False)
    net = eqx.nn.MLP(784, 10, 700, 2, jnp.tanh, key=jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (n, 784))
    data = images, jax.random.randint(jax.random.key(2), (n,), 0, 10)
    for curvature in ("kronecker", 20):
        for again in (False, True):
            times = [time.process_time()]
            posterior = jax.block_until_ready(
                gnlin.predict.posterior(net, data, loss=LOSS, curvature=curvature)
            )
            times.append(time.process_time())
            with warnings.catch_warnings(action="ignore"):  # it is not trained
                tuned = jax.block_until_ready(posterior.tuned())
                times.append(time.process_time())
                jax.block_until_ready(tuned.probabilities(images))
            times.append(time.process_time())
            seconds = " | ".join(f"{x:.1f} s" for x in np.diff(times))
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(f"| {curvature}, again: {again} | {seconds} | {memory:.1f} GB |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    parser.add_argument("--large", action="store_true", help="10^6 parameters")
    arguments = parser.parse_args()
    large() if arguments.large else main(arguments.quick)
