"""What a report calls "not recognised": names of a log that nothing tests."""

import json

import rolloutdoctor as rd


def test_names_of_an_identity_of_the_trainer_are_recognised_and_others_named(tmp_path):
    lengths = {
        f"completions/{which}_terminated_length": length
        for which, length in zip(("min", "mean", "max"), (1, 2, 3), strict=True)
    }
    lines = [
        {"step": step, "reward": 0.5, "reward_std": 0.1, "completions/max_length": 4, "kl": 0.01, "charm": 1.5}
        | lengths
        for step in range(1, 7)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    notes = [
        note for note in rd.check(tmp_path / "log.jsonl", trainer="trl").notes if note.startswith("not recognised")
    ]
    assert notes == ["not recognised: charm"]


def test_clocks_counters_and_the_use_of_the_machine_are_not_named(tmp_path):
    machine = {
        "timing_s/gen": 30.0,
        "timing_per_token_ms/gen": 0.5,
        "perf/throughput": 900.0,
        "actor/perf/max_memory_allocated_gb": 24.5,
        "global_seqlen/mean": 1000.0,
        "training/epoch": 0,
        "_runtime": 12.0,
        "performance": 0.5,
    }
    lines = [{"step": step, "critic/score/mean": 0.5, "actor/entropy": 0.3} | machine for step in range(1, 7)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (note,) = (each for each in rd.check(tmp_path / "log.jsonl").notes if each.startswith("not recognised"))
    assert note == "not recognised: performance"
