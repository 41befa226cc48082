"""Options and the length of a run beside logged numbers: they are facts of the run, and never a reason to refuse it."""

import json

import pytest

import rolloutdoctor as rd
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.configure import read_settings
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.views.verdict import verdict

DICTS = "".join(f"{{'loss': 0.5, 'grad_norm': 1.0, 'reward': {n}.5, 'epoch': {n / 100}}}\n" for n in range(1, 6))
BARS = "".join(
    f"  {n}%|  | {n}/100 [00:01<00:09]\n{line}\n" for n, line in enumerate(DICTS.splitlines(), start=1) if line
)
VERL = "".join(
    f"step:{n} - actor/pg_loss:0.{n} - actor/grad_norm:1.{n} - critic/score/mean:0.{n}\n" for n in range(1, 6)
)
LENGTHS = {
    "a trainer's state": json.dumps(
        {"max_steps": 640, "log_history": [{"step": n, "loss": 0.5, "reward": n} for n in range(1, 6)]}
    ),
    "a progress bar": BARS,
    "a number in verl's console": f"Total training steps: 435\n{VERL}",
    "a progress bar of verl": f"{VERL}\rTraining Progress:   1%|  | 5/435 [01:00<09:00]",
    "a step with its total": "".join(
        json.dumps({"loss": 0.5, "reward": n, "epoch": n / 100, "global_step/max_steps": f"{n}/80"}) + "\n"
        for n in range(1, 6)
    ),
}
STEPS = {"a trainer's state": 640, "a progress bar": 100, "a step with its total": 80}


def opened(path, told=None, **options):
    told = [] if told is None else told
    return open_any(
        [str(path)], trainer=options.get("trainer"), options=ConvertOptions(), tell=told.append, logs_alone=True
    )


@pytest.mark.parametrize("name", LENGTHS)
def test_the_length_of_the_run_is_a_fact_of_it(tmp_path, name):
    path = tmp_path / ("trainer_state.json" if "state" in name else "log.txt")
    path.write_text(LENGTHS[name])
    with opened(path) as run:
        assert run.metadata.total_steps == STEPS.get(name, 435)
        assert len(run.metrics.steps()) == 5


def test_a_log_that_says_no_length_has_none(tmp_path):
    (tmp_path / "log.txt").write_text(VERL)
    with opened(tmp_path / "log.txt") as run:
        assert run.metadata.total_steps is None


def printed(**options):
    """A whole configuration as verl prints it, with some options of another value."""
    config = {
        "actor_rollout_ref": {
            "actor": {"clip_ratio": 0.2, "use_kl_loss": False, "ppo_mini_batch_size": 4, **options.pop("actor", {})},
            "rollout": {"n": 4},
        },
        "algorithm": {"adv_estimator": "grpo", "gamma": 1.0, **options.pop("algorithm", {})},
        "trainer": options,
    }
    return f"{config}\n{VERL}"


@pytest.mark.parametrize(
    "text",
    [
        printed(algorithm={"adv_estimator": "of tomorrow"}),
        printed(algorithm={"adv_estimator": None}),
        printed(algorithm={"gamma": ""}),
        printed(actor={"clip_ratio": -1}),
    ],
    ids=["an unknown word", "null", "empty", "out of range"],
)
def test_an_option_of_a_file_never_refuses_the_numbers(tmp_path, text):
    (tmp_path / "log.txt").write_text(text)
    with opened(tmp_path / "log.txt") as run:
        assert check(run, CheckOptions(device="cpu")).input.steps == 5


def test_one_empty_value_leaves_the_others(tmp_path):
    (tmp_path / "log.txt").write_text(printed(algorithm={"gamma": ""}, actor={"clip_ratio": 0.3}))
    told = []
    with opened(tmp_path / "log.txt", told) as run:
        report = check(run, CheckOptions(device="cpu"))
    assert report.config["actor_rollout_ref.actor.clip_ratio"].value == 0.3
    assert any("algorithm.gamma is empty" in sentence for sentence in told)


def test_an_option_of_the_user_does(tmp_path):
    (tmp_path / "log.txt").write_text(printed())
    layers = [read_settings(["algorithm.adv_estimator=of tomorrow"], "command line")]
    with opened(tmp_path / "log.txt") as run, pytest.raises(UsageError, match=r"of tomorrow.*command line"):
        check(run, CheckOptions(device="cpu", layers=layers))


@pytest.mark.parametrize(
    ("estimator", "version"), [("grpo", "0.4.0"), ("gpg", "0.5.0")], ids=["as guessed", "a later option"]
)
def test_a_guessed_release_gives_way_to_a_printed_option(tmp_path, estimator, version):
    """A whole configuration without `policy_loss` is of 0.4.0 at most, and gpg came with 0.5.0."""
    actor = {"kl_loss_type": "low_var_kl", "ppo_epochs": 1, "loss_agg_mode": "token-mean"}
    algorithm = {"adv_estimator": estimator, "kl_ctrl": {"kl_coef": 0.001}, "use_kl_in_reward": False}
    (tmp_path / "log.txt").write_text(printed(actor=actor, algorithm=algorithm))
    with opened(tmp_path / "log.txt") as run:
        report = check(run, CheckOptions(device="cpu"))
    setting = report.config["version"]
    assert (setting.value, setting.assumed) == (version, True)
    assert ("0.4.0 to 0.5.0" in setting.origin) == (estimator == "gpg")


LINE = "{{'loss': {loss}, 'grad_norm': 1.0, 'learning_rate': 1e-06, 'epoch': {epoch}{more}}}\n"


def lines(number, loss=0.5, more=""):
    return "".join(LINE.format(loss=loss, epoch=n / 100, more=more) for n in range(1, number + 1))


@pytest.mark.parametrize(
    ("more", "loss", "is_taken"),
    [
        ("", 0.5, False),
        (", 'mean_token_accuracy': 0.75", 0.5, False),
        ("", -0.01, True),
        (", 'reward': 1.0", 0.5, True),
    ],
    ids=["losses alone", "accuracies of tokens", "losses below 0", "rewards"],
)
def test_options_beside_the_log_of_a_supervised_training(tmp_path, more, loss, is_taken):
    path = tmp_path / "log.txt"
    path.write_text(f"args = GRPOConfig(num_generations=8, beta=0.04)\n{lines(6, loss, more)}")
    with opened(path) as run:
        assert (run.metadata.trainer == "trl") == is_taken
        assert any("beside a log of" in sentence for sentence in run.notes.sentences) != is_taken


@pytest.mark.parametrize(("number", "group"), [("", 4), ("/1", 8), ("/2", 4)])
def test_the_options_are_those_of_the_run_that_is_read(tmp_path, number, group):
    texts = [f"args = GRPOConfig(num_generations={n}, beta=0.04)\n" for n in (8, 4)]
    rewarded = [lines(count, more=", 'reward': 1.0") for count in (4, 9)]
    text = "".join(f"{options}{run}" for options, run in zip(texts, rewarded, strict=True))
    (tmp_path / "log.txt").write_text(text)
    with opened(f"{tmp_path / 'log.txt'}{number}") as run:
        assert run.metadata.config["num_generations"] == group


def test_options_above_all_runs_are_those_of_each(tmp_path):
    text = "args = GRPOConfig(num_generations=8, beta=0.04)\n" + lines(4, more=", 'reward': 1.0") * 2
    (tmp_path / "log.txt").write_text(text)
    with opened(tmp_path / "log.txt/2") as run:
        assert run.metadata.config["num_generations"] == 8


FIELDS = """\
Training parameters GRPOConfig(
beta=0.04,
loss_type={loss},
num_generations=8,
scale_rewards=group,
)
"""


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        (FIELDS.format(loss="dr_grpo"), "dr_grpo"),
        # In code a bare word is a name: an indent, or another order, tells code.
        (FIELDS.format(loss="dr_grpo").replace("\nbeta", "\n  beta"), None),
        (FIELDS.format(loss="dr_grpo").replace("beta", "zeta"), None),
        ('num_generations = 8,\nbeta = 0.04,\n# loss_type = "bnpo",\nloss_type = "dr_grpo",\n', "dr_grpo"),
        ('num_generations = 8,\nbeta = 0.04,\nepsilon = 0.2,\n# loss_type = "bnpo",\n', None),
    ],
    ids=["printed", "indented", "in another order", "commented out above", "commented out alone"],
)
def test_words_of_printed_options(tmp_path, text, loss):
    rewarded = "".join(
        f"{{'loss': 0.5, 'reward': {n}.0, 'reward_std': 0.5, 'completions/clipped_ratio': 0.0, 'epoch': {n / 100}}}\n"
        for n in range(1, 6)
    )
    (tmp_path / "log.txt").write_text(f"{text}{rewarded}")
    with opened(tmp_path / "log.txt") as run:
        assert run.metadata.config["num_generations"] in (8, "8")
        assert run.metadata.config.get("loss_type") == loss


ALONE = "--num_generations 8\n--learning_rate 1e-6\n--beta 0.04\n--max_completion_length 64\n"
COMMAND = f"python train.py {ALONE.replace(chr(10), ' ')}\n"
CRASHED = "Traceback (most recent call last):\nValueError: no\n"


@pytest.mark.parametrize(
    ("above", "below", "is_read"),
    [
        ("", ALONE, True),
        ("", ALONE.replace("\n", " \\\n"), True),
        (ALONE, "", True),
        ("", f"started with\n{COMMAND}", True),
        ("", f"A=1 {COMMAND}{COMMAND}", True),
        ("", f"{COMMAND}{COMMAND.replace('8', '4')}", False),
        ("", f"{ALONE}\n{ALONE.replace('8', '4')}", False),
        ("", ALONE.replace("--learning_rate 1e-6", "--temperature 0.5"), False),
        ("", "".join(f"--{name} {name.upper()}\n" for name in ("num_generations", "learning_rate", "beta")), False),
        ("", f"{COMMAND}{CRASHED}", False),
        ("", f"{chr(10) * 3_000}{COMMAND}", False),
    ],
    ids=[
        "options alone below",
        "each but the last goes on",
        "options alone above",
        "a command below",
        "the same twice",
        "two that differ",
        "two lists",
        "of an evaluation",
        "of a page of help",
        "of a run that failed",
        "far below",
    ],
)
def test_the_command_that_is_pasted_with_a_line(tmp_path, above, below, is_read):
    rewarded = lines(2, more=", 'reward': 1.0")
    (tmp_path / "log.txt").write_text(f"{above}{rewarded}{below}")
    with opened(tmp_path / "log.txt") as run:
        assert (str(run.metadata.config.get("num_generations")) == "8") == is_read


def test_a_command_below_one_of_two_runs_is_of_neither(tmp_path):
    rewarded = "".join(lines(count, more=", 'reward': 1.0") for count in (4, 9))
    (tmp_path / "log.txt").write_text(f"{rewarded}{COMMAND}")
    with opened(tmp_path / "log.txt") as run:
        assert "num_generations" not in run.metadata.config


def test_the_first_sentence_names_the_run_that_it_is_of(tmp_path):
    first, second = (lines(count, more=", 'reward': 1.0") for count in (4, 9))
    (tmp_path / "log.txt").write_text(first + second)
    for path, words in (("log.txt", "Run 2 of 2: "), ("log.txt/1", "Run 1 of 2: ")):
        assert verdict(rd.check(tmp_path / path)).startswith(words)
    (tmp_path / "one.txt").write_text(second)
    assert not verdict(rd.check(tmp_path / "one.txt")).startswith("Run")


def of_task(text, pid, name="main_task"):
    return "".join(f"({name} pid={pid}) {line}\n" for line in text.splitlines())


OVERRIDES = ["data.train_batch_size=32", "actor_rollout_ref.actor.optim.lr=1e-6", "+algorithm.kl_ctrl.kl_coef=0.001"]
FAILED = f"Error executing job with overrides: {OVERRIDES}\n{CRASHED}"


@pytest.mark.parametrize(
    ("text", "is_read"),
    [
        (of_task(VERL, 77) + FAILED, True),
        (of_task(VERL, 77, "TaskRunner") + "(raylet) full\n" + FAILED, True),
        (of_task(VERL, 77).replace("pid=77", "pid=77, ip=0.0.0.0") + FAILED, True),
        (of_task(VERL, 77) + of_task("epoch 0", 78) + FAILED, False),
        (VERL + FAILED, False),
        (of_task(VERL, 77) + FAILED.replace(str(OVERRIDES), str(OVERRIDES)[:-1]), False),
    ],
    ids=["main_task", "TaskRunner", "on a node", "another start between", "no task says whose", "cut off"],
)
def test_the_overrides_of_a_run_that_fails_are_its_own(tmp_path, text, is_read):
    (tmp_path / "log.txt").write_text(text)
    with opened(tmp_path / "log.txt") as run:
        stated = {name: value for each in run.metadata.settings for name, value in [(each.name, str(each.value))]}
    assert (stated.get("data.train_batch_size") == "32") is is_read
    assert (stated.get("algorithm.kl_ctrl.kl_coef") == "0.001") is is_read


def started(clip, batch):
    return (
        f"{{'actor_rollout_ref': {{'actor': {{'clip_ratio': {clip},\n                      'ppo_epochs': 1}},\n"
        f" 'rollout': {{'n': 4}}}},\n 'data': {{'train_batch_size': {batch}}}}}\n"
    )


@pytest.mark.parametrize("below", [1, 2, 4])
def test_of_several_starts_the_configuration_is_the_last_ones(tmp_path, below):
    before = of_task("\n".join(started(0.3, 64).splitlines()[:below]), 7773)
    (tmp_path / "log.txt").write_text(before + of_task(started(0.2, 32) + VERL, 19799))
    with opened(tmp_path / "log.txt") as run:
        assert str(run.metadata.config["actor_rollout_ref.actor.clip_ratio"]) == "0.2"


def test_a_configuration_of_another_start_is_not_that_of_the_numbers(tmp_path):
    command = "python3 -m verl.trainer.main_ppo " + " ".join(OVERRIDES)
    above = command.replace("=32", "=64") + "\n" + of_task(started(0.3, 64), 7773) + command + "\n"
    (tmp_path / "log.txt").write_text(above + of_task("epoch 0\n" + VERL, 19799))
    with opened(tmp_path / "log.txt") as run:
        assert "actor_rollout_ref.actor.clip_ratio" not in run.metadata.config
        batches = {str(each.value) for each in run.metadata.settings if each.name.endswith("train_batch_size")}
    assert batches == {"32"}
