"""RDI006: tokens that the model did not write are trained on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from rolloutdoctor.objective.required_columns import LOGGED_COLUMNS, loss_columns
from rolloutdoctor.ops.tally import Sums, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing, Rule, counted, percent

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

LOWEST = -12.0
"""Log-prob below which three tokens in a row are no sample: one run in 10^15."""


UNLIKELY = -1.0
"""Mean log-prob of the trainer below which a run of tokens was not certain to the sampler."""

SIGNS = {
    "beyond": "of padding past the completion",
    "unsampled": "without a log-prob of the sampler",
    "forced": "in runs below -12",
    "zero": "in runs of sampler's log-probs of 0.0",
    "after_end": "after the end",
    "common": "common to all responses of the group",
}


@dataclass(frozen=True)
class LeakTally(Sums):
    """What `mask-leak` adds up over training steps.

    Attributes:
        tokens: trained tokens.
        told_tokens: those in rows for which the sampler gave log-probs.
        unsampled: of these, tokens without one.
        appended: of `unsampled`, last tokens of rows with no other.
        judged_tokens: trained tokens with a log-prob.
        forced: of these, tokens in runs that no model writes.
        zero: tokens in runs of three or more with a log-prob of exactly 0.0 from the sampler, and low ones from the
            trainer.
        zero_alone: tokens of shorter ones.
        beyond_rows: rows of which a column says how many tokens are trained past the completion.
        beyond: these tokens.
        losses: logged losses that were compared.
        losses_agree: those that follow from the rows.
        single_turn: rows of one turn in steps whose end-of-sequence token is known, where no sampler gave log-probs.
        after_end: their trained tokens after it.
        after_end_rows: their rows with such tokens.
        compared: rows of steps whose responses were compared token by token.
        common: their trained tokens that all responses of a group have at one place beyond chance.
        common_rows: rows with such tokens.
        leaked: tokens with one of the signs.
        rows: rows with a leaked token.
        gradient: sum of the absolute gradient.
        leaked_gradient: the leaked tokens' part of it, at equal weight of the tokens of a row.
    """

    tokens: int = 0
    told_tokens: int = 0
    unsampled: int = 0
    appended: int = 0
    judged_tokens: int = 0
    forced: int = 0
    zero: int = 0
    zero_alone: int = 0
    beyond_rows: int = 0
    beyond: int = 0
    losses: int = 0
    losses_agree: int = 0
    single_turn: int = 0
    after_end: int = 0
    after_end_rows: int = 0
    compared: int = 0
    common: int = 0
    common_rows: int = 0
    leaked: int = 0
    rows: int = 0
    gradient: float = 0.0
    leaked_gradient: float = 0.0


@dataclass(frozen=True)
class MaskLeak(Rule[LeakTally]):
    """Tokens of tools, templates or padding are in the loss.

    ## What it does
    Looks for trained tokens (`response_mask` 1) that the model cannot have sampled.

    ## Why it matters
    The policy gradient holds for tokens that the policy chose. Tool output, prompt templates and padding in the loss
    teach the model to write them, with the sign of whatever the response earned, and they enter the KL and every token
    mean.

    ## How it is measured
    Six signs, none of which asks what a token says. `trained_beyond`, which a recorder writes, counts trained tokens
    past the completion, as where the mask of the loss was forgotten: an error. The sampler gave no log-prob (NaN) for a
    trained token, while it gave one for others of the row: an error, but information where only the last token of rows
    lacks one, which a trainer appended. Three or more trained tokens in a row have a log-prob below -12, the trainer's,
    and the sampler's where there is one: a warning; so are three or more with a log-prob of exactly 0.0 from the
    sampler and a mean below -1 from the trainer, inside of a row, where hardly any stand alone as placeholders do
    (`RDI005`). Where no log-probs of the sampler were recorded, trained tokens after the end of a response with a
    single turn: a warning, from 1 % of the trained tokens on. The end is the one id that ends at least 90 % of the
    stopped responses of a step, eight or more; rows with masked tokens between trained ones have several turns and are
    left out, and the model's own turns after an end look the same.

    The fourth compares the responses of a group, where ids were recorded: trained tokens that all of them have at one
    place although the log-probs, the sampler's if there are any, say that independent draws would not agree: a warning.
    Only tokens below -4 nats count, so that a prefix of which the sampler is confident, low-entropy text and a policy
    that has collapsed do not. The evidence is a product over the places whose mean is 1 for independent draws, and it
    has to exceed exp(40). Places count from where the responses part, and not in a group whose responses share a prefix
    of more than 30 nats: that is a seed (`RDI009`). The share of the gradient takes the tokens of a row as equal.

    Rows end with the completion, so that trained padding past it is cut off. Clean is said where `trained_beyond` is
    recorded, or every logged loss follows from the rows: with more tokens in it none would. Where a loss disagrees and
    nothing explains it the rule is skipped.

    ## What to do
    Mask these tokens. If observations are trained on purpose, there is nothing to mend.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> nan = float("nan")
    >>> batch = toy_batch([[1, 0]], rollout=[[-1, nan, nan, -1], [-1, -1, -1, -1]])
    >>> diagnose_one("RDI006", batch, trainer=None)
    'RDI006 error confirmed: leaked_share 0.25'
    """

    code = "RDI006"
    name = "mask-leak"
    references = (
        "https://github.com/THUDM/slime/issues/1370",
        "https://github.com/volcengine/verl/issues/3805",
        "https://github.com/huggingface/trl/issues/5832",
    )
    tally = LeakTally
    needs_objective = False
    splits = ("train",)
    stages = ("loss",)

    end_share: float = 0.9
    fewest_ends: int = 8
    warn_above: float = 0.01
    most_alone: float = 0.1
    """Placeholders for log-probs that are lost stand alone, and tokens of tools in runs."""

    def columns(self, context: Context) -> frozenset[str]:
        """What is trained on."""
        return frozenset({"response_mask"})

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Log-probs of sampler and trainer, ids, groups, and what the loss is made of; else finish reasons, too."""
        found = frozenset({"rollout_log_probs", "old_log_probs", "response_ids", "group_id", "trained_beyond"})
        if context.objective is not None:
            found |= loss_columns(context.objective) | LOGGED_COLUMNS
        return found if "rollout_log_probs" in context.columns else found | {"status"}

    def unavailable_reason(self, context: Context) -> Missing | None:
        """None of the signs can show."""
        known, log_probs = context.columns, {"rollout_log_probs", "old_log_probs", "policy_log_probs"}
        if known & {"trained_beyond", *log_probs} or known >= {"response_ids", "status"}:
            return None
        name = "rollout_log_probs"
        return Missing(
            "nothing says which tokens were sampled: no log-probs, and no response_ids with status",
            context.recording.get(name, context.recording.get("*", f"record {name}")),
        )

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Count the trained tokens of each row that were not sampled, by sign."""
        from rolloutdoctor.evaluation.common_tokens import unlikely_tokens
        from rolloutdoctor.ops.elementwise import outside
        from rolloutdoctor.ops.segments import pick

        trained_T, none_n = block.trained_T, block.trained_n * 0
        found = {"trained": block.trained_n, **unlikely_tokens(block)}
        given_T = None
        if block.is_logged("rollout_log_probs"):
            given_T = block.column("rollout_log_probs")
            found |= {"told": block.trained_n, "bare": none_n, "bare_last": none_n}
            # One look at the extremes settles it for nearly every block.
            if not all(map(isfinite, block.extremes("rollout_log_probs"))):
                bare_T = trained_T & given_T.isnan()
                found["told"] = block.row_sum(trained_T & given_T.isfinite())
                found["bare"] = block.row_sum(bare_T)
                filled_n = block.runs.lengths > 0
                last_n = none_n.clone()
                last_n[filled_n] = bare_T[block.runs.offsets[1:][filled_n] - 1].double()
                found["bare_last"] = last_n
        if block.of_step("trained_beyond") is not None:
            beyond_n = block.row_column("trained_beyond").double()
            found |= {"beyond_rows": (beyond_n >= 0).double(), "beyond": beyond_n.clamp(min=0)}
        if given_T is not None and block.has("old_log_probs"):
            found |= _zeros(block, given_T)
        if block.has("old_log_probs"):
            value_T = block.column("old_log_probs")
            low, high = block.extremes("old_log_probs")
            found |= {"judged": block.trained_n, "forced": none_n}
            if not (low >= LOWEST and isfinite(high)):
                if not (isfinite(low) and isfinite(high)):
                    found["judged"] = block.row_sum(trained_T & value_T.isfinite())
                places = outside(value_T, LOWEST, inf)
                places = block.runs.offsets[:0] if places is None else places
                is_low = pick(trained_T, places)
                if given_T is not None:
                    # What the sampler found likely it may have sampled: the two disagree, which is another matter.
                    is_low &= ~(pick(given_T, places) >= LOWEST)
                found["forced"] = block.runs.count(_in_runs(places[is_low], block))
        if block.is_logged("response_ids") and given_T is None:
            from rolloutdoctor.evaluation.response_ends import response_ends

            found |= {name: value for name, value in response_ends(block).items() if name in ("last", "gap")}
        return found

    def _leaked(self, step: "StepView") -> "dict[str, Tensor]":
        """Leaked tokens of each row, by sign, ``[N]`` float64 each."""
        return step.cached(self.code, lambda: self._found(step))

    def _found(self, step: "StepView") -> "dict[str, Tensor]":
        from rolloutdoctor.evaluation.common_tokens import common_tokens

        row = step.token_measures[self.code]
        found = {}
        common_N = common_tokens(step.batch, row)
        if common_N is not None:
            found["common"] = common_N.to(step.batch.device)
        if "told" in row:
            found["unsampled"] = row["bare"] * (row["told"] > 0)
        for name in ("forced", "zero", "beyond"):
            if name in row:
                found[name] = row[name]
        if "last" in row:
            from rolloutdoctor.evaluation.response_ends import NONE, STOPPED, common_end, has_status, trained_after

            stopped_N = has_status(step.statuses, STOPPED, step.batch.device)
            end_N = common_end(row["last"], stopped_N, step.by_step, self.end_share, self.fewest_ends)
            if bool((end_N != NONE).any()):
                found["single_turn"] = ((end_N != NONE) & ~row["gap"]).double()
                found["after_end"] = trained_after(step.batch, end_N) * found["single_turn"]
        return found

    def measure_each(self, steps: "StepView") -> list[LeakTally]:
        """Count the tokens of each step."""
        import numpy as np

        from rolloutdoctor.evaluation.common_tokens import can_agree

        row, by_step = steps.token_measures.get(self.code), steps.by_step
        if not row:
            return steps.nothing(LeakTally)
        found, leaked_N, trained_N = self._leaked(steps), self._worst(steps), row["trained"]
        counts = {"tokens": trained_N, "leaked": leaked_N, "rows": leaked_N > 0, **found}
        counts |= {f"{name}_rows": found[name] > 0 for name in ("after_end", "common") if name in found}
        if "told" in row:
            counts["told_tokens"] = trained_N * (row["told"] > 0)
            counts["appended"] = (row["bare_last"] == 1) & (found["unsampled"] == 1)
        if "judged" in row:
            counts["judged_tokens"] = row["judged"]
        counts |= {name: row[name] for name in ("zero_alone", "beyond_rows") if name in row}
        fields: dict[str, NDArray[Any]] = {name: by_step.count(x_N) for name, x_N in counts.items()}
        if "common" in found:
            fields["compared"] = np.where(steps.groups_by_step.any(can_agree(steps.batch)), by_step.size, 0)
        gradient_N = None if steps.tokens is None else steps.tokens.grad_l1_N
        if gradient_N is not None:
            share_N = (leaked_N / trained_N.clamp(min=1)).clamp(max=1)
            fields |= {"gradient": by_step.sum(gradient_N), "leaked_gradient": by_step.sum(gradient_N * share_N)}
        losses = [[one for one in each.audit.values() if one.stage == "loss"] for each in steps.each]
        fields["losses"] = np.array([sum(one.compared for one in each) for each in losses])
        fields["losses_agree"] = np.array([sum(one.agree for one in each) for each in losses])
        return steps.tallies(LeakTally, **fields)

    def _worst(self, step: "StepView") -> "Tensor":
        """The most tokens of each row that one of the signs names: they may name the same ones."""
        found, leaked_N = self._leaked(step), step.token_measures[self.code]["trained"] * 0
        for name in SIGNS:
            if name in found:
                leaked_N = leaked_N.maximum(found[name])
        return leaked_N

    def examples(self, step: "StepView") -> Iterable[Example]:
        """Rows with the most such tokens."""
        if not step.token_measures.get(self.code):
            return ()
        found = self._leaked(step)

        def note(row: int) -> str:
            parts = [
                f"{int(found[name][row]):,} {said}"
                for name, said in SIGNS.items()
                if name in found and found[name][row] > 0
            ]
            return f"trained tokens: {', '.join(parts)}"

        return step.worst_rows(self._worst(step), note, KEEP_EXAMPLES)

    def measures(self, tally: LeakTally) -> Mapping[str, Measure]:
        """How many tokens, by sign, and their part of the gradient."""
        return {
            "leaked_share": Measure(ratio(tally.leaked, tally.tokens), "share"),
            "leaked_gradient_share": Measure(ratio(tally.leaked_gradient, tally.gradient), "share"),
            "unsampled_tokens": Measure(tally.unsampled if tally.told_tokens else None, "tokens"),
            "appended_tokens": Measure(tally.appended if tally.told_tokens else None, "tokens"),
            "forced_tokens": Measure(tally.forced if tally.judged_tokens else None, "tokens"),
            "tokens_after_end": Measure(tally.after_end if tally.single_turn else None, "tokens"),
            "common_tokens": Measure(tally.common if tally.compared else None, "tokens"),
            "zero_tokens": Measure(tally.zero if tally.told_tokens else None, "tokens"),
            "tokens_beyond": Measure(tally.beyond if tally.beyond_rows else None, "tokens"),
            "rows": Measure(tally.rows, "rows"),
        }

    def inconclusive_reason(self, run: LeakTally, context: Context) -> Missing | None:
        """No row in which a leak could show."""
        if self.judge(run, context) is not None:
            return None
        if run.told_tokens or run.judged_tokens or run.single_turn or run.beyond_rows:
            if run.beyond_rows or 0 < run.losses == run.losses_agree:
                return None
            return Missing(
                "nothing was found in the responses, and no column says whether padding past them is trained",
                context.recording.get("trained_beyond", "record trained_beyond, or the loss of every optimiser step"),
            )
        name = "rollout_log_probs"
        return Missing(
            "no trained token has a log-prob, and no single token ends the stopped responses",
            context.recording.get(name, context.recording.get("*", f"record {name}")),
        )

    def unseen_reason(self, run: LeakTally, context: Context) -> Missing | None:
        """A loss that nothing explains: a mask that one term of it forgot would look the same."""
        if not any(tally.stage in self.stages for tally in context.unexplained.values()):
            return None
        return Missing(
            "the logged loss does not follow from the rows, and no hypothesis explains it: a term of it may count "
            "padding, whose log-probs are not in the file",
            "see that every term of the loss is multiplied by the mask before it is added up",
        )

    def judge(self, run: LeakTally, context: Context) -> Judgement | None:
        """An error where the sampler says so, a warning where the log-probs or the end do."""
        after = run.after_end if run.after_end > self.warn_above * run.tokens else 0
        inside = run.unsampled - run.appended
        zero = run.zero if run.zero_alone <= self.most_alone * run.zero else 0
        if not any((run.beyond, run.unsampled, run.forced, zero, after, run.common)):
            return None
        parts, evidence = [], []
        if run.beyond:
            parts.append(f"{counted(run.beyond, 'token')} of padding past the completion")
            evidence.append("the recorded mask of the loss, which trained_beyond counts")
        if run.unsampled:
            parts.append(f"{counted(run.unsampled, 'token')} for which the sampler gave no log-prob")
            evidence.append("NaN in rollout_log_probs, in rows where other tokens have a value")
        if run.forced:
            parts.append(f"{counted(run.forced, 'token')} in runs of three and more below {LOWEST:g} nats")
            evidence.append("log-probs that no sample has three times in a row")
        if zero:
            parts.append(f"{counted(zero, 'token')} in runs to which the sampler gave a log-prob of exactly 0.0")
            evidence.append("the trainer's log-probs say that these tokens were not certain")
        if after:
            rows = counted(run.after_end_rows, "row")
            parts.append(f"{counted(after, 'token')} after the end of the response, in {rows}")
            evidence.append("one id ends nearly all stopped responses, and trained tokens follow it")
        if run.common:
            rows = counted(run.common_rows, "row")
            parts.append(f"{counted(run.common, 'token')} that all responses of a group have at one place, in {rows}")
            evidence.append("their log-probs rule out that independent draws agree on them")
        others = run.beyond, run.forced, zero, after, run.common
        appended_only = run.unsampled == run.appended > 0 and not any(others)
        severity = Severity.ERROR if inside or run.beyond else Severity.INFO if appended_only else Severity.WARNING
        gradient = ratio(run.leaked_gradient, run.gradient)
        share = percent(ratio(max(run.unsampled, *others), run.tokens))
        size = f"{share} of the trained tokens" + (
            "" if gradient is None else f" and {percent(gradient)} of |gradient|"
        )
        return Judgement(
            severity=severity,
            confirmed=bool(inside or run.beyond) or appended_only,
            headline=f"{parts[0]} in the loss: {size}",
            message=f"trained on although the model did not write them: {'; '.join(parts)}; {size}"
            + ("; each is the last token of its row, so the trainer appended it" if appended_only else ""),
            evidence="; ".join(evidence),
            advice="no action if the end-of-sequence token is appended on purpose; it is off-policy"
            if appended_only
            else "mask tokens of tools, templates and padding; if they are trained on purpose, leave them",
        )


def _zeros(block: "TokenBlock", given_T: "Tensor") -> "dict[str, Tensor]":
    """Count the trained tokens of each row to which the sampler alone gives a probability of 1, in runs and else."""
    import torch

    from rolloutdoctor.ops.segments import Runs

    none_n = block.trained_n * 0
    # NaN says nothing of the other values.
    if not len(block) or block.extremes("rollout_log_probs")[1] < 0:
        return {"zero": none_n, "zero_alone": none_n}
    places = ((given_T == 0) & block.trained_T).nonzero().squeeze(1)
    row = torch.searchsorted(block.runs.offsets, places, right=True)
    is_new = torch.ones(len(places), dtype=torch.bool, device=places.device)
    is_new[1:] = (places.diff() > 1) | (row.diff() > 0)
    zeros = Runs(torch.cat([is_new.nonzero().squeeze(1), torch.tensor([len(places)], device=places.device)]))
    low = zeros.total(block.column("old_log_probs")[places].double()) < UNLIKELY * zeros.lengths
    last = zeros.offsets[1:] - 1
    # What stands at the end of a row is a lost tail: after tokens of a tool the model goes on.
    is_odd = zeros.expand(low & (places[last] + 1 < block.runs.offsets[row[last]]))
    is_long = zeros.expand(zeros.lengths >= 3)
    return {
        "zero": block.runs.count(places[is_odd & is_long]),
        "zero_alone": block.runs.count(places[is_odd & ~is_long]),
    }


def _in_runs(places: "Tensor", block: "TokenBlock") -> "Tensor":
    """Those of some places, which are ascending, that are in runs of three or more of one row."""
    import torch

    if len(places) < 3:
        return places[:0]
    row = torch.searchsorted(block.runs.offsets, places, right=True)
    starts = (places[2:] - places[:-2] == 2) & (row[2:] == row[:-2])
    is_found = torch.zeros(len(places), dtype=torch.bool, device=places.device)
    for shift in range(3):
        is_found[shift : len(places) - 2 + shift] |= starts
    return places[is_found]
