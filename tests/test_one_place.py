"""An estimator or a loss is named by its formula, its spec and its trainers; everything else asks for what it is."""

import ast
import re

import pytest
from test_trainer_names import MODULES, texts

from rolloutdoctor.formulas.losses.surrogates import SURROGATES
from rolloutdoctor.objective.estimators import SPECS
from rolloutdoctor.trainers.trl.loss_types import LOSS_TYPES

PLACES = ("formulas/", "objective/estimators.py", "trainers/", "metric_names/")
OTHER_MEANINGS = {"raw", "grpo", "rloo"}
"""Also a score and trainers; and the baselines that the search for causes tries."""


@pytest.mark.parametrize("names", [SPECS, SURROGATES, LOSS_TYPES], ids=["estimators", "terms", "loss types"])
def test_names_stay_in_their_places(names):
    wanted = names.keys() - OTHER_MEANINGS
    quoted = re.compile(rf"[\"']({'|'.join(wanted)})[\"']")
    found = set()
    for file, path in MODULES.items():
        source = path.read_text(encoding="utf-8")
        if not file.startswith(PLACES) and quoted.search(source):
            found |= {(text, file) for text, _ in texts(ast.parse(source)) if text in wanted}
    assert found <= {
        ("cispo_capped", "evaluation/radii/clipping.py"),
        ("dppo_tv", "objective/objective.py"),
        ("dro", "objective/objective.py"),
        ("kl_cov", "objective/objective.py"),
        ("ppo_delta_clip", "objective/objective.py"),
        ("ppo_dual_clip", "objective/objective.py"),
        ("probability_band", "objective/objective.py"),
        ("ratio_masked", "objective/objective.py"),
    }
