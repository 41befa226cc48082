"""Numbers in any text: loops of one's own, dicts of any names, cut lines, several runs one after another."""

import json

import pytest

import rolloutdoctor
from rolloutdoctor.commands.check.each import find_runs
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.table import kind_of, read_log
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.metric_names.generic import SPELLINGS, taken_for
from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.metric_names.table import metric_quantities, understood
from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.results.errors import InputError


def read(path, text=None, **options):
    """What was logged by step, what was said, and the length of the run."""
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    told, values = [], {}
    notes = LogNotes(told.append, **options)
    for step, _, row in read_log(Source.of(str(path)), notes):
        values.setdefault(step, {}).update(row)
    return values, told, notes


MEGATRON = (
    " [2026-01-01 10:00:00] iteration        7/      90 | consumed samples:           56 | learning rate: 1.5E-06 | "
    "loss: 2.5E-01 | rewards/Exact/mean: 5.0E-01 | grad norm: 1.25 | number of nan iterations:   0 |\n"
    " [2026-01-01 10:00:09] iteration        8/      90 | consumed samples:           64 | learning rate: 1.5E-06 | "
    "loss: 3.5E-01 | rewards/Exact/mean: 5.0E-0"
)
LOOPS = {
    "short names": ("it=3 loss=-0.5 rew=+0.25 ent=1.5\n", 3, {"loss": -0.5, "rew": 0.25, "ent": 1.5}),
    "a step in brackets": ("[0003/0400] loss: 0.5 | reward: 0.25 | lr: 1.0e-06\n", 3, {"loss": 0.5, "lr": 1e-6}),
    "a block": ("--- Iteration 3 ---\nloss: 0.5\nmean reward: 0.25\n\n--- Iteration 4 ---\n", 3, {"mean_reward": 0.25}),
    "a dict behind its step": ("step 3: {'loss': 0.5, 'reward': 0.25, 'kl': 0.1}\n", 3, {"reward": 0.25}),
    "a frame of pandas": ("   step      loss    reward\n0     3  0.500000  0.250000\n", 3, {"reward": 0.25}),
    "bars": (
        "Step 3/30 | loss=0.5 | reward=-1.25\nStep 4/30 | loss=0.25 | reward=1e-3\n",
        3,
        {"loss": 0.5, "reward": -1.25},
    ),
    "commas": ("step: 3, loss: 0.5, mean_reward: nan, lr: 1e-06\n", 3, {"loss": 0.5, "lr": 1e-6}),
    "spaces": ("[iter 3] loss 0.5 kl 0.25 time 1.5s\n", 3, {"loss": 0.5, "kl": 0.25}),
    "an epoch of several steps": (
        "Epoch:[2/2](3/100), Reward: -1.4, KL_ref: 0.04, Loss: 0.5\n",
        103,
        {"reward": -1.4, "kl_ref": 0.04},
    ),
    "without spaces": (
        "epoch: 0|step: 3|act_loss: inf|cri_loss: 0.5\naverage reward score: -6.5\n----\n",
        3,
        {"act_loss": float("inf"), "average_reward_score": -6.5},
    ),
    "a reward alone": ("Step 2 | reward: 0.5\nStep 3 | reward: 0.25\n", 3, {"reward": 0.25}),
    "a name of one letter": ("Step 3 | loss 0.5 | R -1.541 | KL 0.1\n", 3, {"loss": 0.5, "r": -1.541, "kl": 0.1}),
    "in words": ("[step 3] grpo_loss is 0.5 and kl is 0.25\n", 3, {"grpo_loss": 0.5, "kl": 0.25}),
    "a mean reward that nothing counts": (
        "Batch: mean_reward=0.5\nBatch: mean_reward=0.75\nBatch: mean_reward=-0.25\n",
        3,
        {"mean_reward": -0.25},
    ),
    "rewards of responses below a step": (
        "[step 3] avg_loss=0.5 acc=0.25\nreward is 0.9\nreward is 0.1\n",
        3,
        {"avg_loss": 0.5, "acc": 0.25},
    ),
    "a step with a metric, and a loss below it": (
        "Step 3: Mean Reward=0.70\n\n  Loss: 0.5\n  Loss: 0.25\n",
        3,
        {"mean_reward": 0.7, "loss": 0.5},
    ),
    "counters alone, and the numbers of the update below": (
        "Epoch: 2, global_step=3\nSaved.\nSPS: 989, pg_loss=-0.0026, v_loss=0.125\n",
        3,
        {"pg_loss": -0.0026, "v_loss": 0.125},
    ),
    "a step alone, and a response below it that is no update": (
        "Step 3/30\n[rollout] sample 1/8 len=512 turns=4 reward=0.333 score=2\nreward: 0.5\nkl: 0.25\n",
        3,
        {"reward": 0.5, "kl": 0.25},
    ),
    "a logger before it": (
        "2026-01-01 10:00:00,123 INFO train.py:55 - Iteration 3: reward=0.5 entropy=1.5 len=120\n",
        3,
        {"reward": 0.5, "entropy": 1.5},
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_ones_own(tmp_path, name):
    text, step, values = LOOPS[name]
    logged, _, _ = read(tmp_path / "out.txt", text)
    assert logged[step].items() >= values.items()


def test_lines_of_megatron(tmp_path):
    values, _, notes = read(tmp_path / "out.txt", MEGATRON)
    assert values[7]["grad_norm"] == 1.25
    assert values[7]["learning_rate"] == 1.5e-6
    assert values[8]["loss"] == 0.35
    assert "rewards/Exact/mean" not in values[8], "its number was cut"
    assert notes.total_steps == 90


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (
            "{'shape': (8, 371), 'reward_mean': tensor(-0.5, device='mps:0', grad_fn=<DivBackward0>), "
            "'kl': tensor(0.25), 'loss': 1.0}\n",
            {"reward_mean": -0.5, "kl": 0.25, "loss": 1.0},
        ),
        ("{'x/kl': '0.5', 'x/score': '1e-3', 'episode': 8, 'gone': 'a'}\n", {"x/kl": 0.5, "x/score": 1e-3}),
        ('INFO {"reward": 0.5, "batch": 4, "inner": {"reward": 9}, "len": 3.0}\n', {"reward": 0.5, "len": 3.0}),
        ("{'policy_loss': 0.5, 'kl': 0.25, 'entropy': 1.5, 'grad_no", {"policy_loss": 0.5, "entropy": 1.5}),
    ],
    ids=["tensors", "texts", "JSON in prose", "cut"],
)
def test_a_dict_of_three_numbers(tmp_path, text, values):
    assert read(tmp_path / "out.txt", text)[0][1].items() >= values.items()


@pytest.mark.parametrize(
    "text",
    [
        "{'num_generations': 8, 'beta': 0.04, 'learning_rate': 1e-6}\n",
        "Step 3 of 5: downloading 12 files, 3.5 MB, 2 left\n",
        '{"step": 1, "prompt": "a", "reward": 0.5, "score": 1.0}\n',
        "{'step': 1, 'prompt': 'a', 'reward': 0.5, 'score': 1.0}\n",
        "version: 1.0, python: 3.11, step: two\n",
        "## Step 1\nSet the loss: 0.5\n## Step 2\nWait.\n",
    ],
)
def test_text_without_numbers_of_a_training(tmp_path, text):
    (tmp_path / "out.txt").write_text(text)
    assert kind_of(tmp_path / "out.txt") is None


def test_options_that_a_loop_prints_before_its_steps_are_settings(tmp_path):
    steps = "".join(f"Step {n} | loss: 0.1 | reward: 0.{n}\n" for n in range(1, 6))
    path = tmp_path / "out.txt"
    path.write_text(f"Run config: K=10 lr=5.0e-06 T=0.80 kl_coef=0.06\n{steps}")
    with open_any([str(path)], trainer=None, options=ConvertOptions(), tell=print, logs_alone=True) as run:
        assert {one.title: (one.name, one.value) for one in run.metadata.settings} == {
            "learning rate": ("lr", 5e-6),
            "KL coefficient": ("kl_coef", 0.06),
            "temperature": ("temperature", 0.8),
        }


def test_what_names_are_taken_for_is_said(tmp_path):
    (tmp_path / "out.txt").write_text("Step 3 | avg_reward=0.5 | kl_div=0.25 | speed=9.5\n" * 2)
    with open_any(
        [str(tmp_path / "out.txt")], trainer=None, options=ConvertOptions(), tell=print, logs_alone=True
    ) as run:
        assert any("avg_reward as reward, kl_div as KL" in sentence for sentence in run.notes.sentences)


def test_a_loss_of_a_loop_that_is_infinite_is_named(tmp_path):
    """A fact of one step needs one step, whatever the loop calls its loss."""
    lines = [f"epoch: 0|step: {n}|act_loss: {loss}|value_loss: 0.5" for n, loss in ((7, 0.5), (8, "inf"), (9, "inf"))]
    (tmp_path / "out.txt").write_text("\n".join(lines))
    finding = next(one for one in rolloutdoctor.check(tmp_path / "out.txt").findings if one.code == "RDM003")
    assert "act_loss" in finding.headline
    assert "step 8" in finding.headline


def test_every_generic_name_has_one_quantity():
    names = [name for spellings in SPELLINGS.values() for name in spellings]
    assert len(names) == len({*names})
    assert {*SPELLINGS} <= {*BY_NAME}
    assert taken_for(names).keys() == {*names}


SUMMARY = """\
wandb: Run history:
wandb:        train/kl ▁▂█
wandb: Run summary:
wandb: train/global_step 12
wandb:          train/kl 0.5
wandb:        train/loss -0.25
wandb:      train/reward 1.5
wandb: You can sync this run later
"""


def test_the_summary_of_wandb_is_the_last_step(tmp_path):
    values, told, _ = read(tmp_path / "out.txt", SUMMARY)
    assert values == {12: {"kl": 0.5, "loss": -0.25, "reward": 1.5}}
    assert "last step alone" in told[0]


def test_a_nul_byte_is_one_more_control_character(tmp_path):
    text = b"NCCL said\0 something\nstep:1 - actor/pg_loss:0.5 - critic/score/mean:1.0\n"
    assert read(tmp_path / "out.txt", text)[0] == {1: {"actor/pg_loss": 0.5, "critic/score/mean": 1.0}}


@pytest.mark.parametrize("broken", ['{"step": 2, "lo', "...", "# and so on"])
def test_a_broken_line_of_json_is_one_line(tmp_path, broken):
    rows = [json.dumps({"step": step, "loss": 0.5, "kl": 0.1}) for step in (1, 3)]
    values, told, _ = read(tmp_path / "log.jsonl", f"{rows[0]}\n{broken}\n{rows[1]}\n")
    assert sorted(values) == [1, 3]
    assert told == [f"{tmp_path}/log.jsonl: 1 line is not a complete JSON object, and left out (line 2)"]


def test_of_a_line_of_json_that_was_cut_the_whole_pairs_are_read(tmp_path):
    text = '{"step": 1, "loss": 0.5, "kl": 0.1}\n{"step": 2, "loss": 0.25, "reward": [0, 1], "kl": 0.12, "lr": 1e-'
    values, told, _ = read(tmp_path / "log.jsonl", f"{text}\n")
    assert values[2] == {"loss": 0.25, "kl": 0.12}
    assert told == [
        f"{tmp_path}/log.jsonl: 1 line is not a complete JSON object, and read up to where it is cut off (line 2)"
    ]


@pytest.mark.parametrize(("whole", "step"), [((1,), 2), ((10, 20), 30)])
def test_a_step_behind_the_cut_of_the_last_line_is_the_next(tmp_path, whole, step):
    rows = [json.dumps({"loss": 0.5, "kl": 0.1, "step": number}) for number in whole]
    values, told, _ = read(tmp_path / "log.jsonl", "\n".join([*rows, '{"loss": 0.25, "kl": 0.5, "st\n']))
    assert values[step] == {"loss": 0.25, "kl": 0.5}
    assert f"its step was cut off, and is taken to be {step}" in told[0]


def test_a_line_without_its_step_is_left_out_where_others_follow(tmp_path):
    rows = [json.dumps({"loss": 0.5, "kl": 0.1, "step": number}) for number in (1, 10)]
    values, told, _ = read(tmp_path / "log.jsonl", f'{rows[0]}\n{{"loss": 0.25, "kl": 0.5, "st\n{rows[1]}\n')
    assert sorted(values) == [1, 10]
    assert told == [f"{tmp_path}/log.jsonl: 1 line is not a complete JSON object, and left out (line 2)"]


def test_of_a_list_of_numbers_the_mean_is_read(tmp_path):
    rows = [{"step": step, "loss": 0.5, "reward": [0.0, 1.0, None, 0.5]} for step in (1, 2)]
    values, told, _ = read(tmp_path / "log.jsonl", "\n".join(map(json.dumps, rows)))
    assert values[2] == {"loss": 0.5, "reward": 0.5, "reward_std": 0.5}
    assert told == [
        f"{tmp_path}/log.jsonl, line 1: reward is a list: its mean is read, and its deviation as reward_std"
    ]


def test_numbers_of_one_step_a_line_are_a_log_and_of_several_are_rollouts(tmp_path):
    rows = [{"step": step, "reward": 0.5, "valid": 1.0, "answer_reward": 0.25} for step in (1, 2, 3)]
    assert read(tmp_path / "log.jsonl", "\n".join(map(json.dumps, rows)))[0][3]["answer_reward"] == 0.25
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row | {"step": 1}) for row in rows))
    assert kind_of(tmp_path / "rows.jsonl") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            " Step Reward_pct        Loss\n    0      0.78% -108.020218\n    1       50%  128.5\n",
            {"Reward_pct": 0.5, "Loss": 128.5},
        ),
        (
            "{'train_runtime': 9.5, 'reward': 0.5, 'reward_std': 0.0, 'kl': 0.0, 'epoch': 0.8}\n",
            {"reward": 0.5, "reward_std": 0.0},
        ),
        (
            "[Step 1] Loss = -76.5 - Avg Reward = 0.25\nsample → 'fall' (reward=1.000)\nreward: 1.0\n",
            {"avg_reward": 0.25, "loss": -76.5},
        ),
    ],
    ids=["a percentage, one space apart", "a summary alone", "a response below its step"],
)
def test_numbers_and_no_others(text, expected, tmp_path):
    *_, last = read(tmp_path / "out.txt", text)[0].values()
    assert expected.items() <= last.items()
    assert "reward" not in last or "reward" in expected


def test_steps_in_the_text_of_responses_are_none_of_the_training(tmp_path):
    text = "".join(
        f"[Step {step}/50] loss=0.5 reward_avg=0.25\nStep 1: reward = 3, score = 4\n"
        if step == 20
        else f"[Step {step}/50] loss=0.5 reward_avg=0.25\n"
        for step in range(1, 51)
    )
    values = read(tmp_path / "out.txt", text)[0]
    assert sorted(values) == [*range(1, 51)]
    assert {name for row in values.values() for name in row} == {"loss", "reward_avg"}


def test_lists_of_numbers_by_name(tmp_path):
    columns = {"rewards": [0.5, 1.5], "kl_div": [0.1, 0.2], "config": {"lr": 1}}
    values, told, _ = read(tmp_path / "history.json", json.dumps(columns))
    assert values == {1: {"rewards": 0.5, "kl_div": 0.1}, 2: {"rewards": 1.5, "kl_div": 0.2}}
    assert "counted from 1" in told[0]
    columns["iteration"] = [10, 20]
    assert sorted(read(tmp_path / "history.json", json.dumps(columns))[0]) == [10, 20]


def test_a_list_alone_is_of_what_the_file_is_called_after(tmp_path):
    path = tmp_path / "mean_rewards.json"
    path.write_text(json.dumps([0.5 + 0.01 * n for n in range(30)]))
    values, _, _ = read(path)
    assert values[30] == {"mean_rewards": pytest.approx(0.79)}
    assert kind_of(path.rename(tmp_path / "points.json")) is None


@pytest.mark.parametrize(
    ("line", "logged"),
    [
        ("Step {} | reward: 0.5 | clip_frac: 12.5%", {"reward": 0.5, "clip_frac": 0.125}),
        ("Iter {}: loss 0.1, reward 0.5, (rewards=4.27s, step_time=30ms)", {"loss": 0.1, "reward": 0.5}),
        ("Step {} | mean_return=0.5 | std=1.8 | loss=0.1", {"mean_return": 0.5, "std": 1.8, "loss": 0.1}),
    ],
)
def test_units_behind_numbers(tmp_path, line, logged):
    """A percentage is a share, and seconds are no reward."""
    values, _, _ = read(tmp_path / "log.txt", "".join(f"{line.format(n)}\n" for n in range(1, 5)))
    assert [{name: row[name] for name in logged} for row in values.values()] == [logged] * 4
    assert "rewards" not in values[1]


def test_lists_by_what_the_environment_counts(tmp_path):
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps({"timesteps": [80, 160, 240], "mean_reward": [0.1, 0.2, 0.3], "kl": [0.0, 0.1, 0.2]}))
    values, told, _ = read(path)
    assert [*values] == [80, 160, 240]
    assert not told


RANGES = [
    "| Steps | Mean reward | KL |\n|---|---|---|\n"
    + "".join(f"| {n}-{n + 9} | 0.5 | 0.01 |\n" for n in range(1, 40, 10)),
    "".join(f"Steps {n}-{n + 9} | reward: 0.5 | kl: 0.01\n" for n in range(1, 40, 10)),
]


@pytest.mark.parametrize("text", RANGES)
def test_means_of_a_range_are_of_its_last_step(tmp_path, text):
    path = tmp_path / "log.txt"
    path.write_text(text)
    assert next(vital for vital in rolloutdoctor.check(path).vitals if vital.name == "reward").steps == (10, 20, 30, 40)


def test_a_list_under_one_name(tmp_path):
    rows = [{"iteration": n, "mean_reward": n / 2, "kl_div": 0.1} for n in (1, 2)]
    assert read(tmp_path / "history.json", json.dumps({"history": rows, "seed": 1}, indent=1))[0][2]["mean_reward"] == 1


def lines(steps, *, functions=("a", "b"), start=0.0, reward=0.5):
    """Lines of TRL without a step."""
    return "".join(
        json.dumps(
            {
                "loss": 0.1,
                "reward": reward,
                "epoch": start + n / 10,
                **{f"rewards/{name}/mean": 0.5 for name in functions},
            }
        ).replace('"', "'")
        + "\n"
        for n in range(1, steps + 1)
    )


@pytest.mark.parametrize(
    "text",
    [
        lines(2) + lines(5, functions=("c", "d"), start=0.2),
        lines(3, reward=0.25) + lines(5),
        "".join(
            f"step:{n} - actor/pg_loss:0.{n}5 - critic/score/mean:0.{k}\n"
            for k, m in ((1, 3), (2, 6))
            for n in range(1, m)
        ),
        "".join(f"{{'loss': 2.{n}, 'learning_rate': 1e-4, 'epoch': {n / 3:.2f}}}\n" for n in (1, 2, 3)) + lines(5),
    ],
    ids=["other reward functions", "an epoch that begins anew", "a step that begins anew", "SFT before"],
)
def test_several_runs_one_after_another(tmp_path, text):
    path = tmp_path / "out.txt"
    values, told, notes = read(path, text)
    assert (notes.runs, len(values)) == (2, 5)
    assert "2 runs one after another" in told[0]
    assert "the 2nd is read" in told[0]


def test_lines_of_ppo_between_other_trainings_are_a_run_of_their_own(tmp_path):
    """Of a reward model, PPO and DPO, whose lines have no step; the epoch goes on where the next one begins."""
    trainings = [
        "{{'loss': '2.{n}', 'min_reward': '0', 'max_reward': '1', 'accuracy': '1', 'margin': '0', 'epoch': '0.{n}'}}\n",
        "{{'objective/kl': '0', 'objective/rlhf_reward': '-1.{n}', 'lr': '3e-6', 'episode': {n}, 'epoch': '0.0{n}'}}\n",
        "{{'loss': '0.{n}', 'rewards/chosen': '0.5', 'rewards/rejected': '0.1', 'epoch': '0.{n}'}}\n",
    ]
    path = tmp_path / "out.txt"
    _, told, _ = read(path, "".join(line.format(n=n) for line in trainings for n in range(2, 6)))
    assert "3 runs one after another, of 4 lines (reward model), 4 lines (PPO), 4 lines (preferences)" in told[0]
    assert [values["objective/rlhf_reward"] for values in read(path / "2")[0].values()] == [-1.2, -1.3, -1.4, -1.5]


def updates(first, second, epoch):
    """The lines of two updates on the same responses: the rewards are logged with one of them."""
    return "".join(
        f"{{'loss': 0.5, 'learning_rate': 1e-6, '{name}': 0.25, 'epoch': {epoch}}}\n" for name in (first, second)
    )


@pytest.mark.parametrize(
    "text",
    [
        lines(3) + lines(3, start=0.3),
        lines(3) + lines(3, functions=("a", "b", "c"), start=0.3),
        "".join(f"step:{n} - actor/pg_loss:0.{n}5 - critic/score/mean:0.1\n" for n in (1, 2, 3, 3, 4)),
        "step:0 - val-core/acc:0.5\n" + "".join(f"step:{n} - actor/pg_loss:0.{n}5\n" for n in (1, 2)),
        "".join(updates("reward", "grad_norm", epoch) for epoch in ("0.01", "0.01", "0.02")),
        updates("reward", "kl", "0.1") + updates("reward", "kl", "0.2") + updates("kl", "reward", "0.15"),
    ],
    ids=[
        "a run",
        "a function more",
        "a run that resumed",
        "an evaluation first",
        "two updates in an epoch of two digits",
        "resumed at a second update",
    ],
)
def test_one_run_is_one(tmp_path, text):
    assert read(tmp_path / "out.txt", text)[2].runs == 1


def test_each_run_of_a_text_has_its_number(tmp_path):
    (tmp_path / "out.txt").write_text(lines(3, reward=0.25) + lines(5))
    assert len(read(tmp_path / "out.txt" / "1")[0]) == 3
    assert len(read(tmp_path / "out.txt" / "2")[0]) == 5
    assert [run.paths for run in find_runs([str(tmp_path / "out.txt")])] == [
        (f"{tmp_path}/out.txt/1",),
        (f"{tmp_path}/out.txt/2",),
    ]
    with pytest.raises(InputError, match="no run 3 is there; it holds 2"):
        read(tmp_path / "out.txt" / "3")


def test_a_log_of_means_is_not_mapped_to_rollouts(tmp_path):
    """Its rows are steps: read as responses they would be called free of faults."""
    rows = [{"n": n, "loss": 0.5, "lr": 1e-6, "reward": n / 10} for n in range(1, 5)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ConvertOptions(columns={"step": "n"})
    with (
        pytest.raises(InputError, match="logged metrics, not rollouts"),
        open_any([str(tmp_path / "mine.jsonl")], trainer=None, options=options, tell=print),
    ):
        pass
    rows = [{**row, "prompt_id": f"p{n % 2}"} for n, row in enumerate(rows)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ConvertOptions(columns={"step": "n", "group_id": "prompt_id"})
    with open_any([str(tmp_path / "mine.jsonl")], trainer=None, options=options, tell=print) as run:
        assert run.rows == 4


def test_names_of_a_development_release_are_those_in_another_order():
    names = ["reward", "kl", "num_tokens", "clipped_completions_ratio", "mean_completion_length"]
    quantities = understood(names, "trl")
    assert quantities["truncated_share"][0] == "clipped_completions_ratio"
    assert quantities["response_length"][0] == "mean_completion_length"
    assert understood([*names, "completions/clipped_ratio"], "trl")["truncated_share"][0] == "completions/clipped_ratio"
    assert "truncated_share" not in understood([*names[:3], "clipped_ratio"], "trl"), "two words say too little"


TABLES = """\
Logging to ./runs/PPO_1
-----------------------------
| time/              |      |
|    fps             | 1089 |
|    iterations      | 1    |
|    total_timesteps | 2048 |
-----------------------------
-----------------------------------------
| rollout/                |             |
|    ep_len_mean          | 261         |
|    ep_rew_mean          | 1.5         |
| time/                   |             |
|    iterations           | 2           |
|    total_timesteps      | 4096        |
| train/                  |             |
|    approx_kl            | 0.008046303 |
|    entropy_loss         | -1.38       |
|    learning_rate        | 0.0003      |
|    loss                 | -0.00948    |
-----------------------------------------
-----------------------------------------
| rollout/ep_rew_mean     | 1.25        |
| time/total_timesteps    | 6144        |
| train/loss              | 0.5         |
-----------------------------------------
"""


def test_tables_of_stable_baselines_with_sections_and_without(tmp_path):
    path = tmp_path / "ppo.txt"
    path.write_text(TABLES)
    assert kind_of(path) == "tables of names and numbers"
    logged = {step: values for step, _, values in read_log(Source.of(str(path)))}
    assert sorted(logged) == [4096, 6144]
    assert logged[4096]["rollout/ep_rew_mean"] == 1.5
    assert logged[4096]["train/loss"] == -0.00948
    assert logged[6144] == {"rollout/ep_rew_mean": 1.25, "train/loss": 0.5}


@pytest.mark.parametrize(
    "table", ["| GRPO reward | 0.5 |\n| SFT loss | 0.25 |\n| KL | 0.1 |\n", "-" * 30 + "\n| loss | 1 |\n"]
)
def test_a_table_of_results_is_no_log(table, tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"# Results\n\n| what | value |\n|--|--|\n{table}")
    assert kind_of(path) is None


def test_a_summary_of_wandb_is_what_stands_below_its_head(tmp_path):
    before = "wandb: reward 9.0\nwandb: Run history:\nwandb:   train/loss \u2581\u2582\n"
    summary = "wandb: Run summary:\nwandb:   train/global_step 30\nwandb:   train/loss 0.5\nwandb:   train/kl 0.25\n"
    path = tmp_path / "out.log"
    path.write_text(f"{before}{summary}wandb:   train/reward 0.75\nwandb:\n")
    assert [*read_log(Source.of(str(path)))] == [(30, "train", {"loss": 0.5, "kl": 0.25, "reward": 0.75})]


@pytest.mark.parametrize(
    ("first", "row"),
    [
        ({"iteration": 0, "accuracy": 0.5, "total": 150}, {"iteration": 3, "mean_reward": 0.5, "loss": 0.25}),
        ({"lr": 1e-6, "model": {"name": "m"}}, {"step": 3, "mean_reward": 0.5, "loss": 0.25}),
        (None, {"actor/pg_loss": 0.25, "critic/rewards/mean": 0.5, "system/step": 3}),
    ],
    ids=["an evaluation first", "a configuration first", "the step of ROLL"],
)
def test_json_lines_whose_step_or_first_line_is_another(tmp_path, first, row):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in (first, row, row | {"loss": 0.5}) if each))
    assert "JSON Lines" in (kind_of(path) or "")
    logged = {step: values for step, _, values in read_log(Source.of(str(path)))}
    assert {name: value for name, value in row.items() if "reward" in name}.items() <= logged[3].items()


def test_a_rollout_on_the_first_line_is_no_log(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    rollout = {"step": 1, "prompt": "p", "completion": "c", "reward": 0.5}
    path.write_text(f"{json.dumps(rollout)}\n{json.dumps({'step': 1, 'mean_reward': 0.5, 'loss': 0.1})}\n")
    assert kind_of(path) is None


def test_a_line_of_an_epoch_and_of_a_step_are_not_mixed(tmp_path):
    """A bar of Lightning with a line of its checkpoint behind it."""
    shown = "loss={loss}, avg_ep_reward={reward}"
    text = "".join(
        f"Epoch {epoch}: : 0it [0:01, ?it/s, {shown.format(loss=epoch, reward=epoch / 10)}]"
        + (f"Epoch {epoch}, global step {8 * epoch}: 'avg_ep_reward' was not in top 1" if epoch % 3 == 0 else "")
        + "\n"
        for epoch in range(30)
    )
    values, _, notes = read(tmp_path / "out.log", text)
    assert notes.runs == 1
    assert values[10] == {"loss": 10.0, "avg_ep_reward": 1.0}
    assert 24 not in values or values[24]["loss"] == 24.0


def test_episodes_of_a_loop_by_their_short_name(tmp_path):
    text = "".join(
        f"Ep {number:03d} | scenario=a_{number % 3:02d} | mean_ret={-number / 8:.3f} | std=1.5 | loss=0.02 | kl=0.1\n"
        for number in range(12)
    )
    values, _, _ = read(tmp_path / "out.log", text)
    assert values[8] == {"mean_ret": -1.0, "std": 1.5, "loss": 0.02, "kl": 0.1}


def test_rounds_of_a_table(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("accuracy,condition,mean_train_reward,round\n" + "".join(f"0.5,a,0.{n},{n}\n" for n in range(1, 6)))
    values, _, _ = read(path)
    assert values[3]["mean_train_reward"] == 0.3


RESPONSES = "".join(f"{{'format': 1.0, 'correct': {n % 2}.0, 'reward': {n / 7:.2f}}}\n" for n in range(12))


def test_rewards_of_responses_that_nothing_counts_are_no_steps(tmp_path):
    (tmp_path / "out.txt").write_text(RESPONSES)
    assert kind_of(tmp_path / "out.txt") is None
    values, _, _ = read(
        tmp_path / "out.txt", "".join(f"{RESPONSES}step {n}: loss 0.5 reward {n}.5\n" for n in range(4))
    )
    assert [values[n] for n in range(4)] == [{"loss": 0.5, "reward": n + 0.5} for n in range(4)]
    # Their means are of a step.
    values, _, _ = read(tmp_path / "out.txt", RESPONSES.replace("'reward'", "'mean_reward'"))
    assert len(values) == 12


def test_accuracies_of_models_are_no_steps(tmp_path):
    (tmp_path / "out.txt").write_text(
        "".join(f"Model {n}\nCorrect: {n}/100\nAccuracy: {n}.00%\n\n" for n in range(60, 70))
    )
    assert kind_of(tmp_path / "out.txt") is None


def test_the_summary_in_a_document_is_no_step(tmp_path):
    summary = {
        "config": {"lr": 1e-5, "epochs": 2},
        "training": {"total_steps": 936, "final_loss": 0.25, "minutes": 65.5},
    }
    (tmp_path / "log.json").write_text(json.dumps(summary, indent=2))
    assert kind_of(tmp_path / "log.json") is None


@pytest.mark.parametrize("tail", ["", "Accuracy: 90.0%\n", "wandb: Run summary:\nwandb: train/reward 9.5\n"])
def test_rewards_above_their_step(tmp_path, tail):
    above = "".join(f"Average Reward: {n}.5\nStep {n}/40 | loss: 0.{n} | lr: 0.1\n" for n in range(1, 6))
    values, _, _ = read(tmp_path / "out.txt", f"Accuracy: 23.0%\nStep 3: what is left\n{above}{tail}")
    assert {n: row["average_reward"] for n, row in values.items()} == {n: n + 0.5 for n in range(1, 6)}
    assert {row["loss"] for row in values.values()} == {0.1, 0.2, 0.3, 0.4, 0.5}


def test_rewards_below_their_step(tmp_path):
    below = "".join(f"Step {n}/40 | loss: 0.{n} | lr: 0.1\nAverage Reward: {n}.5\n" for n in range(1, 6))
    for text in (below, f"Average Reward: 0.5\n{below}", below.rpartition("Average")[0]):
        values, _, _ = read(tmp_path / "out.txt", text)
        assert [values[n]["average_reward"] for n in range(1, 5)] == [1.5, 2.5, 3.5, 4.5]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("[Epoch 0.{n:02d}]  loss=0.5  grad=1.5  lr=1.0e-06  reward={n}.25±0.125", {"reward": 0.25, "grad": 1.5}),
        (
            "Iteration: \t {n}\nLoss:  \t 0.5\nMeanRew: \t {n}.25 +- 0.5\nMeanLen: \t 150.0",
            {"mean_rew": 0.25, "mean_len": 150},
        ),
        ("Step {n}\n  reward/mean ...... {n}.25\n  kl ....... 0.5", {"reward/mean": 0.25, "kl": 0.5}),
        ("Step {n} is done. Average reward: {n}.25; policy loss: 0.5", {"average_reward": 0.25, "policy_loss": 0.5}),
        ("step: {n}, loss: 0.5, rewards: tensor([{n}.0, {n}.5])", {"rewards": 0.25, "loss": 0.5}),
    ],
    ids=["a deviation and a share of an epoch", "tabs and humps", "dots", "a sentence before", "a tensor"],
)
def test_how_loops_print(tmp_path, line, names):
    values, _, _ = read(tmp_path / "out.txt", "".join(f"{line.format(n=n)}\n" for n in range(1, 25)))
    of_reward = next(iter(names))
    for n in range(1, 25):
        assert values[n].items() >= {**names, of_reward: n + names[of_reward]}.items()


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("bars", [25_000, 12_000], ids=["most of the beginning", "less than half of it"])
def test_numbers_behind_bars_that_fill_the_beginning(tmp_path, bars):
    drawn = "".join(f"\r 0%|          | {n}/30290 [00:01<9:00]" for n in range(bars))
    head = "" if bars == 25_000 else "loading a shard of the model\n" * 40_000
    rows = "".join(f"\n{{'loss': 0.{n}, 'reward': 0.5, 'epoch': {n}.0}}" for n in range(1, 9))
    path = tmp_path / "slurm.out"
    path.write_text(f"Job information\n{head}{drawn}{drawn}{rows}\n", newline="")
    assert (kind_of(path) is not None) == (bars == 25_000)


@pytest.mark.parametrize("updates", [2, 3])
def test_updates_rarer_than_a_tenth_of_the_steps(tmp_path, updates):
    steps = "".join(f"Step {n}: 2 candidates\n  Rewards: [0.{n % 9}, 0.5]\n" for n in range(1, 100))
    lines = "".join(f"GRPO step {n}0/500 | loss: 0.0 | mean_reward: 0.{n} | KL: 0.01\n" for n in range(1, updates + 1))
    path = tmp_path / "log.txt"
    path.write_text(steps + lines)
    logged = [row for _, _, row in read_log(Source.of(str(path)), LogNotes())]
    assert sum("kl" in row for row in logged) == (updates if updates == 3 else 0)


def test_dicts_without_a_step_among_those_with_one(tmp_path):
    """A line that lost its step has the names of the others; what has other names is of a response."""
    lines = [f"{{'step': {step}, 'loss': 0.5, 'mean_reward': 0.{step}, 'kl_mean': 0.01}}\n" for step in range(1, 6)]
    lines[3] = lines[3].replace("'step': 4, ", "")
    lines.insert(2, "{'format_mean': 1.0, 'accuracy_mean': 0.0, 'length_mean': 7}\n")
    (tmp_path / "log.txt").write_text("begin\n" + "".join(lines))
    notes = LogNotes()
    entries = list(read_log(Source.of(str(tmp_path / "log.txt")), notes))
    assert [(step, values["mean_reward"]) for step, _, values in entries] == [(step, step / 10) for step in range(1, 6)]
    assert notes.begins == (0, 2)


@pytest.mark.parametrize("lines", [1, 3])
def test_lines_of_updates_that_nothing_counts_are_numbered(tmp_path, lines):
    path = tmp_path / "log.txt"
    path.write_text("".join(f"loss: 0.0{n}, reward: 0.{n}, kl: 0.9, grad_norm: 1.2\n" for n in range(1, lines + 1)))
    assert {step: row["reward"] for step, _, row in read_log(Source.of(str(path)))} == {
        n: n / 10 for n in range(1, lines + 1)
    }
    path.write_text("reward: 0.5, format: 1, answer: 3\n" * lines)
    assert kind_of(path) is None


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        ("  loss=0.00{n} kl=0.00{n} ent=0.{n}", True),
        # Two numbers are as well of an evaluation, and a second loss is of something else.
        ("  loss=0.00{n} acc=0.{n}", False),
        ("  kl=0.00{n} ent=0.{n} len=12{n}", False),
    ],
)
def test_a_line_of_an_update_below_the_reward_of_its_step(tmp_path, line, taken):
    lines = "".join(f"[step {10 * n}] rollouts=64 mean_reward=0.{n}\n{line.format(n=n)}\n" for n in range(1, 9))
    values, _, _ = read(tmp_path / "out.log", lines)
    assert [*values] == [*range(10, 90, 10)]
    assert [row.get("kl") for row in values.values()] == [0.001 * n if taken else None for n in range(1, 9)]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("step {n} | reward 0.{n} | reply_len 3{n}", "reply_len"),
        ("step={n} stage=base reward=0.{n} gen_len=3{n}", "gen_len"),
    ],
)
def test_a_value_in_words_is_no_part_of_the_name_behind_it(tmp_path, line, name):
    path = tmp_path / "out.log"
    values, _, _ = read(path, "".join(f"{line.format(n=n)}\n" for n in range(10, 19)))
    assert values[12] == {"reward": 0.12, name: 312.0}
    assert metric_quantities(values[12]) == {"reward": "reward", name: "response_length"}
