"""Record a run of OpenRLHF, which writes no rollouts, without touching its files.

Its trainer runs in a process of Ray's, so the recorder goes along as the hook of every worker:

    ray job submit --runtime-env-json='{"worker_process_setup_hook": "rolloutdoctor.recorders.openrlhf.setup",
        "env_vars": {"ROLLOUTDOCTOR_RUN": "/data/run.parquet"}}' -- python3 -m openrlhf.cli.train_ppo_ray ...

A script of one's own that makes experiences in its own process calls `record`. Recorded is what advantages are made of
and what becomes of them: groups, rewards after length penalties, masks, tokens, log-probs before the update of actor,
reference and sampler, values, advantages, options. The log-probs at the loss are in the workers alone.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from functools import wraps
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from rolloutdoctor.recorders._background import warn
from rolloutdoctor.recorders.own_loop import DEFAULT_MAX_BYTES, StepRecorder

VARIABLE = "ROLLOUTDOCTOR_RUN"
"""Environment variable that names the run file for `setup`."""

MODULE = "openrlhf.trainer.ppo_utils.experience_maker"

_TOKENS = {
    "old_log_probs": "action_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "values": "values",
    "advantages": "advantages",
}


def setup() -> None:
    """Record the run if `ROLLOUTDOCTOR_RUN` names a file: for ``worker_process_setup_hook`` of a Ray job."""
    path = os.environ.get(VARIABLE)
    if path:
        record(path)


def record(path: str | Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
    """Record the rollouts of this process, once it makes any; it never raises into the training.

    The file is made with the first rollout and completed when the process exits; until then it is
    ``run.parquet.journal``. Nothing is imported: OpenRLHF's module is wrapped when the process imports it.

    Args:
        path: the run file. Where it is there already, the recording takes the next free name, with a warning.
        max_bytes: about how large the file may get.
    """
    recording = _Recording(Path(path), max_bytes)
    if MODULE in sys.modules:
        recording.wrap(sys.modules[MODULE])
    else:
        sys.meta_path.insert(0, _WhenImported(recording))


class _WhenImported(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Wraps the module right after its import, and is gone then."""

    def __init__(self, recording: "_Recording") -> None:
        self._recording = recording
        self._loader: Any = None

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._recording.wrap(module)


class _Recording:
    """The file of a run, made at its first rollout."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._recorder: StepRecorder | None = None
        self._step = 0
        self._ended = False
        self._references: dict[int, Any] = {}

    def wrap(self, module: Any) -> None:  # noqa: ANN401 - OpenRLHF's
        """Wrap what compares with the reference, and what makes advantages."""
        compare, maker = module.compute_approx_kl, module.RemoteExperienceMaker
        make = maker.compute_advantages_and_returns

        @wraps(compare)
        def remembering(log_probs: Any, reference: Any, *arguments: Any, **more: Any) -> Any:  # noqa: ANN401 - OpenRLHF's
            # An experience keeps the first of the two alone, where the KL is a penalty in the reward.
            self._references[id(log_probs)] = reference
            return compare(log_probs, reference, *arguments, **more)

        @wraps(make)
        def recorded(maker: Any, experiences: Any, *arguments: Any, **more: Any) -> Any:  # noqa: ANN401 - OpenRLHF's
            experience = make(maker, experiences, *arguments, **more)
            self.add(maker.args, experience)
            return experience

        module.compute_approx_kl, maker.compute_advantages_and_returns = remembering, recorded

    def add(self, args: Any, experiences: Sequence[Any]) -> None:  # noqa: ANN401 - OpenRLHF's
        """Record one rollout; whatever goes wrong ends the recording, never the training."""
        references, self._references = self._references, {}
        if self._ended:
            return
        try:
            if self._recorder is None:
                self._recorder = StepRecorder(
                    self._path,
                    trainer="openrlhf",
                    version=_release(),
                    config=options_of(args),
                    max_bytes=self._max_bytes,
                )
            self._step += 1
            self._recorder.record_step(self._step, **columns_of(experiences, args, references))
        except Exception as error:  # the boundary that keeps the recorder's faults out of the training
            self._ended = True
            warn(f"rolloutdoctor does not record to {self._path}, and training goes on unchanged: {error}")


def _release() -> str | None:
    try:
        return version("openrlhf")
    except PackageNotFoundError:
        return None


def options_of(args: Any) -> dict[str, object]:  # noqa: ANN401 - a namespace of namespaces
    """Return the values of the options that the analysis knows, by their dotted names."""
    from rolloutdoctor.trainers.openrlhf.trainer import OPTIONS

    options: dict[str, object] = {}
    for option in OPTIONS:
        value = args
        for part in option.name.split("."):
            value = getattr(value, part, Ellipsis)
        if value is not Ellipsis:
            options[option.name] = list(value) if isinstance(value, tuple) else value
    return options


def columns_of(
    experiences: Sequence[Any],
    args: Any,  # noqa: ANN401 - a namespace of namespaces
    references: Mapping[int, Any] | None = None,
) -> dict[str, Any]:
    """Return what experiences say of their rows, as arguments of `StepRecorder.record_step`.

    A response begins at its first trained token: what comes before is the prompt, which the masks of OpenRLHF cover.

    Args:
        experiences: whose advantages are made.
        args: OpenRLHF's options.
        references: log-probs of the reference by the id of the actor's, where experiences have dropped them.
    """
    size = int(args.rollout.n_samples_per_prompt)
    rows: list[dict[str, object]] = []
    for experience in experiences:
        base = experience.base_action_log_probs
        if base is None:
            base = (references or {}).get(id(experience.action_log_probs))
        tokens = {name: getattr(experience, field) for name, field in _TOKENS.items()} | {"ref_log_probs": base}
        for row, position in enumerate(experience.index):
            mask = experience.action_mask[row]
            places = mask.nonzero().flatten()
            start = int(places[0]) if len(places) else 0
            stop = int(experience.attention_mask[row].sum()) - 1
            rows.append(
                {
                    "sample_id": str(position),
                    "group_id": str(position // size),
                    "reward": float(experience.rewards[row]),
                    "prompt_ids": experience.sequences[row, : start + 1].tolist(),
                    "response_ids": experience.sequences[row, start + 1 : stop + 1].tolist(),
                    "response_mask": mask[start:stop].int().numpy(),
                    "status": None
                    if experience.truncated is None
                    else ("truncated" if experience.truncated[row] else "completed"),
                    **{
                        name: None if value is None else value[row, start:stop].float().numpy()
                        for name, value in tokens.items()
                    },
                }
            )
    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    return {name: cells for name, cells in columns.items() if any(cell is not None for cell in cells)}
