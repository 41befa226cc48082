"""The second pass of an evaluation for one objective: the terms of its tokens, summed up by row."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.schema import TRUNCATED
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.evaluation.blocks import Block, Scope, whole
from rolloutdoctor.evaluation.entropy import open_tokens
from rolloutdoctor.evaluation.response_ends import has_status
from rolloutdoctor.evaluation.rows import RowResult, in_scope
from rolloutdoctor.evaluation.scores import ratios_at_loss, sampler_correction_of
from rolloutdoctor.evaluation.token_sums import PerToken, TokenSums
from rolloutdoctor.formulas import kl
from rolloutdoctor.formulas.corrections.inside import inside_the_loss
from rolloutdoctor.formulas.losses.aggregation import Layout, row_weights
from rolloutdoctor.formulas.losses.future_kl import influence
from rolloutdoctor.formulas.losses.gates import importance_of_rows, kl_product, narrowed, over_packs, product
from rolloutdoctor.formulas.losses.levels import kept_mean, row_mean
from rolloutdoctor.formulas.losses.selections import SELECTIONS
from rolloutdoctor.formulas.losses.surrogates import SURROGATES
from rolloutdoctor.formulas.losses.terms import PolicyTerm, TokenInputs
from rolloutdoctor.objective.objective import Aggregation, KlTerm, Objective
from rolloutdoctor.ops import elementwise as el
from rolloutdoctor.ops import segments as seg

BY_ROW = frozenset(
    {
        *("trainer", "version", "advantage", "has_kl_loss", "reward_weights", "kl_buffer", "metric_columns"),
        *("also_logs", "context_slices", "entropy_bonus", "aggregation", "policy_aggregation", "baseline_rows"),
        *("policy", "kl", "denominator", "metric", "kl_reward", "correction"),
    }
)
"""Fields of an objective that reach a token by values of its row alone (scores, scopes, weights), or no token."""

_OPTIONAL = ("drift_N", "clipped_N", "capped_N", "logged_N")
_LOGITS = ("logits_low_sq_N", "logits_sq_N")
_NOT_SUMMED = ("layout", "weight_N", "policy_weight_N", "counted_N", "kl_loss_N", *_OPTIONAL, *_LOGITS)


class GeneralEvaluator:
    """The second pass for one objective: per-row sums that grow block by block."""

    def __init__(
        self, part: RowResult, batch: RolloutBatch, layout: Layout, dtype: torch.dtype, *, per_token: bool
    ) -> None:
        objective = part.objective
        assert part.length_N is not None  # loss_columns asked for the mask
        self.objective, self.part, self.batch, self.layout, self.dtype = objective, part, batch, layout, dtype
        self.counted_N, self.kept_T, self.inner_T = part.length_N, None, None
        if objective.policy_correction is not None:
            ratios = ratios_at_loss(batch, objective, self.layout.micro_N, dtype)
            self.kept_T, self.inner_T = inside_the_loss(ratios, objective.policy_correction, self.layout.forward_N)
            self.counted_N = seg.total(self.kept_T, batch.rows)
        corrected = sampler_correction_of(batch, objective, self.layout.micro_N, dtype)
        if corrected is not None:
            self.kept_T, self.inner_T = corrected.kept_T, corrected.gate_T
        self.chosen_T: Tensor | None = None
        self.on_policy = batch.stored_name(objective.surrogate.old) == batch.stored_name("policy_log_probs")
        self.advantage_N = None if part.advantage_N is None else part.advantage_N.to(dtype)
        self.weight_N = self._row_weights(objective.aggregation)
        self.of_policy_N = self.weight_N
        if objective.policy_aggregation is not None:
            self.of_policy_N = self._row_weights(objective.policy_aggregation)
        if objective.surrogate.coef != 1:
            self.of_policy_N = self.of_policy_N * objective.surrogate.coef
        self.policy_N = in_scope(batch, part, objective.policy)
        self.kl_N = in_scope(batch, part, objective.kl)
        self.policy_scope, self.kl_scope = Scope(self.policy_N), Scope(self.kl_N)
        self.coef = objective.kl_loss.coef if objective.kl_loss else 0.0
        self.policy_weight_N = (self.of_policy_N * self.policy_N).to(dtype)
        self.kl_weight_N = (self.weight_N * self.kl_N * self.coef).to(dtype)
        self.has_logits = "sum_pi_squared" in batch.per_token
        self.sums: dict[str, Tensor] = {}
        self.reference: GeneralEvaluator | None = None
        self.shares = self.some_zero_gradient = False
        self.differs_N = self.zero_gradient_N = torch.zeros(len(batch), dtype=torch.bool, device=batch.device)
        self.kept: list[tuple[Tensor, ...]] | None = [] if per_token else None
        self.open_T = self._over_more(open_tokens(batch, objective, layout))
        if objective.surrogate.kind in SELECTIONS:
            step = whole(batch, dtype)
            micro_T = step.expand(self.layout.micro_N)
            inputs = self._given(step)
            if inputs.unweighed_T is not None:
                inputs = replace(inputs, advantage_T=inputs.advantage_T / inputs.unweighed_T)
            self.chosen_T = SELECTIONS[objective.surrogate.kind](inputs, micro_T, objective.surrogate)

    def _over_more(self, open_T: Tensor | None) -> Tensor | None:
        """The multipliers that more than a block decides, ``[T]``; None for none."""
        packs = [gate for gate in self.objective.gates if gate.level == "pack"]
        future = [gate for gate in self.objective.gates if gate.kind == "future_kl"]
        if not packs and not future:
            return open_T
        step = whole(self.batch, self.dtype)
        inputs = self._given(step, gated=False)
        factors = [over_packs(inputs, step.column, gate, self.layout.micro_N) for gate in packs]
        mask_T, rule = self.batch.column("response_mask"), self.objective.surrogate
        factors += [influence(inputs, mask_T, self.batch.rows, gate, rule) for gate in future]
        weight_t = prod(factors[1:], start=factors[0])
        found_T = torch.zeros(self.batch.tokens, dtype=weight_t.dtype, device=weight_t.device)
        found_T[self.batch.column("response_mask")] = weight_t
        return found_T if open_T is None else found_T * open_T

    def _row_weights(self, rule: Aggregation) -> Tensor:
        """Weight of a token of every row under an aggregation, ``[N]`` float64."""
        counted_N = self.part.length_N
        assert counted_N is not None  # loss_columns asked for the mask
        if rule.counted_in_policy:
            counted_N = self.counted_N
        if rule.counted_before_rejection:
            counted_N = seg.total(self.batch.column("response_mask_pre"), self.batch.rows)
        if rule.counted_in_gates:
            step = whole(self.batch, self.dtype)
            gates = [gate for gate in self.objective.gates if gate.kind == "off_policy"]
            left_t = product(gates, self._given(step, gated=False), step.column, None)
            counted_N = counted_N if left_t is None else step.runs.total((left_t > 0).double())
        if rule.leaves_out_truncated:
            cut_N = has_status(self.batch.statuses, TRUNCATED, self.batch.device)
            counted_N = torch.where(cut_N, 0.0, counted_N)
        layout = self.layout
        if rule.leaves_out_rejected:
            rejected_N = (counted_N == 0) & (seg.trues(self.batch.column("response_mask_pre"), self.batch.rows) > 0)
            kept_N = layout.optim_total((~rejected_N).double())
            layout = replace(layout, optim_rows_N=kept_N, trajectories_N=kept_N)
        in_count_N = in_scope(self.batch, self.part, self.objective.denominator)
        counted_N = torch.where(in_count_N, counted_N, 0.0)
        # A row that no denominator counts has no weight, and a mean over its own tokens no meaning.
        weight_N = torch.where(in_count_N, row_weights(counted_N, layout, rule), 0.0)
        return weight_N / rule.eval_divisor if self.batch.split != TRAIN else weight_N

    def _given(self, block: Block, *, gated: bool = True) -> TokenInputs:
        """Return the inputs of the policy term for a block."""
        policy_T = block.column("policy_log_probs")
        rule = self.objective.surrogate
        old_T = policy_T if self.on_policy else block.column(rule.old)
        if rule.nan_log_prob is not None:
            old_T = torch.where(old_T.isnan(), rule.nan_log_prob, old_T)
        if self.advantage_N is not None:
            advantage_T = block.expand(self.advantage_N)
        else:
            assert self.part.advantage_T is not None
            advantage_T = block.packed(self.part.advantage_T).to(policy_T.dtype)
        gate_T = self.part.weight_T if self.inner_T is None else self.inner_T
        # Of one column with itself the log-ratio is 0, or NaN where the trainer gets NaN too.
        inputs = TokenInputs(
            policy_T,
            old_T,
            policy_T - old_T,
            advantage_T,
            block.runs,
            gate_T=None if gate_T is None else block.packed(gate_T).to(policy_T.dtype),
            chosen_T=None if self.chosen_T is None else block.packed_trained(self.chosen_T),
            cached=block.cached,
        )
        if rule.scaled_advantages:
            unweighed_N = self.layout.share_N / self.of_policy_N
            inputs = replace(inputs, unweighed_T=block.expand(unweighed_N.nan_to_num(0.0, 0.0, 0.0).to(self.dtype)))
        inputs = self._gated(inputs, block) if self.objective.gates and gated else inputs
        if rule.row_advantages:
            inputs = replace(inputs, advantage_T=kept_mean(inputs, inputs.advantage_T))
        return inputs

    def _gated(self, inputs: TokenInputs, block: Block) -> TokenInputs:
        """Add the multipliers of the policy term to the inputs."""
        gates = self.objective.gates
        inputs = narrowed(gates, inputs, block.column)
        open_T = None if self.open_T is None else block.packed(self.open_T)
        gate_T, kl_gate_T = product(gates, inputs, block.column, open_T), kl_product(gates, inputs, block.column)
        inside = [importance_of_rows(inputs, block.column, gate) for gate in gates if gate.inside]
        return replace(inputs, gate_T=gate_T, kl_gate_T=kl_gate_T, log_weight_N=inside[0] if inside else None)

    def compare_with(self, reference: "GeneralEvaluator") -> None:
        """Compare derivatives with those of `reference`, which every block goes through first."""
        self.reference = reference
        self.shares = self._can_share(reference)
        if self.shares:
            self.differs_N, self.zero_gradient_N = self._differs(reference), self._can_have_zero_gradient(reference)
            self.zero_gradient_N &= self.differs_N
            self.some_zero_gradient = bool(self.zero_gradient_N.any())
        else:
            self.differs_N = torch.ones_like(self.policy_N)

    def _can_share(self, other: "GeneralEvaluator") -> bool:
        """True if what both make of a token can differ only where a value of its row does."""
        if token_terms(self.objective) != token_terms(other.objective):
            return False
        mine, theirs = self._row_values(), other._row_values()
        if any((left is None) != (right is None) for left, right in zip(mine, theirs, strict=True)):
            return False
        return all(map(_same, self._token_values(), other._token_values()))

    def _differs(self, other: "GeneralEvaluator") -> Tensor:
        """Rows of which a value differs from another pass's, ``[N]`` bool."""
        differs_N = torch.zeros_like(self.policy_N)
        for mine_N, theirs_N in zip(self._row_values(), other._row_values(), strict=True):
            if mine_N is not None and theirs_N is not None:
                differs_N |= mine_N != theirs_N
        return differs_N

    def _can_have_zero_gradient(self, other: "GeneralEvaluator") -> Tensor:
        """Rows without a derivative: no KL term, and on both sides no advantage for the policy term, ``[N]`` bool."""
        if self.advantage_N is None or other.advantage_N is None or self.objective.surrogate.moves_without_advantage:
            return torch.zeros_like(self.policy_N)
        return ~self.kl_N & (self.advantage_N == 0) & (other.advantage_N == 0)

    def _token_values(self) -> tuple[Tensor | None, ...]:
        return self.part.advantage_T, self.part.weight_T, self.inner_T, self.kept_T, self.chosen_T, self.open_T

    def _row_values(self) -> tuple[Tensor | None, ...]:
        return self.policy_N, self.kl_N, self.policy_weight_N, self.kl_weight_N, self.advantage_N

    @property
    def recomputed_N(self) -> Tensor:
        """Rows that differ from the reference and may have a derivative, ``[N]`` bool."""
        return self.differs_N & ~self.zero_gradient_N

    def add_compared(self, block: Block, reference_T: Tensor) -> None:
        """Add the rows of a block that can differ from the reference, whose derivative is `reference_T`, ``[t]``."""
        assert self.reference is not None
        if self.some_zero_gradient:
            # A policy term without advantage is 0 times the ratio: NaN in the reference's sum says that this is not 0.
            self.zero_gradient_N[block.rows] &= self.reference.sums["policy_N"][block.rows] == 0
        part = block.of_rows(self.recomputed_N[block.rows])
        if part is not None:
            grad_T, other_T = self.add(part), part.of_block(reference_T)
            self._sum(part, "versus_dot_N", grad_T.double() * other_T)
            self._sum(part, "versus_l1_N", (grad_T - other_T).abs_())
        if self.kept is not None and self.shares:
            # Its sums were made without all of its tokens.
            self._keep(block, *self._values(block))

    def add(self, block: Block) -> Tensor:
        """Add a block and return its derivative, ``[t]``; its tokens are kept if they are wanted and all here."""
        inputs, term, kl_T, grad_T = self._values(block)
        if kl_T is not None and not self.shares:
            self._sum(block, "kl_N", kl_T)
        if kl_T is not None and inputs.kl_gate_T is not None:
            self._sum(block, "weighted_kl_N", kl_T * inputs.kl_gate_T)
        self._sum(block, "policy_N", term.value_T)
        if term.at_one_T is not None or inputs.gate_T is not None or self.advantage_N is None:
            self._sum(
                block,
                "loss_at_ratio_one_N",
                inputs.gated(-inputs.advantage_T) if term.at_one_T is None else term.at_one_T,
            )
        self._sum_metrics(block, inputs, term)
        self._sum_derivative(block, grad_T)
        if self.kept is not None and not self.shares:
            self._keep(block, inputs, term, kl_T, grad_T)
        return grad_T

    def _values(self, block: Block) -> tuple[TokenInputs, PolicyTerm, Tensor | None, Tensor]:
        """Return the inputs of the policy term, the term, the KL and the derivative, of the tokens of a block."""
        inputs = self._given(block)
        term = SURROGATES[self.objective.surrogate.kind](inputs, self.objective.surrogate)
        grad_T = self.policy_scope.inside(block, block.expand(self.policy_weight_N) * term.slope_T)
        if self.objective.kl_loss is None:
            return inputs, term, None, grad_T
        kl_T, kl_slope_T = self._kl(block, self.objective.kl_loss, inputs)
        if self.kept_T is not None and self.objective.sampler_correction is not None:
            kept_T = block.packed(self.kept_T)
            kl_T, kl_slope_T = torch.where(kept_T, kl_T, 0.0), torch.where(kept_T, kl_slope_T, 0.0)
        if inputs.kl_gate_T is not None:
            kl_slope_T = kl_slope_T * inputs.kl_gate_T
        grad_T = grad_T.add_(self.kl_scope.inside(block, block.expand(self.kl_weight_N) * kl_slope_T))
        return inputs, term, kl_T, grad_T

    def _sum_metrics(self, block: Block, inputs: TokenInputs, term: PolicyTerm) -> None:
        """Count what the trainers log of the policy term."""
        rule = self.objective.surrogate
        low, high = 1 - rule.clip_low, 1 + rule.clip_high
        if self.advantage_N is None:
            self._sum(block, "low_clipped_N", (term.ratio_T < low) & (inputs.advantage_T < 0))
            self._sum(block, "high_clipped_N", (term.ratio_T > high) & (inputs.advantage_T > 0))
        elif not self.shares:
            # The sign of a row's advantage is looked at in the end.
            places_P = el.outside(term.ratio_T, low, high)
            if places_P is not None:
                ratio_P = term.ratio_T[places_P]
                self._set(block, "low_clipped_N", block.runs.count(places_P[ratio_P < low]))
                self._set(block, "high_clipped_N", block.runs.count(places_P[ratio_P > high]))
        for name in ("drift_N", "clipped_N", "capped_N", "logged_N"):
            x_T = getattr(term, name[:-1] + "T")
            if x_T is not None:
                self._sum(block, name, x_T if self.kept_T is None else x_T * block.packed(self.kept_T))

    def _sum_derivative(self, block: Block, grad_T: Tensor) -> None:
        square_T = grad_T.double()
        square_T = square_T.square_() if square_T is not grad_T else square_T.square()
        self._sum(block, "grad_l1_N", grad_T.abs())
        self._sum(block, "grad_sq_N", square_T)
        if self.reference is not None:
            # Only the reference's are looked at.
            return
        low_T = square_T * block.one_minus_p_squared_T
        self._sum(block, "logits_low_sq_N", low_T)
        if self.has_logits:
            spread_T = 1 - 2 * block.column("policy_log_probs").double().exp()
            spread_T += block.column("sum_pi_squared")
            # Never below (1 - p)^2, but rounding of the column gets there where p is about one.
            self._sum(block, "logits_sq_N", torch.maximum(square_T * spread_T, low_T))

    def _keep(self, block: Block, inputs: TokenInputs, term: PolicyTerm, kl_T: Tensor | None, grad_T: Tensor) -> None:
        """Keep the token values of a block."""
        assert self.kept is not None
        loss_T = self.policy_scope.inside(block, block.expand(self.policy_weight_N) * term.value_T)
        if kl_T is None:
            kl_T = torch.zeros_like(loss_T)
        else:
            carried_T = kl_T if inputs.kl_gate_T is None else kl_T * inputs.kl_gate_T
            loss_T = loss_T + self.kl_scope.inside(block, block.expand(self.kl_weight_N) * carried_T)
        self.kept.append((inputs.advantage_T, kl_T, term.ratio_T, loss_T, grad_T))

    def _kl(self, block: Block, term: KlTerm, inputs: TokenInputs) -> kl.Term:
        key = ("kl", term, self.objective.surrogate.old)
        value_T, slope_T = block.cached(key, lambda: self._kl_afresh(block, term, inputs))
        return value_T, slope_T

    def _kl_afresh(self, block: Block, term: KlTerm, inputs: TokenInputs) -> kl.Term:
        assert term.reference is not None  # only a penalty in the reward may have none
        u_T = block.column(term.log_probs) - block.column(term.reference)
        ratio_T, gather = None, None
        if term.ratio_weighted and term.ratio_to is not None:
            ratio_T = (block.column("policy_log_probs") - block.column(term.ratio_to)).exp()
            ratio_T = torch.where(ratio_T.isfinite(), ratio_T, 0.0)
        elif term.ratio_weighted and term.ratio_level == "token":
            ratio_T = inputs.log_ratio_T.exp()
        elif term.ratio_weighted:
            # The tokens of a row have one weight in the loss, so the ratio of a row gathers over all of them.
            ratio_T, gather = row_mean(inputs, inputs.log_ratio_T).exp(), partial(row_mean, inputs)
        value_T, slope_T = kl.term(
            term.estimator,
            u_T,
            ratio_T,
            straight_through=term.straight_through,
            input_bound=term.input_bound,
            clamp=term.clamp,
            finite=term.finite,
            detached=term.log_probs != "policy_log_probs",
            gather=gather,
            bounds_ratio=term.bounds_ratio,
        )
        if term.weighted_slope is not None:
            drift_T = block.column("policy_log_probs") - block.column("old_log_probs")
            slope_T = drift_T.exp().clamp(max=term.weighted_slope) * u_T
        return value_T, slope_T

    def _sum(self, block: Block, name: str, x_T: Tensor) -> None:
        self._set(block, name, block.per_row(x_T))

    def _set(self, block: Block, name: str, sums_n: Tensor) -> None:
        if name not in self.sums:
            self.sums[name] = torch.zeros(len(self.batch), dtype=torch.float64, device=self.batch.device)
        el.put(self.sums[name], block.rows, sums_n)

    def _all_sums(self) -> dict[str, Tensor]:
        """Sums of all rows, ``[N]`` float64: those shared with the reference included, and the comparison with it."""
        if self.reference is None:
            return {**self.sums, "versus_dot_N": self.sums["grad_sq_N"]} if self.sums else {}
        # A row that does not differ has the reference's derivative, and one that is still has none.
        theirs = {name: sum_N for name, sum_N in self.reference.sums.items() if name not in _LOGITS}
        if theirs:
            none_N = torch.zeros_like(theirs["grad_l1_N"])
            l1_N, sq_N = (
                torch.where(self.zero_gradient_N, none_N, theirs[name]) for name in ("grad_l1_N", "grad_sq_N")
            )
            theirs |= {
                "versus_l1_N": torch.where(self.zero_gradient_N, theirs["grad_l1_N"], none_N),
                "versus_dot_N": sq_N,
            }
            theirs |= {"grad_l1_N": l1_N, "grad_sq_N": sq_N}
        if not self.shares:
            return self.sums
        recomputed_N = self.recomputed_N
        return {name: torch.where(recomputed_N, self.sums.get(name, sum_N), sum_N) for name, sum_N in theirs.items()}

    def result(self) -> tuple[TokenSums, PerToken | None]:
        """Put the blocks together."""
        zero_N = torch.zeros(len(self.batch), dtype=torch.float64, device=self.batch.device)
        names = [name for name in TokenSums.__dataclass_fields__ if name not in _NOT_SUMMED]
        row_sums = self._all_sums()
        sums = {name: row_sums.get(name, zero_N) for name in names}
        if self.advantage_N is not None:
            below_N, above_N = self.advantage_N < 0, self.advantage_N > 0
            sums["low_clipped_N"] = torch.where(below_N, sums["low_clipped_N"], 0.0)
            sums["high_clipped_N"] = torch.where(above_N, sums["high_clipped_N"], 0.0)
            if "loss_at_ratio_one_N" not in row_sums:
                # Without multipliers every token of a row has minus its advantage.
                sums["loss_at_ratio_one_N"] = -self.advantage_N.double() * self.batch.trained.diff()
        kl_loss_N = torch.where(self.kl_N, row_sums.get("weighted_kl_N", sums["kl_N"]) * self.coef, 0.0)
        share = self.objective.surrogate.empty_share
        if share is not None and self.advantage_N is not None:
            # No token carries the term of an empty row.
            assert self.part.length_N is not None  # loss_columns asked for the mask
            bare_N = torch.where(self.part.length_N == 0, -share * self.advantage_N.double(), 0.0)
            sums["policy_N"], sums["loss_at_ratio_one_N"] = (
                sums["policy_N"] + bare_N,
                sums["loss_at_ratio_one_N"] + bare_N,
            )
        sums["policy_N"] = torch.where(self.policy_N, sums["policy_N"], 0.0)
        sums["loss_at_ratio_one_N"] = torch.where(self.policy_N, sums["loss_at_ratio_one_N"], 0.0)
        tokens = TokenSums(
            layout=self.layout,
            weight_N=self.weight_N,
            policy_weight_N=self.of_policy_N,
            counted_N=self.counted_N,
            kl_loss_N=kl_loss_N,
            drift_N=row_sums.get("drift_N"),
            clipped_N=row_sums.get("clipped_N"),
            capped_N=row_sums.get("capped_N"),
            logged_N=row_sums.get("logged_N"),
            logits_low_sq_N=row_sums.get("logits_low_sq_N", zero_N) if self.reference is None else None,
            logits_sq_N=row_sums.get("logits_sq_N"),
            **sums,
        )
        return tokens, None if self.kept is None else self._per_token(self.kept)

    def _per_token(self, blocks: Sequence[tuple[Tensor, ...]]) -> PerToken:
        """The token values of the step, 0 where the mask is 0."""
        mask_T = self.batch.column("response_mask")
        columns = []
        for number in range(5):
            column_T = torch.zeros(self.batch.tokens, dtype=self.dtype, device=self.batch.device)
            if blocks:
                column_T[mask_T] = torch.cat([values[number] for values in blocks])
            columns.append(column_T)
        return PerToken(*columns)


def token_terms(objective: Objective) -> dict[str, object]:
    """Return the fields that decide the terms of a token, beside its columns and the values of its row."""
    return {field.name: getattr(objective, field.name) for field in fields(objective) if field.name not in BY_ROW}


def _same(mine_T: Tensor | None, theirs_T: Tensor | None) -> bool:
    """True if two values per token are the same everywhere."""
    if mine_T is None or theirs_T is None:
        return mine_T is theirs_T
    return mine_T is theirs_T or torch.equal(mine_T, theirs_T)
