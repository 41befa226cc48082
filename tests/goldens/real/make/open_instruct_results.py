# ruff: noqa
"""Results of open-instruct's own step, whose modules are never imported: CHECKOUT OUT.pkl.

CHECKOUT is a clone of allenai/open-instruct at e6c3044aa. What the forward passes would give is set; the rest of ``step``,
of the averages over ranks and of the advantages runs as it is. `store.py` makes the tables of the pickle.
"""

if __name__ == "__main__":
    import ast, dataclasses, enum, functools, math, sys, types, typing
    from collections import defaultdict
    from contextlib import nullcontext
    from dataclasses import dataclass, field, fields
    from pathlib import Path
    from types import SimpleNamespace
    import numpy as np, torch

    sys.path.insert(0, str(Path(__file__).parent))
    import open_instruct_cases, upstream

    root = Path(sys.argv[1]) / "open_instruct"

    def nodes_of(path, cls=None):
        body = ast.parse((root / path).read_text()).body
        return body if cls is None else next(n for n in body if getattr(n, "name", None) == cls).body

    def widened(text):
        """Sums and statistics in the precision that is asked for, and not cast to float32."""
        text = text.replace(".float()", ".double()").replace("np.float32", "np.float64")
        return text.replace("torch.float32", "torch.float64")

    def load(path, names, space, cls=None, double=False):
        upstream.load(root / path, names, space, cls, widened if double else str)

    def execute(nodes, space, double):
        text = ast.unparse(ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), *nodes], []))
        exec(widened(text) if double else text, space)

    FORWARD = {}

    @functools.cache
    def functions(double):
        base = dict(
            torch=torch,
            np=np,
            math=math,
            dataclasses=dataclasses,
            dataclass=dataclass,
            field=field,
            enum=enum,
            Any=typing.Any,
        )
        base["Literal"] = typing.Literal
        # dataclasses look their module up
        sys.modules["own"] = own = types.ModuleType("own")
        s = own.__dict__
        s.update(base, INVALID_LOGPROB=1.0)
        load("rl_utils.py", ["masked_mean"], s, double=double)
        load("model_utils.py", ["estimate_kl"], s, double=double)
        load("data_types.py", ["CollatedBatchData"], s)
        s["model_utils"] = SimpleNamespace(estimate_kl=s["estimate_kl"])
        s["dist"] = SimpleNamespace(
            ProcessGroup=None,
            ReduceOp=SimpleNamespace(SUM=None),
            all_reduce=lambda x, op, group: x.copy_(FORWARD["counts"].to(x.dtype)),
        )
        s["data_types"] = SimpleNamespace(CollatedBatchData=s["CollatedBatchData"])
        load(
            "grpo_utils.py",
            [
                "_SCALAR_LOSS_STAT_KEYS",
                "GRPOLossType",
                "mask_logprobs",
                "compute_vllm_local_debug_metrics",
                "_rho_drop_masks",
                "_sequence_level_mean",
                "RhoCorrection",
                "compute_rho_correction",
                "accumulate_rho_histograms",
                "finalize_rho_histograms",
                "resolve_old_logprob",
                "compute_grpo_loss",
                "calculate_token_counts",
                "create_loss_stats",
                "populate_sample_loss_stats",
                "compute_metrics_from_loss_stats",
            ],
            s,
            double=double,
        )

        def compute_logprobs(model, data, *args, use_grad=False, **more):
            return [s["mask_logprobs"](x, m[:, 1:]) for x, m in zip(FORWARD[model.name], data.response_masks)]

        def forward(model, tokens, *args, return_entropy=False, **more):
            place = FORWARD["place"]
            FORWARD["place"] += 1
            values = FORWARD["passes"][place // FORWARD["packs"]][place % FORWARD["packs"]]
            entropy = FORWARD["entropy"][place % FORWARD["packs"]] if return_entropy else None
            return values, entropy

        utils = SimpleNamespace(**{k: v for k, v in s.items() if callable(v)})
        utils.compute_logprobs, utils.forward_for_logprobs = compute_logprobs, forward
        s["grpo_utils"] = utils
        s["Timer"] = lambda *a, **k: nullcontext()
        s["logger"] = SimpleNamespace(warning=lambda *a: None)
        load("grpo_fast.py", ["compute_token_weights"], s, double=double)
        load("grpo_fast.py", ["step", "_compute_loss_metrics"], s, "PolicyTrainerRayProcess", double=double)
        return s

    def part_of(path, name, cls=None):
        """The statements of a function, those in loops and blocks too."""
        node = next(n for n in nodes_of(path, cls) if getattr(n, "name", None) == name)
        return [n for n in ast.walk(node) if isinstance(n, ast.stmt)]

    def assigns(n, name):
        return isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == name

    def averages(s, metrics, double):
        body = part_of("grpo_fast.py", "one_training_step")
        first = next(n for n in body if assigns(n, "weights"))
        names = next(n for n in body if assigns(n, "token_weighted_metrics"))
        empty = next(n for n in body if assigns(n, "average_metrics"))
        loop = next(n for n in body if isinstance(n, ast.For) and ast.unparse(n.iter) == "metrics[0]")
        space = dict(s, metrics=metrics)
        execute([first, names, empty, loop], space, double)
        return space["average_metrics"]

    PREPARED = (
        "scores",
        "val/sequence_lengths",
        "val/sequence_lengths_min",
        "val/sequence_lengths_max",
        "val/stop_rate",
        "val/advantages_mean",
        "val/advantages_min",
        "val/advantages_max",
    )

    def prepared(b, options):
        body = part_of("data_loader.py", "_data_preparation_loop", "DataPreparationActor")
        names = (
            "scores",
            "scores_per_prompt",
            "mean_grouped_rewards",
            "std_grouped_rewards",
            "sequence_lengths",
            "stop_rate",
        )
        nodes = [n for n in body if any(assigns(n, name) for name in names)]
        nodes += [n for n in body if isinstance(n, ast.If) and "advantage_normalization_type" in ast.unparse(n.test)][
            :1
        ]
        nodes.sort(key=lambda n: n.lineno)
        config = SimpleNamespace(
            num_samples_per_prompt_rollout=b["K"],
            advantage_normalization_type=options.get("advantage_normalization_type", "centered"),
        )
        space = dict(
            np=np,
            self=SimpleNamespace(config=config),
            batch=SimpleNamespace(scores=[r[0] for r in b["rewards"]]),
            result=SimpleNamespace(
                responses=b["mask"], finish_reasons=["length" if t else "stop" for t in b["truncated"]]
            ),
        )
        execute(nodes, space, False)
        table = next(n for n in body if assigns(n, "step_metrics")).value
        made = {k.value: v for k, v in zip(table.keys, table.values) if isinstance(k, ast.Constant)}
        return space["advantages"], {k: float(eval(ast.unparse(made[k]), space)) for k in PREPARED}

    def packed(b, rows, name, dtype):
        """Cells of a packed sequence: a prompt token before each response."""
        cells = []
        for r in rows:
            cells += [0.0, *b[name][r]]
        return torch.tensor([cells], dtype=dtype)

    class Metrics(dict):
        def get_metrics_list(self):
            return dict(self)

    def run(case, options, dtype):
        torch.set_default_dtype(dtype)
        b, double = open_instruct_cases.batch_of(case), dtype == torch.float64
        s = functions(double)
        advantage, scalars = prepared(b, options)
        own = {
            **dict(num_mini_batches=len(set(b["optim"])), num_epochs=1, beta=0.05, clip_lower=0.2, clip_higher=0.272)
        }
        own |= dict(
            kl_estimator=2, loss_denominator="token", load_ref_policy=True, loss_fn="dapo", record_entropy=False
        )
        own |= dict(
            use_rho_correction=True, rho_clamp_lower_bound=0.0, rho_clamp_upper_bound=2.0, use_vllm_logprobs=False
        )
        own |= dict(rho_mask_lower_bound=0.0, rho_mask_upper_bound=0.0, rho_mask_sequence_level=False)
        own |= dict(rho_mask_tv_divergence=False, sequence_parallel_size=1) | options
        ranks = sorted(set(b["rank"]))
        args = SimpleNamespace(**own, world_size=len(ranks))
        parts = {rank: [rows for r, _, rows in open_instruct_cases.cut(b) if r == rank] for rank in ranks}
        b = dict(b, advantage=[[float(a)] * len(m) for a, m in zip(advantage, b["mask"])])
        masks = {rank: [packed(b, rows, "mask", torch.bool) for rows in parts[rank]] for rank in ranks}
        counts = {rank: torch.stack([m[:, 1:].sum() for m in masks[rank]]) for rank in ranks}
        FORWARD["counts"] = sum(counts.values())
        grad, losses, logged = [[0.0] * len(m) for m in b["mask"]], [], []
        for rank in ranks:
            values = {
                n: [packed(b, rows, n, dtype)[:, 1:] for rows in parts[rank]]
                for n in ("policy", "old", "ref", "entropy")
            }
            # A forward pass gives no NaN; the first epoch has the log-probs that are old in the second.
            leaves = [x.clone().requires_grad_() for x in values["policy"]]
            FORWARD.update(
                values, place=0, packs=len(leaves), passes=[*[values["old"]] * (own["num_epochs"] - 1), leaves]
            )
            FORWARD["model"] = values["old"]
            rollout = [packed(b, rows, "rollout", dtype) for rows in parts[rank]]
            none = [torch.zeros_like(m) for m in masks[rank]]
            data = s["CollatedBatchData"](
                query_responses=none,
                attention_masks=none,
                position_ids=none,
                advantages=[packed(b, rows, "advantage", dtype) for rows in parts[rank]],
                response_masks=masks[rank],
                vllm_logprobs=rollout,
            )
            back = []
            model = SimpleNamespace(
                name="model",
                set_gradient_accumulation_boundary=lambda x: None,
                backward=lambda loss: back.append(loss),
                step=lambda: None,
                get_global_grad_norm=lambda: 1.0,
            )
            me = SimpleNamespace(
                dataloader=iter([{"batch": data, "metrics": {}}]),
                splitter=None,
                device="cpu",
                num_mini_batches=own["num_mini_batches"],
                args=args,
                rank=rank,
                pad_token_id=0,
                streaming_config=SimpleNamespace(temperature=1.0),
                model=model,
                ref_policy=SimpleNamespace(name="ref"),
                local_metrics=Metrics(),
                scheduler=SimpleNamespace(get_last_lr=lambda: [0.0]),
            )
            me._compute_loss_metrics = types.MethodType(s["_compute_loss_metrics"], me)
            metrics, _ = s["step"](me)
            logged.append(metrics)
            steps = own["num_mini_batches"]
            last = back[-len(leaves) :]
            for loss in last:
                # The engine averages over ranks; the loss of a step is the mean of those of its optimizer steps.
                (loss / len(ranks) / steps).backward()
                losses.append(float(loss.detach()) / len(ranks) / steps)
            for rows, leaf in zip(parts[rank], leaves):
                cells, at = leaf.grad[0].tolist(), 0
                for r in rows:
                    n = len(b["mask"][r])
                    grad[r] = [g * bool(m) for g, m in zip(cells[at : at + n], b["mask"][r])]
                    at += n + 1
        scalars = scalars | averages(s, logged, double) | {"loss": sum(losses)}
        skip = ("lr", "optim/grad_norm", "debug/")
        scalars = {k: float(v) for k, v in scalars.items() if not k.startswith(skip)}
        return scalars, [a for row in b["advantage"] for a in row], [g for row in grad for g in row]

    upstream.store(open_instruct_cases, run)
