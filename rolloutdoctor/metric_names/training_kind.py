"""The kind of training that a log is of, by the names in it: reinforcement learning, or one that is not checked."""

import re
from collections.abc import Collection

from rolloutdoctor.metric_names.generic import taken_for
from rolloutdoctor.metric_names.table import functions, is_bookkeeping, is_named, metric_quantities, understood, whose

RL, DISTILLATION, SFT, SUPERVISED, LOSSES, DPO, KTO, ORPO, PREFERENCES, REWARD_MODEL, LANGUAGE_MODEL, CLASSIC = (
    "reinforcement learning",
    "on-policy distillation",
    "supervised fine-tuning",
    "supervised training",
    "losses alone, as supervised fine-tuning writes it",
    "preference training (DPO)",
    "preference training (KTO)",
    "preference training (ORPO)",
    "preference or reward-model training",
    "reward-model training",
    "language-model training",
    "reinforcement learning of no language model",
)
NOT_CHECKED = frozenset({SFT, SUPERVISED, LOSSES, DPO, KTO, ORPO, PREFERENCES, REWARD_MODEL, LANGUAGE_MODEL, CLASSIC})
"""Kinds of which no rule knows anything."""
NEEDS_NO_REWARD = "a distillation learns from its teacher: rewards may all be equal"
"""Why rules about rewards say nothing of one."""

_PAIRS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
_ODDS = ("log_odds_ratio", "log_odds_chosen", "odds_ratio_loss")
OF_REWARD_MODEL = frozenset({"margin", "accuracy", "min_reward", "max_reward"})
"""What TRL's RewardTrainer logs of pairs; its rewards alone may be those of a policy."""
_OF_EPISODES = frozenset(
    {"ep_rew_mean", "ep_len_mean", "exploration_rate", "episodic_return", "episodic_length", "td_loss", "q_values"}
    | {"episode_reward_mean", "episode_len_mean", "num_env_steps_sampled"}
)
"""What Stable-Baselines3, CleanRL and RLlib log of the episodes of an environment."""
_OF_EXPLORATION = frozenset({"episode", "epsilon"})
"""What a loop of Q-learning logs; its epsilon is a share of random actions."""
_OF_TEXT = frozenset(
    {"kl", "response_kl", "response_length", "truncated_share", "tokens", "tokens_seen", "turns", "tool_calls"}
)
"""Quantities that a language model has."""
_ENVIRONMENT = re.compile(
    r"\b(?:CartPole|MountainCar|LunarLander|Acrobot|Pendulum|BipedalWalker|HalfCheetah|Hopper|Walker2d|Ant|Humanoid|Swimmer"
    r"|Reacher|FrozenLake|CliffWalking|Taxi|Blackjack|ALE/\w{3,20}|[A-Z]\w{2,20}NoFrameskip)(?:Continuous)?-v[0-9]\b"
)
"""Environments of Gymnasium, by the names that it registers."""
_OF_TOKENS = frozenset({"mean_token_accuracy", "token_acc"})
"""The share of tokens that are the most probable, as TRL's and ms-swift's supervised fine-tuning log it."""
_FEWEST_PAIRS = 2
OF_ANY_UPDATE = frozenset({"loss", "grad_norm", "learning_rate", "tokens", "tokens_seen", "samples", "step_time"})
"""Quantities that an update has whatever it is of."""
_OF_POLICY = re.compile(
    r"(?i)reward|advantage|rollout|kl|clip|ratio|policy|actor|critic|value|entropy|complet|respons|grpo|ppo|score|acc"
    r"|positive"
)
"""Words of metrics of reinforcement learning; an accuracy may be its reward, and positive are samples it rewards."""
_HELD_OUT_LOSS = re.compile(r"(?i)(val|valid|validation|eval|evaluation|dev|test)[_/ ]loss")
_DISTILLED = re.compile(r"(^|[/_])(teacher_kl|opd|distill(ation)?)($|/|_(loss|kl))")
_OF_TEACHER = frozenset({"teacher", "opd", "gkd", "kd", "distill", "distillation"})
_OF_DIVERGENCE = frozenset({"kl", "kld", "jsd", "loss", "logp", "logps", "logprob", "logprobs", "log"})
_NAMES_OF_RUN = frozenset(
    {"project", "project_name", "experiment_name", "exp_name", "run_name", "wandb_project", "wandb_group"}
)
_SAYS_DISTILLATION = re.compile(r"(?i)(?<![a-z])(opd|on[-_ ]?policy[-_ ]?distill\w{0,6}|gkd)(?![a-z])")


def environment_in(line: str) -> str:
    """Return the environment of Gymnasium that a line of text names; empty if it names none.

    >>> environment_in("env: CartPole-v1, seed 1"), environment_in("Llama-v2")
    ('CartPole-v1', '')
    """
    match = _ENVIRONMENT.search(line) if "-v" in line else None
    return "" if match is None else match[0]


def training_kind(names: Collection[str], environment: str = "", *, has_held_out_loss: bool = False) -> str:
    """Return the kind of training of a log; reinforcement learning where nothing says another.

    An environment of Gymnasium that the text of the log names tells what nothing of a language model is logged of.
    Trackers put a prefix before a name (``train/rewards/chosen``), which is left out.
    Evaluations beside the training may have a loss by whatever name.

    >>> training_kind(["loss", "rewards/chosen", "rewards/rejected"]), training_kind(["reward", "teacher_kl"])
    ('preference training (DPO)', 'on-policy distillation')
    >>> training_kind(["odds_ratio_loss", "rewards/chosen", "rewards/rejected"])
    'preference training (ORPO)'
    >>> training_kind(["loss", "mean_token_accuracy"]), training_kind(["loss", "reward", "kl"])
    ('supervised fine-tuning', 'reinforcement learning')
    >>> training_kind(["loss", "token_acc", "grad_norm"]), training_kind(["loss", "token_acc", "reward"])
    ('supervised fine-tuning', 'reinforcement learning')
    >>> training_kind(["loss", "accuracy", "lr", "percentage"]), training_kind(["loss", "accuracy", "lr"])
    ('preference or reward-model training', 'reinforcement learning')
    >>> training_kind(["loss", "mean_reward", "min_reward", "max_reward", "accuracy", "margin"])
    'reward-model training'
    >>> training_kind(["rollout/ep_rew_mean", "train/loss"])
    'reinforcement learning of no language model'
    >>> training_kind(["loss", "val_loss", "val_acc"]), training_kind(["loss", "val_loss", "val_acc", "kl"])
    ('supervised training', 'reinforcement learning')
    >>> training_kind(["loss", "accuracy"], has_held_out_loss=True)
    'supervised training'
    >>> training_kind(["train/loss", "train/learning_rate", "eval/loss"])
    'losses alone, as supervised fine-tuning writes it'
    >>> training_kind(["train/loss", "train/positive_nll_loss"])
    'reinforcement learning'
    """
    bare = {re.sub(r"^(train|eval)[/_]", "", name) for name in names}
    if sum(name in bare for name in _PAIRS) >= _FEWEST_PAIRS:
        # Of these only KTO has a KL, and none of pairs.
        is_kto = "kl" in bare and "rewards/accuracies" not in bare
        return ORPO if bare & {*_ODDS} else KTO if is_kto else DPO
    if bare >= OF_REWARD_MODEL:
        return REWARD_MODEL
    if any(map(_is_of_teacher, bare)):
        return DISTILLATION
    if {name.rpartition("/")[2] for name in bare} & _OF_EPISODES or bare >= _OF_EXPLORATION:
        return CLASSIC
    if environment and not _OF_TEXT & {*metric_quantities(names).values()}:
        return CLASSIC
    if _has_reward(names):
        return RL
    words = {word for name in bare for word in re.split(r"[/_.]", name.lower())}
    if any(name.endswith("dpo_loss") for name in bare):
        return DPO
    if {"chosen", "rejected"} <= words:
        return PREFERENCES
    if "lm_loss" in bare:
        return LANGUAGE_MODEL
    if bare & _OF_TOKENS:
        return SFT
    if {"accuracy", "percentage"} <= bare:
        # LLaMA-Factory's trainer_log.jsonl has an accuracy of pairs alone, and beside a policy its reward.
        return PREFERENCES
    if _has_losses_alone(names):
        return LOSSES
    return SUPERVISED if _is_classifier(names, has_held_out_loss=has_held_out_loss) else RL


def _is_of_teacher(name: str) -> bool:
    """Tell a divergence from a teacher, or the teacher's log-probs."""
    words = {*re.split(r"[/_.]", name.lower())}
    return bool(_DISTILLED.search(name.lower()) or (words & _OF_TEACHER and words & _OF_DIVERGENCE))


def names_distillation(name: str, value: object) -> bool:
    """Tell whether a setting names the project or the run, and by that name it is an on-policy distillation.

    A model's name may say that it was distilled.

    >>> names_distillation("trainer.project_name", "math_opd"), names_distillation("project", "R1-Distill-Qwen")
    (True, False)
    """
    is_name = name.lower().rpartition(".")[2] in _NAMES_OF_RUN
    return is_name and isinstance(value, str) and _SAYS_DISTILLATION.search(value) is not None


def _is_classifier(names: Collection[str], *, has_held_out_loss: bool) -> bool:
    """Tell a loss of held-out data beside a loss and an accuracy, as a classifier and a reward model log them.

    A loop of reinforcement learning whose reward is an accuracy evaluates that and not its loss.
    """
    accuracies = {name for name in names if "accuracy" in metric_quantities([name]).values()}
    others = [name for name in names if name not in accuracies]
    has_held_out_loss |= any(map(_HELD_OUT_LOSS.fullmatch, names))
    return bool(accuracies) and has_held_out_loss and _has_losses_alone(others)


def _has_losses_alone(names: Collection[str]) -> bool:
    """Tell a loss beside which nothing is logged that another training than a supervised one has."""
    quantities = {*metric_quantities(names).values()}
    return "loss" in quantities and quantities <= OF_ANY_UPDATE and not any(map(_OF_POLICY.search, names))


def unrecognised(names: Collection[str]) -> list[str]:
    """Return the names that no trainer's table has and no loop's are taken for, in their order.

    >>> unrecognised(["train/loss", "train/positive_nll_loss"])
    ['train/positive_nll_loss']
    """
    taken = {name for name, _ in understood(names).values()} | {*(() if whose(names) else taken_for(names))}
    taken |= {name for name, _ in functions(names).values()}
    return [name for name in sorted(names) if not (name in taken or is_bookkeeping(name) or is_named(name))]


def _has_reward(names: Collection[str]) -> bool:
    return "reward" in understood(names)
