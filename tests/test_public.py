"""The public names are documented, and cheap to import."""

import inspect
import json
import subprocess
import sys

import pytest

import gnlin


ROOMS = (
    gnlin.authoring,
    gnlin.callbacks,
    gnlin.damping,
    gnlin.features,
    gnlin.filters,
    gnlin.losses,
    gnlin.methods,
    gnlin.preconditioners,
    gnlin.predict,
    gnlin.spectra,
)

TOP = {
    name: value
    for name, value in vars(gnlin).items()
    if not name.startswith("_") and not inspect.ismodule(value)
}
PUBLIC = {f"gnlin.{name}": value for name, value in TOP.items()} | {
    f"{room.__name__}.{name}": getattr(room, name)
    for room in ROOMS
    for name in room.__all__
}

METHODS = {
    f"{name}.{member}": value
    for name, cls in PUBLIC.items()
    if inspect.isclass(cls)
    for member, value in vars(cls).items()
    if not member.startswith("_")
    and (inspect.isfunction(value) or isinstance(value, property))
}

# optimistix and lineax document the methods that they require of a solver. `converged`,
# `first_memory` and `update` are documented at their declaration.
INHERITED = {
    "init",
    "step",
    "terminate",
    "postprocess",
    "compute",
    "transpose",
    "conj",
    "assume_full_rank",
    "first_memory",
    "update",
}


def test_the_public_names():
    assert sorted(TOP) == [
        "Checkpoint",
        "CheckpointError",
        "CurveFit",
        "DampedGaussNewton",
        "GaussNewton",
        "Groups",
        "History",
        "IterativeLinearisation",
        "LevenbergMarquardt",
        "Linearisation",
        "PerExample",
        "Residuals",
        "SigmoidCrossEntropy",
        "SoftmaxCrossEntropy",
        "Solution",
        "Sparsity",
        "Spectrum",
        "SquaredError",
        "TangentKernel",
        "TruncatedGaussNewton",
        "curve_fit",
        "fit",
        "linearise",
        "solve",
    ]
    rooms = {name for name in vars(gnlin) if inspect.ismodule(getattr(gnlin, name))}
    assert {name for name in rooms if name[0] != "_"} == {
        room.__name__.removeprefix("gnlin.") for room in ROOMS
    }
    assert gnlin.__version__


@pytest.mark.parametrize(
    ("name", "room"),
    [
        ("Huber", "losses"),
        ("AbstractLoss", "authoring"),
        ("GridSearch", "methods"),
        ("accuracy", "losses"),
        ("predictive_variance", "predict"),
    ],
)
def test_a_moved_name_still_works(name, room):
    with pytest.warns(DeprecationWarning, match=f"use `gnlin.{room}.{name}`"):
        found = getattr(gnlin, name)
    assert found is getattr(getattr(gnlin, room), name)


def test_a_name_that_never_was():
    with pytest.raises(AttributeError, match="has no attribute 'Adam'"):
        gnlin.Adam  # noqa: B018


@pytest.mark.parametrize(
    ("room", "name", "instead"),
    [
        (gnlin.methods, "Trajectory", r"`spectrum\.step\(solver\.filter\(k\)\)`"),
        (gnlin.features, "direction_alignment", "`xor-features`"),
    ],
)
def test_a_name_that_is_gone_says_what_to_use(room, name, instead):
    with pytest.raises(AttributeError, match=f"no attribute {name!r}: .*{instead}"):
        getattr(room, name)
    with pytest.raises(AttributeError, match=r"no attribute 'Adam'$"):
        room.Adam  # noqa: B018


def test_every_public_name_is_documented():
    assert PUBLIC
    for name, value in PUBLIC.items():
        doc = value.__doc__
        assert doc, f"{name} has no docstring."
        assert value.__module__.startswith("gnlin"), name
        summary = inspect.cleandoc(doc).split("\n\n")[0]
        assert summary[0].isupper() or summary[0] in "$`", name
        dataclass_default = f"{name.split('.')[-1]}("
        assert not summary.startswith(dataclass_default), name
        assert summary.rstrip().endswith((".", "$", ":")) or "$$" in doc, name


def test_every_public_method_is_documented():
    assert METHODS
    missing = [
        name
        for name, value in METHODS.items()
        if name.split(".")[-1] not in INHERITED and not inspect.getdoc(value)
    ]
    assert not missing, f"These have no docstring: {missing}."


@pytest.fixture(scope="module")
def imported():
    """Import gnlin in another process. Return the names of the modules that it then has,
    whether JAX's settings have changed, and the number of devices, of which JAX is told
    after the import."""
    script = """
import json, sys
import jax
before = jax.config.values.copy()
import gnlin
names, now = list(sys.modules), jax.config.values
changed = any(now[name] != value for name, value in before.items())
jax.config.update("jax_num_cpu_devices", 2)
print(json.dumps([names, changed, jax.device_count("cpu")]))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def test_the_import_is_light(imported):
    heavy = {"optax", "jaxopt", "scipy.optimize", "matplotlib", "beartype"}
    heavy |= {"hypothesis", "pytest", "benchmarks"}
    assert not heavy & set(imported[0])


def test_the_import_leaves_jax_as_it_is(imported):
    """JAX's settings stay, and so does its choice of devices before a first
    computation."""
    _, changed, num_devices = imported
    assert not changed
    assert num_devices == 2
