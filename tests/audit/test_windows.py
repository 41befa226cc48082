"""Metrics that were logged as means over several steps: compared once all steps of the window were read."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import rolloutdoctor as rd
from rolloutdoctor.audit.windows import OpenWindow, StepValue, join, opened
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.data.windows import Window, window_of, windows_of
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.ops.logged_digits import rounding_of

SAMPLE = Path(__file__).parents[2] / "sample_data" / "run.parquet"
INSTANT = ("grad_norm", "learning_rate", "epoch", "num_tokens")


@pytest.fixture
def averaged(tmp_path):
    """Write the sample of TRL as if every fifth step had been logged, with some values changed."""

    def write(change=lambda name, value: value, steps=40, size=5, **options):
        table = pq.read_table(SAMPLE)
        metadata = json.loads(table.schema.metadata[b"rolloutdoctor"])
        metadata["config"] |= {"logging_steps": size, **options}
        table = table.filter(pc.field("step") <= steps)
        path = tmp_path / "run.parquet"
        pq.write_table(table.replace_schema_metadata({b"rolloutdoctor": json.dumps(metadata).encode()}), path)
        values = {}
        for row in pq.read_table(SAMPLE.with_suffix(".metrics.parquet")).to_pylist():
            last = -(-row["step"] // size) * size
            if row["split"] == "train" and last <= 40:
                values.setdefault((last, row["name"]), {})[row["step"]] = row["value"]
        rows = []
        for (last, name), found in values.items():
            mean = found[last] if name in INSTANT else sum(found.values()) / len(found)
            rows.append({"step": last, "split": "train", "name": name, "value": change(name, mean)})
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "run.metrics.parquet")
        return path

    return write


def entries(report):
    return {entry.quantity: entry for entry in report.audit}


@pytest.mark.slow
def test_means_over_windows_agree(averaged):
    found = rd.check(rd.open(averaged()))
    loss = entries(found)["loss"]
    assert (loss.compared, loss.agree, loss.window, loss.stage) == (8, 8, 5, "loss")
    assert entries(found)["reward"].compared == 8
    assert {"RDG005", "RDM004", "RDG006"} <= {code for code, _ in found.clean}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("metric", "factor", "code"),
    [
        pytest.param("loss", 2.0, "RDG006", id="the loss added over two micro-batches"),
        pytest.param("reward", 3.0, "RDM007", id="a factor of a metric"),
    ],
)
def test_what_explains_the_means_is_named(averaged, metric, factor, code):
    found = rd.check(rd.open(averaged(lambda name, value: value * factor if name == metric else value)))
    causes = [finding.cause for finding in found.findings if finding.cause is not None]
    assert [(cause.quantity, cause.code) for cause in causes] == [(metric, code)]


@pytest.mark.slow
def test_what_no_cause_explains_is_said_with_the_window(averaged):
    found = rd.check(rd.open(averaged(lambda name, value: value + 0.01 * (name == "kl"))))
    codes = [finding.code for finding in found.findings if finding.severity.name == "ERROR"]
    assert codes
    assert set(codes) <= {"RDG005", "RDM004", "RDM001"}
    assert entries(found)["kl"].first.step == 5


@pytest.mark.slow
def test_a_window_that_is_not_whole_is_not_compared(averaged):
    found = rd.check(rd.open(averaged(steps=13)))
    assert entries(found)["loss"].compared == 2
    only = rd.check(rd.open(averaged(steps=3)))
    assert entries(only)["loss"].not_compared
    assert "not all of which are in the file" in entries(only)["loss"].reason


@pytest.mark.slow
def test_where_generations_may_be_reused_a_difference_of_rewards_proves_nothing(averaged):
    wrong = averaged(lambda name, value: value + (name == "reward"), num_iterations=2)
    found = rd.check(rd.open(wrong))
    assert entries(found)["reward"].not_compared == 8
    assert "reused" in entries(found)["reward"].reason
    assert entries(found)["loss"].agree == 8


def values_of(step):
    return {"loss": StepValue("loss", 0.1 * step, 1e-9)}


@pytest.mark.parametrize("order", [(1, 2, 3, 4), (4, 2, 3, 1), (2, 1, 4, 3)])
def test_parts_add_up_in_any_order(order):
    window = Window(1, 4, {"loss": 0.25})
    total, closed = {}, {}
    for step in order:
        closed, total = join(total, opened(window, step, values_of(step), {}))
    assert not total
    assert closed["loss"].agree == 1
    assert closed["loss"] == join({}, whole(window))[0]["loss"]


def whole(window):
    steps = tuple(range(window.first, window.last + 1))
    values = tuple(values_of(step)["loss"].value for step in steps)
    return {
        (window.last, "loss"): OpenWindow(
            "loss", "loss", window.first, window.last, 0.25, 0.0, steps, values, (1e-9,) * len(steps), "", len(steps)
        )
    }


def test_windows_lie_between_logged_steps():
    windows = windows_of({step: {} for step in (1, 3, 6, 7)}, 3)
    assert [(one.first, one.last) for one in windows] == [(1, 1), (2, 3), (4, 6), (7, 7)]
    assert [window_of(windows, step).last for step in range(1, 8)] == [1, 3, 3, 6, 6, 6, 7]
    assert window_of(windows, 8) is None
    assert window_of(windows_of({20: {}}, 5), 15) is None


def made_once(name):
    return name == "reward"


def test_windows_hold_generated_batches_as_a_whole():
    """Lines of three optimizer steps, batches of two: a window is two lines, with batches at steps 1, 3 and 5."""
    lines = {3: {"loss": 1.0, "reward": 1.0}, 6: {"loss": 4.0, "reward": 4.0}, 9: {"loss": 9.0}}
    (window,) = windows_of(lines, 3, 2, made_once)
    assert (window.first, window.last, window.size) == (1, 6, 3)
    # Two of the three batches were generated in the steps of the first line.
    assert window.values == {"loss": 2.5, "reward": 2.0}
    assert [step for step in range(8) if window_of((window,), step)] == [1, 3, 5]


def test_a_line_without_a_new_batch_has_no_metric_of_it():
    lines = {2: {"loss": 1.0, "reward": 5.0}, 4: {"loss": 3.0}}
    (window,) = windows_of(lines, 2, 4, made_once)
    assert window.values == {"loss": 2.0, "reward": 5.0}


def test_a_metric_that_a_line_lacks_has_no_mean():
    lines = {2: {"loss": 1.0}, 4: {"kl": 3.0}}
    assert windows_of(lines, 2, 4, made_once)[0].values == {}


def test_lines_of_several_optimizer_steps_are_averaged_under_the_first():
    lines = {StepKey(step, "train"): {"loss": float(step), "grad_norm": 1.0} for step in range(1, 5)}
    lines[StepKey(1, "train")]["reward"] = lines[StepKey(3, "train")]["reward"] = 0.5
    lines[StepKey(2, "eval")] = {"loss": 7.0}
    found = LoggedMetrics(lines).by_batch(1, 2, {"grad_norm"}, made_once)
    assert found.at(StepKey(1, "train")) == {"loss": 1.5, "grad_norm": 1.0, "reward": 0.5}
    assert found.at(StepKey(3, "train")) == {"loss": 3.5, "grad_norm": 1.0, "reward": 0.5}
    assert found.at(StepKey(2, "eval")) == {"loss": 7.0}
    # The line of step 5 is not there.
    assert "loss" not in found.at(StepKey(4, "train"))


def test_the_mean_of_rounded_lines_is_as_far_off_as_they_are():
    values = [0.1234, -0.1233, 0.5678, 1.234]
    lines = {StepKey(step, "train"): {"loss": value} for step, value in enumerate(values, start=1)}
    found = LoggedMetrics(lines).by_batch(1, 2, (), made_once)
    assert found.at(StepKey(1, "train"))["loss"] == pytest.approx(5e-5)
    assert rounding_of(found.digits(), "loss", found.at(StepKey(1, "train"))["loss"]) >= 5e-5


@pytest.mark.slow
def test_parts_of_a_run_give_what_the_whole_gives(averaged, tmp_path):
    from rolloutdoctor.engine.gathering import measure
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.engine.prepare import prepare
    from rolloutdoctor.io.run import StepRange

    run = rd.open(averaged(lambda name, value: value * (1 + (name == "kl"))))
    whole_state = measure(prepare(run, CheckOptions()))
    parts = [measure(prepare(run, CheckOptions(steps=StepRange(low, high)))) for low, high in ((0, 22), (22, 200))]
    total = parts[0] + parts[1]
    assert total.audit == whole_state.audit
    assert total.windows == whole_state.windows
    assert (parts[1] + parts[0]).audit["loss"].agree == 8


@pytest.mark.slow
def test_rules_on_numbers_and_vitals_use_means_over_windows(averaged):
    """A mean over five steps says what an entropy does as a value of one step does."""
    collapse = {5 * n: 2.0 * 0.3**n for n in range(1, 9)}
    path = averaged(lambda name, value: value)
    table = pq.read_table(path.with_suffix(".metrics.parquet")).to_pylist()
    rows = [row for row in table if row["name"] != "entropy"]
    rows += [{"step": step, "split": "train", "name": "entropy", "value": value} for step, value in collapse.items()]
    pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".metrics.parquet"))
    found = rd.check(rd.open(path), select=["RDA011", "RDM004", "RDT003"])
    vitals = {one.name: one for one in found.vitals}
    assert dict(zip(vitals["entropy"].steps, vitals["entropy"].series, strict=True)) == collapse
    assert len(vitals["reward"].series) == 8
    assert {"RDA011", "RDM004"} <= {code for code, _ in found.clean} | {one.code for one in found.findings}
    short = next(one for one in found.skipped if one.code == "RDT003")
    assert short.reason == "needs 10 steps with a logged entropy; the log has 8"
