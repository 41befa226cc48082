"""What a run states of itself beside the options of its objective, and of which of several runs a place is."""

import json

import pytest

import rolloutdoctor as rd
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.opening.stated.command_lines import read_commands
from rolloutdoctor.opening.stated.options import ReadLog, Stated
from rolloutdoctor.opening.stated.settings import TITLES, read, settings_of, title_of
from rolloutdoctor.opening.stated_options import stated_beside
from rolloutdoctor.results.findings import RunSetting

DICTS = "".join(f"{{'loss': 0.5, 'grad_norm': 1.0, 'reward': {n}.5, 'kl': 0.1}}\n" for n in range(1, 8))
BANNER = (
    "==((====))==  Unsloth - 2x faster free finetuning | Num GPUs used = 1\n"
    "   \\\\   /|    Num examples = 12,709 | Num Epochs = 1 | Total steps = 20\n"
    "O^O/ \\_/ \\    Batch size per device = 4 | Gradient accumulation steps = 8\n"
    "\\        /    Data Parallel GPUs = 1 | Total batch size (4 x 8 x 1) = 32\n"
)
OF_BANNER = {
    "num_gpus": 1,
    "num_epochs": 1,
    "total_steps": 20,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "total_batch_size": 32,
}


def settings(path):
    return {one.name: one.value for one in rd.info(path).settings}


def notebook(path, *cells):
    """A notebook of cells, each its code and what it printed."""
    body = [
        {
            "cell_type": "code",
            "source": source,
            "outputs": [{"output_type": "stream", "name": "stdout", "text": text}] * bool(text),
        }
        for source, text in cells
    ]
    path.write_text(json.dumps({"nbformat": 4, "cells": body}))
    return path


def test_a_name_has_one_title():
    names = [name for spellings in TITLES.values() for name in spellings]
    assert len(names) == len(set(names))
    assert all(title_of(name).startswith(title) for title, spellings in TITLES.items() for name in spellings)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("max_steps", "steps"),
        ("trainer.total_training_steps", "steps"),
        ("critic.optim.lr", "learning rate of the critic"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "temperature in evaluation"),
        ("actor_train.training_args.learning_rate", "learning rate"),
        ("entropy_beta", "entropy coefficient"),
        ("left_clip_range", "lower clip range"),
        ("right_clip_range", "upper clip range"),
        ("dual_clip_lower_bound", "dual clip"),
        ("adv_clip", "limit of the rewards"),
        ("advantage_eps", "epsilon of the advantage"),
        ("use_std_normalization", "scale of the rewards"),
        ("sampling_max_tokens", "response length limit"),
        ("epochs_per_rollout_batch", "passes over a batch"),
        ("n_grpo_steps", "steps"),
        ("hub_token", ""),
        ("output_dir", ""),
        ("n", ""),
    ],
)
def test_titles(name, title):
    assert title_of(name) == title


def test_the_first_of_two_values_counts_and_paths_are_none():
    told = []
    places = [
        Stated("a", "trl", {"beta": 0.04, "seed": 1, "optim": "adamw", "dtype": "/home/x", "hub_token": "x"}),
        Stated("b", None, {"seed": "2", "optim": "adamw", "lr": "1e-6", "beta": 0.1, "top_k": None}),
    ]
    found = settings_of(places, {"beta"}, {"beta"}, told.append)
    assert [(one.name, one.value, one.origin) for one in found] == [
        ("lr", 1e-6, "b"),
        ("optim", "adamw", "a"),
        ("seed", 1, "a"),
    ]
    assert told == ["seed is 1 in a and 2 in b: the first is used"]


@pytest.mark.parametrize(
    ("text", "value"), [("8", 8), ("0.5", 0.5), ("true", True), ("nan", "nan"), ("1_0", "1_0"), (["1", "x"], [1, "x"])]
)
def test_texts_are_read_as_what_they_are(text, value):
    assert read(text) == value


def test_settings_stay_in_the_metadata_of_a_file():
    one = RunSetting("lr", "learning rate", 1e-6, "a.sh")
    assert RunMetadata.decode(RunMetadata(settings=(one,)).encode(), "f").settings == (one,)


def test_what_changes_nothing_in_the_objective_is_a_setting(tmp_path):
    code = "GRPOConfig(learning_rate=1e-6, beta=0.04, num_generations=4, max_steps=70, output_dir='out', seed=3)"
    path = notebook(tmp_path / "a.ipynb", (code, ""), ("trainer.train()", DICTS))
    report = rd.check(path)
    assert report.config["beta"].value == 0.04
    assert {one.name: (one.title, one.value, one.origin) for one in report.settings} == {
        "learning_rate": ("learning rate", 1e-6, "code of a.ipynb"),
        "max_steps": ("steps", 70, "code of a.ipynb"),
        "seed": ("seed", 3, "code of a.ipynb"),
    }


def test_options_without_one_that_is_too_much_to_assume_are_settings(tmp_path):
    steps = "".join(f"step:{n} - actor/pg_loss:0.{n} - actor/grad_norm:1.{n} - critic/score/mean:0.{n}\n" for n in "12")
    actor = "actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.clip_ratio=0.3"
    command = f"python -m verl.trainer.main_ppo {actor} data.seed=3"
    (tmp_path / "log.txt").write_text(f"{command}\n{steps}")
    expected = {"actor_rollout_ref.rollout.n": 8, "data.seed": 3, "actor_rollout_ref.actor.clip_ratio": 0.3}
    assert settings(tmp_path / "log.txt") == expected
    with_it = rd.info(tmp_path / "log.txt", trainer="verl", options={"algorithm.adv_estimator": "grpo"})
    assert {one.name for one in with_it.settings} == {"data.seed"}


TABLE = "Step\tTraining Loss\n" + "".join(f"{n}\t0.{n}\n" for n in range(10, 90, 10))
SFT = "SFTConfig(learning_rate=2e-4, num_train_epochs=3, per_device_train_batch_size=8)"
OLD_PPO = "PPOConfig(learning_rate=1.41e-5, init_kl_coef=0.2, target=6, cliprange=0.2, vf_coef=0.1, ppo_epochs=4)"


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        # The cell of the output tells which, and so do its numbers.
        ([(SFT, TABLE), ("GRPOConfig(learning_rate=1e-6, beta=0.1)", DICTS)], 1e-6),
        ([("GRPOConfig(learning_rate=1e-6)", DICTS), ("GRPOConfig(learning_rate=5e-6)", "")], 1e-6),
        ([("GRPOConfig(learning_rate=1e-6)", ""), ("GRPOConfig(learning_rate=5e-6)", ""), ("t.train()", DICTS)], 5e-6),
        # A trainer takes the first of two.
        (
            [
                ("a = GRPOConfig(learning_rate=1e-6)\nb = GRPOConfig(learning_rate=5e-6)", ""),
                ("t = GRPOTrainer(model, args=a)", ""),
                ("t.train()", DICTS),
            ],
            1e-6,
        ),
        ([("c = PPOConfig(learning_rate=1e-5)\nt = PPOTrainer(c, model)\nPPOConfig(learning_rate=2e-5)", DICTS)], 1e-5),
        # Set after the run, it is none of its options.
        ([("a = GRPOConfig(learning_rate=1e-6)", DICTS), ("a.learning_rate = 5e-6", "")], 1e-6),
        # The only one, in a cell that was run before one above it.
        ([("t.train()", DICTS), ("GRPOConfig(learning_rate=1e-6)", "")], 1e-6),
        ([("t.train()", DICTS), ("GRPOConfig(learning_rate=1e-6)\nGRPOConfig(learning_rate=5e-6)", "")], None),
        ([(SFT, ""), ("t.train()", DICTS)], None),
    ],
)
def test_each_run_of_a_notebook_has_its_own(tmp_path, cells, expected):
    path = notebook(tmp_path / "a.ipynb", *cells)
    assert settings(path).get("learning_rate") == expected


def test_the_run_that_is_named_has_its_own(tmp_path):
    def printed(kl):
        return "".join(f"{{'loss': 0.5, 'reward': {n}.5, 'kl': {kl}, 'epoch': {n / 10}}}\n" for n in range(1, 8))

    cells = [("GRPOConfig(learning_rate=1e-6)", printed(0.1)), ("GRPOConfig(learning_rate=5e-6)", printed(0.2))]
    path = notebook(tmp_path / "a.ipynb", *cells)
    assert [settings(f"{path}/{run}")["learning_rate"] for run in (1, 2)] == [1e-6, 5e-6]


def test_the_options_of_an_older_ppo(tmp_path):
    generate = "ppo_trainer.generate(x, top_p=1.0, max_new_tokens=48)"
    lines = "".join(f"{{'objective/kl': 0.{n}, 'ppo/returns/mean': 0.5, 'ppo/loss/total': 0.1}}\n" for n in range(1, 8))
    path = notebook(tmp_path / "a.ipynb", (f"t = PPOTrainer({OLD_PPO}, model)\n{generate}", lines))
    assert settings(path) == {
        "top_p": 1.0,
        "max_new_tokens": 48,
        "learning_rate": 1.41e-5,
        "init_kl_coef": 0.2,
        "target": 6,
        "cliprange": 0.2,
        "vf_coef": 0.1,
        "ppo_epochs": 4,
    }


def test_what_a_trainer_says_before_its_first_step(tmp_path):
    (tmp_path / "log.txt").write_text(BANNER + DICTS)
    found = settings(tmp_path / "log.txt")
    assert found.items() >= (OF_BANNER.items() - {("gradient_accumulation_steps", 8)})


def test_what_a_trainer_says_in_a_notebook_above_its_first_step(tmp_path):
    code = "x = GRPOConfig(learning_rate=1e-6, per_device_train_batch_size=1, num_generations=4, beta=0.1, seed=3)\n"
    path = notebook(tmp_path / "a.ipynb", (code, ""), ("GRPOTrainer(args=x).train()", BANNER + DICTS))
    found = settings(path)
    assert found.items() >= {"total_batch_size": 32, "total_steps": 20, "seed": 3}.items()
    assert found["per_device_train_batch_size"] == 4, "as it was run, and not as the code has it"
    told = []
    stated = stated_beside((), [Source.of(str(path))], told.append, ReadLog(begins=(0, 2)))
    assert told[0].endswith("per_device_train_batch_size is 1 there, and 4 as the run printed: the latter is used")
    assert stated[0].values["per_device_train_batch_size"] == 4
    own = notebook(tmp_path / "b.ipynb", ("GROUP_SIZE = 8\nTEMPERATURE = 0.7\n" + "train()", BANNER + DICTS))
    assert settings(own).items() >= {"GROUP_SIZE": 8, "TEMPERATURE": 0.7, "total_batch_size": 32}.items()
    before = notebook(tmp_path / "c.ipynb", ("other()", BANNER), ("train()", DICTS))
    assert "total_batch_size" not in settings(before), "of another cell"


def test_a_metric_that_is_printed_is_no_setting(tmp_path):
    lines = "".join(
        f"step: {n}\nloss: 0.5\nreward: {n}.5\nkl: 0.1\nlearning_rate: {n}e-6\ngrad_norm: 1.0\n\n" for n in range(1, 8)
    )
    (tmp_path / "log.txt").write_text("seed: 7\ntemperature: 0.9\nmax_new_tokens: 64\n\n" + lines)
    found = settings(tmp_path / "log.txt")
    assert "learning_rate" not in found
    assert found.get("seed", 7) == 7


PRINTED = {
    "of a parser": "Namespace(actor_learning_rate=5e-07, init_kl_coef=0.01, n_samples_per_prompt=8, bf16=True)\n",
    "a command": "+ python -m openrlhf.cli.train_ppo_ray --actor_learning_rate 5e-7 --init_kl_coef 0.01 \\\n"
    "   --n_samples_per_prompt 8 --bf16\n",
}


@pytest.mark.parametrize("title", ["Model config Qwen2Config {", "[INFO] Generate config GenerationConfig {"])
def test_how_a_model_is_configured_is_no_option_of_the_run(tmp_path, title):
    block = '  "temperature": 0.7,\n  "top_k": 20,\n  "top_p": 0.8,\n  "nested": {\n    "beta": 0.5\n  }\n}\n'
    (tmp_path / "log.txt").write_text(f"seed: 1\n{title}\n{block}{BANNER}{DICTS}")
    report = rd.check(tmp_path / "log.txt")
    assert report.trainer is None
    assert {one.name: one.value for one in report.settings} == {**OF_BANNER, "seed": 1}


@pytest.mark.parametrize(
    "line",
    [
        "Initializing a V1 LLM engine (v0.8.5) with config: dtype=torch.bfloat16, max_seq_len=4096, seed=0, top_k=3,",
        "INFO [api_server.py:1044] args: Namespace(port=8000, served_model_name=None, seed=0, max_model_len=9)",
        "non-default args: {'seed': 0, 'max_model_len': 9, 'dtype': 'auto', 'engine': 1}",
        "evaluated with temperature=0.0, top_p=1.0, max_new_tokens=5",
    ],
)
def test_what_a_sampler_or_an_evaluation_prints_is_no_setting(tmp_path, line):
    head = "{'lr': 1e-6, 'max_steps': 9, 'engine': 'vllm', 'eval_steps': 5, 'evaluation_strategy': 'steps'}"
    (tmp_path / "log.txt").write_text(f"{head}\n{line}\n{DICTS}")
    assert settings(tmp_path / "log.txt") == {"lr": 1e-6, "max_steps": 9, "eval_steps": 5}


def test_lines_of_a_process_of_ray(tmp_path):
    head = "(Runner pid=71, ip=10.0.0.1) init_kl_coef: 0.01\n(Runner pid=71, ip=10.0.0.1) seed: 5\n(A pid=1) lr: 1e-6\n"
    (tmp_path / "log.txt").write_text(head + DICTS)
    assert settings(tmp_path / "log.txt") == {"lr": 1e-6, "init_kl_coef": 0.01, "seed": 5}


ROLL = """\
seed: 42
rollout_batch_size: 64
num_return_sequences_in_group: 8
actor_train:
  training_args:
    learning_rate: 1.0e-6
    warmup_steps: 20
critic:
  training_args:
    learning_rate: 1.0e-5
pretrain: /models/a
"""


def test_nested_options_of_a_file_say_of_what_they_are(tmp_path):
    (tmp_path / "train.log").write_text(DICTS)
    (tmp_path / "rlvr.yaml").write_text(ROLL)
    found = {one.title: (one.value, one.origin) for one in rd.info(tmp_path / "train.log").settings}
    place = "rlvr.yaml beside the log"
    assert found == {
        "learning rate": (1e-6, place),
        "learning rate of the critic": (1e-5, place),
        "warmup steps": (20, place),
        "group size": (8, place),
        "rollout batch size": (64, place),
        "seed": (42, place),
    }


def test_a_file_beside_the_log_of_preferences_needs_no_policy(tmp_path):
    lines = "".join(
        f"{{'loss': 0.5, 'rewards/chosen': 0.{n}, 'rewards/rejected': 0.1, 'epoch': 0.{n}}}\n" for n in range(1, 8)
    )
    (tmp_path / "train.log").write_text(lines)
    (tmp_path / "dpo.yaml").write_text("stage: dpo\npref_beta: 0.1\nlearning_rate: 5.0e-6\nnum_train_epochs: 3.0\n")
    assert settings(tmp_path / "train.log") == {"learning_rate": 5e-6, "pref_beta": 0.1, "num_train_epochs": 3.0}


@pytest.mark.parametrize("name", PRINTED)
def test_what_no_trainer_is_known_of(tmp_path, name):
    (tmp_path / "log.txt").write_text(PRINTED[name] + DICTS)
    assert settings(tmp_path / "log.txt") == {
        "actor_learning_rate": 5e-7,
        "init_kl_coef": 0.01,
        "n_samples_per_prompt": 8,
        "bf16": True,
    }


SCRIPT = """\
#!/bin/bash
LR=1e-6  # of the actor
export N="8"
STEPS=$((N * 25))
EXTRA=${EXTRA:-3}
ARGS=(
   --learning_rate $LR   # as before
   # --beta 0.5
   --beta 0.04
)
torchrun --nproc_per_node 4 \\
    train.py "${ARGS[@]}" --num_generations ${N} \\
    --max_steps $STEPS --seed $EXTRA 2>&1 | tee train.log
"""


def test_variables_sums_and_arrays_of_a_script():
    (found,) = read_commands(SCRIPT.split("\n"), "run.sh", ["trl"])
    assert found.trainer is None or found.trainer == "trl"
    known = {name: read(value) for name, value in found.values.items()}
    assert known.items() >= {"learning_rate": 1e-6, "beta": 0.04, "num_generations": 8, "max_steps": 200}.items()
    # The environment may have another value.
    assert "seed" not in known


@pytest.mark.parametrize(
    ("before", "behind"), [("", ""), ("run sh: `/opt/env/bin/", "`"), ("$ /usr/bin/", " 2>&1 | tee 3")]
)
def test_a_list_behind_a_flag_is_the_whole_list(before, behind):
    line = (
        f"{before}python3.12 /a/rl.py --funcs f g --reward_weights 0.5 -1 2.5 --lora_rank 64 --lr 1e-5 a.json{behind}"
    )
    (found,) = read_commands([line], "a log")
    values = {name: read(value) for name, value in found.values.items()}
    assert values == {"reward_weights": [0.5, -1, 2.5], "lora_rank": 64, "lr": 1e-5}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"run.sh": SCRIPT}, {"max_steps": 200, "learning_rate": 1e-6}),
        # Nobody names it: it may have been changed since.
        ({"run.sh": SCRIPT.replace("train.log", "other.log")}, {"num_generations": 8, "beta": 0.04}),
        ({"a.yaml": "rollout_batch_size: 64\nseed: 42\ninit_kl_coef: 0.2\nlearning_rate: 1.0e-6\n"}, {"seed": 42}),
        ({"a.sh": SCRIPT.replace("train.log", "x"), "b.yaml": "seed: 42\nbeta: 0.2\nlr: 1.0e-6\n"}, {}),
        ({"sft.yaml": "seed: 42\nnum_train_epochs: 2\nlr: 1.0e-6\n"}, {}),
        ({"generation_config.json": '{"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 9}'}, {}),
        ({"config.json": '{"model_type": "m", "temperature": 1.0, "top_p": 0.9, "num_return_sequences": 1}'}, {}),
        ({"broken.yaml": "a: [", "run.sh": SCRIPT}, {"max_steps": 200}),
    ],
)
def test_files_beside_a_log(tmp_path, files, expected):
    (tmp_path / "train.log").write_text(DICTS)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    report = rd.check(tmp_path / "train.log")
    found = {one.name: one.value for one in report.settings}
    is_certain = any("train.log" in text for text in files.values())
    stated = {name: one.value for name, one in report.config.items() if one.is_stated and not one.assumed}
    assert ("beta" in stated) <= is_certain
    assert {**found, **stated}.items() >= expected.items()
    assert bool(found) == bool(expected)


@pytest.mark.parametrize(
    ("name", "head", "is_certain"),
    [
        ("run.sh", "+ bash run.sh\n", True),
        ("run.sh", "+ bash other_run.sh\n", False),
        ("params.json", "loading params.json from cache\n", False),
    ],
)
def test_a_file_that_the_log_names_is_of_the_run(tmp_path, name, head, is_certain):
    (tmp_path / "train.log").write_text(head + DICTS.replace("'kl'", "'completions/mean_length': 5.0, 'kl'"))
    values = {"beta": 0.04, "num_generations": 4, "scale_rewards": "none"}
    options = " ".join(f"--{key} {value}" for key, value in values.items())
    (tmp_path / name).write_text(json.dumps(values) if name.endswith("json") else f"python x.py {options}\n")
    report = rd.check(tmp_path / "train.log")
    assert ("beta" in report.config) == is_certain
    assert ("beta" in {one.name for one in report.settings}) != is_certain
