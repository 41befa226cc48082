# ruff: noqa
"""Results of AReaL's own actor, whose package is never imported: CHECKOUT OUT.pkl.

CHECKOUT is a clone of areal-project/AReaL at cbff54d645d2, or the unpacked wheel of 1.0.4, whose normalisation takes groups
of a fixed size. Advantages, update, losses and statistics are its own; the
engine, which gives the log-probs and cuts micro-batches, has a stand-in. `store.py` makes the tables of the pickle.
"""

if __name__ == "__main__":
    import ast, functools, re, sys, types
    from pathlib import Path
    from types import SimpleNamespace
    import numpy as np, torch

    sys.path.insert(0, str(Path(__file__).parent))
    import areal_cases, upstream

    root = Path(sys.argv[1]) / "areal"

    def stub(name, **values):
        module = types.ModuleType(name)
        module.__dict__.update(values, __path__=[])
        sys.modules[name] = module
        return module

    def load(name, path, double, only=None):
        """A module of the real source, all of it or some of its functions; in float64 without casts to float32."""
        tree = ast.parse((root / path).read_text())
        if only is not None:
            tree.body = [n for n in tree.body if getattr(n, "name", None) in only]
        text = ast.unparse(ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), *tree.body], []))
        if double:
            text = re.sub(r"torch\.float(32)?\b", "torch.float64", text.replace(".float()", ".double()"))
        module = stub(name, torch=torch, np=np, dist=torch.distributed, Any=object, functools=functools)
        return module, compile(text, path, "exec")

    @functools.cache
    def actor_module(double):
        quiet = SimpleNamespace(info=lambda *a: None, warning=lambda *a: None, debug=lambda *a: None)
        for name in (
            "areal",
            "areal.api",
            "areal.infra",
            "areal.infra.rpc",
            "areal.trainer",
            "areal.trainer.ppo",
            "areal.utils",
        ):
            stub(name)
        stub(
            "areal.infra.platforms",
            current_platform=SimpleNamespace(
                device_type="cpu", current_device=lambda: "cpu", is_initialized=lambda: False
            ),
        )
        sys.modules["areal.utils"].logging = stub("areal.utils.logging", getLogger=lambda *a: quiet)
        stub("areal.utils.seqpack", flat2d=lambda x: [b for a in x for b in a])
        stub("areal.api.cli_args", RejectionSamplingConfig=object)
        stub("areal.api", TrainEngine=object)

        def real(name, path, only=None, **more):
            module, code = load(name, path, double, only)
            module.__dict__.update(more)
            exec(code, module.__dict__)
            return module

        real("areal.utils.constants", "utils/constants.py")
        tracker = real("areal.utils.stats_tracker", "utils/stats_tracker.py")
        data = real("areal.utils.data", "utils/data.py", ("Normalization", "KLEstimator"))
        functional = real("areal.utils.functional", "utils/functional/functional.py")
        gae = SimpleNamespace()
        if (root / "trainer/ppo/gae.py").exists():
            stub("areal.trainer.ppo.lambda_fn", GAELambdaContext=dict, resolve_gae_lambda_fn=lambda x: (x, False))
            gae = real("areal.trainer.ppo.gae", "trainer/ppo/gae.py")
        stats = real("areal.trainer.ppo.stats", "trainer/ppo/stats.py")
        constants = sys.modules["areal.utils.constants"]
        module, code = load("areal.trainer.ppo.actor", "trainer/ppo/actor.py", double)
        tree = ast.parse((root / "trainer/ppo/actor.py").read_text())
        own = [n.name for n in tree.body if getattr(n, "name", "") and "Controller" not in n.name]
        more = {k: getattr(constants, k) for k in dir(constants) if k.startswith(("PROX", "Prox"))}
        more |= {
            k: v
            for k, v in {**vars(functional), **vars(data), **vars(gae), **vars(stats)}.items()
            if not k.startswith("__")
        }
        mbs = lambda data, mb_spec: SimpleNamespace(mbs=data["mbs"])
        more |= dict(
            math=__import__("math"),
            logging=sys.modules["areal.utils.logging"],
            logger=quiet,
            stats_tracker=tracker,
            trace_perf=lambda *a, **k: lambda f: f,
            MicroBatchSpec=SimpleNamespace,
            split_padded_tensor_dict_into_mb_list=mbs,
            resolve_gae_lambda_fn=lambda x: (x, False),
        )
        actor = real("areal.trainer.ppo.actor", "trainer/ppo/actor.py", [*own], _EPSILON=1e-8, **more)
        return actor, tracker

    def padded(b, name, dtype, shift):
        """Cells of the batch behind a prompt token; with `shift` at the cell before, which predicts the token."""
        width = 1 + max(map(len, b["mask"]))
        cells = torch.zeros(len(b["mask"]), width, dtype=dtype)
        for r, row in enumerate(b[name]):
            at = 0 if shift else 1
            cells[r, at : at + len(row)] = torch.tensor(row, dtype=dtype)
        return cells

    def config_of(options, size=1):
        own = {k.removeprefix("actor."): v for k, v in options.items() if k.startswith("actor.")}
        nested = {}
        for key in [k for k in own if "." in k]:
            part, _, name = key.partition(".")
            nested.setdefault(part, {})[name] = own.pop(key)
        norm = dict(mean_level=None, std_level=None, mean_leave1out=False, std_unbiased=True, eps=1e-5, group_size=size)
        sampling = dict(level="token", action="mask", metric="ratio", agg="mean", upper=5.0, lower=None)
        found = dict(
            reward_bias=0.0,
            reward_scaling=1.0,
            reward_clip=20.0,
            kl_ctl=0.1,
            kl_estimator="k1",
            adv_norm=None,
            reward_norm=None,
            discount=1.0,
            gae_lambda=1.0,
            gae_lambda_kwargs={},
            gae_timestep_unit="token",
            mask_no_eos_with_zero=False,
            temperature=1.0,
            m2_threshold=None,
            use_decoupled_loss=False,
            recompute_logprob=False,
            prox_logp_method="recompute",
            rejection_sampling=None,
            eps_clip=0.2,
            eps_clip_higher=None,
            c_clip=None,
            importance_sampling_level="token",
            use_sapo_loss=False,
            sapo_tau_pos=1.0,
            sapo_tau_neg=1.05,
            use_cispo_loss=False,
            overlong_reward_penalty=False,
            overlong_tokens=None,
            overlong_penalty_factor=None,
            max_new_tokens=1024,
            log_agent_stats=False,
            log_agent_stats_keys=[],
            ppo_n_minibatches=1,
        )
        found |= own
        for part, values in nested.items():
            found[part] = SimpleNamespace(**((sampling if part == "rejection_sampling" else norm) | values))
        return SimpleNamespace(**found)

    def run(case, options, dtype):
        torch.set_default_dtype(dtype)
        b, (module, tracker) = areal_cases.batch_of(case), actor_module(dtype == torch.float64)
        sys.modules["areal.utils.stats_tracker"] = tracker
        config = config_of(options, b["K"])
        leaf = padded(b, "policy", dtype, True).requires_grad_()
        entropy = padded(b, "entropy", dtype, True)
        optim = torch.tensor(b["optim"])
        steps = sorted(set(b["optim"]))
        losses = []

        class Engine:
            def train(self): ...
            def get_version(self):
                return 1

            def train_batch(self, mb, loss_fn, loss_weight_fn):
                own = optim == mb.pop("step")
                loss = loss_fn(leaf[own], entropy[own], mb)
                (loss / len(steps)).backward()
                losses.append(float(loss.detach()) / len(steps))
                return {}

        actor = module.PPOActor(config, Engine())
        sizes = [b["group"].count(g) for g in dict.fromkeys(b["group"])]
        attention = padded(dict(b, seen=[[1] * len(m) for m in b["mask"]]), "seen", torch.bool, False)
        attention[:, 0] = True
        data = dict(
            input_ids=attention.long(),
            attention_mask=attention,
            rewards=torch.tensor([r[0] for r in b["rewards"]], dtype=dtype),
            loss_mask=padded(b, "mask", torch.bool, False),
            logprobs=padded(b, "rollout", dtype, False),
            versions=torch.where(padded(b, "mask", torch.bool, True), 0, -1),
        )
        if config.use_decoupled_loss and config.prox_logp_method in ("loglinear", "reuse_train_logp"):
            data["prox_logp"] = None
        elif config.use_decoupled_loss or config.recompute_logprob:
            data["prox_logp"] = padded(b, "old", dtype, True)
        if options.get("ref.path"):
            data["ref_logp"] = padded(b, "ref", dtype, True)
        # Before 2.0.0 a normalisation has the group size of its options.
        more = (SimpleNamespace(traj_group_sizes=sizes),) if (root / "trainer/ppo/gae.py").exists() else ()
        data = actor._compute_advantages(data, *more)
        keep = {k: v for k, v in data.items() if isinstance(v, torch.Tensor) and v.shape[:1] == optim.shape}
        data["mbs"] = [{**{k: v[optim == s] for k, v in keep.items()}, "step": s} for s in steps]
        for mb in data["mbs"]:
            for key in ("rewards", "tot_rewards", "kl_rewards", "returns"):
                mb.pop(key, None)
        with tracker.scope("ppo_actor"):
            actor._ppo_update(data)
        scalars = tracker.export_all()
        wanted = (
            "ppo_actor/task_reward/",
            "ppo_actor/advantages/",
            "ppo_actor/update/actor_loss/avg",
            "ppo_actor/update/importance_weight/",
            "ppo_actor/update/approx_kl/",
            "ppo_actor/update/new_logp/",
            "ppo_actor/update/old_logp/",
            "ppo_actor/update/entropy/",
            "ppo_actor/update/clip_ratio/avg",
            "ppo_actor/update/dual_clip_ratio/avg",
            "ppo_actor/update/logp_diff/",
            "ppo_actor/update/logp_abs_diff/",
            "ppo_actor/update/behave_imp_weight/",
            "ppo_actor/update/behave_approx_kl/",
            "ppo_actor/update/behave_filtered_ratio/avg",
            "ppo_actor/update/compute_logp/kl_div",
        )
        scalars = {k: float(v) for k, v in scalars.items() if k.startswith(wanted) and not k.endswith("__count")}
        scalars["loss"] = sum(losses)
        return scalars, *(upstream.unpadded(x, b["mask"]) for x in (data["advantages"], leaf.grad))

    # What 1.0.4 does not have: the cispo loss, and log-probs of the policy for the proximal ones.
    missing = (TypeError, ValueError) if not (root / "trainer/ppo/gae.py").exists() else ()
    upstream.store(areal_cases, run, missing)
