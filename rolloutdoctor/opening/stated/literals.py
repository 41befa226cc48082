"""What names in Python code stand for, as far as literals say: code is followed in its order, and nothing is run."""

import ast
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

LONGEST = 2**16
"""Characters of a cell, or of printed options."""

UNKNOWN = object()
"""What is no literal, and made of none."""

_MOST_CALLS, _DEEPEST = 200, 8
"""Calls of functions of the code itself that are followed; and one call, or one table, within another."""

_LARGEST = 2**53
_MAGIC = re.compile(r"^([ \t]*)[%!](?:.*\\\n)*.*$", re.MULTILINE)
_OPERATORS: dict[type, Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
_OF_NUMBERS: dict[str, Callable[..., object]] = {
    "int": int,
    "float": float,
    "min": min,
    "max": max,
    "round": round,
    "abs": abs,
}
_TABLES = frozenset({"dict", "SimpleNamespace", "Namespace", "EasyDict", "DotMap", "Munch", "create", "asdict", "vars"})
"""Last parts of names of what makes a table of a table, or of arguments with a name."""


def parsed(code: str) -> ast.Module:
    """Return the code of a cell without its commands; nothing of one that is too long, or no Python."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(_MAGIC.sub(r"\1pass", code) if len(code) <= LONGEST else "")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ast.Module([], [])


def is_known(value: object, depth: int = 0) -> bool:
    """Tell what is literal in all its parts; a table that holds itself is not."""
    if depth > _DEEPEST:
        return False
    if isinstance(value, dict | list):
        return all(is_known(part, depth + 1) for part in (value.values() if isinstance(value, dict) else value))
    return value is not UNKNOWN


class _Class(dict[str, object]):
    """The fields of a class, with their defaults."""

    methods: "dict[str, _Function]"


class _Parser(dict[str, object]):
    """The options of an argparse parser, with their defaults."""


class _Function:
    """A function of the code."""

    def __init__(self, node: ast.FunctionDef | ast.AsyncFunctionDef, defaults: dict[str, object]) -> None:
        self.body = node.body
        self.parameters = [parameter.arg for parameter in (*node.args.posonlyargs, *node.args.args)]
        self.defaults = {parameter.arg: UNKNOWN for parameter in node.args.kwonlyargs} | defaults
        self.is_of_class = any(ast.unparse(decorator) == "classmethod" for decorator in node.decorator_list)
        self.is_called = False


class Code:
    """Follows code, a cell after another.

    Args:
        made: takes the name of what is called, and its arguments without and with a name; returns True if that is what
            it looks for: what is assigned to its fields later is in the same table.
    """

    def __init__(self, take: Callable[[str, Sequence[object], dict[str, object]], bool]) -> None:
        self.names: dict[str, object] = {"__name__": "__main__"}
        self._made = take
        self._aliases: dict[str, str] = {}
        self._functions: list[_Function] = []
        self._returned: list[object] = []
        self._calls, self._depth, self._doubts = 0, 0, 0

    def follow(self, tree: ast.Module) -> None:
        """Follow the statements of a cell."""
        try:
            self._all(tree.body)
        except RecursionError:
            return

    def follow_uncalled(self) -> None:
        """Follow the functions that nothing called: nobody knows their arguments."""
        for function in list(self._functions):
            if not function.is_called:
                with self._scope(dict.fromkeys((*function.parameters, *function.defaults), UNKNOWN)):
                    self.follow(ast.Module(function.body, []))

    def _all(self, statements: Iterable[ast.stmt]) -> None:
        for node in statements:
            self._statement(node)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign():
                value = self.value(node.value)
                for target in node.targets:
                    self._bind(target, value)
            case ast.AnnAssign() if node.value is not None:
                self._bind(node.target, self.value(node.value))
            case ast.AugAssign():
                self.value(node.value)
                self._bind(node.target, UNKNOWN)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.names[node.name] = self._function(node)
            case ast.ClassDef():
                self.names[node.name] = self._class(node)
            case ast.If():
                self._branches(node)
            case ast.ImportFrom():
                self._aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
            case ast.Return():
                self._returned.append(UNKNOWN if node.value is None else self.value(node.value))
            case _:
                self._parts(node)

    def _parts(self, node: ast.AST) -> None:
        """Follow what is in a statement of another kind: loops, `with`, `try`."""
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.stmt():
                    self._statement(child)
                case ast.expr() if isinstance(getattr(child, "ctx", None), ast.Store):
                    self._bind(child, UNKNOWN)
                case ast.expr():
                    self.value(child)
                case ast.excepthandler():
                    with self._doubtful():
                        self._parts(child)
                case ast.withitem():
                    self._parts(child)

    def _branches(self, node: ast.If) -> None:
        test = self.value(node.test)
        if is_known(test):
            self._all(node.body if test else node.orelse)
            return
        before = dict(self.names)
        with self._doubtful():
            self._all(node.body)
            branch, self.names = self.names, before
            self._all(node.orelse)
        for name in branch.keys() | self.names.keys():
            mine, other = branch.get(name, UNKNOWN), self.names.get(name, UNKNOWN)
            self.names[name] = mine if mine is other or (is_known(mine) and mine == other) else UNKNOWN

    @contextmanager
    def _doubtful(self) -> Iterator[None]:
        """Around what may not be run: tables keep no value that is set there."""
        self._doubts += 1
        yield
        self._doubts -= 1

    @contextmanager
    def _scope(self, arguments: dict[str, object]) -> Iterator[None]:
        outer, self.names = self.names, {**self.names, **arguments}
        yield
        self.names = outer

    def _bind(self, target: ast.expr, value: object) -> None:
        match target:
            case ast.Name():
                self.names[target.id] = value
            case ast.Attribute():
                self._set(self.value(target.value), target.attr, value)
            case ast.Subscript():
                self._set(self.value(target.value), self.value(target.slice), value)
            case ast.Tuple() | ast.List():
                parts = value if isinstance(value, list) and len(value) == len(target.elts) else None
                for place, part in enumerate(target.elts):
                    self._bind(part, UNKNOWN if parts is None else parts[place])

    def _set(self, table: object, name: object, value: object) -> None:
        if isinstance(table, dict) and isinstance(name, str):
            table[name] = UNKNOWN if self._doubts else value

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> _Function:
        positional = [*node.args.posonlyargs, *node.args.args]
        last = positional[len(positional) - len(node.args.defaults) :]
        named = [*zip(last, node.args.defaults, strict=True)]
        keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        named += [(parameter, value) for parameter, value in keywords if value is not None]
        function = _Function(node, {parameter.arg: self.value(value) for parameter, value in named})
        self._functions.append(function)
        return function

    def _class(self, node: ast.ClassDef) -> _Class:
        fields = _Class()
        fields.methods = {}
        for base in map(self.value, node.bases):
            fields.update(base if isinstance(base, dict) else {})
            fields.methods |= base.methods if isinstance(base, _Class) else {}
        with self._scope({}):
            before = dict(self.names)
            self._all(node.body)
            members = {name: value for name, value in self.names.items() if before.get(name, before) is not value}
        fields.methods |= {name: value for name, value in members.items() if isinstance(value, _Function)}
        fields.update({name: value for name, value in members.items() if not isinstance(value, _Function)})
        return fields

    def value(self, node: ast.expr) -> object:
        """Return what an expression is; `UNKNOWN` where that is not made of literals."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self.names.get(node.id, UNKNOWN)
            case ast.Attribute():
                table = self.value(node.value)
                return table.get(node.attr, UNKNOWN) if isinstance(table, dict) else UNKNOWN
            case ast.Subscript():
                table, key = self.value(node.value), self.value(node.slice)
                return table.get(key, UNKNOWN) if isinstance(table, dict) and isinstance(key, str) else UNKNOWN
            case ast.Dict():
                return self._table(zip(node.keys, node.values, strict=True))
            case ast.List() | ast.Tuple():
                return [self.value(each) for each in node.elts]
            case ast.Call():
                return self._call(node)
            case ast.IfExp():
                test, then, otherwise = self.value(node.test), self.value(node.body), self.value(node.orelse)
                return (then if test else otherwise) if is_known(test) else UNKNOWN
            case ast.BinOp() | ast.Compare() | ast.UnaryOp():
                return self._computed(node)
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                return UNKNOWN
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
        return UNKNOWN

    def _table(self, items: Iterable[tuple[ast.expr | None, ast.expr]]) -> dict[str, object]:
        table: dict[str, object] = {}
        for key, node in items:
            name, value = None if key is None else self.value(key), self.value(node)
            if isinstance(name, str):
                table[name] = value
            elif name is None and isinstance(value, dict):
                table |= value
        return table

    def _computed(self, node: ast.BinOp | ast.Compare | ast.UnaryOp) -> object:
        signs: Sequence[ast.AST]
        if isinstance(node, ast.Compare):
            signs, sides = node.ops, [self.value(node.left), *map(self.value, node.comparators)]
        elif isinstance(node, ast.BinOp):
            signs, sides = [node.op], [self.value(node.left), self.value(node.right)]
        else:
            signs, sides = [node.op], [self.value(node.operand)]
        compute = _OPERATORS.get(type(signs[0])) if len(signs) == 1 else None
        is_equality = isinstance(signs[0], (ast.Eq, ast.NotEq, ast.Not))
        if compute is None or not all(is_known(side) if is_equality else _is_number(side) for side in sides):
            return UNKNOWN
        try:
            return compute(*sides)
        except ArithmeticError:
            return UNKNOWN

    def _call(self, node: ast.Call) -> object:
        arguments = [self.value(each) for each in node.args]
        named = self._table(
            (ast.Constant(argument.arg) if argument.arg else None, argument.value) for argument in node.keywords
        )
        name = ast.unparse(node.func)
        name = self._aliases.get(name, name)
        last = name.rpartition(".")[2]
        owner = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else UNKNOWN
        called = self.names.get(name, UNKNOWN)
        if isinstance(called, _Function):
            self._made(name, arguments, named)
            return self._entered(called, arguments, named)
        if isinstance(called, _Class):
            return self._instance(called, arguments, named)
        if isinstance(owner, _Class) and last in owner.methods:
            method = owner.methods[last]
            return self._entered(method, [owner, *arguments] if method.is_of_class else arguments, named)
        if isinstance(owner, dict):
            return self._method(owner, last, arguments, named)
        if last == "ArgumentParser":
            return _Parser()
        if last in _TABLES:
            first = arguments[0] if arguments else {}
            return {**first, **named} if isinstance(first, dict) else UNKNOWN
        if name in _OF_NUMBERS and arguments and all(map(_is_number, arguments)):
            try:
                return _OF_NUMBERS[name](*arguments)
            except (TypeError, ValueError, OverflowError):
                return UNKNOWN
        if last == "field":
            return named.get("default", UNKNOWN)
        return named if self._made(name, arguments, named) else UNKNOWN

    def _instance(self, fields: _Class, arguments: Sequence[object], named: dict[str, object]) -> dict[str, object]:
        instance = {**fields, **named}
        if "__init__" in fields.methods:
            self._entered(fields.methods["__init__"], [instance, *arguments], named)
        else:
            instance |= dict(zip(fields, arguments, strict=False))
        return instance

    def _method(self, owner: dict[str, object], name: str, arguments: list[object], named: dict[str, object]) -> object:
        first = arguments[0] if arguments else None
        if isinstance(owner, _Parser) and name == "add_argument":
            for flag in arguments:
                if isinstance(flag, str) and flag.startswith("--"):
                    default = False if named.get("action") == "store_true" else None
                    owner[flag[2:].replace("-", "_")] = named.get("default", default)
        elif isinstance(owner, _Parser) and name in ("parse_args", "parse_known_args"):
            namespace: dict[str, object] = dict(owner)
            return [namespace, UNKNOWN] if name == "parse_known_args" else namespace
        elif isinstance(owner, _Parser):
            return owner
        elif name == "update":
            for key, value in {**(first if isinstance(first, dict) else {}), **named}.items():
                self._set(owner, key, value)
        elif name == "get" and isinstance(first, str):
            return owner.get(first, arguments[1] if len(arguments) > 1 else None)
        elif name == "copy":
            return dict(owner)
        return UNKNOWN

    def _entered(self, function: _Function, arguments: Sequence[object], named: dict[str, object]) -> object:
        """Follow a function with the arguments of a call, and return what it returns, if that is certain."""
        function.is_called = True
        if self._calls >= _MOST_CALLS or self._depth >= _DEEPEST:
            return UNKNOWN
        self._calls += 1
        self._depth += 1
        bound = dict.fromkeys(function.parameters, UNKNOWN) | function.defaults
        outer, self._returned = self._returned, []
        with self._scope(bound | dict(zip(function.parameters, arguments, strict=False)) | named):
            self._all(function.body)
        returned, self._returned = self._returned, outer
        self._depth -= 1
        return returned[0] if len(returned) == 1 else UNKNOWN


def literal_of(node: ast.expr) -> object:
    """Return what an expression of literals is; `UNKNOWN` for any other."""
    return Code(lambda name, arguments, named: False).value(node)


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float)) and abs(value) < _LARGEST
