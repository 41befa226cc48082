"""verl's value loss on stored results: predictions, values and returns of the golden batches."""

import polars as pl
import pytest
import torch
from goldens import golden_data as gold
from goldens.golden_data import DTYPES
from proof.claims import compared
from trainers.verl.test_goldens import VALUE_LOSSES

from rolloutdoctor.evaluation.evaluate import evaluate_rows
from rolloutdoctor.evaluation.scores import token_scores
from rolloutdoctor.formulas.advantages.table import TOKEN_ESTIMATORS
from rolloutdoctor.formulas.losses.aggregation import Layout, row_weights
from rolloutdoctor.formulas.losses.value import clipped_value_loss
from rolloutdoctor.objective.objective import Aggregation
from rolloutdoctor.ops import segments as seg

pytestmark = [compared("golden")]

BOUND = 0.5


def predictions(case, step, batch):
    """Column `vpreds`, which is in no run file."""
    frame = gold.inputs(case).filter(pl.col("step") == step)
    by_row = dict(zip(frame["sample_id"].cast(pl.String).to_list(), frame["vpreds"].to_list(), strict=True))
    rows = [by_row[batch.sample_name(row)] or [] for row in range(len(batch))]
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


@pytest.mark.parametrize(("case", "function", "config", "variant"), VALUE_LOSSES)
def test_value_loss(case, function, config, variant):
    scalars = gold.expected(case, "scalars")[function, config, variant]
    tokens = gold.expected(case, "tokens").get((function, config, variant))
    objective = gold.objective("verl", adv_estimator="gae", gamma=0.99, lam=0.95)
    compared = 0
    for step in gold.steps(case):
        batch = gold.batch(case, step)
        if gold.failures(scalars, step):
            continue
        mask_T = batch.column("response_mask")
        for precision, dtype in DTYPES.items():
            wanted = gold.scalar(scalars, step, "loss", precision)
            if wanted is None:
                continue
            rows = evaluate_rows(batch, objective, dtype)
            seen = token_scores(batch, objective, rows.in_baseline_N, None, dtype)
            return_T = torch.zeros(batch.tokens, dtype=dtype)
            return_T[mask_T] = TOKEN_ESTIMATORS["masked_gae"].returns(seen, objective.advantage).to(dtype)
            prediction_T = predictions(case, step, batch).to(dtype)
            term = clipped_value_loss(prediction_T, return_T, batch.column("values").to(dtype), BOUND)
            length_N = seg.total(mask_T, batch.rows)
            # Called without the sizes of a mini-batch, rows without a token are not counted.
            counted = length_N[length_N > 0]
            layout = Layout.of(torch.arange(len(counted) + 1))
            weight_N = torch.zeros_like(length_N)
            weight_N[length_N > 0] = row_weights(counted, layout, Aggregation(mode=config))
            weight_T = torch.where(mask_T, seg.expand(weight_N, batch.rows), 0.0)
            gold.assert_close((weight_T * term.value_T.double()).sum(), wanted, precision, "value loss")
            clipped = float(term.clipped_T[mask_T].double().mean())
            assert clipped == pytest.approx(gold.scalar(scalars, step, "clipfrac", precision), abs=1e-6)
            grad_T = None if tokens is None else gold.per_token(tokens, step, "grad", precision, batch)
            if grad_T is not None:
                own_T = weight_T * term.slope_T.double()
                gold.assert_close(own_T, grad_T, precision, "gradient", where=mask_T)
            compared += 1
    assert compared
