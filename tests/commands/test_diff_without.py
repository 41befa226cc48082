"""A step with and without the rows and tokens that carry it, against sums over its tokens."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from engine.runs import TRL, VERL, random_columns, write
from fuzz.harness import run as command

import rolloutdoctor as rd
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.results.errors import UsageError

OPTIONS = {"device": "cpu", "dtype": "float64"}
TWICE = [TRL, {**VERL, "config": {"algorithm.adv_estimator": "grpo", "actor.use_kl_loss": True}}]


@pytest.fixture(scope="module", params=TWICE, ids=["trl", "verl"])
def path(request, tmp_path_factory):
    return write(tmp_path_factory.mktemp("without") / "run.parquet", random_columns(2), request.param)


def evaluated(path):
    """Every step evaluated, with the values of its tokens."""
    run = rd.open(path)
    objective = rd.objective_of(run)
    return [
        evaluate(batch, objective, dtype=torch.float64, per_token=True)
        for batch in rd.batches(run, objective, dtype="float64")
    ]


def of_rows(step):
    return np.repeat(np.arange(len(step.batch)), step.batch.rows.diff().numpy())


def values(effect):
    return {name: measure.value for name, measure in effect.total.items()}


def expected(path, left_out):
    """Sums over all steps of the tokens that stay; `left_out` gives the tokens of a step to drop."""
    found = dict.fromkeys(("loss", "before", "l1", "sq", "whole", "all"), 0.0)
    steps = evaluated(path)
    for step in steps:
        out = left_out(step)
        kept = step.per_token
        grad, loss = kept.grad_T.numpy(), kept.loss_T.numpy()
        found["loss"] += loss[~out].sum() / len(steps)
        found["before"] += loss.sum() / len(steps)
        found["l1"] += np.abs(grad[~out]).sum()
        found["sq"] += (grad[~out] ** 2).sum()
        found["whole"] += (grad**2).sum()
        found["all"] += np.abs(grad).sum()
    return found


def check(effect, want):
    found = values(effect)
    assert found["loss_before"] == pytest.approx(want["before"])
    assert found["loss_after"] == pytest.approx(want["loss"])
    assert (found["grad_l1_before"], found["grad_l1_after"]) == pytest.approx((want["all"], want["l1"]))
    assert (found["grad_l2_before"], found["grad_l2_after"]) == pytest.approx((want["whole"] ** 0.5, want["sq"] ** 0.5))
    # What stays is a part of the gradient, so that its projection on itself is whole.
    assert found["kappa"] == pytest.approx(1)
    assert found["cosine"] == pytest.approx((want["sq"] / want["whole"]) ** 0.5)
    assert found["spurious_share_l1"] == pytest.approx(1 - want["l1"] / want["all"])
    assert found["changed_rows"] == 0


def heaviest_rows(count):
    def left_out(step):
        square = np.bincount(of_rows(step), step.per_token.grad_T.numpy() ** 2, len(step.batch))
        return np.isin(of_rows(step), np.argsort(-square, kind="stable")[:count])

    return left_out


def heaviest_tokens(count):
    def left_out(step):
        square = step.per_token.grad_T.numpy() ** 2
        return np.isin(np.arange(len(square)), np.argsort(-square, kind="stable")[:count])

    return left_out


def test_the_heaviest_rows(path):
    check(rd.diff(path, heaviest=3, **OPTIONS).effects[0], expected(path, heaviest_rows(3)))


def test_the_heaviest_tokens(path):
    check(rd.diff(path, heaviest_tokens=5, **OPTIONS).effects[0], expected(path, heaviest_tokens(5)))


def test_named_rows(path):
    rows = ("r3", "1/g9/r37")
    names = {"r3", "r37"}

    def left_out(step):
        chosen = [row for row in range(len(step.batch)) if step.batch.sample_name(row) in names]
        return np.isin(of_rows(step), chosen)

    effect = rd.diff(path, without=rows, **OPTIONS).effects[0]
    check(effect, expected(path, left_out))
    assert effect.label == "without 2 named rows"


def test_afresh_is_a_run_without_them(path, tmp_path):
    """Advantages, denominators and the trainer's metrics are those of a file that never had the rows."""
    columns = random_columns(2)
    gone = {"r1", "r26", "r50"}
    metadata = json.loads(pq.read_schema(path).metadata[b"rolloutdoctor"])
    rows = [row for row, name in enumerate(columns["sample_id"]) if name not in gone]
    other = rd.recompute(write(tmp_path / "less.parquet", columns, metadata, rows=rows), **OPTIONS).steps
    effect = rd.diff(path, without=sorted(gone), afresh=True, **OPTIONS).effects[0]
    for part, step in zip(effect.per_step, other, strict=True):
        found = {name: measure.value for name, measure in part.measures.items()}
        assert found["loss_after"] == pytest.approx(step.before.loss)
        assert found["grad_l1_after"] == pytest.approx(step.before.grad_l1)
        assert found["grad_l2_after"] == pytest.approx(step.before.grad_l2)
        for name, pair in part.metrics.items():
            if name in step.before.metrics:
                assert pair.after == pytest.approx(step.before.metrics[name], nan_ok=True), name


def test_it_says_what_was_left_out_and_what_stays(path):
    kept = rd.diff(path, heaviest=2, **OPTIONS).effects[0]
    assert "the other rows keep their advantages and the denominators of the step" in kept.remarks
    assert any(one.startswith("6 rows: 0/") for one in kept.remarks)
    afresh = rd.diff(path, heaviest=2, afresh=True, **OPTIONS).effects[0]
    assert "advantages and denominators are those of a step without them" in afresh.remarks


def test_what_does_not_fit_is_refused(path):
    with pytest.raises(UsageError, match="no row with a gradient has such a name"):
        rd.diff(path, without=["nobody"], **OPTIONS)
    with pytest.raises(UsageError, match="leave out --fix and --against"):
        rd.diff(path, without=["r3"], against={"epsilon": 0.1}, **OPTIONS)
    with pytest.raises(UsageError, match="--without ROWS or --top N"):
        rd.diff(path, **OPTIONS)


@pytest.mark.slow
def test_the_command_reads_names_and_files(path, tmp_path):
    words = ["diff", str(path), "--format", "concise", "--device", "cpu"]
    (tmp_path / "rows.txt").write_text("r3\n0/g1/r4\n")
    for more, label in (
        (["--top", "2"], "without the 2 heaviest rows of each step"),
        (["--top-tokens", "3"], "without the 3 heaviest tokens of each step"),
        (["--without", "r3,r4"], "without 2 named rows"),
        (["--without", str(tmp_path / "rows.txt")], "without 2 named rows"),
    ):
        code, out, err, _ = command([*words, *more], tmp_path)
        assert (code, err) == (0, "")
        assert out.startswith(label)
    # With a fix the number of listed groups is meant, as ever.
    code, out, _, _ = command(["diff", str(path), "--fix", "zero-std", "--top", "2", "--format", "json"], tmp_path)
    assert code == 0
    assert len(json.loads(out)["effects"][0]["groups"]) == 2


@pytest.mark.slow
def test_parts_give_the_bytes_of_one(path, tmp_path):
    words = ["diff", str(path), "--top", "2", "--format", "json", "--device", "cpu"]
    one, other = (command([*words, *more], tmp_path)[1] for more in ([], ["--workers", "2"]))
    assert one == other
