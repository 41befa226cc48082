"""Measure parts as tasks on a Ray cluster: each opens its own files, and the bytes of its state come back.

The driver repeats a part that fails, and not Ray, so that one count holds for a worker that dies, a node that goes, a
result that is lost and a file that cannot be read for a moment. A part is added once, when its bytes are there.
"""

import importlib
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

from rolloutdoctor.engine.part_states import StateFolder, part_name, run_identity, state_bytes, state_from
from rolloutdoctor.engine.parts import Part, Work, plan_parts
from rolloutdoctor.engine.stored import State
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import Run, StepRange
from rolloutdoctor.io.write.scratch import SHORT_PREFIX, scratch_folder
from rolloutdoctor.results import errors
from rolloutdoctor.results.errors import InputError, RolloutDoctorError, UsageError
from rolloutdoctor.results.version import __version__

ATTEMPTS = 3
"""Number of times that a part is tried."""

LEAST_PARTS = 64
PART_BYTES = 2**28
"""Decoded bytes of a part. Never of the cluster: a resumed run has to find the same parts."""

BASE_BYTES = 2**29
"""Memory of a process that has imported torch and arrow."""

TURN_SECONDS = 0.5
LOCAL = "local"

VERSIONS = (__version__, platform.python_version())
"""Of this package and of Python."""


@dataclass(frozen=True)
class RayCluster:
    """Measures parts on a cluster that is there; none is started unasked.

    Attributes:
        address: of the cluster; empty: that of the environment, or of this machine; ``local``: start one here.
        states: where the states of parts are kept, or None.
        attempts: how often a part is tried.
    """

    address: str = ""
    states: StateFolder | None = None
    attempts: int = ATTEMPTS

    def measure(
        self,
        work: Work[State],
        run: Run,
        steps: StepRange | None = None,
        split: str | None = None,
        progress: Progress | None = None,
    ) -> list[State]:
        """Measure the parts that are not kept yet.

        Raises:
            UsageError: if Ray is not installed, or there is no cluster.
            InputError: if a part cannot be measured.
        """
        ray = _imported(alone=self.address == LOCAL)
        parts = plan_parts(run, steps, split, max(LEAST_PARTS, -(-run.decoded_bytes() // PART_BYTES)))
        identity = run_identity(run)
        names = [part_name(work, part, identity) for part in parts]
        sizes = [part.run.size(part.steps, split) for part in parts]
        states: dict[int, State] = {}
        # States of all parts come together here.
        shared_work = work.among(len(parts))
        for part, name in zip(parts, names, strict=True):
            stored = None if self.states is None else self.states.find(shared_work, name)
            if stored is not None:
                states[part.number] = stored
        rest = [part for part in parts if part.number not in states]
        if rest:
            with _Connection(ray, self.address):
                turn = _Turns(ray, work, names, self.attempts)

                def keep(part: Part, content: bytes) -> None:
                    name = names[part.number]
                    states[part.number] = state_from(shared_work, name, content)
                    if self.states is not None:
                        self.states.keep(name, content)
                    if progress is not None:
                        progress(sum(sizes[number] for number in states), sum(sizes))

                turn.run(rest, keep)
        return [states[part.number] for part in parts]


def _imported(*, alone: bool) -> Any:  # noqa: ANN401  # a module without types
    # Before the import, which reads them. Workers have the environment of the driver, as far as there is one.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if alone:
        # By its name it is for other systems; it is what makes Ray use the loopback address of this one.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise UsageError("--engine ray needs Ray: install it with pip install 'rolloutdoctor[ray]'") from None


class _Connection:
    """Joins a cluster, and leaves it, unless the process had joined one before.

    While it lasts, what Ray prints of the cluster (a node that goes) goes to standard error: standard output holds a
    report, and Ray has no option for it.
    """

    def __init__(self, ray: Any, address: str) -> None:  # noqa: ANN401
        self._ray, self._address = ray, address
        self._left = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as joined:
            if not self._ray.is_initialized():
                joined.enter_context(redirect_stdout(sys.stderr))
                self._join(joined)
            self._left = joined.pop_all()

    def _join(self, joined: ExitStack) -> None:
        ray = self._ray
        wanted = None if self._address == LOCAL else self._address or os.environ.get("RAY_ADDRESS") or "auto"
        more: dict[str, object] = {"log_to_driver": False, "logging_level": "ERROR"}
        if wanted is None:
            # Ray has no login: nobody else may reach what is started here, and nothing here asks the network.
            folder = joined.enter_context(scratch_folder(SHORT_PREFIX))
            more |= {"_node_ip_address": "127.0.0.1", "_temp_dir": str(folder), "include_dashboard": False}
            more |= {"num_gpus": 0, "resources": {"TPU": 0}}
            # What is left of the dashboard without its pages asks the cloud's metadata server who it is.
            joined.enter_context(_replaced("services", "start_api_server", lambda *args, **kwargs: (None, None)))
        # Before it is joined, so that an interrupt in between leaves nothing.
        joined.callback(ray.shutdown)
        try:
            with _handler_kept():
                ray.init(address="local" if wanted is None else wanted, job_config=_job_config(), **more)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            cause = " ".join(str(error).split())[:160]
            raise UsageError(
                f"--engine ray: no cluster at {wanted or 'this machine'} ({cause}); start one with `ray start --head`, "
                "name it with --engine ray=ADDRESS, or start one for this command alone with --engine ray=local"
            ) from None

    def __exit__(self, *caught: object) -> None:
        self._left.close()


def _job_config() -> Any:  # noqa: ANN401
    """Return a job whose workers import nothing from the working folder, which Ray puts first in their path."""
    job: Any = importlib.import_module("ray.job_config")

    class WithoutWorkingFolder(job.JobConfig):  # type: ignore[misc]  # a class without types
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return WithoutWorkingFolder()


@contextmanager
def _handler_kept() -> Iterator[None]:
    """Keep the caller's handler of SIGTERM: Ray's exits with the number of the signal, and another prints a stack."""
    before = signal.getsignal(signal.SIGTERM)
    with _replaced("utils", "set_sigterm_handler", lambda handler: None):
        yield
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _replaced(module: str, name: str, value: Callable[..., object]) -> Iterator[None]:
    """Put a function in the place of one of Ray's own."""
    where: Any = importlib.import_module(f"ray._private.{module}")
    before = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)


class _Turns:
    """Keeps a bounded number of parts in flight until all are done."""

    def __init__(self, ray: Any, work: Work[Any], names: list[str], attempts: int) -> None:  # noqa: ANN401
        self._ray, self._work, self._names, self._attempts = ray, work, names, attempts
        self._task = ray.remote(_task())
        self._failures: dict[int, int] = {}
        self._stop: tuple[int, RolloutDoctorError] | None = None

    def run(self, parts: list[Part], keep: Callable[[Part, bytes], None]) -> None:
        """Measure parts; the earliest error that stays is raised.

        What is in flight then is left to end, or ends with the connection: a task that is cancelled while its reply
        comes in aborts the whole driver (ray-project/ray, pull request 54798; 2.60 still does).
        """
        ray = self._ray
        waiting = list(reversed(parts))
        flying: dict[Any, Part] = {}
        while waiting or flying:
            # Read each turn: a cluster may have grown, or shrunk.
            limit = max(2, 2 * int(ray.cluster_resources().get("CPU", 1)))
            while waiting and len(flying) < limit and self._is_wanted(waiting[-1]):
                part = waiting.pop()
                flying[self._submit(part)] = part
            flying = {ref: part for ref, part in flying.items() if self._is_wanted(part)}
            if not flying:
                break
            done, _ = ray.wait(list(flying), num_returns=1, timeout=TURN_SECONDS)
            for ref in done:
                part = flying.pop(ref)
                self._take(part, ref, waiting, keep)
        if self._stop is not None:
            raise self._stop[1]

    def _is_wanted(self, part: Part) -> bool:
        """False if an earlier part has failed for good."""
        return self._stop is None or part.number < self._stop[0]

    def _submit(self, part: Part) -> Any:  # noqa: ANN401  # an ObjectRef
        need = BASE_BYTES + 3 * part.run.largest_row_group()
        nodes = [node["Resources"].get("memory", 0) for node in self._ray.nodes() if node["Alive"]]
        if nodes and need > max(nodes):
            raise InputError(
                f"{part.words} need about {need / 2**30:.1f} GiB, and no node of the cluster offers more than "
                f"{max(nodes) / 2**30:.1f} GiB; add a larger node, or write the file with smaller row groups"
            )
        payload = self._ray.cloudpickle.dumps((self._work, part, self._names[part.number]))
        options = self._task.options(num_cpus=1, num_gpus=0, memory=need, max_retries=0)
        return options.remote(VERSIONS, payload)

    def _take(self, part: Part, ref: object, waiting: list[Part], keep: Callable[[Part, bytes], None]) -> None:
        try:
            kind, content = self._ray.get(ref)
        except self._ray.exceptions.OutOfMemoryError:
            return self._again(part, waiting, f"the node had no memory left for {part.words}")
        except self._ray.exceptions.RayError as error:
            return self._again(part, waiting, f"the worker of {part.words} died ({_name(error)})")
        if kind == "state":
            return keep(part, content)
        if kind == "versions":
            raise InputError(
                f"a worker has {_versions(content)} and this command {_versions(VERSIONS)}: numbers of two versions do "
                "not add up; install the same on every node"
            )
        name, message = content
        error_type = getattr(errors, name, None)
        if name == "MemoryError":
            return self._again(part, waiting, f"the node had no memory left for {part.words}")
        if name == "InputError" or error_type is None:
            return self._again(part, waiting, message)
        self._fail(part, error_type(message))

    def _again(self, part: Part, waiting: list[Part], message: str) -> None:
        count = self._failures[part.number] = self._failures.get(part.number, 0) + 1
        if count < self._attempts:
            waiting.append(part)
        else:
            self._fail(part, InputError(f"{message}; tried {count} times" if count > 1 else message))

    def _fail(self, part: Part, error: RolloutDoctorError) -> None:
        if self._is_wanted(part):
            self._stop = (part.number, error)


def _name(error: BaseException) -> str:
    return type(error).__name__


def _versions(versions: tuple[str, str]) -> str:
    return f"{f'rolloutdoctor {versions[0]}' if versions[0] else 'no rolloutdoctor'} on Python {versions[1]}"


def _task() -> Callable[..., tuple[str, object]]:
    """Return the function of a task, which goes by value: it runs where this package may be absent or another."""

    def measure_part(wanted: tuple[str, str], payload: bytes) -> tuple[str, object]:
        import platform

        try:
            from rolloutdoctor.results.version import __version__ as version
        except ImportError:
            version = ""
        versions = (version, platform.python_version())
        if versions != wanted:
            return "versions", versions
        from rolloutdoctor.engine.ray_cluster import measured

        return measured(payload)

    return measure_part


def measured(payload: bytes) -> tuple[str, object]:
    """Measure a part in a worker; what goes wrong is said in plain words, not raised as a class of this package."""
    import pickle

    import torch

    torch.set_num_threads(1)
    try:
        work, part, name = pickle.loads(payload)
        for file in part.run.stored_files():
            file.check_unchanged()
        return "state", state_bytes(name, work.measure(part, None))
    except (RolloutDoctorError, OSError, MemoryError) as error:
        return "failed", (type(error).__name__, str(error))
