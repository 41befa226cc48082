"""Options of a loop of one's own, which no trainer has: constants, arguments and defaults in code, and printed ones."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path

from rolloutdoctor.importers.logs.console import Console
from rolloutdoctor.importers.logs.forms import is_step
from rolloutdoctor.importers.logs.printed import number, pairs
from rolloutdoctor.importers.reading.notebooks import Notebook, read_notebook
from rolloutdoctor.importers.reading.text_lines import lines_of
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.opening.stated.command_lines import assigned
from rolloutdoctor.opening.stated.literals import Code, literal_of, parsed

SPELLINGS: Mapping[str, frozenset[str]] = {
    title: frozenset(names.split())
    for title, names in {
        "learning rate": "lr learning_rate actor_lr actor_learning_rate policy_lr lr_policy lr_actor",
        "critic learning rate": "critic_lr critic_learning_rate value_lr lr_value lr_critic",
        "group size": "group_size num_generations num_rollouts n_rollouts rollouts_per_prompt samples_per_prompt "
        "num_samples_per_prompt generations_per_prompt completions_per_prompt n_samples_per_prompt "
        "num_completions",
        "KL coefficient": "kl_coef kl_coeff kl_beta beta beta_kl kl_weight kl_penalty_coef kl_loss_coef init_kl_coef "
        "kl_penalty lambda_kl kl_ctl",
        "target KL": "target_kl kl_target",
        "clip range": "clip_eps clip_epsilon eps_clip clip_range cliprange clip_ratio clip_param epsilon_clip ppo_clip "
        "ppo_epsilon",
        "clip range of the value": "cliprange_value value_clip clip_range_vf",
        "entropy coefficient": "entropy_coef entropy_coeff ent_coef entropy_bonus entropy_weight",
        "value coefficient": "vf_coef value_coef critic_coef value_loss_coef",
        "discount": "gamma discount",
        "GAE lambda": "lam gae_lambda lambd",
        "temperature": "temperature sampling_temperature",
        "top p": "top_p",
        "response length limit": "max_new_tokens max_completion_length max_response_length max_gen_len response_length "
        "max_answer_seq_len",
        "passes over a batch": "ppo_epochs num_ppo_epochs n_updates_per_iteration",
        "mini-batch size": "mini_batch_size minibatch_size ppo_mini_batch_size",
        "batch size": "batch_size rollout_batch_size per_device_train_batch_size train_batch_size "
        "per_device_training_batch_size",
        "gradient accumulation": "gradient_accumulation_steps grad_accum grad_accum_steps",
        "gradient clipping": "max_grad_norm grad_clip clip_grad_norm",
        "steps": "num_steps total_steps max_steps train_steps",
    }.items()
}
"""What an option is to the names that loops give it, in lower case."""

_HEAD = 2_000
"""Lines of a console, before its first step, that are looked at."""

_LONGEST = 4_000
"""Characters of such a line."""

_FEWEST = 2


def own_options(log: Source, tracked: Mapping[str, object]) -> str | None:
    """Say which options the code of a notebook, the head of a console, or a tracker states; None if fewer than two.

    An option with several values is left out: nobody knows which one counted.

    Args:
        log: of the run.
        tracked: what a tracker was given at the start of the run.
    """
    notebook = read_notebook(Path(log.path))
    if notebook is not None:
        nodes = [node for cell in notebook.code for node in ast.walk(parsed(cell))]
        found, where = _known(_of_calls(notebook), _given(nodes), _defaults(nodes)), "in its code"
    elif tracked:
        found, where = _known(_as_numbers(tracked.items())), "in its configuration"
    elif Console().detect(Path(log.path)) is not None:
        head = islice(takewhile(lambda line: not is_step(line), lines_of(log)), _HEAD)
        found, where = _known(pair for line in head if len(line) <= _LONGEST for pair in _numbers(line)), "printed"
    else:
        return None
    if len(found) < _FEWEST:
        return None
    listed = ", ".join(f"{title} {value:g} ({name})" for title, (name, value) in found.items())
    return f"{log.name}: options {where}: {listed}; no trainer is known that has them, and no rule uses them"


def _known(*layers: Iterable[tuple[str, float]]) -> dict[str, tuple[str, float]]:
    """Return what each option is called and its value; an earlier layer goes before a later one."""
    found: dict[str, tuple[str, float]] = {}
    for named in map(list, layers):
        for title, names in SPELLINGS.items():
            values = {value: name for name, value in named if name.lower() in names}
            if title not in found and len(values) == 1:
                ((value, name),) = values.items()
                found[title] = name, value
    return found


def _numbers(line: str) -> Iterator[tuple[str, float]]:
    found = [*pairs(line), *(assigned(line).items() if " --" in line else ())]
    for label, text in found:
        value = number(str(text))
        if value is not None:
            # ``KL coef: 0.01`` is kl_coef, and in ``with lr=1e-6`` the name is the last word.
            yield "_".join(label.lower().split()), value
            yield label.rpartition(" ")[2], value


def _of_calls(notebook: Notebook) -> list[tuple[str, float]]:
    """The arguments of what is called by the name of a method of reinforcement learning: ``PPOConfig(gamma=1.0)``."""
    found: list[tuple[str, float]] = []

    def take(name: str, named: dict[str, object]) -> bool:
        if _OF_A_METHOD.search(name) is not None:
            found.extend(_as_numbers(named.items()))
        return False

    code = Code(take)
    for cell in notebook.code:
        code.follow(parsed(cell))
    return found


_OF_A_METHOD = re.compile(r"(?i)ppo|grpo|rloo|reinforce|_rl\b|^rl")


def _as_numbers(named: Iterable[tuple[str, object]]) -> Iterator[tuple[str, float]]:
    for name, value in named:
        found = value if isinstance(value, (int, float)) else number(value) if isinstance(value, str) else None
        if found is not None and not isinstance(found, bool):
            yield name.rpartition(".")[2], float(found)


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
