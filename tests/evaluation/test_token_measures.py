"""Rules measure tokens in the pass that evaluates them, block by block."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch

from rolloutdoctor.data.several_steps import joined
from rolloutdoctor.engine.accumulate import RuleAccumulator
from rolloutdoctor.engine.run_steps import StepDispatcher
from rolloutdoctor.evaluation import blocks
from rolloutdoctor.evaluation.token_measures import TokenBlock, TokenMeasures
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.rules.table_rule import TableRule
from rolloutdoctor.testing import random_batch, toy_batch

BENCHMARKS = Path(__file__).parents[1] / "lab" / "benchmarks"


@pytest.fixture
def batch():
    return random_batch(3, sizes=(4,) * 12)


@pytest.fixture(params=[1, 20, 10**6])
def block_tokens(request, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", request.param)


def measured(batch, measure):
    return TokenMeasures({"one": measure}).finish(batch)["one"]


def whole(batch):
    return TokenBlock(batch, slice(0, len(batch)), slice(0, batch.tokens))


def test_blocks_together_are_the_step(batch, block_tokens):
    def measure(block):
        gap_T = block.log_ratio("old_log_probs", "rollout_log_probs")
        return {
            "gap": block.row_sum(gap_T.abs()),
            "signed": block.row_sum(gap_T),
            "last": block.row_sum(block.position_T),
            "trained": block.row_sum(block.trained_T),
        }

    found = measured(batch, measure)
    gap_T = batch.column("old_log_probs").double() - batch.column("rollout_log_probs").double()
    torch.testing.assert_close(found["gap"], seg.total(gap_T.abs(), batch.rows), rtol=1e-15, atol=0)
    torch.testing.assert_close(found["signed"], seg.total(gap_T, batch.rows), rtol=1e-12, atol=1e-15)
    lengths_N = batch.rows.diff().double()
    assert found["last"].tolist() == (lengths_N * (lengths_N - 1) / 2).tolist()
    assert found["trained"].tolist() == batch.trained.diff().tolist()


def test_terms_of_a_block_are_made_once(batch):
    block = whole(batch)
    assert block.log_ratio("old_log_probs", "ref_log_probs") is block.log_ratio("old_log_probs", "ref_log_probs")
    assert block.ratio("old_log_probs", "ref_log_probs") is block.ratio("old_log_probs", "ref_log_probs")
    assert block.prob("old_log_probs") is block.prob("old_log_probs")
    made = []
    for _ in range(3):
        block.cached("own", lambda: made.append(1))
    assert made == [1]


def test_a_column_of_one_chunk_is_a_view(batch):
    assert whole(batch).column("ref_log_probs").data_ptr() == batch.column("ref_log_probs").data_ptr()


def test_contexts_without_a_prompt_are_of_one_step_and_group():
    """Equal responses have equal hashes in a group, and others in another group, step or split."""
    ids = {"response_ids": torch.tensor([3, 4] * 4)}
    steps = [toy_batch([[1, 0], [1, 0]], lengths=2, step=step) for step in (0, 1)]
    steps = [replace(step, per_token={**step.per_token, **ids}) for step in steps]
    steps.append(replace(steps[0], split="eval"))

    def hashes(batch):
        return TokenBlock(batch, slice(0, len(batch)), slice(0, batch.tokens)).prefixes.row_N.tolist()

    each = [hashes(step) for step in steps]
    assert all(first == second != third == fourth for first, second, third, fourth in each)
    assert len({one for hashed in each for one in hashed}) == 6
    assert hashes(joined(steps[:2])) == each[0] + each[1]


def test_what_is_logged_and_what_stands_in(batch):
    del batch.per_token._chunks["old_log_probs"]
    block = whole(batch)
    assert block.has("old_log_probs")
    assert not block.is_logged("old_log_probs")
    assert block.column("old_log_probs") is block.column("policy_log_probs") or torch.equal(
        block.column("old_log_probs"), block.column("policy_log_probs")
    )
    assert not block.has("entropy")


class NaiveGap(TableRule):
    """A rule over two token columns, as anyone would write it."""

    code = "RDX001"
    name = "naive-gap"
    adds = ("gap",)
    needs_objective = False

    def columns(self, context):
        return frozenset({"rollout_log_probs", "old_log_probs"})

    def measure_tokens(self, block):
        gap_T = block.log_ratio("old_log_probs", "rollout_log_probs")
        return {"gap": block.row_sum(gap_T.abs() * block.trained_T)}

    def table(self, run, context):
        return run.rows

    def quantities(self):
        return {"gap": (pl.sum("gap"), "nats")}

    def judge(self, run, context):
        return None


def test_a_step_that_cannot_be_evaluated_is_measured_all_the_same(batch, block_tokens):
    from rolloutdoctor.engine.judge import measured_by
    from rolloutdoctor.engine.plan import make_plan
    from rolloutdoctor.engine.prepare import context_for

    plan = make_plan([NaiveGap()], context_for(frozenset(batch.per_token), frozenset(), None))
    accumulator = RuleAccumulator(plan)
    StepDispatcher([accumulator], torch.float32).step(batch, {})
    measured = measured_by(plan.rules[0], accumulator.state(), plan.context)
    gap_T = batch.column("old_log_probs").double() - batch.column("rollout_log_probs").double()
    expected = float((gap_T.abs() * batch.column("response_mask")).sum())
    assert measured["gap"] == pytest.approx(expected, rel=1e-14)


MEMORY = """
import resource, sys
sys.path[:0] = [sys.argv[2], sys.argv[3]]
from evaluation.test_token_measures import NaiveGap
from rolloutdoctor.cli.process import prepare_process
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.parquet.files import OpenFile
from rolloutdoctor.io.run import open_run
from rolloutdoctor.rules.table import RULES

rules, rows, before = RULES + ([NaiveGap()] if sys.argv[4] == "with" else []), [], OpenFile.slices

def counted(self, group, *args, **kwargs):
    rows.append(group)
    return before(self, group, *args, **kwargs)

OpenFile.slices = counted
check(open_run([sys.argv[1]]), CheckOptions(rules=rules, device="cpu"))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10, len(rows))
"""


@pytest.mark.slow
def test_a_naive_rule_costs_a_block_and_no_second_read(tmp_path):
    """A rule that asked for both columns whole would take 2 x 4 bytes of each token, and 8 more for the difference."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from generate import write_run
    finally:
        sys.path.remove(str(BENCHMARKS))
    tokens = write_run(tmp_path / "run.parquet", tokens=6_000_000, steps=2)
    code = MEMORY.replace("RULES + (", "list(RULES) + (")
    paths = [str(tmp_path / "run.parquet"), str(BENCHMARKS), str(BENCHMARKS.parents[1])]

    def peak(which):
        done = subprocess.run(
            [sys.executable, "-c", code, *paths, which], capture_output=True, encoding="utf-8", check=True
        )
        memory, reads = done.stdout.split()
        return float(memory), int(reads)

    (alone, reads), (together, reads_with) = peak("without"), peak("with")
    assert reads_with == reads
    # Half of what one of its columns takes: whatever lives for a block is far below, a whole column is above.
    assert together - alone < tokens / 2 * 4 / 2**20 / 2
