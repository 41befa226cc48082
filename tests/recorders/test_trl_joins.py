"""A recorded TRL run is clean however generations and optimizer steps lie: every line is joined with its own rows."""

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from recorders.test_trl_metrics import shade
from recorders.trl_runs import alarms_of, make_trainer, read, run, torch, trl

import rolloutdoctor as rd
from rolloutdoctor.recorders.trl import record

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

RUNS = {
    "two updates": {"steps_per_generation": 4, "beta": 0.1},
    "four updates": {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "scale_rewards": "batch"},
    "two updates, two iterations": {"steps_per_generation": 4, "num_iterations": 2, "loss_type": "bnpo", "steps": 8},
    "two generations": {"steps_per_generation": 1, "scale_rewards": "batch"},
    "two generations of a summed loss": {
        "steps_per_generation": 1,
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "two passes in one update": {"steps_per_generation": 1, "num_iterations": 2, "loss_type": "cispo"},
    "windows": {"steps_per_generation": 4, "logging_steps": 3, "steps": 6},
    "windows of a part of a generation": {
        **{"steps_per_generation": 4, "gradient_accumulation_steps": 1, "logging_steps": 2, "steps": 8},
    },
    "rloo": {"cls": trl.RLOOTrainer, "steps_per_generation": 4, "normalize_advantages": True},
    "rloo, two generations": {"cls": trl.RLOOTrainer, "steps_per_generation": 1, "normalize_advantages": True},
    "an uneven split": {"steps_per_generation": 3, "steps": 6},
}


def checked(path):
    return rd.check(rd.open(path), dtype="float32")


@pytest.fixture(scope="module", params=RUNS)
def recorded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run(folder, rewards=(shade,), **({"steps": 4} | RUNS[request.param]))
    return request.param, folder / "run.parquet"


@pytest.mark.slow(every=True)
def test_a_healthy_run_is_clean(recorded):
    name, path = recorded
    report = checked(path)
    assert not alarms_of(report)
    compared = {entry.quantity: entry for entry in report.audit}
    if name == "an uneven split":
        # Each line is of two parts of different generations, and none is compared.
        assert "line of its own" in compared["loss"].reason
        assert compared["reward"].agree
        return
    assert not [entry for entry in report.audit if not entry.agrees]
    assert compared["loss"].agree
    if name == "two passes in one update":
        assert "reused" in compared["reward"].reason
        return
    assert compared["reward"].agree == compared["reward"].compared > 0


def copied(path, folder, *, without=(), change=None):
    """Write a recording again, without some columns and with one logged loss changed; return where."""
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(list(without)), folder / "run.parquet")
    metrics = pq.read_table(path.with_suffix(".metrics.parquet"))
    values = metrics["value"]
    if change is not None:
        # The last lines may lie in a window that is not whole.
        is_loss = pc.and_(pc.equal(metrics["name"], "loss"), pc.less_equal(metrics["step"], 6))
        is_last = pc.and_(is_loss, pc.equal(metrics["step"], pc.max(metrics.filter(is_loss)["step"])))
        values = pc.if_else(is_last, pc.add(values, change), values)
    metrics = metrics.set_column(metrics.column_names.index("value"), "value", values)
    pq.write_table(metrics, folder / "run.metrics.parquet")
    return folder / "run.parquet"


@pytest.mark.slow(every=True)
def test_a_wrong_line_of_a_later_update_is_found(recorded, tmp_path):
    """The lines of the later optimizer steps count: one that is off is a difference."""
    name, path = recorded
    entries = {entry.quantity: entry for entry in checked(copied(path, tmp_path, change=0.5)).audit}
    assert entries["loss"].compared - entries["loss"].agree == (0 if name == "an uneven split" else 1)


@pytest.mark.slow(every=True)
def test_older_recordings_have_their_generations_in_the_identifiers(recorded, tmp_path):
    _, path = recorded
    older = copied(path, tmp_path, without=["generation_id", "trained_beyond", "response_mask_pre"])
    assert not alarms_of(checked(older))


@pytest.mark.slow
def test_without_optimizer_steps_nothing_of_an_update_is_confirmed(recorded, tmp_path):
    name, path = recorded
    if "update" not in name or "one" in name:
        pytest.skip("one optimizer step for each generated batch")
    report = checked(copied(path, tmp_path, without=["optim_step_id"], change=0.5))
    assert not alarms_of(report)
    assert "no optim_step_id" in {entry.quantity: entry for entry in report.audit}["loss"].reason


@pytest.mark.slow
def test_trained_padding_is_recorded(tmp_path):
    """A mask of ones trains the padding after a completion: the loss is that of the rows, padding included."""
    trainer = make_trainer(tmp_path, rewards=(shade,), steps=2, loss_type="grpo")
    original = trainer._generate_and_score_completions

    def forgotten(inputs):
        output = original(inputs)
        output["completion_mask"] = torch.ones_like(output["completion_mask"])
        return output

    trainer._generate_and_score_completions = forgotten
    record(trainer, tmp_path / "run.parquet")
    trainer.train()
    rows, _ = read(tmp_path)
    assert all(len(row["response_ids"]) == len(row["policy_log_probs"]) == 6 for row in rows)
    beyond = [row["trained_beyond"] for row in rows]
    assert sum(beyond) > 0
    for row in rows:
        generated = 6 - row["trained_beyond"]
        assert list(row["response_mask"]) == [1] * 6
        assert list(row["response_mask_pre"]) == [1] * generated + [0] * row["trained_beyond"]
        assert row["status"] == ("stop" if row["response_ids"][generated - 1] < 2 else "length")
    entries = {entry.quantity: entry for entry in checked(tmp_path / "run.parquet").audit}
    for name in ("loss", "kl", "completions/mean_length"):
        assert entries[name].agree == entries[name].compared == 2, name
