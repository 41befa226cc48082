"""Functions as trainers have them: advantages and a loss, right and wrong."""

import torch


def grpo(rewards, group_index, eps=1e-6, std=True):
    """GRPO as verl computes it: a group of one keeps its reward."""
    advantages = torch.zeros_like(rewards)
    for group in group_index.unique():
        own = group_index == group
        scores, alone = rewards[own], int(own.sum()) == 1
        mean, spread = (0.0, 1.0) if alone else (scores.mean(), scores.std())
        advantages[own] = (scores - mean) / ((spread + eps) if std else 1)
    return advantages


def dr_grpo(rewards, group_index):
    """GRPO without the division."""
    return grpo(rewards, group_index, std=False)


def rloo(rewards, group_index):
    """The mean of the other responses is the baseline."""
    sums = torch.zeros(int(group_index.max()) + 1).index_add(0, group_index, rewards)[group_index]
    sizes = torch.bincount(group_index)[group_index]
    return torch.where(sizes > 1, rewards - (sums - rewards) / (sizes - 1).clamp(min=1), rewards)


def raw(rewards):
    """No baseline at all."""
    return rewards.clone()


def clipped_loss(
    per_token_logps, old_per_token_logps, ref_per_token_logps, advantages, completion_mask, beta=0.04, tokens=None
):
    """PPO's clipped term and k3, averaged over the tokens of the batch."""
    ratio = (per_token_logps - old_per_token_logps).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    u = ref_per_token_logps - per_token_logps
    loss = loss + beta * (u.exp() - u - 1)
    return (loss * completion_mask).sum() / (completion_mask.sum() if tokens is None else tokens)
