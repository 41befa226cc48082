# ruff: noqa
"""Results of ms-swift's own functions, whose modules are never imported: CHECKOUT OUT.pkl.

CHECKOUT is a clone of modelscope/ms-swift at 3602360a5623, or the unpacked wheel of 4.6.0. `store.py` makes the tables
of the pickle.
"""

if __name__ == "__main__":
    import sys
    from collections import defaultdict
    from pathlib import Path
    from types import SimpleNamespace
    import numpy as np, torch

    sys.path.insert(0, str(Path(__file__).parent))
    import swift_cases, upstream

    root = Path(sys.argv[1])

    def load(path, *rest):
        upstream.load(root / path, *rest)

    from dataclasses import dataclass
    from trl.trainer.grpo_trainer import nanmax, nanmin
    import typing

    base = {
        "torch": torch,
        "dataclass": dataclass,
        **{n: getattr(typing, n) for n in ("Any", "Dict", "List", "Optional", "Tuple", "Union")},
    }
    adv = dict(base)
    load("swift/utils/torch_utils.py", ["nanstd"], adv)
    load(
        "swift/rl_core/advantage.py",
        [
            "compute_advantages",
            "expand_advantage_to_per_token",
            "compute_teacher_logratio",
            "RewardMetrics",
            "compute_reward_metrics",
        ],
        adv,
    )
    METHODS = [
        "_compute_advantages",
        "_compute_loss_and_metrics",
        "_update_metrics",
        "_compute_sequence_level_ratios",
        "_apply_rollout_importance_sampling",
        "_get_rollout_is_correction",
        "_compute_off_policy_sequence_mask",
        "_compute_rollout_offpolicy_metrics",
        "_compute_is_correction_metrics",
        "_prepare_algorithm_params",
        "_compute_fipo_influence",
    ]
    if "_undo_gradient_accumulation_scaling" in (root / "swift/rlhf_trainers/grpo_trainer.py").read_text():
        METHODS.append("_undo_gradient_accumulation_scaling")

    class Accelerator:
        """One of several ranks: what a rank gathers is known from a first pass over all."""

        def __init__(self, ranks):
            self.num_processes, self.seen, self.rank, self.place, self.replay = (
                ranks,
                [[] for _ in range(ranks)],
                0,
                0,
                False,
            )

        def gather_for_metrics(self, x):
            if not self.replay:
                self.seen[self.rank].append(x.detach().clone())
                return x
            self.place += 1
            parts = [self.seen[r][self.place - 1] for r in range(self.num_processes)]
            return torch.cat(parts) if x.ndim == 2 else torch.stack(parts).flatten()

    space = dict(
        base,
        nanmax=nanmax,
        nanmin=nanmin,
        gather=lambda x: ACC.gather_for_metrics(x) if x.ndim == 0 else GATHER(x),
        gather_object=lambda x: x,
        logger=SimpleNamespace(info=lambda *a: None, warning=lambda *a: None),
        expand_advantage_to_per_token=adv["expand_advantage_to_per_token"],
        compute_advantages=adv["compute_advantages"],
        compute_reward_metrics=adv["compute_reward_metrics"],
        defaultdict=defaultdict,
        WINDOW_NORMALIZED_LOSS_TYPES=["cispo", "dapo", "fipo"],
    )
    load("swift/rlhf_trainers/grpo_trainer.py", METHODS, space, "GRPOTrainer")
    Swift = type("Swift", (), {name: space[name] for name in METHODS})
    DEFAULTS = dict(
        dataset_shuffle=True,
        loss_type="grpo",
        scale_rewards=None,
        num_iterations=1,
        epsilon=0.2,
        epsilon_high=None,
        delta=None,
        dynamic_sample=False,
        max_resample_times=3,
        overlong_filter=False,
        top_entropy_quantile=1.0,
        importance_sampling_level="token",
        tau_pos=1.0,
        tau_neg=1.05,
        real_tau=0.5,
        fipo_decay_rate=32.0,
        fipo_clip_range=0.2,
        fipo_clip_high_only=True,
        fipo_safety_threshold=4.0,
        advantage_estimator="grpo",
        kl_in_reward=None,
        rollout_importance_sampling_mode=None,
        rollout_importance_sampling_threshold=2.0,
        log_rollout_offpolicy_metrics=False,
        off_policy_sequence_mask_delta=None,
        advantage_reweight=None,
        rlsd_lambda=0.5,
        rlsd_reweight_clip_range=0.2,
        rlsd_lambda_warmup_steps=0,
        rlsd_lambda_decay_steps=0,
        rlsd_negative_only=False,
        sdar_loss_coef=0.0,
        sdar_gate_beta=5.0,
        log_entropy=True,
        max_completion_length=9,
    )

    def run(case, options, dtype):
        global ACC, GATHER
        b = swift_cases.batch_of(case)
        own = dict(DEFAULTS, **{k: v for k, v in options.items() if k in DEFAULTS})
        # what swift's arguments class fills in
        if own["kl_in_reward"] is None:
            own["kl_in_reward"] = own["advantage_estimator"] != "grpo"
        if own["scale_rewards"] is None:
            own["scale_rewards"] = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}[
                own["advantage_estimator"]
            ]
        me = Swift()
        me.args = SimpleNamespace(**own, gradient_accumulation_steps=b["micros"])
        me._prepare_algorithm_params()
        me.model = SimpleNamespace(training=True)
        me.model_accepts_loss_kwargs, me.compute_loss_func = False, None
        me.beta = options.get("beta", 0.04)
        me.num_generations = b["K"]
        me.num_generations_eval = b["K"]
        me.max_completion_length = own["max_completion_length"]
        me.dynamic_num_samples = False
        me._has_teacher = False
        me.disable_rollout_importance_sampling = False
        me.compute_entropy = True
        me.chord_sft_iterator = None
        me._metrics = {"train": defaultdict(list)}
        me._logs = {"rewards": defaultdict(list), "entropy": []}
        funcs = torch.tensor(b["rewards"], dtype=dtype)
        me.reward_weights = torch.tensor(b["weights"], dtype=dtype)
        me.reward_func_names = [f"f{i}" for i in range(funcs.shape[1])]
        ACC = me.accelerator = Accelerator(b["ranks"])
        parts = swift_cases.cut(b)  # [(rank, micro, rows)]
        grpo = {}
        for rank, micro, rows in parts:
            width = max(len(b["mask"][r]) for r in rows)

            def pad(name, fill=0.0, d=dtype):
                out = torch.full((len(rows), width), fill, dtype=d)
                for i, r in enumerate(rows):
                    out[i, : len(b[name][r])] = torch.tensor(b[name][r], dtype=d)
                return out

            grpo[rank, micro] = SimpleNamespace(
                rows=rows,
                completion_mask=pad("mask", 0, torch.bool),
                truncated_mask=torch.tensor([b["truncated"][r] for r in rows]),
                policy=pad("policy").requires_grad_(),
                entropy=pad("entropy"),
                old_per_token_logps=pad("old"),
                ref_per_token_logps=pad("ref") if me.beta else None,
                rollout_per_token_logps=pad("rollout")
                if options.get("use_vllm") or own["rollout_importance_sampling_mode"]
                else None,
                teacher_per_token_logps=None,
            )
        total = torch.stack([g.completion_mask.sum() for g in grpo.values()]).sum()
        order = [r for _, _, rows in parts for r in rows]
        GATHER = lambda x: x
        advantage = me._compute_advantages(
            [None] * len(order), funcs[order], [{"grpo_batch": g} for g in grpo.values()]
        )
        place = {r: i for i, r in enumerate(order)}
        for g in grpo.values():
            g.num_items_in_batch = total
            g.advantages = adv["expand_advantage_to_per_token"](
                advantage[[place[r] for r in g.rows]], g.completion_mask
            )
        me._get_per_token_logps_and_entropies = lambda model, inputs, g, compute_entropy=False: (g.policy, g.entropy)
        losses = []
        for micro in range(b["micros"]):
            values = []
            ACC.seen = [[] for _ in range(b["ranks"])]
            for replay in (False, True):
                ACC.replay, values = replay, []
                # entropies are gathered over ranks first
                for rank in range(b["ranks"]):
                    ACC.rank, ACC.place = rank, 0
                    rows_of = [grpo[r, micro] for r in range(b["ranks"])]
                    means = [
                        torch.nanmean(g.entropy.masked_fill(g.completion_mask == 0, float("nan")), dim=1)
                        for g in rows_of
                    ]
                    GATHER = lambda x, m=torch.cat(means): m
                    values.append(me._compute_loss_and_metrics(None, None, grpo[rank, micro]))
            me._update_metrics(values[0][1])
            losses += [v[0] for v in values]
        loss = (
            torch.stack(losses).sum() / b["micros"] / b["ranks"]
        )  # the engine's division by GA, and the mean over ranks
        loss.backward()
        grad = [None] * len(order)
        for g in grpo.values():
            for i, r in enumerate(g.rows):
                grad[r] = (torch.zeros_like(g.policy) if g.policy.grad is None else g.policy.grad)[
                    i, : len(b["mask"][r])
                ].tolist()
        metrics = {k: sum(v) / len(v) for k, v in me._metrics["train"].items()}
        advantages = advantage[[place[r] for r in range(len(order))]].tolist()
        return {"loss": loss.detach()} | metrics, advantages, [x for g in grad for x in g]

    upstream.store(swift_cases, run)
