"""RDI004: rewards belong to other rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING, Any

from rolloutdoctor.objective.required_columns import response_columns
from rolloutdoctor.ops.tally import by_name, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.all_truncated import TRUNCATED
from rolloutdoctor.rules.audited import AuditedTally
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.direct import DirectRule, follows

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.data.batch import RolloutBatch
    from rolloutdoctor.evaluation.reward_relations import Relation
    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView


LEAST, MOST = 2.0, 6.0
"""Standard errors that are no evidence of agreement, and those that equal rewards would give."""


@dataclass(frozen=True)
class MisalignedTally(AuditedTally):
    """What `reward-row-misaligned` adds up: the audit's values, and relations between rewards and responses.

    Relations are named by their words; "broken" are the steps in which a row does not keep one.

    Attributes:
        tested: relation to rows that it says something about.
        bits: relation to how unlikely it is that rewards of other rows keep it in all of these, in bits.
        broken: relation to rows that it says something about, in broken steps.
        broken_bits: the same as `bits` for these.
        kept: relation to the rows of broken steps that keep it.
        moved: relation and order of the rewards, with a bar between, to the rows of broken steps that keep it then.
        broken_steps: relation to the broken steps.
        copies: responses that repeat an earlier one of their group.
        differing: those of them with another reward.
        apart: sum of their rewards' squared distances from the first one's.
        by_chance: sum of the mean squared distances from the other rewards of their group.
        less: sum of the squared differences of the two.
        squares: sum of the squares of the second.
    """

    tested: Mapping[str, float] = by_name()
    bits: Mapping[str, float] = by_name()
    broken: Mapping[str, float] = by_name()
    broken_bits: Mapping[str, float] = by_name()
    kept: Mapping[str, float] = by_name()
    moved: Mapping[str, float] = by_name()
    broken_steps: Mapping[str, float] = by_name()
    copies: int = 0
    differing: int = 0
    apart: float = 0.0
    by_chance: float = 0.0
    less: float = 0.0
    squares: float = 0.0


@dataclass(frozen=True)
class RewardRowMisaligned(DirectRule):
    """The rewards that made the advantages are those of other rows.

    ## What it does
    Where the logged advantages do not follow from the rewards in the file, tries the same rewards on other rows:
    one row or one group late or early, rotated within their groups, reversed, sorted, and in the order of length or
    rank.

    Where the rewards in the file are wrong themselves, the advantages follow from them. Then it looks at what a reward
    shows of its own response: a reward function that is a line in the response's length, equal responses to one
    prompt, and truncated responses with the lowest reward. If the rows break such a relation, and all of them keep it
    with the rewards in one of these orders, the rewards are those of other rows. Equal responses to one prompt with
    different rewards are reported in any case.

    ## Why it matters
    Every response is then pushed for what another one did. The mean reward is unchanged, so no curve shows it.

    ## How it is measured
    Every logged advantage is held against both formulas, each within its rounding radius. The finding gives how
    many values each explains, how many rows change, how many advantages change their sign (`sign_flips`), and with
    log-probs how much of the gradient differs: `relative_change_l1` = |g_made - g_recorded|_1 / |g_recorded|_1, in
    log-prob space.

    For a relation, `rows_tested` are the rows that it says something about in the steps that break it, `rows_keeping`
    those that keep it as recorded. That rewards of other rows keep it by chance has a probability of less than
    2^-40. A reward function counts as one of the length if the rewards of a step, sorted, are a line in its sorted
    lengths to within the rounding of float32, for eight rows and six lengths or more between its bounds; this holds
    in whatever order the rewards are. A verifier that is not deterministic, and truncated responses that are right,
    break a relation as recorded and in every order. Equal responses with different rewards are then information, as a
    judge model gives them; a warning where they agree no better than any two rows of their group: the squared distances
    of their rewards and the mean ones within the group differ by less than two standard errors, and would by six or
    more if all of them were equal.

    ## What to do
    Join rewards to rows by sample id. Look where rows are sorted by length, filtered, or gathered from ranks
    between generation and scoring.

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
    tally = MisalignedTally
    stages = ("advantages",)
    remedy = "log the advantages: the column advantage (one a row) or advantages (one a token)"

    bits: float = 40.0
    """A chance of 1e-12, of which the orders and the reward functions that are tried take little."""

    def optional_columns(self, context: Context) -> frozenset[str]:
        """What the audit reads, and what rewards may be made from."""
        return super().optional_columns(context) | response_columns(context.columns) | {"reward", "rewards", "status"}

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Hash each response."""
        if not block.is_logged("response_ids"):
            return {}
        return {"hash": block.prefixes.at_lengths_NK[:, -1]}

    def measure_each(self, steps: "StepView") -> list[MisalignedTally]:
        """Count the values of each step, and the rows that keep each relation."""
        return [
            replace(self._of_step(each, relations), **_copies(each.batch, relations))
            for each, relations in zip(steps.each, self._relations(steps), strict=True)
        ]

    def _relations(self, steps: "StepView") -> "list[list[Relation]]":
        """Relations of rewards and responses in each step."""
        return steps.cached("reward relations", lambda: self._found(steps))

    def _found(self, steps: "StepView") -> "list[list[Relation]]":

        hash_N = steps.token_measures.get(self.code, {}).get("hash", steps.batch.per_row.get("response"))
        hashes = [None] * len(steps.each) if hash_N is None else steps.split(hash_N)
        return [_relations(each.batch, hash_n) for each, hash_n in zip(steps.each, hashes, strict=True)]

    def _of_step(self, step: "StepView", relations: "Sequence[Relation]") -> MisalignedTally:
        total = self.audited(step)
        tested: dict[str, float] = {}
        bits: dict[str, float] = {}
        broken: dict[str, float] = {}
        broken_bits: dict[str, float] = {}
        kept: dict[str, float] = {}
        moved: dict[str, float] = {}
        for one in relations:
            is_kept_N = one.kept()
            tested[one.words], bits[one.words] = one.tested, one.bits
            if bool(is_kept_N.all()):
                continue
            broken[one.words], broken_bits[one.words] = one.tested, one.bits
            kept[one.words] = one.tested - int((~is_kept_N).sum())
            names, source_ON = self._orders(step)
            for name, breaking in zip(names, (~one.kept(source_ON)).sum(1).tolist(), strict=True):
                moved[f"{one.words}|{name}"] = one.tested - breaking
        return MisalignedTally(
            **vars(total),
            tested=tested,
            bits=bits,
            broken=broken,
            broken_bits=broken_bits,
            kept=kept,
            moved=moved,
            broken_steps=dict.fromkeys(broken, 1.0),
        )

    def _orders(self, step: "StepView") -> "tuple[list[str], Tensor]":
        """Names of the orders, and the row whose reward each row has in them, ``[O, N]``."""
        return step.cached("reward orders", lambda: self._sources(step))

    def _sources(self, step: "StepView") -> "tuple[list[str], Tensor]":
        import torch

        from rolloutdoctor.hypotheses.row_order import ROW_ORDERS

        batch, found = _on_cpu(step.batch), {}
        for name, (_, order, _) in ROW_ORDERS.items():
            # What the rewards would be, sorted, says nothing of whose they are.
            source_N = None if name.startswith("rewards-sorted") else order(batch)
            if source_N is not None:
                found[name] = source_N
        return list(found), torch.stack(list(found.values()))

    def examples(self, step: "StepView") -> Iterable[Example]:
        """What the audit shows, or the rows that break a relation."""
        yield from super().examples(step)
        for each, relations in zip(step.each, self._relations(step), strict=True):
            for one in relations:
                rows = (~one.kept()).nonzero().squeeze(1).tolist()
                weight, note = len(rows) / max(one.tested, 1), f"breaks that {one.words}"
                for row in rows[:KEEP_EXAMPLES]:
                    yield Example(each.batch.step, each.group_of(row), each.batch.sample_name(row), weight, note)

    def inconclusive_reason(self, run: AuditedTally, context: Context) -> Missing | None:
        """No logged advantage, and no relation that all rows keep."""
        assert isinstance(run, MisalignedTally)
        if any(bits >= self.bits and name not in run.broken for name, bits in run.bits.items()):
            return None
        return super().inconclusive_reason(run, context)

    def _explained(self, run: MisalignedTally) -> tuple[str, tuple[str, ...]] | None:
        """The relation that most rows test, and the orders in which all of them keep it."""
        found = []
        for name, rows in run.broken.items():
            if run.broken_bits[name] < self.bits:
                continue
            kept = {key.rpartition("|")[2]: count for key, count in run.moved.items() if key.startswith(f"{name}|")}
            orders = tuple(sorted(order for order, count in kept.items() if count == rows))
            if orders:
                found.append((rows, name, orders))
        return max(found)[1:] if found else None

    def direct(self, run: MisalignedTally, context: Context) -> Judgement | None:
        """Report what the rewards show of their rows."""
        found = self._explained(run)
        if found is None:
            return self._of_copies(run)
        from rolloutdoctor.hypotheses.row_order import MISALIGNED_REWARDS, ROW_ORDERS

        relation, orders = found
        rows, kept = run.broken[relation], run.kept[relation]
        words = ROW_ORDERS[orders[0]][0]
        used = follows(run)
        trained = (
            f"the trainer used these rewards: all {run.compared:,} logged advantages follow from them"
            if used
            else "no logged advantage says whether the trainer used these rewards, or the file alone has them so"
        )
        also = f"; these data cannot tell it from {', '.join(orders[1:])}" if len(orders) > 1 else ""
        return Judgement(
            severity=Severity.ERROR if used else Severity.WARNING,
            confirmed=used,
            headline=f"{words}: {counted(rows - kept, 'row')} of {rows:,.0f} break that {relation}",
            message=f"{relation} in {percent(kept / rows)} of the rows as recorded, and in all of them if {words}",
            evidence=f"{trained}; in {counted(run.broken_steps[relation], 'step')}{also}",
            advice=MISALIGNED_REWARDS[0].remedy,
            measures={"rows_tested": Measure(rows, "rows"), "rows_keeping": Measure(kept, "rows")},
        )

    def _of_copies(self, run: MisalignedTally) -> Judgement | None:
        """Equal responses with different rewards: a warning where they agree no better than by chance."""
        if not run.differing:
            return None
        better = ratio(run.by_chance - run.apart, sqrt(run.less))
        most = ratio(run.by_chance, sqrt(run.squares))
        is_chance = most is not None and most >= MOST and (better or 0.0) < LEAST
        share, apart, chance = run.differing / run.copies, run.apart / run.copies, run.by_chance / run.copies
        return Judgement(
            severity=Severity.WARNING if is_chance else Severity.INFO,
            confirmed=False,
            headline=f"{counted(run.differing, 'response')} of {run.copies:,} that repeat another one to their prompt "
            "have another reward",
            message=f"equal responses to one prompt differ in reward in {percent(share)} of the cases"
            + (", and agree no better than different ones" if is_chance else ""),
            evidence=f"the mean squared distance of their rewards is {number(apart)}, that within their groups "
            f"{number(chance)}: {number(better)} standard errors",
            advice="join rewards to rows by sample id"
            if is_chance
            else "none if a judge model or a sampled test gives the rewards",
            measures={"copies": Measure(run.copies, "rows"), "differing_copies": Measure(run.differing, "rows")},
        )


def _copies(batch: "RolloutBatch", relations: "Sequence[Relation]") -> dict[str, Any]:
    """How far the rewards of equal responses are apart, and those of their groups; of the function most apart."""
    import torch

    found: dict[str, Any] = {}
    groups = _on_cpu(batch).groups
    for one in relations:
        first_N = one.first_of_kind()
        if first_N is None or groups is None:
            continue
        again_N = (first_N != torch.arange(len(first_N))).nonzero().squeeze(1)
        apart = (one.reward_N[again_N] - one.reward_N[first_N[again_N]]).square()
        if found and int((apart > 0).sum()) <= found["differing"]:
            continue
        size_N, mean_N = (x_G[groups.index_N] for x_G in (groups.size_G, groups.total(one.reward_N) / groups.size_G))
        centred_N = (one.reward_N - mean_N).square()
        # The mean squared distance from the others of the group.
        chance_N = (size_N * centred_N + groups.total(centred_N)[groups.index_N]) / (size_N - 1)
        by_chance = chance_N[again_N]
        found = {"copies": len(again_N), "differing": int((apart > 0).sum()), "apart": float(apart.sum())}
        found |= {"by_chance": float(by_chance.sum()), "squares": float(by_chance.square().sum())}
        found["less"] = float((by_chance - apart).square().sum())
    return found


def _relations(batch: "RolloutBatch", hash_N: "Tensor | None") -> "list[Relation]":
    """Relations that rewards have with the responses, given hashes of these."""
    import torch

    from rolloutdoctor.evaluation.reward_relations import relations_of

    if "reward" not in batch.per_row or not len(batch):
        return []
    ends = batch.statuses
    is_cut_N = torch.tensor([(end or "").lower() in TRUNCATED for end in ends]) if any(ends) else None
    return relations_of(_on_cpu(batch), None if hash_N is None else hash_N.cpu(), is_cut_N)


def _on_cpu(batch: "RolloutBatch") -> "RolloutBatch":
    """The rows of a step on the CPU; their tokens stay where they are."""
    return batch if batch.device.type == "cpu" else replace(batch, per_token={}).to("cpu")
