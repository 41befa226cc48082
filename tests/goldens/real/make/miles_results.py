# ruff: noqa
"""Results of miles' own functions, whose modules are never imported: CHECKOUT OUT.pkl.

CHECKOUT is a clone of radixark/miles at 31f1ca961a94. `store.py` makes the tables of the pickle. In float64 the casts
to float32 are taken out, so that the formulas are compared.
"""

if __name__ == "__main__":
    import ast, math, re, sys
    from pathlib import Path
    from types import SimpleNamespace as Space
    import numpy as np, torch

    sys.path.insert(0, str(Path(__file__).parent))
    import miles_cases, upstream

    root, U = Path(sys.argv[1]), "miles/backends/training_utils/"

    def load(path, names, space, double):
        upstream.load(root / path, names, space, edit=upstream.uncast if double else str)

    class Logits(list):
        device = torch.device("cpu")

    def functions(double):
        one = Space(size=1, rank=0, group=None, groups_inner_to_outer=())
        state = Space(
            cp=one, tp=one, intra_dp=one, intra_dp_cp=one, effective_dp=one, effective_dp_cp=one, is_pp_last_stage=True
        )
        s = {"torch": torch, "F": torch.nn.functional, "get_parallel_state": lambda: state, "dist": torch.distributed}
        s |= {"is_multi_lora_enabled": lambda args: False, "load_function": lambda path: s[re.split("[.:]", path)[-1]]}
        s["GeneralPGUtil"] = Space(create=lambda group: Space(all_reduce=lambda *a, **k: None))
        s["Sample"] = Space(Status=Space(TRUNCATED="truncated"))
        load(
            U + "cp_utils.py",
            [
                "get_sum_of_sample_mean",
                "get_local_response_loss_masks",
                "slice_loss_masks_for_local_cp",
                "all_gather_with_cp",
                "slice_log_prob_with_cp",
            ],
            s,
            double,
        )
        load(
            U + "loss_hub/math_utils.py",
            [
                "_LOG_RATIO_EXP_CLAMP",
                "_safe_clamp_log_ratio",
                "_safe_exp_neg_ppo_kl",
                "compute_ess_ratio_contribution",
                "compute_approx_kl",
                "compute_opsm_mask",
                "compute_gspo_kl",
                "compute_policy_loss",
                "get_grpo_returns",
                "get_reinforce_plus_plus_returns",
                "get_reinforce_plus_plus_baseline_advantages",
                "get_advantages_and_returns_batch",
                "chunked_gae",
            ],
            s,
            double,
        )
        load(U + "loss_hub/corrections.py", ["vanilla_tis_function", "icepop_function"], s, double)
        load("miles/utils/distributed_utils.py", ["distributed_masked_whiten"], s, double)
        load(U + "loss_hub/advantages.py", ["compute_advantages", "normalize_advantages"], s, double)
        load(U + "loss_hub/losses.py", ["policy_loss_function", "get_loss_function"], s, double)
        load(
            U + "loss.py", ["_detach_rollout_tensor_list", "compute_advantages_and_returns", "loss_function"], s, double
        )
        load(U + "log_utils.py", ["log_rollout_data", "aggregate_train_losses", "reduce_gathered_log_dict"], s, double)
        load(
            "miles/ray/rollout/train_data_conversion.py",
            [
                "_compute_rollout_mask_sums",
                "_reward_group_segments",
                "_normalize_rewards_by_rollout",
                "_post_process_rewards",
                "convert_samples_to_train_data",
            ],
            s,
            double,
        )
        mis = (root / "examples/infra_features/train_infer_mismatch_helper/mis.py").read_text()
        names = [
            n.name
            for n in ast.parse(mis).body
            if isinstance(n, ast.FunctionDef) and n.name != "compute_mis_weights_with_cp"
        ]
        load("examples/infra_features/train_infer_mismatch_helper/mis.py", names, s, double)
        s["get_log_probs_and_entropy"] = lambda logits, **k: {"log_probs": list(logits)}

        def helper(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **k):
            # the gathering over context-parallel ranks, of one rank
            w, masks, found = s["compute_mis_weights"](
                args=args, train_log_probs=train_log_probs, rollout_log_probs=rollout_log_probs, loss_masks=loss_masks
            )
            return (
                pg_loss * torch.cat(w),
                masks,
                {
                    f"mis_{name}": torch.cat([x.expand(len(m)) for x, m in zip(v, loss_masks)])
                    for name, v in found.items()
                },
            )

        s["compute_mis_weights_with_cp"] = helper
        return s

    DEFAULTS = dict(
        advantage_estimator="grpo",
        kl_coef=0.0,
        use_kl_loss=False,
        kl_loss_coef=0.0,
        kl_loss_type="k1",
        use_unbiased_kl=False,
        eps_clip=0.2,
        eps_clip_high=None,
        eps_clip_c=None,
        gamma=1.0,
        lambd=1.0,
        normalize_advantages=False,
        rewards_normalization=True,
        grpo_std_normalization=True,
        calculate_per_token_loss=False,
        use_rollout_logprobs=False,
        use_tis=False,
        tis_clip=2.0,
        tis_clip_low=0,
        custom_tis_function_path=None,
        get_mismatch_metrics=False,
        use_opsm=False,
        opsm_delta=1e-4,
        use_opd=False,
        entropy_coef=0.0,
        observe_training_entropy=False,
        skip_actor_forward_only=False,
        custom_pg_loss_reducer_function_path=None,
        qkv_format="thd",
        loss_type="policy_loss",
        recompute_loss_function=False,
        allgather_cp=False,
        use_dynamic_global_batch_size=False,
        global_batch_size=None,
        n_samples_per_prompt=4,
        rollout_batch_size=4,
        use_rollout_entropy=False,
        ci_test=False,
        log_multi_turn=False,
        log_correct_samples=False,
        reward_key=None,
        use_rs=True,
        tis_level="token",
        rs_level="token",
        tis_mode="truncate",
        tis_lower_bound=0.5,
        tis_upper_bound=2.0,
        rs_lower_bound=None,
        rs_upper_bound=None,
        rs_veto_threshold=1e-4,
        tis_batch_normalize=True,
    )

    def run(case, options, dtype):
        torch.set_default_dtype(dtype)
        s, b = functions(dtype == torch.float64), miles_cases.batch_of(case)
        args = Space(**(DEFAULTS | options))
        args.eps_clip_high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
        n = len(b["mask"])
        t = lambda rows: [torch.tensor(r, dtype=dtype) for r in rows]
        ids = b.get("trajectory", list(range(n)))
        samples = [
            Space(
                group_index=b["group"][r],
                index=r,
                rollout_id=ids[r],
                tokens=[0] * (len(b["mask"][r]) + 2),
                response_length=len(b["mask"][r]),
                loss_mask=list(b["mask"][r]),
                remove_sample=False,
                status="completed",
                metadata={},
                rollout_log_probs=b["rollout"][r],
                rollout_routed_experts=None,
                rollout_indexer_topk=None,
                train_metadata=None,
                multimodal_train_inputs=None,
                weight_versions=[],
                teacher_log_probs=None,
                adapter=None,
                opd_reverse_kl=None,
                get_reward_value=lambda args, r=r: b["rewards"][r][0],
            )
            for r in range(n)
        ]
        data = s["convert_samples_to_train_data"](args, samples, {}, None, None)
        data["total_lengths"] = [len(x) for x in data["tokens"]]
        data["unconcat_tokens"] = data["tokens"]
        data["loss_masks"] = [torch.tensor(m) for m in data["loss_masks"]]
        data["rollout_mask_sums"] = [torch.tensor(x) for x in data["rollout_mask_sums"]]
        data["rollout_log_probs"] = t(b["rollout"])
        data["ref_log_probs"] = t(b["ref"])
        if not args.skip_actor_forward_only:
            data["log_probs"] = t(b["old"])
        if args.advantage_estimator == "ppo":
            data["values"] = t(b["values"])
        if args.use_rollout_entropy:
            data["entropy"] = t(b["entropy"])
        s["compute_advantages_and_returns"](args, data)
        advantage = [x.clone() for x in data["advantages"]]
        metrics = {}
        s["gather_log_data"] = lambda name, args, rollout_id, found: metrics.update(
            {f"{name}/{k}": v for k, v in s["reduce_gathered_log_dict"]([found], 1).items()}
        )
        steps = sorted(set(b["optim"]))
        data["num_rollouts"] = [len({ids[r] for r in range(n) if b["optim"][r] == o}) for o in steps]
        s["log_rollout_data"](0, args, data)
        leaf = [x.requires_grad_() for x in t(b["policy"])]
        total, over = 0.0, []
        per_row = [k for k, v in data.items() if isinstance(v, list) and len(v) == n]
        for o, rollouts in zip(steps, data["num_rollouts"]):
            micros = sorted({b["micro"][r] for r in range(n) if b["optim"][r] == o})
            logs, loss, tokens = [], 0.0, 0
            for m in micros:
                rows = [r for r in range(n) if b["optim"][r] == o and b["micro"][r] == m]
                part = {k: [data[k][r] for r in rows] for k in per_row}
                found, count, log = s["loss_function"](
                    args, part, len(micros), Logits(leaf[r] for r in rows), num_rollouts=rollouts
                )
                loss, tokens = loss + found, tokens + count
                logs.append(log)
            # Megatron divides the gradients of token sums by the tokens of the optimizer step.
            loss = loss / tokens if args.calculate_per_token_loss else loss
            (loss / len(steps)).backward()
            total += float(loss) / len(steps)
            over.append(s["aggregate_train_losses"](logs, None if args.calculate_per_token_loss else rollouts))
        for k in over[0]:
            metrics[f"train/{k}"] = sum(one[k] for one in over) / len(over)
        flat = lambda rows: torch.cat([x.detach() for x in rows]).tolist()
        left = ("unconcat_tokens", "total_lengths", "sample_indices", "truncated", "mis_", "entropy_loss")
        metrics = {"loss": total} | {k: v for k, v in metrics.items() if not any(x in k for x in left)}
        return metrics, flat(advantage), flat([torch.zeros_like(x) if x.grad is None else x.grad for x in leaf])

    upstream.store(miles_cases, run, AssertionError)
