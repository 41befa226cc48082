"""Causal order of findings: a cause comes before its consequences, and counts for what follows from it.

What a run is given (data, rewards, sampler, options, and what is computed from them) explains the dynamics of the
policy (KL, entropy, reward, gradient), and these explain lengths and truncation: `RANKS`. A finding that nothing
before it explains is a cause of its own, whatever its rank. Among findings of the same depth the heavier is first.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from math import inf

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.stages import STAGES
from rolloutdoctor.results.findings import Finding, Severity
from rolloutdoctor.rules.base import Context
from rolloutdoctor.trainers.spec import PartOptions

Condition = Callable[[Finding, Finding, Context], bool]
"""Predicate of a cause and another finding: the second follows from the first."""


class Rank(IntEnum):
    """What a finding is about; one of a lower rank may explain one of a higher rank."""

    INPUT = 0
    DYNAMICS = 1
    LENGTH = 2


FAMILIES = {
    "RDI": Rank.INPUT,
    "RDO": Rank.INPUT,
    "RDA": Rank.INPUT,
    "RDG": Rank.INPUT,
    "RDM": Rank.DYNAMICS,
    "RDT": Rank.DYNAMICS,
}

RANKS = {
    # Reward functions and options, seen in a log.
    "RDT002": Rank.INPUT,
    "RDT009": Rank.INPUT,
    "RDT012": Rank.INPUT,
    "RDT017": Rank.INPUT,
    "RDT019": Rank.INPUT,
    "RDT020": Rank.INPUT,
    # States of the update.
    "RDG002": Rank.DYNAMICS,
    "RDG003": Rank.DYNAMICS,
    "RDG014": Rank.DYNAMICS,
    "RDG015": Rank.DYNAMICS,
    "RDO015": Rank.DYNAMICS,
    "RDO016": Rank.DYNAMICS,
    # Lengths and truncation.
    "RDA018": Rank.LENGTH,
    "RDI011": Rank.LENGTH,
    "RDI012": Rank.LENGTH,
    "RDT006": Rank.LENGTH,
    "RDT011": Rank.LENGTH,
}
"""Ranks of codes that differ from that of their family."""

NO_CAUSES = frozenset(
    {
        "RDA001",
        "RDA002",
        "RDA003",
        "RDA009",
        "RDA011",
        "RDA012",
        "RDA013",
        "RDA017",
        "RDA019",
        "RDA024",
        "RDG001",
        "RDO007",
    }
)
"""Contested choices, properties and small effects: they explain no curve."""


OF_RELEASE = frozenset({"RDA021", "RDA029", "RDG006", "RDG010", "RDG016"})
"""What a release computes by design of its code: of equal severity, a fault of this run comes first."""


def rank_of(code: str) -> Rank:
    """Return what a finding of a rule is about; of rules of other packages, the dynamics."""
    return RANKS.get(code, FAMILIES.get(code[:3], Rank.DYNAMICS))


AUDIT = {"RDA004": STAGES[:1], "RDG005": STAGES[1:3], "RDM004": STAGES[3:]}
"""Code of a rule that reports what no hypothesis explains, and the stages of the audit that it reports."""


def _always(cause: Finding, effect: Finding, context: Context) -> bool:
    return True


def _is_error(cause: Finding, effect: Finding, context: Context) -> bool:
    """The same logged advantages; what is less than an error is about others."""
    return effect.severity is Severity.ERROR and not _all_of_rows(effect, cause, context)


def _all_of_rows(cause: Finding, effect: Finding, context: Context) -> bool:
    """Tokens with another advantage than their row's are all that is off: every such row disagrees."""
    if cause.code != "RDA006" or effect.cause is not None or _unexplained(effect, context) != {"advantages"}:
        return False
    measures = cause.measures
    rows = sum(int(measures[name].value or 0) for name in ("rows", "dead_rows") if name in measures)
    return context.unexplained["advantages"].disagree == rows


def _unexplained(effect: Finding, context: Context) -> set[str]:
    return {name for name, tally in context.unexplained.items() if tally.stage in AUDIT[effect.code]}


def _of_hypothesis(cause: Finding, effect: Finding, context: Context) -> bool:
    """The hypothesis of the cause explains values of every quantity in question."""
    if cause.cause is None or effect.cause is not None:
        return False
    return _unexplained(effect, context) <= {*cause.cause.explains}


def _is_of_kl_metric(cause: Finding, effect: Finding, context: Context) -> bool:
    """Nothing but the KL metric disagrees."""
    metrics = () if context.trainer is None else context.trainer.log.kl
    return effect.cause is None and _unexplained(effect, context) <= {*metrics}


def _is_earlier(cause: Finding, effect: Finding) -> bool:
    """What does not say when it began may have begun at any time."""
    return cause.onset is None or effect.onset is None or cause.onset <= effect.onset


def _began_earlier(cause: Finding, effect: Finding, context: Context) -> bool:
    """The cause is proved and began no later, where both say when. A property follows from nothing."""
    return effect.severity > Severity.INFO and cause.verdict == "confirmed" and _is_earlier(cause, effect)


def _of_same_names(cause: Finding, effect: Finding, context: Context) -> bool:
    """The cause changes a metric of the identity that fails, or refutes an option in it."""
    if cause.code in AUDIT and cause.cause is None:
        names = _unexplained(cause, context)
    else:
        names = set() if cause.cause is None else {*cause.cause.explains}
    if cause.code == "RDI014":
        names = {refutation.option.rpartition(".")[2] for refutation in context.refuted}
    return not names.isdisjoint(effect.headline.split())


def _is_of_kl_options(cause: Finding, effect: Finding, context: Context) -> bool:
    """The log contradicts options of the KL alone, and follows from a KL that counts twice."""
    if cause.cause is None or effect.cause is not None or not context.refuted or context.trainer is None:
        return False
    of_kl = [context.trainer.parts.get(part, PartOptions()).off for part in (Part.KL_REWARD, Part.KL_LOSS)]
    return all(any(refutation.option in off for off in of_kl) for refutation in context.refuted)


def _is_bare(cause: Finding, effect: Finding, context: Context) -> bool:
    """No hypothesis explains what was found: rows that logged values prove to be shifted have a cause of their own."""
    return effect.cause is None


def _is_of_copies(cause: Finding, effect: Finding, context: Context) -> bool:
    """Equal responses with different rewards are all that speaks for other rows: a noisy judge gives them, too."""
    return "differing_copies" in effect.measures


def _is_not_of_copies(cause: Finding, effect: Finding, context: Context) -> bool:
    """The rewards of other rows are shown by more than equal responses."""
    return not _is_of_copies(effect, cause, context)


def _is_by_padding(cause: Finding, effect: Finding, context: Context) -> bool:
    """Log-probs that are moved by the padding of their row leave places that hold none."""
    return "by the padding of their row" in cause.headline and effect.cause is None


def _is_negative_kl(cause: Finding, effect: Finding, context: Context) -> bool:
    """Nothing is odd about the log but the sign of a KL, which an estimator that the log follows from gives."""
    odd = {name: effect.measures[name].value for name in ("negative_kl_steps", "nonfinite_steps", "impossible_steps")}
    return cause.cause is not None and bool(odd.pop("negative_kl_steps")) and not any(odd.values())


def _are_all_copies(cause: Finding, effect: Finding, context: Context) -> bool:
    """Every response that sampling does not repeat is a row that fills up the batch."""
    measures = effect.measures
    if "impossible_copies" not in measures or "rows_shown" not in cause.measures:
        return True
    elsewhere = measures["impossible_copies_in_other_groups"].value
    return not elsewhere and (cause.measures["rows_shown"].value or 0) >= (measures["impossible_copies"].value or 0)


def _cuts_nearly_all(cause: Finding, effect: Finding, context: Context) -> bool:
    """Nearly every response is cut off, so that all of a group may have the reward of one that is."""
    last = cause.measures.get("truncated_last")
    is_most = last is None or (last.value or 0.0) >= _NEARLY_ALL
    return is_most and _began_earlier(cause, effect, context)


_NEARLY_ALL = 0.9


def _cuts_throughout(cause: Finding, effect: Finding, context: Context) -> bool:
    """Nearly every response of the run is cut off: that they all have one reward is no fault of the function."""
    return _is_cut_throughout(cause) and cause.severity > Severity.INFO and _began_earlier(cause, effect, context)


def _is_cut_throughout(finding: Finding) -> bool:
    share = finding.measures.get("truncated_share")
    return share is not None and (share.value or 0.0) >= _NEARLY_ALL


def _began_before_cuts(cause: Finding, effect: Finding, context: Context) -> bool:
    """The cause began earlier than the responses were cut off, which they were not throughout."""
    return not _is_cut_throughout(effect) and _began_earlier(cause, effect, context)


def _fell_with_length(cause: Finding, effect: Finding, context: Context) -> bool:
    """The length fell for good, and the other within two steps of that: what was cut short cannot be right."""
    if not cause.headline.startswith("the response length") or cause.onset is None or effect.onset is None:
        return False
    return cause.severity > Severity.INFO and abs(effect.onset - cause.onset) <= _NEAR


def _gradient_rose_before(cause: Finding, effect: Finding, context: Context) -> bool:
    """The gradient norm rose for good before the other began: the policy left the region in which it trained."""
    if not cause.headline.startswith("the gradient norm") or cause.onset is None or effect.onset is None:
        return False
    return _began_earlier(cause, effect, context) and cause.severity > Severity.INFO and cause.onset < effect.onset


def _is_cut(finding: Finding) -> bool:
    """Responses became short because they are cut off: the limit is another, which is no change of what is sampled."""
    cut = finding.measures.get("truncated_last")
    return cut is not None and (cut.value or 0.0) >= _NEARLY_ALL


def _is_cut_at_jump(cause: Finding, effect: Finding, context: Context) -> bool:
    """The length fell to another limit as the entropy jumped: that of the first tokens of a response is another."""
    return _is_cut(cause) and _fell_with_length(cause, effect, context)


def _of_what_is_sampled(cause: Finding, effect: Finding, context: Context) -> bool:
    """The entropy jumped within one step as the other began, and no other limit made both."""
    if cause.onset is None or effect.onset is None or _is_cut(effect):
        return False
    return effect.severity > Severity.INFO and abs(effect.onset - cause.onset) <= _NEAR


def _left_its_level(cause: Finding, effect: Finding, context: Context) -> bool:
    """The entropy collapsed or exploded before: one that rises by a sixth makes no reward constant."""
    is_slow = cause.headline.startswith("the entropy rose")
    return not is_slow and _began_earlier(cause, effect, context)


def _began_before_jump(cause: Finding, effect: Finding, context: Context) -> bool:
    """The entropy went earlier than it jumped: not within that one step."""
    return _began_earlier(cause, effect, context) and not _of_what_is_sampled(effect, cause, context)


def _began_before_length(cause: Finding, effect: Finding, context: Context) -> bool:
    """The cause began earlier, and not together with a fall of the length, which would be its cause."""
    return _began_earlier(cause, effect, context) and not _fell_with_length(effect, cause, context)


_NEAR = 2
"""Steps by which the onset of a noisy fall may be off."""


def _is_of_lag(cause: Finding, effect: Finding, context: Context) -> bool:
    """What is found goes by the stamps alone: no step from which on the gap is larger."""
    return effect.measures["onset_step"].value is None


def _is_of_a_place(cause: Finding, effect: Finding, context: Context) -> bool:
    """A step of the one is among the worst of the other."""
    return not {example.step for example in cause.examples}.isdisjoint(example.step for example in effect.examples)


ANY = "any rule"

_DYNAMICS = (
    "RDT001",
    "RDT003",
    "RDT004",
    "RDT005",
    "RDT008",
    "RDG002",
    "RDG003",
    "RDI012",
    "RDT006",
    "RDT011",
    "RDT013",
)
"""What an input or an option does to the curves of a run."""

SAME_ROWS = frozenset({("RDI015", "RDI009")})
"""Causes that say where the very rows come from that another rule found, and count whatever their weight."""

FOLLOWS: tuple[tuple[str, tuple[str, ...], Condition], ...] = (
    (ANY, tuple(AUDIT), _of_hypothesis),
    (ANY, ("RDM008",), _of_same_names),
    ("RDT009", ("RDT002", *_DYNAMICS), _began_earlier),
    ("RDT012", ("RDT002", *_DYNAMICS), _began_earlier),
    ("RDT017", ("RDT001", "RDT002", "RDT005", "RDT013", "RDT018"), _began_earlier),
    ("RDT018", ("RDT001", "RDT005"), _began_earlier),
    ("RDT020", ("RDT017",), _always),
    ("RDT020", ("RDT001", "RDT002", "RDT005", "RDT013", "RDT018", "RDT021"), _began_earlier),
    ("RDT021", ("RDT018",), _always),
    ("RDT021", ("RDT001", "RDT005"), _began_earlier),
    ("RDT019", ("RDT001", "RDT003", "RDT006", "RDT011", "RDT013", "RDI012", "RDG003"), _began_earlier),
    ("RDO003", _DYNAMICS, _began_earlier),
    ("RDO012", _DYNAMICS, _began_earlier),
    ("RDO014", _DYNAMICS, _began_earlier),
    ("RDI012", ("RDT002", "RDT001", "RDG002", "RDG003"), _cuts_throughout),
    ("RDT002", ("RDT001", "RDT005", "RDA011", "RDG002", "RDG003"), _began_earlier),
    (
        "RDT004",
        ("RDT002", "RDT003", "RDT005", "RDT001", "RDT008", "RDI012", "RDT006", "RDT011", "RDT013", "RDT014"),
        _began_earlier,
    ),
    (
        "RDT003",
        ("RDT002", "RDT005", "RDT001", "RDT008", "RDG003", "RDI012", "RDT006", "RDT011", "RDT013"),
        _left_its_level,
    ),
    ("RDT004", ("RDM003",), _began_earlier),
    ("RDT003", ("RDT014",), _began_before_jump),
    ("RDT013", ("RDT005",), _fell_with_length),
    ("RDT013", ("RDT014",), _is_cut_at_jump),
    ("RDT013", ("RDT001", "RDT003", "RDT004", "RDT005"), _gradient_rose_before),
    ("RDT014", ("RDT001", "RDT003", "RDT005", "RDT006", "RDT013", "RDI012"), _of_what_is_sampled),
    ("RDT005", ("RDI012",), _began_before_cuts),
    ("RDT005", ("RDT013",), _began_before_length),
    ("RDT001", ("RDT005", "RDA011", "RDG002", "RDG003"), _began_earlier),
    ("RDT006", ("RDI012",), _began_earlier),
    ("RDT006", ("RDT001", "RDG003"), _cuts_nearly_all),
    ("RDT003", ("RDA017",), _always),
    ("RDT008", ("RDG014",), _is_of_a_place),
    ("RDO016", ("RDG014",), _is_of_a_place),
    ("RDA027", ("RDA004", "RDA006"), _always),
    ("RDA006", ("RDA004",), _all_of_rows),
    ("RDI007", ("RDG005", "RDM004", "RDA001"), _always),
    ("RDI006", ("RDG005", "RDM004", "RDA001"), _always),
    ("RDI009", ("RDI004",), _is_bare),
    ("RDI009", ("RDA015",), _always),
    ("RDI015", ("RDI009",), _are_all_copies),
    ("RDA015", ("RDI004",), _is_of_copies),
    ("RDI004", ("RDA015",), _is_not_of_copies),
    ("RDA004", ("RDA003", "RDA006", "RDA007"), _is_error),
    ("RDM007", ("RDM001",), _always),
    ("RDG009", ("RDI014",), _is_of_kl_options),
    ("RDG007", ("RDM003",), _is_negative_kl),
    ("RDM001", ("RDG005",), _is_of_kl_metric),
    ("RDI008", ("RDO001", "RDO006", "RDM003", "RDG005", "RDM001"), _always),
    ("RDI008", ("RDI005", "RDI006"), _is_by_padding),
    ("RDO006", ("RDO003", "RDO015"), _always),
    ("RDA020", ("RDA011",), _always),
    ("RDA022", ("RDA002", "RDA011"), _always),
    ("RDG015", ("RDG011",), _always),
    ("RDI017", ("RDO002",), _is_of_lag),
    ("RDO003", ("RDO002", "RDO001", "RDG016"), _always),
    ("RDO004", ("RDO001",), _always),
    ("RDO008", ("RDO001",), _always),
    ("RDO011", ("RDO001",), _always),
    ("RDO009", ("RDO002", "RDO001"), _always),
    ("RDO010", ("RDO002", "RDO001"), _always),
    ("RDO013", ("RDO001", "RDO011"), _always),
    ("RDO014", ("RDO002", "RDO001", "RDO012"), _always),
    ("RDO002", ("RDO001",), _always),
    ("RDI005", ("RDO001",), _always),
)
"""Code of a cause, codes of what may follow from it, and when: of several causes the first here is named."""


def _causes_of(effect: Finding, findings: Sequence[Finding], context: Context) -> Iterator[Finding]:
    """Yield the possible causes of a finding, whatever their weight. Information is the cause of information alone."""
    for code, follows, holds in FOLLOWS:
        for cause in findings if effect.code in follows else ():
            counts = effect.severity is Severity.INFO or cause.severity > Severity.INFO
            if code in (cause.code, ANY) and cause.code != effect.code and counts and holds(cause, effect, context):
                yield cause


def _follows_from(effect: Finding, causes: Iterable[Finding]) -> str | None:
    """Code of the cause of a finding; None if it has none.

    A lighter cause counts only if it is proved, or if a hypothesis gives the logged values: a guess hides no fault.
    """
    is_info = effect.severity is Severity.INFO

    def counts(cause: Finding) -> bool:
        is_reproduced = cause.cause is not None and cause.severity >= effect.severity
        is_same = (cause.code, effect.code) in SAME_ROWS and "rows_shown" in cause.measures
        return is_info or cause.weight >= effect.weight or cause.verdict == "confirmed" or is_reproduced or is_same

    proved = (cause for cause in causes if counts(cause))
    return next((cause.code for cause in proved), None)


def _depths(findings: Sequence[Finding]) -> Mapping[str, int]:
    """Return how many ranks of proved faults explain each finding, by its code.

    One that began before every fault of a lower rank is explained by none of them.
    """
    depths: dict[str, int] = {}
    for finding in sorted(findings, key=lambda finding: rank_of(finding.code)):
        before = [
            depths[cause.code] + 1
            for cause in findings
            if cause.code in depths
            and rank_of(cause.code) < rank_of(finding.code)
            and cause.code not in NO_CAUSES
            and cause.severity > Severity.INFO
            and cause.verdict == "confirmed"
            and _is_earlier(cause, finding)
        ]
        depths[finding.code] = max(before, default=0)
    return depths


def by_cause(findings: Sequence[Finding], context: Context) -> tuple[Finding, ...]:
    """Return the findings in the order of explanations, each followed by what follows from it; information is last."""
    findings = sorted(findings, key=lambda finding: ([-each for each in finding.weight], finding.code))
    depths = _depths(findings)
    causes = {finding.code: list(_causes_of(finding, findings, context)) for finding in findings}
    linked = [replace(finding, follows_from=_follows_from(finding, causes[finding.code])) for finding in findings]
    # A proved cause counts for the heaviest of what it explains.
    heaviest = {finding.code: finding.weight for finding in findings}
    for finding in findings:
        for cause in causes[finding.code]:
            if cause.verdict == "confirmed":
                heaviest[cause.code] = max(heaviest[cause.code], finding.weight)

    def place(finding: Finding) -> tuple[object, ...]:
        """Sort key: of equal weight what explains others is first, then what logged values name, and last the audit's.

        Of several that say when they began the earliest is first. Information goes by its rank, and what says when it
        began before a state of the run: a truncated share hides no ratio that is not 1.
        """
        is_info = finding.severity is Severity.INFO
        lighter = heaviest[finding.code] == finding.weight
        is_bare = finding.cause is None
        audited = finding.code in AUDIT and is_bare
        onset = inf if finding.onset is None else finding.onset
        severity, is_proved = heaviest[finding.code]
        weight = -severity, finding.code in OF_RELEASE and finding.cause is None, -is_proved
        state = (rank_of(finding.code), onset == inf) if is_info else ()
        return is_info, *state, depths[finding.code], weight, lighter, is_bare, audited, onset, finding.code

    linked.sort(key=place)

    def below(code: str | None) -> Iterator[Finding]:
        for finding in linked:
            if finding.follows_from == code:
                yield finding
                yield from below(finding.code)

    return tuple(below(None))
