"""One log gives the same findings in every form in which it is kept."""

import random

import pytest
from log_files import FORMS, trainer_state

import rolloutdoctor


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


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_findings_are_those_of_the_trainers_own_log(form, of_the_trainer, tmp_path):
    form(tmp_path, list(collapsing()))
    assert "RDT003" in {code for code, _ in of_the_trainer}
    assert found(tmp_path) == of_the_trainer
