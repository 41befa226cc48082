import numpy as np
import pytest
from rules.checking import outcomes, report_on, values

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import toy_batch

CODE = "RDO007"
TRL = {"trainer": "trl", "use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"}
VERL = {"trainer": "verl", "adv_estimator": "grpo"}


def batch(seed=0, lengths=(50, 2000), noise=0.05, growth=0.0, rows=96, step=0):
    """Unbiased noise per token, which may grow along a response."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(lengths[0], lengths[1] + 1, rows)
    old = [-draw.exponential(0.5, size) - 1 for size in sizes]
    scale = [noise * (1 + growth * np.arange(size) / 1000) for size in sizes]
    rollout = [x - s * draw.standard_normal(len(x)) - s**2 / 2 for x, s in zip(old, scale, strict=True)]
    groups = [[1, 0, 1, 0, 0, 1, 0, 1]] * (rows // 8)
    return toy_batch(groups, lengths=sizes.tolist(), policy=old, rollout=rollout, step=step)


def report(batches, **options):
    return report_on(batches, **{"select": [CODE], **TRL, **options})


def found(batches, **options):
    findings = report(batches, **options).findings
    return findings[0] if findings else None


def test_long_responses_are_rejected():
    finding = found([batch(seed, noise=0.1, step=seed) for seed in range(3)])
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    measures = values(finding)
    assert measures["kept_shortest_share"] - measures["kept_longest_share"] >= 0.1
    assert measures["longest_gap"] == pytest.approx(measures["shortest_gap"], rel=0.05)
    assert measures["length_correlation"] > 0.2
    assert "configured bounds: 0 to 3" in finding.evidence


@pytest.mark.parametrize(("off", "verdict"), [(0.0, "confirmed"), (0.1, "exposed")])
def test_logged_metrics_of_the_weights_confirm_it(off, verdict):
    steps = [batch(seed, noise=0.1, step=seed) for seed in range(3)]
    name = "sampling/sampling_logp_difference/mean"
    apart = [(one.column("old_log_probs") - one.column("rollout_log_probs")).abs() for one in steps]
    logged = [{name: float(each_T.mean()) * (1 + off)} for each_T in apart]
    finding = found(steps, logged=logged)
    assert finding.verdict == verdict
    assert ("these rows reproduce all 3 logged weight metrics" in finding.evidence) == (not off)


@pytest.mark.parametrize(("steps", "fires"), [(4, False), (5, True)])
def test_few_lost_rows_that_are_all_long(steps, fires):
    # 2 of the 32 longest rows are lost in each step. Their length of 40 is 16.7 above the mean; the lengths of two rows
    # drawn from all have the variance 14,933 * 2 * 94 / (96 * 95) = 307.8: a score of 1.9 in a step, 4.25 in five.
    lengths = [10] * 32 + [20] * 32 + [40] * 32
    apart = [[0.05 * (-1) ** place for place in range(size)] for size in lengths[:-2]] + [[0.05] * 40] * 2
    old = [[-1.0] * size for size in lengths]
    rollout = [[-1.0 - each for each in row] for row in apart]
    batches = [
        toy_batch([[1, 0] * 4] * 12, lengths=lengths, policy=old, rollout=rollout, step=step) for step in range(steps)
    ]
    finding = found(batches)
    assert (finding is not None and finding.severity == Severity.WARNING) == fires
    if fires:
        assert values(finding)["lost_length_score"] == pytest.approx(4.25, abs=0.01)


def test_mild_noise_is_information():
    finding = found([batch(seed, noise=0.01, lengths=(20, 2000), step=seed) for seed in range(3)])
    assert finding.severity == Severity.INFO


def test_the_mismatch_itself_grows():
    finding = found([batch(seed, growth=6.0, step=seed) for seed in range(3)])
    assert finding.severity == Severity.INFO
    assert "the mismatch per token is larger" in finding.message


@pytest.mark.parametrize(
    "options",
    [
        {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
        {"rollout_rs": "seq_sum_k3", "rollout_rs_threshold": 1.0},
        {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    ],
)
def test_verl(options):
    options = {**VERL, **options}
    finding = found_verl([batch(seed, noise=0.1, step=seed) for seed in range(3)], **options)
    assert finding.severity == Severity.WARNING


def found_verl(batches, **options):
    (finding,) = report_on(batches, select=[CODE], **options).findings
    return finding


def test_rows_before_rejection_count():
    one = batch(noise=0.1)
    whole = values(found([one]))
    gap = (one.column("policy_log_probs") - one.column("rollout_log_probs")).double()
    kept = [float(gap[a:b].sum()) < np.log(3) for a, b in zip(one.rows[:-1], one.rows[1:], strict=True)]
    masks = [[int(is_kept)] * int(size) for is_kept, size in zip(kept, one.rows.diff(), strict=True)]
    after = toy_batch(
        [[1, 0, 1, 0, 0, 1, 0, 1]] * 12,
        mask=masks,
        policy=[one.column("policy_log_probs")[a:b].tolist() for a, b in zip(one.rows[:-1], one.rows[1:], strict=True)],
        rollout=[
            one.column("rollout_log_probs")[a:b].tolist() for a, b in zip(one.rows[:-1], one.rows[1:], strict=True)
        ],
        per_token={"response_mask_pre": 1},
    )
    assert values(found([after])) == pytest.approx(whole)


@pytest.mark.parametrize("noise", [0.0005, 0.002])
def test_little_noise_is_clean(noise):
    assert found([batch(noise=noise, lengths=(300, 400), rows=480)]) is None


def test_responses_of_one_length_cannot_show_it():
    (one,) = report([batch(lengths=(500, 500))]).not_applicable
    assert "about the same length" in one.reason


@pytest.mark.parametrize(
    "options",
    [
        {"vllm_importance_sampling_mode": "token_truncate"},
        {"use_vllm": False},
        {"vllm_importance_sampling_correction": False},
    ],
)
def test_nothing_is_made_of_sequences(options):
    (one,) = report([batch()], **options).not_applicable
    assert "no importance weight" in one.reason


def test_too_few_rows_are_no_verdict():
    (skipped,) = report([batch(rows=16)]).skipped
    assert "needs 60" in skipped.reason


def test_no_log_probs_of_the_sampler():
    assert outcomes(report([toy_batch([[1, 0]])])) == {CODE: "skipped"}
