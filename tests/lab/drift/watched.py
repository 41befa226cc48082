"""What is watched: packages, and in them the functions and the options from which objectives and metrics are made."""

from dataclasses import dataclass

from rolloutdoctor.trainers.table import TRAINERS


@dataclass(frozen=True)
class Package:
    """A package on the index.

    Attributes:
        trainer: the trainer that is computed after it.
        option: the option of the trainer whose default is its newest read release; empty: the trainer's own release.
        goldens: what compares a release of it with its own functions.
        on_index: the newest release that was read of those on the index, where later ones are in git alone.
    """

    trainer: str
    goldens: str
    option: str = ""
    on_index: str = ""

    @property
    def read(self) -> str:
        """Newest release that was read, a commit where that is of no release."""
        trainer = TRAINERS[self.trainer]
        if self.on_index:
            return self.on_index
        if self.option:
            return str(next(each.default for each in trainer.options if each.name == self.option))
        return trainer.read_code[-1].name


PACKAGES = {
    "trl": Package("trl", "tests/parity, tests/goldens/make_trl_releases.py"),
    "verl": Package("verl", "tests/parity, tests/goldens/make_verl_releases.py"),
    "ms-swift": Package("ms-swift", "tests/goldens/real/make/swift_results.py"),
    "skyrl": Package("skyrl", "tests/goldens/real/make/skyrl_results.py"),
    "openrlhf": Package("openrlhf", "tests/goldens/real/make/openrlhf_results.py"),
    "unsloth_zoo": Package("unsloth", "tests/goldens/make_unsloth.py", option="unsloth_zoo"),
    "unsloth": Package("unsloth", "tests/goldens/make_unsloth.py", option="unsloth_zoo"),
    "areal": Package("areal", "tests/goldens/real/make/areal_results.py", on_index="1.0.4"),
}

FUNCTIONS = """
trl          trl/trainer/grpo_trainer.py       GRPOTrainer._compute_loss
trl          trl/trainer/grpo_trainer.py       GRPOTrainer._generate_and_score_completions
trl          trl/trainer/grpo_trainer.py       GRPOTrainer._calculate_rewards
trl          trl/trainer/grpo_trainer.py       GRPOTrainer.get_off_policy_mask
trl          trl/trainer/grpo_trainer.py       GRPOTrainer.get_gamma_weights
trl          trl/trainer/grpo_trainer.py       GRPOTrainer.get_high_entropy_mask
trl          trl/trainer/rloo_trainer.py       RLOOTrainer._compute_loss
trl          trl/trainer/rloo_trainer.py       RLOOTrainer._generate_and_score_completions
verl         verl/trainer/ppo/core_algos.py    compute_gae_advantage_return
verl         verl/trainer/ppo/core_algos.py    compute_grpo_outcome_advantage
verl         verl/trainer/ppo/core_algos.py    compute_rloo_outcome_advantage
verl         verl/trainer/ppo/core_algos.py    compute_reinforce_plus_plus_baseline_outcome_advantage
verl         verl/trainer/ppo/core_algos.py    agg_loss
verl         verl/trainer/ppo/core_algos.py    compute_policy_loss_vanilla
verl         verl/trainer/ppo/core_algos.py    compute_policy_loss_gspo
verl         verl/trainer/ppo/core_algos.py    kl_penalty_forward
verl         verl/trainer/ppo/rollout_corr_helper.py  compute_rollout_correction_and_rejection_mask
verl         verl/trainer/ppo/metric_utils.py  compute_data_metrics
ms-swift     swift/rlhf_trainers/grpo_trainer.py  GRPOTrainer._compute_advantages
ms-swift     swift/rlhf_trainers/grpo_trainer.py  GRPOTrainer._compute_loss_and_metrics
ms-swift     swift/rlhf_trainers/grpo_trainer.py  GRPOTrainer._compute_off_policy_sequence_mask
ms-swift     swift/rlhf_trainers/grpo_trainer.py  GRPOTrainer._apply_rollout_importance_sampling
ms-swift     swift/rlhf_trainers/grpo_trainer.py  GRPOTrainer._update_metrics
skyrl        skyrl/backends/skyrl_train/utils/ppo_utils.py  compute_approx_kl
skyrl        skyrl/backends/skyrl_train/utils/ppo_utils.py  compute_grpo_outcome_advantage
skyrl        skyrl/backends/skyrl_train/utils/ppo_utils.py  compute_rloo_outcome_advantage
skyrl        skyrl/backends/skyrl_train/utils/ppo_utils.py  ppo_policy_loss
skyrl        skyrl/backends/skyrl_train/utils/ppo_utils.py  apply_loss_reduction_to_advantages_minibatch
skyrl        skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py  compute_off_policy_correction
openrlhf     openrlhf/models/utils.py          compute_approx_kl
openrlhf     openrlhf/models/utils.py          compute_reward
openrlhf     openrlhf/models/loss.py           PolicyLoss
openrlhf     openrlhf/models/loss.py           aggregate_loss
openrlhf     openrlhf/trainer/ppo_utils/length_penalty.py  apply_length_penalties
openrlhf     openrlhf/trainer/ppo_utils/experience_maker.py  RemoteExperienceMaker.compute_advantages_and_returns
openrlhf     openrlhf/trainer/ray/ppo_actor.py  ActorPPOTrainer.training_step
unsloth_zoo  unsloth_zoo/rl_replacements.py    grpo_compute_loss
unsloth_zoo  unsloth_zoo/rl_replacements.py    UnslothEfficientGRPO
unsloth_zoo  unsloth_zoo/rl_replacements.py    grpo_accumulated_loss
unsloth_zoo  unsloth_zoo/rl_replacements.py    create_completion_attention_mask
unsloth_zoo  unsloth_zoo/rl_replacements.py    selective_log_softmax
unsloth      unsloth/models/rl_replacements.py  grpo_trainer_compute_loss
unsloth      unsloth/models/rl_replacements.py  grpo_trainer__generate_and_score_completions
unsloth      unsloth/models/rl_replacements.py  grpo_trainer_metrics
areal        areal/trainer/ppo/actor.py        PPOActor._compute_advantages
areal        areal/trainer/ppo/actor.py        grpo_loss_fn
areal        areal/utils/functional/functional.py  ppo_actor_loss_fn
areal        areal/utils/functional/functional.py  apply_rejection_sampling
"""
"""Package, file and function or class, one a line: estimators, losses, KL, masks, metric reductions."""

OPTIONS = """
trl          trl/trainer/grpo_config.py        GRPOConfig
trl          trl/trainer/rloo_config.py        RLOOConfig
verl         verl/trainer/config/algorithm.py  AlgoConfig
verl         verl/trainer/config/algorithm.py  RolloutCorrectionConfig
verl         verl/workers/config/actor.py      ActorConfig
verl         verl/workers/config/actor.py      PolicyLossConfig
ms-swift     swift/rlhf_trainers/args_mixin.py  GRPOArgumentsMixin
skyrl        skyrl/train/config/config.py      AlgorithmConfig
skyrl        skyrl/train/config/config.py      OffPolicyCorrectionConfig
openrlhf     openrlhf/cli/train_ppo_ray.py     add_argument
unsloth_zoo  unsloth_zoo/rl_replacements.py    grpo_compute_loss
unsloth      unsloth/models/rl.py              replacements
areal        areal/api/cli_args.py             PPOActorConfig
areal        areal/api/cli_args.py             RejectionSamplingConfig
areal        areal/api/cli_args.py             NormConfig
"""
"""Package, file and what states options with their defaults: a class of fields, calls, or a dictionary."""


def watched(table: str, package: str) -> list[tuple[str, str]]:
    """Files and names of a package in one of the tables."""
    lines = [line.split() for line in table.strip().splitlines()]
    return [(file, name) for owner, file, name in lines if owner == package]
