"""Record a verl run through what verl lets users register, without touching its files.

verl takes advantage estimators under new names (`register_adv_est`), and imports modules that a user names. A module

    from rolloutdoctor.recorders.verl import record_estimator
    record_estimator("grpo", "run.parquet")

and ``VERL_USE_EXTERNAL_MODULES=that_module ... algorithm.adv_estimator=recorded_grpo`` compute what ``grpo`` computes,
and record what an estimator is given: the groups, the scores, the mask that is left after rejection, the advantages.
Log-probs are not given to an estimator. verl's V1 trainer takes one output of each session for ``grpo`` by that name
alone, and any other estimator gets all outputs: with agent loops of several outputs ``recorded_grpo`` is not ``grpo``,
and `columns_of` is the way. Whoever has verl's whole batch in hand, in a trainer of their own, records all
of it with `columns_of`.
"""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rolloutdoctor.objective.estimators import SPECS
from rolloutdoctor.recorders._background import warn
from rolloutdoctor.recorders.own_loop import DEFAULT_MAX_BYTES, StepRecorder
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.verl import advantages as verl_advantages

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "recorded_"

ESTIMATORS = tuple(
    name
    for name, estimator in verl_advantages.ESTIMATORS.items()
    if SPECS[estimator].rewards == "score" and SPECS[estimator].columns <= {"response_mask"}
)
"""Those that work under any name: verl asks for the others by name, for a critic, greedy rollouts or more inputs."""

_BATCH_COLUMNS = {
    "old_log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_prob",
    "rollout_log_probs": "rollout_log_probs",
    "response_mask": "response_mask",
    "response_ids": "responses",
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
    "entropy": "entropys",
    "is_weights": "rollout_is_weights",
    "sum_pi_squared": "sum_pi_squared",
}


def record_estimator(
    name: str,
    path: str | Path,
    *,
    config: Mapping[str, object] | None = None,
    first_step: int = 1,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> str:
    """Register an advantage estimator that computes what another one does and records it.

    The file is made at the first call, so that only the process that computes advantages writes one, and completed
    when that process exits; until then it is ``run.parquet.journal``. It never raises into the training.

    Args:
        name: the estimator, one of `ESTIMATORS`.
        path: the run file. Where it is there already at the first call, or somebody else records it, the recording
            takes the next free name, ``run.2.parquet``, with a warning.
        config: options outside `algorithm` that the analysis should know, by their dotted names.
        first_step: number of the first call; each further call is the next step, so `trainer.v1.*.parameter_sync_step`
            has to be 1.
        max_bytes: about how large the file may get.

    Returns:
        The name for `algorithm.adv_estimator`.

    Raises:
        UsageError: if this estimator cannot be recorded so.
    """
    if name not in ESTIMATORS:
        raise UsageError(f"{name} cannot be recorded through an estimator; these can: {', '.join(ESTIMATORS)}")
    verl = importlib.import_module("verl.trainer.ppo.core_algos")
    original = verl.get_adv_estimator_fn(name)
    recording = _Recording(name, Path(path), dict(config or {}), first_step, max_bytes)
    taken = inspect.signature(original).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())

    def estimate(
        token_level_rewards: "Tensor",
        response_mask: "Tensor",
        config: Any = None,  # noqa: ANN401 - verl's AlgoConfig
        **arguments: Any,  # noqa: ANN401 - what verl gives to an estimator
    ) -> "tuple[Tensor, Tensor]":
        inputs = {"config": config, **arguments}
        if name == "grpo" and config is not None:
            # verl hands this over to the estimator of that name alone: the other forms of it normalise either way.
            inputs["norm_adv_by_std_in_grpo"] = config.get("norm_adv_by_std_in_grpo", True)
        passed = inputs if takes_all else {key: value for key, value in inputs.items() if key in taken}
        advantages, returns = original(token_level_rewards=token_level_rewards, response_mask=response_mask, **passed)
        recording.add(token_level_rewards, response_mask, advantages, arguments.get("index"), config)
        return advantages, returns

    verl.register_adv_est(f"{PREFIX}{name}")(estimate)
    return f"{PREFIX}{name}"


class Batch(Protocol):
    """What is read of a `verl.DataProto`: tensors by name, and what is no tensor."""

    batch: Any
    non_tensor_batch: Any


def columns_of(
    data: Batch,
    response_mask_pre: "Tensor | None" = None,
    keys: Sequence[str] = (),
) -> dict[str, object]:
    """Return what a verl batch says of its rows, as arguments of `StepRecorder.record_step`.

    Args:
        data: a `verl.DataProto` whose advantages are computed, with `responses` and `attention_mask`.
        response_mask_pre: ``[N, T]``, `response_mask` before the rollout correction replaced it.
        keys: those of the rows in the V1 trainer's batch (`KVBatchMeta.keys`), ``{uid}_{session}_{output}``: the
            outputs of a session are the rows of one trajectory.

    Raises:
        UsageError: if the batch lacks `responses` or `attention_mask`, or if there are not as many keys of that form
            as rows.
    """
    batch, others = data.batch, data.non_tensor_batch
    names = set(batch.keys())
    absent = [name for name in ("responses", "attention_mask", "response_mask") if name not in names]
    if absent:
        raise UsageError(f"this batch of verl has no {', '.join(absent)}; record it after its advantages are computed")
    width = batch["responses"].shape[1]
    columns: dict[str, object] = {"lengths": batch["attention_mask"][:, -width:].sum(1)}
    columns |= {column: batch[key] for column, key in _BATCH_COLUMNS.items() if key in names}
    if response_mask_pre is not None:
        columns["response_mask_pre"] = response_mask_pre
    if "token_level_scores" in names:
        columns |= _scores(batch["token_level_scores"])
    if "uid" in others:
        columns["group_id"] = [str(each) for each in others["uid"]]
    tasks = _tasks(batch, others)
    if tasks is not None:
        columns["task_id"] = tasks
    if keys:
        columns["trajectory_id"] = _trajectories(keys, len(batch["responses"]))
    return columns


def _tasks(batch: "Mapping[str, Tensor]", others: Mapping[str, Any]) -> list[str | None] | None:
    """Name the task of each row by `index` of its `extra_info`, its place in the data; None where that names none.

    verl's own `index` is 0 for data without one (``RLHFDataset.__getitem__``, verl/utils/dataset/rl_dataset.py), so it
    is not read. Places begin anew in every data source and split. A place that two uids of a batch share is of one task
    if they share a prompt, which an agent's outputs after the first do not; else it names no task, in the whole batch.
    The `trajectory_ids` of rllm are one for all rollouts of a task by one agent, ``{task}_{agent}``
    (``_process_trajectory``, rllm/trainer/verl/transform.py, read at 9beb6e0f).
    """
    if "trajectory_ids" in others:
        return [str(each) for each in others["trajectory_ids"]]
    infos = others.get("extra_info")
    if infos is None or "uid" not in others:
        return None
    sources = others.get("data_source", [None] * len(infos))
    tasks = [_task(info, source) for info, source in zip(infos, sources, strict=True)]
    rows: dict[str, dict[str, list[int]]] = {}
    for row, (task, uid) in enumerate(zip(tasks, others["uid"], strict=True)):
        if task is not None:
            rows.setdefault(task, {}).setdefault(str(uid), []).append(row)
    shared = [list(of_uid.values()) for of_uid in rows.values() if len(of_uid) > 1]
    # One prompt alone does not show that places tell prompts apart.
    if not rows or len({*others["uid"]}) < 2 or (shared and "prompts" not in set(batch.keys())):
        return None
    is_named = all({*_prompts(batch, first)} & {*_prompts(batch, other)} for first, *rest in shared for other in rest)
    return tasks if is_named else None


def _task(info: object, source: object) -> str | None:
    index = info.get("index") if isinstance(info, Mapping) else None
    if not isinstance(info, Mapping) or not isinstance(index, (Integral, str)) or isinstance(index, bool):
        return None
    return "/".join(str(part) for part in (source, info.get("split"), index) if part is not None)


def _prompts(batch: "Mapping[str, Tensor]", rows: Sequence[int]) -> list[tuple[int, ...]]:
    """The token ids of the prompts of some rows, without padding."""
    ids_RP = batch["prompts"][list(rows)]
    real_RP = batch["attention_mask"][list(rows), : ids_RP.shape[1]] != 0
    return [tuple(ids_P[real_P].tolist()) for ids_P, real_P in zip(ids_RP, real_RP, strict=True)]


def _trajectories(keys: Sequence[str], rows: int) -> list[int]:
    from rolloutdoctor.trainers.verl.dump import trajectory_of

    ids = [number for key in keys if (number := trajectory_of(key)) is not None]
    if not len(ids) == len(keys) == rows:
        raise UsageError(
            f"keys: {len(keys)} for {rows} rows, {len(ids)} of the form uid_session_output; give KVBatchMeta.keys of "
            "verl's V1 trainer"
        )
    return ids


class _Recording:
    """The file of an estimator, made when it is called first."""

    def __init__(self, name: str, path: Path, config: dict[str, object], first_step: int, max_bytes: int) -> None:
        self._name, self._path, self._config, self._max_bytes = name, path, config, max_bytes
        self._step = first_step
        self._recorder: StepRecorder | None = None
        self._ended = False

    def add(self, scores: "Tensor", mask: "Tensor", advantages: "Tensor", index: Any, config: Any) -> None:  # noqa: ANN401
        """Record one call; whatever goes wrong ends the recording, never the training."""
        if self._ended:
            return
        try:
            if self._recorder is None:
                self._recorder = self._begin(config)
            lengths = _last(mask != 0).maximum(_last(scores != 0))
            columns: dict[str, Any] = _scores(scores)
            if index is not None:
                columns["group_id"] = [str(each) for each in index]
            self._recorder.record_step(
                self._step, lengths=lengths, response_mask=mask, advantages=advantages, **columns
            )
            self._step += 1
        except Exception as error:  # the boundary that keeps the recorder's faults out of the training
            self._ended = True
            warn(f"rolloutdoctor does not record to {self._path}, and training goes on unchanged: {error}")

    def _begin(self, config: Any) -> StepRecorder:  # noqa: ANN401 - verl's AlgoConfig
        from rolloutdoctor.trainers.verl.trainer import TRAINER

        if config is not None and config.get("use_kl_in_reward", False):
            raise UsageError(
                "with algorithm.use_kl_in_reward an estimator is given the scores minus the KL penalty, and the rows "
                "need the scores themselves; record the whole batch with columns_of"
            )
        names = {option.name for option in TRAINER.options}
        options = {name: value for name, value in self._config.items() if name in names}
        for option in sorted(names):
            section, *keys = option.split(".")
            value = _inside(config, keys) if section == "algorithm" else None
            if value is not None:
                options[option] = value
        options["algorithm.adv_estimator"] = self._name
        return StepRecorder(
            self._path,
            trainer="verl",
            version=importlib.import_module("verl").__version__,
            config=options,
            max_bytes=self._max_bytes,
        )


def _scores(scores: "Tensor") -> dict[str, object]:
    """The score of each row, and those of its tokens where more than one has any."""
    columns: dict[str, object] = {"reward": scores.double().sum(1)}
    if bool(((scores != 0).sum(1) > 1).any()):
        columns["token_rewards"] = scores
    return columns


def _last(marked: "Tensor") -> "Tensor":
    """Return the length of each row up to its last marked slot, ``[N]``; 0 without one."""
    import torch

    return (marked * torch.arange(1, marked.shape[1] + 1, device=marked.device)).amax(1)


def _inside(config: Any, keys: list[str]) -> object:  # noqa: ANN401 - verl's configuration
    """A plain value inside a configuration; None where it is not there."""
    for key in keys:
        if config is None or not callable(getattr(config, "get", None)):
            return None
        config = config.get(key, None)
    return config if isinstance(config, (str, bool, int, float)) else None
