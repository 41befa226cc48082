"""prime-rl: token exports that its own exporter wrote, and traces built to the documented layout (not by prime-rl)."""

import json
import shutil
from collections import Counter

import numpy as np
import polars as pl
import pytest
from importers.importing import DATA, converted, findings, prime_rl_output

from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.opening.dumps import ConvertOptions, detect_dump
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.results.errors import DataError, InputError
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.trainers.prime_rl.trace_branches import branches

EXPORTS = DATA / "prime_rl" / "token_exports"
TRACES = DATA / "prime_rl" / "rollouts"
EFFECTIVE = TRACES / "step_1" / "train" / "effective" / "traces.jsonl"


def stored(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewritten(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_tokens_of_an_export(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", EXPORTS)
    raw = stored(EXPORTS / "step_1" / "rank_0.jsonl")[0]
    row = rows[0]
    start = raw["loss_mask"].index(True)
    assert (row["step"], row["rank"], row["micro_batch_id"], row["sample_id"]) == (1, 0, 0, "1-0-0")
    assert row["prompt_ids"] == raw["token_ids"][:start]
    assert row["response_ids"] == raw["token_ids"][start:]
    assert row["response_mask"] == raw["loss_mask"][start:]
    assert row["policy_log_probs"] == pytest.approx(raw["trainer_logprobs"][start:])
    sampled = [
        value if kept else np.nan for value, kept in zip(raw["inference_logprobs"], raw["loss_mask"], strict=True)
    ]
    assert np.array_equal(row["rollout_log_probs"], np.float32(sampled[start:]), equal_nan=True)


def test_what_is_null_is_nan(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", EXPORTS)
    assert stored(EXPORTS / "step_1" / "rank_0.jsonl")[0]["entropy"][4] is None
    assert np.isnan(rows[0]["entropy"][1])


def test_mismatch_kl_is_not_the_kl_to_the_reference_model(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", EXPORTS)
    assert not {"kl", "reward", "group_id", "is_weights"} & set(rows[0])


def test_steps_that_are_not_marked_as_complete_are_left_out(tmp_path):
    rows, sink = converted(tmp_path / "run.parquet", EXPORTS)
    assert Counter(row["step"] for row in rows) == {1: 8, 2: 8}
    assert "step_3" in sink.notes[0]
    rows, sink = converted(tmp_path / "run.parquet", EXPORTS / "step_3")
    assert Counter(row["step"] for row in rows) == {3: 8}
    assert "no step has prime-rl's mark STABLE" in sink.notes[0]


def test_component_weights_are_spoken_of(tmp_path):
    rows = stored(EXPORTS / "step_1" / "rank_0.jsonl")
    rows[0]["rl_weights"] = [0.5] * len(rows[0]["token_ids"])
    path = rewritten(tmp_path / "rank_0.jsonl", rows)
    _, sink = converted(tmp_path / "run.parquet", path)
    assert "1 rows have component weights" in sink.notes[-1]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"schema_version": 2}, InputError, "schema_version 2 of a token export, where 1 is known"),
        ({"loss_mask": [True]}, DataError, "loss_mask has 1 values for a sequence of 5 tokens"),
        ({"trainer_logprobs": None}, DataError, "trainer_logprobs is None where a list"),
        ({"step": 1.5}, DataError, "step is 1.5"),
        ({"token_ids": [[1]] * 7}, DataError, "token_ids holds something that is not an integer"),
    ],
)
def test_a_wrong_field_of_an_export_names_its_line(tmp_path, fields, error, message):
    rows = stored(EXPORTS / "step_1" / "rank_0.jsonl")
    rows[1] |= fields
    path = rewritten(tmp_path / "dump" / "rank_0.jsonl", rows)
    with pytest.raises(error, match=r"rank_0\.jsonl, line 2: " + message):
        converted(tmp_path / "run.parquet", path)
    assert [each.name for each in tmp_path.iterdir()] == ["dump"]


def test_traces_are_those_that_were_trained_on(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", TRACES)
    assert Counter((row["step"], row["split"]) for row in rows) == {(1, "train"): 12, (1, "eval"): 12, (2, "train"): 12}
    assert len(stored(EFFECTIVE.parent.parent / "all" / "traces.jsonl")) == 16
    groups = Counter((row["step"], row["split"], row["group_id"]) for row in rows)
    assert set(groups.values()) == {4}


def test_a_trace(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", TRACES / "step_2")
    episode = stored(TRACES / "step_2" / "train" / "effective" / "traces.jsonl")[0]
    trace = episode["traces"][0]
    row = rows[0]
    assert episode["run"]["work"]["step"] == 1  # when the work was sent out; it was trained on at step 2
    assert (row["step"], row["policy_version_min"], row["policy_version_max"]) == (2, 0, 1)
    rewards = trace["rewards"]
    assert row["reward"] == rewards["correct"]["score"] + 0.5 * rewards["short"]["score"]
    node = trace["nodes"][1]
    assert row["prompt_ids"] == [*trace["nodes"][0]["token_ids"], 7]
    assert row["response_ids"] == node["token_ids"][1:]
    assert row["rollout_log_probs"] == pytest.approx(node["logprobs"])
    assert row["advantages"] == node["advantages"]
    assert row["sample_id"] == trace["id"]


@pytest.mark.parametrize(
    "runs",
    [
        ["first", "again"],
        ["first", None],
        ["first", "absent"],
        ["absent", "again"],
        ["first", "second", "again"],
        [7, 8],
    ],
)
def test_of_a_step_that_a_resumed_run_repeats_the_last_time_counts(tmp_path, runs):
    def attempt(run, number):
        rows = [json.loads(json.dumps(row).replace('"1-', f'"{number}-')) for row in stored(EFFECTIVE)]
        for row in rows:
            row["run"]["id"] = run
            if run == "absent":
                del row["run"]["id"]
            row["traces"][0]["id"] += f"-{number}"
        return rows[number:]

    attempts = [attempt(run, number) for number, run in enumerate(runs)]
    path = tmp_path / "dump" / "step_1" / "train" / "effective" / "traces.jsonl"
    rewritten(path, [row for rows in attempts for row in rows])
    rows, sink = converted(tmp_path / "run.parquet", path)
    assert [row["sample_id"] for row in rows] == [row["traces"][0]["id"] for row in attempts[-1]]
    assert any("1 steps were written more than once" in note for note in sink.notes)
    (found,) = findings(path, select=["RDI002"]).findings
    assert found.measures["repeated_rows"].value == sum(map(len, attempts[:-1]))


def test_every_way_to_name_the_traces(tmp_path):
    for path, steps in [
        (DATA / "prime_rl" / "rollouts", {1, 2}),
        (TRACES / "step_1", {1}),
        (TRACES / "step_1" / "train", {1}),
        (EFFECTIVE.parent, {1}),
        (EFFECTIVE, {1}),
    ]:
        rows, _ = converted(tmp_path / "run.parquet", path)
        assert {row["step"] for row in rows} == steps, path
    rows, _ = converted(tmp_path / "run.parquet", TRACES / "step_1" / "train" / "all" / "traces.jsonl")
    assert len(rows) == 16
    both = detect_dump([str(EFFECTIVE), str(EFFECTIVE.parents[1] / "all" / "traces.jsonl")], ConvertOptions())
    assert both.importer.name == "prime-rl-traces"
    with pytest.raises(InputError, match="several files of step 1, split train"):
        converted(tmp_path / "run.parquet", EFFECTIVE, EFFECTIVE.parents[1] / "all" / "traces.jsonl")


def edited(tmp_path, change):
    rows = stored(EFFECTIVE)
    change(rows[1]["traces"][0], rows[1])
    return rewritten(tmp_path / "dump" / "step_1" / "train" / "effective" / "traces.jsonl", rows)


def test_a_trace_without_a_sampled_token_has_no_tokens(tmp_path):
    path = edited(tmp_path, lambda trace, _: trace["nodes"].pop())
    rows, sink = converted(tmp_path / "run.parquet", path)
    assert len(rows) == 12
    assert all(row["response_ids"] is None and row["advantages"] is None for row in rows)
    assert "1 steps have traces without a sampled token" in sink.notes[0]
    findings(path)


def message(role, ids, sampled=(), parent=None, **fields):
    """A message whose last tokens were sampled, with these log-probs."""
    mask = [False] * (len(ids) - len(sampled)) + [True] * len(sampled)
    node = {"message": {"role": role}, "token_ids": ids, "mask": mask, "logprobs": list(sampled), **fields}
    return node if parent is None else node | {"parent": parent}


def forked(trace, episode):
    """A call of a tool that failed; the model goes on after it, and from before it in another branch."""
    credit = {"advantages": [0.5, 0.5]}
    trace["nodes"] = [
        message("system", [1]),
        message("user", [2, 3], parent=0),
        message("assistant", [4, 5, 6], (-0.5, -0.25), parent=1, **credit),
        message("tool", [7, 8], parent=2),
        message("assistant", [4, 9, 10], (-1.0, -2.0), parent=3, **credit),
        message("user", [11], parent=2),
        message("assistant", [4, 12, 13], (-3.0, -4.0), parent=5, **credit),
        message("assistant", [14], parent=6),
    ]
    trace["calls"] = [
        {"node": 2, "finish_reason": "tool_calls"},
        {"node": 6, "finish_reason": "length", "error": {"type": "ToolError", "message": "no\nanswer"}},
    ]
    trace["errors"] = [{"type": "Timeout", "message": "sandbox  gone"}]


def test_a_branch_is_a_row(tmp_path):
    rows, sink = converted(tmp_path / "run.parquet", edited(tmp_path, forked))
    assert not sink.notes
    assert len(rows) == 13
    first, second = rows[1:3]
    assert second["sample_id"] == f"{first['sample_id']}/1"
    assert first["trajectory_id"] == second["trajectory_id"] != rows[0]["trajectory_id"]
    assert first["reward"] == second["reward"]
    assert (first["task_id"], first["error"], rows[0]["error"]) == ("gsm8k/0", "Timeout: sandbox gone", None)
    assert first["prompt_ids"] == [1, 2, 3, 4]
    assert first["response_ids"] == [5, 6, 7, 8, 4, 9, 10]
    assert first["response_mask"] == [1, 1, 0, 0, 0, 1, 1]
    assert first["advantages"] == [0.5, 0.5, 0, 0, 0, 0.5, 0.5]
    assert np.array_equal(first["rollout_log_probs"][:3], [-0.5, -0.25, np.nan], equal_nan=True)
    # What the first branch trains is context in the second.
    assert second["prompt_ids"] == [1, 2, 3, 4, 5, 6, 11, 4]
    assert (second["response_ids"], second["response_mask"]) == ([12, 13, 14], [1, 1, 0])
    assert second["advantages"] == [0.5, 0.5, 0]


def test_turns_of_a_branch(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", edited(tmp_path, forked))
    names = ("author", "start", "stop", "turn", "status", "error")
    spans = [[tuple(turn[name] for name in names) for turn in row["turns"]] for row in rows[1:3]]
    assert spans == [
        [
            ("model", 0, 2, 2, "tool_calls", None),
            ("tool", 2, 4, 3, None, None),
            ("model", 5, 7, 4, None, None),
        ],
        # An assistant's message that no model sampled is of a template.
        [("model", 0, 2, 6, "length", "ToolError: no answer"), ("system", 2, 3, 7, None, None)],
    ]


def test_the_rows_of_a_trace_have_one_vote(tmp_path):
    episodes = stored(EFFECTIVE)
    forked(episodes[1]["traces"][0], episodes[1])
    groups = {}
    for episode in episodes:
        rewards = episode["traces"][0]["rewards"].values()
        reward = sum(one["score"] * one["weight"] for one in rewards)
        groups.setdefault(episode["group"]["id"], []).append((reward, episode["traces"][0]))
    # The mean is over the rewards of traces, one of which gives two rows.
    for traces in groups.values():
        mean = sum(reward for reward, _ in traces) / len(traces)
        for reward, trace in traces:
            for node in trace["nodes"]:
                if any(node["mask"]):
                    node["advantages"] = [reward - mean] * sum(node["mask"])
    path = rewritten(tmp_path / "dump" / "step_1" / "train" / "effective" / "traces.jsonl", episodes)
    (entry,) = findings(path, trainer="prime-rl@0.8.0").audit
    assert (entry.quantity, entry.compared, entry.agree, entry.with_fixes) == ("advantages", 13, 13, ())


@pytest.mark.parametrize("parent", [1, 7, -1, "x"])
def test_links_that_are_no_paths_have_no_tokens(tmp_path, parent):
    path = edited(tmp_path, lambda trace, _: trace["nodes"][1].update(parent=parent))
    rows, _ = converted(tmp_path / "run.parquet", path)
    assert all(row["response_ids"] is None for row in rows)


def test_reference_log_probs_of_a_trace(tmp_path):
    rows = stored(EFFECTIVE)
    for row in rows:
        node = row["traces"][0]["nodes"][1]
        node["reference_logprobs"] = [each - 0.25 for each in node["logprobs"]]
    path = rewritten(tmp_path / "step_1" / "train" / "effective" / "traces.jsonl", rows)
    found, _ = converted(tmp_path / "run.parquet", path)
    assert found[0]["ref_log_probs"] == pytest.approx([each - 0.25 for each in found[0]["rollout_log_probs"]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda trace, episode: episode.update(group=None), "trace 0: its episode has no group"),
        (lambda trace, episode: trace["nodes"][1].update(logprobs=[0.5] * 9), "logprobs has 9 values for"),
        (lambda trace, episode: trace["nodes"][1].update(mask=[True]), "mask has 1 values for a sequence of"),
        (lambda trace, episode: trace.update(nodes=3), "nodes is 3 where a list"),
        (lambda trace, episode: trace.update(rewards={"a": {}}), r"rewards.a is {} where a score"),
        (lambda trace, episode: episode.update(traces=[1]), r"traces is \[1\] where a list of objects"),
    ],
)
def test_a_wrong_trace_names_its_line(tmp_path, change, message):
    path = edited(tmp_path, change)
    with pytest.raises(DataError, match=r"traces\.jsonl, line 2.*" + message):
        converted(tmp_path / "run.parquet", path)


def test_a_trace_that_was_not_scored(tmp_path):
    path = edited(tmp_path, lambda trace, _: trace.update(rewards={"correct": None}))
    rows, _ = converted(tmp_path / "run.parquet", path)
    assert rows[1]["reward"] is None


def test_the_step_is_in_the_path(tmp_path):
    shutil.copy(EFFECTIVE, tmp_path / "traces.jsonl")
    with pytest.raises(InputError, match="the step is known from the directory"):
        converted(tmp_path / "run.parquet", tmp_path / "traces.jsonl")


def checked(folder, *, trainer=None):
    """The report of a run as it is, with everything that lies beside it."""
    told = []
    opened = open_any([str(folder)], trainer=trainer, options=ConvertOptions(), tell=told.append)
    with opened as run:
        return check(run, CheckOptions(trainer=trainer, device="cpu")), told


def codes(report):
    return {finding.code: finding for finding in report.findings}


@pytest.mark.slow
def test_a_healthy_run_has_no_warning(tmp_path):
    """What its own functions gave, as it writes it: every logged value is reproduced, and nothing is wrong."""
    report, told = checked(prime_rl_output(tmp_path / "run", "healthy"))
    assert "options of prime-rl from configs/trainer.json and configs/orchestrator.json" in told
    assert {finding.severity for finding in report.findings} == {Severity.INFO}
    audit = {entry.quantity: (entry.agree, entry.compared) for entry in report.audit}
    assert audit["advantages"] == (160, 160)
    assert audit["loss/mean"] == (6, 6)
    assert all(agree == compared for agree, compared in audit.values())
    # 19 names with a mean or a largest value, and one of the loss.
    assert len(audit) == 21
    share = codes(report)["RDM007"]
    assert share.measures["loss_share"].value == pytest.approx(1 / 4)
    assert share.verdict == "confirmed"


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("inside", ["rollouts", "token_exports", "metrics.jsonl"])
def test_a_part_of_the_output_finds_its_options(tmp_path, inside):
    folder = prime_rl_output(tmp_path / "run", "healthy")
    told = []
    opened = open_any([str(folder / inside)], trainer=None, options=ConvertOptions(), tell=told.append, logs_alone=True)
    with opened as run:
        report = check(run, CheckOptions(device="cpu"))
    assert report.config["orchestrator.group_size"].value == 8
    assert not {finding.severity for finding in report.findings} - {Severity.INFO}


@pytest.mark.slow
def test_residue_that_passes_the_filter_is_named(tmp_path):
    """Eight rewards of 0.7 have a float32 mean that is none of them."""
    report, _ = checked(prime_rl_output(tmp_path / "run", "residue"))
    found = codes(report)["RDA003"]
    assert (found.severity, found.verdict) == (Severity.WARNING, "confirmed")
    assert found.measures["groups"].value == 12
    assert found.measures["denominator_share"].value == pytest.approx(0.533, abs=1e-3)
    assert found.measures["max_abs_advantage"].value == pytest.approx(2**-24)
    assert {code for code, each in codes(report).items() if each.severity != Severity.INFO} == {"RDA003"}


@pytest.mark.slow
def test_without_traces_the_loss_is_that_of_the_exported_advantages(tmp_path):
    report, _ = checked(prime_rl_output(tmp_path / "run", "healthy", traces=False))
    audit = {entry.quantity: (entry.agree, entry.compared) for entry in report.audit}
    assert audit["loss/mean"] == (6, 6)
    assert "advantages" not in audit
    assert {finding.severity for finding in report.findings} == {Severity.INFO}


@pytest.mark.slow
def test_a_configuration_that_is_wrong_is_noticed(tmp_path):
    """Exports need not hold all rows, so that it proves nothing; but nothing is said to be reproduced."""
    report, _ = checked(prime_rl_output(tmp_path / "run", "healthy", kl_tau=0.5))
    audit = {entry.quantity: entry for entry in report.audit}
    assert audit["loss/mean"].agree == 0
    assert "RDM007" not in codes(report)
    assert "RDG005" in {each.code for each in report.skipped}


@pytest.mark.slow
def test_ranks_of_padding_are_no_fault(tmp_path):
    """Two more ranks without a sequence halve the logged loss: nothing in the exports says how many there are."""
    folder = prime_rl_output(tmp_path / "run", "healthy")
    log = folder / "metrics.jsonl"
    rows = stored(log)
    for row in rows:
        row |= {"loss/mean": row["loss/mean"] / 2} if "loss/mean" in row else {}
    rewritten(log, rows)
    report, _ = checked(folder)
    assert {finding.severity for finding in report.findings} == {Severity.INFO}
    assert not {"RDM007", "RDG006"} & codes(report).keys()


@pytest.mark.slow
def test_what_is_not_computed_is_refused(tmp_path):
    folder = prime_rl_output(tmp_path / "run", "healthy")
    body = json.loads((folder / "configs" / "orchestrator.json").read_text())
    body["algo"] = {"type": "echo"}
    (folder / "configs" / "orchestrator.json").write_text(json.dumps(body))
    _, told = checked(folder)
    assert any("algo.type = echo" in text and "the value is not used" in text for text in told)


def test_rewards_come_from_the_trace_with_the_same_tokens(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", prime_rl_output(tmp_path / "out", "healthy"))
    raw = pl.read_parquet(DATA / "prime_rl_runs.parquet").filter(pl.col("run") == "healthy", pl.col("advantage") != 0)
    wanted = Counter(
        (row["step"], tuple(row["ids"]), row["reward"], f"{row['step']}-{row['group']}") for row in raw.to_dicts()
    )
    found = Counter((row["step"], tuple(row["response_ids"]), row["reward"], row["group_id"]) for row in rows)
    assert found == wanted
    # A row is of a trajectory, and its turns are of its tokens.
    assert all(row["trajectory_id"] is not None and row["error"] is None for row in rows)
    spans = {(turn["author"], turn["stop"] == len(row["response_ids"])) for row in rows for turn in row["turns"]}
    assert spans == {("model", True)}


def test_a_step_without_its_traces_is_read_without_rewards(tmp_path):
    folder = prime_rl_output(tmp_path / "out", "healthy")
    (folder / "rollouts" / "step_3" / "train" / "effective" / "traces.jsonl").unlink()
    rows, sink = converted(tmp_path / "run.parquet", folder)
    assert {row["step"] for row in rows if row["reward"] is None} == {3}
    assert any("1 steps have sequences that are those of no trace" in note for note in sink.notes)


def test_a_weight_of_0_takes_a_token_out(tmp_path):
    rows = stored(EXPORTS / "step_1" / "rank_0.jsonl")
    weights = [1.0] * len(rows[0]["token_ids"])
    weights[rows[0]["loss_mask"].index(True) + 1] = 0.0
    rows[0]["rl_weights"] = weights
    found, sink = converted(tmp_path / "run.parquet", rewritten(tmp_path / "rank_0.jsonl", rows))
    start = rows[0]["loss_mask"].index(True)
    wanted = [kept and weight for kept, weight in zip(rows[0]["loss_mask"][start:], weights[start:], strict=True)]
    assert found[0]["response_mask"] == [bool(each) for each in wanted]
    assert not any("component weights" in note for note in sink.notes)


def test_a_graph_of_many_long_branches_ends_in_a_sentence():
    stem = [{"parent": number - 1 if number else None, "token_ids": [1], "mask": [0]} for number in range(2_000)]
    leaves = [{"parent": 1_999, "token_ids": [1], "mask": [0]} for _ in range(2_000)]
    with pytest.raises(DataError, match="trace 1: branches of more than 1,000,000 messages"):
        branches({"nodes": [*stem, *leaves]}, "trace 1")
