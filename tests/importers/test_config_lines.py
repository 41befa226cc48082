"""What a program of one's own prints of its options: short names, words behind numbers, commands in a notebook."""

import pytest

from rolloutdoctor.importers.reading.notebooks import Notebook
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.opening.stated.calls import read_code
from rolloutdoctor.opening.stated.config_lines import on_config_line, on_own_line, on_settings_line
from rolloutdoctor.opening.stated.options import ReadLog
from rolloutdoctor.opening.stated.own_loops import own_options
from rolloutdoctor.opening.stated.printed import read_printed


def of_console(tmp_path, text, **read):
    log = tmp_path / "train.log"
    log.write_text(text + "".join(f"step {step} | loss 0.{step} | reward 0.{step}\n" for step in range(1, 6)))
    return read_printed(Source.of(str(log)), ReadLog(**read))


@pytest.mark.parametrize(
    "before", ["Config: ", "2026-01-01 10:00:00 INFO main - Run config: ", "[trainer] Hyperparameters: ", "Args = "]
)
def test_short_names_on_a_line_that_says_that_it_is_a_configuration(before):
    found = on_config_line(f"{before}steps=50, groups=4 | G=8 T=0.70 lr=5.0e-06, eps=0.2; mu=2 max_new=1000 warmup=0.1")
    assert found == {
        "lr": "5.0e-06",
        "total_steps": "50",
        "prompts_per_step": "4",
        "group_size": "8",
        "temperature": "0.70",
        "clip_eps": "0.2",
        "num_iterations": "2",
        "max_new_tokens": "1000",
        "warmup_ratio": "0.1",
    }


@pytest.mark.parametrize(
    "line",
    [
        "G=8, T=0.70, eps=0.2",
        "step 3 | G: 8, T: 0.70",
        "LoRA config: T=0.5, G=8",
        "Model config: G=8, T=0.5",
        "vLLM engine config: T=0.5",
        "Adam settings: eps=0.1, G=8",
        "reconfig: G=8",
    ],
)
def test_lines_that_are_no_configuration_of_the_training_say_nothing(line):
    assert on_config_line(line) == {}


def test_more_short_names_of_a_configuration():
    assert on_config_line("[a] GRPO config: batch=1, steps=100, generations=4") == {
        "batch_size": "1",
        "total_steps": "100",
        "num_generations": "4",
    }


@pytest.mark.parametrize(("rank", "is_of_lora"), [("3", False), ("4", True)])
def test_a_rank_of_a_process_is_none_of_an_adapter(rank, is_of_lora):
    assert ("lora_rank" in on_config_line(f"Config: G=8, rank={rank}")) is is_of_lora


@pytest.mark.parametrize(
    "line", ["LR=3e-05 group=8 loss=0.5", "LR=3e-05 K=8", "SFT: lr=3e-05 group=8", "group=8 temp=0.8", "lr=3e-05"]
)
def test_a_line_that_may_be_of_something_else_is_none_of_settings(line):
    assert on_settings_line(line) == {}


def test_a_line_of_settings_alone_states_the_learning_rate_that_is_a_metric_too(tmp_path):
    names = ("lr", "loss", "reward")
    (stated,) = of_console(tmp_path, "[a] Run: 8a-1:b:0 | LR=3e-05 group=8 temp=0.8 rank=32\n", names=names)
    expected = {"lr": "3e-05", "group_size": "8", "temperature": "0.8", "lora_rank": "32"}
    assert stated.values == expected
    assert not of_console(tmp_path, "lr=3e-05 temp=0.8\n", names=("lr", "temperature", "loss")), "a step's"


@pytest.mark.parametrize("pair", ["T=5", "T=1", "K=10", "N=20", "G=0", "G=0.9", "eps=0.2", "mu=1", "groups=8", "T=3.5"])
def test_a_short_name_that_may_be_anything_is_left_out(pair):
    assert on_config_line(f"Config: lr=1e-6, {pair}") == {"lr": "1e-6"}


@pytest.mark.parametrize(("value", "is_clip"), [("0.009", False), ("0.01", True), ("0.9", True), ("0.91", False)])
def test_which_epsilon_is_a_clip_range(value, is_clip):
    assert ("clip_eps" in on_config_line(f"Config: G=8, eps={value}")) is is_clip


@pytest.mark.parametrize(("value", "is_temperature"), [("2.0", True), ("2.1", False)])
def test_which_value_is_a_temperature(value, is_temperature):
    assert ("temperature" in on_config_line(f"Config: T={value}")) is is_temperature


def test_two_values_of_one_option_on_a_line_are_none():
    assert on_config_line("Config: lr=1e-6, temp=0.7, T=0.9") == {"lr": "1e-6"}


def test_a_configuration_states_the_learning_rate_that_the_log_has_as_a_metric(tmp_path):
    lines = "Run config: lr=5e-06 T=0.80 G=8\nIter 1 | lr=1e-06 G=3 x=2\nIter 2 | lr=2e-06 G=3 x=2\n"
    (stated,) = of_console(tmp_path, lines, names=("lr", "reward"))
    assert stated.values == {"lr": "5e-06", "temperature": "0.80", "group_size": "8"}


def test_two_configurations_that_contradict_each_other_state_nothing_of_it(tmp_path):
    lines = "Config: lr=5e-06, T=0.80, G=8, max_new=9\nConfig: lr=5e-06, T=0.80, G=16, max_new=9\n"
    (stated,) = of_console(tmp_path, lines)
    assert stated.values == {"lr": "5e-06", "temperature": "0.80", "max_new_tokens": "9"}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("  Generations   : 6 per prompt", {"generations_per_prompt": 6}),
        ("- Samples: 8 per question", {"samples_per_prompt": 8}),
        ("Max new = 1,024 tokens", {"max_new_tokens": 1024}),
        ("scale_rewards setting: False", {"scale_rewards": False}),
        ("Loaded: 256 tokens per second", {}),
        ("Generations: 6.5 per prompt", {}),
        ("my favourite setting: dark", {}),
        ("  Generations/prompt:  4", {"generations_per_prompt": 4}),
        ("  Reward/prompt:  0.5", {}),
        ("New LoRA adapter (r=16, alpha=32)...", {"lora_r": 16, "lora_alpha": 32}),
        ("LoRA norm (r=0.5, alpha=32)", {}),
    ],
)
def test_what_a_number_counts(line, found):
    assert on_own_line(line) == found


def test_words_behind_numbers_are_settings_beside_printed_options(tmp_path):
    lines = "Arguments: Namespace(lr=1e-05, num_generations=8, kl_beta=0.02)\nscale_rewards setting: batch\n"
    stated = of_console(tmp_path, lines)[0]
    assert stated.values == {"lr": 1e-05, "num_generations": 8, "kl_beta": 0.02, "scale_rewards": "batch"}
    log = tmp_path / "own.log"
    log.write_text("  Generations : 6 per prompt\n  Max completion: 256 tokens\nstep 1 | loss 0.1 | reward 0.1\n")
    found = own_options(Source.of(str(log)))
    assert found.values == {"generations_per_prompt": 6, "max_completion_tokens": 256}


SFT = "!python warm.py --epochs 2 --batch-size 4 --lr 2e-5"
GRPO = "!python train.py \\\n  --lr 2e-6 \\\n  --num-generations 16 --batch-size 1"


def test_the_command_of_the_cell_that_printed_the_run():
    notebook = Notebook((SFT, GRPO, "!python later.py --lr 1 --batch-size 2 --epochs 1"), ((), (), ()))
    (stated,) = read_code(notebook, "code", ReadLog(begins=(1, 2)))
    assert stated.values == {"lr": "2e-6", "num_generations": "16", "batch_size": "1"}


def test_of_several_commands_none_of_which_printed_the_run_none_is_taken():
    assert read_code(Notebook((SFT, GRPO, "show()"), ((), (), ())), "code", ReadLog(begins=(2, 3))) == []
    (only,) = read_code(Notebook((GRPO, "show()"), ((), ())), "code", ReadLog(begins=(1, 2)))
    assert only.values["lr"] == "2e-6"
