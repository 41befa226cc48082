"""Options of a loop of one's own, which no trainer has: constants, arguments and defaults in code, and printed ones."""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path

from rolloutdoctor.importers.logs.console import Console, is_step
from rolloutdoctor.importers.logs.printed import number, pairs
from rolloutdoctor.importers.reading.notebooks import read_notebook
from rolloutdoctor.importers.reading.text_lines import lines_of
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.opening.stated.literals import literal_of, parsed

SPELLINGS: Mapping[str, frozenset[str]] = {
    title: frozenset(names.split())
    for title, names in {
        "learning rate": "lr learning_rate",
        "group size": "group_size num_generations num_rollouts n_rollouts rollouts_per_prompt samples_per_prompt "
        "num_samples_per_prompt generations_per_prompt completions_per_prompt",
        "KL coefficient": "kl_coef kl_coeff kl_beta beta kl_weight kl_penalty_coef init_kl_coef",
        "clip range": "clip_eps clip_epsilon eps_clip clip_range cliprange",
        "entropy coefficient": "entropy_coef entropy_coeff ent_coef entropy_bonus",
        "temperature": "temperature sampling_temperature",
        "response length limit": "max_new_tokens max_completion_length max_response_length max_gen_len",
        "steps": "num_steps total_steps max_steps train_steps",
    }.items()
}
"""What an option is to the names that loops give it, in lower case."""

_HEAD = 2_000
"""Lines of a console, before its first step, that are looked at."""

_LONGEST = 2_000
"""Characters of such a line."""

_FEWEST = 2


def own_options(log: Source) -> str | None:
    """Say which options the code of a notebook, or the head of a console, states; None if it states fewer than two.

    An option with several values is left out: nobody knows which one counted.
    """
    notebook = read_notebook(Path(log.path))
    if notebook is None:
        if Console().detect(Path(log.path)) is None:
            return None
        head = islice(takewhile(lambda line: not is_step(line), lines_of(log)), _HEAD)
        found, where = (
            _known((pair for line in head if len(line) <= _LONGEST for pair in _numbers(line)), ()),
            "printed",
        )
    else:
        nodes = [node for cell in notebook.code for node in ast.walk(parsed(cell))]
        found, where = _known(_given(nodes), _defaults(nodes)), "in its code"
    if len(found) < _FEWEST:
        return None
    listed = ", ".join(f"{title} {value:g} ({name})" for title, (name, value) in found.items())
    return f"{log.name}: options {where}: {listed}; no trainer is known that has them, and no rule uses them"


def _known(given: Iterable[tuple[str, float]], defaults: Iterable[tuple[str, float]]) -> dict[str, tuple[str, float]]:
    """Return what each option is called and its value; one that is given goes before a default."""
    found: dict[str, tuple[str, float]] = {}
    for named in (list(given), list(defaults)):
        for title, names in SPELLINGS.items():
            values = {value: name for name, value in named if name.lower() in names}
            if title not in found and len(values) == 1:
                ((value, name),) = values.items()
                found[title] = name, value
    return found


def _numbers(line: str) -> Iterator[tuple[str, float]]:
    for label, text in pairs(line):
        value = number(text)
        if value is not None:
            yield label.rpartition(" ")[2], value


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
        elif isinstance(node, ast.Call):
            pairs_of = [(keyword.arg, keyword.value) for keyword in node.keywords]
        yield from _with_numbers(pairs_of)


def _defaults(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, float]]:
    """Yield the defaults of functions, and of options of a command: ``add_argument("--lr", default=1e-6)``."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            own = [*node.args.posonlyargs, *node.args.args]
            last = own[len(own) - len(node.args.defaults) :]
            named = [*zip(last, node.args.defaults, strict=True)]
            optional = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            yield from _with_numbers([(one.arg, value) for one, value in [*named, *optional]])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
            names = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            values = [keyword.value for keyword in node.keywords if keyword.arg == "default"]
            yield from _with_numbers(
                [(name.lstrip("-").replace("-", "_"), value) for name in names for value in values]
            )


def _with_numbers(named: Iterable[tuple[object, ast.expr | None]]) -> Iterator[tuple[str, float]]:
    for name, node in named:
        value = None if node is None else literal_of(node)
        if isinstance(name, str) and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name.rpartition(".")[2], float(value)
