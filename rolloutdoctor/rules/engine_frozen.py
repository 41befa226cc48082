"""RDO010: an inference engine whose weights do not change."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rolloutdoctor.objective.required_columns import prompt_columns
from rolloutdoctor.ops.tally import Sums, ratio, sketches
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, number, percent

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class FrozenTally(Sums):
    """What `engine-frozen` adds up.

    Attributes:
        rows: rows with a first token that both models gave a log-prob, and a known prompt.
        seen: sketch of (prompt, first token) and version: rows, log-probs of sampler and trainer, squares of these.
    """

    rows: int = 0
    seen: str = sketches()


@dataclass(frozen=True)
class EngineFrozen(Rule[FrozenTally]):
    """The inference engine keeps its weights while the trainer's move.

    ## What it does
    Compares the log-prob of the same first response token after the same prompt at two policy versions: the sampler's
    stays what it was, and the trainer's moves.

    ## Why it matters
    A weight sync that fails without an error, an adapter that is not served, or float32 updates below the spacing of
    bf16 weights leave the engine where it was. Rewards stay flat or fall, and every update is more off-policy.

    ## How it is measured
    Of prompts that come again, a sample of bounded size is kept: all records of the 128 pairs of prompt and first
    token with the smallest hashes. A version is the newest stamp of a row, else its step. *Noise* is the standard
    deviation of one token's log-prob among siblings of one version, of the trainer. In a pair of versions the trainer
    moves if its mean changes by ten times that, and by 0.1 nats at least; the sampler stays if its mean changes by a
    tenth of that, or four times the noise, at most. It is found where the sampler stays in 90 % of 20 or more moved
    pairs, of five contexts or more, from some version on: of pairs at an engine that follows, one in ten stays by
    chance. Where the trainer does not move either, as with a learning rate of 0, nothing is frozen. `frozen_from` is
    that version.

    ## What to do
    Compare a weight of the engine with the trainer's after a sync; check that the adapter is served, and that the
    update is not lost in bf16.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> diagnose_one("RDO010", toy_batch([[1, 0]]), trainer=None)
    'RDO010 skipped: missing columns response_ids, rollout_log_probs'
    """

    code = "RDO010"
    name = "engine-frozen"
    references = (
        "https://github.com/huggingface/trl/issues/5312",
        "https://github.com/allenai/open-instruct/issues/1473",
    )
    tally = FrozenTally
    needs_objective = False
    splits = ("train",)

    least_pairs: int = 20
    least_contexts: int = 5
    share: float = 0.9
    least_move: float = 0.1
    """Two means with a noise of 0.055, the largest that was reported at equal weights, are less apart."""

    def columns(self, context: Context) -> frozenset[str]:
        """Both log-probs and the ids of the response."""
        return frozenset({"old_log_probs", "rollout_log_probs", "response_ids"})

    def optional_columns(self, context: Context) -> frozenset[str]:
        """What tells a prompt and a version."""
        return prompt_columns(context.columns) | {"response_mask", "policy_version_max", "optim_step_id"}

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Nothing says which rows answer one prompt in two steps."""
        if prompt_columns(context.columns):
            return None
        remedy = context.recording.get("prompt_ids", "record prompt_ids or prompt")
        return Missing("nothing says which prompt a row answers", remedy)

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """The first token of each row: its context, and both log-probs; NaN where one is not known."""
        from rolloutdoctor.evaluation.first_tokens import first_tokens

        return first_tokens(block)

    def measure_each(self, steps: "StepView") -> list[FrozenTally]:
        """Keep the contexts of each step with the smallest hashes."""
        import torch

        from rolloutdoctor.ops.prefix_hash import scramble
        from rolloutdoctor.ops.sketch import sketch_each

        batch, rows = steps.batch, steps.token_measures.get(self.code)
        prompt_N = batch.prompts
        if not rows or prompt_N is None:
            return steps.nothing(FrozenTally)
        sampler_N, trainer_N = rows["sampler"], rows["trainer"]
        version_N = batch.per_row.get("policy_version_max")
        is_known_N = sampler_N.isfinite() & trainer_N.isfinite() & (prompt_N != 0)
        if version_N is None:
            version_N = steps.batch.number_N
        else:
            is_known_N = is_known_N & (version_N >= 0)
        context_N = scramble(prompt_N ^ scramble(rows["token"] + 1))
        each = torch.stack(
            [torch.ones_like(sampler_N), sampler_N, trainer_N, sampler_N.square(), trainer_N.square()], 1
        )
        known = steps.by_step.only(is_known_N)
        context, version, sums = (x_N[is_known_N].cpu().numpy() for x_N in (context_N, version_N, each))
        seen = sketch_each(context, version, sums, known.size)
        return steps.tallies(FrozenTally, rows=known.size, seen=seen)

    def measures(self, tally: FrozenTally) -> Mapping[str, Measure]:
        """How many pairs, and what moved in them."""
        found = self._look(tally)
        return {
            "pairs": Measure(found.pairs, "pairs"),
            "moved_pairs": Measure(found.moved, "pairs"),
            "contexts": Measure(found.contexts, "contexts"),
            "frozen_share": Measure(ratio(found.frozen, found.moved), "share"),
            "frozen_from": Measure(found.since, "version"),
            "trainer_move": Measure(found.trainer, "nats"),
            "sampler_move": Measure(found.sampler, "nats"),
            "noise": Measure(found.noise, "nats"),
        }

    def _look(self, tally: FrozenTally) -> "_Found":
        from rolloutdoctor.ops.version_pairs import frozen_from, pairs_of

        pairs = pairs_of(tally.seen)
        if pairs is None:
            return _Found()
        chosen = frozen_from(
            pairs, max(self.least_move, 10 * (pairs.noise or 0.0)), self.share, self.least_pairs, self.least_contexts
        )
        return _Found(len(pairs.first), pairs.known_noise, *chosen, pairs.noise)

    def inconclusive_reason(self, run: FrozenTally, context: Context) -> Missing | None:
        """No prompt came again, or no two siblings began with the same token."""
        found = self._look(run)
        if found.pairs < self.least_pairs:
            return Missing(
                f"{counted(found.pairs, 'pair')} of one prompt and first token at two versions, and it takes "
                f"{self.least_pairs}",
                "widen --steps to where prompts come again",
            )
        if found.noise is None:
            return Missing(
                "no two siblings begin with the same token, so the noise of the trainer is not known",
                "record groups of several responses",
            )
        return None

    def judge(self, run: FrozenTally, context: Context) -> Judgement | None:
        """A warning: the log-probs show it, and no logged value proves it."""
        found = self._look(run)
        if found.since is None or found.noise is None:
            return None
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=f"the sampler's log-probs stay while the trainer's move by {number(found.trainer)} nats, from "
            f"version {found.since} on",
            message=(
                f"in {percent(ratio(found.frozen, found.moved))} of {counted(found.moved, 'pair')} of one prompt and "
                f"first token at two versions the sampler's log-prob moves by {number(found.sampler)} nats (median) "
                f"and the trainer's by {number(found.trainer)}"
            ),
            evidence=f"the log-probs of {counted(found.contexts, 'context')} that came again; noise of the trainer "
            f"among siblings {number(found.noise)} nats",
            advice="compare a weight of the engine with the trainer's after a sync; check that the adapter is served, "
            "and that updates are not lost in bf16",
        )


class _Found(NamedTuple):
    """What the pairs show."""

    pairs: int = 0
    known: bool = False
    moved: int = 0
    frozen: int = 0
    contexts: int = 0
    since: int | None = None
    trainer: float | None = None
    sampler: float | None = None
    noise: float | None = None
