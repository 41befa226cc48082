"""Interface of trainers: all that the rest of the package knows of one."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Protocol

from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.findings import READ
from rolloutdoctor.trainers.options import Config, Layer, Option, resolve, unknown_loss
from rolloutdoctor.trainers.releases import ReadCode, Release, parse_version, release_of

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.data.batch import RolloutBatch
    from rolloutdoctor.data.step_key import StepKey
    from rolloutdoctor.evaluation.evaluate import Evaluation

    StepMetrics = Mapping[StepKey, Mapping[str, float]]


@dataclass(frozen=True)
class LossParts:
    """The logged loss of one step in two parts: they add up to it, but for entropy and auxiliary terms."""

    policy: float
    kl: float


@dataclass(frozen=True)
class StoredKl:
    """The metric of a per-token KL that a trainer stores.

    Attributes:
        metric: its name.
        reduce: the step and the values of its tokens, ``[T]``, to the metric.
    """

    metric: str
    reduce: "Callable[[RolloutBatch, Tensor], float]"


@dataclass(frozen=True)
class Trace:
    """A metric that a trainer logs only under some values of an option.

    Attributes:
        metric: its name.
        option: the option.
        fits: tells whether it can be logged under a value of the option.
        words: under which values it is logged, as the end of "NAME is logged".
        nonzero: only a value other than 0 tells.
        value: the only value under which it is logged, or None where there are several.
        since: the first version that logs it under these values alone; empty: all.
    """

    metric: str
    option: str
    fits: Callable[[object], bool]
    words: str
    nonzero: bool = False
    value: object = None
    since: str = ""

    def tells_at(self, version: tuple[int, ...]) -> bool:
        """Return True if the metric tells of the option in a log of a version."""
        return not self.since or version >= parse_version(self.since)


@dataclass(frozen=True)
class PartOptions:
    """The options that decide over a part of the objective.

    Attributes:
        off: option to the values that leave the part out; no values where the option decides what the part is.
        never: why no configuration has the part; empty where one has it.
    """

    off: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    never: str = ""


@dataclass(frozen=True)
class Choices:
    """Settings of a trainer's options that a log can tell apart, for identification.

    Attributes:
        advantage: options that decide how scores become advantages, without a KL penalty in the reward.
        penalty: options that put such a penalty there, but for its coefficient.
        penalty_option: the option that holds that coefficient, or None.
        weights_option: the option that holds the weights of the reward functions, or None.
        kl: options that decide the KL term of the loss and its metric, but for its coefficient.
        loss: options that decide how terms become the loss.
    """

    advantage: tuple[Mapping[str, object], ...] = ()
    penalty: tuple[Mapping[str, object], ...] = ()
    penalty_option: str | None = None
    weights_option: str | None = None
    kl: tuple[Mapping[str, object], ...] = ()
    loss: tuple[Mapping[str, object], ...] = ()


def every(**axes: Sequence[object]) -> tuple[Mapping[str, object], ...]:
    """Return every combination of values of some options; two underscores stand for a dot.

    >>> every(beta=(0,), loss_type=("grpo", "dapo"))
    ({'beta': 0, 'loss_type': 'grpo'}, {'beta': 0, 'loss_type': 'dapo'})
    """
    names = [name.replace("__", ".") for name in axes]
    return tuple(dict(zip(names, values, strict=True)) for values in product(*axes.values()))


def _no_step_values(config: Config, logged: "StepMetrics") -> "StepMetrics":
    return {}


def _all_of_it(evaluation: "Evaluation") -> float | None:
    return None


def _is_not_known(config: Config) -> bool:
    return False


def _never(config: Config) -> str:
    return ""


def _not_known(config: Config, *, numbered: bool, generated: bool) -> bool:
    return False


def _states_nothing(config: Config) -> str:
    return "options of this trainer that are understood here"


class ScoredBefore(Protocol):
    """Tells whether rows were scored before the first update of their batch, so that both log-probs are equal."""

    def __call__(self, config: Config, *, numbered: bool, generated: bool) -> bool:
        """Return False where that is not known, or where the two are of passes that are batched differently.

        Args:
            config: the options.
            numbered: rows say which update they were in, and those of the first are meant; else all are.
            generated: the step logged what belongs to a generation, so that it is the first pass over its rows.
        """


def _whole(config: Config) -> None:
    return None


def _not_logged(logged: Mapping[str, float], config: Config | None) -> LossParts | None:
    return None


@dataclass(frozen=True)
class Redefined:
    """Metrics that a release of a trainer counts otherwise than those before it, under the same name.

    Attributes:
        metrics: a pattern of their names.
        sign: a pattern of metrics that are logged beside them from that release on, and by no other.
        words: what differs, as a sentence; ``{new}`` is the run that counts so, ``{old}`` the other.
    """

    metrics: str
    sign: str
    words: str

    def counts_so(self, names: Collection[str]) -> bool | None:
        """Tell whether a log counts so; None where it has no such metric."""
        if not any(fnmatchcase(name, self.metrics) for name in names):
            return None
        return any(fnmatchcase(name, self.sign) for name in names)


@dataclass(frozen=True)
class Log:
    """The metrics that a trainer logs, under its own names.

    Attributes:
        loss: the metric that best shows the loss.
        grad_norm: the metric that holds the norm of the parameters' gradient.
        kl: its metrics that are a KL from the reference.
        critic: its metrics of the update of a value function: the loss, and the norm of the gradient.
        loss_is_whole: True if `loss` is the whole loss, not its policy part.
        zero_std: its metric that holds the share of rows or groups without a spread of rewards, or None.
        ends: its metrics that hold the share of responses that were cut off, and the smallest, largest and mean
            length of a response; None where it does not log them.
        ends_by_token: True if that share is of the responses without an end-of-sequence token.
        quantities: what each recomputed metric is, by name or pattern, in the words of
            `radii.metrics.METRICS`; a metric that is not named is a mean of values of one sign.
        not_recomputed: metrics that it logs (a star stands for any ending) and `Trainer.metrics` never gives, with
            the reason.
        generation: patterns of the metrics that are made once for each generated batch.
        instant: metrics that are of the logged step alone, whatever `OptionRoles.window` says.
        traces: metrics that show how an option was set.
        step_values: the values that steps took over from the steps before, under names that nothing logs.
        loss_share: the share of the step's loss that the logged one is, where the trainer logs it so; None: it is all.
        share_is: what that share comes of, and what to do before runs are compared.
        loss_parts: takes the loss of a training step apart from what was logged; None where that does not do. The
            configuration is None where nothing states it.
        file: its own log of numbers, in words; None if it has none of its own.
        redefined: metrics that some releases count otherwise.
        marks: sets of metrics of which one is logged whole, if its names are those of another trainer; none: its names
            are its own.
    """

    loss: str
    grad_norm: str
    kl: tuple[str, ...] = ()
    critic: tuple[str, ...] = ()
    loss_is_whole: bool = False
    zero_std: str | None = None
    ends: tuple[str, str, str, str] | None = None
    ends_by_token: bool = False
    quantities: Mapping[str, str] = field(default_factory=dict)
    not_recomputed: Mapping[str, str] = field(default_factory=dict)
    generation: tuple[str, ...] = ()
    instant: frozenset[str] = frozenset()
    traces: tuple[Trace, ...] = ()
    marks: tuple[frozenset[str], ...] = ()
    step_values: "Callable[[Config, StepMetrics], StepMetrics]" = _no_step_values
    loss_share: "Callable[[Evaluation], float | None]" = _all_of_it
    share_is: tuple[str, str] = (
        "averages parts that add up to it",
        "multiply it by the number of micro-batches and ranks before runs are compared",
    )
    loss_parts: Callable[[Mapping[str, float], Config | None], LossParts | None] = _not_logged
    file: str | None = None
    redefined: tuple[Redefined, ...] = ()

    def is_share(self, metric: str) -> bool:
        """Return True for the loss, if a share of it is logged: parts without a row may make it smaller."""
        return metric == self.loss and self.loss_share is not _all_of_it

    def kind_of(self, metric: str) -> str:
        """Return what a metric is, as `quantities` has it."""
        if metric not in self._kinds:
            kinds = (kind for pattern, kind in self.quantities.items() if fnmatchcase(metric, pattern))
            self._kinds[metric] = next(kinds, "mean")
        return self._kinds[metric]

    def is_made_once(self, metric: str) -> bool:
        """Return True for a metric that is made once for each generated batch."""
        return any(fnmatchcase(metric, pattern) for pattern in self.generation)

    @cached_property
    def _kinds(self) -> dict[str, str]:
        """Kinds of the metrics that were asked for: matching patterns takes its time, and names recur."""
        return {}


@dataclass(frozen=True)
class AdamOptions:
    """The options of which Adam makes its first moment from the gradients.

    Attributes:
        optimizer: the optimizer.
        plain: its values that keep the moment as it is, in full precision.
        beta1: the decay rate of the moment.
        clip: the norm at which the gradient is clipped before it, 0 or null for never; the logged norm is of before.
    """

    optimizer: str
    plain: frozenset[str]
    beta1: str
    clip: str


@dataclass(frozen=True)
class OptionRoles:
    """The names of the options that more than the objective depends on.

    Attributes:
        kl: the coefficient of the KL term in the loss, or None.
        group: split to how many responses a prompt gets.
        length: the largest length of a response, or None.
        truncation: masks responses that were cut off, or None.
        sync: copies the policy to the reference now and then, or None.
        window: over how many steps a logged line averages, or None if each step is logged.
        must_state: the options that are too much to assume, each with a common value.
        advised: what advice is about, in the words of the rules, to the option that sets it.
        always_listed: the options that its whole configuration lists in every release.
        came_after: options that its whole configuration lists since some release, newest first, each with the newest
            release before it: what is absent dates a configuration that states no release.
        total_steps: the options that hold the optimizer steps of the run, where they are above 0.
        adam: the options of Adam's first moment, or None.
    """

    kl: str | None = None
    group: Mapping[str, str] = field(default_factory=dict)
    length: str | None = None
    truncation: str | None = None
    sync: str | None = None
    window: str | None = None
    must_state: Mapping[str, object] = field(default_factory=dict)
    advised: Mapping[str, str] = field(default_factory=dict)
    always_listed: frozenset[str] = frozenset()
    came_after: Mapping[str, str] = field(default_factory=dict)
    total_steps: tuple[str, ...] = ("max_steps",)
    adam: AdamOptions | None = None


@dataclass(frozen=True)
class Updates:
    """How a trainer spends a generated batch on optimizer steps.

    Attributes:
        per_generation: how many optimizer steps one pass over a generated batch takes, where the log has a line for
            each of them and the rows stand at the first; 0 where they do not divide evenly, None where a line is a
            whole step.
        reuse: says why a step may have trained on rows that were generated for an earlier one, where the options do
            not rule it out; empty where they do. What is logged of a generation is logged once then.
        single: tells that the options have one update a batch, whose log-probs at the loss are the old ones to the
            bit.
        a_batch: how often a generated batch is trained on, or the names of the options to state that decide it.
        scored_before: tells of which rows policy and old log-probs are equal to the bit.
    """

    per_generation: Callable[[Config], int | None] = _whole
    reuse: Callable[[Config], str] = _never
    single: Callable[[Config], bool] = _is_not_known
    a_batch: Callable[[Config], int | str] = _states_nothing
    scored_before: ScoredBefore = _not_known


@dataclass(frozen=True)
class Trainer:
    """One trainer.

    Attributes:
        name: what `--trainer` takes.
        title: how sentences call it.
        newest: the number of the newest code that was read and compared.
        oldest: the oldest version whose semantics are known.
        options: its options, under its own names.
        objective: builds what it computes from a configuration, every option of which is computed.
        metrics: its logged metrics under its own names, recomputed from an evaluation; a metric whose ingredients
            are missing is left out.
        group_size: how many rows a group of a split should have under a configuration, or None if anything goes.
        log: what it logs.
        recording: canonical column to the option or recorder that makes the trainer log it; ``*`` is any other column,
            ``metrics`` its log of numbers.
        agents: of a run of an agent, column to what would record it, or why it needs none; else as of `recording`.
        roles: options that more than the objective depends on.
        updates: how it spends a generated batch on optimizer steps.
        parts: part of the objective to the options that decide over it; a part that is not named has none.
        choices: settings that a log can tell apart.
        aliases: its names of columns that mean another column, or none, in files of other trainers.
        stored_kl: the metric of the per-token KL that it stores, or None.
        release_decides: says why the loss under a configuration depends on the release; empty where it does not.
        masks_by_product: its loss multiplies by the mask, so that NaN in a masked token reaches it.
        package: whose release is the version; empty: it is called by the title.
        read: the code that was read, oldest first; none: every release from the oldest to the newest.
        further: options that name the release of another package that makes the numbers: what was read of it.
    """

    name: str
    title: str
    newest: str
    oldest: str
    options: tuple[Option, ...]
    objective: Callable[[Config], Objective]
    metrics: "Callable[[Evaluation], Mapping[str, float]]"
    group_size: Callable[[Config, str], int | None]
    log: Log
    recording: Mapping[str, str]
    agents: Mapping[str, str] = field(default_factory=dict)
    roles: OptionRoles = field(default_factory=OptionRoles)
    updates: Updates = field(default_factory=Updates)
    parts: Mapping[Part, PartOptions] = field(default_factory=dict)
    choices: Choices = field(default_factory=Choices)
    aliases: Mapping[str, str] = field(default_factory=dict)
    stored_kl: StoredKl | None = None
    release_decides: Callable[[Config], str] = _never
    masks_by_product: bool = False
    package: str = ""
    read: tuple[ReadCode, ...] = ()
    further: Mapping[str, tuple[ReadCode, ...]] = field(default_factory=dict)

    @property
    def package_name(self) -> str:
        """Name of the package whose release is the version."""
        return self.package or self.title.lower()

    @property
    def read_code(self) -> tuple[ReadCode, ...]:
        """The code that was read, oldest first."""
        return self.read or (ReadCode(self.oldest, "" if self.oldest == self.newest else self.newest),)

    def release(self, text: str) -> Release:
        """Look up a release, by its numbers or its commit, among the code that was read.

        Raises:
            UsageError: if the text is neither.
        """
        return release_of(text, self.read_code, self.title)

    def whole_release(self, release: Release, config: Config) -> Release:
        """Return the release, as not read where one of the other packages is of a release that was not."""
        of_options = (release_of(config.word(option), read, option) for option, read in self.further.items())
        other = next((status for status in of_options if status.state != READ), None)
        return release if other is None or release.state != READ else replace(other, numbers=release.numbers)

    def objective_of(self, config: Config) -> Objective:
        """Build what it computes; its loss is unknown where an option changes that alone and is not computed.

        Raises:
            UsageError: for what is not computed otherwise.
        """
        hiding = [option for option in self.options if option.leaves_loss_unknown(config.settings)]
        if not hiding:
            return self.objective(config)
        computed = {option.name: (option.computed or (option.default,))[0] for option in hiding}
        plain = {name: replace(config.settings[name], value=value) for name, value in computed.items()}
        objective = self.objective(replace(config, settings={**config.settings, **plain}))
        why = [unknown_loss(f"{option.name} = {str(config[option.name])[:80]}", option.why_not) for option in hiding]
        return replace(
            objective, unknown_loss="; ".join([*why, *([objective.unknown_loss] if objective.unknown_loss else [])])
        )

    def example(self) -> Objective:
        """Return what its newest version computes with nothing stated but what has to be."""
        stated = Layer("a common configuration", self.roles.must_state)
        return self.objective_of(resolve(self.options, parse_version(self.newest), [stated], trainer=self.name))
