"""Configurations of programs that run another program's trainer, as those write them."""

from pathlib import Path

import pytest
from importers.test_options_beside import archive, pickled_config

from rolloutdoctor.cli.options import layers
from rolloutdoctor.engine.configure import configure, read_trainer_layers
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.opening.stated.options import trainer_of
from rolloutdoctor.opening.stated.training_args import read_training_args
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.dialects.table import DIALECTS
from rolloutdoctor.trainers.table import TRAINERS

pytest.importorskip("yaml")
DATA = Path(__file__).parent / "data" / "dialects"
AXOLOTL = DATA / "axolotl.yml"


def configured(path, stated=None, **metadata):
    return configure(RunMetadata(**metadata), stated, read_trainer_layers(str(path)))


def edited(tmp_path, source, old, new):
    path = tmp_path / "edited.yml"
    text = source.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.title)
def test_every_option_is_one_of_the_trainer(dialect):
    options = {option.name for option in TRAINERS[dialect.trainer].options}
    added = {name for more in dialect.implied.values() for name in more}
    assert {*dialect.names.values(), *dialect.defaults, *dialect.needed, *added} <= options


def test_axolotl_names_trl_and_states_its_options():
    found = configured(AXOLOTL)
    assert found.trainer.name == "trl"
    got = {name: (one.value, one.origin) for name, one in found.config.settings.items() if one.is_stated}
    given = {"beta": 0.001, "max_completion_length": 256, "num_generations": 4, "loss_type": "dr_grpo"}
    given |= {"use_vllm": True, "gradient_accumulation_steps": 2, "logging_steps": 1}
    added = {"ref_model_mixup_alpha": 0.9, "ref_model_sync_steps": 64}
    assert got.items() >= {name: (value, str(AXOLOTL)) for name, value in given.items()}.items()
    assert {name: one for name, one in got.items() if one[1] == "added by axolotl"} == {
        name: (value, "added by axolotl") for name, value in added.items()
    }


@pytest.mark.parametrize(
    ("old", "new", "name", "value"),
    [
        ("rl: grpo", "rl: gdpo", "multi_objective_aggregation", "normalize_then_sum"),
        ("  beta: 0.001\n", "", "beta", None),
        ("rl: grpo", "rl: grpo\nrl_beta: 0.5", "beta", 0.001),
        ("  loss_type: dr_grpo", "  use_liger_loss: false", "use_liger_kernel", False),
        ("  max_completion_length: 256\n", "", "max_completion_length", None),
    ],
)
def test_axolotl_hands_options_on_as_it_does(tmp_path, old, new, name, value):
    path = edited(tmp_path, AXOLOTL, old, new)
    handed = {key: each for one in reversed(read_trainer_layers(str(path))) for key, each in one.values.items()}
    assert handed.get(name) == value


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rl: grpo", "rl: dpo", "rl = dpo .*axolotl runs no GRPO with it"),
        ("use_vllm: true", "use_data_producer: true", "trl.use_data_producer = True .*asynchronous"),
        ("rl: grpo", "rl: grpo\ncontext_parallel_size: 2", "context_parallel_size = 2"),
        ("rl: grpo", "rl: grpo\ntrainer_cls: a.B", "trainer_cls = a.B"),
        ("gradient_accumulation_steps: 2", "batch_size: 8", "write gradient_accumulation_steps instead"),
        ("logging_steps: 1\n", "", "leaves out logging_steps, which axolotl takes from the number of steps"),
        ("loss_type: dr_grpo", "loss_type: of_tomorrow", "loss_type = 'of_tomorrow'"),
    ],
)
def test_what_axolotl_then_computes_otherwise_is_refused_by_name(tmp_path, old, new, message):
    with pytest.raises(UsageError, match=message):
        configured(edited(tmp_path, AXOLOTL, old, new))


def test_what_the_file_leaves_out_can_be_stated(tmp_path):
    path = edited(tmp_path, AXOLOTL, "logging_steps: 1\n", "")
    found = configure(RunMetadata(), None, layers(["logging_steps=2"], str(path)))
    assert found.config["logging_steps"] == 2


def test_options_of_one_trainer_are_not_used_for_a_run_of_another():
    words = r"axolotl.yml: options of trl, and the run is of verl"
    with pytest.raises(UsageError, match=words):
        configured(AXOLOTL, "verl")
    with pytest.raises(UsageError, match=words):
        configured(AXOLOTL, trainer="verl")


@pytest.mark.parametrize("trainer", [None, "verl"])
def test_easyr1_is_named_and_not_taken_for_verl(trainer):
    with pytest.raises(UsageError, match=r"easyr1.yaml is a configuration of EasyR1: .* of no release of verl"):
        configured(DATA / "easyr1.yaml", trainer)


@pytest.mark.parametrize(
    ("kind", "state", "refused"),
    [
        ("AxolotlGRPOConfig", {"beta": 0.5, "context_parallel_size": 1}, None),
        ("AxolotlGRPOConfig", {"beta": 0.5, "context_parallel_size": 2}, "context_parallel_size = 2"),
        ("AxolotlAsyncGRPOConfig", {"beta": 0.5, "async_prefetch": True}, "async_prefetch = True"),
    ],
)
def test_training_args_of_axolotl(tmp_path, kind, state, refused):
    path = archive(tmp_path / "training_args.bin", pickled_config("axolotl.core.trainers.grpo.args", kind, state))
    if refused is None:
        assert read_training_args(path).trainer == "trl"
    else:
        with pytest.raises(UsageError, match=refused):
            read_training_args(path)


def test_a_tracker_of_the_asynchronous_trainer_is_not_taken_for_trl():
    names = dict.fromkeys(["num_generations", "beta", "scale_rewards"])
    assert trainer_of(names) == "trl"
    assert trainer_of({**names, "use_data_producer": True}) is None
