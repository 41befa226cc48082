"""What may be why a reward does not rise: what is measured is told before what is inferred, then what holds of more."""

import json

import numpy as np
import pytest

import rolloutdoctor as rd
from rolloutdoctor.views.verdict import verdict

AT_LIMIT = {"completions/mean_length": lambda n: 240.0 + n % 3, "completions/max_length": lambda n: 256.0}
DEAD, LONG, CUT = "zero-variance|reward std is 0", "most are probably truncated", "responses are truncated over"


@pytest.mark.parametrize(
    ("log", "order"),
    [
        ({**AT_LIMIT, "reward_std": lambda n: 0.0 if n % 9 < 4 else 0.3123}, [DEAD, LONG]),
        ({**AT_LIMIT, "frac_reward_zero_std": lambda n: 0.45}, [DEAD, LONG]),
        ({**AT_LIMIT, "frac_reward_zero_std": lambda n: 0.65}, [DEAD, LONG]),
        ({"completions/clipped_ratio": lambda n: 0.8, "frac_reward_zero_std": lambda n: 0.45}, [CUT, DEAD]),
        # Few groups are dead; nothing is near the limit.
        ({**AT_LIMIT, "frac_reward_zero_std": lambda n: 0.3}, [LONG]),
        ({"completions/mean_length": lambda n: 90.0 + n % 3, "frac_reward_zero_std": lambda n: 0.45}, [DEAD]),
        ({"completions/mean_length": lambda n: 90.0 + n % 3, "frac_reward_zero_std": lambda n: 0.3}, []),
    ],
)
def test_what_is_measured_is_told_first(tmp_path, log, order):
    noise = np.random.default_rng(0).normal(0, 0.1, 60)
    rows = [
        {"step": n + 1, "loss": 0.01, "reward": round(0.5 + noise[n], 4), "grad_norm": 0.2 + 0.01 * (n % 2)}
        | {name: value(n) for name, value in log.items()}
        for n in range(60)
    ]
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": rows, "global_step": 60, "max_steps": 60}))
    words = verdict(rd.check(path))
    places = {
        name: min((words.find(each) for each in name.split("|") if each in words), default=-1)
        for name in (DEAD, LONG, CUT)
    }
    assert sorted((name for name in places if places[name] >= 0), key=places.get) == order, words
