from dataclasses import replace

import numpy as np
import pytest
import torch
from rules.checking import report_on, values

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import toy_batch

CODE = "RDO011"


def step_of(
    step, shift=0.0, by_prompt=0.0, by_response=0.0, rows=48, size=8, noise=0.01, same=False, sort=False, jump=0.0
):
    """A step whose gaps have a size of `noise`, and what padding, prompt and response add for each hundred tokens."""
    draw = np.random.default_rng(step)
    prompt = np.full(rows, 200) if same else draw.integers(50, 600, rows)
    prompt = np.sort(prompt) if sort else prompt
    response = draw.integers(20, 120, rows)
    micro = np.arange(rows) // size
    longest = np.array([prompt[micro == each].max() for each in micro])
    padding = longest - prompt
    scale = noise * (1 + (shift * padding + by_prompt * prompt + by_response * response) / 100)
    scale = scale + noise * jump * (padding > 0)
    s = [-draw.uniform(0.2, 3, count) for count in response]
    o = [each + width * draw.normal(size=len(each)) for each, width in zip(s, scale, strict=True)]
    batch = toy_batch(
        [[1.0, 0.0]] * (rows // 2),
        lengths=response.tolist(),
        policy=[each.tolist() for each in o],
        rollout=[each.tolist() for each in s],
        per_row={"micro_batch_id": micro.tolist(), "prompt_length": prompt.tolist()},
        step=step,
    )
    return replace(batch, per_row={**batch.per_row, "prompt_ids": torch.arange(1, rows + 1)})


def run(steps=4, **kwargs):
    return [step_of(step, **kwargs) for step in range(steps)]


def found_in(batches):
    report = report_on(batches, trainer=None, select=[CODE])
    assert not report.skipped, report.skipped
    return report.findings[0] if report.findings else None


@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_positions_that_count_padding(shift):
    finding = found_in(run(shift=shift))
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    found = values(finding)
    assert found["correlation"] > 0.8
    assert found["gap_padded"] > 2 * found["gap_without_padding"]
    # The mean size of a normal gap is 0.8 times its standard deviation.
    assert found["gap_without_padding"] == pytest.approx(0.008, rel=0.15)
    assert found["rows"] == 4 * 48


@pytest.mark.parametrize(
    "batches",
    [
        run(),
        run(noise=0.05),
        # short prompts have a larger gap, whatever the padding
        run(by_prompt=-0.15),
        run(by_prompt=2.0),
        run(by_response=5.0),
        # a little
        run(shift=0.05),
    ],
    ids=lambda _: "",
)
def test_look_alikes(batches):
    assert found_in(batches) is None


def test_a_factor_of_ten_needs_no_correlation():
    # Every padded row is as wrong as the next, so that its size says nothing.
    batches = run(jump=20.0)
    finding = found_in(batches)
    assert finding.severity == Severity.WARNING
    assert values(finding)["correlation_less_prompt"] < 0.3
    assert values(finding)["gap_padded"] > 10 * values(finding)["gap_without_padding"]
    # Neither a smaller factor, which is no slope and cannot be excluded, nor what kernels of float32 differ by.
    (skipped,) = report_on(run(jump=3.0), trainer=None, select=[CODE]).skipped
    assert skipped.reason.startswith("192 rows leave a rise of the gap of up to ")
    assert found_in(run(jump=20.0, noise=1e-6)) is None


@pytest.mark.slow
def test_clean_excludes_what_is_there_in_99_of_100_runs():
    # The mean size of the normal noise, 0.01 nats, is 0.798 of that; a twentieth of it for each 100 tokens.
    true, covered = 0.05 * 0.01 * 0.798, 0
    for seed in range(100):
        batches = [step_of(100 * seed + step, shift=0.05) for step in range(3)]
        (bound,) = report_on(batches, trainer=None, select=[CODE]).excluded
        assert bound.words.endswith(" nats per 100 tokens of left padding")
        assert bound.bound < bound.limit
        covered += bound.bound >= true
    assert covered >= 99


def test_one_micro_batch_a_step_excludes_nothing():
    # Its padding is the longest prompt less the row's own: nothing tells padding from a short prompt.
    lengths = torch.arange(100, 700, 100).repeat_interleave(8)
    batches = [replace(one, per_row={**one.per_row, "prompt_length": lengths}) for one in run(size=48)]
    (skipped,) = report_on(batches, trainer=None, select=[CODE]).skipped
    assert "of any size possible" in skipped.reason
    assert skipped.remedy == "record more rows"


def test_no_verdict():
    for batches in (run(same=True), run(rows=8), run(size=1)):
        (skipped,) = report_on(batches, trainer=None, select=[CODE]).skipped
        assert skipped.reason == "no step has 16 rows in micro-batches of prompts of different lengths"
    (skipped,) = report_on(toy_batch([[1, 0]], rollout=-1.0), trainer="slime", select=[CODE]).skipped
    assert skipped.reason == "missing columns micro_batch_id, prompt_ids"


def test_micro_batches_of_ranks_are_different():
    batches = []
    for batch in run(shift=5.0):
        micro_N = batch.per_row["micro_batch_id"]
        ranks = {"micro_batch_id": micro_N % 2, "rank": micro_N // 2}
        batches.append(replace(batch, per_row={**batch.per_row, **ranks}))
    assert values(found_in(batches)) == values(found_in(run(shift=5.0)))


def small(jump, at=(), steps=6):
    """Steps of too few rows for a correlation, in micro-batches of two prompts."""
    return [step_of(step, rows=12, size=4, jump=jump if step in at else 0.0) for step in range(steps)]


@pytest.mark.parametrize(("jump", "at", "fires"), [(9, range(6), True), (9, (1, 2, 4, 5), True), (9, (1,), False),
    (2, range(6), False), (0, (), False)])  # fmt: skip
def test_steps_in_which_padding_alone_decides(jump, at, fires):
    report = report_on(small(jump, at), trainer=None, select=[CODE])
    assert bool(report.findings) == fires
    if fires:
        assert report.findings[0].headline.endswith(f"padded, in {len(at)} steps of 6")
    else:
        assert [one.code for one in report.skipped] == [CODE]
