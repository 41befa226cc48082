"""Count over the steps of a run how many logged values a hypothesis explains, and how much it changes."""

from math import sqrt

from rolloutdoctor.audit.tally import AuditTally, add_tallies
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import Evaluation
from rolloutdoctor.hypotheses.hypothesis import Hypothesis
from rolloutdoctor.results.audit import Cause
from rolloutdoctor.results.exact import ratio


class CauseCount:
    """What a cause explains and changes, over the steps of a run."""

    def __init__(self) -> None:
        self.base: AuditTally = {}
        self.found: AuditTally = {}
        self.steps: list[int] = []
        self.rows = self.moved = self.flips = 0
        self.shift = self.shift_max = 0.0
        self.gradient = [0.0] * 5

    def add(
        self,
        batch: RolloutBatch,
        base: AuditTally,
        found: AuditTally,
        before: Evaluation | None,
        after: Evaluation | None,
    ) -> None:
        """Add one step, audited and evaluated before and after the edit."""
        self.base, self.found = add_tallies(self.base, base), add_tallies(self.found, found)
        if any(tally.disagree and name in found and not found[name].disagree for name, tally in base.items()):
            self.steps.append(batch.step)
        if before is None or after is None:
            return
        self._advantages(before, after)
        if before.per_token is None or after.per_token is None:
            return
        recorded_T, made_T = before.per_token.grad_T.double(), after.per_token.grad_T.double()
        difference_T = made_T - recorded_T
        sums = (recorded_T.abs(), difference_T.abs(), recorded_T.square(), made_T.square(), recorded_T * made_T)
        for place, x_T in enumerate(sums):
            self.gradient[place] += float(x_T.nan_to_num(0.0).sum())

    def _advantages(self, before: Evaluation, after: Evaluation) -> None:
        if before.rows is None or after.rows is None:
            return
        old_N, new_N = before.rows.advantage_N, after.rows.advantage_N
        if old_N is None or new_N is None:
            return
        shift_N = (new_N - old_N).abs().nan_to_num(0.0)
        self.rows += len(shift_N)
        self.moved += int((shift_N > 1e-6 * old_N.abs().nan_to_num(0.0).clamp(min=1e-6)).sum())
        self.flips += int((old_N * new_N < 0).sum())
        self.shift += float(shift_N.sum())
        self.shift_max = max(self.shift_max, float(shift_N.max()) if len(shift_N) else 0.0)

    def measures(self) -> dict[str, tuple[float | None, str]]:
        """How much the cause changes: advantages, and the gradient in log-prob space."""
        recorded_l1, difference_l1, recorded_sq, made_sq, dot = self.gradient
        found: dict[str, tuple[float | None, str]] = {}
        if self.moved:
            found |= {
                "rows_changed": (self.moved, "rows"),
                "rows_changed_share": (ratio(self.moved, self.rows), "share"),
                "sign_flips": (self.flips, "rows"),
                "advantage_shift_mean": (ratio(self.shift, self.rows), "advantage"),
                "advantage_shift_max": (self.shift_max, "advantage"),
            }
        if difference_l1:
            found |= {
                "relative_change_l1": (ratio(difference_l1, recorded_l1), "share"),
                "kappa": (ratio(dot, recorded_sq), "1"),
                "cosine": (ratio(dot, sqrt(made_sq) * sqrt(recorded_sq)), "1"),
            }
        return found


def cause_of(one: Hypothesis, quantities: frozenset[str], also: tuple[str, ...], count: CauseCount) -> Cause:
    """Turn the counts of a hypothesis into a cause; its quantity is the one of most values."""
    explains = tuple(
        sorted(
            name
            for name, tally in count.base.items()
            if tally.disagree and name in count.found and count.found[name].disagree < tally.disagree
        )
    )
    quantity = max(sorted(quantities), key=lambda name: count.base[name].compared if name in count.base else 0)
    base, found = count.base[quantity], count.found[quantity]
    return Cause(
        hypothesis=one.name,
        code=one.code,
        words=one.words,
        remedy=one.remedy,
        quantity=quantity,
        compared=found.compared,
        as_recorded=base.agree,
        as_found=found.agree,
        worst=found.worst,
        explains=explains,
        also=also,
        measures=count.measures(),
        steps=(min(count.steps), max(count.steps), len(set(count.steps))) if count.steps else None,
        references=one.references,
    )
