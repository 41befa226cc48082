"""Measure the gradients of a TRL training in three spaces: of log-probs, of logits and of parameters.

The loss is the trainer's own `_compute_loss`, called with the log-probs as a leaf of autograd: its derivative G by each
log-prob is exact, and so is the gradient of parameters that any part of G has, `J^T G`, by one backward pass each.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

OTHER_LOSS = {"grpo": "bnpo", "bnpo": "grpo", "dr_grpo": "grpo", "dapo": "grpo"}
"""A loss type to the one that its gradient is compared with: another average of the same terms."""

PARTS = {"embed": "embedding", "lm_head": "head", "self_attn": "attention", "mlp": "MLP", "norm": "norm"}
"""A piece of a parameter's name to the group that it is of."""

SPACES = ("log-prob", "logit", "parameter")

EVERY = 3
"""Every so many steps the gradient of each response alone is measured: a backward pass for each."""


def part_of(name: str) -> str:
    """Name the group of a parameter."""
    return next(part for piece, part in PARTS.items() if piece in name)


class Probe(transformers.TrainerCallback):
    """Measures every optimizer step of a trainer that updates once per micro-batch.

    Attributes:
        steps: what was measured, one mapping for each step.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.steps: list[dict[str, Any]] = []
        self._leaf: Tensor | None = None
        self._graph: Tensor | None = None
        self._of_dead: Tensor | None = None
        self._moment: Tensor | None = None
        self._norms: list[float] = []
        self._loss, self._log_probs = trainer._compute_loss, trainer._get_per_token_logps_and_entropies
        self._rewards, self._generate = trainer._calculate_rewards, trainer._generate_and_score_completions
        trainer._compute_loss, trainer._get_per_token_logps_and_entropies = self._measured_loss, self._own_log_probs
        trainer._calculate_rewards, trainer._generate_and_score_completions = self._kept_rewards, self._with_rewards
        trainer.add_callback(self)

    def _kept_rewards(self, *args: Any, **more: Any) -> Tensor:
        found = self._rewards(*args, **more)
        self._reward_N = (found * self.trainer.reward_weights.to(found.device)).nansum(dim=1)
        return found

    def _with_rewards(self, *args: Any, **more: Any) -> dict[str, Any]:
        """Give the rewards to the loss; they are shuffled and cut with all else."""
        found = self._generate(*args, **more)
        found["probe_reward"] = self._reward_N
        found["probe_group"] = torch.arange(len(self._reward_N)) // self.trainer.num_generations
        return found

    def _own_log_probs(self, *args: Any, **more: Any) -> Any:
        found = self._log_probs(*args, **more)
        if torch.is_grad_enabled():
            self._graph = found[0]
        if self._leaf is None:
            return found
        return (self._leaf, found[1].detach(), *found[2:])

    def _slopes(self, model: Any, inputs: Mapping[str, Any], **changes: Any) -> Tensor:
        """The derivative of the loss by each log-prob, ``[N, L]``, with attributes of the trainer changed."""
        kept = {name: getattr(self.trainer, name) for name in changes}
        metrics, self.trainer._metrics = self.trainer._metrics, defaultdict(lambda: defaultdict(list))
        try:
            for name, value in changes.items():
                setattr(self.trainer, name, value)
            assert self._graph is not None
            self._leaf = self._graph.detach().requires_grad_()
            loss = self._loss(model, inputs)
            return torch.autograd.grad(loss, self._leaf, materialize_grads=True)[0]
        finally:
            self._leaf, self.trainer._metrics = None, metrics
            for name, value in kept.items():
                setattr(self.trainer, name, value)

    def _measured_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        loss = self._loss(model, inputs)
        if self.trainer.model.training:
            graph = self._graph
            assert graph is not None
            self.steps.append(self._measured(model, inputs, graph))
            self._graph = graph
        return loss

    def _measured(self, model: Any, inputs: Mapping[str, Any], graph: Tensor) -> dict[str, Any]:
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        parts = [(part_of(name), each.numel()) for name, each in named]

        def pulled(slope: Tensor) -> Tensor:
            """The gradient of the parameters that derivatives by log-probs have."""
            found = torch.autograd.grad(
                graph, [each for _, each in named], slope, retain_graph=True, materialize_grads=True
            )
            return torch.cat([each.reshape(-1) for each in found]).double()

        weight, about = self._tokens(model, inputs)
        group, reward = inputs["probe_group"], inputs["probe_reward"]
        dead = torch.tensor([bool((reward[group == each] == reward[group == each][0]).all()) for each in group])
        whole = self._slopes(model, inputs)
        gradient = pulled(whole)
        edits = {"RDG001": torch.where(dead[:, None], 0.0, whole)}
        other = baseline_without_masked(inputs, self.trainer.scale_rewards)
        if other is not None:
            edits["RDA001"] = self._slopes(model, {**inputs, "advantages": other})
        if self.trainer.loss_type in OTHER_LOSS:
            edits["RDG005"] = self._slopes(model, inputs, loss_type=OTHER_LOSS[self.trainer.loss_type])
        if self.trainer.beta:
            edits["KL term"] = self._slopes(model, inputs, beta=0.0)
        found: dict[str, Any] = {
            "edits": {},
            "norm": float(gradient.norm()),
            "dead": dead.double().mean().item(),
            **about,
        }
        for name, slope in edits.items():
            if (slope != whole).any():
                fixed = pulled(slope)
                found["edits"][name] = compared(whole, slope, weight, gradient, fixed, parts)
                if name == "RDG001":
                    self._of_dead = gradient - fixed
        if len(self.steps) % EVERY == EVERY - 1:
            found["rows"] = self._rows(whole, weight, pulled)
        return found

    def _rows(self, slope: Tensor, weight: Tensor, pulled: Callable[[Tensor], Tensor]) -> dict[str, list[float]]:
        """The squared norm of each response's own gradient, by space."""
        number = torch.arange(len(slope))[:, None]
        alone = [pulled(torch.where(number == row, slope, 0.0)) for row in range(len(slope))]
        square = slope.double().square()
        values = square.sum(1).tolist(), (square * weight).sum(1).tolist(), [float(each @ each) for each in alone]
        return dict(zip(SPACES, values, strict=True))

    def _tokens(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, dict[str, float]]:
        """``1 - 2 p + sum pi^2`` of each token, ``[N, L]``, and how saturated the trained ones are."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        with torch.no_grad():
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1] / self.trainer.temperature
        length = inputs["completion_ids"].shape[1]
        prob = logits[:, -length:].double().softmax(-1)
        taken = prob.gather(-1, inputs["completion_ids"][..., None])[..., 0]
        trained = inputs["completion_mask"].bool()
        entropy = -(prob * prob.clamp(min=1e-30).log()).sum(-1)
        about = {"entropy": entropy[trained].mean().item(), "certain": (taken[trained] > 0.99).double().mean().item()}
        return 1 - 2 * taken + prob.square().sum(-1), about

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Measure what Adam made of the gradient."""
        optimizer = more["optimizer"]
        if "optimizer" in vars(optimizer):
            optimizer = optimizer.optimizer
        tensors = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        order = [each for _, each in more["model"].named_parameters() if any(each is one for one in tensors)]
        (beta1, beta2), epsilon = optimizer.param_groups[0]["betas"], optimizer.param_groups[0]["eps"]
        states = [optimizer.state[each] for each in order]
        count = len(self._norms) + 1

        def flat(each: list[Tensor]) -> Tensor:
            return torch.cat([one.reshape(-1) for one in each]).double()

        gradient = flat([each.grad for each in order])
        moment, square = flat([one["exp_avg"] for one in states]), flat([one["exp_avg_sq"] for one in states])
        scale = 1 / ((square / (1 - beta2**count)).sqrt() + epsilon) / (1 - beta1**count)
        own = (1 - beta1) * gradient
        if self._moment is None:
            self._moment = torch.zeros_like(moment)
        dead = torch.zeros_like(moment)
        if self._of_dead is not None:
            dead = self._of_dead * (float(gradient.norm()) / max(self.steps[-1]["norm"], 1e-300))
        self._moment = beta1 * self._moment + (1 - beta1) * dead
        self._norms.append(float(gradient.norm()))
        weights = [beta1**age * norm for age, norm in enumerate(reversed(self._norms))]
        self.steps[-1]["adam"] = {
            "own by norm": weights[0] / max(sum(weights), 1e-300),
            "own in moment": share(own, moment),
            "own in update": share(own * scale, moment * scale),
            "own along update": along(own * scale, moment * scale),
            "dead in update": share(self._moment * scale, moment * scale),
            "dead along update": along(self._moment * scale, moment * scale),
            "size": float((moment * scale).norm() / len(moment) ** 0.5),
        }
        self._of_dead = None


def share(part: Tensor, whole: Tensor) -> float:
    """The norm of a part over that of the whole."""
    return float(part.norm() / whole.norm().clamp(min=1e-300))


def along(part: Tensor, whole: Tensor) -> float:
    """What a part has of the whole, in its direction: parts add up to 1."""
    return float(part @ whole / (whole @ whole).clamp(min=1e-300))


def compared(
    before: Tensor, after: Tensor, weight: Tensor, of_before: Tensor, of_after: Tensor, parts: list[tuple[str, int]]
) -> dict[str, Any]:
    """Compare two gradients by log-probs ``[N, L]``, by logits (`weight`), by parameters and by groups of them."""
    before, after = before.double(), after.double()
    root = weight.clamp(min=0).sqrt()
    pairs = {
        "log-prob": (before.reshape(-1), after.reshape(-1)),
        "logit": ((before * root).reshape(-1), (after * root).reshape(-1)),
        "parameter": (of_before, of_after),
    }
    at = 0
    pieces: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for part, size in parts:
        pieces[part].append((of_before[at : at + size], of_after[at : at + size]))
        at += size
    pairs |= {part: tuple(torch.cat(side) for side in zip(*each, strict=True)) for part, each in pieces.items()}
    found = {name: numbers(*pair) for name, pair in pairs.items()}
    found["log-prob"]["share_l1"] = float((before - after).abs().sum() / before.abs().sum().clamp(min=1e-300))
    return found


def numbers(before: Tensor, after: Tensor) -> dict[str, float]:
    """What the fix changes: the share of the difference, kappa, cosine, and whether the two parts pull together."""
    change, square = before - after, float(after @ after)
    norms = float(before.norm() * after.norm())
    both = float(change.norm() * after.norm())
    return {
        "share": share(change, before),
        "kappa": float(before @ after) / square if square else float("nan"),
        "cosine": float(before @ after) / norms if norms else float("nan"),
        "between": float(change @ after) / both if both else float("nan"),
    }


def baseline_without_masked(inputs: Mapping[str, Tensor], scale: str) -> Tensor | None:
    """The advantages if fully masked responses had no part in the baseline, ``[N]``.

    None where none is masked, or a group has one response left: trainers differ in what it gets.
    """
    kept = inputs["completion_mask"].sum(1) > 0
    reward, group = inputs["probe_reward"], inputs["probe_group"]
    left = torch.bincount(group[kept], minlength=int(group.max()) + 1)
    if kept.all() or scale not in ("group", "none") or not kept.any() or bool((left == 1).any()):
        return None
    found = torch.zeros_like(inputs["advantages"])
    for each in group[kept].unique():
        rows = (group == each) & kept
        centered = reward[rows] - reward[rows].mean()
        spread = reward[rows].std() + 1e-4 if scale == "group" else 1.0
        found[rows] = (centered / spread).to(found.dtype)
    return found
