"""Make `data/nemo_rl.npz`: ``python tests/goldens/make_nemo_rl.py CHECKOUT``, a checkout of NVIDIA-NeMo/RL.

Modules that the functions do not use are stubs. In float64 masks stay float32, as NeMo-RL's are.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from goldens.nemo_rl_cases import ESTIMATORS, LOSSES, SIZES, STORED, case, folded
from goldens.processor import note

STUBS = (
    *("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.loss", "nemo_rl.algorithms.x_token", "nemo_rl.data"),
    *("nemo_rl.algorithms.x_token.loss_utils", "nemo_rl.data.chat_templates", "nemo_rl.distributed", "nemo_rl.utils"),
    *("nemo_rl.distributed.batched_data_dict", "nemo_rl.distributed.model_utils", "nemo_rl.models"),
    *("nemo_rl.models.dtensor", "nemo_rl.models.dtensor.parallelize", "nemo_rl.models.policy"),
    *("nemo_rl.utils.fastokens", "nemo_rl.utils.logger"),
)


def load(checkout):
    """The three modules with the functions."""
    for name in STUBS:
        module = ModuleType(name)
        module.__path__, module.__getattr__ = [], lambda _: MagicMock()
        sys.modules[name] = module

    def real(name):
        path = Path(checkout) / f"{name.replace('.', '/')}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    utils, _ = real("nemo_rl.algorithms.utils"), real("nemo_rl.algorithms.loss.interfaces")
    losses = real("nemo_rl.algorithms.loss.loss_functions")
    sys.modules["nemo_rl.algorithms.loss"].ClippedPGLossConfig = losses.ClippedPGLossConfig
    return utils, losses, real("nemo_rl.algorithms.advantage_estimator")


def advantages(estimators, losses, step, options, dtype):
    """Advantages ``[N, places]``."""
    options = dict(options)
    clip, kl = options.pop("clip", (None, None)), options.pop("kl", None)
    config = estimators.AdvEstimatorConfig(**options)
    made = {"grpo": "GRPO", "gdpo": "GDPO", "reinforce_plus_plus": "ReinforcePlusPlus"}[config.name]
    in_reward = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": kl}
    loss = losses.ClippedPGLossConfig(**(in_reward if kl else {}))
    found = getattr(estimators, f"{made}AdvantageEstimator")(config, loss).compute_advantage(
        prompt_ids=step["group"][:, None],
        rewards=step["reward"].to(dtype),
        mask=step["token"] * step["kept"].float()[:, None],
        repeated_batch={key: step[key].to(dtype) for key in ("reward/a", "reward/b")},
        logprobs_policy=step["old_log_probs"].to(dtype),
        logprobs_reference=step["ref_log_probs"].to(dtype),
    )
    low, high = clip
    return found if low is high is None else found.clamp(min=low, max=high)


def loss(losses, step, options, advantage, dtype):
    """Loss of the step, its gradient ``[N, places]``, and the metrics as they are added up."""
    function = losses.ClippedPGLossFn(losses.ClippedPGLossConfig(**options))
    policy = step["policy_log_probs"].to(dtype).requires_grad_()
    total, metrics, steps = 0.0, {}, int(step["optim"].max()) + 1

    def shifted(x):
        return torch.nn.functional.pad(x, (1, 0))

    for number in range(steps):
        here = (step["optim"] == number).nonzero().squeeze(1)
        kept = step["kept"].float()
        valid = (step["token"] * kept[:, None])[here].sum()
        # Two micro-batches, whose results are added up.
        for micro in range(2):
            part = here[step["micro"][here] == micro]
            data = {
                "token_mask": shifted(step["token"][part].long()),
                "sample_mask": kept[part],
                "advantages": shifted(advantage[part]),
                "prev_logprobs": shifted(step["old_log_probs"][part].to(dtype)),
                "generation_logprobs": shifted(step["rollout_log_probs"][part].to(dtype)),
                "reference_policy_logprobs": shifted(step["ref_log_probs"][part].to(dtype)),
            }
            value, logged = function(policy[part], data, kept[here].sum(), valid)
            total = total + value / steps
            for name, number_ in logged.items():
                metrics.setdefault(name, []).append(number_ / (1 if name.endswith(("_min", "_max")) else steps))
    grad = torch.autograd.grad(total, policy)[0]
    ends = {"_min": min, "_max": max}
    return float(total.detach()), grad, {name: ends.get(name[-4:], sum)(values) for name, values in metrics.items()}


def main(checkout):
    """Run everything in both precisions, and store it."""
    _, losses, estimators = load(checkout)
    stored = {}
    for dtype, key in ((torch.float32, "f32"), (torch.float64, "f64")):
        for name in SIZES:
            torch.set_default_dtype(dtype)
            step = case(name)
            trained = step["token"] & step["kept"][:, None]
            for label, options in ESTIMATORS.items():
                found = advantages(estimators, losses, step, options, dtype).broadcast_to(trained.shape)
                stored[f"{key}/{name}/advantage/{label}"] = folded(found, trained).numpy()
            plain = advantages(estimators, losses, step, ESTIMATORS["grpo_raw"], dtype).broadcast_to(trained.shape)
            # With it a count of tokens would be float64, too, and 1e-8 no longer below its rounding.
            torch.set_default_dtype(torch.float32)
            for label, options in LOSSES.items():
                value, grad, metrics = loss(losses, step, options, plain, dtype)
                stored[f"{key}/{name}/gradient/{label}"] = folded(grad, trained).numpy()
                stored[f"{key}/{name}/metrics/{label}"] = np.array(
                    [value, *(metrics[each] for each in sorted(metrics))]
                )
                stored[f"names/{label}"] = np.array(["total", *sorted(metrics)])
    names = {key: value for key, value in stored.items() if key.startswith("names/")}
    numbers = {key: value for key, value in stored.items() if key not in names}
    # Hundreds of members of an archive take more than what is in them.
    np.savez_compressed(
        STORED,
        keys=np.array([*numbers]),
        sizes=np.array([value.size for value in numbers.values()]),
        single=np.concatenate([value.ravel() for key, value in numbers.items() if key[:3] == "f32"]).astype(np.float32),
        double=np.concatenate([value.ravel() for key, value in numbers.items() if key[:3] == "f64"]),
        metrics=np.array([f"{key.removeprefix('names/')}={','.join(value)}" for key, value in names.items()]),
    )
    note(STORED)


if __name__ == "__main__":
    main(sys.argv[1])
