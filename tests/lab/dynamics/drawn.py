"""A second design of trainings: every fault over drawn models, learning rates, lengths, batches and onsets."""

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from labelled.trl_training import Training
from trl.trainer import grpo_trainer

from dynamics.trainings import DIVERGED, Planted, _Calls, transformers

REFERENCE_KL = "self._metrics[mode]['kl'].append(global_masked_mean(per_token_kl))".replace("'", '"')


def _digits(completions, **kwargs):
    """How many of the characters are digits, and a bit for each that is large."""
    return [sum(0.5 + int(each) / 18 for each in text if each.isdigit()) / (2 + len(text)) for text in completions]


def _letters(completions, **kwargs):
    return [sum(each.isalpha() for each in text) / (2 + len(text)) for text in completions]


def _below_zero(completions, **kwargs):
    """Between -1 and 0."""
    return [each - 1 for each in _digits(completions)]


def _has_three(completions, **kwargs):
    return [float("3" in text[:6]) for text in completions]


def _coin(completions, **kwargs):
    """Right or wrong, with a verifier that errs in a third of the cases."""
    return [float(random.random() < 0.2 + 0.6 * mean) for mean in _letters(completions)]


def _uniform(completions, **kwargs):
    return [random.random() for _ in completions]


def _crashed(completions, **kwargs):
    return [0.0] * len(completions)


def _lowest(completions, **kwargs):
    return [-1.0] * len(completions)


def _long(completions, **kwargs):
    return [len(text) / 20 for text in completions]


def _short(completions, **kwargs):
    return [-len(text) / 20 for text in completions]


def _opposed(reward):
    return lambda completions, **kwargs: [-each for each in reward(completions)]


DENSE = (_digits, _letters, _below_zero)


def _ended(reward):
    """A reward, and half a point for a response that ends by itself."""

    def both(completions, **kwargs):
        ends = [ids[-1] == 1 for ids in kwargs["completion_ids"]]
        return [0.5 * end + each for end, each in zip(ends, reward(completions, **kwargs), strict=True)]

    both.__name__ = reward.__name__
    return both


class _At(transformers.TrainerCallback):
    """Calls something before every optimizer step from one on."""

    def __init__(self, at: int, act: Callable[[], None], *, once: bool = False) -> None:
        self.at, self.act, self.once = at, act, once

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.at or (state.global_step > self.at and not self.once):
            self.act()


def _rate(times: Callable[[int], float]) -> Callable[[Any], None]:
    """Multiply the learning rate by a factor that depends on the step."""

    def before(trainer):
        def create(num_training_steps, optimizer=None):
            trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or trainer.optimizer, times)
            return trainer.lr_scheduler

        trainer.create_scheduler = create

    return before


def _temperature(at: int, value: float) -> Callable[[Any], None]:
    def before(trainer):
        def act():
            trainer.temperature = trainer.args.temperature = trainer.generation_config.temperature = value
            # The head that gives log-probs and entropies divides by the temperature, too.
            for model in filter(None, (trainer.model, trainer.ref_model)):
                outputs = {"outputs": ("log_probs", "entropy")} if model is trainer.model else {}
                grpo_trainer.add_fused_lm_head(model, temperature=value, **outputs)

        trainer.add_callback(_At(at, act, once=True))

    return before


def _loss_times(at: int, factor: float) -> Callable[[Any], None]:
    def before(trainer):
        plain = trainer.compute_loss

        def scaled(*args, **kwargs):
            loss = plain(*args, **kwargs)
            return loss * factor if trainer.state.global_step >= at else loss

        trainer.compute_loss = scaled

    return before


def _cut_at(at: int, tokens: int) -> Callable[[Any], None]:
    def before(trainer):
        def act():
            trainer.max_completion_length = trainer.args.max_completion_length = tokens
            trainer.generation_config.max_new_tokens = tokens

        trainer.add_callback(_At(at, act))

    return before


MODELS: tuple[Mapping[str, object], ...] = (
    {"hidden_size": 16, "num_hidden_layers": 1},
    {"hidden_size": 48, "num_hidden_layers": 1, "intermediate_size": 64},
    {"hidden_size": 24, "num_hidden_layers": 3},
)


def _drawn(draw: random.Random) -> dict[str, object]:
    """Options that no fault depends on."""
    accumulated = draw.choice([1, 1, 2])
    generations = draw.choice([4, 4, 8])
    return {
        "max_steps": draw.choice([40, 70, 100]),
        "per_device_train_batch_size": draw.choice([8, 16]),
        "num_generations": generations,
        "gradient_accumulation_steps": accumulated,
        "steps_per_generation": accumulated,
        "max_completion_length": draw.choice([20, 30, 44]),
        "learning_rate": 10 ** draw.uniform(-3.6, -2.7),
        "loss_type": draw.choice(["grpo", "dapo", "dr_grpo"]),
        "scale_rewards": draw.choice(["group", "batch"]),
        "beta": draw.choice([0.0, 0.02, 0.2]),
    }


KINDS = (
    *("rate-zero", "rate-stops", "rate-jumps", "rate-huge", "temperature-up", "temperature-down", "entropy-rises"),
    *("kl-detached", "k1-printed", "length-bonus", "short-bonus", "cut-short", "loss-scaled", "reward-noise"),
    *("verifier-dies", "verifier-dies-low", "function-crashes", "reward-flips", "engine-frozen", "engine-cold"),
    *("ratio-stale", "kl-nan"),
)
DIED = ("RDT001", "RDT002", "RDT005")
"""One value, groups without a spread, or a reward that collapsed: each names a verifier that died."""
DETACHED = (
    "_compute_loss",
    "per_token_loss + self.beta * per_token_kl",
    "per_token_loss + self.beta * per_token_kl.detach()",
)
K1 = (
    "_compute_loss",
    REFERENCE_KL,
    REFERENCE_KL.replace("per_token_kl", "per_token_logps.detach() - ref_per_token_logps"),
)
STALE = (
    "_compute_loss",
    "log_ratio = per_token_logps - old_per_token_logps",
    "log_ratio = per_token_logps - (old_per_token_logps + S * torch.randn_like(old_per_token_logps))",
)


def _with_nan(at: int) -> tuple[str, str, str]:
    shown = REFERENCE_KL.replace("(per_token_kl)", f"(per_token_kl) / (self.state.global_step < {at} or float('nan'))")
    return "_compute_loss", REFERENCE_KL, shown


def planted(kind: str, seed: int) -> Planted:
    """Draw a training with one fault."""
    draw = random.Random(f"{kind} {seed}")
    options, model = _drawn(draw), draw.choice(MODELS)
    steps = int(str(options["max_steps"]))
    at = draw.randrange(steps // 3, 2 * steps // 3)
    reward = _ended(draw.choice(DENSE))
    rate = float(str(options["learning_rate"]))

    def made(
        *codes: str,
        onset: int | None = None,
        rewards: tuple[Any, ...] = (reward,),
        before: Callable[[Any], None] = lambda trainer: None,
        edits: tuple[tuple[str, str, str], ...] = (),
        engine: Mapping[str, object] | None = None,
        strength: float = 0.0,
        beside: float | None = None,
        **own: object,
    ) -> Planted:
        training = Training(
            rewards=rewards,
            options=options | own,
            model=model,
            edits=edits,
            engine=engine,
            strength=strength,
            seed=seed,
        )
        twin = None if beside is None else dataclasses.replace(training, options={**options, "learning_rate": beside})
        return Planted(name=kind, training=training, codes=codes, onset=onset, before=before, twin=twin)

    match kind:
        case "rate-zero":
            return made("RDT009", learning_rate=0.0)
        case "rate-stops":
            return made("RDT012", onset=at + 1, before=_rate(lambda step: float(step < at)))
        case "rate-jumps":
            times = draw.choice([60, 150])
            return made(*DIVERGED, "RDT009", "RDT005", before=_rate(lambda step: times if step >= at else 1.0))
        case "rate-huge":
            return made(*DIVERGED, "RDT005", learning_rate=draw.choice([0.04, 0.08]), beside=rate)
        case "temperature-up":
            return made("RDT014", onset=at + 1, before=_temperature(at, draw.choice([1.6, 2.0])))
        case "temperature-down":
            return made("RDT014", onset=at + 1, before=_temperature(at, draw.choice([0.4, 0.6])))
        case "entropy-rises":
            return made("RDT003", entropy_coef=draw.choice([0.5, 2.0]), beta=0.0)
        case "kl-detached":
            # The reward is solved, so that nothing but the KL could have a gradient.
            return made(
                *("RDG013", "RDT015"),
                edits=(DETACHED,),
                beta=0.5,
                learning_rate=4 * rate,
                max_steps=100,
                rewards=(_has_three,),
            )
        case "k1-printed":
            return made("RDM003", edits=(K1,), beta=draw.choice([0.02, 0.2]))
        case "length-bonus":
            return made(
                *("RDT019", "RDT006", "RDI012", "RDT013"),
                rewards=(_long,),
                max_completion_length=28,
                learning_rate=2 * rate,
            )
        case "short-bonus":
            return made("RDT019", "RDT013", rewards=(_short,), max_completion_length=28, learning_rate=2 * rate)
        case "cut-short":
            return made("RDT013", "RDT006", "RDI012", onset=at + 1, before=_cut_at(at, 2), max_completion_length=28)
        case "loss-scaled":
            return made("RDT013", onset=at + 1, before=_loss_times(at, draw.choice([20.0, 60.0])))
        case "reward-noise":
            return made("RDT016", rewards=(_uniform,))
        case "verifier-dies":
            return made(*DIED, onset=at + 1, rewards=(_Calls(reward, _crashed, at=(at,)),))
        case "verifier-dies-low":
            return made(*DIED, onset=at + 1, rewards=(_Calls(_below_zero, _lowest, at=(at,)),))
        case "function-crashes":
            at = steps // 3
            calls = _Calls(_has_three, _crashed, at=(at,))
            return made("RDT002", onset=at + 1, rewards=(_digits, calls, _uniform))
        case "reward-flips":
            return made("RDT005", onset=at + 1, rewards=(_Calls(_letters, _opposed(_letters), at=(at,)),))
        case "engine-frozen":
            return made("RDO012", engine={"synced": lambda number: 0}, learning_rate=3 * rate)
        case "engine-cold":
            return made("RDO012", engine={"temperature": draw.choice([0.3, 0.5])})
        case "ratio-stale":
            return made("RDO015", edits=(STALE,), strength=draw.choice([0.3, 0.5]))
        case _:
            return made("RDM003", onset=at + 1, edits=(_with_nan(at),), beta=0.02)


def clean(seed: int) -> Planted:
    """Draw a training without a fault."""
    draw = random.Random(f"clean {seed}")
    options = _drawn(draw)
    functions = draw.choice([(_digits,), (_letters, _coin), (_below_zero,), (_coin,), (_has_three, _digits, _letters)])
    rewards = (_ended(functions[0]), *functions[1:])
    steps = int(str(options["max_steps"]))
    accumulated = int(str(options["gradient_accumulation_steps"]))
    options |= {
        "beta": draw.choice([0.0, 0.005, 0.02, 0.2, 0.6]),
        "temperature": draw.choice([0.9, 1.0, 1.0, 1.1]),
        "num_iterations": draw.choice([1, 1, 1, 2, 3]),
        "steps_per_generation": accumulated * draw.choice([1, 1, 2]),
        "lr_scheduler_type": draw.choice(["constant", "linear", "cosine", "constant_with_warmup"]),
        "warmup_steps": draw.choice([0, 3, steps // 4]),
        "logging_steps": draw.choice([1, 1, 1, 2, 4]),
        "max_completion_length": draw.choice([24, 36, 48]),
        "mask_truncated_completions": draw.choice([False, False, True]),
    }
    engine: Mapping[str, object] | None = {} if draw.random() < 0.3 else None
    return Planted(
        name="clean",
        training=Training(rewards=rewards, options=options, model=draw.choice(MODELS), engine=engine, seed=seed),
    )
