"""Dense and convolutional layers are found in programs; their products match dense
Jacobians by `jax.jacrev`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from problems import damped_step, drawn, each_pair, numbers

import gnlin
from gnlin._common import _tree
from gnlin._jacobian import _block, _layer, _program, Layer, Rows


def normal(*shape, dtype=float, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


class Tower(eqx.Module):
    """A layer whose outputs fixed numbers map to a vector of three outputs."""

    layer: eqx.Module

    def __call__(self, x):
        z = jnp.tanh(self.layer(x)).ravel()
        mixing = jnp.sin(jnp.outer(jnp.arange(3.0), jnp.arange(float(z.size))) + 1)
        return jnp.cos(mixing.astype(z.dtype) @ z)


class Positions(eqx.Module):
    """A dense layer on each column inside a `jit`, with its weights on the right."""

    weights: jax.Array

    def __init__(self, shape, *, key):
        self.weights = jax.random.normal(key, shape)

    def __call__(self, x):
        return jax.jit(lambda a, b: a.T @ b)(x, self.weights)


key = jax.random.key(0)
# The class of each layer, its arguments, and the shape of an example.
LAYERS = {
    "dense": (eqx.nn.Linear, (6, 5), {}, (6,)),
    "dense, of one number": (eqx.nn.Linear, ("scalar", 5), {}, ()),
    "positions": (Positions, ((4, 7),), {}, (4, 9)),
    "convolution": (eqx.nn.Conv2d, (2, 3, 3), {}, (2, 6, 5)),
    "padded": (eqx.nn.Conv2d, (2, 3, 2), {"padding": ((1, 0), (0, 2))}, (2, 4, 4)),
    "strided": (eqx.nn.Conv2d, (2, 8, (3, 2)), {"stride": (2, 3)}, (2, 7, 8)),
    "dilated": (eqx.nn.Conv1d, (4, 6, 3), {"dilation": 2, "stride": 2}, (4, 11)),
    "three axes": (eqx.nn.Conv3d, (1, 2, 2), {}, (1, 3, 3, 4)),
    "one position": (eqx.nn.Conv2d, (2, 3, 4), {}, (2, 4, 4)),
}


def case(name, num_examples=4, dtype=float):
    kind, sizes, options, shape = LAYERS[name]
    model = Tower(drawn(kind, *sizes, dtype=dtype, **options))
    return *as_function(model), normal(num_examples, *shape, dtype=dtype)


def as_function(model):
    parameters, frozen = eqx.partition(model, eqx.is_inexact_array)
    return lambda p, x: eqx.combine(p, frozen)(x), parameters


def layers_of(lin):
    return [block for block in lin.jacobian.blocks() if isinstance(block, Layer)]


def dense(fn, parameters, x):
    flat, unravel = ravel_pytree(parameters)
    batched = lambda v: jax.vmap(lambda e: fn(unravel(v), e))(x).ravel()
    return np.asarray(jax.jit(jax.jacrev(batched))(flat))


def kernel_of(fn, parameters, x, *budget):
    """Compute the kernel in one program; separate operations would be a hundred
    compilations."""
    options = {"memory_budget": budget[0]} if budget else {}
    lin = lambda p, x: gnlin.linearise(gnlin.PerExample(fn), p, x, **options)
    kernel = lambda p, x: lin(p, x).kernel()
    return jax.jit(kernel)(parameters, x)


@pytest.fixture
def always(monkeypatch):
    """Keep layers of any size as factors."""
    monkeypatch.setattr(Layer, "is_smaller", lambda self: True)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_rows(name):
    fn, parameters, x = case(name)
    jacobian = dense(fn, parameters, x)
    rounding = 1e-13 * np.abs(jacobian).max() * jacobian.shape[1]
    a = np.random.default_rng(0).normal(size=jacobian.shape[0])
    v = np.random.default_rng(1).normal(size=jacobian.shape[1])

    @jax.jit
    def run(parameters, x, a, v):
        lin = gnlin.linearise(gnlin.PerExample(fn), parameters, x)
        jacobian = lin.jacobian.at_hand()
        assert sum(isinstance(x, Layer) for x in jacobian.blocks()) == 1
        unravel = ravel_pytree(parameters)[1]
        cotangent = a.reshape(lin.outputs.shape)
        return {
            "matrix": (jacobian.as_matrix(), lin.matrix()),
            "kernel": lin.kernel(),
            "pulled": (
                ravel_pytree(jacobian.pull_back(a))[0],
                ravel_pytree(lin.materialise().vjp(cotangent))[0],
            ),
            "pushed": jacobian.push_forward(unravel(v)),
            "columns": ravel_pytree(jacobian.squared_columns())[0],
        }

    found = run(parameters, x, a, v)
    for matrix in found["matrix"]:
        np.testing.assert_allclose(matrix, jacobian, atol=rounding)
    kernel = jacobian @ jacobian.T
    np.testing.assert_allclose(found["kernel"], kernel, atol=10 * rounding)
    for pulled in found["pulled"]:
        np.testing.assert_allclose(pulled, jacobian.T @ a, atol=10 * rounding)
    np.testing.assert_allclose(found["pushed"], jacobian @ v, atol=10 * rounding)
    squares = np.sum(jacobian**2, axis=0)
    np.testing.assert_allclose(found["columns"], squares, atol=10 * rounding)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", ["positions", "padded", "dilated", "dense"])
@pytest.mark.parametrize("way", ["_gram_of_positions", "_gram_by_rows"])
def test_both_ways_to_inner_products(name, way, monkeypatch):
    monkeypatch.setattr(_layer, "_PART_BYTES", 1)  # one output of the layer at a time
    fn, parameters, x = case(name)

    @jax.jit
    def run(parameters, x):
        (layer,) = layers_of(gnlin.linearise(gnlin.PerExample(fn), parameters, x))
        return layer.rows().reshape(layer.num_rows, -1), getattr(layer, way)(layer)

    rows, products = map(np.asarray, run(parameters, x))
    np.testing.assert_allclose(products, rows @ rows.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1e-10, 1.0, 1e10, 1e20])
def test_columns_whose_factors_squares_are_out_of_range(size):
    signals = np.array([[1.0, 0.0], [2.0, 3.0]]) * 1e20 / size
    activations = np.array([[1.0, 2.0, 0.0], [4.0, 0.0, 0.0]]) * 1e-20 * size
    layer = Layer(
        jnp.asarray(signals[:, None, :, None], jnp.float32),
        jnp.asarray(activations[:, None], jnp.float32),
        shape=(2, 3),
        axes=(0, 1),
    )
    expected = (signals**2).T @ activations**2
    np.testing.assert_allclose(layer.squared_columns(), expected, rtol=1e-5)


@pytest.mark.parametrize("num_columns", [8, 9, 11, 12, 17])
def test_long_rows_are_summed_over_slices(num_columns, monkeypatch):
    monkeypatch.setattr(_block, "_LONG", 9)
    monkeypatch.setattr(_block, "_SLICE", 4)
    rows = np.random.default_rng(0).normal(size=(3, num_columns))
    block = Rows(jnp.asarray(rows))
    gram = block.gram_with(block)
    np.testing.assert_allclose(gram, rows @ rows.T, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "dtype"),
    each_pair([5, 6, 9], [3, 8], [np.float32, np.float64]),
)
def test_products_with_themselves_by_halves(num_rows, num_columns, dtype, monkeypatch):
    monkeypatch.setattr(_tree, "_HALVED", 4)
    monkeypatch.setattr(_tree, "_TRANSPOSED", 4)
    rows = np.random.default_rng(0).normal(size=(num_rows, num_columns)).astype(dtype)
    tolerances = {"rtol": 1e-5, "atol": 1e-5} if dtype == np.float32 else {"rtol": 1e-12}
    gram, of_columns = jax.jit(_tree.gram)(rows), jax.jit(_tree.gram_of_columns)(rows)
    lower = np.tril(rows @ rows.T)
    of_triangle = jax.jit(_tree.gram_of_triangle)(lower)
    np.testing.assert_allclose(of_triangle, lower @ lower.T, **tolerances)
    np.testing.assert_allclose(gram, rows @ rows.T, **tolerances)
    np.testing.assert_allclose(of_columns, rows.T @ rows, **tolerances)
    assert gram.dtype == of_columns.dtype == dtype


@pytest.mark.parametrize("num_bytes", [1, 2000, 5000, 10**6])
def test_positions_some_examples_at_a_time(num_bytes, monkeypatch):
    monkeypatch.setattr(_layer, "_POSITIONS_BYTES", num_bytes)
    rng = np.random.default_rng(0)

    def layer(n):
        signals = jnp.asarray(rng.normal(size=(n, 2, 3, 4)))
        return Layer(signals, jnp.asarray(rng.normal(size=(n, 4, 5))), (3, 5), (0, 1))

    these, those = layer(7), layer(3)
    for a, b in ((these, those), (these, these)):
        both = jax.jit(lambda a, b: (a.rows(), b.rows(), a._gram_of_positions(b)))
        of_a, of_b, found = map(np.asarray, both(a, b))
        expected = of_a.reshape(14, -1) @ of_b.reshape(b.num_rows, -1).T
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.usefixtures("always")
def test_in_single_precision():
    fn, parameters, x = case("padded", dtype=jnp.float32)
    kernel = kernel_of(fn, parameters, x)
    assert kernel.dtype == jnp.float32
    jacobian = dense(fn, parameters, x)
    np.testing.assert_allclose(kernel, jacobian @ jacobian.T, rtol=1e-4, atol=1e-4)


class Shared(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x):
        return self.layer(jnp.tanh(self.layer(x)))


class Unrolled(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x):
        z = jnp.zeros(4)
        for part in (x, jnp.sin(x), x**2):
            z = jax.jit(lambda z, part: jnp.tanh(self.layer(z) + part))(z, part)
        return z


class Laplacian(eqx.Module):
    """Second derivatives of a network with respect to its inputs, by forward mode."""

    layers: tuple[eqx.nn.Linear, eqx.nn.Linear]

    def __call__(self, x):
        first, second = self.layers
        network = lambda x: second(jnp.tanh(first(x)))

        def along(v):
            slope = lambda x: jax.jvp(network, (x,), (v,))[1]
            return jax.jvp(slope, (x,), (v,))[1]

        return network(x) + sum(map(along, jnp.eye(x.size)))


class Convolved(eqx.Module):
    layer: eqx.nn.Conv1d

    def __call__(self, x):
        return jnp.sum(self.layer(jnp.tanh(self.layer(x))), axis=1)


class BothWays(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x):
        return jax.grad(lambda x: jnp.sum(jnp.tanh(self.layer(x)) ** 2))(x)


class Transposed(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x):
        return self.layer.weight.T @ x


class Penalised(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x):
        return self.layer(x) + jnp.sum(self.layer.weight**2)


class Product(eqx.Module):
    left: jax.Array
    right: jax.Array

    def __call__(self, x):
        return (self.left @ self.right) @ x


class Looped(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x):
        body = lambda _, z: jnp.tanh(self.layer.weight @ z)
        return jax.lax.fori_loop(0, 2, body, x)


def square(use_bias=False):
    return drawn(eqx.nn.Linear, 4, 4, use_bias=use_bias)


UNLIKE = {
    "both ways": (lambda: BothWays(square()), (4,)),
    "transposed": (lambda: Transposed(square()), (4,)),
    "penalised": (lambda: Penalised(square()), (4,)),
    "product": (lambda: Product(square().weight, square().weight), (4,)),
    "looped": (lambda: Looped(square()), (4,)),
    "grouped": (lambda: Tower(drawn(eqx.nn.Conv1d, 4, 4, 2, groups=2)), (4, 5)),
    "transposed convolution": (
        lambda: Tower(drawn(eqx.nn.ConvTranspose1d, 2, 2, 2, stride=2)),
        (2, 3),
    ),
}


# The number of uses of the weights: twice, in three steps, once, and in two derivatives.
SHARED = {
    "shared": (lambda: Shared(square(use_bias=True)), (4,), [2, 0]),
    "unrolled": (lambda: Unrolled(square()), (4,), [3]),
    "derivatives": (
        lambda: Laplacian((drawn(eqx.nn.Linear, 2, 3), drawn(eqx.nn.Linear, 3, 2))),
        (2,),
        None,
    ),
    "convolved": (
        lambda: Convolved(drawn(eqx.nn.Conv1d, 2, 2, 3, padding=1, use_bias=False)),
        (2, 5),
        [10],
    ),
}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", SHARED)
def test_weights_that_are_used_several_times_have_as_many_positions(name):
    make, shape, positions = SHARED[name]
    (fn, parameters), x = as_function(make()), normal(3, *shape)
    jacobian = dense(fn, parameters, x)
    a = np.sin(np.arange(float(jacobian.shape[0])))

    @jax.jit
    def run(parameters, x):
        lin = gnlin.linearise(gnlin.PerExample(fn), parameters, x)
        found = [layer.activations.shape[1] for layer in layers_of(lin)]
        if positions is None:  # as many as jax makes of it, and more than one
            assert len(found) == 2
            assert min(found) > 2
        else:
            assert found == [t for t in positions if t]
        hand = lin.jacobian.at_hand()
        pulled = ravel_pytree(hand.pull_back(jnp.asarray(a)))[0]
        return lin.kernel(), lin.matrix(), pulled, hand.push_forward(parameters)

    kernel, matrix, pulled, pushed = run(parameters, x)
    np.testing.assert_allclose(matrix, jacobian, atol=1e-12)
    np.testing.assert_allclose(kernel, jacobian @ jacobian.T, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(pulled, jacobian.T @ a, rtol=1e-11, atol=1e-11)
    expected = jacobian @ numbers(parameters)
    np.testing.assert_allclose(pushed, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", UNLIKE)
def test_parameters_outside_layers_keep_dense_rows(name):
    make, shape = UNLIKE[name]
    (fn, parameters), x = as_function(make()), normal(3, *shape)
    assert not _program.find(fn, parameters, x[0]).layers
    if name == "penalised":  # partly a layer
        kernel, jacobian = kernel_of(fn, parameters, x), dense(fn, parameters, x)
        np.testing.assert_allclose(kernel, jacobian @ jacobian.T, rtol=1e-10)


def test_a_program_with_effects_keeps_its_rows(capfd):
    def fn(w, x):
        jax.debug.print("seen")
        return jnp.tanh(w @ x)

    w, x = normal(2, 5), normal(3, 5, seed=2)
    assert not _program.find(fn, w, x[0]).layers
    kernel, jacobian = kernel_of(fn, w, x), dense(lambda w, e: jnp.tanh(w @ e), w, x)
    np.testing.assert_allclose(kernel, jacobian @ jacobian.T, rtol=1e-12)


@pytest.mark.parametrize(("name", "smaller"), [("dense", True), ("convolution", False)])
def test_factors_only_where_they_are_smaller(name, smaller):
    fn, parameters, x = case(name)  # the convolution has 12 positions of 18 numbers each
    found = []

    def run(parameters, x):
        found.extend(layers_of(gnlin.linearise(gnlin.PerExample(fn), parameters, x)))
        return x

    jax.eval_shape(run, parameters, x)
    assert bool(found) == smaller


def bytes_of(arrays):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


@pytest.mark.parametrize("name", ["dense", "convolution", "positions"])
def test_predicted_bytes_of_blocks(name):
    fn, parameters, x = case(name)
    predicted = []

    def blocks(parameters, x):
        jacobian = gnlin.linearise(gnlin.PerExample(fn), parameters, x).jacobian
        predicted.append(jacobian.cost().num_bytes)
        return jacobian.blocks()

    assert predicted == [bytes_of(jax.eval_shape(blocks, parameters, x))]


def test_the_kernel_within_a_budget():
    """Take a few arrays of parameters at a time, large ones by rows, and examples one by
    one."""
    fn, parameters = as_function(drawn(eqx.nn.MLP, 3, 2, 16, 3))
    x, passes = normal(5, 3), []

    @jax.jit
    def kernels(parameters, x):
        lin = lambda **budget: gnlin.linearise(
            gnlin.PerExample(fn), parameters, x, **budget
        )
        sizes = [bytes_of(block) for block in lin().jacobian.blocks()]
        found = []
        for budget in (sum(sizes), sum(sizes) - 1, max(sizes) - 1, 1):
            within = lin(memory_budget=budget)
            taken = within.jacobian.cost().gram
            passes.append((taken.jvps, taken.vjps))
            found.append(within.kernel())
        return found

    jacobian = dense(fn, parameters, x)
    for kernel in kernels(parameters, x):
        np.testing.assert_allclose(kernel, jacobian @ jacobian.T, rtol=1e-12)
    assert passes[:2] == [(0, 2), (0, 4)]
    assert passes[2][0] == 10
    assert passes[3] == (10, 10)


@pytest.mark.exhaustive
def test_a_damped_step_beyond_the_jacobians_memory():
    """The step by factors, the step in groups and the step by dense rows are equal."""
    loss = gnlin.SoftmaxCrossEntropy()
    model = drawn(eqx.nn.MLP, 5, 3, 24, 2, activation=jnp.tanh)
    x = normal(6, 5)
    target = jnp.arange(6) % 3

    def step(**settings):
        solver = gnlin.DampedGaussNewton(0.1, **settings)
        solution = gnlin.solve(model, (x, target), solver, loss=loss, max_steps=2)
        return numbers(solution.model)

    found, by_svd = step(method="eigh", memory_budget=3000), step(method="svd")
    np.testing.assert_allclose(found, by_svd, rtol=1e-8, atol=1e-10)


def test_layers_under_vmap_and_grad():
    fn, parameters, x = case("padded")

    @jax.jit
    def trace(parameters, x):
        return jnp.trace(gnlin.linearise(gnlin.PerExample(fn), parameters, x).kernel())

    xs = jnp.stack([x, 2 * x])
    both = jax.jit(jax.vmap(trace, (None, 0)))(parameters, xs)
    np.testing.assert_allclose(both, [trace(parameters, x) for x in xs], rtol=1e-12)
    flat, unravel = ravel_pytree(parameters)
    slope = jax.grad(lambda v: trace(unravel(v), x))(flat)
    along = jnp.sin(jnp.arange(flat.size))
    ahead, behind = (trace(unravel(flat + h * along), x) for h in (1e-5, -1e-5))
    np.testing.assert_allclose(slope @ along, (ahead - behind) / 2e-5, rtol=1e-6)


def test_one_example_one_output():
    w, x = jnp.arange(6.0).reshape(1, 6), jnp.ones((1, 6))
    np.testing.assert_allclose(kernel_of(lambda w, x: (w @ x)[0], w, x), [[6.0]])


@pytest.mark.exhaustive
def test_a_wide_network_is_solved_by_its_kernel():
    """Its Jacobian exceeds the budget but its factors do not, so the solver does not fall
    back on conjugate gradients."""
    model, x = drawn(eqx.nn.MLP, 2, 1, 300, 3), normal(8, 2)
    solver = gnlin.DampedGaussNewton(0.1, memory_budget=10**6)
    solution = gnlin.solve(model, (x, jnp.sin(x[:, :1])), solver, max_steps=1)
    assert float(solution.stats["num_vjps"]) == 1


@pytest.mark.exhaustive
def test_outputs_of_higher_precision_than_the_parameters():
    def fn(w, x):
        return jnp.tanh(w @ x.astype(w.dtype)).astype(float) * x[0]

    w, x = normal(3, 5, dtype=jnp.float32), normal(4, 5, seed=2)
    lin = gnlin.linearise(gnlin.PerExample(fn), w, x).materialise()
    jacobian = np.asarray(jax.jacrev(lambda w: jax.vmap(lambda x: fn(w, x))(x))(w))
    pushed = lin.jvp(w)
    assert pushed.dtype == jnp.float64
    expected = np.tensordot(jacobian, np.asarray(w), 2)
    np.testing.assert_allclose(pushed, expected, rtol=1e-5)
    pulled = lin.vjp(lin.outputs)
    assert pulled.dtype == jnp.float32
    expected = np.tensordot(np.asarray(lin.outputs), jacobian, 2)
    np.testing.assert_allclose(pulled, expected, rtol=1e-4)


@pytest.mark.usefixtures("always")
def test_a_convolution_of_several_images_in_one_example():
    def fn(w, x):
        z = jax.lax.conv(x, w, (1, 1), "SAME") / 9
        return jnp.tanh(z).mean((0, 2, 3))

    w, x = normal(8, 4, 3, 3), normal(3, 5, 4, 4, 4, seed=2)

    @jax.jit
    def run(w, x):
        lin = gnlin.linearise(gnlin.PerExample(fn), w, x)
        return lin.kernel(), lin.matrix()

    kernel, matrix = run(w, x)
    jacobian = dense(fn, w, x)
    np.testing.assert_allclose(kernel, jacobian @ jacobian.T, rtol=1e-11)
    np.testing.assert_allclose(matrix, jacobian, atol=1e-13)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_inputs_of_another_dtype(dtype):
    w, x = normal(3, 6), jnp.asarray((7 * normal(4, 6, seed=2)).astype(dtype))
    fn = lambda w, x: jnp.tanh(0.1 * (w @ x.astype(w.dtype)))
    kernel, jacobian = kernel_of(fn, w, x), dense(fn, w, x)
    np.testing.assert_allclose(kernel, jacobian @ jacobian.T, rtol=1e-12)


@pytest.mark.parametrize(("shape", "budget"), [((0, 3), 2**31), ((6, 0), 1)])
def test_empty_layers(shape, budget):
    def fn(y, x):
        return jnp.tanh(y["a"] @ x) + jnp.sum(y["b"] @ jnp.ones(shape[1]))

    y, x = {"a": normal(2, 5), "b": np.ones(shape)}, normal(3, 5, seed=2)
    kernel, jacobian = kernel_of(fn, y, x, budget), dense(fn, y, x)
    np.testing.assert_allclose(kernel, jacobian @ jacobian.T, rtol=1e-12)


def test_outputs_of_lower_precision_than_the_parameters():
    fn, parameters = as_function(drawn(eqx.nn.MLP, 3, 2, 8, 1, activation=jnp.tanh))
    x, damped = normal(6, 3), gnlin.filters.Tikhonov(0.5)
    methods = "kernel", "curvature"

    @jax.jit
    def steps(parameters, x):
        single = gnlin.PerExample(lambda p, x: fn(p, x).astype(jnp.float32))
        lin = gnlin.linearise(single, parameters, x)
        problem = gnlin.authoring.SumOfSquares().expand(lin)
        ready = [gnlin.authoring.choose(problem, damped, method=m) for m in methods]
        return jax.vmap(fn, (None, 0))(parameters, x), [x.solve(damped) for x in ready]

    outputs, answers = steps(parameters, x)
    expected = damped_step(np.ravel(outputs), dense(fn, parameters, x), 0.5)
    for answer in answers:
        np.testing.assert_allclose(numbers(answer.step), expected, atol=1e-5)


class WithNothing(eqx.Module):
    """A model with an empty array of parameters."""

    weight: jax.Array
    nothing: jax.Array

    def __call__(self, x):
        return jnp.tanh(self.weight @ x)


def test_empty_parameters_have_no_columns():
    x, weight = normal(5, 4), normal(2, 4, seed=2)
    solver = gnlin.DampedGaussNewton(1.0, method="kernel", memory_budget=20)
    model = WithNothing(weight, jnp.zeros((0, 3)))
    solution = gnlin.solve(model, (x, np.zeros((5, 2))), solver, max_steps=1)
    jacobian = dense(lambda w, x: jnp.tanh(w @ x), weight, x)
    step = damped_step(np.tanh(x @ weight.T).ravel(), jacobian, 1.0)
    np.testing.assert_allclose(numbers(solution.model), np.ravel(weight) + step)


def test_products_of_layers_are_in_full_precision():
    """On accelerators the default may be TF32."""
    draw = np.random.default_rng(0)
    signals = jnp.asarray(draw.normal(size=(3, 2, 4, 5)))
    activations = jnp.asarray(draw.normal(size=(3, 5, 6)))
    layer = Layer(signals, activations, (4, 6), (0, 1))
    products = {
        "pull_back": (layer.pull_back, jnp.ones(6)),
        "push_forward": (layer.push_forward, jnp.ones((4, 6))),
        "gram": (lambda _: layer.gram_with(layer), jnp.ones(1)),
        "rows": (lambda _: layer.rows(), jnp.ones(1)),
        "squared_columns": (lambda rows: Rows(rows).squared_columns(), jnp.ones((6, 3))),
    }
    for name, (product, of) in products.items():
        text = str(jax.make_jaxpr(product)(of))
        number = text.count("dot_general[")
        highest = "precision=(Precision.HIGHEST, Precision.HIGHEST)"
        assert number > 0, name
        assert text.count(highest) == number, name
