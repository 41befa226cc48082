# ruff: noqa
"""Results of OpenRLHF's own functions, whose modules are never imported: CHECKOUT OUT.pkl, with RELEASE of 0.11.2.

CHECKOUT is a clone of OpenRLHF/OpenRLHF at 3c3be6234e0c. `store.py` makes the tables of the pickle. In float64 the
casts to float32 are taken out. One rank; the engine's division by the accumulation steps is that of DeepSpeed.
"""

if __name__ == "__main__":
    import itertools, sys, typing
    from dataclasses import dataclass, field, fields
    from pathlib import Path
    from types import SimpleNamespace as Space
    import numpy as np, torch

    sys.path.insert(0, str(Path(__file__).parent))
    import openrlhf_cases, upstream

    root = Path(sys.argv[1]) / "openrlhf"
    later = sys.argv[3:]

    def load(path, names, space, double, cls=None):
        upstream.load(root / path, names, space, cls, upstream.uncast if double else str)

    class Bar(list):
        def set_postfix(self, status):
            pass

    def functions(double):
        s = {
            "torch": torch,
            "nn": torch.nn,
            "dist": torch.distributed,
            "itertools": itertools,
            "dataclass": dataclass,
            "field": field,
            "fields": fields,
        }
        s |= {n: getattr(typing, n) for n in ("Any", "Dict", "List", "Optional", "Tuple", "Union")}
        s |= {
            "logger": Space(info=lambda *a: None, warning=lambda *a: None),
            "tqdm": lambda x, **k: Bar(x),
            "DataLoader": lambda buffer, **k: buffer.items,
        }
        load(
            "models/utils.py",
            ["KL_IS_WEIGHT_CLIP"] * bool(later) + ["compute_approx_kl", "compute_reward", "masked_mean"],
            s,
            double,
        )
        load("models/loss.py", ["aggregate_loss", "PolicyLoss"], s, double)
        load(
            "utils/loss_utils.py",
            ["_get_dp_group", "get_loss_batch_info", "_optimizer_step_loss_norm", "iter_grad_accum_global_norm"],
            s,
            double,
        )
        load("trainer/ppo_utils/length_penalty.py", ["apply_length_penalties"], s, double)
        load("trainer/ppo_utils/experience.py", ["tensor_field", "Experience", "to"], s, double)
        load(
            "trainer/ppo_utils/experience_maker.py",
            ["compute_advantages_and_returns", "get_advantages_and_returns", "get_cumulative_returns"],
            s,
            double,
            "RemoteExperienceMaker",
        )
        load("trainer/ray/ppo_actor.py", ["ppo_train", "training_step"], s, double, "ActorPPOTrainer")
        load("trainer/ppo_trainer.py", ["_compute_rollout_stats"], s, double, "BasePPOTrainer")
        return s

    DEFAULTS = {
        "algo.advantage.estimator": "gae",
        "algo.advantage.gamma": 1,
        "algo.advantage.lambd": 1,
        "algo.advantage.no_std_norm": False,
        "reward.clip_range": [-10, 10],
        "algo.kl.init_coef": 0.01,
        "algo.kl.estimator": "k1",
        "algo.kl.use_loss": False,
        "actor.policy_loss_type": "ppo",
        "actor.eps_clip": 0.2,
        "actor.eps_clip_low_high": None,
        "actor.dual_clip": None,
        "actor.entropy_coef": None,
        "actor.aux_loss_coef": 0,
        "algo.advantage.is_correction_enable": False,
        "algo.advantage.is_correction_type": "tis",
        "algo.advantage.is_correction_level": "off",
        "algo.advantage.is_correction_mode": "mask",
        "algo.advantage.is_correction_gating": "ratio",
        "algo.kl.unbiased_gradient": False,
        "actor.loss_agg_mode": "token-mean",
        "algo.advantage.is_correction_threshold": [0.5, 5.0],
        "train.dynamic_batch_enable": False,
        "train.max_epochs": 1,
        "ds.tensor_parallel_size": 1,
        "rollout.n_samples_per_prompt": 1,
    }

    def config(options):
        root = Space()
        for name, value in (DEFAULTS | options).items():
            at = root
            *path, last = name.split(".")
            for part in path:
                if not hasattr(at, part):
                    setattr(at, part, Space())
                at = getattr(at, part)
            setattr(at, last, value)
        threshold = root.algo.advantage.is_correction_threshold
        root.algo.advantage.is_correction_threshold = [0.0] * (len(threshold) == 1) + list(threshold)
        if root.actor.eps_clip_low_high is None:
            root.actor.eps_clip_low_high = (root.actor.eps_clip,) * 2
        return root

    def run(case, options, dtype):
        torch.set_default_dtype(dtype)
        s, b = functions(dtype == torch.float64), openrlhf_cases.batch_of(case)
        args = config(options | {"rollout.n_samples_per_prompt": b["K"]})
        torch.cuda.current_device = lambda: torch.device("cpu")
        n, width = len(b["mask"]), max(map(len, b["mask"]))

        pad = lambda rows, d=dtype: upstream.padded(rows, d)
        mask = pad(b["mask"], torch.int64).bool()
        old, ref = pad(b["old"]), pad(b["ref"])
        keys = sorted({(b["optim"][r], b["micro"][r]) for r in range(n)})
        parts = [[r for r in range(n) if (b["optim"][r], b["micro"][r]) == key] for key in keys]
        leaf = pad(b["policy"]).requires_grad_()
        experiences = []
        for rows in parts:
            e = s["Experience"](
                sequences=torch.zeros(len(rows), width),
                action_mask=mask[rows],
                action_log_probs=old[rows],
                rollout_log_probs=pad(b["rollout"])[rows],
                values=pad(b["values"])[rows] if args.algo.advantage.estimator == "gae" else None,
            )
            e.index, e.rewards = rows, torch.tensor([b["rewards"][r][0] for r in rows], dtype=dtype)
            e.response_length = torch.tensor([float(len(b["mask"][r])) for r in rows])
            e.truncated = torch.tensor([float(b["truncated"][r]) for r in rows])
            e.info = {"reward": e.rewards.clone()}
            # as make_experience does where there is a reference model, which there is for a coefficient above 0
            if args.algo.kl.init_coef > 0 and not args.algo.kl.use_loss:
                e.kl = s["compute_approx_kl"](e.action_log_probs, ref[rows], kl_estimator=args.algo.kl.estimator)
            else:
                e.kl = torch.zeros_like(e.action_log_probs)
            e.info["kl"] = s["masked_mean"](e.kl, e.action_mask, dim=-1)
            e.base_action_log_probs = ref[rows] if args.algo.kl.use_loss else None
            e.rows = rows
            experiences.append(e)
        maker = Space(
            strategy=Space(args=args),
            args=args,
            advantage_estimator=args.algo.advantage.estimator,
            kl_ctl=Space(value=args.algo.kl.init_coef),
        )
        for name in ("get_advantages_and_returns", "get_cumulative_returns"):
            setattr(maker, name, lambda *a, name=name: s[name](maker, *a))
        with torch.no_grad():
            s["compute_advantages_and_returns"](maker, experiences)
        stats = s["_compute_rollout_stats"](None, experiences)
        advantage = torch.zeros(n, width, dtype=dtype)
        for e in experiences:
            advantage[e.rows] = e.advantages
        steps = sorted(set(b["optim"]))
        gas = len(parts) // len(steps)
        dynamic = args.train.dynamic_batch_enable
        tokens = [float(sum(mask[r].sum() for r in range(n) if b["optim"][r] == o)) for o, _ in keys]
        filled = [float(sum(mask[r].any() for r in range(n) if b["optim"][r] == o)) for o, _ in keys]
        buffer = Space(
            items=experiences,
            sample_batch_size=1,
            collate_fn=None,
            setup_dynamic_batch=lambda strategy: None,
            dynamic_batch_num_tokens=tokens,
            dynamic_global_batch_size=filled,
            dynamic_optimizer_step=[True] * len(parts),
            dynamic_sample_loss_scale=[1.0] * len(parts),
        )
        losses = []

        def backward(loss, *a):
            # DeepSpeed divides by the accumulation steps, of which dynamic batches have one
            losses.append(float(loss.detach()) / (1 if dynamic else gas) / len(steps))
            (loss / (1 if dynamic else gas) / len(steps)).backward()

        strategy = Space(
            ring_attn_group=None,
            args=args,
            accumulated_gradient=gas,
            is_rank_0=lambda: True,
            all_reduce=lambda d: dict(d),
            backward=backward,
            optimizer_step=lambda *a, **k: None,
            get_grad_norm=lambda m: 0.0,
        )

        class Actor:
            is_vlm = False

            def train(self):
                pass

            def __call__(self, sequences, action_mask, **k):
                rows = experiences[self.at].rows
                self.at += 1
                return leaf[rows], Space(entropy=pad(b["entropy"])[rows])

        actor = Actor()
        actor.at = 0
        a = args.algo.advantage
        me = Space(
            args=args,
            strategy=strategy,
            actor=actor,
            actor_optim=None,
            actor_scheduler=Space(get_last_lr=lambda: [0.0]),
            ema_model=None,
            aux_loss=False,
            max_epochs=1,
            replay_buffer=buffer,
            dataloader_pin_memory=False,
        )
        correction = (
            {
                n: getattr(a, n)
                for n in (
                    "is_correction_level",
                    "is_correction_mode",
                    "is_correction_gating",
                    "is_correction_threshold",
                )
            }
            | {"token_level_loss": args.actor.loss_agg_mode == "token-mean"}
            if later
            else {
                "enable_vllm_is_correction": a.is_correction_enable,
                "vllm_is_truncated_threshold": a.is_correction_threshold if a.is_correction_enable else None,
                "vllm_is_correction_type": a.is_correction_type,
            }
        )
        me.actor_loss_fn = s["PolicyLoss"](
            clip_eps_low=args.actor.eps_clip_low_high[0],
            clip_eps_high=args.actor.eps_clip_low_high[1],
            dual_clip=args.actor.dual_clip,
            policy_loss_type=args.actor.policy_loss_type,
            **correction,
        )
        me.training_step = lambda *x: s["training_step"](me, *x)
        status = s["ppo_train"](me, args.algo.kl.init_coef)
        left = (
            "actor_lr",
            "actor_grad_norm",
            "return",
            "logprobs_diff",
            "response_length",
            "total_length",
            "num_samples",
        )
        metrics = {
            f"train/{k}": v
            for k, v in sorted((status | stats).items())
            if not k.endswith(left) and not k.endswith("length_mean")
        }
        if args.algo.kl.init_coef == 0:
            metrics.pop("train/kl", None)
        metrics = {"loss": sum(losses)} | metrics
        return metrics, *(upstream.unpadded(x, b["mask"]) for x in (advantage.detach(), leaf.grad))

    cases = openrlhf_cases
    if later:
        cases = Space(CASES=cases.CASES, CONFIGS=cases.OF_RELEASE[later[0]])
    upstream.store(cases, run)
