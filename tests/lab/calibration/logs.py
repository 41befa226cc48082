"""Logs of numbers: clean ones of many kinds, and each rule's fault in them at several strengths."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.engine.check import CheckOptions, check
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.io.run import Run
from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.metric_names.table import TRAINERS
from rolloutdoctor.results.findings import Report
from rolloutdoctor.rules.table import RULES, find
from rolloutdoctor.trainers.options import Layer

Values = NDArray[np.float64]
_OTHERS = ("RDG012", "RDG013", "RDO012", "RDO015", "RDM008")
CODES = tuple(rule.code for rule in RULES if rule.code[:3] == "RDT" or rule.code in _OTHERS)
"""Rules over numbers."""

OPTIONS: Mapping[str, Mapping[str, object]] = {
    "trl": {
        **{"beta": 0.04, "num_iterations": 1, "steps_per_generation": 4, "gradient_accumulation_steps": 4},
        **{"logging_steps": 1, "generation_batch_size": 128, "num_generations": 8, "use_vllm": True},
    },
    "verl": {
        **{"algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False, "data.train_batch_size": 64},
        **{"actor.ppo_mini_batch_size": 64, "actor.ppo_epochs": 1, "actor.use_kl_loss": True},
        **{"actor.kl_loss_coef": 0.001, "actor.entropy_coeff": 0.0, "actor.loss_agg_mode": "token-mean"},
    },
}
OF_SPREADS = {
    "trl": ("completions/min_length", "completions/max_length"),
    "verl": ("response_length/min", "response_length/max"),
}


@dataclass
class Log:
    """A log.

    Attributes:
        trainer: who wrote it.
        values: quantity, or name of a metric, to its value at each step.
        printed: how it rounds: significant digits, or None for all.
    """

    trainer: str
    values: dict[str, Values]
    printed: int | None = None
    options: Mapping[str, object] = field(default_factory=dict)


def clean_log(seed: int, trainer: str = "") -> Log:
    """Draw a log without a fault, as runs of models of 0.5 to 30 billion parameters log."""
    draw = np.random.default_rng([seed, 21])
    trainer = trainer or str(draw.choice(list(OPTIONS)))
    steps = int(draw.choice([40, 60, 120, 300]))
    at = np.arange(steps) / steps

    def noise(size: float, memory: float = 0.3) -> Values:
        """Noise with some memory from step to step."""
        found, last = np.zeros(steps), 0.0
        for place, fresh in enumerate(draw.standard_normal(steps)):
            last = memory * last + np.sqrt(1 - memory**2) * fresh
            found[place] = size * last
        return found

    first, gain = draw.uniform(0.05, 0.5), draw.uniform(0.0, 0.4)
    scale = float(draw.choice([1.0, 1.0, 10.0]))
    reward = first + gain * (1 - np.exp(-draw.uniform(0.5, 5) * at)) + noise(draw.uniform(0.01, 0.06))
    entropy = draw.uniform(0.2, 1.5) * np.exp(-draw.uniform(0, 1) * at) * np.exp(noise(0.05))
    kl = draw.uniform(0.0005, 0.15) * at ** draw.uniform(0.5, 1.5) * np.exp(noise(0.2))
    norm = draw.uniform(0.05, 1.5) * np.exp(noise(draw.uniform(0.1, 0.5)))
    schedule = str(draw.choice(["constant", "linear", "cosine"]))
    decay = {"constant": np.ones(steps), "linear": 1 - at, "cosine": (1 + np.cos(np.pi * at)) / 2}[schedule]
    warmup = int(draw.choice([0, 0, 5, 10]))
    rate = 10 ** draw.uniform(-6.5, -5) * decay * np.minimum(1.0, np.arange(1, steps + 1) / max(warmup, 1))
    length = draw.uniform(150, 3000) * (1 + draw.uniform(-0.3, 0.6) * at) * np.exp(noise(0.04))
    truncated = np.clip(draw.uniform(0, 0.15) * (1 + noise(0.3)), 0, 1)
    dead = np.clip(draw.uniform(0.05, 0.5) + 0.2 * gain * at + noise(0.06), 0, 1)
    gap = draw.uniform(0.002, 0.015) * np.exp(noise(0.1))
    low, high = (draw.uniform(0, 4e-4) * np.exp(noise(0.3)) for _ in range(2))
    values = {
        "reward": scale * reward,
        "zero_variance_share": np.round(16 * dead) / 16,
        "entropy": entropy,
        "kl": kl,
        "grad_norm": norm,
        "learning_rate": rate,
        "response_length": length,
        "response_length_max": length * draw.uniform(1.5, 4),
        "truncated_share": np.round(128 * truncated) / 128,
        "clip_fraction": low + high,
        "step_time": draw.uniform(20, 300) * np.exp(noise(draw.uniform(0.02, 0.2))),
        "sampler_logp_gap": gap,
        OF_SPREADS[trainer][0]: length * draw.uniform(0.05, 0.4),
    }
    if trainer == "trl":
        values |= {
            "reward_std": scale * np.abs(0.3 + noise(0.03)),
            "clip_fraction_low": low,
            "clip_fraction_high": high,
        }
        values["sampler_logp_gap_max"] = gap * draw.uniform(20, 200)
    else:
        values |= {"ppo_kl": noise(3e-4), "policy_loss": noise(0.02), "sampler_gap": gap / 4}
        values |= {"sampler_pearson": 1 - draw.uniform(1e-4, 3e-3) * np.exp(noise(0.2))}
        values["actor/loss"] = values["policy_loss"] + 0.001 * kl
        values |= {"critic/score/max": np.full(steps, 2 * scale), "critic/score/min": np.full(steps, -scale)}
    return Log(trainer, values, draw.choice([None, 4, 6]), OPTIONS[trainer])


def report_of(log: Log, *codes: str) -> Report:
    """Check a log with the rules over numbers, or some of them."""
    named = {one.quantity: one.pattern for one in reversed(TRAINERS[log.trainer])}
    columns = {
        named.get(name, name): values for name, values in log.values.items() if name not in BY_NAME or name in named
    }

    def printed(value: float) -> float:
        return float(value) if log.printed is None else float(f"{value:.{log.printed}g}")

    steps = len(next(iter(columns.values())))
    logged = {
        StepKey(place + 1, TRAIN): {name: printed(values[place]) for name, values in columns.items()}
        for place in range(steps)
    }
    version = {"trl": "trl@1.16.0", "verl": "verl@0.9.1"}[log.trainer]
    rules = tuple(find(code) for code in codes or CODES)
    options = CheckOptions(
        rules=rules, trainer=version, layers=(Layer("calibration", dict(log.options)),), device="cpu"
    )
    return check(Run([], RunMetadata(), LoggedMetrics(logged)), options)


@dataclass(frozen=True)
class LogCase:
    """A fault in a clean log.

    Attributes:
        code: of the rule that looks for it.
        words: what its strength is.
        strengths: from weak to severe.
        plant: changes the values of a log; from the middle of the run on, but for what is said.
        trainer: who wrote it.
        warns: only a warning or an error counts; else any finding does.
        options: beside the trainer's usual ones.
    """

    code: str
    words: str
    strengths: Sequence[float]
    plant: Callable[[dict[str, Values], float], None]
    trainer: str = "trl"
    warns: bool = True
    options: Mapping[str, object] = field(default_factory=dict)

    def report(self, strength: float, seed: int) -> Report:
        """Plant it in a clean log, and check that."""
        log = clean_log(seed, self.trainer)
        self.plant(log.values, strength)
        log.options = {**log.options, **self.options}
        return report_of(log, self.code)


def _late(values: Values) -> slice:
    return slice(len(values) // 2, None)


def _dead(values: dict[str, Values], share: float) -> None:
    late = values["zero_variance_share"]
    late[_late(late)] = share


def _constant(values: dict[str, Values], share: float) -> None:
    reward, std = values["reward"], values["reward_std"]
    same = np.arange(len(reward)) >= share * len(reward)
    reward[same], std[same] = 0.5, 0.0


def _collapsed(values: dict[str, Values], factor: float) -> None:
    entropy = values["entropy"]
    late = np.linspace(0, 1, len(entropy[_late(entropy)]))
    entropy[_late(entropy)] *= factor ** np.minimum(1, 3 * late)
    values["reward"][:] = values["reward"][:10].mean() + 0.02 * np.sin(np.arange(len(entropy)))


def _blown_up(values: dict[str, Values], nats: float) -> None:
    kl = values["kl"]
    kl[_late(kl)] += nats * np.linspace(0, 1, len(kl[_late(kl)]))
    values["reward"][:] = values["reward"][:10].mean() + 0.02 * np.sin(np.arange(len(kl)))


def _fallen(values: dict[str, Values], deviations: float) -> None:
    reward = values["reward"]
    reward[_late(reward)] -= deviations * float(np.diff(reward).std() / np.sqrt(2))


def _longer(values: dict[str, Values], share: float) -> None:
    cut, length = values["truncated_share"], values["response_length"]
    rise = np.linspace(0, 1, len(cut[_late(cut)]))
    cut[_late(cut)] = np.clip(cut[_late(cut)] + share * rise, 0, 1)
    length[_late(length)] *= 1 + rise


def _times(name: str) -> Callable[[dict[str, Values], float], None]:
    """One step, two thirds through the run."""

    def plant(values: dict[str, Values], factor: float) -> None:
        values[name][2 * len(values[name]) // 3] *= factor

    return plant


def _everywhere(name: str) -> Callable[[dict[str, Values], float], None]:
    def plant(values: dict[str, Values], value: float) -> None:
        values[name] = value * np.exp(0.1 * np.sin(np.arange(len(values["reward"]))))

    return plant


def _warming(values: dict[str, Values], share: float) -> None:
    """A linear warmup over a share of the run, and a constant rate after it."""
    steps = np.arange(1, len(values["reward"]) + 1)
    values["learning_rate"] = 1e-6 * np.minimum(1.0, steps / (share * len(steps)))


def _silent(values: dict[str, Values], steps: float) -> None:
    some = slice(10, 10 + int(steps))
    values["zero_variance_share"][some], values["kl"][some], values["grad_norm"][some] = 1.0, 0.01, 0.0


def _first_kl(values: dict[str, Values], nats: float) -> None:
    values["kl"] += nats


def _other_sum(values: dict[str, Values], relative: float) -> None:
    clipped = values["clip_fraction"]
    clipped[_late(clipped)] *= 1 + relative


CASES = (
    LogCase("RDT001", "share of zero-variance groups", (0.5, 0.8, 0.95, 1.0), _dead),
    LogCase("RDT002", "share of the run with reward variance", (0.5, 0.1, 0.02, 0.0), _constant),
    LogCase("RDT003", "entropy relative to the start", (0.5, 0.2, 0.1, 0.03, 0.01), _collapsed),
    LogCase("RDT004", "KL at the end, nats", (0.3, 1.0, 2.0, 5.0, 20.0), _blown_up),
    LogCase("RDT005", "fall of the reward, in std of a step", (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0), _fallen),
    LogCase("RDT006", "rise of the truncated share", (0.1, 0.3, 0.5, 0.8, 1.0), _longer, warns=False),
    LogCase("RDT007", "clip fraction", (0.1, 0.3, 0.5, 0.8), _everywhere("clip_fraction")),
    LogCase(
        "RDT008",
        "gradient norm of a step, relative to the others",
        (3.0, 10.0, 30.0, 100.0),
        _times("grad_norm"),
        warns=False,
    ),
    LogCase("RDT009", "length of the warmup, as a share of the run", (0.1, 0.5, 0.9, 1.5, 10.0), _warming, warns=False),
    LogCase("RDT010", "step time, relative to the others", (2.0, 5.0, 10.0, 30.0), _times("step_time"), warns=False),
    LogCase("RDG012", "KL before the first update, nats", (1e-4, 1e-3, 0.01, 0.1, 1.0), _first_kl, warns=False),
    LogCase("RDG013", "steps with a KL and no gradient", (1, 2, 3, 5), _silent),
    LogCase("RDO012", "sampler gap, nats", (0.02, 0.1, 0.2, 0.4, 1.0), _everywhere("sampler_logp_gap")),
    LogCase("RDO015", "drift in the only update, nats", (1e-3, 5e-3, 0.02, 0.1), _everywhere("ppo_kl"), "verl"),
    LogCase("RDM008", "relative error of a logged sum", (1e-5, 1e-3, 0.01, 0.1), _other_sum),
)
