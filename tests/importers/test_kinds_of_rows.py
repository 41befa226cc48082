"""Rows of a loop's own log as people keep them: nested, in lists side by side, with samples and sums among them."""

import json

import pytest

import rolloutdoctor as rd
from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.table import kind_of, read_log
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.metric_names.table import metric_quantities
from rolloutdoctor.opening.logs import read_logs
from rolloutdoctor.views.verdict import verdict

STEPS = range(1, 13)
REWARD = {step: round(0.2 + 0.01 * step + 0.003 * (step % 5), 4) for step in STEPS}
KL = {step: round(0.05 + 0.004 * step + 0.002 * (step % 3), 4) for step in STEPS}
LOSS = {step: round(0.9 - 0.02 * step + 0.004 * (step % 4), 4) for step in STEPS}


def read(path, text):
    """Quantity to its values by step, and what was said."""
    path.write_text(text)
    told, values = [], {}
    for step, _, row in read_log(Source.of(str(path)), LogNotes(told.append)):
        quantities = metric_quantities(row)
        for name, value in row.items():
            if name in quantities and value is not None:
                values.setdefault(quantities[name], {})[step] = value
    return values, told


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def table(rows, names="step,reward,kl,loss"):
    return f"{names}\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)


NESTED = {
    "stats": lambda s: {"step": s, "ppo_stats": {"loss/policy": LOSS[s], "kl": KL[s]}, "mean_reward": REWARD[s]},
    "a text of means": lambda s: {"step": s, "reward_stats": f"{{'mean': {REWARD[s]}, 'max': 1.5}}", "kl": KL[s]},
    "means": lambda s: {"iteration": s, "stats": {"rewards": {"mean": REWARD[s], "std": 0.1}, "kl": {"mean": KL[s]}}},
    "payload": lambda s: {"event": "step", "step": s, "payload": {"reward": REWARD[s], "kl": KL[s]}},
    "a text": lambda s: {"step": s, "metrics": json.dumps({"reward": REWARD[s], "kl": KL[s], "loss": LOSS[s]})},
    "a text of Python": lambda s: {"step": s, "metrics": str({"reward": REWARD[s], "kl": KL[s]})},
    "a list within": lambda s: {"update": s, "grpo": {"rewards": [REWARD[s]] * 2, "kl": KL[s], "loss": LOSS[s]}},
    "a sample beside": lambda s: {
        "step": s,
        "ppo_stats": {"loss/policy": LOSS[s], "kl": KL[s], "mean_scores": REWARD[s]},
        "sample": {"query": "1 + 1 = " * 8, "response": "2 " * 30},
    },
    "one of each": lambda s: {"iter": s, "avg_reward": REWARD[s], "pg_loss": LOSS[s], "extra": {"kl": KL[s]}},
    "the old PPO": lambda s: {
        "step": s,
        "stats": {"ppo/mean_scores": REWARD[s], "kl": KL[s], "ppo/loss/total": LOSS[s]},
    },
}


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize("write", [lines, lambda rows: json.dumps([*rows])], ids=["lines", "document"])
def test_metrics_in_objects_of_their_line(kind, write, tmp_path):
    values, _ = read(tmp_path / "log.json", write(NESTED[kind](step) for step in STEPS))
    assert values["reward"] == pytest.approx(REWARD)
    assert values["kl"] == KL


@pytest.mark.parametrize(
    "row",
    [
        {"sample": {"prompt": "1 + 1 = " * 8, "completion": "2"}, "scores": {"reward": 1.0, "kl": 0.1}},
        {"stats": {"reward": 1.0, "score": 0.5}, "text": "2 " * 30},
    ],
)
def test_a_response_with_its_numbers_is_no_log(row, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(lines({"step": step, **row} for step in STEPS))
    assert kind_of(path) is None


def test_a_configuration_with_lists_comes_first(tmp_path):
    rows = [{"type": "config", "argv": ["--lr", "0.1"], "args": {"lr": 0.1}}, {"step": 0, "accuracy": 0.5}, *ROWS]
    values, _ = read(tmp_path / "log.jsonl", lines(rows))
    assert values["reward"] == REWARD


def test_pairs_of_numbers_under_another_name_are_no_log(tmp_path):
    (tmp_path / "log.json").write_text(json.dumps({"r16": [*map(list, LOSS.items())]}))
    assert kind_of(tmp_path / "log.json") is None


def points(values, name):
    return [{"step": step, name: value} for step, value in values.items()]


DOCUMENTS = {
    "side by side": {"rewards_per_step": points(REWARD, "reward"), "kl_per_step": points(KL, "kl")},
    "points": {"rewards": points(REWARD, "value"), "kl": points(KL, "value"), "config": {"lr": 0.1}},
    "pairs": {"reward": [*map(list, REWARD.items())], "kl": [*map(list, KL.items())]},
    "within": {"training": {"loss_history": points(LOSS, "loss"), "history": points(REWARD, "mean_reward")}, "kl": 1},
    "phases": {"phases": [{"name": "sft", "log": points(LOSS, "loss") * 3}, {"log": points(REWARD, "mean_reward")}]},
    "columns in a text": {"metrics": json.dumps({"rewards": [*REWARD.values()], "kls": [*KL.values()]})},
    "columns by place": {"reward": dict(enumerate(REWARD.values())), "kl": dict(enumerate(KL.values()))},
    "names in the plural": {"episode_rewards": [*REWARD.values()], "policy_losses": [*LOSS.values()] * 2},
    "by step": {f"step_{step}": {"reward": REWARD[step], "kl": KL[step]} for step in STEPS},
    "later keys": [{"step": 0, "config": {"lr": 0.1}}, {"event": "begins"}, *points(REWARD, "reward")],
    "evaluations beside": {"train": points(REWARD, "reward"), "eval": points(LOSS, "reward")},
    "more of another": {"schedule": [{"epoch": 1, "lr": 0.1}] * 40, "log": points(REWARD, "mean_reward")},
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_the_rows_of_a_document_with_the_rewards(kind, tmp_path):
    values, _ = read(tmp_path / "log.json", json.dumps(DOCUMENTS[kind]))
    assert values["reward"] == REWARD


def test_lists_of_one_metric_are_runs_where_their_names_are(tmp_path):
    for first, second, several in (("seed_0", "seed_1", True), ("format", "accuracy", False)):
        body = {"history": {first: points(REWARD, "reward"), second: points(LOSS, "reward")}}
        _, told = read(tmp_path / "log.json", json.dumps(body))
        assert any("2 runs, run=history/seed_0" in words for words in told) is several


def test_a_csv_without_steps_is_numbered_where_a_row_is_of_an_update(tmp_path):
    rows = [f"{reward},{kl},0.01" for reward, kl in zip(REWARD.values(), KL.values(), strict=True)]
    values, told = read(tmp_path / "log.csv", "\n".join(["reward,kl,loss", *rows]) + "\n")
    assert [*values["reward"].values()] == [*REWARD.values()]
    assert min(values["reward"]) == 1
    assert any("the lines have no step: they are numbered from 1" in words for words in told)
    (tmp_path / "responses.csv").write_text("reward,response\n" + "1,a\n" * 9)
    assert kind_of(tmp_path / "responses.csv") is None


ROWS = [{"step": s, "reward": REWARD[s], "kl": KL[s], "loss": LOSS[s]} for s in STEPS]
CELLS = [[s, REWARD[s], KL[s], LOSS[s]] for s in STEPS]
COLUMNS = (REWARD, KL, LOSS)
OF_THE_RUN = {
    "a word for the step": lines([*ROWS, {"step": "final", "reward": 9.0, "loss": 7.0}]),
    "no step": lines([*ROWS, {"summary": {"mean_reward": 0.4}}]),
    "other names": lines([*ROWS, {"step": 12, "train_runtime": 120.0, "total_reward": 50.0}]),
    "a word": lines([*ROWS, {"step": 12, "kind": "summary", "reward": 3.0, "loss": 9.0}]),
    "words": json.dumps([*ROWS, {"step": "mean", "reward": 0.3}, {"step": "total", "reward": 30.0}]),
    "sums": table([*CELLS, [13, *(round(sum(one.values()), 2) for one in COLUMNS)]]),
    "means": table([*CELLS, [13, *(round(sum(one.values()) / 12, 5) for one in COLUMNS)]]),
    "words in a table": table([*CELLS, ["Average", 0.3, 0.2, 0.1], ["Total", 5, 4, 3]]),
}


@pytest.mark.parametrize("kind", OF_THE_RUN)
def test_rows_of_the_whole_run_are_no_steps(kind, tmp_path):
    text = OF_THE_RUN[kind]
    values, told = read(tmp_path / ("log.csv" if text.startswith("step") else "log.json"), text)
    assert values["reward"] == REWARD
    assert any("left out" in sentence for sentence in told)


@pytest.mark.parametrize(
    "row",
    [
        {"step": 13, "reward": 0.5, "kl": 0.1},
        {"step": 13, "eval_accuracy": 0.5},
        {"step": 13, "reward": sum(REWARD.values()), "kl": KL[12]},
        {"step": 13, "note": "final"},
    ],
    ids=["fewer names", "an evaluation", "the sum of one", "a word alone"],
)
def test_a_last_step_that_looks_alike_stays(row, tmp_path):
    values, told = read(tmp_path / "log.json", json.dumps([*ROWS, row]))
    assert max(step for each in values.values() for step in each) == (13 if len(row) > 2 or "note" not in row else 12)
    assert not told or "note" in row


def samples(step, place):
    return {"step": step, "sample": place, "reward": REWARD[step] + (place - 1) / 8, "length": 100 + place}


def mixed(step):
    return [samples(step, place) for place in range(3)]


SAMPLED = {
    "a log": lines(row for s in STEPS for row in [*mixed(s), {"step": s, "mean_reward": REWARD[s], "loss": LOSS[s]}]),
    "kinds": lines(
        row
        for s in STEPS
        for row in [
            *({"type": "rollout", **one} for one in mixed(s)),
            {"type": "train", "step": s, "reward_mean": REWARD[s], "kl": KL[s]},
        ]
    ),
    "samples alone": lines(row for s in STEPS for row in mixed(s)),
    "no reward of the step": lines(
        row for s in STEPS for row in [*mixed(s), {"step": s, "loss": LOSS[s], "kl": KL[s]}]
    ),
    "more in some": lines(row for s in STEPS for row in mixed(s) + mixed(s)[: 3 * (s % 2)]),
    "a table": table(([*row.values()] for s in STEPS for row in mixed(s)), "step,sample_id,reward,length"),
    "a console": "".join(
        "".join(f"[step {s}] sample {r['sample']} | reward: {r['reward']} | length: {r['length']}\n" for r in mixed(s))
        + f"[step {s}] mean reward: {REWARD[s]} | policy loss: {LOSS[s]} | kl: {KL[s]}\n"
        for s in STEPS
    ),
    "a console of samples": "".join(
        f"Step {s} Sample {r['sample']} Reward: {r['reward']} KL: {KL[s]}\n" for s in STEPS for r in mixed(s)
    ),
}


@pytest.mark.parametrize("kind", SAMPLED)
def test_samples_of_a_step_are_its_mean(kind, tmp_path):
    values, told = read(tmp_path / "log.txt", SAMPLED[kind])
    assert values["reward"] == pytest.approx(REWARD)
    assert any("rows are of one step each" in sentence for sentence in told)


PLAYED = [(step, 20 + 3 * step) for step in range(60)]
GAMES = {
    "an environment": "env: CartPole-v1\n"
    + "".join(f"Update {n}/60, mean episode reward {reward}, pg_loss 0.{n}, entropy 0.6\n" for n, reward in PLAYED),
    "episodes": "gym.make('LunarLander-v2')\n"
    + "".join(f"Episode: {n} | Total reward: {reward} | Loss: 0.{n}\n" for n, reward in PLAYED),
    "exploration": table(([n, reward, 9, 0.9] for n, reward in PLAYED), "episode,reward,steps,epsilon"),
    "returns": lines({"step": n, "charts/episodic_return": reward, "losses/td_loss": 0.1} for n, reward in PLAYED),
    "averages": lines({"step": n, "episode_reward_mean": reward, "loss": 0.1} for n, reward in PLAYED),
}


@pytest.mark.parametrize("kind", GAMES)
def test_a_game_is_no_training_of_a_language_model(kind, tmp_path):
    path = tmp_path / ("log.csv" if kind == "exploration" else "log.txt")
    path.write_text(GAMES[kind])
    report = rd.check(path)
    assert verdict(report) == ("This is a log of reinforcement learning of no language model, which is not checked.")


def test_a_language_model_may_play(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(
        "env: FrozenLake-v1\n"
        + "".join(f"Step {n}/60, mean reward {reward}, kl 0.1, response_length 0.{n}\n" for n, reward in PLAYED)
    )
    assert not any("not checked" in one.message for one in rd.check(path).findings)


def test_the_fuller_of_two_logs_has_the_numbers(tmp_path):
    (tmp_path / "history.json").write_text(json.dumps({"history": ROWS}))
    (tmp_path / "train.log").write_text(
        "".join(f"Step {s} | reward {REWARD[s]:.2f} | kl {KL[s]:.2f} | entropy 0.{s}\n" for s in STEPS if s % 4 == 0)
    )
    found = read_logs([Source.of(str(tmp_path / name)) for name in ("history.json", "train.log")])
    assert [found.at(StepKey(step, TRAIN))["reward"] for step in STEPS] == [*REWARD.values()]
    assert [found.at(StepKey(step, TRAIN))["entropy"] for step in (4, 8, 12)] == [0.4, 0.8, 0.12]
