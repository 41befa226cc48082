"""Settings of a loop of one's own: constants, arguments and defaults in its code, and what it prints of itself."""

import ast
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path

from rolloutdoctor.importers.logs.console import Console
from rolloutdoctor.importers.logs.forms import is_step
from rolloutdoctor.importers.logs.numbers import number
from rolloutdoctor.importers.logs.printed import pairs
from rolloutdoctor.importers.logs.table import located
from rolloutdoctor.importers.reading.notebooks import Notebook, read_notebook
from rolloutdoctor.importers.reading.text_lines import lines_of
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.opening.stated.calls import OF_TRAINING
from rolloutdoctor.opening.stated.command_lines import assigned
from rolloutdoctor.opening.stated.config_lines import on_own_line
from rolloutdoctor.opening.stated.json_configs import options_in_json
from rolloutdoctor.opening.stated.literals import Code, literal_of, parsed
from rolloutdoctor.opening.stated.options import ReadLog, Stated
from rolloutdoctor.opening.stated.settings import own_title, title_of

_ANY = ReadLog()

_HEAD = 2_000
"""Lines of a console, before its first step, that are looked at."""

_LONGEST = 4_000
"""Characters of such a line."""

_FEWEST = 2

_JSON = (".json", ".jsonl", ".ndjson")


def own_options(log: Source, read: ReadLog = _ANY) -> Stated | None:
    """Read which settings the code of a notebook, the head of a console, or JSON states; None if fewer than two.

    One with several values is left out: nobody knows which one counted.

    Args:
        log: of the run.
        read: what its numbers say.
    """
    name = Path(log.name).name
    path, _ = located(Path(log.path))
    notebook = read_notebook(path)
    if notebook is not None:
        nodes = [node for cell in notebook.code for node in _of_training(parsed(cell))]
        is_grpo = any(map(_IS_GRPO.search, notebook.code))
        # In the paper of the method, and in most code of it, the size of a group is called so.
        given = (
            ("group_size" if is_grpo and name == "G" and value in range(2, _LARGEST_GROUP) else name, value)
            for name, value in _given(nodes)
        )
        layers = _of_calls(notebook), given, _defaults(nodes)
        options, origin = _known(*layers, clips=_clips(nodes)), f"code of {name}"
        if not any(map(_HAS_REFERENCE.search, notebook.code)):
            # A beta is of replay, of an optimizer, or of anything else, where no policy is held to another one.
            options = {given: value for given, value in options.items() if title_of(given) != "KL coefficient"}
    elif Console().detect(path) is not None:
        before, first = read.begins or (0, _HEAD)
        head = islice(
            takewhile(lambda line: not is_step(line), lines_of(Source(str(path), log.name))), before, first - 1
        )
        numbers = (pair for line in islice(head, _HEAD) if len(line) <= _LONGEST for pair in _numbers(line))
        # The line of a metric may stand before the whole of its step.
        settings = ((label, value) for label, value in numbers if label not in read.names)
        options, origin = _known(settings), f"printed config in {name}"
    elif path.is_file() and path.suffix in _JSON:
        options, origin = options_in_json(path), f"config in {name}"
    else:
        return None
    return Stated(origin, None, options) if len(options) >= _FEWEST else None


def _of_training(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of code without those of functions that evaluate, or show what a model says."""
    left = deque([tree])
    while left:
        node = left.popleft()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _OF_EVALUATION.search(node.name) is not None:
            continue
        yield node
        left += ast.iter_child_nodes(node)


_LARGEST_GROUP = 1025
_IS_GRPO = re.compile(r"(?i)grpo|group[ _]relative")
_HAS_REFERENCE = re.compile(r"(?i)kl|ref|dpo|grpo|rlhf")

_OF_EVALUATION = re.compile(r"(?i)(?:^|_)(?:eval|test|infer|chat|demo|valid)")


def _known(*layers: Iterable[tuple[str, object]], clips: Collection[str] = ()) -> dict[str, object]:
    """Return the settings of which each has one value; an earlier layer goes before a later one.

    Args:
        layers: names and values.
        clips: names that are clip ranges for certain, which `own_title` may doubt.
    """
    options: dict[str, object] = {}
    titles: set[str] = set()
    for layer in layers:
        values: dict[str, dict[object, str]] = {}
        for name, value in layer:
            if title := title_of(name) if name in clips else own_title(name):
                values.setdefault(title, {})[value] = name
        for title in values.keys() - titles:
            if len(values[title]) == 1:
                titles.add(title)
                options |= {name: value for value, name in values[title].items()}
    return options


def _numbers(line: str) -> Iterator[tuple[str, object]]:
    yield from on_own_line(line).items()
    labelled = [*pairs(line), *(assigned(line).items() if " --" in line else ())]
    for label, text in labelled:
        value = number(str(text))
        if value is not None:
            # ``KL coef: 0.01`` is kl_coef, and in ``with lr=1e-6`` the name is the last word.
            yield "_".join(label.lower().split()), value
            yield label.rpartition(" ")[2], value


def _of_calls(notebook: Notebook) -> list[tuple[str, float]]:
    """The arguments of what is called by the name of a method of reinforcement learning: ``train_ppo(gamma=1.0)``."""
    numbers: list[tuple[str, float]] = []

    def take(name: str, arguments: Sequence[object], named: dict[str, object]) -> bool:
        if _OF_A_METHOD.search(name) is not None and _OF_EVALUATION.search(name) is None:
            numbers.extend(_as_numbers(named.items()))
        return False

    code = Code(take)
    for cell in notebook.code:
        code.follow(parsed(cell))
    return numbers


_OF_A_METHOD = re.compile(r"(?i)ppo|grpo|rloo|reinforce|_rl\b|^rl")


def _as_numbers(named: Iterable[tuple[str, object]]) -> Iterator[tuple[str, float]]:
    for name, value in named:
        parsed = value if isinstance(value, (int, float)) else number(value) if isinstance(value, str) else None
        if parsed is not None and not isinstance(parsed, bool):
            yield name.rpartition(".")[2], float(parsed)


def _clips(nodes: Iterable[ast.AST]) -> set[str]:
    """Return names that bound an importance ratio: ``EPSILON`` of ``torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON)``."""
    names = set()
    for node in nodes:
        if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in ("clamp", "clip"):
            continue
        bounds = {ast.unparse(bound) for bound in (*node.args, *(keyword.value for keyword in node.keywords))}
        lower = (_LOWER.fullmatch(bound) for bound in bounds)
        names |= {match[1].rpartition(".")[2] for match in lower if match is not None and _above(match[1]) & bounds}
    return names


_LOWER = re.compile(r"1(?:\.0)? - ([\w.]+)")


def _above(name: str) -> set[str]:
    return {f"1 + {name}", f"1.0 + {name}"}


def _given(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, float]]:
    """Yield names with numbers: ``LR = 1e-6``, a field ``lr: float = 1e-6``, ``{"lr": 1e-6}``, ``train(lr=1e-6)``."""
    for node in nodes:
        pairs_of: list[tuple[object, ast.expr | None]] = []
        if isinstance(node, ast.Assign):
            pairs_of = [(ast.unparse(target), node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign):
            pairs_of = [(ast.unparse(node.target), node.value)]
        elif isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            pairs_of = list(zip(keys, node.values, strict=True))
        elif isinstance(node, ast.Call) and OF_TRAINING.search(ast.unparse(node.func)) is None:
            # Those of a trainer are of another training, or would have been read.
            pairs_of = [(keyword.arg, keyword.value) for keyword in node.keywords]
        yield from _with_numbers(pairs_of)


def _defaults(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, float]]:
    """Yield the defaults of functions, and of options of a command: ``add_argument("--lr", default=1e-6)``."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            positional = [*node.args.posonlyargs, *node.args.args]
            last = positional[len(positional) - len(node.args.defaults) :]
            named = [*zip(last, node.args.defaults, strict=True)]
            optional = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            yield from _with_numbers([(parameter.arg, value) for parameter, value in [*named, *optional]])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
            names = [
                argument.value
                for argument in node.args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            ]
            values = [keyword.value for keyword in node.keywords if keyword.arg == "default"]
            yield from _with_numbers(
                [(name.lstrip("-").replace("-", "_"), value) for name in names for value in values]
            )


def _with_numbers(named: Iterable[tuple[object, ast.expr | None]]) -> Iterator[tuple[str, float]]:
    for name, node in named:
        value = None if node is None else literal_of(node)
        if isinstance(name, str) and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name.rpartition(".")[2], float(value)
