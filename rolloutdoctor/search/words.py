"""An objective in words, part by part, and which data would distinguish two of them."""

from collections.abc import Mapping, Sequence

from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import AdvantageRule, Objective, RowSet

SEPARATORS = {
    "formula": "groups whose rewards are neither all equal nor 0 and 1 alone",
    "epsilon": "a group with a smaller standard deviation of rewards",
    "std": "a group whose rewards differ",
    "votes": "a group with a fully masked response",
    "alone": "a group of one response with a reward other than 0",
    "groups": "a step of several groups of one size",
    "unequal": "groups of different sizes",
    "ids": "group ids that are one number and two texts, such as 7 and 007",
    "whitening": "responses of different lengths, or a mean advantage other than 0",
    "time": "responses of several tokens",
    "tokens": "token rewards that differ from the reward of the row",
    "penalty": "a token whose KL is larger",
    "kl": "a token whose log-ratio to the reference is larger",
    "average": "responses of different lengths, in several micro-batches",
    "aggregation": "responses of different lengths, in several micro-batches",
    "surrogate": "a second inner step",
    "scale": "several micro-batches or ranks",
    "coefficient": "a step with a larger KL",
}
"""Axis to the data that would distinguish two values of it."""


def parts_of(objective: Objective) -> dict[str, str]:
    """Return the parts of how advantages are computed: axis to words; empty words say the usual thing."""
    rule = objective.advantage
    spec = rule.spec
    parts = {"formula": _formula(rule)}
    scaled = (spec.divides and rule.scale != "none") or rule.normalised
    if scaled:
        inside = ", inside the root" if rule.epsilon_in_root else ""
        parts["epsilon"] = f"epsilon {rule.epsilon:g}{inside}"
        parts["std"] = f"std with ddof {0 if rule.biased_std else 1}"
    if spec.has_groups:
        parts["groups"] = "groups by group_id"
    if RowSet.REJECTED in objective.baseline_rows.without:
        parts["votes"] = "only unmasked rows count in the baseline"
    elif spec.has_groups:
        parts["votes"] = "all rows count in the baseline"
    if spec.has_groups and spec.axis is Axis.ROWS and spec.baseline == "mean":
        alone = {"raw": "a single row keeps its raw reward", "zero": "a single row gets 0"}
        parts["alone"] = alone[rule.singleton]
    if rule.whitened:
        floor = ", the variance 1e-8 at least" if rule.variance_floor else ""
        parts["whitening"] = f"whitened over the trained tokens{floor}"
    if rule.bounds is not None:
        parts["bounds"] = f"clamped to {rule.bounds[0]:g} and {rule.bounds[1]:g}"
    if rule.batch_if_unequal:
        parts["unequal"] = "the batch is one group where groups differ in size"
    if rule.numeric_ids == "always":
        parts["ids"] = "group ids compared as numbers"
    if spec.axis is not Axis.ROWS:
        parts["time"] = f"gamma {rule.gamma:g}" + (f", lambda {rule.lam:g}" if "values" in spec.columns else "")
    term = objective.kl_reward
    if term is not None and term.coef and rule.sums_tokens | (spec.axis is Axis.ALL_TOKENS):
        clamp = f" clamped to {term.clamp:g}" if term.clamp else ""
        parts["penalty"] = f"{term.coef:.6g} {term.estimator}{clamp} of {whose(term.log_probs)} in the reward"
    return parts


_USUAL = ("all rows count in the baseline", "a single row keeps its raw reward", "a single row gets 0")


def sentence(parts: Mapping[str, str]) -> str:
    """Return the parts as one clause."""
    unusual = {axis: words for axis, words in parts.items() if words not in _USUAL and axis not in ("unequal", "ids")}
    formula, epsilon = unusual.pop("formula", ""), unusual.pop("epsilon", "")
    if epsilon:
        number = epsilon.removeprefix("epsilon ").removesuffix(", inside the root")
        formula = formula.replace("{eps}", number)
        formula = _in_root(formula, number) if epsilon.endswith("root") else formula
    words = [formula, *unusual.values()] if formula else list(unusual.values())
    return ", ".join(words)


def apart(parts: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the axes on which two configurations differ."""
    return [axis for axis in {**parts, **other} if parts.get(axis, "") != other.get(axis, "")]


def difference(parts: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return in words what the second configuration has that the first does not."""
    axes = apart(parts, other)
    if "formula" in axes:
        return sentence(other)
    return ", ".join(other.get(axis, "") or f"not {parts[axis]}" for axis in axes)


def separators(axes: Sequence[str]) -> str:
    """Return the data that would tell configurations apart that differ on some axes."""
    return "; ".join(dict.fromkeys(SEPARATORS[axis] for axis in axes if axis in SEPARATORS))


def _formula(rule: AdvantageRule) -> str:
    spec, score = rule.spec, rule.spec.words
    if spec.divides and rule.scale != "none" and spec.normalised_over is None:
        whose_std = "batch " if rule.scale == "batch" else "their " if spec.of_others else ""
        return f"({score}) / ({whose_std}std + {{eps}})"
    if rule.normalised:
        return f"({score}), normalised over the batch with epsilon {{eps}}"
    return score


def _in_root(formula: str, number: str) -> str:
    for std in ("batch std", "std"):
        formula = formula.replace(f"({std} + {number})", f"sqrt({std}^2 + {number})")
    return formula


def whose(name: str) -> str:
    """Return whose log-probs a column holds."""
    return {"policy_log_probs": "policy", "old_log_probs": "old policy", "rollout_log_probs": "sampler"}[name]
