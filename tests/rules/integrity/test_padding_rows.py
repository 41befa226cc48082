"""RDI015: rows that fill up a batch, those that were sampled twice, and those that are masked."""

from dataclasses import replace

import pytest
import torch
from rules.checking import outcomes, report_on
from rules.padded import with_copies

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.evaluation.padding_rows import padding_rows
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.search.hypotheses.reward_flow import PADDING_COUNTED
from rolloutdoctor.testing import diagnose, random_batch, toy_batch
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.table import TRAINERS

VERL = {"adv_estimator": "grpo", "use_kl_loss": True, "kl_loss_coef": 0.1}
SPEC = TRAINERS["verl"]


def objective_of(**options):
    return SPEC.objective(resolve(SPEC.options, (0, 9, 1), [Layer("test", {**VERL, **options})], trainer="verl"))


def step_of(step=0, groups=6, size=4):
    """A step whose responses have all ids and log-probs of their own."""
    batch = random_batch(step, sizes=(size,) * groups, longest=12, rejected=0.0, empty=0.0, holes=0.1, adjacent=True)
    mask_T = batch.per_token["response_mask"].clone()
    mask_T[batch.rows[:-1]] = True
    draw = torch.Generator().manual_seed(step)
    tokens = {name: x_T.clamp(max=0) if name.endswith("log_probs") else x_T for name, x_T in batch.per_token.items()}
    tokens |= {"response_mask": mask_T, "response_ids": torch.randint(0, 1000, (batch.tokens,), generator=draw)}
    del tokens["response_mask_pre"], tokens["values"]
    return replace(batch, step=step, per_token=tokens)


def logged(batch, plain, *, counts=True, **options):
    """The step as rllm had it: advantages of the rows that were sampled, 0 for the copies; and its metrics.

    Args:
        batch: with copies, which come last.
        plain: without them.
        counts: the tokens of copies are in the denominator.
        options: of verl.
    """
    made = objective_of(**options)
    own_N = evaluate(plain, made).rows.advantage_N
    advantage_N = torch.cat([own_N, own_N.new_zeros(len(batch) - len(plain))]).float().double()
    batch = replace(batch, per_row={**batch.per_row, "advantage": advantage_N})
    used = PADDING_COUNTED.objective(made) if counts else choose("padding-rows").apply(made)
    found = evaluate(batch, used, dtype=torch.float64)
    names = ("actor/pg_loss", "actor/kl_loss", "actor/loss")
    metrics = {name: float(torch.tensor(value)) for name, value in dict(SPEC.metrics(found)).items() if name in names}
    return batch, metrics


ROWS = [0, 5, 9, 22]


def report(*pairs, select=("RDI015",)):
    batches, metrics = zip(*pairs, strict=True)
    return diagnose(batches, trainer="verl", options=VERL, logged=metrics, select=select)


def padded_run(**options):
    plain = [step_of(step) for step in range(3)]
    return [logged(with_copies(one, ROWS), one, **options) for one in plain]


def test_copies_that_have_no_advantage_and_are_counted():
    found = report(*padded_run())
    (finding,) = found.findings
    assert (finding.code, finding.severity.name, finding.verdict) == ("RDI015", "ERROR", "confirmed")
    assert finding.cause.hypothesis == "padding-counted"
    assert finding.cause.as_found == finding.cause.compared > finding.cause.as_recorded


@pytest.mark.slow
def test_a_trainer_that_does_not_count_them_is_not_accused():
    """Its loss is that of the fix, whatever the mask in the file says."""
    found = report(*padded_run(counts=False))
    assert not found.findings
    assert {fix for entry in found.audit for fix in entry.with_fixes} == {"padding-rows:left-out"}


def test_without_a_loss_it_is_in_doubt():
    found = report(*((batch, {}) for batch, _ in padded_run()))
    (finding,) = found.findings
    assert (finding.severity.name, finding.verdict) == ("WARNING", "exposed")
    assert "padding-rows:left-out" in finding.cause.also


def test_the_sizes_of_groups_tell_without_any_log():
    batch = with_copies(step_of(), [0, 1, 9])
    trained_N = batch.trained.diff()
    found = report_on(batch, trainer="verl", select=["RDI015"], adv_estimator="grpo")
    (finding,) = found.findings
    assert (finding.severity.name, finding.verdict) == ("WARNING", "exposed")
    values = {name: one.value for name, one in finding.measures.items()}
    assert (values["rows_shown"], values["rows_looked_at"]) == (3, 27)
    assert values["tokens_share"] == pytest.approx(float(trained_N[-3:].sum() / trained_N.sum()))


@pytest.mark.parametrize(
    ("copies", "told"),
    [
        ([0, 1, 4, 8, 9, 12, 16], True),
        # Groups of two sizes.
        ([0, 4, 5, 8, 12, 16, 20], False),
        # As many copies as other rows: few responses are possible.
        ([0, 1, 2, 3, 4, 8, 9, 12, 16], False),
    ],
)
def test_many_copies_in_groups_of_several_sizes(copies, told):
    batch = with_copies(step_of(), copies)
    assert bool(report_on(batch, trainer="verl", select=["RDI015"], adv_estimator="grpo").findings) is told


@pytest.mark.slow
def test_copies_that_are_masked_are_no_fault():
    """What rllm does now: they carry nothing, and no denominator has them."""
    for logs in (False, True):
        pairs = []
        for step in range(3):
            plain = step_of(step)
            batch, metrics = logged(with_copies(plain, ROWS, mask=False), plain)
            per_row = {name: x_N for name, x_N in batch.per_row.items() if logs or name != "advantage"}
            pairs.append((replace(batch, per_row=per_row), metrics if logs else {}))
        assert not report(*pairs).findings


@pytest.mark.parametrize(
    "batch",
    [
        # A group of its usual size that has a response twice.
        replace(step_of(), groups=Groups.of(torch.arange(24) // 4)),
        # One token has another log-prob: it was sampled again.
        with_copies(step_of(), [0, 1, 9], log_probs=1e-6),
        # Groups differ in size anyway.
        with_copies(random_batch(3, sizes=(2, 3, 4, 5), rejected=0.0, empty=0.0), [0]),
        # Every group has copies: the policy has collapsed.
        with_copies(step_of(), [0, 4, 8, 12, 16, 20, 21]),
        # Two groups say nothing of a usual size.
        with_copies(step_of(groups=2), [0]),
        # All rows are one response.
        with_copies(step_of(groups=6, size=1), [0, 1, 2]),
    ],
    ids=["no copy", "sampled again", "uneven", "collapsed", "two groups", "groups of one"],
)
def test_what_looks_like_it(batch):
    assert not report_on(batch, trainer="verl", select=["RDI015"], adv_estimator="grpo").findings


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("answers", "groups", "size"), [(3, 3, 3), (10, 3, 3), (10, 4, 4), (100, 3, 3)])
def test_groups_of_a_filter_that_have_a_response_twice(answers, groups, size, seed):
    """In some step the groups are even without their copies by chance."""
    draw, steps = torch.Generator().manual_seed(seed), []
    for step in range(10):
        sizes = (torch.rand(groups, size, generator=draw) > 0.3).sum(1).clamp(min=2).tolist()
        answer = torch.randint(0, answers, (sum(sizes),), generator=draw)
        steps.append(
            toy_batch(
                [one.tolist() for one in (answer % 2).double().split(sizes)],
                lengths=2,
                per_token={"response_ids": [[one, one + 7] for one in answer.tolist()]},
                step=step,
            )
        )
    assert not report_on(steps, trainer="verl", select=["RDI015"], adv_estimator="grpo").findings


def test_repeated_samples_with_their_advantages_are_clean():
    """Copies in groups of one size, with the advantages of any row: duplicate-responses is about these."""
    plain = step_of()
    twice = with_copies(plain, [0, 4, 8, 12, 16, 20])
    own_N = evaluate(twice, objective_of()).rows.advantage_N.float().double()
    batch = replace(twice, per_row={**twice.per_row, "advantage": own_N})
    assert outcomes(report_on(batch, trainer="verl", select=["RDI015"], **VERL)) == {"RDI015": "clean"}
    assert outcomes(report_on(twice, trainer="verl", select=["RDI015"], **VERL)) == {"RDI015": "skipped"}


def test_another_pass_over_a_row_is_no_copy():
    batch = with_copies(step_of(), [0, 1, 9])
    later = torch.zeros(len(batch), dtype=torch.int64)
    later[-3:] = 1
    batch = replace(batch, per_row={**batch.per_row, "optim_step_id": later})
    assert not bool(padding_rows(batch).any())


def test_rows_that_nothing_identifies_cannot_tell():
    batch = with_copies(step_of(), [0, 1, 9])
    bare = replace(batch, per_token={"response_mask": batch.per_token["response_mask"]})
    assert outcomes(report_on(bare, trainer="verl", select=["RDI015"], **VERL)) == {"RDI015": "skipped"}


def test_rows_without_a_trained_token_rule_it_out():
    batch = step_of()
    masked = replace(batch, per_token={**batch.per_token, "response_mask": torch.zeros(batch.tokens, dtype=torch.bool)})
    assert outcomes(report_on(masked, trainer="verl", select=["RDI015"], **VERL)) == {"RDI015": "not applicable"}


# The fix.


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_the_fix_is_the_step_without_the_copies(mode):
    """Token counts go, row counts stay: what a mask of 0 does."""
    plain = step_of()
    padded, _ = logged(with_copies(plain, ROWS), plain)
    objective = objective_of(loss_agg_mode=mode)
    fixed = evaluate(padded, choose("padding-rows").apply(objective), dtype=torch.float64, per_token=True)
    alone = evaluate(plain, objective, dtype=torch.float64, per_token=True)
    masked = evaluate(
        with_copies(plain, ROWS, mask=False), choose("rejected-rows").apply(objective), dtype=torch.float64
    )
    factor = 1.0 if mode == "token-mean" else len(plain) / len(padded)
    torch.testing.assert_close(fixed.rows.advantage_N[: len(plain)], alone.rows.advantage_N)
    assert not bool(fixed.rows.advantage_N[len(plain) :].any())
    torch.testing.assert_close(fixed.per_token.grad_T[: plain.tokens], factor * alone.per_token.grad_T)
    assert not bool(fixed.per_token.grad_T[plain.tokens :].any())
    assert fixed.loss == pytest.approx(factor * alone.loss, rel=1e-12)
    assert fixed.loss == pytest.approx(masked.loss, rel=1e-12)


def test_the_fix_leaves_a_step_without_copies_as_it_is():
    batch, objective = step_of(), objective_of()
    before, after = (evaluate(batch, each) for each in (objective, choose("padding-rows").apply(objective)))
    assert before.loss == after.loss
    assert torch.equal(before.rows.advantage_N, after.rows.advantage_N)
