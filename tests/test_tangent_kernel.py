"""The kernel between two sets, compared with rows of the Jacobian in NumPy."""

import functools
import json
import os
import subprocess
import sys
import textwrap

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import gnlin
from gnlin._common._lock import locked
from gnlin._tangent_kernel._file import tiles


KEY = jax.random.key(0)


class Convolutional(eqx.Module):
    conv: eqx.nn.Conv2d
    dense: eqx.nn.Linear

    def __init__(self, key):
        self.conv = eqx.nn.Conv2d(1, 2, 3, key=key)
        self.dense = eqx.nn.Linear(18, 3, key=key)

    def __call__(self, x):
        return self.dense(jnp.tanh(self.conv(x)).ravel())


class Normalised(eqx.Module):
    dense: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.dense = eqx.nn.Linear(3, 2, key=key)
        self.norm = eqx.nn.BatchNorm(2, "batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.dense(x), state)


MODELS = {
    "dense": (eqx.nn.MLP(3, 2, 5, 2, activation=jnp.tanh, key=KEY), (3,), 2),
    "convolutional": (Convolutional(KEY), (1, 5, 5), 3),
    "one scalar": (eqx.nn.MLP(3, "scalar", 4, 1, key=KEY), (3,), 1),
    "of one parameter": ((lambda a, x: jnp.sin(a * x[:2]), jnp.array(0.3)), (3,), 2),
}


def drawn(shape, n, seed=0):
    return np.random.default_rng(seed).normal(size=(n, *shape))


def rows(model, inputs):
    """Return the rows of the Jacobian by example and output."""
    fn, parameters = (
        model
        if isinstance(model, tuple)
        else (lambda m, x: m(x), eqx.filter(model, eqx.is_inexact_array))
    )
    _, static = eqx.partition(model, eqx.is_inexact_array)

    def of(parameters, x):
        whole = eqx.combine(parameters, static)
        whole = parameters if isinstance(model, tuple) else whole
        return jnp.ravel(fn(whole, x))

    jacobians = jax.jit(jax.vmap(jax.jacrev(of), (None, 0)))
    each = jacobians(parameters, jnp.asarray(inputs))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(each)]
    return np.concatenate([x.reshape(*x.shape[:2], -1) for x in leaves], axis=2)


def views(j1, j2):
    whole = np.einsum("icp,jdp->icjd", j1, j2)
    return {
        "all": whole,
        "trace": np.einsum("icjc->ij", whole),
        "diagonal": np.einsum("icjc->ijc", whole),
        0: whole[:, 0, :, 0],
    }


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("dense", "all"),
        ("dense", 0),
        ("convolutional", "diagonal"),
        pytest.param("one scalar", "trace", marks=pytest.mark.slow),
        pytest.param("of one parameter", "all", marks=pytest.mark.slow),
    ],
)
def test_between_two_sets(name, outputs):
    model, shape, c = MODELS[name]
    x1, x2 = drawn(shape, 4), drawn(shape, 7, seed=1)
    j1, j2 = rows(model, x1), rows(model, x2)
    assert j1.shape[1] == c
    kernel = gnlin.TangentKernel(model, outputs=outputs)
    close = {"rtol": 1e-11, "atol": 1e-12}
    np.testing.assert_allclose(kernel(x1, x2), views(j1, j2)[outputs], **close)
    np.testing.assert_allclose(kernel(x2), views(j2, j2)[outputs], **close)
    np.testing.assert_allclose(kernel(x2[:1]), views(j2[:1], j2[:1])[outputs], **close)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outputs", "budget"),
    [("all", 4_000), pytest.param("trace", 8_000, marks=pytest.mark.slow)],
)
def test_in_tiles(outputs, budget, tmp_path):
    """The tiles fill an array in memory, or a file. The last tile overlaps the one before
    it, and mirrored tiles are not computed."""
    model, shape, _ = MODELS["dense"]
    x1, x2 = drawn(shape, 11), drawn(shape, 7, seed=1)
    whole = gnlin.TangentKernel(model, outputs=outputs)
    tiled = gnlin.TangentKernel(model, outputs=outputs, memory_budget=budget)
    close = {"rtol": 1e-12, "atol": 1e-13}
    np.testing.assert_allclose(tiled(x1, x2), whole(x1, x2), **close)
    np.testing.assert_allclose(tiled(x1), whole(x1), **close)
    for name, sets in (("a", (x1,)), ("b", (x1, x2))):
        found = tiled(*sets, file=tmp_path / "folder" / name)
        assert isinstance(found, np.memmap)
        np.testing.assert_allclose(found, whole(*sets), **close)
        assert json.loads((tmp_path / f"folder/{name}.npy.json").read_text())["tile"] != [
            11,
            11,
        ]


@given(*(st.integers(1, 30) for _ in range(4)), st.booleans())
def test_tiles_cover_everything_and_are_of_one_size(n1, n2, rows, columns, symmetric):
    if symmetric:
        n2, columns = n1, rows
    seen = np.zeros((n1, n2), int)
    found = tiles((n1, n2), (rows, columns), symmetric)
    shapes = {seen[place].shape for place in found}
    assert shapes == {(min(n1, rows), min(n2, columns))}
    for place_rows, place_columns in found:
        seen[place_rows, place_columns] += 1
        if symmetric and place_rows != place_columns:
            seen[place_columns, place_rows] += 1
    assert np.all(seen > 0)


def test_parts_of_the_kernel():
    model, shape, c = MODELS["convolutional"]
    x1, x2 = drawn(shape, 4), drawn(shape, 3, seed=1)
    kernel = gnlin.TangentKernel(model)
    whole = kernel(x1, x2)
    parts = kernel.by_parameter(x1, x2)
    assert parts.dense.weight.shape == whole.shape
    of_weights = np.einsum("icp,jdp->icjd", *(rows_of_dense(model, x) for x in (x1, x2)))
    np.testing.assert_allclose(parts.dense.weight, of_weights, rtol=1e-12)
    np.testing.assert_allclose(sum(jax.tree.leaves(parts)), whole, rtol=1e-12)
    expected = np.einsum("icic->ic", kernel(x1))
    np.testing.assert_allclose(kernel.diagonal(x1), expected, rtol=1e-12)
    of_one = gnlin.TangentKernel(model, outputs=c - 1)
    with pytest.raises(ValueError, match="outputs 0 to 2"):
        gnlin.TangentKernel(model, outputs=c)(x1)
    assert of_one(x1).shape == (4, 4)


def rows_of_dense(model, inputs):
    features = jax.vmap(lambda x: jnp.tanh(model.conv(x)).ravel())(jnp.asarray(inputs))
    each = np.einsum("iq,cd->icdq", features, np.eye(3))
    return each.reshape(len(inputs), 3, -1)


@pytest.mark.slow
def test_some_parameters_and_batch_normalisation():
    model, shape, _ = MODELS["dense"]
    x = drawn(shape, 4)
    spec = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(lambda m: m.layers[-1].bias, spec, True)
    kernel = gnlin.TangentKernel(model, filter_spec=spec)(x)
    np.testing.assert_allclose(kernel, np.broadcast_to(np.eye(2)[:, None], (4, 2, 4, 2)))
    normalised, state = eqx.nn.make_with_state(Normalised)(KEY)
    with pytest.raises(ValueError, match="pass `state`"):
        gnlin.TangentKernel(normalised)
    found = gnlin.TangentKernel(normalised, state=state)(x)
    by_hand = lambda m, x: eqx.nn.inference_mode(m)(x, state)[0]
    lin = gnlin.features.linearise_model((by_hand, normalised), x)
    expected = lin.kernel().reshape(found.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.slow
def test_kernel_of_a_linearisation():
    fn = gnlin.PerExample(lambda w, example: jnp.tanh(w @ example[0]) * example[1])
    point = jnp.arange(3.0)
    one, other = ((drawn((3,), n), drawn((), n)) for n in (4, 6))
    lins = [
        gnlin.linearise(fn, point, jax.tree.map(jnp.asarray, s)) for s in (one, other)
    ]
    found = gnlin.TangentKernel(lins[0])(one, other)
    np.testing.assert_allclose(found.reshape(4, 6), lins[0].kernel(lins[1]), rtol=1e-12)
    model, shape, _ = MODELS["dense"]
    x = drawn(shape, 4)
    of_model = gnlin.TangentKernel(gnlin.features.linearise_model(model, jnp.asarray(x)))
    np.testing.assert_array_equal(of_model(x), gnlin.TangentKernel(model)(x))
    coupled = gnlin.linearise(lambda w, x: jnp.cumsum(x @ w), point, jnp.asarray(one[0]))
    with pytest.raises(ValueError, match="linearise a `gnlin"):
        gnlin.TangentKernel(coupled)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_inside_a_program_and_in_either_precision(dtype):
    model, shape, _ = MODELS["dense"]
    x = drawn(shape, 5).astype(dtype)
    cast = lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf
    model = jax.tree.map(cast, model)
    plain = gnlin.TangentKernel(model, outputs="trace")(x)
    assert plain.dtype == dtype
    inside = eqx.filter_jit(lambda m, x: gnlin.TangentKernel(m, outputs="trace")(x))
    np.testing.assert_allclose(inside(model, x), plain, rtol=20 * np.finfo(dtype).eps)

    def of_seed(key):
        network = eqx.nn.MLP(3, 2, 5, 1, key=key)
        return gnlin.TangentKernel(network)(jnp.asarray(x, float))

    keys = jax.random.split(KEY, 3)
    ensemble = eqx.filter_vmap(of_seed)(keys)
    np.testing.assert_allclose(ensemble[1], of_seed(keys[1]), rtol=1e-5)


SEVERAL = """
    import os
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
    import equinox as eqx, jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import gnlin

    model = eqx.nn.MLP(3, 2, 5, 1, key=jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    on_devices = NamedSharding(Mesh(np.array(jax.devices()), "d"), P("d"))
    for outputs in ("all", "trace"):
        kernel = gnlin.TangentKernel(model, outputs=outputs)
        one = eqx.filter_jit(lambda x, z, kernel=kernel: (kernel(x), kernel(x, z)))
        for found, expected in zip((kernel(x), kernel(x, x[:9])), one(x, x[:9])):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        spread = kernel(jax.device_put(x, on_devices))
        np.testing.assert_allclose(spread, kernel(x), rtol=1e-5, atol=1e-6)
        assert len(spread.devices()) == 3
"""


@pytest.mark.slow
def test_on_several_devices(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(SEVERAL))
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


KILLED = """
    import os, sys
    import equinox as eqx, jax, numpy as np
    import gnlin
    from gnlin._tangent_kernel._file import KernelFile

    put, last = KernelFile.put, int(sys.argv[1])

    def counted(self, parts, tile, num_done):
        put(self, parts, tile, num_done)
        print(self.path.name, flush=True)
        if self.path.name == "killed.npy" and num_done == last:
            os._exit(9)

    KernelFile.put = counted
    model = eqx.nn.MLP(3, 2, 5, 1, key=jax.random.key(0))
    inputs = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    kernel = gnlin.TangentKernel(model, outputs="trace", memory_budget=3_000)
    for file in sys.argv[2:]:
        kernel(inputs, file=file)
"""


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(KILLED))
    whole, killed = tmp_path / "whole.npy", tmp_path / "killed.npy"

    def run(last, *files):
        return subprocess.run(
            [sys.executable, program, str(last), *files],
            capture_output=True,
            text=True,
            cwd=os.getcwd(),
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )

    first = run(2, whole, killed)
    assert first.returncode == 9, first.stderr
    num_tiles = first.stdout.count("whole.npy")
    assert num_tiles > 3
    assert first.stdout.count("killed.npy") == 2
    assert not killed.exists()  # the zeros of an unfinished file look like a kernel
    # The second of these calls finds that all is done.
    second = run(-1, killed, killed)
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("killed.npy") == num_tiles - 2
    assert whole.read_bytes() == killed.read_bytes()


def test_files_that_are_not_kernels(tmp_path):
    model, shape, _ = MODELS["dense"]
    x = drawn(shape, 4)
    kernel = gnlin.TangentKernel(model)
    first = np.array(kernel(x, file=tmp_path / "k"))
    kernel(jnp.asarray(x), file=tmp_path / "k")
    other = eqx.tree_at(lambda m: m.layers[0].bias, model, jnp.ones(5))
    changed = eqx.tree_at(lambda m: m.activation, model, lambda x: jnp.tanh(2 * x))
    cases = {
        "other parameters": lambda: gnlin.TangentKernel(other)(x, file=tmp_path / "k"),
        "other functions": lambda: gnlin.TangentKernel(changed)(x, file=tmp_path / "k"),
        "other inputs": lambda: kernel(x[:3], file=tmp_path / "k"),
        "other outputs": lambda: gnlin.TangentKernel(model, outputs="trace")(
            x, file=tmp_path / "k"
        ),
    }
    for what, call in cases.items():
        with pytest.raises(ValueError, match=f"a kernel of {what}"):
            call()
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(ValueError, match="not a kernel"):
        kernel(x, file=tmp_path / "text")
    record = (tmp_path / "k.npy.json").read_text()
    for wrong in ("", "{}", "[]", record[:30]):
        (tmp_path / "k.npy.json").write_text(wrong)
        with pytest.raises(ValueError, match="damaged"):
            kernel(x, file=tmp_path / "k")
    (tmp_path / "k.npy.json").write_text(record)
    for wrong in (b"", (tmp_path / "k.npy").read_bytes()[:150]):
        (tmp_path / "cut.npy").write_bytes(wrong)
        (tmp_path / "cut.npy.json").write_text(record)
        with pytest.raises(ValueError, match="damaged"):
            kernel(x, file=tmp_path / "cut")
    (tmp_path / "cut.npy").rename(tmp_path / "cut.npy.part")
    with pytest.raises(ValueError, match=r"'cut\.npy\.part' or .* is damaged"):
        kernel(x, file=tmp_path / "cut")
    (tmp_path / "cut.npy.part").unlink()
    np.save(tmp_path / "cut.npy", np.ones((3, 3)))
    with pytest.raises(ValueError, match="damaged"):
        kernel(x, file=tmp_path / "cut")
    for place in (tmp_path / "k.npy" / "below", tmp_path / "zero\0byte"):
        with pytest.raises(ValueError, match="cannot be written"):
            kernel(x, file=place)
    with locked(tmp_path / "k.npy.lock") as is_alone:
        assert is_alone
        with pytest.raises(ValueError, match="another process"):
            kernel(x, file=tmp_path / "k")
    np.testing.assert_array_equal(np.load(tmp_path / "k.npy"), first)
    with pytest.raises(ValueError, match="compiled"):
        jax.jit(lambda x: kernel(x, file=tmp_path / "k"))(x)
    with pytest.raises(ValueError, match="path of a file"):
        kernel(x, file="")


def test_errors_of_arguments(unchecked):
    model, shape, _ = MODELS["dense"]
    x = drawn(shape, 40)
    kernel = gnlin.TangentKernel(model)
    cases = {
        "takes 51,200 bytes": lambda: gnlin.TangentKernel(model, memory_budget=9_999)(x),
        "the input of one example": lambda: kernel(x[:, :2]),
        "0 examples": lambda: kernel(x, x[:0]),
        "hold a scalar": lambda: kernel(1.0),
        "must be arrays of numbers": lambda: kernel("inputs"),
        "hold a masked array": lambda: kernel(np.ma.masked_less(np.ones((3, 2)), 0)),
        "of numbers, but hold <U": lambda: kernel(np.array(["a", "b"])),
        "pass fewer inputs": lambda: gnlin.TangentKernel(
            model, memory_budget=60_000
        ).by_parameter(x),
        "leave `filter_spec`": lambda: gnlin.TangentKernel(
            gnlin.features.linearise_model(model, jnp.asarray(x)),
            filter_spec=eqx.is_array,
        ),
        '`outputs` must be "all"': lambda: gnlin.TangentKernel(model, outputs="some"),
        "`outputs` must be": lambda: gnlin.TangentKernel(model, outputs=1.5),
        "model has 2": lambda: gnlin.TangentKernel(
            (lambda w, x: (w * x, x), jnp.ones(3))
        )(x),
        "outputs of the same shape": lambda: gnlin.TangentKernel(
            (lambda w, x: w * x, jnp.ones(()))
        )(x, x[:, :2]),
        "no trainable array": lambda: gnlin.TangentKernel(model, filter_spec=False),
    }
    for said, call in cases.items():
        with pytest.raises(ValueError, match=said):
            call()


def test_not_finite_stays_where_it_is():
    model, shape, _ = MODELS["dense"]
    x = drawn(shape, 4)
    x[2] = np.nan
    kernel = gnlin.TangentKernel(model, outputs="trace")(x)
    finite = np.isfinite(kernel)
    assert finite[0, 1]
    assert finite[3, 3]
    assert not finite[2].any()


@pytest.mark.slow
def test_widens_to_the_arc_cosine_kernel():
    """One hidden layer of ReLUs: Cho and Saul (2009), as in Jacot et al. (2018)."""

    def closed_form(x1, x2):
        sizes = np.linalg.norm(x1, axis=1)[:, None] * np.linalg.norm(x2, axis=1)
        cosine = np.clip(x1 @ x2.T / sizes, -1, 1)
        angle = np.arccos(cosine)
        first = (np.sin(angle) + (np.pi - angle) * cosine) / (2 * np.pi) * sizes
        return first + (np.pi - angle) / (2 * np.pi) * (x1 @ x2.T)

    @functools.partial(jax.jit, static_argnums=0)
    def weights(width, key):
        first, second = jax.random.split(key)
        return jax.random.normal(first, (width, 3)), jax.random.normal(second, (width,))

    def network(w, x):
        return w[1] @ jax.nn.relu(w[0] @ x) / jnp.sqrt(w[1].size)

    x1, x2 = drawn((3,), 5), drawn((3,), 4, seed=1)
    limit = closed_form(x1, x2)

    def error(width):
        found = [
            gnlin.TangentKernel((network, weights(width, key)), outputs="trace")(x1, x2)
            for key in jax.random.split(KEY, 8)
        ]
        return np.sqrt(np.mean(np.square(np.asarray(found) - limit)))

    errors = [error(width) for width in (64, 1024, 16384)]
    # The distance falls as one over the root of the width: a factor of 4 each
    np.testing.assert_allclose(np.divide(errors[:-1], errors[1:]), 4.0, rtol=0.5)
    assert errors[-1] < 0.02 * np.abs(limit).max()
