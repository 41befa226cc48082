"""One log gives the same findings in every form in which it is kept."""

import json
import random

import polars as pl
import pytest
from log_files import FORMS, console, trainer_state, wandb_folder

import rolloutdoctor
from rolloutdoctor.rules.numbers_rule import NumbersRule
from rolloutdoctor.rules.table import RULES


def collapsing():
    """Sixty steps of TRL in single precision, as TensorBoard keeps them, with four digits, as consoles do."""
    draw = random.Random(0)
    for step in range(1, 61):
        entropy = 2.0 + 0.05 * draw.random() if step < 30 else 2.0 * 0.6 ** (step - 29)
        row = {
            "loss": draw.gauss(0, 0.01),
            "grad_norm": 0.5 + 0.1 * draw.random(),
            "learning_rate": 1e-6,
            "reward": min(1.0, 0.3 + 0.005 * step) + 0.02 * draw.random(),
            "reward_std": 0.3 + 0.02 * draw.random(),
            "frac_reward_zero_std": 0.25,
            "entropy": entropy,
            "completions/mean_length": 100 + draw.randrange(20),
            "completions/clipped_ratio": 0.0,
            "epoch": step / 60,
        }
        yield {"step": 5 * step, **{name: float(f"{value:.3g}") for name, value in row.items()}}


def found(path):
    return {(one.code, one.headline) for one in rolloutdoctor.check(path).findings}


@pytest.fixture(scope="module")
def of_the_trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    trainer_state(folder, list(collapsing()))
    return found(folder)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_findings_are_those_of_the_trainers_own_log(form, of_the_trainer, tmp_path):
    form(tmp_path, list(collapsing()))
    assert "RDT003" in {code for code, _ in of_the_trainer}
    assert found(tmp_path) == of_the_trainer


def diverging():
    """Forty steps whose KL, entropy and reward leave at step 15."""
    draw = random.Random(1)
    for step in range(1, 41):
        late = max(step - 14, 0)
        yield {
            "step": step,
            "loss": 0.01,
            "grad_norm": 0.5 + 0.05 * draw.random(),
            "learning_rate": 1e-3,
            "kl": 0.002 * (1 + draw.random()) if not late else 0.01 * 2 ** min(late, 8),
            "entropy": 1.2 + 0.05 * draw.random() if not late else max(1.2 * 0.4**late, 1e-4),
            "reward": 0.5 + 0.05 * draw.random() if not late else max(0.0, 0.45 - 0.08 * (late - 1)),
            "reward_std": 0.3,
        }


def recorded(folder, rows):
    """Rollouts of each step with the logged mean reward, and the log beside them."""
    places = [(row, group, place) for row in rows for group in range(4) for place in range(4)]
    lines = [
        {
            "step": row["step"],
            "group_id": f"{row['step']}-{group}",
            "sample_id": f"{row['step']}-{group}-{place}",
            "reward": 2.0 * row["reward"] * (place % 2),
        }
        for row, group, place in places
    ]
    pl.DataFrame(lines).write_parquet(folder / "run.parquet")
    logged = [
        {"step": row["step"], "split": "train", "name": name, "value": value}
        for row in rows
        for name, value in row.items()
        if name != "step"
    ]
    (folder / "run.metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in logged))


@pytest.mark.slow
@pytest.mark.parametrize("view", [console, wandb_folder, recorded], ids=lambda view: view.__name__)
def test_one_training_is_one_story_whatever_carries_it(view, tmp_path):
    """Of rules on numbers only those that rollouts answer themselves are not asked beside them."""
    whole, other = tmp_path / "log", tmp_path / "view"
    for folder, form in ((whole, trainer_state), (other, view)):
        folder.mkdir()
        form(folder, list(diverging()))
    (carrier,) = (path for path in other.iterdir() if not path.name.endswith(".jsonl"))
    first, second = rolloutdoctor.check(whole), rolloutdoctor.check(carrier, trainer="trl")
    on_numbers = {rule.code for rule in RULES if isinstance(rule, NumbersRule)}
    on_numbers -= {one.code for one in second.not_applicable}
    told = [
        [(one.code, one.headline, one.onset) for one in report.findings if one.code in on_numbers]
        for report in (first, second)
    ]
    assert told[0] == told[1]
    assert {"RDT003", "RDT004", "RDT005"} <= {code for code, _, _ in told[0]}
    assert told[0][0][0] == first.findings[0].code == second.findings[0].code == "RDT004"
