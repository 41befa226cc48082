"""Clean runs of TRL: options drawn from what people set, each of which often looks like a fault."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from labelled.trl_training import Training, letters, seven, shade, sometimes

RUNS = 110
LEVELS = {"luspo": "sequence", "cispo": "token", "sapo": "token", "vespo": "token"}


def drawn(number: int) -> Training:
    """A clean training."""
    draw = np.random.default_rng([20261126, number])

    def one_of(*values):
        return values[int(draw.integers(len(values)))]

    cls = "RLOO" if number % 5 == 4 else "GRPO"
    # How a generation is cut: K optimizer steps of it, or several generations in one step.
    accumulation = one_of(1, 2, 2, 4)
    several = accumulation > 1 and draw.random() < 0.2
    steps_of_generation = one_of(1, 1, 2, 4)
    per_generation = accumulation // 2 if several else accumulation * steps_of_generation
    iterations = one_of(1, 1, 1, 2, 3)
    rows = 8 if per_generation <= 8 and draw.random() < 0.3 else 16
    steps = (
        6
        if several or steps_of_generation == 1
        else -(-6 // (steps_of_generation * iterations)) * steps_of_generation * iterations
    )
    rewards, weights = one_of(
        ((shade,), None),
        ((shade,), None),
        ((seven,), None),
        ((shade, letters), [1.0, 0.3]),
        ((shade, sometimes), [0.5, 2.0]),
        ((sometimes,), None),
        ((seven, letters, shade), None),
    )
    options: dict[str, object] = {
        "per_device_train_batch_size": max(1, rows // per_generation),
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": per_generation,
        "num_generations": one_of(4, 4, 2, 8),
        "num_iterations": iterations,
        "max_steps": steps,
        "beta": one_of(0.0, 0.02, 0.1, 0.3),
        "learning_rate": one_of(2e-3, 4e-3, 8e-3),
        "logging_steps": one_of(1, 1, 1, 2),
        "temperature": one_of(1.0, 1.0, 0.9),
        "mask_truncated_completions": draw.random() < 0.2,
        "epsilon": one_of(0.2, 0.1),
        "epsilon_high": one_of(None, None, 0.28),
        "reward_weights": weights,
    }
    if options["mask_truncated_completions"]:
        # Or so many rows are masked that whole steps have nothing to train on, and the report says so.
        options["max_completion_length"], rewards, options["reward_weights"] = 32, (shade,), None
    if options["num_generations"] == 2 and shade not in rewards:
        options["num_generations"] = 8
    if options["beta"] and draw.random() < 0.2:
        options |= {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": one_of(0.6, 1.0)}
    made = Training(
        trainer=cls,
        rewards=rewards,
        evaluate=draw.random() < 0.25,
        seed=100 + number,
    )
    if draw.random() < 0.15:
        made = replace(made, model={"dtype": "bfloat16"})
        options["bf16"] = True
    if cls == "RLOO":
        options |= {
            "normalize_advantages": one_of(False, True),
            "reward_clip_range": one_of(None, None, [0.05, 0.5]),
            "learning_rate": one_of(1e-3, 3e-3),
        }
        return replace(made, options=options)
    kind = one_of("dapo", "dapo", "grpo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo")
    options |= {
        "loss_type": kind,
        "scale_rewards": one_of("group", "group", "batch", "none"),
        "multi_objective_aggregation": one_of(*["sum_then_normalize"] * 4, "normalize_then_sum"),
        "importance_sampling_level": LEVELS.get(kind) or one_of("token", "token", "sequence"),
        "use_bias_correction_kl": one_of(True, False),
    }
    if kind == "cispo":
        options["epsilon_high"] = 5.0
    rarer = int(draw.integers(10))
    options |= {
        0: {"top_entropy_quantile": 0.5},
        1: {"delta": 1.5} if kind not in LEVELS else {},
        2: {"entropy_coef": 0.01},
        3: {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 2.0},
        4: {"off_policy_mask_threshold": 0.02},
    }.get(rarer, {})
    if rarer >= 7:
        modes = ["token_truncate", "token_mask"]
        options["vllm_importance_sampling_mode"] = one_of(*modes, *(["sequence_mask"] * 2 if kind != "vespo" else []))
        made = replace(made, engine={"dtype": one_of("float32", "bfloat16")}, tools=one_of(None, 0.0), evaluate=False)
    return replace(made, options=options)


def clean_trainings() -> Iterator[tuple[str, Training]]:
    """Name and training of each."""
    for number in range(RUNS):
        training = drawn(number)
        yield f"{number:03} {describe(training)}", training


def describe(training: Training) -> str:
    """What is special about it, in a few words."""
    options = training.options
    accumulation, cut = options["gradient_accumulation_steps"], options["steps_per_generation"]
    words = [
        training.trainer,
        str(options.get("loss_type", "")),
        f"A{accumulation} S{cut} I{options['num_iterations']}",
    ]
    words += [
        name
        for name in (
            "top_entropy_quantile",
            "delta",
            "entropy_coef",
            "use_adaptive_entropy",
            "off_policy_mask_threshold",
            "sync_ref_model",
            "bf16",
        )
        if options.get(name)
    ]
    words += ["masked"] if options["mask_truncated_completions"] else []
    words += ["every second step logged"] if options["logging_steps"] == 2 else []
    words += ["evaluation"] if training.evaluate else []
    words += ["sampler"] if training.engine is not None else []
    words += ["tools"] if training.tools is not None else []
    return " ".join(filter(None, words))


def true_of(training: Training) -> tuple[str, ...]:
    """Rules that are right about a run without a bug.

    Rows that TRL masks still count in the baseline of the others, and a step may have no others; beside a reward of 0
    or 1 others shape; where the rewards of a step are all equal, its KL term and entropy bonus still train.
    """
    found: list[str] = []
    masks = "mask" in str(training.options.get("vllm_importance_sampling_mode", "sequence_mask"))
    if training.options.get("mask_truncated_completions") or (training.engine is not None and masks):
        found += ["RDA001", "RDA002", "RDG002", "RDI012"]
    if seven in training.rewards and len(training.rewards) > 1:
        found += ["RDA008"]
    if training.repeats:
        found += ["RDI013"]
    if training.options.get("beta") or training.options.get("entropy_coef"):
        found += ["RDG003"]
    return tuple(found)
