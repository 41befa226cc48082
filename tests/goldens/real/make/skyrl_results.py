# ruff: noqa
"""Results of SkyRL's own functions, whose modules are never imported: CHECKOUT OUT.pkl.

CHECKOUT is a clone of NovaSky-AI/SkyRL at a9564572eb8e. `store.py` makes the tables of the pickle.
"""

if __name__ == "__main__":
    import sys, types

    _l = types.ModuleType("loguru")
    _l.logger = types.SimpleNamespace(warning=lambda *a: None, info=lambda *a: None)
    sys.modules["loguru"] = _l
    import sys, typing
    from collections import defaultdict
    from pathlib import Path
    from types import SimpleNamespace
    import numpy as np, torch

    sys.path.insert(0, str(Path(__file__).parent))
    import skyrl_cases, upstream

    root = Path(sys.argv[1])

    def load(path, *rest, **more):
        upstream.load(root / path, *rest, **more)

    def functions(double):
        s = {
            "torch": torch,
            "np": np,
            "defaultdict": defaultdict,
            **{n: getattr(typing, n) for n in ("Any", "Dict", "List", "Optional", "Tuple", "Union")},
        }
        # In float64 the ratio's cast to float32 is taken out, so that the formula itself is compared.
        load(
            "skyrl/backends/skyrl_train/utils/torch_utils.py",
            ["masked_mean", "safe_exp_delta"],
            s,
            edit=(lambda t: t.replace("delta.to(torch.float32)", "delta")) if double else str,
        )
        load(
            "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py",
            [
                "off_policy_correction_enabled",
                "compute_tis_ratio",
                "compute_outlier_token_mask",
                "compute_token_mask",
                "compute_sequence_mask",
                "compute_off_policy_correction",
                "apply_off_policy_correction",
            ],
            s,
        )
        load(
            "skyrl/backends/skyrl_train/utils/ppo_utils.py",
            [
                "compute_approx_kl",
                "masked_var",
                "masked_whiten",
                "ppo_policy_loss",
                "sapo_policy_loss",
                "gspo_policy_loss",
                "compute_policy_loss_cispo",
                "rollout_is_policy_loss",
                "dppo_policy_loss",
                "importance_sampling_loss",
                "compute_policy_loss_clip_cov",
                "compute_policy_loss_kl_cov",
                "reduce_loss",
                "apply_loss_reduction_to_advantages_minibatch",
                "compute_reinforce_plus_plus_outcome_advantage",
                "compute_rloo_outcome_advantage",
                "compute_grpo_outcome_advantage",
                "compute_maxrl_advantage",
                "compute_gae_advantage_return",
            ],
            s,
        )
        load(
            "skyrl/train/trainer.py",
            ["_normalize_advantages", "apply_reward_kl_penalty", "compute_advantages_and_returns"],
            s,
            "RayPPOTrainer",
        )
        load("skyrl/backends/skyrl_train/workers/worker_utils.py", ["reduce_metrics"], s)
        s["MEAN_LOSS_METRICS"] = frozenset({"mtp_loss", "draft_loss"})
        s["logger"] = SimpleNamespace(info=lambda *a: None)
        return s

    EST = {
        "gae": "compute_gae_advantage_return",
        "grpo": "compute_grpo_outcome_advantage",
        "rloo": "compute_rloo_outcome_advantage",
        "maxrl": "compute_maxrl_advantage",
        "reinforce++": "compute_reinforce_plus_plus_outcome_advantage",
    }
    LOSS = {
        "regular": "ppo_policy_loss",
        "dual_clip": "ppo_policy_loss",
        "sapo": "sapo_policy_loss",
        "gspo": "gspo_policy_loss",
        "cispo": "compute_policy_loss_cispo",
        "rollout_is": "rollout_is_policy_loss",
        "dppo": "dppo_policy_loss",
        "importance_sampling": "importance_sampling_loss",
        "clip_cov": "compute_policy_loss_clip_cov",
        "kl_cov": "compute_policy_loss_kl_cov",
    }

    def config(options):
        c = dict(
            advantage_estimator="grpo",
            kl_ctrl=SimpleNamespace(type="fixed"),
            kl_estimator_type="k3",
            use_kl_in_reward=False,
            use_kl_loss=True,
            kl_loss_coef=0.001,
            advantage_batch_normalize=False,
            policy_loss_type="regular",
            loss_reduction="token_mean",
            grpo_norm_by_std=True,
            lambd=1.0,
            gamma=1.0,
            eps_clip_low=0.2,
            eps_clip_high=0.2,
            clip_ratio_c=3.0,
            max_seq_len=17,
            sapo=dict(tau_pos=1.0, tau_neg=1.05),
            cispo=dict(cispo_eps_clip_low=1.0, cispo_eps_clip_high=4.0, cispo_anchor="old"),
            clip_cov=dict(clip_ratio=0.0002, clip_cov_lb=1.0, clip_cov_ub=5.0),
            kl_cov=dict(kl_cov_frac=0.2, ppo_kl_coef=1.0),
            dppo=dict(dppo_type="binary_tv", delta_low=0.2, delta_high=0.2),
            off_policy_correction=dict(
                tis_ratio_type=None,
                token_tis_ratio_clip_high=2.0,
                sequence_tis_ratio_clip_high=5.0,
                sequence_mask_metric=None,
                geo_mask_high=1.01,
                geo_mask_low=0.99,
                product_mask_high=2.0,
                product_mask_low=0.5,
                outlier_token_is_threshold_low=None,
                outlier_token_is_threshold_high=None,
                token_mask_is_threshold_low=None,
                token_mask_is_threshold_high=None,
            ),
        )
        for name, value in options.items():
            first, _, second = name.partition(".")
            if second:
                c[first][second] = value
            else:
                c[first] = value
        return SimpleNamespace(**{k: SimpleNamespace(**v) if isinstance(v, dict) else v for k, v in c.items()})

    class Data(dict):
        metadata = {}

        def __getitem__(self, key):
            return Data({k: v[key] for k, v in self.items()}) if isinstance(key, slice) else dict.__getitem__(self, key)

        def to(self, *_):
            return self

    def run(case, options, dtype):
        torch.set_default_dtype(dtype)
        s = functions(dtype == torch.float64)
        b = skyrl_cases.batch_of(case)
        algorithm = config(options)
        n, pad = len(b["mask"]), lambda rows, d=dtype: upstream.padded(rows, d)
        data = Data(
            loss_mask=pad(b["mask"]),
            response_mask=pad([[1] * len(m) for m in b["mask"]], torch.int64),
            base_action_log_probs=pad(b["ref"]),
            action_log_probs=pad(b["old"]),
            rollout_logprobs=pad(b["rollout"]),
            entropy=pad(b["entropy"]),
            policy=pad(b["policy"]),
        )
        data["rewards"] = (
            pad(b["token_rewards"])
            if "token_rewards" in b
            else pad([[0.0] * (len(m) - 1) + r for m, r in zip(b["mask"], b["rewards"])])
        )
        data["values"] = pad(b["values"])
        uids = [f"u{g}" for g in b["group"]]
        data.metadata = {"uids": uids, "avg_response_length": 1.0}
        micro = sum(1 for r in range(n) if b["micro"][r] == 0 and b["optim"][r] == 0)
        me = SimpleNamespace(
            cfg=SimpleNamespace(
                trainer=SimpleNamespace(algorithm=algorithm, micro_train_batch_size_per_gpu=micro),
                generator=SimpleNamespace(step_wise_trajectories=False),
            ),
            reward_kl_controller=None,
            all_metrics={},
        )
        s["ppo_utils"] = SimpleNamespace(
            compute_advantages_and_returns=lambda adv_estimator, **k: s[EST[adv_estimator]](**k)
        )
        raw = data["rewards"].sum(-1)
        me.all_metrics["reward/avg_raw_reward"] = raw.mean().item()
        if algorithm.use_kl_in_reward:
            data = s["apply_reward_kl_penalty"](me, data)
        me.all_metrics.pop("loss/avg_kl_max", None)
        me.all_metrics.pop("loss/kl_loss_coef", None)
        plain = {k: v for k, v in data.items() if v is not None}
        data = s["compute_advantages_and_returns"](me, data)
        advantage = data["advantages"].clone()
        bounds = [
            (min(r for r in range(n) if b["optim"][r] == o), max(r for r in range(n) if b["optim"][r] == o) + 1)
            for o in sorted(set(b["optim"]))
        ]
        prompts = [
            (min(r for r in range(n) if b["group"][r] == g), max(r for r in range(n) if b["group"][r] == g) + 1)
            for g in sorted(set(b["group"]))
        ]
        keep = Data({k: v for k, v in data.items() if v is not None})
        keep.metadata = data.metadata
        data = s["_normalize_advantages"](me, keep, bounds, prompts)
        leaf = data["policy"].clone().requires_grad_()
        over, total = defaultdict(list), 0
        for start, end in bounds:
            one = defaultdict(list)
            micros = range(start, end, micro)
            for at in micros:
                m = slice(at, min(at + micro, end))
                mask = data["loss_mask"][m]
                policy_loss, extra = s[LOSS[algorithm.policy_loss_type]](
                    leaf[m],
                    data["action_log_probs"][m],
                    data["advantages"][m],
                    algorithm,
                    mask,
                    data["rollout_logprobs"][m],
                )
                kl = torch.zeros((), dtype=dtype)
                if algorithm.use_kl_loss:
                    kl = s["compute_approx_kl"](
                        leaf[m],
                        data["base_action_log_probs"][m],
                        loss_mask=mask,
                        kl_estimator_type=algorithm.kl_estimator_type,
                    )
                    kl = s["masked_mean"](kl, mask, dim=-1).mean()
                    one["policy_kl"].append(kl.item())
                # the worker's own line, on one rank: the KL is averaged over micro-batches
                loss = policy_loss + kl * algorithm.kl_loss_coef / len(micros)
                (loss / len(bounds)).backward()
                total = total + loss.item() / len(bounds)
                one["policy_loss"].append(policy_loss.item())
                one["final_loss"].append(loss.item())
                one["policy_entropy"].append(s["masked_mean"](data["entropy"][m], mask).item())
                for k, v in extra.items():
                    if k in ("clip_ratio", "is_ratio_mean", "is_ratio_max"):
                        one["loss_metrics/" + k].append(v)
            for k, v in s["reduce_metrics"](one, sum_loss_metrics=True).items():
                over[k].append(v)
        metrics = dict(
            {"loss": total}, **me.all_metrics, **{f"policy/{k}": v for k, v in s["reduce_metrics"](over).items()}
        )
        return metrics, *(upstream.unpadded(x, b["mask"]) for x in (advantage.detach(), leaf.grad))

    upstream.store(skyrl_cases, run, ValueError)
