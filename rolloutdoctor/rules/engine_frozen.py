"""RDO010: an inference engine whose weights do not change."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rolloutdoctor.objective.required_columns import prompt_columns
from rolloutdoctor.ops.tally import Sums, by_step, ratio, sketches
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
        second: the same of the prompt and the first two tokens.
        third: of three.
        fourth: of four.
        tokens: trained tokens that sampler, trainer and reference gave a log-prob, by step.
        to_trainer: sum of the sizes of the sampler's gap to the trainer on these.
        to_reference: of its gap to the reference.
    """

    rows: int = 0
    seen: str = sketches()
    second: str = sketches()
    third: str = sketches()
    fourth: str = sketches()
    tokens: Mapping[str, float] = by_step()
    to_trainer: Mapping[str, float] = by_step()
    to_reference: Mapping[str, float] = by_step()


@dataclass(frozen=True)
class EngineFrozen(Rule[FrozenTally]):
    """The inference engine keeps its weights while the trainer's move.

    ## What it does
    Compares the log-prob of the same one of the first four response tokens in the same context at two policy versions:
    the sampler's stays what it was, and the trainer's moves. Looks whether the sampler is the reference.

    ## Why it matters
    A weight sync that fails without an error, an adapter that is not served, or float32 updates below the spacing of
    bf16 weights leave the engine where it was. Rewards stay flat or fall, and every update is more off-policy.

    ## How it is measured
    Of prompts that come again, a sample of bounded size is kept: all records of the 128 contexts with the smallest
    hashes that end at the first token, and as many at the second, third and fourth. A version is the newest stamp of a
    row, else its step. *Noise* is the standard deviation of one token's log-prob among siblings of one version, of the
    trainer. In a pair of versions the trainer moves if its mean changes by ten times that, and by 0.1 nats at least;
    the sampler stays if its mean changes by a tenth of that, or four times the noise, at most. It is found where the
    sampler stays in 90 % of 20 or more moved pairs, of five contexts or more, from some version on: of pairs at an
    engine that follows, one in ten stays by chance. Moves of 0.002 nats count as well where the sampler's log-prob is
    the same number before and after, to 2^-20, and the trainer's moves by more than the spacing of bf16 if the
    sampler's were rounded to that: an engine that follows gives the same number once in a thousand pairs. Where the
    trainer does not move either, as with a learning rate of 0, nothing is frozen. `frozen_from` is that version. The
    sampler is the reference where in the last third of four steps or more its mean gap to the reference is at most a
    tenth of that to the trainer, which grows in the order of steps (Spearman 0.8).

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

    least_exact: float = 0.002
    """Two thousand units of the sketch, within one of which two numbers are the same by chance."""

    def columns(self, context: Context) -> frozenset[str]:
        """Both log-probs and the ids of the response."""
        return frozenset({"old_log_probs", "rollout_log_probs", "response_ids"})

    def optional_columns(self, context: Context) -> frozenset[str]:
        """What tells a prompt and a version."""
        return prompt_columns(context.columns) | {
            "response_mask",
            "policy_version_max",
            "optim_step_id",
            "ref_log_probs",
        }

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Nothing says which rows answer one prompt in two steps."""
        if prompt_columns(context.columns):
            return None
        remedy = context.recording.get("prompt_ids", "record prompt_ids or prompt")
        return Missing("nothing says which prompt a row answers", remedy)

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """The first tokens of each row: contexts, and both log-probs; NaN where one is not known."""
        from rolloutdoctor.evaluation.first_tokens import first_tokens
        from rolloutdoctor.ops.elementwise import kept

        found = dict(first_tokens(block))
        if found and block.has("ref_log_probs"):
            own_T = block.column("rollout_log_probs")
            gaps = [(block.column(name) - own_T).abs() for name in ("old_log_probs", "ref_log_probs")]
            known_T = block.trained_T & gaps[0].isfinite() & gaps[1].isfinite()
            found["tokens"] = block.row_sum(known_T)
            found["to_trainer"], found["to_reference"] = (block.row_sum(kept(x_T, known_T)) for x_T in gaps)
        return found

    def measure_each(self, steps: "StepView") -> list[FrozenTally]:
        """Keep the contexts of each step with the smallest hashes."""
        import torch

        from rolloutdoctor.ops.prefix_hash import scramble
        from rolloutdoctor.ops.sketch import sketch_each

        batch, rows = steps.batch, steps.token_measures.get(self.code)
        prompt_N = batch.prompts
        if not rows or prompt_N is None:
            return steps.nothing(FrozenTally)
        version_N = batch.per_row.get("policy_version_max")
        is_known_N = prompt_N != 0
        if version_N is None:
            version_N = steps.batch.number_N
        else:
            is_known_N = is_known_N & (version_N >= 0)
        fields: dict[str, Any] = {}
        for place, name in enumerate(("seen", "second", "third", "fourth")):
            sampler_N, trainer_N = rows["sampler"][:, place], rows["trainer"][:, place]
            context_N = scramble(prompt_N ^ scramble(rows["through"][:, place] + place))
            each = torch.stack(
                [torch.ones_like(sampler_N), sampler_N, trainer_N, sampler_N.square(), trainer_N.square()], 1
            )
            here_N = is_known_N & sampler_N.isfinite() & trainer_N.isfinite()
            known = steps.by_step.only(here_N)
            context, version, sums = (x_N[here_N].cpu().numpy() for x_N in (context_N, version_N, each))
            fields[name] = sketch_each(context, version, sums, known.size)
            fields.setdefault("rows", known.size)
        if "tokens" in rows:
            names = ("tokens", "to_trainer", "to_reference")
            totals = {name: steps.by_step.sum(rows[name]) for name in names}
            fields |= {name: steps.by_number(x, totals["tokens"] > 0) for name, x in totals.items()}
        return steps.tallies(FrozenTally, **fields)

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
        import numpy as np

        from rolloutdoctor.ops.version_pairs import frozen_from, pairs_of

        pairs = pairs_of([tally.seen, tally.second, tally.third, tally.fourth])
        if pairs is None:
            return _Found()
        noise = 10 * (pairs.noise or 0.0)
        limits = self.share, self.least_pairs, self.least_contexts
        chosen = frozen_from(pairs, max(self.least_move, noise), *limits)
        if chosen[3] is None:
            moves = np.maximum(max(self.least_exact, noise), pairs.spacing)
            exact = frozen_from(pairs, moves, *limits, stays_within=0.0)
            chosen = chosen if exact[3] is None else exact
        return _Found(len(pairs.first), pairs.known_noise, *chosen, pairs.noise)

    def _gaps_to_reference(self, run: FrozenTally) -> tuple[float, float] | None:
        """The sampler's gaps to trainer and reference at the end of the run, where the sampler is the reference."""
        from rolloutdoctor.ops.change import spearman

        steps = sorted(run.tokens, key=int)
        gaps = [(run.to_trainer[one] / run.tokens[one], run.to_reference[one] / run.tokens[one]) for one in steps]
        last = gaps[-max(1, len(gaps) // 3) :]
        if len(gaps) < 4 or any(reference > 0.1 * own for own, reference in last):
            return None
        order = spearman(range(len(gaps)), [own for own, _ in gaps])
        return last[-1] if order is not None and order >= 0.8 and last[-1][0] >= self.least_exact else None

    def inconclusive_reason(self, run: FrozenTally, context: Context) -> Missing | None:
        """No prompt came again, or no two siblings began with the same token."""
        found = self._look(run)
        if self._gaps_to_reference(run) is not None:
            return None
        if found.pairs < self.least_pairs:
            return Missing(
                f"{counted(found.pairs, 'pair')} of one context at two versions; needs {self.least_pairs}",
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
        found, gaps = self._look(run), self._gaps_to_reference(run)
        if gaps is not None:
            own, reference = gaps
            return Judgement(
                severity=Severity.WARNING,
                confirmed=False,
                headline=f"the sampler is the reference: its log-probs are {number(own)} nats from the trainer's and "
                f"{number(reference)} from the reference's",
                message=f"over {counted(len(run.tokens), 'step')} the sampler's gap to the trainer grows to "
                f"{number(own)} nats, and that to the reference stays at {number(reference)}: it was never given the "
                "trained weights",
                evidence="the log-probs of sampler, trainer and reference",
                advice="check that the engine serves the adapter, and compare one of its weights with the trainer's",
            )
        if found.since is None or found.noise is None:
            return None
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=f"the sampler's log-probs stay while the trainer's move by {number(found.trainer)} nats, from "
            f"version {found.since} on",
            message=(
                f"in {percent(ratio(found.frozen, found.moved))} of {counted(found.moved, 'pair')} of one context "
                f"at two versions the sampler's log-prob moves by {number(found.sampler)} nats (median) "
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
