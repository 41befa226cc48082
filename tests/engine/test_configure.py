import json
import tracemalloc

import pytest

from rolloutdoctor.engine.configure import configure, read_settings, read_trainer_config
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Layer
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import TRAINERS, find

NOTHING = RunMetadata()
ACTOR = "actor_rollout_ref.actor"


def settings(*layers, trainer="trl", metadata=NOTHING):
    return configure(metadata, trainer, layers).settings()


def value(name, *layers, **kwargs):
    setting = settings(*layers, **kwargs)[name]
    return setting.value, setting.origin, setting.assumed


# Who, and which version.


def test_nothing_says_who():
    assert configure(NOTHING, None, []) is None
    assert configure(NOTHING, None, [Layer("pyproject.toml", {})]) is None


def test_options_of_nobody():
    with pytest.raises(UsageError, match="options were set, but nothing says which trainer they are of"):
        configure(NOTHING, None, [Layer("--set", {"beta": "0.1"})])


@pytest.mark.parametrize(
    ("trainer", "metadata", "version"),
    [
        ("trl@1.9.0", NOTHING, ("1.9.0", "--trainer", False)),
        ("trl@1.9", NOTHING, ("1.9", "--trainer", False)),
        ("trl", NOTHING, (TRAINERS["trl"].newest, "newest trl known here", True)),
        (None, RunMetadata("trl", "1.12.0"), ("1.12.0", "file metadata", False)),
        ("trl", RunMetadata("trl", "1.12.0"), ("1.12.0", "file metadata", False)),
        ("trl@1.15.0", RunMetadata("trl", "1.12.0"), ("1.15.0", "--trainer", False)),
        (None, RunMetadata("trl"), (TRAINERS["trl"].newest, "newest trl known here", True)),
        # the version of another trainer says nothing
        ("slime", RunMetadata("trl", "1.12.0"), (TRAINERS["slime"].newest, "newest slime known here", True)),
    ],
)
def test_version(trainer, metadata, version):
    configured = configure(metadata, trainer, [])
    assert (configured.version, configured.version_origin, configured.version_assumed) == version
    first, setting = next(iter(configured.settings().items()))
    assert (first, setting.value, setting.origin, setting.assumed) == ("version", *version)
    assert configured.objective.trainer == configured.trainer.name


@pytest.mark.parametrize("version", ["0.13.9", "0.7", "0.13.0"])
def test_version_too_old(version):
    with pytest.raises(UsageError, match=rf"trl {version} \(--trainer\) is older than 0.14.0.*--trainer trl@VERSION"):
        configure(NOTHING, f"trl@{version}", [])
    with pytest.raises(UsageError, match=rf"trl {version} \(file metadata\) is older than"):
        configure(RunMetadata("trl", version), None, [])


def test_version_that_is_none():
    with pytest.raises(UsageError, match="'main' is not a version"):
        configure(NOTHING, "trl@main", [])


@pytest.mark.parametrize("name", ["trll", "roll"])
def test_unknown_trainer(name):
    with pytest.raises(UsageError, match=f"no trainer '{name}'"):
        configure(NOTHING, name, [])
    with pytest.raises(UsageError, match=f"no trainer '{name}'"):
        configure(RunMetadata(name), None, [])


def test_defaults_by_version():
    for version, corrected in (("1.9.0", False), ("1.10", True), ("1.10.0", True), ("1.16", True)):
        assert settings(trainer=f"trl@{version}")["use_bias_correction_kl"].value is corrected


# Layers.


def test_precedence():
    layers = [Layer("--set", {}), Layer("environment", {}), Layer("rolloutdoctor.toml", {}), Layer("args.json", {})]
    metadata = RunMetadata("trl", "1.16.0", {"beta": 0.5})
    assert value("beta", *layers, metadata=metadata) == (0.5, "file metadata", False)
    for position in reversed(range(4)):
        layers[position] = Layer(layers[position].origin, {"beta": 0.1 * position + 0.1})
        expected = (pytest.approx(0.1 * position + 0.1), layers[position].origin, False)
        assert value("beta", *layers, metadata=metadata) == expected
    assert value("beta") == (0.0, "default of trl 1.16.0", True)


def test_metadata_of_another_trainer_is_left_alone():
    metadata = RunMetadata("trl", "1.16.0", {"beta": 0.5, "kl_coef": 0.5})
    assert value("kl_coef", trainer="slime", metadata=metadata)[1] == "default of slime 0.3.1"


def test_assumed_marks():
    found = settings(Layer("--set", {"beta": 0.1}))
    assert not found["beta"].assumed
    assert found["loss_type"].assumed
    assert not found["use_vllm"].assumed  # where it matters, it is refused
    assert all(setting.origin for setting in found.values())
    assert found.keys() == {"version", *(option.name for option in TRAINERS["trl"].options if not option.until)}


def test_files_may_hold_other_options():
    assert value("beta", Layer("args.json", {"beta": 1, "learning_rate": 1e-6}, strict=False)) == (
        1.0,
        "args.json",
        False,
    )
    metadata = RunMetadata("trl", "1.16.0", {"learning_rate": 1e-6})
    assert "learning_rate" not in settings(metadata=metadata)


def test_a_value_that_is_overridden_need_not_be_understood():
    # The file says what this version does not compute; the user says what to compute instead.
    name, layer = "router_aux_loss_coef", Layer("--set", {"router_aux_loss_coef": 0.0})
    metadata = RunMetadata("trl", "1.16.0", {name: 0.1})
    assert value(name, layer, metadata=metadata)[:2] == (0.0, "--set")
    assert not configure(metadata, None, [layer]).objective.unknown_loss
    assert "the loss of the router is not in the rows" in configure(metadata, None, []).objective.unknown_loss
    # What changes more than the loss is refused.
    name, layer = "use_opd", Layer("--set", {"use_opd": False})
    metadata = RunMetadata("slime", "0.3.1", {name: True})
    assert configure(metadata, None, [layer]).config[name] is False
    with pytest.raises(UsageError, match=rf"{name} = True \(file metadata\): the teacher's log-probs are not"):
        configure(metadata, None, [])


# Names.


@pytest.mark.parametrize(
    ("trainer", "name", "message"),
    [
        ("trl", "betta", r"trl has no option 'betta' that is understood here \(--set\); did you mean 'beta'\?"),
        ("verl", "kl_loss_coeff", r"did you mean 'kl_loss_coef'\?"),
        ("verl", "algorithm.adv_estimater", r"did you mean 'algorithm.adv_estimator'\?"),
        ("slime", "zzz", r"slime has no option 'zzz' .*`rolloutdoctor explain slime` lists them"),
        ("slime", "kl-coef", r"did you mean 'kl_coef'\?"),
        ("trl", "eta", r"trl has no option 'eta'"),
        ("verl", "stimator", r"verl has no option 'stimator'"),
    ],
)
def test_unknown_option_suggests_the_nearest(trainer, name, message):
    with pytest.raises(UsageError, match=message):
        configure(NOTHING, trainer, [Layer("--set", {name: 1})])


@pytest.mark.parametrize(
    "name", [f"{ACTOR}.clip_ratio_low", "actor.clip_ratio_low", "clip_ratio_low"], ids=["full", "two", "one"]
)
def test_verl_suffixes(name):
    layer = Layer("--set", {name: "0.125", "adv_estimator": "grpo"})
    assert value(f"{ACTOR}.clip_ratio_low", layer, trainer="verl") == (0.125, "--set", False)
    assert configure(NOTHING, "verl", [layer]).objective.surrogate.clip_low == 0.125


def test_full_name_wins_over_a_suffix():
    # `bypass_mode` is an option, and a value of another; only names count
    layer = Layer("--set", {"bypass_mode": "false", "adv_estimator": "grpo"})
    assert value("algorithm.rollout_correction.bypass_mode", layer, trainer="verl")[1] == "--set"


def test_ambiguous_suffix():
    from rolloutdoctor.trainers.options import Option, resolve

    options = (Option("a.n", "integer", 1, "one"), Option("b.n", "integer", 1, "other"))
    with pytest.raises(UsageError, match=r"'n' \(--set\) could be a\.n or b\.n: write more of the name"):
        resolve(options, (1,), [Layer("--set", {"n": 1})], trainer="t")
    # a file that holds such a name by accident is not understood, and not refused
    config = resolve(options, (1,), [Layer("file", {"n": 5}, strict=False)], trainer="t")
    assert [config["a.n"], config["b.n"]] == [1, 1]


def test_one_option_by_two_names():
    for second, fits in ((0.2, True), (0.3, False)):
        layer = Layer("--set", {"clip_ratio_low": 0.2, "actor.clip_ratio_low": second, "adv_estimator": "grpo"})
        if fits:
            assert value(f"{ACTOR}.clip_ratio_low", layer, trainer="verl")[0] == 0.2
        else:
            with pytest.raises(UsageError, match=r"clip_ratio_low and actor.clip_ratio_low are both .*: keep one"):
                settings(layer, trainer="verl")


# Values.


@pytest.mark.parametrize(
    ("spelling", "meaning"),
    [
        (True, "group"),
        ("True", "group"),
        ("true", "group"),
        ("group", "group"),
        (False, "none"),
        ("False", "none"),
        ("none", "none"),
        ("batch", "batch"),
    ],
)
def test_spellings_of_scale_rewards(spelling, meaning):
    configured = configure(NOTHING, "trl", [Layer("--set", {"scale_rewards": spelling})])
    assert configured.config["scale_rewards"] == configured.objective.advantage.scale == meaning


@pytest.mark.parametrize(
    ("trainer", "values", "message"),
    [
        ("trl", {"beta": -1}, r"beta = -1 \(--set\) is out of range: expected a number >= 0"),
        ("trl", {"num_generations": 1}, "num_generations = 1 .* is out of range"),
        ("trl", {"scale_rewards": "std"}, "scale_rewards = 'std' .*: expected one of group, batch, none"),
        ("trl", {"loss_type": "gpro"}, r"did you mean 'grpo'\?"),
        (
            "trl",
            {"use_vllm": True, "vllm_importance_sampling_clip_min": 3},
            "clip_min = 3 is not below the largest weight, 3",
        ),
        (
            "trl",
            {
                "use_vllm": True,
                "vllm_importance_sampling_mode": "token_truncate",
                "vllm_importance_sampling_clip_max": None,
            },
            "truncate vllm_importance_sampling_mode needs",
        ),
        ("trl-rloo", {"reward_clip_range": [1, -1]}, "reward_clip_range = .* the lower one first"),
        ("trl", {"loss_type": "dr_grpo", "max_completion_length": None}, "dr_grpo divides by max_completion_length"),
        ("slime", {"gamma": 1.5}, "gamma = 1.5 .* is out of range: expected a number >= 0 and <= 1"),
        ("slime", {"kl_coef": 0.1, "kl_loss_coef": 0.1}, "kl_coef and kl_loss_coef are both above 0"),
        ("verl", {}, "nothing says which advantage estimator the run used"),
    ],
)
def test_refused_values(trainer, values, message):
    with pytest.raises(UsageError, match=message):
        configure(NOTHING, trainer, [Layer("--set", values)])


# Texts and files.


def test_key_value_texts():
    layer = read_settings(["beta=0.04", " loss_type = grpo", "reward_weights=1,2", "beta=0.04"], "--set")
    assert (layer.origin, layer.strict) == ("--set", True)
    assert dict(layer.values) == {"beta": "0.04", "loss_type": " grpo", "reward_weights": "1,2"}
    assert value("loss_type", layer)[0] == "grpo"
    assert value("reward_weights", layer)[0] == (1.0, 2.0)
    assert read_settings(["rollout_rs_threshold=0.5=2"], "--set").values == {"rollout_rs_threshold": "0.5=2"}


@pytest.mark.parametrize("text", ["beta", "", "=1", " =1"])
def test_texts_that_are_not_key_value(text):
    with pytest.raises(UsageError, match=r"expected KEY=VALUE, such as beta=0\.04"):
        read_settings([text], "--set")


def test_contradictory_texts():
    with pytest.raises(UsageError, match=r"beta is set to 0.1 and to 0.2 \(--set\): keep one of them"):
        read_settings(["beta=0.1", "beta=0.2"], "--set")


NESTED = {"algorithm": {"adv_estimator": "grpo"}, "actor_rollout_ref": {"actor": {"use_kl_loss": True}}, "seed": 1}
YAML = """
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  actor:
    use_kl_loss: true
    kl_loss_coef: 1e-3   # a text by the rules of YAML 1.1
"""


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_json_file(tmp_path):
    layer = read_trainer_config(write(tmp_path, "config.json", json.dumps(NESTED)))
    assert not layer.strict
    assert layer.values == {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.use_kl_loss": True,
        "seed": 1,
    }
    assert settings(layer, trainer="verl")[f"{ACTOR}.use_kl_loss"].value is True


@pytest.mark.parametrize("name", ["config.yaml", "config.yml"])
def test_yaml_file(tmp_path, name):
    pytest.importorskip("yaml")
    layer = read_trainer_config(write(tmp_path, name, YAML))
    objective = configure(NOTHING, "verl", [layer]).objective
    assert objective.kl_loss.coef == 0.001
    assert objective.advantage.estimator == "grpo"


def test_flat_file_of_trl(tmp_path):
    text = json.dumps({"beta": 0.1, "loss_type": "grpo", "learning_rate": 1e-6, "reward_weights": None})
    objective = configure(NOTHING, "trl", [read_trainer_config(write(tmp_path, "args.json", text))]).objective
    assert objective.kl_loss.coef == 0.1
    assert objective.aggregation.mode == "micro-batch-row-mean"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "a.json: not JSON; --trainer-config takes a JSON, TOML or YAML file"),
        ("a.json", "", "not JSON"),
        ("a.json", "[1]", "expected an object of options"),
        ("a.json", "1", "expected an object of options"),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.txt", "beta: 1", "not JSON"),
        ("a.yaml", "a: [", "a.yaml: not YAML"),
        ("a.yaml", "a: !!python/object:x.y {}", "not YAML"),
        ("a.yaml", "just text", "expected an object of options"),
        ("a.yaml", "", "expected an object of options"),
        ("a.yaml", "a: \x01", "not YAML"),
        # A number to the base of 60, too large for a float.
        ("a.yaml", "a: !!float " + "1:" * 200 + "1", "not YAML"),
    ],
)
def test_bad_files(tmp_path, name, text, message):
    if name.endswith(".yaml"):
        pytest.importorskip("yaml")
    with pytest.raises(UsageError, match=message):
        read_trainer_config(write(tmp_path, name, text))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="No such file or directory; --trainer-config takes"):
        read_trainer_config(str(tmp_path / "none.json"))
    with pytest.raises(UsageError, match="a folder where a regular file was expected"):
        read_trainer_config(str(tmp_path))
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UsageError, match="not UTF-8 text"):
        read_trainer_config(str(tmp_path / "latin.json"))


def test_a_file_that_names_verl_without_its_estimator_is_looked_at_for_its_rows_alone():
    assert configure(RunMetadata("verl", "0.9.1"), None, []) is None
    with pytest.raises(UsageError, match=r"--set algorithm\.adv_estimator=NAME"):
        configure(RunMetadata("verl", "0.9.1"), "verl", [])
    found = configure(RunMetadata("verl", "0.9.1", {"algorithm.adv_estimator": "rloo"}), None, [])
    assert found is not None
    assert found.objective.advantage.estimator == "rloo"


def merges(levels):
    rest = (f"l{i}: &l{i} {{<<: [{', '.join([f'*l{i - 1}'] * 9)}]}}" for i in range(1, levels))
    return "\n".join(["l0: &l0 {x: 1}", *rest])


HOSTILE = {
    "c.yaml": [
        merges(12),
        *(f"beta: !!{tag}" for tag in ("int ''", "float ''", "bool x", "timestamp x", "int " + ":".join("1" * 9_999))),
        "beta: 0b" + "1" * 100_000,
        "? [a, {b: c}]\n: 1",
        "beta: 1" + " " * 2**20,
    ],
    "c.json": [
        json.dumps({"k" * 10**6: {f"a{number}": 1 for number in range(90_000)}}),
        '{"beta": 0, "beta": 1}',
    ],
}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in HOSTILE.items() for text in texts])
def test_hostile_files_of_options(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    tracemalloc.start()
    try:
        with pytest.raises(UsageError):
            read_trainer_config(str(tmp_path / name))
        assert tracemalloc.get_traced_memory()[1] < 500 * 2**20
    finally:
        tracemalloc.stop()


def test_merge_keys_that_a_person_writes(tmp_path):
    (tmp_path / "c.yaml").write_text("base: &base {beta: 0.1, x: 1}\nrun:\n  <<: *base\n  x: 2\n")
    assert read_trainer_config(str(tmp_path / "c.yaml")).values == {
        "base.beta": 0.1,
        "base.x": 1,
        "run.beta": 0.1,
        "run.x": 2,
    }


@pytest.mark.parametrize("text", ["[1", "1]", "(1]", "[[1]]", "1e999", "1,nan", "1_0", "\u0661"])
def test_numbers_that_are_none(text):
    with pytest.raises(UsageError, match="expected numbers separated by commas"):
        option("reward_weights").read(text, "--set")


@pytest.mark.parametrize("text", ["[1, 2]", "(1,2)", " 1,2 "])
def test_numbers(text):
    assert option("reward_weights").read(text, "--set") == (1.0, 2.0)


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 10, "1." + "9" * 5000, "1" + ".1" * 5000, "\u0661"])
def test_versions_that_are_none(text):
    with pytest.raises(UsageError, match="is not a version") as told:
        parse_version(text)
    assert len(str(told.value)) < 200


def option(name):
    return next(each for each in find("trl").options if each.name == name)
