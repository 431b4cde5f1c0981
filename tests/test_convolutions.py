"""Convolutions rewritten with channels last, compared with the original ones."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from problems import drawn, equations

import gnlin
from gnlin._common._convolutions import channels_last
from gnlin._jacobian import OfExamples


KINDS = {
    "plain": {},
    "strided": {"window_strides": 2},
    "same": {"padding": "SAME", "window_strides": 3},
    "padded unevenly": {"padding": (0, 2)},
    "cropped": {"padding": (-1, 1)},
    "dilated": {"rhs_dilation": 2},
    "transposed": {"lhs_dilation": 2, "padding": (2, 1)},
    "in groups": {"feature_group_count": 2},
    "in groups of images": {"batch_group_count": 3},
    "all at once": {
        "window_strides": 2,
        "padding": (1, 2),
        "rhs_dilation": 2,
        "feature_group_count": 2,
    },
}
# Layouts of images, kernel and output, by the number of spatial axes
LAYOUTS = {
    1: [None, ("NWC", "WIO", "NWC"), ("CNW", "OWI", "WNC")],
    2: [None, ("NHWC", "HWIO", "NHWC"), ("HCNW", "OWIH", "CWNH")],
    3: [None, ("NHWDC", "HWDIO", "NHWDC"), ("DCNHW", "IDOWH", "WNDCH")],
}
SIZES = {"N": 3, "C": 4, "H": 7, "W": 6, "D": 5}
# Each kind, and each layout at each number of axes
CASES = [(name, i % 3, 1 + (i + i // 3) % 3) for i, name in enumerate(KINDS)]


def convolution(name, n, layout, dtype):
    """Return a convolution of the given kind, and its operands."""
    kind = KINDS[name]
    spread = {
        k: [v] * n if k in ("window_strides", "rhs_dilation", "lhs_dilation") else v
        for k, v in ({"window_strides": 1, "padding": "VALID"} | kind).items()
    }
    if isinstance(spread["padding"], tuple):
        spread["padding"] = [spread["padding"]] * n
    layouts = LAYOUTS[n][layout]
    axes = "HWD"[:n] if n > 1 else "W"
    specs = layouts or ("NC" + axes, "OI" + axes, "NC" + axes)
    of_kernel = {
        "O": 6,
        "I": 4 // kind.get("feature_group_count", 1),
        **{a: 2 for a in axes},
    }
    of_kernel["W"] = 3
    generator = np.random.default_rng(n)
    x = jnp.asarray(generator.normal(size=[SIZES[a] for a in specs[0]]), dtype)
    w = jnp.asarray(generator.normal(size=[of_kernel[a] for a in specs[1]]), dtype)
    convolve = functools.partial(
        jax.lax.conv_general_dilated, dimension_numbers=specs, **spread
    )
    return convolve, x, w


def cropped_beforehand(convolve, n, layout):
    """Crop first, because XLA's convolution is wrong for negative padding."""
    specs = (LAYOUTS[n][layout] or ("NC",))[0]
    padding = [(0, 0, 0)] * (n + 2)
    for axis, kind in enumerate(specs if len(specs) > 2 else "NC" + "S" * n):
        padding[axis] = (0, 0, 0) if kind in "NC" else (-1, 0, 0)
    later = functools.partial(convolve, padding=[(0, 1)] * n)
    return lambda x, w: later(jax.lax.pad(x, jnp.zeros((), x.dtype), padding), w)


only_on_a_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="convolutions are rewritten on a CPU only"
)


def layouts_of(fn, *args):
    """Return for each convolution of a program whether its channels are last."""
    found = []
    for equation in equations(jax.make_jaxpr(fn)(*args).jaxpr):
        if equation.primitive.name == "conv_general_dilated":
            images, kernel, out = equation.params["dimension_numbers"]
            last = len(images) - 1
            expected = (0, last, *range(1, last))
            of_kernel = (last, last - 1, *range(last - 1))
            found.append((images, kernel, out) == (expected, of_kernel, expected))
    return found


def all_in_one(*functions):
    """Compute all results in one program. Otherwise each operation would be compiled
    separately."""
    return jax.jit(lambda *args: [fn(*args) for fn in functions])


def assert_equal(found, expected, dtype):
    tolerance = 100 * float(jnp.finfo(dtype).eps)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        scale = float(np.max(np.abs(b), initial=0.0)) or 1.0
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


@only_on_a_cpu
@pytest.mark.parametrize(("name", "layout", "n"), CASES)
def test_a_convolution_of_any_kind_and_its_derivatives(name, layout, n):
    dtype = (jnp.float32, jnp.float64)[(n + layout) % 2]
    convolve, x, w = convolution(name, n, layout, dtype)

    def of_operands(convolve):
        fn = lambda x, w: jnp.sin(convolve(x, w))
        total = lambda x, w: jnp.sum(fn(x, w) ** 2)

        def all_of_it(x, w):
            pushed = jax.jvp(fn, (x, w), (jnp.cos(x), jnp.cos(w)))
            slope = lambda x, w: jax.grad(total, (0, 1))(x, w)
            return pushed, jax.jvp(slope, (x, w), (jnp.cos(x), jnp.cos(w)))

        return all_of_it

    known = cropped_beforehand(convolve, n, layout) if name == "cropped" else convolve
    # The convolution is rewritten both before and after differentiation.
    before = of_operands(channels_last(convolve))
    after = channels_last(of_operands(convolve))
    expected, *found = all_in_one(of_operands(known), before, after)(x, w)
    for each in found:
        assert_equal(each, expected, dtype)
    assert all(layouts_of(after, x, w))


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_convolutions_under_vmap(axes):
    convolve, x, w = convolution("strided", 2, 0, jnp.float64)
    x, w = (
        a if axis is None else jnp.stack([a, 2 * a, jnp.sin(a)])
        for a, axis in zip((x, w), axes, strict=True)
    )
    expected, *found = all_in_one(
        jax.vmap(convolve, axes),
        jax.vmap(channels_last(convolve), axes),
        channels_last(jax.vmap(convolve, axes)),
    )(x, w)
    for each in found:
        assert_equal(each, expected, jnp.float64)


@jax.custom_jvp
def scaled(x, w):
    return jax.lax.conv(x, w, (1, 1), "SAME")


@scaled.defjvp
def _(primals, tangents):
    out = scaled(*primals)
    return out, 2 * out * jnp.mean(tangents[0])


def once(x, w):
    return jax.lax.conv(x, w, (1, 1), "SAME")


WITHIN = {
    "jit": lambda x, w: jax.jit(once)(x, w),
    "checkpoint": lambda x, w: jax.checkpoint(once)(x, w),
    "scan": lambda x, w: jax.lax.scan(lambda x, _: (once(x, w), None), x, None, 2)[0],
    "while": lambda x, w: jax.lax.fori_loop(0, 2, lambda _, x: once(x, w), x),
    "cond": lambda x, w: jax.lax.cond(x[0, 0, 0, 0] > 0, once, lambda x, w: x, x, w),
    "custom derivative": scaled,
}


@pytest.mark.slow
@only_on_a_cpu
@pytest.mark.parametrize("name", WITHIN)
def test_in_programs_within(name):
    fn = WITHIN[name]
    x, w = jnp.arange(150.0).reshape(2, 3, 5, 5) / 150, jnp.full((3, 3, 3, 3), 0.1)
    turned = channels_last(fn)
    found = layouts_of(turned, x, w)
    assert found
    assert all(found)

    def pushed(fn):
        return lambda x, w: (fn(x, w), jax.jvp(fn, (x, w), (jnp.cos(x), w)))

    assert_equal(*all_in_one(pushed(turned), pushed(fn))(x, w), x.dtype)
    assert_equal(turned(x, w), jax.jit(fn)(x, w), x.dtype)


def test_arrays_that_a_function_closes_over_are_differentiated():
    x, w = jnp.arange(150.0).reshape(2, 3, 5, 5) / 150, jnp.full((3, 3, 3, 3), 0.1)

    def slopes(convert):
        of_images = lambda w: convert(lambda x: jnp.sin(once(x, w)))(x)
        slope = jax.grad(lambda w: jnp.sum(of_images(w) ** 2))
        many = jax.vmap(slope)(jnp.stack([w, jnp.cos(w)]))
        return slope(w), jax.jvp(slope, (w,), (jnp.cos(w),)), many

    both = jax.jit(lambda: (slopes(channels_last), slopes(lambda fn: fn)))
    assert_equal(*both(), x.dtype)


def test_random_keys_go_in_and_come_out():
    x, w = jnp.ones((2, 3, 5, 5)), jnp.full((3, 3, 3, 3), 0.1)

    def dropped(key, x, w):
        key, drawn = jax.random.split(key)
        kept = jax.random.bernoulli(drawn, 0.5, x.shape)
        return key, once(jnp.where(kept, x, 0.0), w)

    expected_key, expected = jax.jit(dropped)(jax.random.key(5), x, w)
    key, found = jax.jit(channels_last(dropped))(jax.random.key(5), x, w)
    assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(expected_key))
    assert_equal(found, expected, x.dtype)


@pytest.mark.parametrize("wrap", [jax.jit, lambda fn: fn])
def test_an_effect_happens_once(wrap):
    seen = []

    def fn(x, w):
        jax.debug.callback(lambda total: seen.append(float(total)), jnp.sum(x))
        return once(x, w)

    jax.block_until_ready(
        wrap(channels_last(fn))(jnp.ones((2, 3, 5, 5)), jnp.ones((3,) * 4))
    )
    jax.effects_barrier()
    assert seen == [150.0]


def test_a_function_without_convolutions_is_unchanged():
    fn = lambda x: {"a": jnp.sin(x), "b": (x, jnp.ones(()))}
    assert_equal(channels_last(fn)(jnp.ones(3)), fn(jnp.ones(3)), jnp.float64)


class Network(eqx.Module):
    layers: list

    def __init__(self):
        self.layers = [
            drawn(eqx.nn.Conv2d, 1, 2, 3, stride=2, padding=1),
            drawn(eqx.nn.Conv2d, 2, 3, 3, groups=1),
            drawn(eqx.nn.Linear, 12, 2),
        ]

    def __call__(self, x):
        first, second, last = self.layers
        return last(jnp.tanh(second(jnp.tanh(first(x)))).ravel())


def network():
    parameters, rest = eqx.partition(Network(), eqx.is_array)
    fn = gnlin.PerExample(lambda p, x: eqx.combine(p, rest)(x))
    x = np.random.default_rng(3).normal(size=(6, 1, 8, 8))
    return fn, parameters, jnp.asarray(x)


@pytest.mark.slow
@only_on_a_cpu
@pytest.mark.parametrize("part_size", [None, 4])
def test_products_of_a_linearisation_have_them_with_channels_last(part_size):
    fn, parameters, x = network()
    fn = gnlin.PerExample(fn.fn, part_size)

    def products(parameters, x):
        lin = gnlin.linearise(fn, parameters, x)
        v = jax.tree.map(jnp.cos, parameters)
        return lin.jvp(v), lin.vjp(jnp.cos(lin.outputs)), lin.jacobian.curvature_mv(v)

    plain = jax.vmap(fn.fn, (None, 0))
    v = jax.tree.map(lambda x: jnp.asarray(np.cos(x)), parameters)

    def by_jax(parameters, x):
        outputs, pushed = jax.jvp(lambda p: plain(p, x), (parameters,), (v,))
        _, pull = jax.vjp(lambda p: plain(p, x), parameters)
        return pushed, *pull(jnp.cos(outputs)), *pull(pushed)

    found, expected = all_in_one(products, by_jax)(parameters, x)
    assert_equal(found, expected, jnp.float64)

    def looped(vectors):
        lin = gnlin.linearise(fn, parameters, x)
        step = lambda v, _: (lin.jacobian.curvature_mv(v), None)
        return jax.lax.scan(step, vectors, None, 3)[0]

    def bodies(jaxpr):
        scans = [e for e in equations(jaxpr) if e.primitive.name == "scan"]
        return [e.params["jaxpr"] for e in scans]

    for body in bodies(jax.make_jaxpr(looped)(v).jaxpr):
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in body.in_avals]
        assert all(layouts_of(jaxpr_as_fun(body), *shapes))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_they_stay_convolutions(platform):
    fn, parameters, x = network()
    lowered = jax.jit(fn).trace(parameters, x).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("stablehlo.convolution") == 2


def test_on_another_platform_nothing_changes(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    fn = lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME")
    x, w = jnp.ones((2, 3, 5, 5)), jnp.ones((3, 3, 3, 3))
    assert layouts_of(channels_last(fn), x, w) == [False]


def test_layers_are_found_as_before():
    fn, parameters, x = network()

    @jax.jit
    def kernel_of(parameters):
        lin = gnlin.linearise(fn, parameters, x)
        assert isinstance(lin.jacobian, OfExamples)
        assert set(lin.jacobian._program().layers) >= {0, 2, 4}
        return lin.kernel()

    rows = jax.jit(jax.jacrev(lambda p: jax.vmap(fn.fn, (None, 0))(p, x)))(parameters)
    dense = np.concatenate([r.reshape(12, -1) for r in jax.tree.leaves(rows)], axis=1)
    np.testing.assert_allclose(kernel_of(parameters), dense @ dense.T, rtol=1e-10)
