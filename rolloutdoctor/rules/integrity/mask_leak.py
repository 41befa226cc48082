"""RDI006: tokens that the model did not write are trained on."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from rolloutdoctor.objective.required_columns import LOGGED_COLUMNS, loss_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_sums

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

LOWEST = -12.0
"""Log-prob below which three tokens in a row are no sample: one run in 10^15."""


UNLIKELY = -1.0
"""Mean log-prob of the trainer below which a run of tokens was not certain to the sampler."""


class _Sign(NamedTuple):
    """Sign that the model cannot have sampled a token: words for a row, for the run, and what shows it."""

    of_row: str
    of_run: str
    evidence: str
    counts_rows: bool = False


SIGNS = {
    "beyond": _Sign(
        "of padding past the completion",
        "of padding past the completion",
        "the recorded mask of the loss, which trained_beyond counts",
    ),
    "unsampled": _Sign(
        "without a log-prob of the sampler",
        "without a sampler log-prob",
        "NaN in rollout_log_probs, in rows where other tokens have a value",
    ),
    "forced": _Sign(
        "in runs below -12",
        f"in runs of three and more below {LOWEST:g} nats",
        "log-probs that no sample has three times in a row",
    ),
    "zero": _Sign(
        "in runs of sampler's log-probs of 0.0",
        "in runs to which the sampler gave a log-prob of exactly 0.0",
        "the trainer's log-probs say that these tokens were not certain",
    ),
    "after_end": _Sign(
        "after the end",
        "after the end of the response",
        "one id ends nearly all stopped responses, and trained tokens follow it",
        counts_rows=True,
    ),
    "common": _Sign(
        "common to all responses of the group",
        "shared by all responses of a group at one position",
        "independent draws would not agree on them, given their log-probs",
        counts_rows=True,
    ),
}


class MaskLeak(TableRule):
    """Tokens of tools, templates or padding are in the loss.

    ## What it does
    Looks for trained tokens (`response_mask` 1) that the model cannot have sampled.

    ## Why it matters
    The policy gradient is only valid for tokens that the policy sampled. Tool output, prompt templates and padding in
    the loss teach the model to write them, with the sign of whatever the response earned, and they enter the KL and
    every token mean.

    ## How it is measured
    There are six signs, none of which depends on what a token says. `trained_beyond`, which a recorder writes, counts
    trained tokens past the completion, as when the mask of the loss was forgotten: an error. The sampler gave no
    log-prob (NaN) for a trained token, but gave one for others of the row: an error, or information if only the last
    token of rows lacks one, which a trainer appended. Three or more consecutive trained tokens have a log-prob below
    -12, from the trainer and, if it gave one, from the sampler: a warning. So are three or more with a log-prob of
    exactly 0.0 from the sampler and a mean below -1 from the trainer, inside a row, where hardly any stand alone as
    placeholders do (`RDI005`). If no log-probs of the sampler were recorded, trained tokens after a trained end of a
    single-turn response: a warning, above 1 % of the trained tokens. The end is the one id that ends at least 90 % of
    the stopped responses of a step, eight or more; rows with masked tokens between trained ones have several turns and
    are left out. The model's own turns after an end look the same.

    The last sign compares the responses of a group, if ids were recorded: trained tokens that all of them have at one
    place although the log-probs, the sampler's if there are any, say that independent draws would not agree: a warning.
    Only tokens below -4 nats count, so that a prefix of which the sampler is confident, low-entropy text and a
    collapsed policy do not. The evidence is a product over the places whose mean is 1 for independent draws, and it has
    to exceed exp(40). Places count from where the responses first differ, and not in a group whose responses share a
    prefix of more than 30 nats: that is a seed (`RDI009`). The share of the gradient assumes that the tokens of a row
    weigh the same.

    Rows end with the completion, so trained padding past it is cut off. The rule is clean only if `trained_beyond` is
    recorded, or the rows reproduce every logged loss: with more tokens in it none would. If a loss disagrees and
    nothing explains it, the rule is skipped.

    ## What to do
    Mask these tokens. If observations are trained on purpose, there is nothing to fix.

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
    reads = ("grad_l1",)
    adds = (
        *("trained", "told", "bare", "bare_last", "judged", "forced", "zero", "zero_alone", "beyond_rows", "beyond"),
        *("common", "compared", "single_turn", "after_end"),
    )
    needs_objective = False
    splits = ("train",)
    stages = ("loss",)
    needs = ("response_mask",)

    end_share: float = 0.9
    fewest_ends: int = 8
    warn_above: float = 0.01
    most_alone: float = 0.1
    """Placeholders for log-probs that are lost stand alone, and tokens of tools in runs."""

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Log-probs of sampler and trainer, ids, groups, and what the loss is made of; else finish reasons, too."""
        columns = frozenset({"rollout_log_probs", "old_log_probs", "response_ids", "group_id", "trained_beyond"})
        if context.objective is not None:
            columns |= loss_columns(context.objective) | LOGGED_COLUMNS
        return columns if "rollout_log_probs" in context.columns else columns | {"status"}

    def unavailable_reason(self, context: Context) -> Missing | None:
        """None of the signs can show."""
        columns, log_probs = context.columns, {"rollout_log_probs", "old_log_probs", "policy_log_probs"}
        if columns & {"trained_beyond", *log_probs} or columns >= {"response_ids", "status"}:
            return None
        return Missing(
            "nothing shows which tokens were sampled: no log-probs, and no response_ids with status",
            context.to_record("rollout_log_probs"),
        )

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Count the trained tokens of each row that were not sampled, by sign."""
        from rolloutdoctor.evaluation.response_ends import response_ends
        from rolloutdoctor.rules.measures.common_tokens import unlikely_tokens
        from rolloutdoctor.rules.measures.unsampled_tokens import unsampled_tokens

        measures = {"trained": block.trained_n, **unlikely_tokens(block), **unsampled_tokens(block, LOWEST, UNLIKELY)}
        if block.of_step("trained_beyond") is not None:
            beyond_n = block.row_column("trained_beyond").double()
            measures |= {"beyond_rows": (beyond_n >= 0).double(), "beyond": beyond_n.clamp(min=0)}
        if block.is_logged("response_ids") and not block.is_logged("rollout_log_probs"):
            measures |= {name: value for name, value in response_ends(block).items() if name in ("last", "gap")}
        return measures

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Count what takes the group or the step to see: common tokens, and those after the end."""
        from rolloutdoctor.evaluation.response_ends import NONE, STOPPED, common_end, has_status, trained_after
        from rolloutdoctor.rules.measures.common_tokens import can_agree, common_tokens

        row, measures = step.token_measures[self.code], dict[str, "Tensor | None"]()
        common_N = common_tokens(step.batch, row)
        if common_N is not None:
            measures |= {"common": common_N, "compared": can_agree(step.batch)[step.groups.index_N]}
        if "last" in row:
            stopped_N = has_status(step.statuses, STOPPED, step.batch.device)
            end_N = common_end(row["last"], stopped_N, step.by_step, self.end_share, self.fewest_ends)
            single_N = ((end_N != NONE) & ~row["gap"]).double()
            after_N = trained_after(step.batch, end_N) * single_N if bool(single_N.any()) else single_N
            measures |= {"single_turn": single_N, "after_end": after_N}
        return measures

    def measure_step(self, step: "StepView") -> Mapping[str, float | None]:
        """Logged losses that were compared, and those that the rows reproduce."""
        losses = [tally for tally in step.audit.values() if tally.stage == "loss"]
        return {"losses": sum(tally.compared for tally in losses), "losses_agree": sum(tally.agree for tally in losses)}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each row that leaks; `leaked` is the most tokens that one sign names: all may name the same."""
        told, trained, unsampled = pl.col("told") > 0, pl.col("trained"), pl.col("unsampled")
        lines = (
            rows.drop_nulls("trained")
            .with_columns(unsampled=pl.col("bare") * told, told=trained * told)
            .with_columns(
                leaked=pl.max_horizontal(*SIGNS).fill_null(0), appended=(pl.col("bare_last") == 1) & (unsampled == 1)
            )
        )
        where = ("told", "judged", "single_turn", "compared", "beyond_rows")
        return with_sums(lines, pl.col("leaked") > 0, "grad_l1", "trained", "zero_alone", *where)

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of tokens, by sign, and their share of the log-prob gradient."""
        leaked, gradient = pl.col("leaked"), pl.col("grad_l1")
        share = (leaked / pl.col("trained").clip(lower_bound=1)).clip(upper_bound=1)

        def known(name: str, where: str) -> Quantity:
            return pl.when((pl.col(where) > 0).any()).then(pl.sum(name).cast(pl.Int64)), "tokens"

        return {
            "leaked_share": (leaked.sum() / pl.sum("trained"), "share"),
            "leaked_gradient_share": ((gradient * share).sum() / gradient.sum(), "share"),
            "unsampled_tokens": known("unsampled", "told"),
            "appended_tokens": known("appended", "told"),
            "forced_tokens": known("forced", "judged"),
            "tokens_after_end": known("after_end", "single_turn"),
            "common_tokens": known("common", "compared"),
            "zero_tokens": known("zero", "told"),
            "tokens_beyond": known("beyond", "beyond_rows"),
            "rows": ((leaked > 0).sum(), "rows"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Rows with the most such tokens."""
        return table.with_columns(value="leaked")

    def note(self, place: Mapping[str, Any]) -> str:
        """Name the number of tokens, by sign."""
        parts = [f"{int(place[name]):,} {sign.of_row}" for name, sign in SIGNS.items() if place[name]]
        return f"trained tokens: {', '.join(parts)}"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No row in which a leak could show."""
        if self.judge(run, context) is not None:
            return None
        recorded = bool(run.table["beyond_rows"].sum())
        if recorded or any(run.table[name].sum() for name in ("told", "judged", "single_turn")):
            losses = run.run.by_step("losses", "losses_agree").sum()
            if recorded or 0 < losses["losses"].item() == losses["losses_agree"].item():
                return None
            return Missing(
                "the response tokens show no fault, but no column shows whether padding after them is trained",
                context.recording.get("trained_beyond", "record trained_beyond, or the loss of every optimizer step"),
            )
        return Missing(
            "no trained token has a log-prob, and no single token ends the stopped responses",
            context.to_record("rollout_log_probs"),
        )

    def unseen_reason(self, run: Measured, context: Context) -> Missing | None:
        """A loss that nothing explains: a mask that one term of it forgot would look the same."""
        if not any(tally.stage in self.stages for tally in context.unexplained.values()):
            return None
        return Missing(
            "the rows do not reproduce the logged loss and no hypothesis explains why: a loss term may count "
            "padding, whose log-probs are not in the file",
            "check that every loss term is multiplied by the mask before it is summed",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """An error where the sampler says so, a warning where the log-probs or the end do."""
        counts = {name: int(run.table[name].sum()) for name in ("trained", *SIGNS, "appended", "zero_alone")}
        if counts["after_end"] <= self.warn_above * counts["trained"]:
            counts["after_end"] = 0
        if counts["zero_alone"] > self.most_alone * counts["zero"]:
            counts["zero"] = 0
        signs = {name: counts[name] for name in SIGNS if counts[name]}
        if not signs:
            return None
        parts = []
        for name, tokens in signs.items():
            rows = f", in {counted(int((run.table[name] > 0).sum()), 'row')}" if SIGNS[name].counts_rows else ""
            parts.append(f"{counted(tokens, 'token')} {SIGNS[name].of_run}{rows}")
        inside = counts["unsampled"] - counts["appended"]
        appended_only = signs.keys() == {"unsampled"} and not inside
        is_said = bool(inside or counts["beyond"])
        gradient = run["leaked_gradient_share"]
        size = f"{percent(max(signs.values()) / max(counts['trained'], 1))} of the trained tokens" + (
            "" if gradient is None else f" and {percent(gradient)} of |gradient|"
        )
        return Judgement(
            severity=Severity.ERROR if is_said else Severity.INFO if appended_only else Severity.WARNING,
            confirmed=is_said or appended_only,
            headline=f"{parts[0]} in the loss: {size}",
            message=f"the loss includes tokens that the model did not generate: {'; '.join(parts)}; {size}"
            + ("; each is the last token of its row, so the trainer probably appended it" if appended_only else ""),
            evidence="; ".join(SIGNS[name].evidence for name in signs),
            advice="keep it if the trainer appends the end-of-sequence token on purpose; the token is off-policy"
            if appended_only
            else "mask tool, template and padding tokens, unless you train on them on purpose",
        )
