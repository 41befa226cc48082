"""Every fix, of every trainer that computes without it: a rule says that the run has the fault, and of what size."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from every_objective import KL
from objectives import objective_of

from rolloutdoctor.evaluation.evaluate import evaluate_all, stored_kl
from rolloutdoctor.formulas.advantages.drawn_rows import of_sources
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.fix_effect import FixEffect, Told
from rolloutdoctor.rules.known_fault import KnownFaultRule
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.search.hypotheses.fixes import FIXES, choose, compared
from rolloutdoctor.testing import diagnose, random_batch, toy_batch
from rolloutdoctor.trainers.table import TRAINERS

VLLM = {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 1.2}
OPENRLHF = {"algo.advantage.estimator": "group_norm", "algo.kl.use_loss": True, "algo.kl.init_coef": 0.1}
SLICES = {"advantage_estimator": "grpo", "normalize_advantages": True, "context_parallel_size": 2}
PER_TOKEN = {"calculate_per_token_loss": True}
OPTIONS: dict[tuple[str, str], tuple[str, dict[str, object]]] = {
    ("kl-inplace", "slime"): ("slime@0.3.1", {"advantage_estimator": "ppo", "kl_coef": 0.1}),
    ("zero-std", "openrlhf"): ("openrlhf", OPENRLHF),
    ("rejected-rows", "openrlhf"): ("openrlhf", OPENRLHF),
    ("one-over-accumulation", "ms-swift"): ("ms-swift@4.5.3", {"loss_type": "dapo"}),
    ("kl-of-rejected", "trl"): ("trl", {"beta": 0.1, **VLLM}),
    ("kl-of-rejected", "nemo-rl"): ("nemo-rl", {
        "loss_fn.use_importance_sampling_correction": True,
        "loss_fn.truncated_importance_sampling_type": "seq-mask-tis",
        "loss_fn.truncated_importance_sampling_ratio": 1.2,
        "loss_fn.truncated_importance_sampling_ratio_min": 0.9,
    }),
    ("kl-of-rejected", "skyrl"): ("skyrl", {
        "off_policy_correction.sequence_mask_metric": "product",
        "off_policy_correction.product_mask_high": 1.1,
        "off_policy_correction.product_mask_low": 0.9,
    }),
    ("truncated-out-of-denominator", "trl"): ("trl@1.8.0", {"beta": 0.1, "mask_truncated_completions": True}),
    ("truncated-out-of-denominator", "unsloth"): ("unsloth@0.24.0", {"beta": 0.1, "loss_type": "dapo"}),
    ("truncated-out-of-denominator", "verl"): ("verl", {
        **KL["verl"], "trainer.use_v1": True, "rollout_rs": "token_k2", "rollout_rs_threshold": 1.2,
    }),
    ("empty-rows-out-of-denominator", "slime"): ("slime", {**KL["slime"], **PER_TOKEN}),
    ("empty-rows-out-of-denominator", "miles"): ("miles", {**KL["miles"], **PER_TOKEN}),
    ("global-denominator", "trl"): ("trl", {"beta": 0.1, "loss_type": "bnpo", "gradient_accumulation_steps": 2}),
    ("global-denominator", "unsloth"): ("unsloth", {"beta": 0.1, "loss_type": "bnpo"}),
    ("global-denominator", "ms-swift"): ("ms-swift", {"beta": 0.1, "loss_type": "bnpo"}),
    ("global-denominator", "prime-rl"): ("prime-rl@0.5.0", {}),
    ("global-denominator", "skyrl"): ("skyrl", {
        "trainer.algorithm.loss_reduction": "token_mean_legacy", "trainer.algorithm.policy_loss_type": "regular",
    }),
    ("one-vote-per-rollout", "trl-rloo"): ("trl-rloo", {"beta": 0.0}),
    ("one-vote-per-rollout", "verl"): ("verl", {**KL["verl"], "trainer.use_v1": False}),
    ("one-weight-per-trajectory", "trl"): ("trl", {"beta": 0.0, "loss_type": "grpo"}),
    ("one-weight-per-trajectory", "verl"): ("verl", {
        "adv_estimator": "grpo", "loss_agg_mode": "seq-mean-token-mean", "trainer.use_v1": False,
    }),
    ("tool-spans", "verl"): ("verl@0.8.0", {"adv_estimator": "reinforce_plus_plus"}),
    ("masked-end", "verl"): ("verl@0.9.1", {"adv_estimator": "reinforce_plus_plus"}),
    ("cp-whitening", "slime"): ("slime@0.3.1", SLICES),
    ("cp-whitening", "miles"): ("miles", SLICES),
    ("own-advantages", "verl"): ("verl@0.9.1", {"adv_estimator": "gae", "use_pf_ppo": True}),
}  # fmt: skip
"""Trainer, with its release where that decides, and the options of a run that has the fault; else those of `KL`."""

HAS_THE_FIX = {
    ("rejected-rows", "prime-rl"),
    ("mask-truncated-vote", "prime-rl"),
    ("one-vote-per-rollout", "miles"),
    ("one-vote-per-rollout", "prime-rl"),
    ("kl-inplace", "miles"),
}
"""Fixes that are about every estimator with groups, of trainers that compute so already."""

OF_DATA = {"loo-std", "exact-equality-std", "is-mean-not-sum", "padding-rows", "errors-out", "group-by-task"}
"""Fixes that change something in few runs: of a few rewards, of long responses, of copies."""


def pairs():
    for fix in FIXES.values():
        for trainer in fix.trainers():
            # AReaL gives a group's scores to tokens: rules about one baseline for each response say so.
            of_tokens = trainer == "areal" and fix.name != "masked-end"
            if not of_tokens and fix.name not in OF_DATA and (fix.name, trainer) not in HAS_THE_FIX:
                yield fix.name, trainer


@cache
def drawn(kind: str):
    """Rows of two trajectories a group, groups of equal rewards, masked ends and fully masked responses."""
    seed, empty = {"plain": (1, 0.0), "empty": (2, 0.15), "whole": (3, 0.0)}[kind]
    rejected = 0.0 if kind == "whole" else 0.25
    batch = random_batch(seed, sizes=(4,) * 6, longest=9, empty=empty, rejected=rejected, holes=0.3, adjacent=True)
    place_N = torch.arange(len(batch))
    reward_N = batch.per_row["reward"].clone()
    # The first three rows of a group are those of one trajectory; two groups have equal rewards.
    trajectory_N = (place_N // 4) * 2 + (place_N % 4 == 3)
    reward_N = reward_N[(place_N // 4) * 4 + 3 * (place_N % 4 == 3)]
    reward_N[:8] = 0.5
    trained_N = torch.tensor([int(batch.trained[row + 1] - batch.trained[row]) for row in range(len(batch))])
    per_row = {"reward": reward_N, "micro_batch_id": place_N // 12, "rank": place_N % 2}
    prompt_N = 3 * (place_N // 4) + 20
    per_row |= {"prompt_ids": prompt_N, "prompt_length": prompt_N}
    # Trajectories that differ in their KL penalty have no one reward.
    per_row |= {"trajectory_id": trajectory_N} if kind == "whole" else {}
    return replace(
        batch,
        per_row=per_row,
        rewards={"task": reward_N},
        statuses=["stop" if count else "length" for count in trained_N.tolist()],
        per_token={name: x if "log_probs" not in name else x.clamp(max=0) for name, x in batch.per_token.items()},
    )


def moved(before, after) -> bool:
    """True if two evaluations differ in a number."""
    if before.rows is None or after.rows is None:
        return False
    mine, theirs = (
        (x.rows.advantage_N if x.rows.advantage_N is not None else x.rows.advantage_T) for x in (before, after)
    )
    gap = float((mine.double() - theirs.double()).abs().nan_to_num(0.0).max())
    if before.tokens is None or after.tokens is None:
        return gap > 1e-6
    return gap > 1e-6 or float(after.tokens.versus_l1_N.sum()) > 1e-6 * before.grad_l1


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(("name", "trainer"), list(pairs()))
def test_a_rule_says_that_a_run_has_the_fault(name, trainer):
    fix, chosen = FIXES[name], choose(name)
    assert trainer in KL, f"{trainer}: a line in KL of tests/every_objective.py"
    made, options = OPTIONS.get((name, trainer), (trainer, KL[trainer]))
    objective = objective_of(made, **{key.replace(".", "__"): value for key, value in options.items()})
    assert chosen.applies_to(objective)
    shown = 0
    for kind in ("plain", "empty", "whole"):
        batch = drawn(kind)
        if name == "own-advantages":
            plain = objective_of(made, adv_estimator="gae")
            own_T = evaluate_all(batch, {"": plain})[""].rows.advantage_T
            source_N = torch.arange(len(batch)).roll(5)
            batch = replace(
                batch,
                per_token={
                    **batch.per_token,
                    "advantages": of_sources(own_T, 0.0, source_N, batch.rows),
                    "response_mask_pre": batch.column("response_mask"),
                },
            )
        if name == "kl-inplace":
            if kind == "empty":
                continue  # a reward has no token to lie on
            # Nothing of the objective moves but what is stored.
            batch = replace(batch, per_token={**batch.per_token, "kl": stored_kl(batch, objective)})
            shown += 1
        else:
            try:
                found = evaluate_all(batch, {"": compared(objective, [chosen]), "fixed": chosen.apply(objective)})
            except CannotComputeError:
                continue
            if not moved(found[""], found["fixed"]):
                continue
            shown += 1
        report = diagnose([batch], trainer=made, options=options, select=[fix.code])
        finding = next((one for one in report.findings if one.code == fix.code), None)
        assert finding is not None, [(one.code, one.reason) for one in (*report.skipped, *report.not_applicable)]
        assert any(measure.value for measure in finding.measures.values())
        known = next(rule for rule in RULES if rule.code == fix.code)
        if isinstance(known, KnownFaultRule):
            assert finding.severity is (Severity.INFO if fix.by_option or fix.contested else Severity.WARNING)
            assert finding.fix in known_fixes(known, trainer)
            assert finding.fix in finding.advice
    assert shown


def known_fixes(rule, trainer):
    return {label.partition(":")[0] for label in (*rule.fixes, "one-over-accumulation:")}


def test_fixes_that_few_runs_show_have_a_rule_too():
    siblings = {"grpo.adv_estimator.name": "grpo", "grpo.adv_estimator.normalize_rewards": True}
    lengths = [10] * 32 + [40] * 32
    weights = {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"}
    divided = toy_batch([[1.0, *[0.3] * 7]], per_row={"advantage": [7428.4, *[-0.378] * 7]})
    cases = {
        "loo-std": (divided, "nemo-rl", siblings),
        "exact-equality-std": (toy_batch([[0.6] * 8, [1, 0]]), "trl", {}),
        "group-by-task": (toy_batch([[1], [0]] * 4, per_row={"task_id": [7] * 8}), "verl", {"adv_estimator": "grpo"}),
        "errors-out": (replace(toy_batch([[0, 1, 0]]), errors=["timeout", None, None]), "trl", {}),
        "is-mean-not-sum": (
            toy_batch([[1, 0] * 4] * 8, lengths=lengths, policy=-1.0, rollout=-1.05), "trl", weights),
    }  # fmt: skip
    assert cases.keys() | {"padding-rows"} == OF_DATA
    for name, (batch, trainer, options) in cases.items():
        report = diagnose([batch], trainer=trainer, options=options, select=[FIXES[name].code])
        assert [one.code for one in report.findings] == [FIXES[name].code], name


def test_every_fix_names_a_rule():
    codes = {rule.code for rule in RULES}
    assert {fix.code for fix in FIXES.values()} <= codes
    for fix in FIXES.values():
        assert fix.fault
        assert not fix.fault.endswith(".")
        assert set(fix.releases) <= TRAINERS.keys()
    for rule in RULES:
        labels = rule.fixes if isinstance(rule, KnownFaultRule) else (rule.fix,) if rule.fix else ()
        for label in labels:
            assert choose(label).fix.code == rule.code


@pytest.mark.parametrize(("rows", "severity"), [(1, Severity.INFO), (40, Severity.WARNING)])
def test_a_thousandth_of_the_gradient_is_information(rows, severity):
    """One masked row beside 1,200 trained tokens, and forty."""
    masks = [[1] * 20] * 60 + [[0]] * rows
    batch = toy_batch([[1, 0] * ((60 + rows) // 2) + [1] * (rows % 2)], mask=masks, ref=-1.3)
    report = diagnose([batch], trainer="miles", options={**KL["miles"], **PER_TOKEN}, select=["RDG010"])
    (finding,) = report.findings
    assert finding.severity is severity
    assert f"1 token for each of {rows} fully masked response" in finding.headline
    assert "smaller" in finding.headline


@pytest.mark.parametrize(("change", "says"), [(0.99e-9, ""), (1.01e-9, "1.01e-07 % of the log-prob gradient")])
def test_what_float64_rounds_is_no_change_of_the_gradient(change, says):
    effect = FixEffect(
        chosen=choose("loo-std"),
        made="",
        remedy="",
        rows=0,
        shift=0.0,
        change=change,
        kappa=1.0,
        cosine=1.0,
        scales=False,
        masked=0,
        told=Told(0, 0, 0),
    )
    assert effect.magnitude() == says


def test_derivatives_of_which_some_are_larger_are_not_scaled():
    """Micro-batches of five and six tokens weigh the same: the tokens of one get more, and those of the other less."""
    rows = {"micro_batch_id": [0, 0, 1, 1]}
    batch = toy_batch([[1, 0], [0, 1]], lengths=[3, 2, 5, 1], ref=-1.3, per_row=rows)
    options = {"beta": 0.1, "loss_type": "bnpo", "gradient_accumulation_steps": 2}
    (finding,) = diagnose([batch], trainer="trl", options=options, select=["RDG006"]).findings
    assert finding.headline.endswith(" 9.08 % of the log-prob gradient")
