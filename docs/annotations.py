"""Types in the reference by the names that they have in the code: inspection sees a union
of nine types where `ScalarLike` was written."""

import ast

import griffe


_NUMBERS = ("bool", "number", "bool", "int", "float", "complex")
_NAMES = {
    ("Shaped[Array, '']", "Shaped[ndarray, '']", *_NUMBERS): "ScalarLike",
    ("Array", "ndarray", *_NUMBERS): "ArrayLike",
}


class _Short(ast.NodeTransformer):
    """Names without the modules that they are from."""

    def visit_Attribute(self, node):
        return ast.Name(node.attr)


class _Named(ast.NodeTransformer):
    def visit_Subscript(self, node):
        if ast.unparse(node) == "Shaped[Array, '']":
            return ast.Name("Scalar")
        if not (
            isinstance(node.value, ast.Name) and node.value.id in ("Union", "Optional")
        ):
            return self.generic_visit(node)
        inner = node.slice
        members = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        parts = []
        while members:
            for types, name in _NAMES.items():
                if tuple(map(ast.unparse, members[: len(types)])) == types:
                    parts.append(ast.Name(name))
                    members = members[len(types) :]
                    break
            else:
                parts.append(self.visit(members[0]))
                members = members[1:]
        if ast.unparse(node.value) == "Optional":
            parts.append(ast.Name("None"))
        union = parts[0]
        for part in parts[1:]:
            union = ast.BinOp(union, ast.BitOr(), part)
        return union

    def visit_Name(self, node):
        return ast.Name("None") if node.id == "NoneType" else node


def _named(annotation, parent):
    if annotation is None:
        return None
    try:
        tree = _Short().visit(ast.parse(str(annotation), mode="eval").body)
    except SyntaxError:
        return annotation
    tree = _Named().visit(tree)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    # As an expression a name would be resolved, and be the union again.
    if names & set(_NAMES.values()):
        return ast.unparse(tree)
    return griffe.safe_get_expression(tree, parent=parent)


class Annotations(griffe.Extension):
    def on_function_instance(self, *, func, **_):
        for parameter in func.parameters:
            parameter.annotation = _named(parameter.annotation, func.parent)
        func.returns = _named(func.returns, func.parent)
