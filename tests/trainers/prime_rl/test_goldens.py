"""prime-rl: stored results of its own functions, releases 0.3 to main, over eight cases in float32 and float64."""

from functools import cache
from pathlib import Path

import polars as pl
import pytest
import torch
from goldens.prime_rl_cases import CASES, CONFIGS, batch_of, named, rows_of
from proof.claims import Bound, agree, compared, covers

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.evaluation.radii.advantages import advantage_radius
from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.prime_rl.trainer import TRAINER
from rolloutdoctor.trainers.releases import parse_version

DATA = Path(__file__).parents[2] / "goldens" / "data" / "prime_rl.parquet"
SINGLE = Bound(2e-6, 1e-9, "float32 ratios of log-probs that are far apart lose several units of exp(d)")

pytestmark = [compared("golden", SINGLE)]


@cache
def stored() -> dict[tuple[str, str, str], dict]:
    return {(row["config"], row["case"], row["dtype"]): row for row in pl.read_parquet(DATA).to_dicts()}


def objective_of(name, *, stored_advantages):
    release, options, algorithm = CONFIGS[name]
    values = named(options)
    version = TRAINER.newest if release == "HEAD" else release
    if parse_version(version) >= (0, 7, 0):
        values["orchestrator.algo.type"] = algorithm
    values["stored_advantages"] = stored_advantages
    layers = [Layer("test", values)]
    return TRAINER.objective(resolve(TRAINER.options, parse_version(version), layers, trainer="prime-rl"))


def marked(name):
    release, options, algorithm = CONFIGS[name]
    # Advantages of other algorithms are taken from the file.
    marks = [covers("prime-rl", "orchestrator.algo.type", algorithm)] * (algorithm in ("grpo", "max_rl"))
    full = named(options)
    marks += [
        covers("prime-rl", name, str(full[name]))
        for name in full
        if "length_weighted" in name or name.endswith("length_penalty.type")
    ]
    if release in ("v0.3.0", "v0.4.0"):
        marks.append(covers("prime-rl", "trainer.loss.ratio_type", options.get("ratio_type", "token")))
    else:
        marks.append(covers("prime-rl", "trainer.loss.type", options.get("type", "default")))
        if release in ("v0.5.0", "v0.6.0"):
            marks.append(covers("prime-rl", "orchestrator.advantage.type", "default"))
    if release == "HEAD":
        filtered = str(options.get("filter_zero_advantages", True))
        marks.append(covers("prime-rl", "orchestrator.train.filter_zero_advantages", filtered))
    return pytest.param(name, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [marked(name) for name in CONFIGS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_loss_gradient_and_metrics(name, case, dtype):
    """Given the advantages that prime-rl's own function made."""
    rows, wanted = rows_of(case), stored()[name, case, "f32" if dtype == torch.float32 else "f64"]
    each = [[value] * len(row["mask"]) for row, value in zip(rows, wanted["advantage"], strict=True)]
    found = evaluate(
        batch_of(rows, each, dtype), objective_of(name, stored_advantages=True), dtype=dtype, per_token=True
    )
    agree(found.per_token.grad_T, torch.tensor(wanted["grad"], dtype=torch.float64), dtype)
    made = {"loss": found.loss, **TRAINER.metrics(found)}
    logged = dict(zip(wanted["names"], wanted["values"], strict=True))
    renamed = {
        name.replace("entropy/", "entropy/all/") if "entropy/all/mean" in made else name: value
        for name, value in logged.items()
    }
    renamed.pop("loss/max", None)
    # Every value that is made is one that prime-rl logs, but for the quotient of two of them.
    assert made.keys() - {"kl_ent_ratio/mean"} == renamed.keys()
    for metric, value in renamed.items():
        kind = "loss" if metric == "loss" else TRAINER.log.kind_of(metric)
        radius = float(metric_radius(found, kind, made[metric])) if dtype == torch.float32 else 0.0
        # A count over a count is float32 in upstream's float64 too.
        radius = radius or 2**-23 * (kind == "row_share")
        assert made[metric] == pytest.approx(value, rel=1e-9, abs=radius + 1e-12), metric


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [name for name in CONFIGS if CONFIGS[name][2] in ("grpo", "max_rl")])
def test_from_the_rewards(name, case):
    """Advantages within their radius, and the loss from them within its own."""
    rows, wanted = rows_of(case), stored()[name, case, "f32"]
    found = evaluate(batch_of(rows, None, torch.float32), objective_of(name, stored_advantages=False))
    gap_N = (found.rows.advantage_N - torch.tensor(wanted["advantage"], dtype=torch.float64)).abs()
    assert (gap_N <= advantage_radius(found).likely).all()
    made = {"loss": found.loss, **TRAINER.metrics(found)}
    logged = dict(zip(wanted["names"], wanted["values"], strict=True))
    for metric in {"loss", "loss/mean"} & made.keys():
        radius = float(metric_radius(found, "loss", made[metric]))
        assert abs(made[metric] - logged[metric]) <= radius, metric
