"""Terms: what words mean in this program; docs/rules.md has them."""

from collections.abc import Mapping

from rolloutdoctor.commands.explain.layout import hanging

TERMS = {
    "advantage": (
        "what multiplies a token's log-prob in the policy gradient: the score less the baseline, divided by a "
        "scale where one is set"
    ),
    "agree, disagree": "a logged and a recomputed value are within their rounding radius, or not",
    "audit": "the comparison of every logged value with what the rows and the recorded options give",
    "baseline": "what is subtracted from a score: the mean of the group, of the other rows, or a critic's value",
    "clean": "the rule was tested, its fault would have been visible, and it was not there",
    "completion, response": "what the policy sampled for a prompt; one row of a run file",
    "confirmed, exposed": (
        "confirmed: a logged value proves that it happened; exposed: the data and the options would make it "
        "happen, and nothing logged proves or excludes it"
    ),
    "fix": "a named edit of what the trainer computes, to compare with and without",
    "fully masked response": "a response without a trained token",
    "group": "the responses to one prompt in one step",
    "gradient, log-prob gradient": (
        "the derivative of the loss with respect to the log-probs of the sampled tokens; not of the parameters"
    ),
    "importance ratio": "exp(policy log-prob - old log-prob) of a token, or a mean of it over a response",
    "k1, k2, k3": "estimators of the KL from log-prob differences d: -d, d²/2, exp(d) - 1 - d",
    "kappa": (
        "the gradient without the fix, projected on the gradient with it, as a multiple of the latter: <g, g_fix>"
        " / <g_fix, g_fix>"
    ),
    "not applicable": "the recorded options or the rows rule the fault out",
    "objective": (
        "all that a trainer computes from a step: baselines, scales, surrogate, clip, KL, aggregation, masks"
    ),
    "on-policy": "the log-probs at the loss are those of the policy that sampled",
    "onset": "the step from which a finding holds",
    "radius, rounding bound": "how far rounding may put a logged and a recomputed value apart, derived for each",
    "reference": "the model that the KL is measured from",
    "reproduced": "a logged value is within its radius of the recomputed one",
    "rollouts": "the sampled responses with rewards and log-probs, beside the trainer's log of numbers",
    "sampler, trainer": "the engine that draws tokens (vLLM, SGLang, generate), and the code that computes the loss",
    "share of the log-prob gradient": "sum of the absolute derivatives of some tokens, divided by that of all tokens",
    "skipped": "the rule could not be tested; it says what would have to be recorded",
    "train-inference mismatch, sampler gap": (
        "the difference between the log-probs of trainer and sampler for the same tokens"
    ),
    "zero-variance group": "a group whose rewards are all equal: max - min = 0",
}
"""Term, with other words for it after commas, to its meaning here."""


def lines() -> Mapping[str, str]:
    """Return term to meaning."""
    return TERMS


def of(name: str) -> str | None:
    """Return the entry of a term, or of another word for it, in any case; None if there is none."""
    return next((term for term in TERMS if name.lower() in (term.lower(), *term.lower().split(", "))), None)


def words() -> list[str]:
    """Return every term and every other word for one."""
    return [word for term in TERMS for word in term.split(", ")]


def is_known(name: str) -> bool:
    """Tell whether this is a term, or another word for one."""
    return of(name) is not None


def listing(*, verbose: bool = False) -> str:
    """List the terms."""
    return "\n".join(hanging(f"{term:<29} ", meaning, 30) for term, meaning in TERMS.items())


def page(name: str, *, verbose: bool = False) -> str:
    """Explain a term."""
    term = of(name) or name
    return "\n".join([f"{term} (term)", "", hanging("  ", f"{TERMS[term]}.", 2)])


def body(name: str) -> dict[str, object]:
    """Return a term for programs."""
    term = of(name) or name
    return {"name": term, "meaning": TERMS[term]}


def bodies() -> list[dict[str, object]]:
    """Return every term for programs."""
    return [body(term) for term in TERMS]
