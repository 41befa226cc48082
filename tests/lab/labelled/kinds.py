"""Kinds of faults in TRL's trainers: what is planted at which strengths, and which rule should name it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from labelled.trl_training import Edit, Training, constant, lengthy, letters, shade, tied, unscored

Strengths = tuple[float, float, float]
STEPS: Strengths = (1 / 8, 1 / 2, 1)
"""Share of the optimizer steps that have the fault."""
ROWS: Strengths = (0.1, 0.4, 1)
"""Share of the rows, or of the groups."""
FACTORS: Strengths = (2, 4, 8)

SCORE, LOSS, FORWARD = "_generate_and_score_completions", "_compute_loss", "_get_per_token_logps_and_entropies"
GENERATE = "_generate_single_turn"


@dataclass(frozen=True)
class Kind:
    """A fault.

    Attributes:
        name: what is wrong.
        expected: codes of the rules that name it; the first is the one that should.
        edits: of the trainer's source, where `S` is the strength.
        base: what else is particular of its trainings.
        strengths: weak, middle, strong.
        words: what its strength is.
        change: strength to the fields of `Training` that depend on it.
        information: a finding that is information alone names it, too.
    """

    name: str
    expected: tuple[str, ...]
    edits: tuple[Edit, ...]
    base: Training
    strengths: Strengths
    words: str
    change: Callable[[float], Mapping[str, Any]]
    information: bool

    def training(self, strength: float) -> Training:
        """The training at a strength."""
        changed = dict(self.change(strength))
        options = {**self.base.options, **changed.pop("options", {})}
        return replace(self.base, edits=self.edits, strength=strength, options=options, **changed)


def _kind(
    name: str,
    expected: str,
    *edits: Edit,
    on: Training | None = None,
    by: tuple[Strengths, str] = (STEPS, "share of steps"),
    change: Callable[[float], Mapping[str, Any]] = lambda strength: {},
    information: bool = False,
) -> Kind:
    return Kind(name, tuple(expected.split()), edits, on or Training(), *by, change, information)


def _with(**options: object) -> Training:
    return Training(options=options)


def _sampler(**planted: Callable[[float], object]) -> Callable[[float], Mapping[str, Any]]:
    """The engine's fields by strength."""
    return lambda s: {"engine": {"dtype": "bfloat16", **{name: of(s) for name, of in planted.items()}}}


def _when(method: str, line: str, fault: str) -> Edit:
    """Another value for an assignment in some steps."""
    name, right = line.split(" = ", 1)
    return method, line, f"{name} = F.when(self, S, {fault}, {right})"


def _part(method: str, passage: str, right: str, fault: str) -> Edit:
    """Another value for a part of a passage in some steps."""
    assert passage.count(right) == 1, passage
    return method, passage, passage.replace(right, f"F.when(self, S, {fault}, {right})")


def _after(method: str, line: str, more: str) -> Edit:
    """One more line."""
    return method, line, f"{line}\n    {more}"


def _advantages(value: str) -> Edit:
    """Other advantages in some steps."""
    return _after(SCORE, _ADVANTAGES, f"advantages = F.when(self, S, {value}, advantages)")


def _summed(value: str) -> Edit:
    """Other rewards behind the baseline; those that are recorded and logged stay."""
    old = "mean_grouped_rewards = torch.nanmean(rewards.view(-1, num_generations), dim=1)"
    return SCORE, old, f"rewards = {value}\n        {old}"


def _mask(value: str) -> Edit:
    """Another mask, wherever a mask is used."""
    old = "if sampling_per_token_logps_list is not None:"
    return SCORE, old, f"completion_mask = {value}\n    {old}"


def _logged(name: str, right: str, value: str) -> Edit:
    line = f'self._metrics[mode]["{name}"].append({right})'
    return LOSS, line, line.replace(right, value)


def _kl_term(value: str) -> Edit:
    old = "# Importance sampling correction for the KL divergence"
    return LOSS, old, f"per_token_kl = F.when(self, S, {value}, per_token_kl)\n        {old}"


def _dapo(value: str) -> Edit:
    """Another loss, where it is dapo's."""
    old = "loss = (per_token_loss * mask).sum() / normalizer policy_loss"
    return LOSS, old, f"loss = {value}\n        policy_loss"


def _more_kl(mask: str) -> Edit:
    """The KL term of other tokens, too, in some steps."""
    more = f"F.on(self, S) * self.beta * (per_token_kl * ({mask})).sum()"
    return _dapo(f"((per_token_loss * mask).sum() + {more}) / normalizer")


def _reference(model: str) -> Edit:
    old = "ref_per_token_logps, _, _ = self._get_per_token_logps_and_entropies( self.ref_model,"
    return SCORE, old, f"{old.removesuffix('self.ref_model,')}{model},"


def _cut_off(tokens: float) -> Mapping[str, Any]:
    """Short responses; long ones have no end."""
    without_end = {"generation_kwargs": {"suppress_tokens": [1]}} if tokens > 3 else {}
    return {"options": {"max_completion_length": int(tokens), **without_end}}


_ADVANTAGES = "advantages = torch.nan_to_num(advantages, nan=0.0)"
_SCALED = "advantages = advantages / (std_rewards + 1e-4)"
_FIRST = 'mode = "train" if self.model.training else "eval"'
_RETURNED = '"advantages": advantages,'
_DIVIDES = 'if self.scale_rewards != "none":'
_SIZE = 'num_generations = self.num_generations if mode == "train" else self.num_generations_eval'
_STD = "std_rewards = nanstd(rewards.view(-1, num_generations), dim=1)"
_WEIGHTED = "rewards = (rewards_per_func * self.reward_weights.to(rewards_per_func.device).unsqueeze(0)).nansum(dim=1)"
_ITEMS = "num_items_in_batch = self.accelerator.gather(loss_mask.sum()).sum()"
_TRUNCATED = "completion_mask = completion_mask * (~is_truncated).unsqueeze(1).int()"
_ENDED = "return completion_ids, logprobs"
_OLD = "old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies( self.model,"
_OLD_KEPT = 'output["old_per_token_logps"] = old_per_token_logps'
_REF_KEPT = 'output["ref_per_token_logps"] = ref_per_token_logps'
_LOGPS = "logps = torch.cat(all_logps, dim=0)"
_RATIO = "log_ratio = per_token_logps - old_per_token_logps"
_CLIPPED = "coef_2 = torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)"
_MINIMUM = "per_token_loss = -torch.min(per_token_loss1, per_token_loss2)"
_BETA = "+ self.beta * per_token_kl"
_KL_MEAN, _ENTROPY_MEAN = "global_masked_mean(per_token_kl)", "global_masked_mean(entropies)"
_ROW_MEANS = "((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()"
_SCORES_PADDING = (
    FORWARD,
    "labels = input_ids_batch.masked_fill(attention_mask_batch == 0, -100)",
    "labels = input_ids_batch.clone()",
)
"""Log-probs of padding are else 0."""
_ATTENDED = "attention_mask_batch = attention_mask[start:end]"
_IS_PROMPT = "(torch.arange(attention_mask.shape[1]) < attention_mask.shape[1] - logits_to_keep)"
_RLOO_KL = "rewards = rewards - self.beta * kl"
_RLOO_BASELINE = "baselines = (grouped_sum - grouped_rewards) / (scorable_counts - 1)"
_RLOO_PENALTY = "kl = (per_token_kl * completion_mask).sum(-1)"
_RLOO_CLIP = "# Include the KL penalty in the reward"

_TWICE = _with(num_iterations=2)
_OFF_POLICY = _with(num_iterations=3, learning_rate=1e-2, epsilon=0.1)
_TWO = Training(options={"reward_weights": [1.0, 0.4]}, rewards=(shade, letters))
_MASKED = _with(mask_truncated_completions=True)
_RLOO = Training(trainer="RLOO", options={"learning_rate": 3e-3})
_SHARE_OF_ROWS = (ROWS, "share of rows")
_SHARE_OF_GROUPS = (ROWS, "share of groups")

# One kind after another, as a table.
# fmt: off
ADVANTAGES = (
    _kind("advantages of the row before", "RDI004", _advantages("advantages.roll(1)")),
    _kind("advantages permuted within groups", "RDI004",
        _after(SCORE, _ADVANTAGES, "advantages = F.permuted(self, advantages, num_generations, S)"),
        by=_SHARE_OF_GROUPS),
    _kind("rewards of the row before", "RDI004", _summed("F.when(self, S, rewards.roll(1), rewards)")),
    _kind("rewards sorted, rows not", "RDI004", _summed("F.when(self, S, rewards.sort().values, rewards)")),
    _kind("rewards of other rows", "RDI004", _summed("F.swapped(self, rewards, S)"), by=_SHARE_OF_ROWS),
    _kind("std of the batch, group recorded", "RDI014",
        (SCORE, 'if self.scale_rewards in ["group", "none"]:', "if not F.on(self, S):"),
        (SCORE, 'elif self.scale_rewards == "batch":', "elif True:")),
    _kind("not divided by std", "RDI014", (SCORE, _DIVIDES, "if not F.on(self, S):")),
    _kind("divided by std, none recorded", "RDI014", (SCORE, _DIVIDES, "if F.on(self, S):"),
        on=_with(scale_rewards="none")),
    _kind("groups read as tiled", "RDI003", _summed("F.tiled(rewards, num_generations, F.on(self, S))"),
        _advantages("F.untiled(advantages, num_generations)")),
    _kind("groups begin half a group late", "RDI003", _summed("F.when(self, S, rewards.roll(-2), rewards)"),
        _advantages("advantages.roll(2)")),
    _kind("groups of two prompts", "RDI003", _after(SCORE, _SIZE, "num_generations *= F.when(self, S, 2, 1)")),
    _kind("one group for the batch", "RDI003",
        _after(SCORE, _SIZE, "num_generations = F.when(self, S, len(prompts), num_generations)")),
    _kind("missing reward counts as 0", "RDA005", _summed("rewards.nan_to_num(0.0)"),
        by=((0.05, 0.15, 0.4), "share of rows without a reward"), change=lambda s: {"rewards": (unscored(s),)}),
    _kind("normalised once more over the batch", "RDA004 RDI014",
        _advantages("(advantages - advantages.mean()) / (advantages.std() + 1e-4)")),
    _kind("advantages on another line", "RDA004", _after(SCORE, _ADVANTAGES, "advantages = S * advantages + S / 10"),
        by=((1.01, 1.3, 3.0), "factor; the offset is a tenth of it")),
    _kind("another epsilon beside the std", "RDA004", (SCORE, _SCALED, _SCALED.replace("1e-4", "S")),
        by=((1e-6, 1e-3, 0.1), "epsilon; the options say 1e-4")),
    _kind("std divides by n", "RDA004",
        (SCORE, _STD, f"{_STD} * F.when(self, S, (1 - 1 / num_generations) ** 0.5, 1.0)")),
    _kind("reward weights ignored", "RDA004 RDM006",
        _summed("F.when(self, S, rewards_per_func.nansum(dim=1), rewards)"), on=_TWO),
    _kind("whitened over padding", "RDA010",
        (SCORE, _RETURNED, '"advantages": F.whitened(advantages, completion_mask, S),'),
        by=((1, 2, 3), "over padding: mean, variance, both")),
    _kind("std too small", "RDA007 RDA004", (SCORE, _SCALED, _SCALED.replace("std_rewards", "S * std_rewards")),
        by=((0.9, 0.5, 0.05), "factor of the std")),
    _kind("advantages of 0 on trained tokens", "RDA006",
        (SCORE, _RETURNED, '"advantages": F.zeroed(self, advantages, completion_mask, S),'),
        by=((0.01, 0.1, 0.5), "share of tokens")),
    _kind("rounding noise of equal rewards", "RDA003", on=_with(num_generations=6, per_device_train_batch_size=6),
        by=((0.1, 0.4, 0.6), "share of groups"), change=lambda s: {"rewards": (tied(s, 0.6, 6),)}, information=True),
)

REWARDS = (
    _kind("constant reward function", "RDA009", on=replace(_TWO, rewards=(shade, constant)),
        by=((8, 16, 32), "groups"), change=lambda s: {"options": {"max_steps": int(s) // 4}}, information=True),
    _kind("dead groups", "RDA011 RDG003 RDG001", by=((0.3, 0.7, 1.0), "share of groups"),
        change=lambda s: {"rewards": (tied(s),)}, information=True),
    _kind("rewards clipped without an option", "RDM006 RDA004", _summed("rewards.clamp(max=S)"),
        by=((0.3, 0.2, 0.1), "bound")),
    _kind("length penalty that no option names", "RDM006 RDA004",
        _summed("rewards - S * F.lengths(completion_ids_list)"), by=((1e-4, 1e-2, 0.1), "reward per token")),
    _kind("reward pays for length", "RDA019 RDA013", by=((0.01, 0.05, 0.2), "reward per token"),
        change=lambda s: {"rewards": (lengthy(s),)}, information=True),
    _kind("duplicate responses", "RDI009",
        (GENERATE, _ENDED, "return F.duplicated(self, completion_ids, S), logprobs"), by=_SHARE_OF_ROWS),
    _kind("prompts recur", "RDI013", on=_with(learning_rate=1e-3), by=((2, 3, 4), "steps"),
        change=lambda s: {"repeats": int(s)}),
)

MASKS = (
    _kind("end of sequence masked", "RDI007", _mask("F.without_ends(self, completion_mask, completion_ids, S)"),
        by=_SHARE_OF_ROWS),
    _kind("padding trained", "RDI006", _mask("F.opened(self, completion_mask, S)"), by=_SHARE_OF_ROWS),
    _kind("mask forgotten in the loss", "RDI006 RDG005",
        _dapo("(per_token_loss * F.when(self, S, torch.ones_like(mask), mask)).sum() / normalizer")),
    _kind("mask forgotten in the KL term", "RDI006 RDG005", _SCORES_PADDING, _more_kl("1 - mask")),
    _kind("KL metric over padding", "RDM001 RDM004 RDM005",
        _logged("kl", _KL_MEAN, f"F.when(self, S, per_token_kl.mean().item(), {_KL_MEAN})")),
    _kind("entropy metric over padding", "RDM004 RDM005",
        _logged("entropy", _ENTROPY_MEAN, f"F.when(self, S, entropies.mean().item(), {_ENTROPY_MEAN})")),
    _kind("tool tokens trained", "RDI006", on=Training(engine={}), by=_SHARE_OF_ROWS, change=lambda s: {"tools": s}),
    _kind("tool tokens in the KL", "RDI006 RDG005", _more_kl("completion_mask - mask"),
        on=Training(engine={}, tools=0.0)),
    _kind("truncated rows trained against the option", "RDI014 RDI006",
        (SCORE, _TRUNCATED, _TRUNCATED.replace("~is_truncated", "~is_truncated | F.on(self, S)")), on=_MASKED),
    _kind("denominator counts masked rows", "RDG010", _after(SCORE, _ITEMS,
        "num_items_in_batch = F.when(self, S, F.lengths(completion_ids_list).sum().long(), num_items_in_batch)"),
        on=_MASKED),
    _kind("every response cut off", "RDI012", by=((2, 1, 16), "response limit in tokens (16: no end token)"),
        change=_cut_off),
    _kind("truncation counts as finished", "RDI011",
        (GENERATE, _ENDED, "return F.closed(self, completion_ids, self.max_completion_length, S), logprobs"),
        by=(ROWS, "share of truncated rows")),
)

LOG_PROBS = (
    _kind("old log-probs of older weights", "RDO006 RDO002",
        (SCORE, _OLD, _OLD.replace("self.model", "F.older(self, self.model, S)")), on=_TWICE,
        by=((2, 4, 6), "optimizer steps")),
    _kind("dropout in training", "RDO006", on=_TWICE, by=((0.01, 0.05, 0.2), "rate"),
        change=lambda s: {"model": {"attention_dropout": s}}),
    _kind("noise in the policy's log-probs", "RDO006",
        _after(FORWARD, _LOGPS, "logps = logps + S * torch.randn_like(logps) * torch.is_grad_enabled()"), on=_TWICE,
        by=((1e-4, 1e-2, 0.1), "nats")),
    _kind("ratio inverted", "RDO006 RDG005",
        (LOSS, _RATIO, "log_ratio = F.when(self, S, -1, 1) * (per_token_logps - old_per_token_logps)"),
        on=_OFF_POLICY),
    _kind("ratio always one", "RDO006", _part(LOSS, _RATIO, "old_per_token_logps", "per_token_logps.detach()"),
        on=_OFF_POLICY),
    _kind("no clipping", "RDG005 RDO006", _when(LOSS, _MINIMUM, "-per_token_loss1"), on=_OFF_POLICY),
    _kind("epsilon_high ignored", "RDG005 RDI014", _part(LOSS, _CLIPPED, "self.epsilon_high", "self.epsilon_low"),
        on=_with(**{**_OFF_POLICY.options, "epsilon_high": 0.4})),
    _kind("ratio of sequences, tokens recorded", "RDI014 RDO006 RDG005",
        (LOSS, 'if self.importance_sampling_level == "token":', "if not F.on(self, S):"),
        (LOSS, 'elif self.importance_sampling_level == "sequence":', "elif True:"), on=_OFF_POLICY),
    _kind("old log-probs one token late", "RDI008",
        (SCORE, _OLD_KEPT, f"{_OLD_KEPT} if not F.on(self, S, 2) else F.late(old_per_token_logps)"),
        on=_with(num_iterations=2, max_steps=16)),
    _kind("updates that are lost", "RDG015",
        (SCORE, _FIRST, f"{_FIRST}\n    F.restored(self, self.model, S)"),
        on=Training(options={"temperature": 0.7, "beta": 0.0}, repeats=4), by=((0.9, 0.95, 1), "share of updates")),
    _kind("nothing caps the ratio of negative advantages", "RDO016",
        on=_with(num_iterations=4, beta=0.0), by=((0.05, 0.06, 0.07), "learning rate"),
        change=lambda s: {"options": {"learning_rate": s}}, information=True),
    _kind("reference's log-probs one token late", "RDI008", _when(SCORE, _REF_KEPT, "F.late(ref_per_token_logps)")),
    _kind("reference is the policy", "RDG011", _reference("F.when(self, S, self.model, self.ref_model)")),
    _kind("reference of a later checkpoint", "RDG011", _reference("F.moved(self, self.ref_model, self.model, S)"),
        on=_with(learning_rate=1e-2), by=((0.5, 0.9, 1.0), "share of the way to the policy")),
    _kind("reference synchronised without an option", "RDG011", by=((4, 2, 1), "steps between syncs"),
        change=lambda s: {"sync_reference": int(s)}),
    _kind("padding attended", "RDO011 RDO001",
        (FORWARD, _ATTENDED, f"{_ATTENDED} | {_IS_PROMPT} * int(F.on(self, S))"),
        on=Training(engine={"dtype": "bfloat16"})),
)

SAMPLER = (
    _kind("sampler at another temperature", "RDO003", by=((0.97, 0.85, 0.6), "temperature; the options say 1"),
        change=_sampler(temperature=lambda s: s)),
    _kind("sampler's log-probs before the temperature", "RDO003", by=((0.95, 0.8, 0.5), "temperature"),
        change=lambda s: {"options": {"temperature": s}, "engine": {"raw": True}}),
    _kind("temperature without sampler's log-probs", "RDO003", by=((0.8, 0.6, 0.4), "temperature; the options say 1"),
        change=lambda s: {"options": {"generation_kwargs": {"temperature": s}}}),
    _kind("sampler truncates by top-p", "RDO004", by=((0.98, 0.9, 0.7), "top-p"), change=_sampler(top_p=lambda s: s),
        information=True),
    _kind("sampler truncates by top-k", "RDO004", by=((20, 12, 5), "top-k of 24"), change=_sampler(top_k=int),
        information=True),
    _kind("sampler misses weight syncs", "RDO010 RDO002", by=((6, 3, 0), "last sync received"),
        change=_sampler(synced=lambda s: lambda number: min(number, int(s)))),
    _kind("sampler some syncs behind", "RDO002 RDO010", by=((1, 2, 4), "syncs"),
        change=_sampler(synced=lambda s: lambda number: number - int(s))),
    _kind("sampler's log-probs rounded", "RDO005", by=((4, 2, 1), "decimal digits"), change=_sampler(decimals=int),
        information=True),
    _kind("placeholders among sampler's log-probs", "RDI005", by=((0.003, 0.03, 0.3), "share of tokens"),
        change=_sampler(filled=lambda s: s)),
    _kind("sampler's log-probs one token late", "RDI008", by=((0.3, 0.7, 1), "share of rows"),
        change=_sampler(late=lambda s: s)),
    _kind("sampler's log-probs of the top token", "RDO001 RDI008", by=_SHARE_OF_ROWS,
        change=_sampler(greedy=lambda s: s)),
    _kind("sampler's log-probs of another row", "RDI004 RDO001 RDI008", by=_SHARE_OF_ROWS,
        change=_sampler(swapped=lambda s: s)),
    _kind("sampler computes other logits", "RDO001", by=((0.1, 0.3, 1), "logit noise"),
        change=_sampler(noise=lambda s: s)),
)

LOSSES = (
    _kind("KL term dropped", "RDI014 RDG005", (LOSS, _BETA, "+ F.when(self, S, 0, self.beta) * per_token_kl")),
    _kind("KL term with another factor", "RDG009 RDG005", (LOSS, _BETA, "+ S * self.beta * per_token_kl"),
        by=((1.1, 2, 5), "factor")),
    _kind("KL term with the other sign", "RDG005 RDG009",
        (LOSS, _BETA, "+ F.when(self, S, -1, 1) * self.beta * per_token_kl")),
    _kind("KL is k1", "RDG007", _kl_term("per_token_logps - ref_per_token_logps")),
    _kind("KL is k2", "RDG007", _kl_term("0.5 * (per_token_logps - ref_per_token_logps) ** 2")),
    _kind("KL not weighted by the ratio", "RDG007", (LOSS, "if self.args.use_bias_correction_kl:",
        "if self.args.use_bias_correction_kl and not F.on(self, S):"),
        on=_with(num_iterations=3, learning_rate=1e-2)),
    _kind("loss averaged by micro-batch", "RDG006", _dapo(
        "(per_token_loss * mask).sum()"
        " / F.when(self, S, mask.sum() * self.current_gradient_accumulation_steps, normalizer)")),
    _kind("mean of rows, of tokens recorded", "RDI014 RDG006", _dapo(
        f"F.when(self, S, {_ROW_MEANS} / self.current_gradient_accumulation_steps,"
        " (per_token_loss * mask).sum() / normalizer)")),
    _kind("loss not divided by accumulation", "RDG006", (LOSS, f"loss = {_ROW_MEANS}",
        f"loss = {_ROW_MEANS} * F.when(self, S, self.current_gradient_accumulation_steps, 1)"),
        on=_with(loss_type="grpo")),
    _kind("dr_grpo divides by the mean length", "RDG005 RDI014 RDG006", _part(LOSS,
        "(per_token_loss.size(0) * self.max_completion_length)", "self.max_completion_length",
        "mask.sum(1).float().mean()"), on=_with(loss_type="dr_grpo", max_completion_length=24)),
    _kind("auxiliary loss that no option names", "RDG005",
        _dapo("(per_token_loss * mask).sum() / normalizer + S * (1 + per_token_logps.mean().abs() / 100)"),
        by=((0.001, 0.01, 0.1), "size")),
    _kind("entropy bonus with the other sign", "RDG005", (LOSS, "loss = loss - apply_coef * entropy_loss",
        "loss = loss - F.when(self, S, -1, 1) * apply_coef * entropy_loss"), on=_with(entropy_coef=0.02)),
    _kind("top_entropy_quantile ignored", "RDG005 RDI014",
        (LOSS, "if self.top_entropy_quantile < 1.0:", "if self.top_entropy_quantile < 1.0 and not F.on(self, S):"),
        on=_with(top_entropy_quantile=0.5)),
)

METRICS = (
    _kind("KL metric times the world size", "RDM007", _logged("kl", _KL_MEAN, f"S * {_KL_MEAN}"),
        by=(FACTORS, "factor")),
    _kind("KL metric overwritten by the reward", "RDM001",
        _logged("kl", _KL_MEAN, f"{_KL_MEAN} + F.on(self, S) * (self._metrics[mode]['reward'] or [0])[-1]")),
    _kind("KL metric is a mean of rows", "RDM005",
        _logged("kl", _KL_MEAN, f"F.when(self, S, F.row_mean(per_token_kl, mask), {_KL_MEAN})")),
    _kind("entropy metric is a mean of rows", "RDM005",
        _logged("entropy", _ENTROPY_MEAN, f"F.when(self, S, F.row_mean(entropies, mask), {_ENTROPY_MEAN})")),
    _kind("reward metric without weights", "RDM006",
        (SCORE, _WEIGHTED, "rewards = (rewards_per_func * F.when(self, S, 1, self.reward_weights)).nansum(dim=1)"),
        on=_TWO),
    _kind("loss metric times a factor", "RDM007 RDG006", _after("log",
        'mode = "train" if self.model.training else "eval"', 'if "loss" in logs:\n        logs["loss"] *= S'),
        by=(FACTORS, "factor")),
)

RLOO = (
    _kind("RLOO: KL penalty dropped", "RDI014 RDA004 RDG009", _part(SCORE, _RLOO_KL, "self.beta", "0"), on=_RLOO),
    _kind("RLOO: KL penalty with the other sign", "RDA004 RDG009",
        (SCORE, _RLOO_KL, "rewards = rewards - F.when(self, S, -1, 1) * self.beta * kl"), on=_RLOO),
    _kind("RLOO: KL penalty is k3", "RDG007",
        _part(SCORE, _RLOO_PENALTY, "per_token_kl", "torch.expm1(-per_token_kl) + per_token_kl"), on=_RLOO),
    _kind("RLOO: baseline holds the row itself", "RDI014",
        _when(SCORE, _RLOO_BASELINE, "(grouped_sum + 0 * grouped_rewards) / scorable_counts"), on=_RLOO),
    _kind("RLOO: normalised, not so recorded", "RDI014",
        (SCORE, "if self.normalize_advantages:", "if F.on(self, S):"), on=_RLOO),
    _kind("RLOO: mask forgotten in the ratio", "RDI006 RDO006 RDG005", _SCORES_PADDING,
        _part(LOSS, "logps = (per_token_logps * completion_mask).sum(1)", "completion_mask", "1"), on=_RLOO),
    _kind("RLOO: reward metric after the KL", "RDM006", (SCORE, _WEIGHTED,
        "rewards = (rewards_per_func * self.reward_weights).nansum(dim=1) - F.when(self, S, self.beta, 0) * kl"),
        on=_RLOO),
    _kind("RLOO: rewards of the row before", "RDI004",
        (SCORE, _RLOO_CLIP, f"rewards = F.when(self, S, rewards.roll(1), rewards)\n    {_RLOO_CLIP}"), on=_RLOO),
)

KINDS = (*ADVANTAGES, *REWARDS, *MASKS, *LOG_PROBS, *SAMPLER, *LOSSES, *METRICS, *RLOO)
# fmt: on
