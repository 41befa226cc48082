"""An entropy of whole responses that is too small to sample different ones, for `entropy-collapse`."""

from math import exp, log

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, number
from rolloutdoctor.rules.numbers_rule import levels, series
from rolloutdoctor.rules.series import thirds
from rolloutdoctor.rules.table_rule import Measured


def few_choices(run: Measured, context: Context, choices: float) -> Judgement | None:
    """Information on a policy that gives nearly one response to a prompt from the first step to the last.

    The entropies of the tokens of a response add up to that of the response. No entropy a token says it alone: 0.02
    nats of 700 tokens are 14 nats, as of a million equally likely responses.

    Args:
        run: the entropy a token, the mean length and the reward.
        context: says whose names these are; a loop of one's own may divide an entropy by its largest.
        choices: equally likely responses whose entropy is the limit.
    """
    import numpy as np

    if not context.likely_writers:
        return None
    of_response = series(run, "entropy") * series(run, "response_length")
    of_response = of_response[np.isfinite(of_response)]
    reward = levels(run, "reward")
    if len(of_response) < len(run.table) / 2 or (reward is not None and reward.change > 0 and reward.errors >= 4):
        return None
    first, last, _, _ = thirds(of_response)
    if max(first, last) >= log(choices):
        return None
    nats = float(of_response.mean())
    words = (
        f"the policy hardly samples: the entropy of a response is {number(nats)} nats from the first line on, as of "
        f"{exp(nats):.2g} equally likely responses to a prompt"
    )
    return Judgement(
        severity=Severity.INFO,
        confirmed=True,
        headline=words,
        message=f"{words}; most responses of a group are copies of one.",
        evidence="the logged entropy a token times the mean response length",
        advice="raise the sampling temperature, start from a less trained checkpoint, or use prompts that need longer "
        "responses",
        measures={"response_entropy": Measure(nats, "nats")},
        hinders=True,
    )
