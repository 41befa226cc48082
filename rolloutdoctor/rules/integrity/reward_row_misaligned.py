"""RDI004: rewards belong to other rows."""

from collections.abc import Mapping
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.objective.required_columns import response_columns
from rolloutdoctor.results.exact import ratio
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.audited import AuditedMeasured, DirectRule
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.measures.relation_sums import COPIES, RELATION, relation_sums

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.measures.reward_relations import Relation
    from rolloutdoctor.rules.step import StepView

LEAST, MOST = 2.0, 6.0
"""Standard errors that are no evidence of agreement, and those that equal rewards would give."""


class RewardRowMisaligned(DirectRule):
    """The rewards that made the advantages are those of other rows.

    ## What it does
    Where the rewards in the file do not reproduce the logged advantages, tries the same rewards on other rows:
    one row or one group late or early, rotated within their groups, reversed, sorted, and in the order of length or
    rank.

    Where the rewards in the file are wrong themselves, they reproduce the advantages. Then it looks at what a reward
    shows of its own response: a reward function that is a line in the response's length, equal responses to one
    prompt, and truncated responses with the lowest reward. If the rows break such a relation, and all of them keep it
    with the rewards in one of these orders, the rewards are those of other rows. Equal responses to one prompt whose
    rewards agree no better than those of different ones are reported in any case.

    ## Why it matters
    Every response is then reinforced for what another one did. The mean reward is unchanged, so no curve shows it.

    ## How it is measured
    Every logged advantage is compared with both formulas, each within its rounding radius. The finding gives how many
    values each explains, how many rows change, how many advantages change sign (`sign_flips`), and with log-probs how
    far the gradients differ: `relative_change_l1` = |g_made - g_recorded|_1 / |g_recorded|_1 in log-prob space, with
    g_made for the order that the log shows.

    For a relation, `rows_tested` are the rows that it covers in the steps that break it, and `rows_keeping` those that
    keep it as recorded. The probability that rewards of other rows keep it by chance is below 2^-40. A reward function
    counts as one of the length if the sorted rewards of a step are a line in its sorted lengths to within the rounding
    of float32, for eight rows and six lengths or more between its bounds; this holds in whatever order the rewards are.
    A verifier that is not deterministic, and truncated responses that are right, break a relation both as recorded and
    in every order. Equal responses with different rewards (`RDA015`) are then a warning if they agree no better than
    any two rows of their group: the squared distances of their rewards and the mean ones within the group differ by
    less than two standard errors, and would differ by six or more if all of them were equal.

    ## What to do
    Join rewards to rows by sample id. Look where rows are sorted by length, filtered, or gathered from ranks
    between generation and scoring. Equal responses that agree no better than others may also have the rewards of a
    judge whose noise is all that tells them apart.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> made = [1 / 3, 1 / 3, -2 / 3, 0, 0, 0]
    >>> batch = toy_batch([[1, 0, 0], [0, 0, 1]], per_row={"advantage": made})
    >>> diagnose_one("RDI004", batch, trainer="trl", scale_rewards="none")
    'RDI004 error confirmed: values_compared 6'
    """

    code = "RDI004"
    name = "reward-row-misaligned"
    references = (
        "https://github.com/volcengine/verl/issues/2185",
        "https://github.com/huggingface/trl/issues/3098",
    )
    stages = ("advantages",)

    bits: float = 40.0
    """A chance of 1e-12, of which the orders and the reward functions that are tried take little."""

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Return the columns of the audit, and those that rewards may be made from."""
        return super().optional_columns(context) | response_columns(context.columns) | {"reward", "rewards", "status"}

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Hash each response."""
        if not block.is_logged("response_ids"):
            return {}
        return {"hash": block.prefixes.at_lengths_NK[:, -1]}

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Nothing of rows; the relations of each step, from the hashes of all of them."""
        from rolloutdoctor.rules.measures.reward_relations import relations_of

        hash_N = step.token_measures.get(self.code, {}).get("hash", step.batch.per_row.get("response"))
        hashes = [None] * len(step.each) if hash_N is None else step.split(hash_N)
        for each, hash_n in zip(step.each, hashes, strict=True):
            each.cached("reward relations", partial(relations_of, each.batch, hash_n))
        return {}

    def measure_step(self, step: "StepView") -> Mapping[str, float | None]:
        """The rows that keep each relation, as recorded and in other orders, and the first that do not."""
        from rolloutdoctor.rules.measures.reward_relations import agreement_of_copies, orders_of

        relations: list[Relation] = step.cached("reward relations", list)
        measures = agreement_of_copies(step.batch, relations)
        for relation in relations:
            words, breaking = relation.words, (~relation.kept()).nonzero().squeeze(1).tolist()
            values = (relation.tested, relation.bits, relation.tested - len(breaking))
            measures |= {f"{name}/{words}": value for name, value in zip(RELATION, values, strict=True)}
            for place, row in enumerate(breaking[:KEEP_EXAMPLES]):
                measures |= {f"row/{words}|{place}": row, f"worst/{words}|{place}": len(breaking) / relation.tested}
            if breaking:
                names, source_ON = step.cached("reward orders", partial(orders_of, step.batch))
                moved = (relation.tested - (~relation.kept(source_ON)).sum(1)).tolist()
                measures |= {f"moved/{words}|{name}": intact for name, intact in zip(names, moved, strict=True)}
        return measures

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """Sums of what is measured of each relation, and the rows that break one."""
        sums, rows = relation_sums(run, None if context.lists_places else KEEP_EXAMPLES)
        return self.with_audit(pl.concat([sums, run.named(rows)], how="diagonal"), run)

    def shown(self, place: Mapping[str, Any]) -> str:
        """The relation that a row breaks."""
        return f"breaks the rule that {place['subject'].rpartition('|')[0]}"

    def inconclusive_reason(self, run: AuditedMeasured, context: Context) -> Missing | None:
        """No logged advantage, and no relation that all rows keep."""
        relations = run.table.drop_nulls("tested").group_by("subject").agg(pl.sum(*RELATION))
        if len(relations.filter(pl.col("bits") >= self.bits, pl.col("kept") == pl.col("tested"))):
            return None
        return super().inconclusive_reason(run, context)

    def direct(self, run: AuditedMeasured, context: Context) -> Judgement | None:
        """Report what the rewards show of their rows: the relation that most test, of those that all keep if moved."""
        of_words, of_order = (pl.col("subject").str.extract(r"(?s)^(.*)\|(.*)$", part) for part in (1, 2))
        moved = run.table.drop_nulls("moved").group_by(relation=of_words, order=of_order).agg(pl.sum("moved"))
        relations = (
            run.table.filter("broken")
            .group_by(relation="subject")
            .agg(pl.sum(*RELATION, "steps"))
            .join(moved, on="relation")
            .filter(pl.col("bits") >= self.bits, pl.col("moved") == pl.col("tested"))
            .sort("tested", "relation", "order", descending=[True, True, False])
        )
        if not len(relations):
            return self._of_copies(run)
        from rolloutdoctor.search.hypotheses.row_order import MISALIGNED_REWARDS, ROW_ORDERS

        relation, rows, intact, steps = relations.select("relation", "tested", "kept", "steps").row(0)
        orders = relations.filter(pl.col("relation") == relation)["order"].to_list()
        words, used = ROW_ORDERS[orders[0]][0], run.is_reproduced
        trained = (
            f"the trainer used these rewards: they reproduce all {run.compared:,} logged advantages"
            if used
            else "no logged advantage shows whether the trainer used these rewards or only the file is wrong"
        )
        also = f"; these data cannot distinguish it from {', '.join(orders[1:])}" if len(orders) > 1 else ""
        return Judgement(
            severity=Severity.ERROR if used else Severity.WARNING,
            confirmed=used,
            headline=(
                f"{words}: {counted(rows - intact, 'row')} of {rows:,.0f} break the rule that {relation}; in the right "
                "order none do"
            ),
            message=f"{relation} in {percent(intact / rows)} of the rows as recorded, and in all of them if {words}",
            evidence=f"{trained}; in {counted(steps, 'step')}{also}",
            advice=MISALIGNED_REWARDS[0].remedy,
            measures={"rows_tested": Measure(int(rows), "rows"), "rows_keeping": Measure(int(intact), "rows")},
        )

    def _of_copies(self, run: AuditedMeasured) -> Judgement | None:
        """Equal responses whose rewards agree no better than by chance: a warning."""
        copies, differing, apart, by_chance, less, squares = run.table.select(pl.sum(*COPIES)).row(0)
        better, most = ratio(by_chance - apart, sqrt(less)), ratio(by_chance, sqrt(squares))
        if not differing or most is None or most < MOST or (better or 0.0) >= LEAST:
            return None
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=(
                f"{counted(differing, 'response')} of {copies:,.0f} identical responses to one prompt have different "
                "rewards"
            ),
            message=(
                f"identical responses to one prompt get different rewards in {percent(differing / copies)} of the "
                "cases, no less often than different responses"
            ),
            evidence=(
                f"the mean squared difference of their rewards is {number(apart / copies)}, within their groups "
                f"{number(by_chance / copies)}: {number(better)} standard errors"
            ),
            advice="join rewards to rows by sample id; if they already are, the reward does not depend on the response",
            measures={"copies": Measure(int(copies), "rows"), "differing_copies": Measure(int(differing), "rows")},
        )
