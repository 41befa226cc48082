"""`info` on every kind of dump: its tier, and what would make the rules run that cannot, in the words of the dump."""

import json

import pytest
from importers.importing import DATA, slime_dump

import rolloutdoctor as rd
from rolloutdoctor.commands.info.query import describe
from rolloutdoctor.engine.configure import read_settings
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.importers.table import IMPORTERS
from rolloutdoctor.io.run import open_run
from rolloutdoctor.opening.dumps import ConvertOptions, convert, detect_dump
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.rules.table import RULES


def slime_train_alone(folder):
    dump = slime_dump(folder / "dump")
    for file in (dump / "rollout_data").iterdir():
        file.unlink()
    return dump / "train_data"


def mapped(folder):
    row = {"step": 1, "group_id": "a", "reward": 1.0, "response_mask": [1, 1], "old_log_probs": [-1.0, -0.5]}
    (folder / "mine.jsonl").write_text(json.dumps(row) + "\n")
    return folder / "mine.jsonl"


def first(pattern):
    return lambda folder: sorted(DATA.glob(pattern))[0]


GRPO = ("algorithm.adv_estimator=grpo", "actor.use_kl_loss=true")

# Importer: where a dump of it is, what was set, its tier, and the words that each missing column is answered with.
DUMPS = {
    "trl": (first("trl/mixed"), (), None, 1, 'record(trainer, "run.parquet")'),
    "verl": (first("verl/v1"), GRPO, "verl", 1, "verl's own rollout dump has text and scores"),
    "slime": (slime_train_alone, (), None, 3, "--save-debug-train-data"),
    "miles": (first("miles"), (), None, 2, "--dump-details DIR"),
    "nemo-rl": (first("nemo_rl/*"), (), "verl", 2, "log_batched_dict_as_jsonl"),
    "open-instruct": (first("open_instruct"), (), "verl", 1, "rolloutdoctor.recorders.own_loop"),
    "prime-rl-tokens": (first("prime_rl/token_exports"), (), "verl", 0, "rolloutdoctor.recorders.own_loop"),
    "prime-rl-traces": (first("prime_rl/rollouts"), (), "verl", 1, "rolloutdoctor.recorders.own_loop"),
    "tinker-cookbook": (first("tinker_cookbook"), (), "verl", 1, "rolloutdoctor.recorders.own_loop"),
    "rllm": (first("rllm/episodes"), (), "verl", 1, "rolloutdoctor.recorders.verl"),
    "areal": (first("areal/rollout"), (), "verl", 1, "rolloutdoctor.recorders.own_loop"),
    "ms-swift": (first("ms_swift"), (), None, 1, "rolloutdoctor.recorders.own_loop"),
    "skyrl": (first("skyrl"), (), None, 0, "rolloutdoctor.recorders.own_loop"),
    "verifiers": (first("verifiers/0a1b2c3d"), (), "verl", 1, "the trainer that uses the environment"),
    "verifiers-traces": (first("verifiers_traces/0a1b2c3d"), (), "verl", 1, "the trainer that uses the environment"),
    "nemo-gym": (first("nemo_gym/*"), (), "verl", 1, "the trainer that uses them has the rest"),
    "responses": (first("responses/*.json"), (), "verl", 1, "rolloutdoctor.recorders.own_loop"),
    "mapped": (mapped, (), "verl", 2, "--map COLUMN=WHERE"),
}


def surveyed(path, settings, trainer):
    layers = [read_settings(settings or (GRPO if trainer else ()), "command line")]
    with open_any([str(path)], trainer=None, options=ConvertOptions(), tell=lambda text: None) as run:
        return describe(run, CheckOptions(trainer=trainer, layers=layers))


def test_every_importer_is_here():
    absent = {importer.name for importer in IMPORTERS} - {"journal"} - DUMPS.keys()
    assert not absent, f"{absent}: a line each in DUMPS of this file"
    assert {importer.name for importer in IMPORTERS} >= DUMPS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", DUMPS)
def test_each_rule_that_cannot_run_says_what_would_make_it_run(tmp_path, name):
    make, settings, trainer, tier, words = DUMPS[name]
    path = make(tmp_path)
    assert detect_dump([str(path)], ConvertOptions()).importer.name == name
    found = surveyed(path, settings, trainer)
    assert found.tier == tier
    left_out = {one.code for one in (*found.skipped, *found.not_applicable)}
    assert {code for code, _ in found.runnable} | left_out == {rule.code for rule in RULES}
    about_columns = [one for one in found.skipped if one.reason.startswith("missing column")]
    assert about_columns
    for one in about_columns:
        assert "rolloutdoctor info" not in one.remedy
    assert any(words in how for how in found.absent.values())


def test_a_verl_dump_whose_estimator_is_not_stated():
    found = surveyed(DATA / "verl" / "v1", (), None)
    remedies = {one.code: one.remedy for one in found.skipped}
    assert "--set algorithm.adv_estimator=NAME" in remedies["RDG001"]
    assert "verl's own rollout dump has text and scores only" in remedies["RDG001"]
    assert 'trainer.logger=["console","file"]' in remedies["RDM003"]


def test_a_converted_dump_is_answered_in_the_words_of_the_dump(tmp_path):
    path = mapped(tmp_path)
    direct = surveyed(path, (), "verl")
    convert(detect_dump([str(path)], ConvertOptions()), tmp_path / "run.parquet", ConvertOptions())
    layers = [read_settings(GRPO, "command line")]
    converted = describe(open_run([str(tmp_path / "run.parquet")]), CheckOptions(trainer="verl", layers=layers))
    assert converted.skipped == direct.skipped
    assert converted.absent == direct.absent


def test_a_recorded_run_is_answered_in_the_words_of_its_trainer(tmp_path):
    from rolloutdoctor.io.metadata import RunMetadata
    from rolloutdoctor.io.write.writer import RunWriter

    with RunWriter(tmp_path / "run.parquet", RunMetadata("slime", "0.3.1", {"use_kl_loss": True})) as writer:
        writer.write([{"step": 1, "group_id": "a", "sample_id": "b", "reward": 1.0}])
    found = describe(open_run([str(tmp_path / "run.parquet")]), CheckOptions())
    assert "--dump-details DIR" in found.absent["ref_log_probs"]


@pytest.mark.parametrize(("more", "told"), [({}, False), ({"completion_length": 90.0}, True)])
def test_a_loop_of_ones_own_with_names_that_trl_has_too_is_not_told_to_use_its_recorder(tmp_path, more, told):
    lines = [{"step": step, "loss": 0.1, "reward": 0.5, "kl": 0.01, "grad_norm": 1.0} | more for step in range(1, 9)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    remedies = {one.remedy for one in rd.check(tmp_path / "log.jsonl").skipped}
    assert any("rolloutdoctor.recorders.trl" in remedy for remedy in remedies) is told
