"""Make `data/prime_rl.parquet`: what the real functions of prime-rl give for the cases of `prime_rl_cases.py`.

    python tests/goldens/make_prime_rl.py CHECKOUTS

CHECKOUTS holds a checkout of PrimeIntellect-ai/prime-rl for each of its tags v0.3.0 to v0.8.0, and one of 559b44772 as
HEAD. Losses, advantages and the filter are theirs (src/prime_rl/trainer/rl/loss.py, src/prime_rl/orchestrator/), with
stand-ins for what they import. How micro-batches and ranks add up is that of ``train`` (src/prime_rl/trainer/rl/):
before 0.6 each rank divides by its own tokens and gradients are averaged.
"""

import asyncio
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import polars as pl
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from goldens.processor import note

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

REAL = ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl", "prime_rl.trainer.rl.loss", "prime_rl.orchestrator")
REAL_ALGORITHMS = (
    "train_sink",
    "advantage",
    "algo",
    "algo.base",
    "algo.grpo",
    "algo.max_rl",
    "algo.rae",
    "algo.hierarchical_grpo",
)


class StandIn(ModuleType):
    """A module of which any name is a class that does nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("beartype", "jaxtyped"):
            return lambda *args, **_: args[0] if args else (lambda function: function)
        made = type(name, (), {"__class_getitem__": classmethod(lambda cls, _: object)})
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand-ins for everything but the named modules of the checkout."""

    def __init__(self, real):
        self.real = real

    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if name in self.real or root not in ("prime_rl", "verifiers", "beartype", "jaxtyping", "renderers"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def settings(release, options):
    defaults = {"adv_tau": 1.0, "kl_tau": 1e-3, "teacher_tau": 0.0, "dppo_mask_low": 0.2, "dppo_mask_high": 0.2}
    defaults |= {"ipo_threshold": 0.1, "ipo_mask_low": 0.2, "ipo_mask_high": 0.2, "ratio_type": "token"}
    defaults |= {"token_mask_low": 0.125, "token_mask_high": 8.0, "geo_mask_low": 0.1, "geo_mask_high": 10.0}
    defaults |= {"sequence_mask_low": 0.0, "sequence_mask_high": 100.0, "sequence_clip_high": 10.0}
    if release in ("v0.3.0", "v0.4.0"):
        defaults["kl_tau"] = 0.0
    return SimpleNamespace(**{**defaults, **options})


def advantages_of(release, algorithm, options, rows):
    """Advantages of the rows, by the release's own functions, which get every row: what they drop has 0."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["group"]].append(row)
    found = {id(row): 0.0 for row in rows}
    instance = None
    for group in groups.values():
        rewards = [row["reward"] for row in group]
        if release in ("v0.3.0", "v0.4.0", "v0.5.0"):
            module = importlib.import_module("prime_rl.orchestrator.advantage")
            named = {name: options.get(name) for name in ("length_weighted_mean", "length_shaping_alpha")}
            lengths = [len(row["mask"]) for row in group]
            values = module.compute_advantages(rewards, lengths, len(group), SimpleNamespace(**named))
        elif release == "v0.6.0":
            traces = [trace_of(row) for row in group]
            values = finalized(release, traces, advantage_fn_of(options))
        else:
            module = importlib.import_module(f"prime_rl.orchestrator.algo.{algorithm}")
            name = {"grpo": "GRPO", "max_rl": "MaxRL", "rae": "RAE", "hierarchical_grpo": "HierarchicalGRPO"}[algorithm]
            if instance is None:
                config = SimpleNamespace(length_penalty=penalty_of(options), decay=0.95, episode_agents=["0"])
                instance = getattr(module, f"{name}Algorithm")(config, None)
            module.assign_advantages = lambda trace, value: setattr(trace, "advantage", value)
            values = finalized(release, [trace_of(row) for row in group], instance)
        for row, value in zip(group, values, strict=True):
            found[id(row)] = float(value)
    return [found[id(row)] for row in rows]


def advantage_fn_of(options):
    """The function that 0.6 makes of its configuration."""
    module = importlib.import_module("prime_rl.orchestrator.advantage")
    module.get_model_completion_len = lambda raw: raw["length"]
    penalty = None
    if "coef" in options:
        penalty = SimpleNamespace(coef=options["coef"], gate_by_correctness=options.get("gate_by_correctness", False))
    config = SimpleNamespace(
        length_penalty=penalty, length_weighted_baseline=options.get("length_weighted_baseline", False)
    )
    return module.setup_advantage_fn(config, max_seq_len=options.get("seq_len", 2048))


def penalty_of(options):
    """The configuration of the penalty from 0.7 on, with its defaults."""
    defaults = {"num_output_tokens_weight": 0.25, "num_input_tokens_weight": 0.1, "num_turns_weight": 0.1}
    return SimpleNamespace(**{**defaults, **options["length_penalty"]}) if "length_penalty" in options else None


def trace_of(row):
    """A rollout (to 0.8) or trace: one whose tokens are all masked failed. Its counts are those of verifiers' Trace."""
    mask = row["mask"]
    failed = not any(mask)
    turns = sum(now and not before for before, now in zip([False, *mask], mask, strict=False))
    trace = SimpleNamespace(
        reward=row["reward"],
        agent=SimpleNamespace(name=str(row["agent"]), trainable=True),
        agent_name=str(row["agent"]),
        error="failed" if failed else None,
        has_error=failed,
        nodes=[SimpleNamespace(mask=mask)],
        raw={"reward": row["reward"], "length": sum(mask)},
        num_output_tokens=sum(mask),
        num_total_tokens=row["prompt"] + len(mask),
        num_turns=turns,
        samples=[],
        advantage=0.0,
        is_filtered=False,
        env_name="",
        example_id=0,
        task=MagicMock(),
    )
    trace.assign_advantages = lambda value: setattr(trace, "advantage", value)
    return trace


def finalized(release, traces, rule):
    """Run the group through the release: `TrainSink.process_group` to 0.8, which drops what failed, then the rule."""
    if release == "HEAD":
        episodes = [SimpleNamespace(id=str(place // 2), traces=[trace]) for place, trace in enumerate(traces)]
        asyncio.run(rule.score_group(episodes))
        return [trace.advantage for trace in traces]
    module = importlib.import_module("prime_rl.orchestrator.train_sink")
    module.get_logger = MagicMock()
    sink = MagicMock(pending_groups={0: list(traces)}, pre_filters=[], pre_filter_seen=0)
    sink.train_envs.get.return_value = MagicMock(
        requires_group_scoring=False,
        advantage_fn=rule,
        algorithm=SimpleNamespace(finalize_group=getattr(rule, "score_group", None)),
    )
    made = module.TrainSink.process_group(sink, 0)
    if release != "v0.6.0":
        asyncio.run(made)
    return [trace.advantage for trace in traces]


def run(release, options, algorithm, rows, dtype):
    """Loss, gradient and metrics of a step, as ``train`` adds them up."""
    loss_module = importlib.import_module("prime_rl.trainer.rl.loss")
    options = dict(options)
    is_filtered = release not in ("v0.3.0", "v0.4.0", "v0.5.0") and options.pop("filter_zero_advantages", True)
    kind = options.pop("type", "default")
    config = settings(release, options)
    advantage = advantages_of(release, algorithm, options, rows)
    shipped = [row for row, value in zip(rows, advantage, strict=True) if not (is_filtered and value == 0.0)]
    by_id = {id(row): value for row, value in zip(rows, advantage, strict=True)}
    leaves = {id(row): torch.tensor(row["policy"], dtype=dtype).requires_grad_() for row in rows}
    values, total = defaultdict(list), torch.zeros((), dtype=dtype)
    ranks = sorted({row["rank"] for row in shipped})
    early = release in ("v0.3.0", "v0.4.0", "v0.5.0")
    scales = {rank: sum(sum(row["mask"]) for row in shipped if not early or row["rank"] == rank) for rank in ranks}
    parts = sorted({(row["rank"], row["micro"]) for row in shipped})
    steps = len({micro for _, micro in parts})
    if config.ratio_type == "sequence":
        scales = dict.fromkeys(ranks, steps)
    for rank, micro in parts:
        here = [row for row in shipped if (row["rank"], row["micro"]) == (rank, micro)]
        policy = [leaves[id(row)] for row in here]
        sampler = [torch.tensor(row["sampler"], dtype=dtype) for row in here]
        each = [torch.full((len(row["mask"]),), by_id[id(row)], dtype=dtype) for row in here]
        mask = [torch.tensor(row["mask"]) for row in here]
        scale = max(scales[rank], 1)
        if release == "v0.3.0":
            loss, metrics = loss_module.compute_loss(policy, sampler, None, each, mask, config, scale)
        elif release in ("v0.4.0", "v0.5.0"):
            function = loss_module.setup_loss_fn(config)
            loss, metrics = loss_module.compute_loss(policy, sampler, None, each, mask, function, scale)
        elif release == "v0.6.0":
            name = "ipo_loss_fn" if kind == "ipo" else "default_loss_fn"
            functions = {"rl": lambda inputs, name=name: getattr(loss_module, name)(inputs, config)}
            loss, metrics = loss_module.compute_loss(policy, sampler, None, each, mask, functions, scale)
        else:
            name = "ipo_loss_fn" if kind == "ipo" else "default_loss_fn"
            function = lambda inputs, name=name: getattr(loss_module, name)(inputs, config)  # noqa: E731
            loss, metrics = loss_module.compute_loss(
                policy, sampler, None, each, mask, None, None, None, function, scale, 1, 1
            )
        loss.backward()
        total = total + loss.detach()
        values["loss"].append(loss.detach().reshape(1))
        values["entropy"].append(
            torch.cat([torch.tensor(row["entropy"], dtype=dtype)[m] for row, m in zip(here, mask, strict=True)])
        )
        for name, value in metrics.items():
            values[name].append(value.detach())
        if not early:
            function = loss_module.compute_importance_ratio_and_mismatch_kl
            kl = [function(p.detach(), q)[2][m] for p, q, m in zip(policy, sampler, mask, strict=True)]
            values["mismatch_kl/all"].append(torch.cat(kl))
    # The gradients of the ranks are averaged before 0.6.
    share = 1 / len(ranks) if early else 1.0
    grad = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad * share for leaf in leaves.values()]
    # A rank without rows in a micro-batch runs one of padding, of loss 0.
    padding = steps * len(ranks) - len(parts)
    values["loss"].append(torch.zeros(padding, dtype=dtype))
    found = {name: torch.cat(value).to(dtype) for name, value in values.items()}
    metrics = {
        f"{name}/{end}": getattr(x, end)().item() for name, x in found.items() for end in ("mean", "max") if len(x)
    }
    return advantage, float(total) * share, torch.cat(grad).numpy(), metrics


def prepare(checkout, release):
    """Import from a checkout from now on."""
    for module in [each for each in sys.modules if each.partition(".")[0] in ("prime_rl", "verifiers")]:
        del sys.modules[module]
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, Finder)]
    sys.meta_path.insert(0, Finder({*REAL, *(f"prime_rl.orchestrator.{each}" for each in REAL_ALGORITHMS)}))
    sys.path[:] = [each for each in sys.path if not each.endswith("/src")]
    sys.path.insert(0, f"{checkout}/src")
    importlib.invalidate_caches()
    if release not in ("v0.3.0", "v0.4.0", "v0.5.0", "v0.6.0"):
        # Its own module imports every algorithm.
        package = StandIn("prime_rl.orchestrator.algo")
        package.__path__ = [f"{checkout}/src/prime_rl/orchestrator/algo"]
        sys.modules["prime_rl.orchestrator.algo"] = package


def main(checkouts):
    from prime_rl_cases import CASES, CONFIGS, rows_of

    found = []
    for name, (release, options, algorithm) in CONFIGS.items():
        prepare(Path(checkouts) / release, release)
        for case in CASES:
            rows = rows_of(case)
            for dtype, end in ((torch.float32, "f32"), (torch.float64, "f64")):
                advantage, loss, grad, metrics = run(release, options, algorithm, rows, dtype)
                names = sorted(metrics)
                found.append(
                    {
                        "config": name,
                        "case": case,
                        "dtype": end,
                        "advantage": advantage,
                        "grad": grad.tolist(),
                        "names": ["loss", *names],
                        "values": [loss, *(metrics[each] for each in names)],
                    }
                )
    stored = HERE / "data" / "prime_rl.parquet"
    pl.DataFrame(found).write_parquet(stored, compression="zstd", compression_level=19)
    note(stored)


if __name__ == "__main__":
    main(sys.argv[1])
