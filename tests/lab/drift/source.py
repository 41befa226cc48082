"""What of a wheel's source is compared: the syntax of watched functions, and options with their defaults."""

import ast
import hashlib
import re
import zipfile
from pathlib import Path
from typing import NamedTuple

from drift import watched


class Fingerprint(NamedTuple):
    """What a release has: a hash for each watched function, and the default of each option as source."""

    functions: dict[str, str]
    options: dict[str, str]


def release_in(wheel: Path) -> str:
    """Release of a wheel, from its name."""
    return wheel.name.split("-")[1]


def package_in(wheel: Path) -> str:
    """Name of the package of a wheel, as `PACKAGES` has it."""
    name = normal(wheel.name.split("-")[0])
    return next((each for each in watched.PACKAGES if normal(each) == name), name)


def normal(name: str) -> str:
    """Name of a package without the differences that an index overlooks."""
    return re.sub(r"[-_.]+", "-", name).lower()


def fingerprint(wheel: Path, package: str = "") -> Fingerprint:
    """Hash the watched functions of a wheel and read its options; what it does not have is left out."""
    package = package or package_in(wheel)
    found = Fingerprint({}, {})
    with zipfile.ZipFile(wheel) as archive:
        trees = {file: tree_of(archive, file) for table in TABLES for file, _ in watched.watched(table, package)}
    for file, name in watched.watched(watched.FUNCTIONS, package):
        if nodes := named(trees[file], name):
            found.functions[f"{file}:{name}"] = syntax_hash(nodes)
    for file, name in watched.watched(watched.OPTIONS, package):
        owner = "" if name == "add_argument" else f"{name}."
        found.options.update({f"{owner}{option}": value for option, value in options(trees[file], name).items()})
    return found


TABLES = (watched.FUNCTIONS, watched.OPTIONS)


def tree_of(archive: zipfile.ZipFile, file: str) -> ast.Module:
    """Syntax tree of a file; an empty one where it is gone."""
    # A wheel of several folders has its files below `NAME.data/purelib/`.
    inside = [name for name in archive.namelist() if name == file or name.endswith(f".data/purelib/{file}")]
    return ast.parse(archive.read(inside[0])) if inside else ast.Module([], [])


def named(tree: ast.AST, name: str) -> list[ast.AST]:
    """Definitions and assignments of a dotted name; a function may stand in a branch, and more than once."""
    nodes = [tree]
    for part in name.split("."):
        nodes = [node for outer in nodes for node in ast.walk(outer) if node is not outer and part in names_of(node)]
    return nodes


def names_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    return [each.id for each in node.targets if isinstance(each, ast.Name)] if isinstance(node, ast.Assign) else []


def syntax_hash(nodes: list[ast.AST]) -> str:
    """Hash syntax without its places, comments and docstrings."""
    return hashlib.sha256("\n".join(map(plain, nodes)).encode()).hexdigest()[:16]


def plain(value: object) -> str:
    """Syntax as text that every Python writes alike: without empty fields, of which each of its releases adds some."""
    if isinstance(value, list):
        return f"[{','.join(map(plain, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = {name: part for name, part in ast.iter_fields(value) if isinstance(value, ast.Constant) or part}
    if (
        isinstance(value, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and ast.get_docstring(value) is not None
    ):
        fields["body"] = value.body[1:]
    fields.pop("kind", None)
    return f"{type(value).__name__}({','.join(f'{name}={plain(part)}' for name, part in fields.items())})"


def options(tree: ast.AST, name: str) -> dict[str, str]:
    """Options to their defaults: fields of a class, keys of a dictionary, calls of `add_argument` or of `get`."""
    if name == "add_argument":
        return dict(map(stated, (node for node in ast.walk(tree) if called(node) == name)))
    found: dict[str, str] = {}
    for node in named(tree, name):
        if isinstance(node, ast.ClassDef):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            found |= {ast.unparse(each.target): default(each.value) for each in fields}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            found |= {str(ast.literal_eval(key)): default(value) for key, value in pairs if key is not None}
        else:
            found |= dict(
                map(stated, (each for each in ast.walk(node) if called(each) == "get" and len(each.args) == 2))
            )
    return found


def called(node: ast.AST) -> str:
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


def stated(call: ast.Call) -> tuple[str, str]:
    """Option and default of a call that states them."""
    keywords = {each.arg: each.value for each in call.keywords}
    name = ast.unparse(call.args[-1] if called(call) == "add_argument" else call.args[0]).strip("'\"")
    if called(call) == "get":
        return name, default(call.args[1])
    return name, default(keywords.get("default", keywords.get("action")))


def default(value: ast.expr | None) -> str:
    """Source of a default; of a dataclass's `field(default=1, metadata=...)` that of its default."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("field", "dataclasses.field"):
        given = {each.arg: each.value for each in value.keywords}
        value = given.get("default", given.get("default_factory"))
    return "" if value is None else ast.unparse(value)
