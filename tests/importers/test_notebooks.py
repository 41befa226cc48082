"""Notebooks: their outputs are read, in order, and never their Markdown or code."""

import json

import pytest

import rolloutdoctor as rd
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.table import kind_of, read_log
from rolloutdoctor.importers.reading.notebooks import read_notebook
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.opening.stated.calls import read_code
from rolloutdoctor.opening.stated.options import ReadLog
from rolloutdoctor.opening.stated.printed import read_printed
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.views.verdict import verdict


def table(rows, names=("Training Loss", "reward", "kl"), over=8):
    head = "".join(f"<th>{name}</th>" for name in ("Step", *names))
    body = "".join(
        f"<tr><td>{n}</td>{''.join(f'<td>{n / over + k}</td>' for k in range(len(names)))}</tr>" for n in rows
    )
    return f"<table border='1'>\n<thead>\n<tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"


def code(source, *outputs):
    return {"cell_type": "code", "source": source.splitlines(keepends=True), "outputs": list(outputs), "metadata": {}}


def markdown(text):
    return {"cell_type": "markdown", "source": text}


def html(text):
    return {"output_type": "display_data", "data": {"text/html": text.splitlines(keepends=True), "text/plain": "<x>"}}


def printed(text):
    return {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}


def notebook(path, *cells, **options):
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, **options))
    return path


def read(path):
    told, values = [], {}
    notes = LogNotes(told.append)
    for step, _, row in read_log(Source.of(str(path)), notes):
        values.setdefault(step, {}).update(row)
    return values, told, notes


EXAMPLE = markdown("You will see\n\n| Step | Training Loss | reward | kl | x | y |\n|--|\n| 1 | 9 | 9 | 9 | 9 | 9 |\n")
DICTS = "".join(f"{{'loss': 0.5, 'reward': {n}, 'epoch': {n / 10}}}\n" for n in range(1, 5))


@pytest.mark.parametrize("options", [{}, {"indent": 1}], ids=["on one line", "with line breaks"])
@pytest.mark.parametrize("name", ["a.ipynb", "copy.json"])
def test_the_table_of_an_output_and_no_example(tmp_path, options, name):
    path = notebook(tmp_path / name, EXAMPLE, code("train()", html(table(range(1, 8)))), **options)
    assert kind_of(path) == "the outputs of a notebook"
    values, told, _ = read(path)
    assert sorted(values) == [*range(1, 8)]
    assert values[4] == {"loss": 0.5, "reward": 1.5, "kl": 2.5}
    assert told == []


def test_a_table_goes_before_the_summary_below_it(tmp_path):
    summary = printed("TrainOutput(global_step=20, metrics={'train_runtime': 9.5, 'train_loss': 1.75, 'epoch': 1.0})\n")
    path = notebook(tmp_path / "a.ipynb", code("train()", html(table((10, 20), ["Training Loss"])), summary))
    assert read(path)[0] == {10: {"loss": 1.25}, 20: {"loss": 2.5}}


def test_what_a_cell_prints(tmp_path):
    path = notebook(tmp_path / "a.ipynb", code("print('Step 9 | loss=1 | reward=2')", printed(DICTS)), EXAMPLE)
    assert [values["reward"] for values in read(path)[0].values()] == [1, 2, 3, 4]


@pytest.mark.parametrize("head", ["Step {} | reward: 0.{}", "Batch {}: mean_reward=0.{}", "  Batch: mean_reward=0.{1}"])
def test_lines_of_rewards_go_before_a_table_of_losses(tmp_path, head):
    rewards = "".join(head.format(n, n) + "\n" for n in range(1, 7))
    losses = html(table(range(1, 30), ["Training Loss"]))
    values, _, _ = read(notebook(tmp_path / "a.ipynb", code("grpo.train()", losses, printed(rewards))))
    assert [sorted(row.values()) for row in values.values()] == [[n / 10] for n in range(1, 7)]


def test_dicts_go_before_lines_of_every_response(tmp_path):
    chatter = "".join(f"Step 1: reward 0.{n}, loss 0.5\n" for n in range(9))
    assert len(read(notebook(tmp_path / "a.ipynb", code("", printed(chatter + DICTS))))[0]) == 4


def test_two_trainings_are_two_runs(tmp_path):
    path = notebook(
        tmp_path / "a.ipynb",
        code("sft.train()", html(table(range(1, 30), ["Training Loss"]))),
        code("grpo.train()", html(table(range(1, 8)))),
    )
    values, told, notes = read(path)
    assert (len(values), notes.runs) == (7, 2)
    assert "29 lines (losses alone), 7 lines (rewards): the 2nd is read" in told[0]


GRPO = "from trl import GRPOConfig, GRPOTrainer\nt = GRPOTrainer(args=GRPOConfig(num_generations={}))\nt.train()"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([*range(1, 11)], [*range(5, 605, 5)]),
        ([*range(2, 22, 2)], [*range(10, 210, 10)]),
        ([1, *range(5, 25, 5)], [*range(5, 105, 5)]),
    ],
    ids=["every step", "every second step", "the first step, too"],
)
def test_a_short_trial_and_the_training_below_it_are_two_runs(tmp_path, first, second):
    cells = [code(GRPO.format(2), html(table(first, over=16))), code(GRPO.format(8), html(table(second)))]
    path = notebook(tmp_path / "a.ipynb", *cells)
    values, told, notes = read(path)
    assert (sorted(values), notes.runs) == (second, 2)
    assert not any("resumed" in sentence for sentence in told)
    for name, of_group in ((str(path), 8), (f"{path}/1", 2)):
        with open_any([name], trainer=None, options=ConvertOptions(), tell=print, logs_alone=True) as run:
            assert run.metadata.config["num_generations"] == of_group


@pytest.mark.parametrize("second", [[*range(9, 41)], [*range(2, 12, 2)]], ids=["resumed", "shown again"])
def test_a_table_that_goes_on_or_is_shown_again_is_of_the_same_run(tmp_path, second):
    path = notebook(tmp_path / "a.ipynb", code("t.train()", html(table(range(1, 11))), html(table(second))))
    assert read(path)[2].runs == 1


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ([EXAMPLE, code("train()")], "without outputs, which were cleared"),
        ([EXAMPLE, code("x", printed("hello\n"))], "no output of the notebook has numbers of a training"),
    ],
)
def test_a_notebook_without_a_log_says_so(tmp_path, cells, why):
    with pytest.raises(InputError, match=why):
        read(notebook(tmp_path / "a.ipynb", *cells))


@pytest.mark.parametrize(
    "body",
    [
        '{"cells": [1, {"cell_type": 2}]',
        '{"cells": {"cell_type": []}}',
        '{"cells": [{"cell_type": "code", "outputs": 3}]}',
    ],
)
def test_a_damaged_notebook_is_one_sentence(tmp_path, body):
    (tmp_path / "a.ipynb").write_text(body)
    with pytest.raises(InputError):
        read(tmp_path / "a.ipynb")


CONFIG = """\
%%capture
!pip install unsloth "trl==0.19.1"
from trl import GRPOConfig
max_seq_length = 1024
prompt_length = 256
training_args = GRPOConfig(
    learning_rate = 5e-6, beta = 0.02, num_generations = 4,
    max_completion_length = max_seq_length - prompt_length,
    output_dir = os.environ["X"], scale_rewards = touch("was-run"),
)
"""


@pytest.mark.parametrize(("imported", "trainer"), [("", "trl"), ("from unsloth import FastLanguageModel\n", "unsloth")])
def test_the_options_in_the_code_are_literals(tmp_path, imported, trainer):
    shown = table(range(1, 8), ["Training Loss", "reward", "completion_length", "kl"])
    path = notebook(tmp_path / "a.ipynb", code(imported + "x = 1"), code(CONFIG), code("", html(shown)))
    (stated,) = read_code(read_notebook(path), "code of a.ipynb")
    assert (stated.trainer, stated.version) == (trainer, "0.19.1")
    assert stated.values == {"learning_rate": 5e-6, "beta": 0.02, "num_generations": 4, "max_completion_length": 768}
    with open_any([str(path)], trainer=None, options=ConvertOptions(), tell=print, logs_alone=True) as run:
        assert run.metadata.config["beta"] == 0.02
        assert run.metadata.origins["beta"] == "code of a.ipynb"


OWN = """\
LR = 1e-6
class Config:
    group_size: int = 8
def loss(ratio, eps_clip=0.2, kl_coef=0.1): ...
parser.add_argument("--max-new-tokens", default=512, type=int)
train({"kl_coef": 0.04}, temperature=0.7)
sample(temperature=1.0)
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (OWN, {"LR": 1e-6, "group_size": 8, "kl_coef": 0.04, "eps_clip": 0.2, "max_new_tokens": 512}),
        ("LR = 1e-6\n", {}),
        ("LR = 1e-6\nepsilon = 1e-8\n", {}),
        ("LR = float(x)\nGROUP_SIZE = 8\n", {}),
        # Where nothing is said of another policy, a beta is of a replay buffer, or of an optimizer.
        ("lr = 1e-4\ngamma = 0.99\nbeta = 0.4\n", {"lr": 1e-4, "gamma": 0.99}),
        ("lr = 1e-4\ngamma = 0.99\nbeta = 0.4\nkl = p - q\n", {"lr": 1e-4, "gamma": 0.99, "beta": 0.4}),
    ],
)
def test_settings_of_a_loop_of_ones_own_are_read(tmp_path, source, expected):
    lines = printed("".join(f"Step {n} | loss: 0.1 | reward: 0.{n}\n" for n in range(1, 6)))
    path = notebook(tmp_path / "a.ipynb", code(source), code("train()", lines))
    with open_any([str(path)], trainer=None, options=ConvertOptions(), tell=print, logs_alone=True) as run:
        # The two temperatures differ: nobody knows which one counted.
        assert {one.name: one.value for one in run.metadata.settings} == expected


PRINTED = """\
GRPOConfig(
_n_gpu=1,
beta=0.02,
optim=<OptimizerNames.ADAMW: 'adamw_torch'>,
loss_type=grpo,
num_generations=4,
)
"""


@pytest.mark.parametrize(
    "text", [PRINTED, "args: GRPOConfig(_n_gpu=1, beta=0.02, optim=<X.Y: 'adamw_torch'>, num_generations=4)\n"]
)
def test_options_as_they_print_themselves(tmp_path, text):
    (tmp_path / "log.txt").write_text(text + DICTS)
    stated = read_printed(Source.of(str(tmp_path / "log.txt")))[0]
    assert stated.trainer == "trl"
    assert stated.values == {"_n_gpu": 1, "beta": 0.02, "optim": "adamw_torch", "num_generations": 4}


@pytest.mark.parametrize(
    "command",
    [
        "+ python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 x.y=$Z a.b=3",
        "python -m verl.trainer.main_ppo \\\n  algorithm.adv_estimator=grpo \\\n  +a.b=3 actor_rollout_ref.rollout.n=8",
    ],
)
def test_options_of_a_command_line(tmp_path, command):
    (tmp_path / "log.txt").write_text(f"{command}\nstep:1 - actor/pg_loss:0.5 - critic/score/mean:0.5\n")
    (stated,) = read_printed(Source.of(str(tmp_path / "log.txt")))
    assert stated.trainer == "verl"
    assert stated.values == {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": "8", "a.b": "3"}


@pytest.mark.parametrize(
    "text",
    [
        "CONFIG = {'beta': 0.02, 'num_generations': 2 * 2, 'dtype': torch.float16}\nGRPOConfig(**CONFIG, x={'a': y})\n",
        "common = dict(beta=0.02)\nargs = GRPOConfig(num_generations=4, **common)\n",
        "c = {'n': 4, 'other': {'beta': 0.02}}\nGRPOConfig(num_generations=c['n'], beta=c['other']['beta'])",
    ],
    ids=["a dict", "a call of dict", "items of a dict"],
)
def test_options_that_a_dict_holds(tmp_path, text):
    path = notebook(tmp_path / "a.ipynb", code(text), code("", html(table(range(1, 8), ["Training Loss", "reward"]))))
    (stated,) = read_code(read_notebook(path), "code")
    assert stated.values == {"beta": 0.02, "num_generations": 4}


@pytest.mark.parametrize("before", ["", "%%bash\n", "!PYTHONUNBUFFERED=1 "])
def test_options_of_a_command_in_a_cell(tmp_path, before):
    command = f"{before}python3 -m verl.trainer.main_ppo \\\n algorithm.adv_estimator=gae \\\n a.b=3 \\\n"
    path = notebook(tmp_path / "a.ipynb", code(f"{command} actor_rollout_ref.rollout.n=8\n"), code("", "x"))
    (stated,) = read_code(read_notebook(path), "code")
    assert (stated.trainer, stated.origin) == ("verl", "command line in code")
    assert stated.values == {"algorithm.adv_estimator": "gae", "a.b": "3", "actor_rollout_ref.rollout.n": "8"}


@pytest.mark.parametrize(
    "text",
    [
        "[rank0] Namespace(beta=0.02, num_generations=4, scale_rewards='group', f=<function f at 0x7f>)\n",
        "Arguments:\n  beta: 0.02\n  num_generations: 4,\n  scale_rewards = group\n  a b: c\n",
    ],
    ids=["a namespace", "a line an option"],
)
def test_options_as_a_script_prints_them(tmp_path, text):
    (tmp_path / "log.txt").write_text(text + DICTS + "beta: 9\n")
    begins = (0, len(text.splitlines()) + 1)
    stated = read_printed(Source.of(str(tmp_path / "log.txt")), ReadLog(begins=begins))[0]
    assert stated.trainer == "trl"
    assert {name: str(value) for name, value in stated.values.items()} == {
        "beta": "0.02",
        "num_generations": "4",
        "scale_rewards": "group",
    }


def test_a_namespace_of_another_program_states_nothing(tmp_path):
    (tmp_path / "log.txt").write_text("Namespace(beta=0.02, lr=1e-6)\n" + DICTS)
    assert not read_printed(Source.of(str(tmp_path / "log.txt")))


def test_a_release_that_a_list_of_packages_pins(tmp_path):
    (tmp_path / "requirements.txt").write_text("torch==2.6.0\ntrl==0.20.0  # pinned\n")
    (tmp_path / "log.txt").write_text(PRINTED + DICTS)
    with open_any(
        [str(tmp_path / "log.txt")], trainer=None, options=ConvertOptions(), tell=print, logs_alone=True
    ) as run:
        assert run.metadata.trainer_version == "0.20.0"
        assert run.metadata.origins["trainer_version"] == "requirements.txt"


def test_printed_rewards_count_for_more_than_a_table_of_losses(tmp_path):
    """A notebook shows the loss alone in its table, and a callback prints the rest of each step with four digits."""
    steps = range(1, 9)
    lines = [
        f"[Step {n}] loss=0.0001 grad_norm=0.0012 completions/mean_length=1024.0000 completions/clipped_ratio=1.0000 "
        f"rewards/f/mean=0.3000 rewards/f/std=0.0000 reward=0.3000 reward_std=0.0000 kl=0.00{n}2"
        for n in steps
    ]
    shown = html(table(steps, names=("Training Loss",)))
    values, _, _ = read(notebook(tmp_path / "a.ipynb", code("train()", printed("\n".join(lines)), shown)))
    assert {n: row["reward_std"] for n, row in values.items()} == dict.fromkeys(steps, 0.0)
    assert all(row["completions/clipped_ratio"] == 1.0 for row in values.values())


OF_BEFORE = "TrainOutput(global_step=96, training_loss=0.5, metrics={'train_loss': 0.5, 'epoch': 3.0})\n"


@pytest.mark.parametrize(
    ("line", "every"),
    [("Step {n} | reward: 0.{n}", 1), ("[step {n}] reward=0.{n} kl=0.125", 1), ("Step {n}/16, mean reward: 0.{n}", 2)],
)
def test_a_reward_that_is_printed_beside_a_table_of_losses_is_of_its_step(tmp_path, line, every):
    steps = range(1, 17)
    shown = html(table(steps[every - 1 :: every], ["Training Loss"]))
    rewards = printed("\n".join(line.format(n=n) for n in steps))
    before = code("sft.train()", html(table(range(1, 9), ["Training Loss"], over=16)), printed(OF_BEFORE))
    values, _, notes = read(
        notebook(tmp_path / "a.ipynb", before, code("grpo.train()", shown, rewards, printed(OF_BEFORE)))
    )
    assert notes.runs == 1
    assert {n: row.get("loss") for n, row in values.items()} == {n: None if n % every else n / 8 for n in steps}
    assert all(float(f"0.{n}") in row.values() for n, row in values.items())


def test_a_table_of_another_cell_adds_no_loss_to_printed_rewards(tmp_path):
    losses = html(table(range(1, 9), ["Training Loss"]))
    rewards = printed("\n".join(f"Step {n} | reward: 0.{n}" for n in range(1, 9)))
    values, _, _ = read(notebook(tmp_path / "a.ipynb", code("sft.train()", losses), code("loop()", rewards)))
    assert all(row.keys() == {"reward"} for row in values.values())


def test_numbers_of_responses_give_way_to_a_table_of_losses(tmp_path):
    lines = "\n".join(f"step {n // 4 + 1}: response {n}, reward: 0.5, length: 12, kl: 0.1" for n in range(32))
    shown = html(table(range(1, 9), names=("Training Loss",)))
    values, _, _ = read(notebook(tmp_path / "a.ipynb", code("train()", printed(lines), shown)))
    assert all(row.keys() == {"loss"} for row in values.values())


@pytest.mark.parametrize("text", ["3  400\n5  240\n", "3 | 400\n", "| 3 | 400 |\n", "3\t400\n", "3 400\n9 400\n"])
def test_numbers_that_are_printed_below_a_table_are_none_of_its_rows(tmp_path, text):
    shown = html(table(range(1, 9), names=("Training Loss",)))
    values, told, _ = read(notebook(tmp_path / "a.ipynb", code("train()", shown, printed(f"Answer:\n{text}"))))
    assert values == {n: {"loss": n / 8} for n in range(1, 9)}
    assert not told


def test_the_summary_that_wandb_shows_is_that_of_the_last_step(tmp_path):
    rows = {"train/global_step": "40", "train/reward": "0.5", "train/kl": "0.25", "+9": "..."}
    cells = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in rows.items())
    shown = '<h3>Run history:</h3><table class="wandb"><tr><td>train/kl</td><td>▁▂█</td></tr></table>'
    shown += f'<h3>Run summary:</h3><br/><table class="wandb">{cells}</table>'
    values, told, _ = read(notebook(tmp_path / "a.ipynb", code("wandb.finish()", html(shown))))
    assert values == {40: {"reward": 0.5, "kl": 0.25}}
    lines = ["Iteration 1/1", *(f"Average Reward: {n}.5\nStep {n}/20, loss: 0.{n}" for n in range(1, 21))]
    values, _, _ = read(notebook(tmp_path / "b.ipynb", code("train()", printed("\n".join(lines)), html(shown))))
    assert len(values) == 20
    assert any("the summary of the last step alone" in sentence for sentence in told)


def summary(**metrics):
    cells = "".join(f"<tr><td>train/{name}</td><td>{value}</td></tr>" for name, value in metrics.items())
    return html(f'<h3>Run summary:</h3><br/><table class="wandb">{cells}</table>')


OF_RUN = {"kl": 0.25, "loss": 0.0, "grad_norm": 0.0, "learning_rate": 0.0, "reward": 0.0, "reward_std": 0.0}


@pytest.mark.parametrize(("step", "is_kept"), [(1, False), (7, False), (8, True)])
def test_the_summary_of_an_earlier_run_gives_way_to_a_longer_table(tmp_path, step, is_kept):
    shown = summary(global_step=step, **OF_RUN), html(table(range(1, 9), ["Training Loss"]))
    values, _, _ = read(notebook(tmp_path / "a.ipynb", code("train()", *shown)))
    assert values == ({8: OF_RUN} if is_kept else {n: {"loss": n / 8} for n in range(1, 9)})


@pytest.mark.parametrize(("step", "is_added"), [(70, False), (80, True), (89, True), (90, False)])
def test_a_summary_adds_to_the_table_of_its_run_what_that_lacks(tmp_path, step, is_added):
    shown = html(table(range(10, 90, 10), ["Training Loss"])), summary(global_step=step, **OF_RUN)
    values, told, _ = read(notebook(tmp_path / "a.ipynb", code("train()", *shown)))
    losses = {n: {"loss": n / 8} for n in range(10, 90, 10)}
    assert values == (losses | {80: losses[80] | {"kl": 0.25}} if is_added else {step: OF_RUN})
    report = rd.check(tmp_path / "a.ipynb")
    assert is_added is ("RDT002" not in {found.code for found in report.findings})
    assert is_added is any("the table has no" in sentence for sentence in told)


def test_a_summary_adds_to_the_last_of_several_tables(tmp_path):
    first, last = (html(table(range(10, end, 10), ["Training Loss"], over=end)) for end in (50, 90))
    shown = summary(global_step=80, **{**OF_RUN, "reward": 1.5})
    path = notebook(tmp_path / "a.ipynb", code("sft.train()", first), code("train()", last, shown))
    assert read(path)[0][80] == {"loss": 80 / 90, "kl": 0.25, "reward": 1.5}
    assert {name for row in read(f"{path}/1")[0].values() for name in row} == {"loss"}


def test_a_mean_reward_in_a_summary_is_not_read_alone(tmp_path):
    cells = {"batch/mean_reward": -0.5, "train/global_step": 15, "train/kl": 9.5, "train/reward": -0.75}
    shown = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in cells.items())
    shown = html(f'<h3>Run summary:</h3><br/><table class="wandb">{shown}</table>')
    values, _, _ = read(notebook(tmp_path / "a.ipynb", code("train()", shown)))
    assert values == {15: {"batch/mean_reward": -0.5, "kl": 9.5, "reward": -0.75}}


def test_rewards_of_episodes_below_their_number(tmp_path):
    lines = [f"Episode {n}:\nText: a 1, b: 2\nFormat Reward: 0.5, Total Reward: {n}.5\n" for n in range(6)]
    values, _, _ = read(notebook(tmp_path / "a.ipynb", code("train()", printed("".join(lines)))))
    assert values == {n: {"format_reward": 0.5, "total_reward": n + 0.5} for n in range(6)}


def test_the_bar_above_a_table_says_the_length_of_its_run(tmp_path):
    bar = "<div>\n[ {done}/{end} 07:28 &lt; 6:13:56, 0.01 it/s, Epoch 0.02/1]\n</div>"
    first = bar.format(done=3, end=900) + table(range(1, 4)).replace("0.125", "0.5")
    second = bar.format(done=6, end=206) + table(range(1, 7))
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": [code("train()", {"data": {"text/html": html}}) for html in (first, second)]}))
    notes = LogNotes()
    assert len(list(read_log(Source.of(str(path)), notes))) == 6
    assert notes.total_steps == 206


@pytest.mark.parametrize(
    ("block", "names"),
    [
        ("Saved loss plot at step {n}0\nSaved reward plot at step {n}0\n", {"loss"}),
        ("soft_format_reward_func: 0.{n}\nsoft_accuracy_reward_func: 0.5\n", {"loss"}),
        ("objective/kl: 0.{n}\nobjective/entropy: 0.5\n", {"objective/kl", "objective/entropy"}),
    ],
    ids=["messages", "evaluations", "a policy"],
)
def test_blocks_go_before_a_table_of_losses_where_they_are_of_a_policy(tmp_path, block, names):
    lines = "".join(block.format(n=n) for n in range(1, 9))
    shown = html(table(range(1, 30), names=("Training Loss",)))
    values, _, _ = read(notebook(tmp_path / "a.ipynb", code("train()", shown, printed(lines))))
    assert all(row.keys() == names for row in values.values())


@pytest.mark.parametrize(("rewarded", "names"), [(3, {"loss"}), (4, {"score", "norm_loss"})])
def test_a_stray_reward_gives_way_to_a_table_of_losses(tmp_path, rewarded, names):
    lines = "".join(
        f"step {n}: norm_loss: 0.5, {'score' if n <= rewarded else 'share_acc'}: 0.{n}\n" for n in range(1, 9)
    )
    shown = html(table(range(1, 30), names=("Training Loss",)))
    values, _, _ = read(notebook(tmp_path / "a.ipynb", code("train()", shown, printed(lines))))
    assert values[2].keys() == names


def cells_of(names, rows):
    lines = [("Step", *names), *((10 * at, *row) for at, row in enumerate(rows, 1))]
    return html("\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in lines))


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (("Training Loss", "Validation Loss", "Accuracy"), [(3.1e16, "nan", 1.0), (0.0, "nan", 1.0)]),
        (("Training Loss", "Validation Loss", "Accuracy"), [(0.7 - 0.01 * at, 0.69, 0.5) for at in range(30)]),
        (("Training Loss", "Validation Loss", "Eval Accuracy"), [("No log", 0.7, 0.5), (0.6, 0.65, 0.6)]),
    ],
)
def test_a_held_out_loss_beside_an_accuracy_is_of_no_policy(tmp_path, names, rows):
    report = rd.check(notebook(tmp_path / "run.ipynb", code("", cells_of(names, rows))))
    assert "is not checked" in verdict(report)
    assert not report.findings


def test_a_policy_may_have_a_held_out_loss(tmp_path):
    names = ("Training Loss", "Validation Loss", "reward", "accuracy")
    rows = [(0.1, 0.1, 0.5 + 0.01 * at, 0.5) for at in range(30)]
    assert "The reward rose" in verdict(rd.check(notebook(tmp_path / "run.ipynb", code("", cells_of(names, rows)))))


@pytest.mark.parametrize(("shown", "steps"), [(8, range(10, 90, 10)), (7, range(1, 9))])
def test_dicts_without_steps_have_those_of_the_table_beside_them(tmp_path, shown, steps):
    """The table has the steps and the losses alone, and TRL prints the rest without a step."""
    dicts = "\n".join(
        str({"loss": n / 8, "grad_norm": 0.5, "learning_rate": 1e-6, "reward": n / 16, "kl": 0.0, "epoch": n / 10})
        for n in range(1, 9)
    )
    rows = html(
        "<table><tr><th>Step</th><th>Training Loss</th></tr>"
        + "".join(f"<tr><td>{10 * n}</td><td>{n / 8:.6f}</td></tr>" for n in range(1, shown + 1))
        + "</table>"
    )
    values, _, notes = read(notebook(tmp_path / "a.ipynb", code("train()", printed(dicts), rows)))
    assert [*values] == [*steps]
    assert notes.counted_steps == (shown < 8)


def test_lines_with_a_step_and_a_loss_keep_their_steps(tmp_path):
    lines = printed("".join(f"step {n} | loss: 0.{n} | reward: 0.5 | kl: 0.1\n" for n in range(10, 90, 10)))
    values, _, notes = read(notebook(tmp_path / "a.ipynb", code("train()", lines)))
    assert [*values] == [*range(10, 90, 10)]
    assert not notes.counted_steps
