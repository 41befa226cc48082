"""Every cause that `check` knows, planted into runs of the real code, and what comes of it as a table.

``python tests/parity/real_faults.py`` prints the table.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from parity.real_runs import GROUPS, SIZE, STEPS, WEIGHTS, Fault, Setup, Step, real_run, regrouped, trl_class
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.results.findings import Report
from rolloutdoctor.testing import diagnose

ACTOR = "actor_rollout_ref.actor"
MILD = (3,)
"""The steps of a mild fault; a severe one is in all six."""

SETUPS = {
    "verl": Setup(
        "verl",
        {
            "algorithm.adv_estimator": "grpo",
            "algorithm.norm_adv_by_std_in_grpo": True,
            "algorithm.use_kl_in_reward": False,
            f"{ACTOR}.use_kl_loss": True,
            f"{ACTOR}.kl_loss_type": "low_var_kl",
            f"{ACTOR}.kl_loss_coef": 0.05,
            f"{ACTOR}.loss_agg_mode": "token-mean",
            f"{ACTOR}.loss_scale_factor": 1,
            "trainer.use_v1": False,
        },
    ),
    "trl": Setup(
        "trl",
        {
            "num_generations": SIZE,
            "reward_weights": WEIGHTS,
            "loss_type": "dapo",
            "beta": 0.1,
            "use_bias_correction_kl": False,
        },
    ),
    "trl-rloo": Setup("trl-rloo", {"num_generations": SIZE, "reward_weights": WEIGHTS, "beta": 0.05}, drift=0.02),
}


@dataclass(frozen=True)
class Case:
    """A cause as it is planted.

    Attributes:
        names: hypotheses that are right, any of them.
        faults: trainer to the fault.
        setups: trainer to changes of its setup.
        unnamed: pairs of trainer and strength where only the audit finds it, to why; "" stands for any.
    """

    names: tuple[str, ...]
    faults: dict[str, Fault]
    setups: dict[str, dict] = field(default_factory=dict)
    unnamed: dict[tuple[str, str], str] = field(default_factory=dict)

    def expected(self, trainer: str, strength: str) -> str:
        """The outcome that is right."""
        keys = {(trainer, strength), ("", strength), (trainer, ""), ("", "")}
        return "only the audit" if keys & self.unnamed.keys() else "named"


def _everywhere(fault: Fault) -> dict[str, Fault]:
    return dict.fromkeys(SETUPS, fault)


def _drawn_order(batch: RolloutBatch) -> Tensor:
    return torch.randperm(len(batch), generator=torch.Generator().manual_seed(batch.step))


def _places(batch: RolloutBatch) -> Tensor:
    return torch.arange(len(batch))


def _shuffled_groups(batch: RolloutBatch) -> RolloutBatch:
    """Rows of a prompt do not follow each other, and TRL takes it that they do."""
    return regrouped(batch, batch.groups.index_N[_drawn_order(batch)])


def _moved_rewards(source: Callable[[RolloutBatch], Tensor]) -> Callable[[RolloutBatch], RolloutBatch]:
    def edit(batch: RolloutBatch) -> RolloutBatch:
        source_N = source(batch)
        rewards = {name: x_N[source_N] for name, x_N in batch.rewards.items()}
        return replace(batch, rewards=rewards, per_row={**batch.per_row, "reward": batch.column("reward")[source_N]})

    return edit


def _late(batch: RolloutBatch) -> Tensor:
    return _places(batch).roll(1)


def _few_late(batch: RolloutBatch) -> Tensor:
    """In the first eight rows alone."""
    places_N = _places(batch)
    return torch.cat([places_N[:8].roll(1), places_N[8:]])


def _sorted(batch: RolloutBatch) -> Tensor:
    return torch.sort(batch.column("reward"), stable=True).indices


def _unscored(batch: RolloutBatch) -> RolloutBatch:
    missing_N = torch.tensor(np.random.default_rng(batch.step).random(len(batch)) < 0.2)
    rewards = {name: x_N.masked_fill(missing_N, torch.nan) for name, x_N in batch.rewards.items()}
    reward_N = batch.column("reward").masked_fill(missing_N, torch.nan)
    return replace(batch, rewards=rewards, per_row={**batch.per_row, "reward": reward_N})


def _as_zero(batch: RolloutBatch) -> RolloutBatch:
    rewards = {name: x_N.nan_to_num(0.0) for name, x_N in batch.rewards.items()}
    return replace(batch, rewards=rewards, per_row={**batch.per_row, "reward": batch.column("reward").nan_to_num(0.0)})


def _shifted(column: str, tokens: int, fill: float | None = None) -> Callable[[RolloutBatch], RolloutBatch]:
    """Every token has the value of a neighbour; the end keeps its own, or has a filler."""

    def edit(batch: RolloutBatch) -> RolloutBatch:
        parts = []
        for row_T in batch.column(column).split(batch.rows.diff().tolist()):
            moved_T = row_T.roll(tokens)
            end = 0 if tokens > 0 else -1
            moved_T[end] = row_T[end] if fill is None else fill
            parts.append(moved_T)
        return replace(batch, per_token={**batch.per_token, column: torch.cat(parts)})

    return edit


def _column_for(column: str, other: str) -> Callable[[RolloutBatch], RolloutBatch]:
    def edit(batch: RolloutBatch) -> RolloutBatch:
        return replace(batch, per_token={**batch.per_token, column: batch.column(other)})

    return edit


def _far_reference(batch: RolloutBatch) -> RolloutBatch:
    """Some tokens are far more likely to the reference."""
    far_T = torch.tensor(np.random.default_rng(batch.step).random(batch.tokens) < 0.1)
    moved_T = batch.column("policy_log_probs") + 6.0
    return replace(
        batch,
        per_token={**batch.per_token, "ref_log_probs": torch.where(far_T, moved_T, batch.column("ref_log_probs"))},
    )


def _clamped(low: float, high: float) -> Callable[[RolloutBatch], RolloutBatch]:
    """A reference with which no token's KL is above 10."""

    def edit(batch: RolloutBatch) -> RolloutBatch:
        policy_T = batch.column("policy_log_probs").double()
        u_T = (batch.column("ref_log_probs").double() - policy_T).clamp(low, high)
        return replace(batch, per_token={**batch.per_token, "ref_log_probs": (policy_T + u_T).float()})

    return edit


TEN = 2.6108686
"""exp(u) - u - 1 is 10 there."""


def _generated(batch: RolloutBatch) -> int:
    return int(batch.column("response_mask_pre").sum())


def _times(name: str, factor: float):
    return lambda metrics, update, batch: {**metrics, name: factor * metrics[name]}


def _of_every_row(name: str):
    """The metric as it is where every row is a micro-batch."""

    def log(metrics, update, batch):
        rows = replace(batch, per_row={**batch.per_row, "micro_batch_id": _places(batch)})
        return {**metrics, name: update(rows)[name]}

    return log


def _of_all_tokens(name: str):
    """The metric as it is where the step is one micro-batch."""

    def log(metrics, update, batch):
        rows = replace(batch, per_row={key: x for key, x in batch.per_row.items() if key != "micro_batch_id"})
        return {**metrics, name: update(rows)[name]}

    return log


@contextmanager
def _edited(trainer: str, function: str, change: ast.NodeTransformer) -> Iterator[None]:
    """TRL's own function with an edit of its syntax tree."""
    cls = trl_class(trainer)
    real = getattr(cls, function)
    tree = change.visit(ast.parse(textwrap.dedent(inspect.getsource(real))))
    made: dict[str, object] = {}
    exec(compile(ast.fix_missing_locations(tree), function, "exec"), vars(sys.modules[cls.__module__]), made)
    setattr(cls, function, made[function])
    try:
        yield
    finally:
        setattr(cls, function, real)


class _Constant(ast.NodeTransformer):
    def __init__(self, old: float, new: float) -> None:
        self.old, self.new = old, new

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(self.new) if node.value == self.old else node


class _Assigned(ast.NodeTransformer):
    """Another value for the first assignment to a name."""

    def __init__(self, name: str, value: str) -> None:
        self.name, self.value, self.done = name, value, False

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        (target,) = node.targets
        if isinstance(target, ast.Name) and target.id == self.name and not self.done:
            self.done = True
            node.value = ast.parse(self.value, mode="eval").body
        return node


def _trl_epsilon(trainer: str, value: float):
    return lambda: _edited(trainer, "_generate_and_score_completions", _Constant(1e-4, value))


def _trl_kl(expression: str):
    words = expression.replace("policy", "per_token_logps").replace("ref", "ref_per_token_logps")
    return lambda: _edited("trl", "_compute_loss", _Assigned("per_token_kl", words))


@contextmanager
def _biased() -> Iterator[None]:
    """verl's standard deviations divide by n."""
    real = torch.std
    torch.std = lambda x, *args, **kwargs: real(x, *args, unbiased=False, **kwargs)
    try:
        yield
    finally:
        torch.std = real


@contextmanager
def _biased_groups() -> Iterator[None]:
    """TRL's standard deviations of groups divide by n."""
    module = sys.modules[trl_class("trl").__module__]
    real = module.nanstd

    def nanstd(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        return real(x) if dim is None else real(x, dim=dim, keepdim=keepdim) * sqrt((SIZE - 1) / SIZE)

    module.nanstd = nanstd
    try:
        yield
    finally:
        module.nanstd = real


@contextmanager
def _verl_epsilon(value: float = 1e-4) -> Iterator[None]:
    from verl.trainer.ppo import core_algos

    function = inspect.unwrap(core_algos.get_adv_estimator_fn("grpo"))
    real = function.__defaults__
    assert real.count(1e-6) == 1
    function.__defaults__ = tuple(value if each == 1e-6 else each for each in real)
    try:
        yield
    finally:
        function.__defaults__ = real


def _grouped(index: Callable[[RolloutBatch], Tensor]) -> Fault:
    return Fault(scoring=lambda batch: regrouped(batch, index(batch)))


def _tiled(batch: RolloutBatch) -> Tensor:
    return _places(batch) % GROUPS


def _read_tiled(batch: RolloutBatch) -> Tensor:
    return _places(batch).view(SIZE, GROUPS).T.flatten()


def _misplaced_old(tokens: int) -> dict[str, Fault]:
    """The KL in RLOO's rewards is of the old log-probs, too."""
    moved = _shifted("old_log_probs", tokens)
    return {**_everywhere(Fault(update=moved)), "trl-rloo": Fault(scoring=moved, update=moved)}


_FAR = Fault(record=_far_reference)

CASES: dict[str, Case] = {
    "groups by position": Case(
        ("groups-by-position",),
        {
            "verl": _grouped(lambda batch: _places(batch) // SIZE),
            "trl": Fault(record=_shuffled_groups),
            "trl-rloo": Fault(record=_shuffled_groups),
        },
    ),
    "groups tiled": Case(
        ("groups-tiled",),
        {"verl": _grouped(_tiled), "trl": Fault(order=_read_tiled), "trl-rloo": Fault(order=_read_tiled)},
    ),
    "group is the batch": Case(("group-is-batch",), _everywhere(_grouped(lambda batch: _places(batch) * 0))),
    "group is a row": Case(("group-is-row",), _everywhere(_grouped(_places))),
    "rewards one row late": Case(("rewards-one-row-late",), _everywhere(Fault(scoring=_moved_rewards(_late)))),
    "rewards sorted": Case(("rewards-sorted",), _everywhere(Fault(scoring=_moved_rewards(_sorted)))),
    "rewards of eight rows late": Case(
        (),
        _everywhere(Fault(scoring=_moved_rewards(_few_late))),
        unnamed={("", ""): "a third of the rows, in no pattern"},
    ),
    "missing reward as 0": Case(("missing-reward-as-zero",), _everywhere(Fault(record=_unscored, scoring=_as_zero))),
    "biased std": Case(("biased-std",), {"verl": Fault(patched=_biased), "trl": Fault(patched=_biased_groups)}),
    "another epsilon": Case(
        ("epsilon-1e-4", "epsilon-1e-6"),
        {"verl": Fault(patched=_verl_epsilon), "trl": Fault(patched=_trl_epsilon("trl", 1e-6))},
    ),
    "not divided by std": Case(
        ("scale-none", "group-mean-baseline"),
        {
            "verl": Fault(options={"algorithm.norm_adv_by_std_in_grpo": False}),
            "trl": Fault(options={"scale_rewards": "none"}),
        },
    ),
    "leave one out": Case(("leave-one-out",), {"verl": Fault(options={"algorithm.adv_estimator": "rloo"})}),
    "normalised over the rows": Case(("normalised",), {"trl-rloo": Fault(options={"normalize_advantages": True})}),
    "not normalised": Case(
        ("not-normalised",),
        {"trl-rloo": Fault(options={"normalize_advantages": False})},
        setups={"trl-rloo": {"normalize_advantages": True}},
    ),
    "old log-probs one token late": Case(("old-log-probs-one-token-late",), _misplaced_old(1)),
    "old log-probs one token early": Case(("old-log-probs-one-token-early",), _misplaced_old(-1)),
    "ref log-probs one token late": Case(
        ("ref-log-probs-one-token-late",),
        {
            "verl": Fault(update=_shifted("ref_log_probs", 1)),
            "trl": Fault(update=_shifted("ref_log_probs", 1)),
            "trl-rloo": Fault(scoring=_shifted("ref_log_probs", 1)),
        },
    ),
    "ref log-probs late, 0 first": Case(
        ("ref-log-probs-one-token-late",),
        {
            "verl": Fault(update=_shifted("ref_log_probs", 1, 0.0)),
            "trl": Fault(update=_shifted("ref_log_probs", 1, 0.0)),
        },
        unnamed={("", ""): "what stands at the ends is not known"},
    ),
    **{
        f"KL is {name}": Case(
            (f"kl-loss-is-{name}",),
            {"verl": Fault(options={f"{ACTOR}.kl_loss_type": name}), "trl": Fault(patched=_trl_kl(expression))},
        )
        for name, expression in (
            ("k1", "policy - ref"),
            ("k2", "0.5 * (policy - ref) ** 2"),
            ("abs", "(policy - ref).abs()"),
        )
    },
    "KL twice in the loss": Case(
        ("kl-loss-doubled",),
        {"verl": Fault(options={f"{ACTOR}.kl_loss_coef": 0.1}), "trl": Fault(options={"beta": 0.2})},
    ),
    "KL in reward and loss": Case(
        ("kl-in-reward-and-loss",),
        {
            "verl": Fault(
                options={
                    "algorithm.use_kl_in_reward": True,
                    "algorithm.kl_penalty": "k1",
                    "algorithm.kl_ctrl.kl_coef": 0.05,
                }
            )
        },
    ),
    "KL clamped": Case(
        ("kl-loss-clamped", "kl-loss-is-k3-clamped"),
        {
            "verl": replace(_FAR, update=_clamped(-sqrt(20), sqrt(20))),
            "trl": replace(_FAR, update=_clamped(-10.999983, TEN)),
        },
        setups={"verl": {f"{ACTOR}.kl_loss_type": "k2"}},
    ),
    "loss by micro-batch": Case(
        ("loss-is-micro-batch-token-mean",),
        {"verl": Fault(options={"by_micro_batch": True}), "trl": Fault(options={"loss_type": "bnpo"})},
    ),
    "loss is a mean of rows": Case(
        ("loss-is-seq-mean-token-mean", "loss-is-micro-batch-row-mean"),
        {
            "verl": Fault(options={f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}),
            "trl": Fault(options={"loss_type": "grpo"}),
        },
    ),
    "denominator counts dropped rows": Case(
        ("denominator-counts-rejected-tokens",),
        {"verl": Fault(items=_generated), "trl": Fault(items=_generated)},
        setups={"verl": {"rejected": 0.2}, "trl": {"mask_truncated_completions": True}},
    ),
    "metric times 3": Case(
        ("metric-scaled",),
        {
            "verl": Fault(log=_times("actor/kl_loss", 3)),
            "trl": Fault(log=_times("kl", 3)),
            "trl-rloo": Fault(log=_times("kl", 3)),
        },
        unnamed={("", "mild"): "one factor of one value is any factor"},
    ),
    "metric is a mean of rows' means": Case(
        ("metric-is-mean-of-rows", "drift-metric-is-mean-of-rows"),
        {"verl": Fault(log=_of_every_row("actor/ppo_kl")), "trl": Fault(log=_of_every_row("kl"))},
    ),
    "metric is a token mean": Case(
        ("metric-is-token-mean",),
        {"verl": Fault(log=_of_all_tokens("actor/ppo_kl")), "trl": Fault(log=_of_all_tokens("kl"))},
    ),
    "ratio against the sampler": Case(
        ("ratio-against-sampler",), _everywhere(Fault(update=_column_for("old_log_probs", "rollout_log_probs")))
    ),
    "ratio is one": Case(
        ("ratio-is-one",), _everywhere(Fault(update=_column_for("old_log_probs", "policy_log_probs")))
    ),
}


def setup_of(case: Case, trainer: str) -> Setup:
    """The setup in which a cause is planted."""
    setup = SETUPS[trainer]
    changes = dict(case.setups.get(trainer, {}))
    own = {name: changes.pop(name) for name in ("rejected", "unscored") if name in changes}
    return replace(setup, options={**setup.options, **changes}, **own)


def checked(setup: Setup, made: list[Step]) -> Report:
    """What `check` says of a run."""
    rows, logged = zip(*made, strict=True)
    return diagnose(rows, trainer=setup.trainer, options=setup.options, logged=logged)


def planted(case: Case, trainer: str, strength: str) -> Report:
    """What `check` says of a run with a cause in all of its steps, or in one."""
    setup = setup_of(case, trainer)
    at = range(STEPS) if strength == "severe" else MILD
    return checked(setup, real_run(setup, case.faults[trainer], at))


def outcome(case: Case, report: Report) -> tuple[str, str]:
    """One of "named", "other name", "only the audit" and "silent", and what was named or what disagrees."""
    causes = [finding.cause for finding in report.findings if finding.cause is not None]
    found = {name for cause in causes for name in (cause.hypothesis, *cause.also)}
    found |= {name for entry in report.audit for name in entry.with_fixes}
    if found & set(case.names):
        return "named", ", ".join(cause.hypothesis for cause in causes)
    if found:
        return "other name", ", ".join(sorted(found))
    off = [entry.quantity for entry in report.audit if not entry.agrees]
    return ("only the audit", ", ".join(off)) if off else ("silent", "")


def table() -> str:
    """The outcomes as Markdown: cause by trainer and strength."""
    lines = ["| cause | trainer | severe: every step | mild: one step of six |", "| --- | --- | --- | --- |"]
    for name, case in CASES.items():
        for trainer in case.faults:
            cells = []
            for strength in ("severe", "mild"):
                word, what = outcome(case, planted(case, trainer, strength))
                cells.append(word if word in ("named", "silent") and "," not in what else f"{word} ({what})")
            lines.append(f"| {name} | {trainer} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(table())
