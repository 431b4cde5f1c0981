"""Show types in the reference under their names in the code. Inspection would show a
union of nine types instead of `ScalarLike`."""

import ast
import re

import griffe


_NUMBERS = ("bool", "number", "bool", "int", "float", "complex")
_NAMES = {
    ("Shaped[Array, '']", "Shaped[ndarray, '']", *_NUMBERS): "ScalarLike",
    ("Array", "ndarray", *_NUMBERS): "ArrayLike",
}


class _Short(ast.NodeTransformer):
    """Drop the modules from names."""

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


def _quoted(annotation: str) -> str:
    """Restore the quotes of a `Literal`'s strings, which inspection drops."""

    def literal(match):
        names = [name.strip() for name in match[1].split(",")]
        words = [f'"{name}"' if name[0].isalpha() else name for name in names]
        return f"Literal[{', '.join(words)}]"

    return re.sub(r"Literal\[([^\]]+)\]", literal, annotation)


def _named(annotation, parent):
    if annotation is None:
        return None
    try:
        tree = _Short().visit(ast.parse(_quoted(str(annotation)), mode="eval").body)
    except SyntaxError:
        return annotation
    tree = _Named().visit(tree)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    # Return a string: an expression would be resolved to the union again.
    if names & set(_NAMES.values()):
        return ast.unparse(tree)
    return griffe.safe_get_expression(tree, parent=parent, parse_strings=False)


class Annotations(griffe.Extension):
    def on_function_instance(self, *, func, **_):
        for parameter in func.parameters:
            parameter.annotation = _named(parameter.annotation, func.parent)
        func.returns = _named(func.returns, func.parent)
