"""Code shared by most experiments: looks at a training run match a run by hand, and the
full scale runs on files in CIFAR-10's format."""

import csv
import dataclasses
import hashlib
import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy import optimize

import gnlin
from benchmarks import scores, solved, training
from benchmarks.__main__ import main
from benchmarks.data import augmentation, cifar10, mnist, standard
from benchmarks.experiment import Place, Runs
from benchmarks.training import Images


SETTINGS = Images(
    seeds=2, num_train=20, batch_size=8, learning_rate=0.05, num_steps=6, num_looks=3
)


@pytest.mark.exhaustive
def test_mini_batches_are_a_fit_by_hand():
    train, validation, test = training.load(SETTINGS, Place(), 1)
    columns = training.mini_batches(
        SETTINGS,
        Place(),
        training.descent(2, 0.05),
        callbacks=lambda draw, *start: [training.TrainAccuracy(draw.train)],
    )
    single = lambda labelled: (jnp.asarray(labelled[0], jnp.float32), labelled[1])
    model = training.NETWORKS["digits-mlp"](jax.random.key(1))
    model = jax.tree.map(lambda x: x.astype(jnp.float32) if eqx.is_array(x) else x, model)
    result = gnlin.fit(
        model,
        single(train),
        gnlin.IterativeLinearisation(2, 0.05),
        loss=gnlin.SoftmaxCrossEntropy(reduction="mean"),
        batch_size=8,
        steps=6,
        key=jax.random.key(1),
        progress=False,
    )
    np.testing.assert_array_equal(columns["inner_steps"][1], [2, 4, 6])
    np.testing.assert_array_equal(columns["feature_updates"][1], [1, 2, 3])
    np.testing.assert_array_equal(columns["stable"], np.ones((2, 3)))
    for name, data in (("test", test), ("train", train), ("validation", validation)):
        images, labels = single(data)
        accuracy = gnlin.losses.accuracy(jax.vmap(result.model)(images), labels)
        assert columns[f"{name}_accuracy"][1, -1] == pytest.approx(float(accuracy))
        if name == "validation":
            continue
        # After the last step of a period the network equals its own linearisation.
        linearised = columns[f"{name}_accuracy_linearised"][1, -1]
        assert linearised == pytest.approx(float(accuracy))


@pytest.mark.slow
def test_the_linearised_network_is_looked_at_within_a_period():
    settings = dataclasses.replace(SETTINGS, seeds=1, num_looks=6, learning_rate=1.0)
    columns = training.mini_batches(settings, Place(), training.descent(6, 1.0))
    apart = columns["test_accuracy"] - columns["test_accuracy_linearised"]
    assert np.any(apart[:, :5] != 0)
    np.testing.assert_array_equal(apart[:, 5], 0)


def test_a_run_that_ends_early_says_so():
    columns = training.mini_batches(SETTINGS, Place(), training.descent(1, 1e38))
    np.testing.assert_array_equal(columns["stable"][:, -1], 0)
    assert columns["test_accuracy"].shape == (2, 3)


def test_snapshots_hold_the_model_before_and_at_each_look():
    take = lambda model, state: model.layers[0].weight[:2, :3]
    columns = training.mini_batches(
        SETTINGS,
        Place(),
        training.descent(1, 0.05),
        callbacks=lambda draw, *start: [training.Snapshots("w", take, start, SETTINGS)],
    )
    model = training.NETWORKS["digits-mlp"](jax.random.key(1))
    assert columns["w"].shape == (2, 4, 2, 3)
    np.testing.assert_allclose(columns["w"][1, 0], take(model, None), rtol=1e-6)
    assert np.all(np.isfinite(columns["w"]))
    assert np.all(np.abs(np.diff(columns["w"], axis=1)).max(axis=(0, 2, 3)) > 0)


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    solver = training.descent(4, 0.05)
    take = lambda model, state: model.layers[0].weight
    snapshots = lambda draw, *start: [training.Snapshots("w", take, start, SETTINGS)]

    def run(settings, place):
        return training.mini_batches(settings, place, solver, snapshots)

    whole = run(SETTINGS, Place())
    half = dataclasses.replace(SETTINGS, num_steps=4, num_looks=2)
    run(half, Place(checkpoints=tmp_path))
    resumed = run(SETTINGS, Place(checkpoints=tmp_path, resume=True))
    for name in ("test_accuracy", "train_loss", "inner_steps"):
        np.testing.assert_array_equal(resumed[name], whole[name])


@pytest.mark.parametrize(
    ("loss", "targets", "expected"),
    [
        (gnlin.SoftmaxCrossEntropy(), [0, 0, 1, 2], 2 * math.log(2) + 2 * math.log(4)),
        (gnlin.SigmoidCrossEntropy(), [[0.0], [1.0]], 2 * math.log(2)),
        (gnlin.SquaredError(), [[0.0, 3.0], [2.0, 3.0]], 1.0),
    ],
)
def test_the_loss_of_guessing_is_the_least_of_constant_outputs(loss, targets, expected):
    targets = np.array(targets)
    assert scores.guessing_loss(loss, targets) == pytest.approx(expected)
    outputs = np.zeros((len(targets), 3 if targets.ndim == 1 else targets.shape[1]))
    objective = gnlin.authoring.BatchLoss(loss, outputs, jnp.asarray(targets))
    of = jax.jit(lambda c: objective.value(jnp.broadcast_to(c, outputs.shape)))
    best = optimize.minimize(lambda c: float(of(c)), np.zeros(outputs.shape[1]))
    assert best.fun == pytest.approx(expected, rel=1e-6)


def test_each_seed_draws_images_of_its_own_and_fewer_are_among_more():
    few, many = (Images(num_train=number) for number in (50, 100))
    parts = training.load(many, Place(), 3)
    small = training.load(few, Place(), 3).train
    np.testing.assert_array_equal(small[0], parts.train[0][:50])
    np.testing.assert_array_equal(small[1], parts.train[1][:50])
    other = training.load(many, Place(), 4)
    assert not np.array_equal(other.train[0], parts.train[0])
    whole = training.load(Images(), Place(), 3)
    sizes = [len(labels) for _, labels in whole]
    assert sizes == [1197, 150, 450]
    images = np.concatenate([x for x, _ in whole])
    assert len(np.unique(images, axis=0)) == len(np.unique(digits_pixels(), axis=0))
    for number, (_, labels) in zip((50, 150, 450), (small, *whole[1:]), strict=True):
        assert np.ptp(np.bincount(labels)) <= 3, number


def digits_pixels():
    from sklearn.datasets import load_digits

    return load_digits().data / 16


def test_early_stopping_looks_at_the_validation_images_alone():
    columns = {
        "validation_accuracy": np.array(
            [[0.1, 0.9, 0.5], [0.7, 0.7, 0.2], [np.nan, -3.0, -2.0]]
        ),
        "test_accuracy": np.array([[0.95, 0.6, 0.7], [0.3, 0.5, 0.4], [0.1, 0.2, 0.3]]),
    }
    runs = Runs({}, columns)
    np.testing.assert_array_equal(training.early_stopped(runs), [0.6, 0.3, 0.3])
    np.testing.assert_array_equal(training.optimally_stopped(runs), [0.95, 0.5, 0.3])


@pytest.mark.slow
def test_a_summed_loss_is_the_mean_times_the_number_of_images():
    """A learning rate for the mean, divided by the number of images, is one for the
    sum."""
    mean = training.mini_batches(SETTINGS, Place(), training.descent(2, 0.05))
    summed = training.mini_batches(
        dataclasses.replace(SETTINGS, reduction="sum"),
        Place(),
        training.descent(2, 0.05 / SETTINGS.num_train),
    )
    for name in ("train_loss", "test_accuracy"):
        np.testing.assert_allclose(summed[name], mean[name], rtol=1e-4)


@pytest.mark.exhaustive
def test_infinite_k_minimises_the_linearised_loss():
    """The gradient of the mean loss vanishes there, computed by the kernel's own code."""
    settings = dataclasses.replace(SETTINGS, seeds=1, num_train=30)
    columns = solved.train_endlessly(settings, Place())
    assert columns["finished"][0, 0] == 1
    assert columns["gradient"][0, 0] <= solved.TOLERANCE
    assert columns["train_accuracy_linearised"][0, 0] == 1
    train, _, (test_images, test_labels) = training.load(settings, Place(), 0)
    model = training.NETWORKS["digits-mlp"](jax.random.key(0))
    solver = gnlin.IterativeLinearisation(10**7, 1e-2, method="flow")
    solution = gnlin.solve(
        model, train, solver, loss=gnlin.SoftmaxCrossEntropy(), max_steps=1
    )
    moved = jax.tree.map(
        jnp.subtract, *(eqx.filter(m, eqx.is_array) for m in (solution.model, model))
    )
    parameters, frozen = eqx.partition(model, eqx.is_array)
    fn = lambda y: jax.vmap(eqx.combine(y, frozen))(test_images)
    outputs, change = jax.jvp(fn, (parameters,), (moved,))
    by_flow = gnlin.losses.accuracy(outputs + change, test_labels)
    found = columns["test_accuracy_linearised"][0, 0]
    assert found == pytest.approx(float(by_flow), abs=0.03)


def by_hand(model, data):
    """Return outputs and Jacobian of a network, and the derivative of its mean
    cross-entropy with respect to the outputs."""
    images, labels = data
    parameters, frozen = eqx.partition(model, eqx.is_array)
    start, unravel = ravel_pytree(parameters)
    fn = lambda y: jax.vmap(eqx.combine(unravel(y), frozen))(images)
    outputs, jacobian = np.asarray(fn(start)), np.asarray(jax.jacobian(fn)(start))
    one_hot = np.eye(outputs.shape[1])[labels]

    def slope(outputs):
        exp = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        return (exp / exp.sum(axis=1, keepdims=True) - one_hot) / len(labels)

    return outputs, jacobian, slope


@pytest.mark.exhaustive
def test_each_problem_is_solved_at_the_network_that_the_last_has_made():
    settings = dataclasses.replace(SETTINGS, seeds=1, num_train=20)
    data = training.load(settings, Place(), 0).train
    model = training.NETWORKS["digits-mlp"](jax.random.key(0))
    columns = solved.train_solving(settings, Place(), 4, tolerance=1e-5)
    num_steps = 0
    for look in range(2):
        found = solved.solve(model, data, 1e-5)
        outputs, jacobian, slope = by_hand(model, data)
        there = slope(outputs + jacobian @ found.moved)
        gradient = np.abs(np.einsum("nc,ncp->p", there, jacobian)).max()
        assert gradient == pytest.approx(found.residual, rel=1e-6)
        assert 0 < gradient <= 1e-5
        num_steps += found.num_steps
        assert columns["inner_steps"][0, look] == num_steps
        model = solved.moved_by(found.moved, model)
        loss = training.mean_loss(model, None, data)
        assert columns["train_loss"][0, look] == pytest.approx(float(loss))
    assert columns["unsolved"].max() == 0
    assert columns["gradient"].max() <= 1e-5
    # No step solves any of this.
    impossible = solved.train_solving(settings, Place(), 2, tolerance=0.0)
    assert impossible["unsolved"][0, 0] == 1


@pytest.mark.exhaustive
def test_a_run_that_has_come_to_a_stationary_point_ends_there():
    """At this rate all hidden units are off after some steps, and the parameters stay."""
    settings = Images(seeds=1, num_train=50, num_looks=3)
    solver = gnlin.IterativeLinearisation(
        jnp.asarray(1.0), jnp.asarray(0.0464), method="matrix-free"
    )
    columns = training.full_batch(settings, Place(), solver, 300)
    assert columns["feature_updates"][0, -1] <= 300
    guessed = columns["guessing_loss"][0, 0]
    assert columns["train_loss"][0, -1] == pytest.approx(guessed, rel=0.01)


@pytest.mark.exhaustive
def test_a_run_ends_at_the_first_update_that_has_trained_it():
    settings = dataclasses.replace(
        SETTINGS, seeds=2, num_train=20, batch_size=None, num_looks=5
    )
    solver = gnlin.DampedGaussNewton(1.0, form="prox-linear", search=None)
    columns = training.full_batch(
        settings, Place(), solver, 40, until_trained=True, damping=1.0
    )
    assert columns["trained"][:, -1].all()
    train = training.load(settings, Place(), 1).train
    model = training.NETWORKS["digits-mlp"](jax.random.key(1))
    outputs, jacobian, slope = by_hand(model, train)
    solution = gnlin.solve(
        model, train, solver, loss=gnlin.SoftmaxCrossEntropy(), max_steps=40
    )
    means = np.append(solution.history.loss, solution.loss) / 20
    first = np.argmax(means <= training.TRAINED_LOSS)
    assert columns["feature_updates"][1, -1] == first
    assert columns["train_loss"][1, -1] == pytest.approx(means[first], rel=1e-6)
    # The first problem's value by the formula.
    first_step = gnlin.solve(
        model, train, solver, loss=gnlin.SoftmaxCrossEntropy(), max_steps=1
    ).model
    flat = lambda model: ravel_pytree(eqx.filter(model, eqx.is_array))[0]
    moved = np.asarray(flat(first_step) - flat(model))
    value, largest = solved.damped(first_step, model, train, 1 / 40)
    there = slope(outputs + jacobian @ moved)
    gradient = np.einsum("nc,ncp->p", there, jacobian) + moved / 20
    assert np.abs(gradient).max() == pytest.approx(float(largest), rel=1e-3, abs=1e-12)
    assert columns["gradient"].max() <= 1e-8
    logs = jax.nn.log_softmax(outputs + jacobian @ moved)
    mean = -float(logs[np.arange(20), train[1]].mean())
    assert float(value) == pytest.approx(mean + moved @ moved / 40, rel=1e-9)


@pytest.mark.parametrize("by", [1, 2])
def test_a_shift_is_a_crop_of_the_padded_image(by):
    image = np.random.default_rng(0).normal(size=(2, 5, 6))
    padded = np.pad(image, ((0, 0), (by, by), (by, by)))
    crops = {
        padded[:, i : i + 5, j : j + 6].tobytes()
        for i in range(2 * by + 1)
        for j in range(2 * by + 1)
    }
    keys = jax.random.split(jax.random.key(1), 200)
    shifted = jax.vmap(lambda key: augmentation.shift(jnp.asarray(image), key, by))
    found = {x.tobytes() for x in np.asarray(jax.jit(shifted)(keys))}
    assert found == crops


def test_half_of_the_images_are_flipped():
    image = jnp.arange(3 * 32 * 32, dtype=float).reshape(3, 32, 32)
    keys = jax.random.split(jax.random.key(1), 200)
    change = jax.vmap(lambda key: augmentation.flip_and_crop(image, key))
    changed = jax.jit(change)(keys)
    middle = np.asarray(changed[:, 0, 16, 10:22])
    flipped = (np.diff(middle, axis=1) < 0).all(axis=1)
    assert np.all(flipped | (np.diff(middle, axis=1) > 0).all(axis=1))
    assert 60 < flipped.sum() < 140


#
# The full scale, on very small files
#


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """Two images a file, in the binary version's format."""
    generator = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        labels = generator.integers(0, 10, (2, 1), np.uint8)
        pixels = generator.integers(0, 256, (2, 3072), np.uint8)
        (folder / f"{name}.bin").write_bytes(np.hstack([labels, pixels]).tobytes())
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    md5 = {name: hashlib.md5(contents).hexdigest() for name, contents in files.items()}
    monkeypatch.setitem(standard.DATASETS, "cifar10", cifar10.dataset(2, md5))
    training._standard.cache_clear()
    yield tmp_path
    training._standard.cache_clear()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "arguments", "points"),
    [
        ("k-sweep", ["--grid", "1,8,1e8"], 9),
        ("large-k-augmented", [], 2),
        ("resnet", [], 4),
    ],
)
def test_the_full_scale_runs_on_files_of_cifar10(
    name, arguments, points, cifar, tmp_path
):
    out = tmp_path / "results"
    command = [name, "--scale", "full", "--data-dir", str(cifar), "--steps", "20"]
    command += ["--seeds", "1", "--out", str(out), *arguments]
    assert main(command) == 0
    settings = json.loads((out / "settings.json").read_text())
    assert settings["finished"]
    assert settings["scale"] == "full"
    assert settings["settings"]["data"] == "cifar10"
    assert settings["settings"]["num_steps"] == 20
    assert len(list((out / "runs").glob("*.npz"))) == points
    with (out / f"{name.replace('-', '_')}.csv").open() as file:
        rows = list(csv.DictReader(file))
    last = [row for row in rows if float(row["inner_steps"]) == 20]
    assert last
    assert all(np.isfinite(float(row["train_loss"])) for row in last)
    # Finished results are not computed again.
    made = {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}
    assert main([*command, "--resume"]) == 0
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()} == made


def test_the_full_scale_asks_for_its_files(tmp_path, capsys):
    out = ["--out", str(tmp_path / "results")]
    assert main(["resnet", "--scale", "full", *out]) == 2
    assert "name their folder with --data-dir" in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.mkdir()
    out = ["--out", str(tmp_path / "others")]
    assert main(["resnet", "--scale", "full", "--data-dir", str(empty), *out]) == 2
    message = capsys.readouterr().err
    assert "There is no 'cifar-10-binary.tar.gz'" in message
    assert message.count("\n") == 1


def test_mnist_is_read_for_the_full_scale(tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    md5 = {}
    for part, number in (("train", 12), ("t10k", 5)):
        for kind, shape, code in (("images-idx3", (28, 28), 3), ("labels-idx1", (), 1)):
            largest = 256 if code == 3 else 10
            values = generator.integers(0, largest, (number, *shape), np.uint8)
            sizes = b"".join(n.to_bytes(4, "big") for n in values.shape)
            contents = bytes([0, 0, 8, code]) + sizes + values.tobytes()
            path = tmp_path / f"{part}-{kind}-ubyte"
            path.write_bytes(contents)
            md5[path.name] = hashlib.md5(contents).hexdigest()
    monkeypatch.setitem(standard.DATASETS, "mnist", mnist.dataset(12, 5, md5))
    training._standard.cache_clear()
    settings = Images(data="mnist", network="lenet-mnist")
    (images, labels), held_out, (test_images, _) = training.load(
        settings, Place(tmp_path), 0
    )
    training._standard.cache_clear()
    assert images.shape == (10, 1, 28, 28)
    assert labels.shape == (10,)
    assert len(held_out[1]) == 2
    assert test_images.shape == (5, 1, 28, 28)
    assert float(images.max()) <= 1
    model = training.NETWORKS["lenet-mnist"](jax.random.key(0))
    outputs = jax.eval_shape(model, images[0].astype(float))
    assert outputs.shape == (10,)
