"""Functions of installed trainers as functions of a case: called as the trainer calls them, with what it is given."""

import inspect
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import torch
from parity.padded import precision
from parity.test_trl import Ranks, stub
from parity.test_verl_advantages import Config
from parity.test_verl_policy import CLIP, actor_config

from rolloutdoctor.commands.verify.losses import objective_of


def written(trainer, options):
    """``NAME@RELEASE:OPTION=VALUE,...``."""
    shown = ",".join(f"{name}={'null' if value is None else str(value).lower()}" for name, value in options.items())
    return f"{trainer}:{shown}" if shown else trainer


def _inputs(case):
    ids = torch.zeros_like(case.response_mask)
    mask = case.response_mask
    return {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": case.advantages,
        "old_per_token_logps": case.column("old_log_probs"),
        "ref_per_token_logps": case.column("ref_log_probs"),
        "num_items_in_batch": case.num_items_in_batch,
    }


def _forward(trainer_class, case, *, images=False):
    """A forward pass, and the inputs of images: without one of them a model that needs it has lower log-probs."""
    method = inspect.signature(trainer_class._get_per_token_logps_and_entropies)
    optional = [name for name, each in method.parameters.items() if each.default is None and name != "batch_size"]
    names = optional if images else []

    def forward(*_, compute_aux_loss=False, **given):
        missing = sum(given.get(name) is None for name in names)
        log_probs = case.column("policy_log_probs") - 0.25 * missing
        return log_probs, case.column("entropy"), case.aux_loss if compute_aux_loss else None

    return forward, dict.fromkeys(names, torch.ones(1))


def grpo_loss(trainer_class, options, *, images=False):
    """TRL's `GRPOTrainer._compute_loss`, or that of a subclass; its model may need the inputs of images."""
    mine = objective_of(written("trl@1.16.0", options))

    def loss(case):
        self = stub(trainer_class, mine, options, 1, 1, Ranks(1), training=True)
        self._get_per_token_logps_and_entropies, seen = _forward(trainer_class, case, images=images)
        self.router_aux_loss_coef = options.get("router_aux_loss_coef", 0.0)
        self.aux_loss_enabled = self.router_aux_loss_coef != 0
        self.entropy_coef, self.use_adaptive_entropy = options.get("entropy_coef", 0.0), False
        self._entropy_bonus_enabled = self.entropy_coef != 0
        self.get_high_entropy_mask = partial(trainer_class.get_high_entropy_mask, self)
        with precision(case.dtype):
            return trainer_class._compute_loss(self, None, _inputs(case) | seen)

    return loss


def rloo_loss(trainer_class, options):
    """TRL's `RLOOTrainer._compute_loss`."""
    mine = objective_of(written("trl-rloo@1.16.0", options))

    def loss(case):
        forward, _ = _forward(trainer_class, case)
        self = SimpleNamespace(
            accelerator=Ranks(1),
            model=SimpleNamespace(training=True),
            epsilon_low=mine.surrogate.clip_low,
            epsilon_high=mine.surrogate.clip_high,
            aux_loss_enabled=False,
            _metrics={"train": defaultdict(list)},
            _get_per_token_logps_and_entropies=forward,
        )
        inputs = _inputs(case)
        inputs["old_logps"] = (inputs["old_per_token_logps"] * case.response_mask).sum(1)
        with precision(case.dtype):
            return trainer_class._compute_loss(self, None, inputs | {"advantages": case.row_advantages})

    return loss


def verl_loss(algos, mode, aggregation):
    """A policy loss of verl in its registry."""

    def loss(case):
        config = actor_config(mode, aggregation)
        mask = case.response_mask
        config.global_batch_info.update(
            dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=len(mask), loss_scale_factor=37
        )
        arguments = {"config": config, "loss_agg_mode": aggregation, "rollout_is_weights": None}
        with precision(case.dtype):
            return algos.get_policy_loss_fn(mode)(
                old_log_prob=case.column("old_log_probs"),
                log_prob=case.column("policy_log_probs"),
                advantages=case.advantages,
                response_mask=mask,
                **arguments,
            )[0]

    return loss


def verl_estimator(algos, name):
    """An advantage estimator of verl in its registry with the options that it is compared under."""
    options = {"gae": {"gamma": 1.0, "lam": 0.95}, "reinforce_plus_plus": {"gamma": 0.95}}.get(name, {})
    config = Config(norm_adv_by_std_in_grpo=True, **options)
    more = {"config": config, **(options if name == "gae" else {})}
    if name == "gdpo":
        config["gdpo_reward_keys"] = ["format", "accuracy"]
        options = {"gdpo_reward_keys": "format,accuracy"}
    return algos.get_adv_estimator_fn(name), more, {"adv_estimator": name, **options}


def bypass_loss(algos, inside):
    """verl's loss of `bypass_mode`."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.workers.config import ActorConfig, PolicyLossConfig

    correction = RolloutCorrectionConfig(bypass_mode=True, **inside)
    policy = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=correction)

    def loss(case):
        config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy, **CLIP)
        mask = case.response_mask
        config.global_batch_info.update(dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=len(mask))
        old, log_probs = case.column("rollout_log_probs"), case.column("policy_log_probs")
        with precision(case.dtype):
            return algos.compute_policy_loss_bypass_mode(
                old, log_probs, case.advantages, mask, loss_agg_mode="token-mean", config=config
            )[0]

    return loss
