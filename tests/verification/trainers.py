"""Functions of installed trainers as functions of a case: called as the trainer calls them, with what it is given."""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import torch
from parity.padded import precision
from parity.test_trl import Ranks, stub
from parity.test_verl_policy import actor_config

from rolloutdoctor.commands.verify.checks import objective_of


def written(trainer, options):
    """``NAME@RELEASE:OPTION=VALUE,...``."""
    shown = ",".join(f"{name}={str(value).lower()}" for name, value in options.items())
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


def _logps(case):
    leaf, entropy = case.column("policy_log_probs"), case.column("entropy")
    return lambda *_, **__: (leaf, entropy, None)


def grpo_loss(trainer_class, options):
    """TRL's `GRPOTrainer._compute_loss`, or that of a subclass."""
    mine = objective_of(written("trl@1.16.0", options))

    def loss(case):
        self = stub(trainer_class, mine, options, 1, 1, Ranks(1), training=True)
        self._get_per_token_logps_and_entropies = _logps(case)
        self.get_high_entropy_mask = partial(trainer_class.get_high_entropy_mask, self)
        with precision(case.dtype):
            return trainer_class._compute_loss(self, None, _inputs(case))

    return loss


def rloo_loss(trainer_class, options):
    """TRL's `RLOOTrainer._compute_loss`."""
    mine = objective_of(written("trl-rloo@1.16.0", options))

    def loss(case):
        self = SimpleNamespace(
            accelerator=Ranks(1),
            model=SimpleNamespace(training=True),
            epsilon_low=mine.surrogate.clip_low,
            epsilon_high=mine.surrogate.clip_high,
            aux_loss_enabled=False,
            _metrics={"train": defaultdict(list)},
            _get_per_token_logps_and_entropies=_logps(case),
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
