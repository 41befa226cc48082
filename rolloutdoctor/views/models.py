"""The JSON that commands print: models that are filled from a result by attribute, their fields in printed order."""

from collections.abc import Callable
from math import nan
from typing import Annotated, Any, Literal

from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from rolloutdoctor.results.comparison import OWN_NUMBERS, Numbers, Pair, RecomputedStep, Slice
from rolloutdoctor.results.findings import Measure, Report, Severity
from rolloutdoctor.results.run_comparison import Part
from rolloutdoctor.results.version import __version__
from rolloutdoctor.views.style import where
from rolloutdoctor.views.verdict import verdict

_NUMBER = {"type": ["number", "null"]}
_NUMBERS = {"type": "object", "additionalProperties": _NUMBER}
_COUNT = {"type": "integer", "minimum": 0}
_SPLIT = {"enum": ["train", "eval"]}
_STEP = {"step": {"type": "integer"}, "split": _SPLIT}

# What a result holds is printed as it is, whatever a file made of it: a type here is the schema's alone.
Text = Annotated[Any, WithJsonSchema({"type": "string"})]
Flag = Annotated[Any, WithJsonSchema({"type": "boolean"})]
Whole = Annotated[Any, WithJsonSchema({"type": "integer"})]
Count = Annotated[Any, WithJsonSchema(_COUNT)]
Number = Annotated[Any, WithJsonSchema(_NUMBER)]
Code = Annotated[Any, WithJsonSchema({"type": "string", "pattern": "^RD[A-Z][0-9]{3}$"})]
Url = Annotated[Any, WithJsonSchema({"type": "string", "pattern": "^https://"})]
Split = Annotated[Any, WithJsonSchema(_SPLIT)]
Verdict = Annotated[Any, WithJsonSchema({"enum": ["confirmed", "exposed"]})]
SeverityLabel = Annotated[Any, WithJsonSchema({"enum": [severity.label for severity in Severity]})]
Origin = Annotated[Any, WithJsonSchema({"enum": ["rows", "recomputed", "logged"]})]
Outcome = Annotated[Any, WithJsonSchema({"enum": ["intended", "known fault", "differs"]})]
StageName = Annotated[Any, WithJsonSchema({"enum": ["advantage", "kl", "loss"]})]


def _at(name: str, *inner: str | int) -> Any:  # noqa: ANN401 - a field of any type
    """A field from this attribute of the result, or from what is in it."""
    return Field(validation_alias=AliasPath(name, *inner))


def _unless(empty: object, **names: Any) -> Any:  # noqa: ANN401 - a field of any type
    """A field that is left out where it says nothing."""
    return Field(default=empty, exclude_if=lambda value: value == empty, **names)


def _made(how: Callable[[Any], object], **schema: object) -> tuple[BeforeValidator, WithJsonSchema]:
    """Return the validator of a value that has no fields of its own, and its schema."""
    return BeforeValidator(how), WithJsonSchema({"type": "object", **schema})


class Model(BaseModel):
    model_config = ConfigDict(from_attributes=True, defer_build=True, json_schema_serialization_defaults_required=True)


class Size(Model):
    rows: Count
    steps: Count
    groups: Count
    tokens: Count


class Setting(Model):
    value: Any
    origin: Text
    assumed: Flag


class RunSetting(Model):
    name: Text
    title: Text
    value: Any
    origin: Text


class TrainerName(Model):
    name: Text | None = _at("trainer")
    version: Text | None = _at("trainer_version")


class Trainer(TrainerName):
    config: dict[str, Setting]


class CheckedTrainer(Trainer):
    release: Literal["read", "older", "not read"] | None


class Head(Model):
    schema_version: Literal[1] = 1
    rolloutdoctor: Text = Field(default=__version__, validation_alias="version")


class RunHead(Head):
    device: Text
    dtype: Text
    input: Size
    trainer: Trainer = _at("__dict__")


class Cause(Model):
    hypothesis: Text
    quantity: Text
    compared: Count
    as_recorded: Count
    as_found: Count
    worst: Number
    also: list[Text]
    words: Text
    explains: list[Text]


class Place(Model):
    step: Whole
    group_id: Text | None
    sample_id: Text | None
    note: Text | None


class Finding(Model):
    code: Code
    name: Text
    severity: SeverityLabel = _at("severity", "label")
    verdict: Verdict
    follows_from: Code | None
    headline: Text
    message: Text
    evidence: Text
    advice: Text
    measures: dict[str, Measure]
    per_step: list[Annotated[Any, *_made(dict, properties=_STEP, required=["step"], additionalProperties=_NUMBER)]]
    where: Annotated[list[Text], BeforeValidator(lambda places: [*map(where, places[:3])])] = _at("examples")
    examples: list[Place]
    fix: Text | None
    references: list[Url]
    page: Text
    cause: Cause | None = _unless(None)
    known: bool | None = _unless(None)


class Untested(Model):
    code: Code
    name: Text
    reason: Text


class Skipped(Untested):
    remedy: Text


class Coverage(Model):
    tested: Count
    rules: Count


class First(Model):
    step: Whole
    sample_id: Text | None
    logged: Number
    recomputed: Number


class Audited(Model):
    quantity: Text
    compared: Count
    agree: Count
    worst: Number
    first: First | None
    outcome: Outcome = _unless("")
    fault: Text = _unless("")
    with_: list[Text] = _unless([], validation_alias="with_fixes", serialization_alias="with")
    not_compared: Count = _unless(0)
    reason: Text | None = _unless(None)
    window: Count = _unless(1)
    shape: Text = _unless("")

    @model_validator(mode="after")
    def _reason_of_some(self) -> "Audited":
        self.reason = self.reason if self.not_compared else None
        return self


class ExcludedEffect(Model):
    code: Code
    effect: Text
    bound: Number
    unit: Text
    estimate: Number
    limit: Number
    seen: Count
    of: Text
    words: Text


class Vital(Model):
    name: Text
    metric: Text
    unit: Text
    first: Number
    last: Number
    early: Number
    late: Number
    mean: Number
    min: Number = _at("least")
    max: Number = _at("largest")
    steps: list[Whole]
    series: list[Number]


class Check(RunHead):
    trainer: CheckedTrainer = _at("__dict__")
    unknown_options: list[Text]
    findings: list[Finding]
    clean: list[Annotated[Code, BeforeValidator(lambda rule: rule[0])]]
    not_applicable: list[Untested]
    skipped: list[Skipped]
    coverage: Coverage
    audit: list[Audited]
    notes: list[Text]
    excluded: list[ExcludedEffect]
    verdict: Annotated[Text, BeforeValidator(lambda fields: verdict(Report(**fields)))] = _at("__dict__")
    vitals: list[Vital]
    likely_trainers: list[Text]
    settings: list[RunSetting]


def _slice(part: Slice) -> dict[str, object]:
    fields: dict[str, object] = {**part.where, **{name: measure.value for name, measure in part.measures.items()}}
    metrics = {name: vars(pair) for name, pair in part.metrics.items()}
    return {**fields, "metrics": metrics} if metrics else fields


_PAIRS = {
    "type": "object",
    "additionalProperties": {
        "type": "object",
        "properties": {"before": _NUMBER, "after": _NUMBER},
        "required": ["before", "after"],
    },
}
SliceLine = Annotated[
    Any,
    *_made(
        _slice,
        properties={"metrics": _PAIRS, "step": {"type": "integer"}},
        additionalProperties={"type": ["number", "string", "null"]},
    ),
]


class MovedRow(Model):
    sample_id: Text
    reward: Number
    advantage_before: Number = _at("advantage", "before")
    advantage_after: Number = _at("advantage", "after")
    gradient_before: Number | None = _at("gradient", "before")
    gradient_after: Number | None = _at("gradient", "after")
    prompt: Text | None
    response: Text | None


class Group(Model):
    step: Whole
    split: Split
    group_id: Text
    moved: Number
    rows: Count = _at("size")
    moved_most: list[MovedRow] = _at("rows")


class Effect(Model):
    label: Text
    joint: Flag
    differs: Flag
    remarks: list[Text]
    total: dict[str, Measure]
    metrics: dict[str, Pair]
    per_step: list[SliceLine]
    parts: list[SliceLine]
    moved_by: Text
    groups: list[Group]


class UntriedFix(Model):
    fix: Text = _at("label")
    applies: Flag
    why: Text


class Diff(RunHead):
    by: Text | None
    differs: Flag
    effects: list[Effect]
    untried: list[UntriedFix] | None = _unless(None)
    notes: list[Text]


class Side(Model):
    name: Text
    input: Size
    trainer: TrainerName = _at("__dict__")


class Steps(Model):
    both: Count
    only_a: Count
    only_b: Count


class Option(Model):
    name: Text
    a: Setting | None
    b: Setting | None


class Matched(Model):
    quantity: Text
    compared: Count
    equal: Count
    largest: Number
    unit: Text


class FirstDifference(Model):
    step: Whole
    split: Split
    quantity: Text
    sample_id: Text | None
    token: Count | None
    a: Number
    b: Number
    rows: Count
    of: Count


class OutcomeA(Model):
    outcome: Text = _at("a")
    headline: Text = _at("headline_a")


class OutcomeB(Model):
    outcome: Text = _at("b")
    headline: Text = _at("headline_b")


class BothMeasures(Model):
    a: Number
    b: Number
    unit: Text

    @model_validator(mode="before")
    @classmethod
    def _of_pair(cls, pair: tuple[Measure | None, Measure | None]) -> dict[str, object]:
        a, b = pair
        return {"a": a and a.value, "b": b and b.value, "unit": (a or b or Measure(None, "1")).unit}


class ComparedFinding(Model):
    code: Code
    name: Text
    a: OutcomeA = _at("__dict__")
    b: OutcomeB = _at("__dict__")
    measures: dict[str, BothMeasures]


class Quantity(Model):
    name: Text
    origin: Origin
    split: Split
    unit: Text
    steps: Annotated[Count, BeforeValidator(len)]
    equal: Count
    a: Number = _at("mean", 0)
    b: Number = _at("mean", 1)
    difference: Number
    widest_step: Whole | None
    factor: Count = _unless(0)
    larger: Text = _unless("")


def _part(part: Part) -> dict[str, object]:
    return {"part": part.name, **{name: {"a": a, "b": b} for name, (a, b) in part.values.items()}}


class Compare(Head):
    device: Text
    dtype: Text
    a: Side
    b: Side
    differs: Flag
    steps: Annotated[Steps, BeforeValidator(lambda steps: dict(zip(Steps.model_fields, steps, strict=True)))]
    options: list[Option]
    joined: Count
    matched: list[Matched]
    first: FirstDifference | None
    findings: list[ComparedFinding]
    quantities: list[Quantity]
    by: Text | None
    parts: list[
        Annotated[
            Any,
            *_made(
                _part,
                properties={"part": {"type": "string"}},
                required=["part"],
                additionalProperties={"type": "object"},
            ),
        ]
    ]
    notes: list[Text]


def _logged(means: tuple[str, float, float] | None) -> dict[str, object] | None:
    return None if means is None else dict(zip(("metric", "before", "after"), means, strict=True))


_ENDS = {"type": ["array", "null"], "items": {"type": "number"}}
_LOGGED = {"type": ["object", "null"]}


class Line(Model):
    cause: Text
    share: Number
    interval: Annotated[Any, WithJsonSchema(_ENDS)]
    rows: list[Text]
    count: Count
    words: Text
    parts: dict[str, Annotated[dict[str, Any], WithJsonSchema(_NUMBERS)]]


class Begun(Model):
    code: Code
    name: Text
    onset: Number
    headline: Text


class Compared(Model):
    name: Text
    before: Number
    after: Number
    of: Text


class Ledger(Model):
    at: Number
    steps_before: list[Whole]
    steps_after: list[Whole]
    before: Number
    after: Number
    change: Number
    lines: list[Line]
    remainder: Number
    interval: Annotated[Any, WithJsonSchema(_ENDS)]
    of: Text
    logged: Annotated[Any, BeforeValidator(_logged), WithJsonSchema(_LOGGED)]
    coincidences: list[Text]
    began: list[Begun]
    trajectories: list[Compared]
    notes: list[Text]


def _first(name: str, empty: object) -> Any:  # noqa: ANN401 - a field of any type
    """A field of the largest change; where there is none, what stands for that."""
    return Field(default=empty, validation_alias=AliasPath("ledgers", 0, name))


class Why(RunHead):
    metric: Text
    unit: Text
    at: Number = _first("at", nan)
    steps_before: list[Whole] = _first("steps_before", [])
    steps_after: list[Whole] = _first("steps_after", [])
    before: Number = _first("before", nan)
    after: Number = _first("after", nan)
    change: Number = _first("change", nan)
    lines: list[Line] = _first("lines", [])
    remainder: Number = _first("remainder", nan)
    interval: Annotated[Any, WithJsonSchema(_ENDS)] = _first("interval", [])
    began: list[Begun] = _first("began", [])
    trajectories: list[Compared] = _first("trajectories", [])
    others: Annotated[list[Ledger], BeforeValidator(lambda changes: changes[1:])] = _at("ledgers")
    notes: Annotated[list[Text], BeforeValidator(lambda fields: _all_notes(fields))] = _at("__dict__")


def _all_notes(fields: dict[str, Any]) -> list[str]:
    first = fields["ledgers"][:1]
    return [*(note for ledger in first for note in (*ledger.coincidences, *ledger.notes)), *fields["notes"]]


def _numbers(numbers: Numbers) -> dict[str, object]:
    """The trainer's metrics under their own names, then ours: a trainer's `loss` is the loss of the step."""
    return {name: getattr(numbers, name) for name in OWN_NUMBERS} | {
        name: value for name, value in numbers.metrics.items() if name not in OWN_NUMBERS
    }


def _step(step: RecomputedStep) -> dict[str, object]:
    before = step.before
    fields: dict[str, object] = {"step": step.step, "split": step.split, "rows": step.rows, "tokens": step.tokens}
    fields |= _numbers(before)
    fields["logged"] = step.logged
    fields["difference"] = {name: before.metrics[name] - value for name, value in step.logged.items()}
    return fields if step.fixed is None else {**fields, "fixed": _numbers(step.fixed)}


_OWN = dict.fromkeys(OWN_NUMBERS, _NUMBER)
_METRICS = {"type": "object", "properties": _OWN, "required": list(_OWN), "additionalProperties": _NUMBER}
_STEP_FIELDS = {**_STEP, "rows": _COUNT, "tokens": _COUNT, **_OWN, "logged": _NUMBERS, "difference": _NUMBERS}


class Recompute(RunHead):
    fixes: list[Text]
    columns: list[Text]
    per_step: list[
        Annotated[
            Any,
            *_made(
                _step,
                properties={**_STEP_FIELDS, "fixed": _METRICS},
                required=list(_STEP_FIELDS),
                additionalProperties=_NUMBER,
            ),
        ]
    ] = _at("steps")
    notes: list[Text]


class Member(Model):
    trainer: Text | None
    options: dict[str, Any]
    words: Text


class IdentifiedClass(Member):
    matched: Count
    worst: Number
    equivalent: list[Member]


class Excluded(Model):
    options: dict[str, Any]
    step: Whole | None
    sample_id: Text | None
    logged: Number
    predicted: Number


class Stage(Model):
    stage: StageName
    outcome: Text
    compared: Count
    classes: list[IdentifiedClass]
    excluded: list[Excluded]
    separate: Text


class FaultOfRelease(Model):
    code: Code
    fix: Text
    quantities: list[Text]


class Identify(Head):
    input: Size
    stages: list[Stage]
    recorded: Text
    use: list[Text]
    notes: list[Text]
    faults: list[FaultOfRelease] = _unless([])


class VerifiedStage(Model):
    stage: Text
    outcome: Literal["follows", "differs", "cannot be told"]
    required: Flag
    compared: Count
    agree: Count
    code: Text
    reason: Text
    remedy: Text


class Verify(Model):
    schema_version: Literal[1] = 1
    trainer: TrainerName = _at("__dict__")
    stages: list[VerifiedStage]
    notes: list[Text]


class NotApplicableRule(Model):
    code: Code
    reason: Text


class SkippedRule(NotApplicableRule):
    remedy: Text


class Info(Model):
    schema_version: Literal[1] = 1
    files: list[Text]
    input: Size
    splits: dict[str, Count]
    dropped_steps: list[tuple[Whole, Split]] = _at("dropped")
    first_step: Whole | None
    last_step: Whole | None
    tier: Count
    tier_meaning: Text
    trainer: Text | None
    config: dict[str, Setting]
    settings: list[RunSetting]
    columns: dict[str, Text]
    absent: dict[str, Text]
    unread: list[Text]
    metrics: list[Text]
    runnable: list[Annotated[Code, BeforeValidator(lambda rule: rule[0])]]
    not_applicable: list[NotApplicableRule]
    skipped: list[SkippedRule]
    notes: list[Text]
    agent: dict[str, Text] | None


class Rule(Model):
    code: Code
    name: Text
    family: Text
    summary: Text
    page: Text
    measures: list[Text]
    fix: Text | None
    references: list[Url]


class CauseEntry(Model):
    name: Text
    code: Code
    rule: Text
    shows_in: Text
    words: Text
    remedy: Text
    trainers: list[Text]
    references: list[Url]


class Variant(Model):
    name: Text
    note: Text
    trainers: list[Text]


class Thread(Model):
    url: Url
    status: Literal["open", "closed", "merged"]
    release: str


class Fix(Model):
    name: Text
    summary: Text
    story: Text
    status: Text
    contested: Flag
    needs: Text
    trainers: list[Text]
    releases: dict[str, Text]
    variants: list[Variant]
    upstream: list[Thread]
    references: list[Url]


class Change(Model):
    in_: Text = Field(serialization_alias="in")
    before: Any


class TrainerOption(Model):
    name: Text
    default: Any
    takes: Text
    computed: list[Any] | None
    loss_alone: Flag
    decides: Flag
    meaning: Text
    changed: list[Change]
    since: Text | None
    until: Text | None


class TrainerEntry(Model):
    name: Text
    version: Text
    read: list[Text]
    options: list[TrainerOption]
    not_recomputed: dict[str, Text]


class MetricEntry(Model):
    trainer: Text
    pattern: Text
    quantity: Text
    definition: Text
    source: Text
    since: str
    until: str
    factor: float
    offset: float
    lower_bound: bool
    zero_when_off: bool
    before_update: bool


class QuantityEntry(Model):
    name: Text
    title: Text
    unit: Text
    definition: Text


class Metric(Model):
    name: Text
    quantities: list[QuantityEntry]
    logged_as: list[MetricEntry]


class Column(Model):
    name: Text
    type: Text
    meaning: Text
    aliases: list[Text]


class OptionOfTrainer(TrainerOption):
    trainer: Text


class NamedOption(Model):
    name: Text
    trainers: list[OptionOfTrainer]


class Term(Model):
    name: Text
    meaning: Text


class Entry(Model):
    kind: Text
    name: Text
    words: Text
