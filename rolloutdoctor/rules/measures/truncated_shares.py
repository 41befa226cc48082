"""Shares of truncated responses that are large over a whole run, at the length limit or away from it."""

import polars as pl

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, percent
from rolloutdoctor.rules.series import thirds
from rolloutdoctor.rules.table_rule import Measured


def of_streak(
    run: Measured, steps: tuple[int, int], whole: str, least: float, free: str, source: str, advice: str
) -> Judgement:
    """Warn of steps in which nearly all was truncated.

    Args:
        run: how the responses of each step ended.
        steps: the first and the last of them.
        whole: how many of all steps have no finished response, in words.
        least: share of their responses.
        free: words on steps without reward variance.
        source: of the shares.
        advice: what to do.
    """
    share = _percent(run["truncated_share"] or 0.0)
    return Judgement(
        severity=Severity.WARNING,
        confirmed=True,
        headline=f"at least {percent(least)} of the responses are truncated from step {steps[0]} to {steps[1]} "
        f"({share} over the run)",
        message=f"{whole} have no finished response{free}; {share} of all responses are truncated",
        evidence=source,
        advice=advice,
    )


def _percent(share: float) -> str:
    """Say a share; of one that is 1 only as rounded, that some finished.

    >>> _percent(0.5), _percent(0.9999), _percent(1.0)
    ('50 %', 'nearly 100 %', '100 %')
    """
    words = percent(share)
    return f"nearly {words}" if share < 1 and words == percent(1.0) else words


def many_truncated(
    run: Measured, lines: str, least: float, source: str, advice: str, *, fewest: int, errors: float
) -> Judgement | None:
    """Information on a share that is `least` or more throughout, or came to be that.

    Args:
        run: how the responses of each step ended.
        lines: steps, in words.
        least: share that is told.
        source: of the shares.
        advice: what to do.
        fewest: steps of which thirds are compared.
        errors: standard errors between the first and the last third that are no noise.
    """
    share, shares = run["truncated_share"], run.table["share"].to_numpy()
    if share is None or not len(shares):
        return None
    first, last, change, error = thirds(shares) if len(shares) >= fewest else (share, share, 0.0, 0.0)
    grew = change > errors * error and change > 0
    if share < least and not (grew and last >= least):
        return None
    words = f"{_percent(share)} of the responses are truncated over {lines}"
    if grew:
        ends = f"in the last third of {lines}, and {percent(first)} in the first"
        words = f"{_percent(last)} of the responses are truncated {ends}"
    return Judgement(
        severity=Severity.INFO,
        confirmed=True,
        headline=words,
        message=f"{words}: {percent(share)} over all",
        evidence=source,
        advice=advice,
        measures={"share_first": Measure(first, "share"), "share_last": Measure(last, "share")} if grew else {},
        hinders=True,
    )


def without_end(run: Measured, context: Context, lines: str, least: float, *, is_below: bool) -> Judgement | None:
    """Information on a share that is `least` or more and of which the length limit is not the cause.

    Stop strings and turns of a conversation end a response as well; then nothing is wrong with it, but that the policy
    never learns to end.
    """
    share = run.table.select(pl.mean("counted").fill_null(0.0)).item()
    if share < least:
        return None
    is_by_end = context.writer is not None and context.writer.log.ends_by_token
    is_all = run.table.select((pl.col("counted") == 1).all()).item()
    if is_by_end:
        who = "no response ends" if is_all else f"{percent(share)} of the responses do not end"
        ending = " with an end-of-sequence token (counted as truncated)"
    else:
        who, ending = "every response counts" if is_all else f"{percent(share)} of the responses count", " as truncated"
    places = "in all " if is_all else "over "
    though = "all are shorter than the length limit" if is_below else "lengths differ"
    words = f"{who}{ending} {places}{lines}, although {though}"
    return Judgement(
        severity=Severity.INFO,
        confirmed=True,
        headline=words,
        message=f"{words}: a stop string, the end of a turn or another limit may have ended them",
        evidence="the logged share of truncated responses, and the logged lengths",
        advice="check the end-of-sequence token of the tokenizer, the stop strings of the sampler and the limit of a "
        "turn; where truncated responses are masked, none of these trains the policy",
        measures={"counted_share": Measure(share, "share")},
        hinders=True,
    )


def never_ended(run: Measured, lines: str) -> Judgement | None:
    """Information on responses of which none has a single end-of-sequence token, in any line; see `logged_ends`."""
    if not run.table.select((pl.col("ends") == 0).fill_null(value=False).all()).item():
        return None
    words = f"no response of {lines} has an end-of-sequence token"
    return Judgement(
        severity=Severity.INFO,
        confirmed=True,
        headline=words,
        message=f"{words}: every one is cut at the length limit or at a stop token of another name",
        evidence="the logged number of end-of-sequence tokens, of the main process",
        advice="raise the response length limit, and check that the tokenizer's end-of-sequence token is the one that "
        "the model was trained to end with: a chat model may have its own",
        measures={"counted_share": Measure(1.0, "share")},
        hinders=True,
    )
