"""Make `logs.json`: logs of real small trainings of TRL, and of steps that verl's own functions computed.

``PYTHONPATH=tests:tests/lab python tests/rules/data/make_logs.py``; slime's are those of
`tests/parity/data/slime_runs.json`.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import trl
from dynamics.trainings import Planted, _answers, _sevens, train
from labelled.trl_training import DEFAULTS, Training
from parity.real_faults import SETUPS
from parity.real_runs import real_run

from rolloutdoctor.trainers.table import TRAINERS

HERE = Path(__file__).resolve().parent
TWO = (_answers, _sevens)
KINDS: dict[str, tuple[tuple, dict, dict | None]] = {
    "one function, two updates a batch": ((_answers,), {"num_iterations": 2, "learning_rate": 2e-2}, None),
    "two functions, a sampler": (TWO, {"reward_weights": [1.0, 0.5]}, {}),
    "windows of three steps": (TWO, {"logging_steps": 3, "learning_rate": 2e-2, "steps_per_generation": 4}, None),
}


def trl_logs():
    """Some steps of each kind; what is not an option that is understood here is left out."""
    known = {option.name for option in TRAINERS["trl"].options}
    for name, (rewards, options, engine) in KINDS.items():
        options = {"max_steps": 12, **options}
        with tempfile.TemporaryDirectory() as folder:
            train(Planted(name=name, training=Training(rewards=rewards, options=options, engine=engine)), Path(folder))
            state = json.loads((Path(folder) / "trainer_state.json").read_text())
            printed = (Path(folder) / "train.log").read_text()
        config = trl.GRPOConfig(output_dir=folder, **{**DEFAULTS, **options}, use_vllm=engine is not None)
        stated = {key: value for key, value in vars(config).items() if key in known}
        lines = [line for line in state["log_history"] if "reward" in line or "entropy" in line]
        # The last line is of the training as a whole.
        yield {"name": f"TRL: {name}", "trainer": "trl@1.16.0", "options": stated, "lines": lines}
        yield {"name": f"TRL's console: {name}", "trainer": "trl@1.16.0", "options": stated, "printed": printed}


_CORRECTED = "algorithm.rollout_correction"
VERL: dict[str, dict[str, object]] = {
    "KL in the loss": {},
    "KL in the reward": {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": 0.1,
        "algorithm.kl_penalty": "kl",
    },
    "weights of tokens": {f"{_CORRECTED}.rollout_is": "token", f"{_CORRECTED}.rollout_is_threshold": 2.0},
    "weights of sequences": {f"{_CORRECTED}.rollout_is": "sequence", f"{_CORRECTED}.rollout_is_threshold": 2.0},
}


def verl_logs():
    """Steps that verl's functions computed, under their numbers."""
    for seed, (name, options) in enumerate(VERL.items()):
        setup = replace(SETUPS["verl"], seed=seed, options={**SETUPS["verl"].options, **options})
        steps = [metrics for _, metrics in real_run(setup, steps=6)]
        lines = [{"step": at + 1, **{key: float(x) for key, x in line.items()}} for at, line in enumerate(steps)]
        yield {"name": f"verl: {name}", "trainer": "verl@0.9.1", "options": dict(setup.options), "lines": lines}


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs = [*trl_logs(), *verl_logs()]
    (HERE / "logs.json").write_text("[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n")
