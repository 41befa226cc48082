"""Small batches for tests: `toy_batch` from written numbers, `random_batch` from a seed, `diagnose` to check them.

Public, so that a project that builds on this package can test its own rules and trainers with the same batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.schema import AUTHORS
from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.data.turns import Turns
from rolloutdoctor.engine.accumulate import RuleAccumulator
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.configure import configure
from rolloutdoctor.engine.devices import find_dtype
from rolloutdoctor.engine.judge import judge
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.plan import make_plan
from rolloutdoctor.engine.prepare import against_log, context_for
from rolloutdoctor.engine.run_steps import run_steps
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.io.run import Run
from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.metric_names.table import TRAINERS as NAMES
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.ops.segments import offsets_of
from rolloutdoctor.results.findings import Report
from rolloutdoctor.rules.table import RULES, find
from rolloutdoctor.search.causes import find_causes
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.trainers.options import Layer

OF_BATCH = ("group_id", "rewards", "status", "error", "turns")
"""Columns that a batch keeps apart from those of rows and of tokens."""

_OF_POLICIES = ("policy_log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "values")

TokenValues = float | Sequence[Sequence[float]]
"""One number for every token, or one sequence for each row."""


def toy_batch(
    rewards: Sequence[Sequence[float]],
    *,
    lengths: int | Sequence[int] = 4,
    mask: Sequence[Sequence[int]] | None = None,
    policy: TokenValues | None = -1.0,
    old: TokenValues | None = None,
    ref: TokenValues | None = None,
    rollout: TokenValues | None = None,
    values: TokenValues | None = None,
    per_row: Mapping[str, Sequence[int] | Sequence[float]] | None = None,
    per_token: Mapping[str, TokenValues] | None = None,
    step: int = 0,
    split: str = TRAIN,
) -> RolloutBatch:
    """Build a batch from written numbers; rows are in the order of `rewards`, group by group.

    Args:
        rewards: one sequence of rewards for each group; NaN is a row that could not be scored.
        lengths: response tokens of every row, or of each.
        mask: 0 and 1 for each token of each row, which also gives the lengths; None: every token is trained.
        policy: `policy_log_probs`, one number for all tokens or a sequence for each row; None leaves it out.
        old: `old_log_probs`; None leaves it out, which means equal to the policy's.
        ref: `ref_log_probs`; None leaves it out.
        rollout: `rollout_log_probs`; None leaves it out.
        values: `values`; None leaves it out.
        per_row: other row columns, such as ``{"micro_batch_id": [0, 0, 1, 1]}``.
        per_token: other token columns by canonical name, such as ``{"response_mask_pre": 1}``.
        step: the step's number.
        split: ``train`` or ``eval``.

    >>> batch = toy_batch([[1, 0], [1, 1]], lengths=[2, 1, 3, 1], ref=-1.5)
    >>> len(batch), batch.tokens, batch.groups.size_G.tolist()
    (4, 7, [2, 2])
    """
    index_N = torch.tensor([group for group, scores in enumerate(rewards) for _ in scores], dtype=torch.int64)
    count = len(index_N)
    if mask is not None:
        lengths = [len(row) for row in mask]
    elif isinstance(lengths, int):
        lengths = [lengths] * count
    rows = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    named: dict[str, TokenValues | None] = dict(zip(_OF_POLICIES, (policy, old, ref, rollout, values), strict=True))
    named |= {**(per_token or {}), "response_mask": 1 if mask is None else mask}
    columns = {name: _token_column(name, x, int(rows[-1])) for name, x in named.items() if x is not None}
    reward_N = torch.tensor([score for scores in rewards for score in scores], dtype=torch.float64)
    return RolloutBatch(
        step=step,
        split=split,
        rows=rows,
        groups=Groups.of(index_N, len(rewards)),
        per_row={"reward": reward_N, **{name: torch.tensor(numbers) for name, numbers in (per_row or {}).items()}},
        per_token=columns,
        group_ids=[f"g{group}" for group in range(len(rewards))],
        sample_ids=[f"r{row}" for row in range(count)],
    )


def _token_column(name: str, numbers: TokenValues, tokens: int) -> Tensor:
    if isinstance(numbers, int | float):
        column_T = torch.full((tokens,), float(numbers))
    else:
        column_T = torch.tensor([value for row in numbers for value in row], dtype=torch.float32)
    return column_T != 0 if name.startswith("response_mask") else column_T


def toy_turns(*rows: Sequence[tuple[str, int, int]]) -> Turns:
    """Build the turns of a batch from authors and places of tokens, a sequence for each row.

    >>> turns = toy_turns([("model", 0, 2), ("tool", 2, 4)], [("model", 0, 4)])
    >>> replace(toy_batch([[1, 0]]), turns=turns).has("turns")
    True
    """
    spans = [span for row in rows for span in row]
    start_K, stop_K = (torch.tensor([span[place] for span in spans], dtype=torch.int64) for place in (1, 2))
    unknown_K = torch.full_like(start_K, -1)
    texts: list[str | None] = [None] * len(spans)
    return Turns(
        offsets=offsets_of(torch.tensor([len(row) for row in rows])),
        start_K=start_K,
        stop_K=stop_K,
        author_K=torch.tensor([AUTHORS.index(span[0]) for span in spans], dtype=torch.int64),
        number_K=unknown_K,
        version_K=unknown_K,
        statuses=texts,
        errors=texts,
        derived_K=torch.zeros_like(start_K, dtype=torch.bool),
    )


def random_batch(
    seed: int,
    *,
    sizes: Sequence[int] = (4, 4, 3, 2),
    longest: int = 9,
    binary: bool = False,
    spread: float = 0.3,
    empty: float = 0.1,
    rejected: float = 0.15,
    holes: float = 0.15,
    adjacent: bool = False,
    dtype: torch.dtype = torch.float32,
) -> RolloutBatch:
    """Draw a ragged batch with all log-prob columns, `values` and `response_mask_pre`.

    Args:
        seed: the same seed gives the same batch.
        sizes: rows of each group.
        longest: no row is longer.
        binary: rewards are 0 or 1, and not normally distributed.
        spread: standard deviation of the log-prob columns' differences.
        empty: share of rows without a token.
        rejected: share of rows whose mask is all zero.
        holes: share of the other tokens whose mask is zero.
        adjacent: rows of a group follow each other; else they are shuffled.
        dtype: of the token columns.

    >>> batch = random_batch(0)
    >>> len(batch), batch.has("ref_log_probs", "values")
    (13, True)
    """
    draw = torch.Generator().manual_seed(seed)
    uniform, normal = (partial(kind, generator=draw, dtype=torch.float64) for kind in (torch.rand, torch.randn))
    index_N = torch.repeat_interleave(torch.tensor(list(sizes)))
    count = len(index_N)
    if not adjacent:
        index_N = index_N[torch.randperm(count, generator=draw)]
    lengths_N = torch.randint(1, longest + 1, (count,), generator=draw)
    lengths_N = torch.where(uniform(count) < empty, 0, lengths_N)
    rows = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_N.cumsum(0)])
    tokens = int(rows[-1])
    rejected_T = torch.repeat_interleave(uniform(count) < rejected, lengths_N)
    before_T = uniform(tokens) >= holes
    policy_T = -uniform(tokens) * 3
    columns = {"policy_log_probs": policy_T}
    for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs"):
        columns[name] = policy_T + spread * normal(tokens)
    columns["values"] = normal(tokens)
    per_token = {name: column.to(dtype) for name, column in columns.items()}
    per_token |= {"response_mask_pre": before_T, "response_mask": before_T & ~rejected_T}
    reward_N = (uniform(count) < 0.5).double() if binary else normal(count)
    return RolloutBatch(
        step=0,
        rows=rows,
        groups=Groups.of(index_N, len(sizes)),
        per_row={"reward": reward_N},
        per_token=per_token,
        group_ids=[f"g{group}" for group in range(len(sizes))],
        sample_ids=[f"r{row}" for row in range(count)],
    )


def diagnose(
    batches: Sequence[RolloutBatch],
    *,
    trainer: str | None,
    options: Mapping[str, object] | None = None,
    logged: Mapping[str, float] | Sequence[Mapping[str, float]] | None = None,
    select: Sequence[str] = (),
    fixes: Sequence[str] = (),
    dtype: str = "float32",
) -> Report:
    """Check batches that are in memory.

    Args:
        batches: steps, in any order; a column counts as present if it is in all of them.
        trainer: ``NAME`` or ``NAME@VERSION``, or None.
        options: the trainer's options by name; the others have their defaults, as in a run that recorded all of them.
        logged: metrics of training steps, the same for all, or a sequence with those of each batch.
        select: codes of the rules to run; none: all of them.
        fixes: ``NAME[:VARIANT]`` of fixes that the run has.
        dtype: ``float32`` or ``float64``.
    """
    configured = configure(RunMetadata(), trainer, [Layer("test", dict(options or {}))], tuple(map(choose, fixes)))
    if configured is not None:
        settings = {name: replace(setting, assumed=False) for name, setting in configured.config.settings.items()}
        configured = replace(configured, config=replace(configured.config, settings=settings))
    columns = frozenset.intersection(*map(_columns, batches))
    rules = [find(code) for code in select] or list(RULES)
    of_batches = [logged or {}] * len(batches) if logged is None or isinstance(logged, Mapping) else logged
    pairs = zip(batches, of_batches, strict=True)
    metrics = LoggedMetrics({batch.key: dict(values) for batch, values in pairs if batch.split == TRAIN})
    context = against_log(context_for(columns, metrics.names(), configured), configured, metrics)
    plan = make_plan(rules, context)
    accumulator = RuleAccumulator(plan)
    run_steps(batches, [accumulator], find_dtype(dtype), metrics)
    state = accumulator.state()
    diagnosis = find_causes(lambda: batches, metrics, plan.context, state.audit, find_dtype(dtype))
    return judge(plan, state, configured, device="cpu", dtype=dtype, diagnosis=diagnosis)


def _columns(batch: RolloutBatch) -> frozenset[str]:
    held = {*batch.per_row, *batch.per_token}
    return frozenset(held | {name for name in OF_BATCH if batch.has(name)})


def check_log(
    code: str,
    trainer: str | None = None,
    /,
    *,
    total_steps: int | None = None,
    every: int = 1,
    **series: Any,  # noqa: ANN401  # options have values of any kind
) -> Report:
    """Check a log of numbers with one rule.

    Args:
        code: of the rule.
        trainer: whose log it is; None: nothing says.
        total_steps: optimizer steps that the run was planned for, where the log says so.
        every: steps from line to line, and before the first.
        series: canonical quantity to its value at each line, under the trainer's first name of it; a name
            with a slash is a metric; any other name is an option of the trainer.
    """
    values = {name: list(each) for name, each in series.items() if name in BY_NAME or "/" in name}
    stated = {name: value for name, value in series.items() if name not in values}
    tables = [NAMES.get(trainer or "", ()), *NAMES.values()]
    named = {metric.quantity: "".join(metric.spellings[0]) for table in reversed(tables) for metric in reversed(table)}
    metrics = {named.get(name, name): each for name, each in values.items()}
    steps = range(max(map(len, values.values())))
    logged = {
        StepKey((at + 1) * every, TRAIN): {name: float(each[at]) for name, each in metrics.items()} for at in steps
    }
    run = Run([], RunMetadata().with_total_steps(total_steps), LoggedMetrics(logged))
    options = CheckOptions(rules=(find(code),), trainer=trainer, layers=(Layer("test", stated),), device="cpu")
    return check(run, options)


def diagnose_log(code: str, trainer: str | None = None, /, **series: Any) -> str:  # noqa: ANN401  # options have values of any kind
    """Check a log of numbers with one rule, as `check_log` does, and say in a line what came out.

    >>> diagnose_log("RDT009", learning_rate=[1e-6] * 12)
    'RDT009 clean'
    """
    return _in_a_line(code, check_log(code, trainer, **series))


def diagnose_one(
    code: str,
    batch: RolloutBatch,
    *,
    trainer: str | None,
    logged: Mapping[str, float] | None = None,
    **options: object,
) -> str:
    """Check one batch with one rule, and say in a line what came out.

    >>> diagnose_one("RDI001", toy_batch([[1, 0]]), trainer="trl")
    'RDI001 clean'
    """
    return _in_a_line(code, diagnose([batch], trainer=trainer, options=options, logged=logged, select=[code]))


def _in_a_line(code: str, report: Report) -> str:
    if report.skipped:
        return f"{code} skipped: {report.skipped[0].reason}"
    if report.not_applicable:
        return f"{code} not applicable: {report.not_applicable[0].reason}"
    if not report.findings:
        return f"{code} clean"
    finding = report.findings[0]
    name, measure = next(iter(finding.measures.items()))
    value = "n/a" if measure.value is None else f"{measure.value:.4g}"
    return f"{code} {finding.severity.label} {finding.verdict}: {name} {value}"
