"""Parameters that a prior pulls to zero, since the outputs have no derivative by them."""

import equinox as eqx
import jax
from jaxtyping import PyTree

from .._common._canonical import are_read
from .._common._words import how_many, name_of
from ._step import StepSettings


def only_pulled(
    setting: StepSettings, parameters: PyTree, state: PyTree, data: tuple
) -> str:
    """Return a sentence that names the parameters by which the derivative of the outputs
    is zero whatever the numbers are, if there is a prior; or "". The program of the
    derivative is traced, and not compiled."""
    if setting.prior is None:
        return ""
    setting = setting._replace(prior=None)
    with_path = jax.tree_util.tree_leaves_with_path(parameters)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in with_path]
    structure = jax.tree.structure(parameters)
    arrays, static = eqx.partition((data[0], state), eqx.is_array)

    def derivative(leaves, tangents, arrays):
        inputs, state = eqx.combine(arrays, static)

        def outputs(leaves):
            args = setting.args(inputs, 0, state)
            return setting.outputs(structure.unflatten(leaves), args)

        return jax.linearize(outputs, leaves)[1](tangents)

    program = jax.make_jaxpr(derivative)(shapes, shapes, arrays).jaxpr
    tangents = are_read(program)[len(shapes) : 2 * len(shapes)]
    names = [name_of(x[0]) for x, y in zip(with_path, tangents, strict=True) if not y]
    if not names:
        return ""
    first = f"{names[0]!r}"
    if len(names) > 1:
        first += f" and {how_many(len(names) - 1, 'other array')}"
    return (
        f"The outputs have no derivative by {first}, so that `prior` pulls "
        "them to zero: leave them out by `filter_spec`, as for parameters behind "
        "`jax.lax.stop_gradient`."
    )
