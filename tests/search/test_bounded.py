"""Ratios that also hold the log-probs of padding: shares of clipped rows follow, and the loss has bounds."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rolloutdoctor.engine.configure import configure
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.testing import diagnose, random_batch
from rolloutdoctor.trainers.options import Layer

NAME = "padding-in-ratio"
SETUPS = {
    "trl-rloo": {"beta": 0.0, "num_generations": 4},
    "trl": {"beta": 0.0, "num_generations": 4, "importance_sampling_level": "sequence", "loss_type": "grpo"},
}


def steps_of(trainer, count, *, micro=16, least=1.0, seed=3):
    """Rows, and what a trainer logs whose ratio of a response holds its padding, a nat or more of each."""
    made = configure(RunMetadata(), trainer, [Layer("test", SETUPS[trainer])])
    draw, found = np.random.default_rng(seed), []
    for step in range(count):
        batch = random_batch(seed + step, sizes=(4,) * 4, longest=12, rejected=0.0, empty=0.0, spread=0.05)
        rows = torch.arange(len(batch))
        batch = replace(batch, step=step, per_row={**batch.per_row, "micro_batch_id": rows // micro})
        length_N = batch.rows.diff()
        longest_N = torch.stack([length_N[rows // micro == row // micro].max() for row in range(len(batch))])
        lost = draw.uniform(least, 3, len(batch)) * (longest_N - length_N).numpy()
        lost_T = torch.from_numpy(lost).repeat_interleave(length_N)
        if trainer == "trl-rloo":
            # A sum over the response, and not a mean.
            lost_T = lost_T / length_N.repeat_interleave(length_N)
        lowered = batch.column("policy_log_probs") - lost_T
        seen = replace(batch, per_token={**batch.per_token, "policy_log_probs": lowered})
        own = evaluate(batch, made.objective, dtype=torch.float64)
        faulty = evaluate(
            seen,
            made.objective,
            dtype=torch.float64,
            amend=lambda rows, its=own: replace(rows, advantage_N=its.rows.advantage_N),
        )
        metrics = {name: float(torch.tensor(value)) for name, value in made.trainer.metrics(faulty).items()}
        kept = {name: value for name, value in metrics.items() if name == "loss" or name.startswith("clip_ratio")}
        columns = {**batch.per_row, "advantage": own.rows.advantage_N.float().double()}
        found.append((replace(batch, per_row=columns), kept))
    return found


def report(trainer, steps):
    stated = {"epsilon": 0.2, "scale_rewards": "group"} if trainer == "trl" else {"epsilon": 0.2}
    return diagnose(
        [batch for batch, _ in steps],
        trainer=trainer,
        options=SETUPS[trainer] | stated,
        logged=[logged for _, logged in steps],
        select=["RDG005", "RDM004"],
    )


def causes(found):
    return [each.cause.hypothesis for each in found.findings if each.cause is not None]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("trainer", SETUPS)
def test_padding_in_the_ratio_is_named(trainer):
    (found,) = report(trainer, steps_of(trainer, 4)).findings
    assert (found.code, found.verdict, found.cause.hypothesis) == ("RDG005", "confirmed", NAME)
    assert {"loss", "clip_ratio/region_mean"} <= {*found.cause.explains}
    assert "the padded ones of the step" in found.headline
    assert "the loss lies within the bounds" in found.headline


@pytest.mark.slow
def test_padding_to_the_longest_of_a_micro_batch():
    found = report("trl-rloo", steps_of("trl-rloo", 4, micro=4))
    assert causes(found) == ["padding-in-ratio-of-micro-batches"]
    assert not found.findings[0].cause.also


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(("steps", "is_named"), [(1, False), (2, True)])
def test_one_step_is_too_little(steps, is_named):
    # A share of 16 rows is one of 17: 4.1 bits, and it takes 8.
    found = report("trl-rloo", steps_of("trl-rloo", steps))
    assert causes(found) == [NAME] * is_named
    assert {each.code for each in found.findings} == ({"RDG005"} if is_named else {"RDG005", "RDM004"})


def changed(steps, name, by):
    """Another value of a metric in the last step."""
    (batch, logged) = steps[-1]
    return [*steps[:-1], (batch, {**logged, name: logged[name] + by})]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("name", "by"),
    [("loss", 3.0), ("loss", -3.0), ("clip_ratio/region_mean", 1 / 16), ("clip_ratio/low_mean", -1 / 16)],
)
def test_one_value_outside_refutes_it(name, by):
    assert not causes(report("trl-rloo", changed(steps_of("trl-rloo", 4), name, by)))


@pytest.mark.slow
def test_likely_padding_that_leaves_rows_unclipped_is_not_it():
    # The ratio stays above 0.8 where padding costs less than 0.22 nats.
    steps = steps_of("trl-rloo", 4, least=0.0)
    assert not causes(report("trl-rloo", steps)) or all(logged["clip_ratio/low_mean"] for _, logged in steps)


def test_what_follows_from_the_options_has_no_cause():
    steps = steps_of("trl-rloo", 3)
    made = configure(RunMetadata(), "trl-rloo", [Layer("test", SETUPS["trl-rloo"])])
    healthy = [
        (batch, dict(made.trainer.metrics(evaluate(batch, made.objective, dtype=torch.float64)))) for batch, _ in steps
    ]
    assert not report("trl-rloo", [(batch, {"loss": logged["loss"]}) for batch, logged in healthy]).findings
