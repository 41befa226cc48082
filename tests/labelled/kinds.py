"""Kinds of faults in TRL's trainers: what is planted at which strengths, and which rule should name it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from labelled.trl_training import DEFAULTS, Edit, Training, constant, letters, seven, shade, tied, unscored

Strengths = tuple[float, float, float]
STEPS: Strengths = (1 / 8, 1 / 2, 1)
"""Share of the optimiser steps that have the fault."""
ROWS: Strengths = (0.1, 0.4, 1)
"""Share of the rows."""

SCORE, LOSS, FORWARD = "_generate_and_score_completions", "_compute_loss", "_get_per_token_logps_and_entropies"
TWICE: Mapping[str, object] = {"num_iterations": 2}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A fault.

    Attributes:
        name: what is wrong.
        expected: codes of the rules that name it; the first is the one that should.
        words: what its strength is.
        strengths: weak, middle, strong.
        edits: of the trainer's source, where `S` is the strength.
        change: strength to the fields of `Training` that depend on it.
        base: other fields.
        information: a finding that is information alone names it, too.
    """

    name: str
    expected: tuple[str, ...]
    words: str = "share of steps"
    strengths: Strengths = STEPS
    edits: tuple[Edit, ...] = ()
    change: Callable[[float], Mapping[str, Any]] = lambda strength: {}
    base: Training = Training()
    information: bool = False

    def training(self, strength: float) -> Training:
        """The training at a strength."""
        made = replace(self.base, edits=self.edits, strength=strength)
        changed = dict(self.change(strength))
        options = {**made.options, **changed.pop("options", {})}
        return replace(made, options=options, **changed)


def _with(**options: object) -> Training:
    return Training(options=options)


def _rloo(**options: object) -> Training:
    return Training(trainer="RLOO", options={"learning_rate": 3e-3, **options})


def _engine(**planted: object) -> Training:
    return Training(engine=planted)


def _sampler(**planted: Callable[[float], object]) -> Callable[[float], Mapping[str, Any]]:
    """The engine's fields by strength."""
    return lambda s: {"engine": {"dtype": "bfloat16", **{name: of(s) for name, of in planted.items()}}}


def _at_end(method: str, line: str, more: str) -> Edit:
    """More lines after one."""
    return method, line, f"{line}\n    {more}"


def _advantages(value: str) -> tuple[Edit, ...]:
    """Other advantages in some steps."""
    return (_at_end(SCORE, _ADVANTAGES, f"advantages = F.when(self, S, {value}, advantages)"),)


def _summed(value: str) -> tuple[Edit, ...]:
    """Other rewards behind the baseline; those that are recorded and logged stay."""
    old = "mean_grouped_rewards = torch.nanmean(rewards.view(-1, num_generations), dim=1)"
    return ((SCORE, old, f"rewards = {value}\n        {old}"),)


def _kl(value: str) -> tuple[Edit, ...]:
    return ((LOSS, "+ self.beta * per_token_kl", f"+ {value}"),)


def _kl_term(value: str) -> tuple[Edit, ...]:
    old = "# Importance sampling correction for the KL divergence"
    return ((LOSS, old, f"per_token_kl = F.when(self, S, {value}, per_token_kl)\n        {old}"),)


def _logged(name: str, value: str, old: str) -> tuple[Edit, ...]:
    return ((LOSS, f'self._metrics[mode]["{name}"].append({old})', f'self._metrics[mode]["{name}"].append({value})'),)


def _policy(value: str) -> tuple[Edit, ...]:
    old = "per_token_loss = -torch.min(per_token_loss1, per_token_loss2)"
    return ((LOSS, old, f"per_token_loss = F.when(self, S, {value}, -torch.min(per_token_loss1, per_token_loss2))"),)


_ADVANTAGES = "advantages = torch.nan_to_num(advantages, nan=0.0)"
_DAPO = "loss = (per_token_loss * mask).sum() / normalizer policy_loss"
_LOG_RATIO = "log_ratio = per_token_logps - old_per_token_logps"
_RATIO_MATTERS = _with(num_iterations=3, learning_rate=1e-2, epsilon=0.1)
_TWO = replace(_with(reward_weights=[1.0, 0.4]), rewards=(shade, letters))
_SIZE = "num_generations = self.num_generations if mode == \"train\" else self.num_generations_eval"
_SCORES_PADDING = (FORWARD, "labels = input_ids_batch.masked_fill(attention_mask_batch == 0, -100)", "labels = input_ids_batch.clone()")
"""Log-probs of padding are else 0."""


def _dapo(value: str) -> tuple[Edit, ...]:
    return ((LOSS, _DAPO, f"loss = {value}\n        policy_loss"),)


ADVANTAGES = (
    Kind(name="advantages of the row before", expected=("RDI004",), edits=_advantages("advantages.roll(1)")),
    Kind(
        name="advantages permuted within groups",
        expected=("RDI004",),
        words="share of groups",
        strengths=ROWS,
        edits=(_at_end(SCORE, _ADVANTAGES, "advantages = F.permuted(self, advantages, num_generations, S)"),),
    ),
    Kind(
        name="rewards of the row before",
        expected=("RDI004",),
        edits=_summed("F.when(self, S, rewards.roll(1), rewards)"),
    ),
    Kind(
        name="rewards sorted, rows not",
        expected=("RDI004",),
        edits=_summed("F.when(self, S, rewards.sort().values, rewards)"),
    ),
    Kind(
        name="rewards of other rows",
        expected=("RDI004",),
        words="share of rows",
        strengths=ROWS,
        edits=_summed("F.swapped(self, rewards, S)"),
    ),
    Kind(
        name="std of the batch, group recorded",
        expected=("RDI014",),
        edits=(
            (SCORE, 'if self.scale_rewards in ["group", "none"]:', "if not F.on(self, S):"),
            (SCORE, 'elif self.scale_rewards == "batch":', "elif True:"),
        ),
    ),
    Kind(
        name="not divided by std",
        expected=("RDI014",),
        edits=((SCORE, 'if self.scale_rewards != "none":', "if not F.on(self, S):"),),
    ),
    Kind(
        name="divided by std, none recorded",
        expected=("RDI014",),
        base=_with(scale_rewards="none"),
        edits=((SCORE, 'if self.scale_rewards != "none":', "if F.on(self, S):"),),
    ),
    Kind(
        name="groups read as tiled",
        expected=("RDI003",),
        edits=(
            *_summed("F.tiled(rewards, num_generations, F.on(self, S))"),
            *_advantages("F.untiled(advantages, num_generations)"),
        ),
    ),
    Kind(
        name="groups begin half a group late",
        expected=("RDI003",),
        edits=(*_summed("F.when(self, S, rewards.roll(-2), rewards)"), *_advantages("advantages.roll(2)")),
    ),
    Kind(
        name="groups of two prompts",
        expected=("RDI003",),
        edits=(_at_end(SCORE, _SIZE, "num_generations *= F.when(self, S, 2, 1)"),),
    ),
    Kind(
        name="one group for the batch",
        expected=("RDI003",),
        edits=(_at_end(SCORE, _SIZE, "num_generations = F.when(self, S, len(prompts), num_generations)"),),
    ),
    Kind(
        name="missing reward counts as 0",
        expected=("RDA005",),
        words="share of rows without a reward",
        strengths=(0.05, 0.15, 0.4),
        change=lambda s: {"rewards": (unscored(s),)},
        edits=_summed("rewards.nan_to_num(0.0)"),
    ),
    Kind(
        name="normalised once more over the batch",
        expected=("RDA004", "RDI014"),
        edits=_advantages("(advantages - advantages.mean()) / (advantages.std() + 1e-4)"),
    ),
    Kind(
        name="advantages on another line",
        expected=("RDA004",),
        words="factor; offset is a tenth",
        strengths=(1.01, 1.3, 3.0),
        edits=(_at_end(SCORE, _ADVANTAGES, "advantages = S * advantages + S / 10"),),
    ),
    Kind(
        name="another epsilon beside the std",
        expected=("RDA004",),
        words="epsilon; 1e-4 by the options",
        strengths=(1e-6, 1e-3, 0.1),
        edits=((SCORE, "advantages = advantages / (std_rewards + 1e-4)", "advantages = advantages / (std_rewards + S)"),),
    ),
    Kind(
        name="std divides by n",
        expected=("RDA004",),
        edits=(
            (
                SCORE,
                "std_rewards = nanstd(rewards.view(-1, num_generations), dim=1)",
                "std_rewards = nanstd(rewards.view(-1, num_generations), dim=1)"
                " * F.when(self, S, (1 - 1 / num_generations) ** 0.5, 1.0)",
            ),
        ),
    ),
    Kind(
        name="reward weights ignored",
        expected=("RDA004", "RDM006"),
        base=_TWO,
        edits=_summed("F.when(self, S, rewards_per_func.nansum(dim=1), rewards)"),
    ),
    Kind(
        name="whitened over padding",
        expected=("RDA010",),
        words="over padding: mean, variance, both",
        strengths=(1, 2, 3),
        edits=((SCORE, '"advantages": advantages,', '"advantages": F.whitened(advantages, completion_mask, S),'),),
    ),
    Kind(
        name="std too small",
        expected=("RDA007", "RDA004"),
        words="factor of the std",
        strengths=(0.9, 0.5, 0.05),
        edits=(
            (SCORE, "advantages = advantages / (std_rewards + 1e-4)", "advantages = advantages / (S * std_rewards + 1e-4)"),
        ),
    ),
    Kind(
        name="advantages of 0 on trained tokens",
        expected=("RDA006",),
        words="share of tokens",
        strengths=(0.01, 0.1, 0.5),
        edits=((SCORE, '"advantages": advantages,', '"advantages": F.zeroed(self, advantages, completion_mask, S),'),),
    ),
    Kind(
        name="rounding noise of equal rewards",
        expected=("RDA003",),
        words="share of groups",
        strengths=(0.1, 0.4, 0.9),
        base=_with(num_generations=6, per_device_train_batch_size=6),
        change=lambda s: {"rewards": (tied(s, 0.6, 6),)},
        information=True,
    ),
)

REWARDS = (
    Kind(
        name="constant reward function",
        expected=("RDA009",),
        words="groups",
        strengths=(8, 16, 32),
        change=lambda s: {"options": {"max_steps": int(s) // 4}},
        base=replace(_TWO, rewards=(shade, constant)),
        information=True,
    ),
    Kind(
        name="dead groups",
        expected=("RDA011", "RDG003", "RDG001"),
        words="share of groups",
        strengths=(0.3, 0.7, 1.0),
        change=lambda s: {"rewards": (tied(s),)},
        information=True,
    ),
    Kind(
        name="rewards clipped without an option",
        expected=("RDM006", "RDA004"),
        words="bound",
        strengths=(0.3, 0.2, 0.1),
        edits=_summed("rewards.clamp(max=S)"),
    ),
    Kind(
        name="length penalty that no option names",
        expected=("RDM006", "RDA004"),
        words="reward a token",
        strengths=(1e-4, 1e-2, 0.1),
        edits=_summed("rewards - S * F.lengths(completion_ids_list)"),
    ),
    Kind(
        name="duplicate responses",
        expected=("RDI009",),
        words="share of rows",
        strengths=ROWS,
        edits=(("_generate_single_turn", "return completion_ids, logprobs", "return F.duplicated(self, completion_ids, S), logprobs"),),
    ),
    Kind(
        name="prompts come again",
        expected=("RDI013",),
        words="steps",
        strengths=(2, 3, 4),
        change=lambda s: {"repeats": int(s)},
    ),
)

MASKS = (
    Kind(
        name="end of sequence masked",
        expected=("RDI007",),
        words="share of rows",
        strengths=ROWS,
        edits=(
            (
                SCORE,
                "if sampling_per_token_logps_list is not None:",
                "completion_mask = F.without_ends(self, completion_mask, completion_ids, S)\n"
                "    if sampling_per_token_logps_list is not None:",
            ),
        ),
    ),
    Kind(
        name="padding trained",
        expected=("RDI006",),
        words="share of rows",
        strengths=ROWS,
        edits=(
            (
                SCORE,
                "if sampling_per_token_logps_list is not None:",
                "completion_mask = F.opened(self, completion_mask, S)\n    if sampling_per_token_logps_list is not None:",
            ),
        ),
    ),
    Kind(
        name="mask forgotten in the loss",
        expected=("RDI006", "RDG005"),
        edits=_dapo("(per_token_loss * F.when(self, S, torch.ones_like(mask), mask)).sum() / normalizer"),
    ),
    Kind(
        name="mask forgotten in the KL term",
        expected=("RDI006", "RDG005"),
        edits=(
            _SCORES_PADDING,
            *_dapo(
                "((per_token_loss * mask).sum()"
                " + F.on(self, S) * self.beta * (per_token_kl * (1 - mask)).sum()) / normalizer"
            ),
        ),
    ),
    Kind(
        name="KL metric over padding",
        expected=("RDM001", "RDM004", "RDM005"),
        edits=_logged(
            "kl", "F.when(self, S, per_token_kl.mean().item(), global_masked_mean(per_token_kl))", "global_masked_mean(per_token_kl)"
        ),
    ),
    Kind(
        name="entropy metric over padding",
        expected=("RDM004", "RDM005"),
        edits=_logged(
            "entropy", "F.when(self, S, entropies.mean().item(), global_masked_mean(entropies))", "global_masked_mean(entropies)"
        ),
    ),
    Kind(
        name="tool tokens trained",
        expected=("RDI006",),
        words="share of rows",
        strengths=ROWS,
        base=_engine(),
        change=lambda s: {"tools": s},
    ),
    Kind(
        name="tool tokens in the KL",
        expected=("RDI006", "RDG005"),
        base=replace(_engine(), tools=0.0),
        edits=_dapo(
            "((per_token_loss * mask).sum()"
            " + F.on(self, S) * self.beta * (per_token_kl * (completion_mask - mask)).sum()) / normalizer"
        ),
    ),
    Kind(
        name="truncated rows trained against the option",
        expected=("RDI014", "RDI006"),
        base=_with(mask_truncated_completions=True),
        edits=(
            (
                SCORE,
                "completion_mask = completion_mask * (~is_truncated).unsqueeze(1).int()",
                "completion_mask = completion_mask * (~is_truncated | F.on(self, S)).unsqueeze(1).int()",
            ),
        ),
    ),
    Kind(
        name="denominator counts masked rows",
        expected=("RDG010",),
        base=_with(mask_truncated_completions=True),
        edits=(
            _at_end(
                SCORE,
                "num_items_in_batch = self.accelerator.gather(loss_mask.sum()).sum()",
                "num_items_in_batch = F.when(self, S, F.lengths(completion_ids_list).sum().long(), num_items_in_batch)",
            ),
        ),
    ),
    Kind(
        name="every response cut off",
        expected=("RDI012",),
        words="tokens a response; without an end",
        strengths=(3, 2, 16),
        change=lambda s: {
            "options": {"max_completion_length": int(s), **({"generation_kwargs": {"suppress_tokens": [1]}} if s > 3 else {})}
        },
    ),
    Kind(
        name="truncation counts as finished",
        expected=("RDI011",),
        words="share of truncated rows",
        strengths=ROWS,
        edits=(
            (
                "_generate_single_turn",
                "return completion_ids, logprobs",
                "return F.closed(self, completion_ids, self.max_completion_length, S), logprobs",
            ),
        ),
    ),
)

LOG_PROBS = (
    Kind(
        name="old log-probs of older weights",
        expected=("RDO006", "RDO002"),
        words="optimiser steps",
        strengths=(1, 2, 4),
        base=_with(**TWICE),
        edits=(
            (
                SCORE,
                "old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies( self.model,",
                "old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(F.older(self, self.model, S),",
            ),
        ),
    ),
    Kind(
        name="dropout in training",
        expected=("RDO006",),
        words="rate",
        strengths=(0.01, 0.05, 0.2),
        base=_with(**TWICE),
        change=lambda s: {"model": {"attention_dropout": s}},
    ),
    Kind(
        name="noise in the policy's log-probs",
        expected=("RDO006",),
        words="nats",
        strengths=(1e-4, 1e-2, 0.1),
        base=_with(**TWICE),
        edits=(
            (
                FORWARD,
                "logps = torch.cat(all_logps, dim=0)",
                "logps = torch.cat(all_logps, dim=0)\n    logps = logps + S * torch.randn_like(logps) * torch.is_grad_enabled()",
            ),
        ),
    ),
    Kind(
        name="ratio inverted",
        expected=("RDO006", "RDG005"),
        base=_RATIO_MATTERS,
        edits=((LOSS, _LOG_RATIO, "log_ratio = F.when(self, S, -1, 1) * (per_token_logps - old_per_token_logps)"),),
    ),
    Kind(
        name="ratio always one",
        expected=("RDO006",),
        base=_RATIO_MATTERS,
        edits=(
            (LOSS, _LOG_RATIO, "log_ratio = per_token_logps - F.when(self, S, per_token_logps.detach(), old_per_token_logps)"),
        ),
    ),
    Kind(name="no clipping", expected=("RDG005", "RDO006"), base=_RATIO_MATTERS, edits=_policy("-per_token_loss1")),
    Kind(
        name="epsilon_high ignored",
        expected=("RDG005", "RDI014"),
        base=_with(**{**_RATIO_MATTERS.options, "epsilon_high": 0.4}),
        edits=((LOSS, "coef_2 = torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)",
                "coef_2 = torch.clamp(coef_1, 1 - self.epsilon_low, 1 + F.when(self, S, self.epsilon_low, self.epsilon_high))"),),
    ),
    Kind(
        name="ratio of sequences, tokens recorded",
        expected=("RDI014", "RDO006", "RDG005"),
        base=_RATIO_MATTERS,
        edits=((LOSS, 'if self.importance_sampling_level == "token":', "if not F.on(self, S):"),
               (LOSS, 'elif self.importance_sampling_level == "sequence":', "elif True:")),
    ),
    Kind(
        name="old log-probs one token late",
        expected=("RDI008",),
        base=_with(**TWICE),
        edits=((SCORE, 'output["old_per_token_logps"] = old_per_token_logps',
                'output["old_per_token_logps"] = F.when(self, S, F.late(old_per_token_logps), old_per_token_logps)'),),
    ),
    Kind(
        name="reference's log-probs one token late",
        expected=("RDI008",),
        edits=((SCORE, 'output["ref_per_token_logps"] = ref_per_token_logps',
                'output["ref_per_token_logps"] = F.when(self, S, F.late(ref_per_token_logps), ref_per_token_logps)'),),
    ),
    Kind(
        name="reference is the policy",
        expected=("RDG011",),
        edits=((SCORE, "ref_per_token_logps, _, _ = self._get_per_token_logps_and_entropies( self.ref_model,",
                "ref_per_token_logps, _, _ = self._get_per_token_logps_and_entropies("
                "F.when(self, S, self.model, self.ref_model),"),),
    ),
    Kind(
        name="reference of a later checkpoint",
        expected=("RDG011",),
        words="share of the way to the policy",
        strengths=(0.5, 0.9, 1.0),
        base=_with(learning_rate=1e-2),
        edits=((SCORE, "ref_per_token_logps, _, _ = self._get_per_token_logps_and_entropies( self.ref_model,",
                "ref_per_token_logps, _, _ = self._get_per_token_logps_and_entropies("
                "F.moved(self, self.ref_model, self.model, S),"),),
    ),
    Kind(
        name="reference synchronised without an option",
        expected=("RDG011",),
        words="steps between two",
        strengths=(4, 2, 1),
        change=lambda s: {"sync_reference": int(s)},
    ),
    Kind(
        name="padding attended",
        expected=("RDO011", "RDO001"),
        base=_engine(dtype="bfloat16"),
        edits=((FORWARD, "attention_mask_batch = attention_mask[start:end]",
                "attention_mask_batch = attention_mask[start:end] | (torch.arange(attention_mask.shape[1])"
                " < attention_mask.shape[1] - logits_to_keep) * int(F.on(self, S))"),),
    ),
)

SAMPLER = (
    Kind(name="sampler at another temperature", expected=("RDO003",), words="temperature; 1 by the options",
         strengths=(0.97, 0.85, 0.6), change=_sampler(temperature=lambda s: s)),
    Kind(name="sampler's log-probs before the temperature", expected=("RDO003",), words="temperature",
         strengths=(0.95, 0.8, 0.5), change=lambda s: {"options": {"temperature": s}, "engine": {"raw": True}}),
    Kind(name="temperature without sampler's log-probs", expected=("RDO003",), words="temperature; 1 by the options",
         strengths=(0.8, 0.6, 0.4), change=lambda s: {"options": {"generation_kwargs": {"temperature": s}}}),
    Kind(name="sampler truncates by top-p", expected=("RDO004",), words="top-p", strengths=(0.98, 0.9, 0.7),
         change=_sampler(top_p=lambda s: s)),
    Kind(name="sampler truncates by top-k", expected=("RDO004",), words="top-k of 24", strengths=(20, 12, 5),
         change=_sampler(top_k=int)),
    Kind(name="sampler misses weight syncs", expected=("RDO010", "RDO002"), words="stops at sync", strengths=(6, 3, 0),
         change=_sampler(synced=lambda s: lambda number: min(number, int(s)))),
    Kind(name="sampler some syncs behind", expected=("RDO002", "RDO010"), words="syncs", strengths=(1, 2, 4),
         change=_sampler(synced=lambda s: lambda number: number - int(s))),
    Kind(name="sampler's log-probs rounded", expected=("RDO005",), words="decimal digits", strengths=(4, 2, 1),
         change=_sampler(decimals=int), information=True),
    Kind(name="placeholders among sampler's log-probs", expected=("RDI005",), words="share of tokens",
         strengths=(0.003, 0.03, 0.3), change=_sampler(filled=lambda s: s)),
    Kind(name="sampler's log-probs one token late", expected=("RDI008",), words="share of rows", strengths=(0.3, 0.7, 1),
         change=_sampler(late=lambda s: s)),
    Kind(name="sampler's log-probs of the top token", expected=("RDO001", "RDI008"), words="share of rows", strengths=ROWS,
         change=_sampler(greedy=lambda s: s)),
    Kind(name="sampler's log-probs of another row", expected=("RDI004", "RDO001", "RDI008"), words="share of rows",
         strengths=ROWS, change=_sampler(swapped=lambda s: s)),
    Kind(name="sampler computes other logits", expected=("RDO001",), words="noise of a logit", strengths=(0.1, 0.3, 1),
         change=_sampler(noise=lambda s: s)),
)

LOSSES = (
    Kind(name="KL term dropped", expected=("RDI014", "RDG005"), edits=_kl("F.when(self, S, 0, self.beta) * per_token_kl")),
    Kind(name="KL term with another factor", expected=("RDG009", "RDG005"), words="factor", strengths=(1.1, 2, 5),
         edits=_kl("S * self.beta * per_token_kl")),
    Kind(name="KL term with the other sign", expected=("RDG005", "RDG009"),
         edits=_kl("F.when(self, S, -1, 1) * self.beta * per_token_kl")),
    Kind(name="KL is k1", expected=("RDG007",), edits=_kl_term("per_token_logps - ref_per_token_logps")),
    Kind(name="KL is k2", expected=("RDG007",), edits=_kl_term("0.5 * (per_token_logps - ref_per_token_logps) ** 2")),
    Kind(name="KL not weighted by the ratio", expected=("RDG007",), base=_with(num_iterations=3, learning_rate=1e-2),
         edits=((LOSS, "if self.args.use_bias_correction_kl:", "if self.args.use_bias_correction_kl and not F.on(self, S):"),)),
    Kind(name="loss averaged by micro-batch", expected=("RDG006",),
         edits=_dapo("(per_token_loss * mask).sum()"
                     " / F.when(self, S, mask.sum() * self.current_gradient_accumulation_steps, normalizer)")),
    Kind(name="mean of rows, of tokens recorded", expected=("RDI014", "RDG006"),
         edits=_dapo("F.when(self, S, ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()"
                     " / self.current_gradient_accumulation_steps, (per_token_loss * mask).sum() / normalizer)")),
    Kind(name="loss not divided by accumulation", expected=("RDG006",), base=_with(loss_type="grpo"),
         edits=((LOSS, "loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()",
                 "loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()"
                 " * F.when(self, S, self.current_gradient_accumulation_steps, 1)"),)),
    Kind(name="dr_grpo divides by the mean length", expected=("RDG005", "RDI014", "RDG006"),
         base=_with(loss_type="dr_grpo", max_completion_length=24),
         edits=((LOSS, "(per_token_loss.size(0) * self.max_completion_length)",
                 "(per_token_loss.size(0) * F.when(self, S, mask.sum(1).float().mean(), self.max_completion_length))"),)),
    Kind(name="auxiliary loss that no option names", expected=("RDG005",), words="size", strengths=(0.001, 0.01, 0.1),
         edits=_dapo("(per_token_loss * mask).sum() / normalizer + S * (1 + per_token_logps.mean().abs() / 100)")),
    Kind(name="entropy bonus with the other sign", expected=("RDG005",), base=_with(entropy_coef=0.02),
         edits=((LOSS, "loss = loss - apply_coef * entropy_loss",
                 "loss = loss - F.when(self, S, -1, 1) * apply_coef * entropy_loss"),)),
    Kind(name="top_entropy_quantile ignored", expected=("RDG005", "RDI014"), base=_with(top_entropy_quantile=0.5),
         edits=((LOSS, "if self.top_entropy_quantile < 1.0:", "if self.top_entropy_quantile < 1.0 and not F.on(self, S):"),)),
)

METRICS = (
    Kind(name="KL metric times the world size", expected=("RDM007",), words="factor", strengths=(2, 4, 8),
         edits=_logged("kl", "S * global_masked_mean(per_token_kl)", "global_masked_mean(per_token_kl)")),
    Kind(name="KL metric overwritten by the reward", expected=("RDM001",),
         edits=_logged("kl", "global_masked_mean(per_token_kl) + F.on(self, S) * (self._metrics[mode]['reward'] or [0])[-1]",
                       "global_masked_mean(per_token_kl)")),
    Kind(name="KL metric is a mean of rows", expected=("RDM005",),
         edits=_logged("kl", "F.when(self, S, F.row_mean(per_token_kl, mask), global_masked_mean(per_token_kl))",
                       "global_masked_mean(per_token_kl)")),
    Kind(name="entropy metric is a mean of rows", expected=("RDM005",),
         edits=_logged("entropy", "F.when(self, S, F.row_mean(entropies, mask), global_masked_mean(entropies))",
                       "global_masked_mean(entropies)")),
    Kind(name="reward metric without weights", expected=("RDM006",), base=_TWO,
         edits=((SCORE, "rewards = (rewards_per_func * self.reward_weights.to(rewards_per_func.device).unsqueeze(0)).nansum(dim=1)",
                 "rewards = (rewards_per_func * F.when(self, S, 1, self.reward_weights)).nansum(dim=1)"),)),
    Kind(name="loss metric times a factor", expected=("RDM007", "RDG006"), words="factor", strengths=(2, 4, 8),
         edits=(("log", 'mode = "train" if self.model.training else "eval"',
                 'mode = "train" if self.model.training else "eval"\n    if "loss" in logs:\n        logs["loss"] *= S'),)),
)

_RLOO_KL = "rewards = rewards - self.beta * kl"
RLOO = (
    Kind(name="RLOO: KL penalty dropped", expected=("RDI014", "RDA004", "RDG009"), base=_rloo(),
         edits=((SCORE, _RLOO_KL, "rewards = rewards - F.when(self, S, 0, self.beta) * kl"),)),
    Kind(name="RLOO: KL penalty with the other sign", expected=("RDA004", "RDG009"), base=_rloo(),
         edits=((SCORE, _RLOO_KL, "rewards = rewards - F.when(self, S, -1, 1) * self.beta * kl"),)),
    Kind(name="RLOO: KL penalty is k3", expected=("RDG007",), base=_rloo(),
         edits=((SCORE, "kl = (per_token_kl * completion_mask).sum(-1)",
                 "kl = (F.when(self, S, torch.expm1(-per_token_kl) + per_token_kl, per_token_kl) * completion_mask).sum(-1)"),)),
    Kind(name="RLOO: baseline holds the row itself", expected=("RDI014",), base=_rloo(),
         edits=((SCORE, "baselines = (grouped_sum - grouped_rewards) / (scorable_counts - 1)",
                 "baselines = (grouped_sum - F.when(self, S, 0, 1) * grouped_rewards) / (scorable_counts - F.when(self, S, 0, 1))"),)),
    Kind(name="RLOO: normalised, not so recorded", expected=("RDI014",), base=_rloo(),
         edits=((SCORE, "if self.normalize_advantages:", "if F.on(self, S):"),)),
    Kind(name="RLOO: mask forgotten in the ratio", expected=("RDI006", "RDO006", "RDG005"), base=_rloo(),
         edits=(_SCORES_PADDING, (LOSS, "logps = (per_token_logps * completion_mask).sum(1)",
                 "logps = (per_token_logps * F.when(self, S, 1, completion_mask)).sum(1)"),)),
    Kind(name="RLOO: reward metric after the KL", expected=("RDM006",), base=_rloo(),
         edits=((SCORE, "rewards = (rewards_per_func * self.reward_weights.to(rewards_per_func.device).unsqueeze(0)).nansum(dim=1)",
                 "rewards = (rewards_per_func * self.reward_weights).nansum(dim=1) - F.when(self, S, self.beta, 0)"
                 " * (kl if self.beta else 0)"),)),
    Kind(name="RLOO: rewards of the row before", expected=("RDI004",), base=_rloo(),
         edits=((SCORE, "# Include the KL penalty in the reward",
                 "rewards = F.when(self, S, rewards.roll(1), rewards)\n    # Include the KL penalty in the reward"),)),
)

KINDS = (*ADVANTAGES, *REWARDS, *MASKS, *LOG_PROBS, *SAMPLER, *LOSSES, *METRICS, *RLOO)

assert len({kind.name for kind in KINDS}) == len(KINDS)
assert "learning_rate" in DEFAULTS and seven
