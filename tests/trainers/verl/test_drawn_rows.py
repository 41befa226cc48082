"""`use_pf_ppo` of verl's V1 trainer: what its own `_compute_advantage` writes back, stored in `drawn_rows.npz`."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from goldens import make_drawn_rows as make
from objectives import objective_of

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.evaluation.radii.advantages import token_advantage_radius
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.search.hypotheses import drawn_rows
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.search.hypotheses.hypothesis import Seen
from rolloutdoctor.testing import diagnose, toy_batch
from rolloutdoctor.trainers.table import TRAINERS
from rolloutdoctor.trainers.verl.trainer import metrics

STORED = dict(np.load(Path(__file__).parents[2] / "goldens/data/drawn_rows.npz"))
ENDS = np.cumsum(STORED["lengths"].astype(int))[:-1]
CASES = make.CASES
COLUMNS = ("values", "old_log_probs", "ref_log_probs")


def rows_of(values, cast=float):
    return [[cast(x) for x in row] for row in np.split(np.asarray(values, dtype=np.float64), ENDS)]


@cache
def stored(case, label):
    return {name: STORED["|".join([*case, label, name])] for name in ("advantages", "returns", "response_mask", "log")}


def batch_of(case, label="f32", *, advantages=None, before=True):
    """The rows of a case as the store has them afterwards, with the masks that the estimator saw."""
    given = stored(case, label)
    rewards = [[float(x) for x in STORED["reward"][start : start + 4]] for start in range(0, make.ROWS, 4)]
    columns = {name: STORED[name] for name in COLUMNS} | {"advantages": given["advantages"]}
    if advantages is not None:
        columns["advantages"] = advantages
    per_token = {name: rows_of(values) for name, values in columns.items()}
    if before:
        per_token["response_mask_pre"] = rows_of(STORED["response_mask"], bool)
    batch = toy_batch(rewards, mask=rows_of(given["response_mask"], int), policy=-1.0, per_token=per_token)
    exact = {name: torch.tensor(np.asarray(values, dtype=np.float64)) for name, values in columns.items()}
    return batch if label == "f32" else replace(batch, per_token={**batch.per_token, **exact})


def options_of(case, *, stated=True):
    _, discount, setting = case
    gamma, lam = make.DISCOUNTS[discount]
    found = {"algorithm.adv_estimator": "gae", "algorithm.gamma": gamma, "algorithm.lam": lam}
    if stated:
        found["algorithm.use_pf_ppo"] = True
    if setting == "bypass":
        found["algorithm.rollout_correction.bypass_mode"] = True
    if setting == "penalty":
        found |= {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "k1", "algorithm.kl_ctrl.kl_coef": 0.1}
    return found


def of(case, **more):
    return objective_of("verl", **{name.replace(".", "__"): value for name, value in options_of(case, **more).items()})


@pytest.mark.parametrize("label", ["f64", "f32"])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_advantages_returns_and_what_is_logged(case, label):
    given, batch, dtype = stored(case, label), batch_of(case, label), make.DTYPES[label]
    found = evaluate(batch, of(case), dtype=dtype)
    mask_T = batch.column("response_mask")
    gap_T = (found.rows.advantage_T - torch.tensor(given["advantages"])).abs()[mask_T]
    assert (gap_T <= token_advantage_radius(found).largest).all()
    bound = 1e-10 if label == "f64" else 1e-5
    assert gap_T.max() < bound
    logged = metrics(found)
    wanted = dict(zip(make.LOGGED, given["log"].tolist(), strict=True))
    if case[2] == "penalty":
        assert not any(name.startswith("critic/rewards") for name in logged)
        wanted = {name: value for name, value in wanted.items() if not name.startswith("critic/rewards")}
    for name, value in wanted.items():
        assert logged[name] == pytest.approx(value, abs=10 * bound, rel=10 * bound), name


def reported(batch, options):
    report = diagnose([batch], trainer="verl", options=options)
    loud = [one for one in report.findings if one.severity > Severity.INFO and one.code[:3] in ("RDA", "RDI", "RDG")]
    return loud, {one.code: one.reason for one in report.skipped}, [code for code, _ in report.clean]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_run_with_the_option_has_the_fault(case):
    found, _, _ = reported(batch_of(case), options_of(case))
    finding = next(one for one in found if one.code == "RDA026")
    assert (finding.fix, finding.verdict, finding.severity) == ("own-advantages", "confirmed", Severity.WARNING)
    assert "#7957" in finding.advice
    assert not [one for one in found if one.code in ("RDA004", "RDI004", "RDG005")]


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_where_no_option_says_so_the_cause_is_named(case, before):
    found, skipped, _ = reported(batch_of(case, before=before), options_of(case, stated=False))
    if case[2] == "masks" and not before:
        # Moments are over masks that the file does not have: nothing is named, and nothing clean.
        assert "RDA026" in skipped
        return
    finding = next(one for one in found if one.code == "RDA026")
    assert finding.verdict == "confirmed"
    names = {finding.cause.hypothesis, *finding.cause.also}
    assert ("advantages-and-masks-of-resampled-rows" if case[2] == "masks" else "advantages-of-resampled-rows") in names
    assert finding.cause.as_found == finding.cause.compared > finding.cause.as_recorded
    assert not [one for one in found if one.code in ("RDA004", "RDI004")]


def own_advantages(case):
    """What the same rows have where none is drawn."""
    plain = of(case, stated=False)
    batch = batch_of(case)
    batch = replace(batch, per_token={**batch.per_token, "response_mask": batch.column("response_mask_pre")})
    return evaluate(batch, plain, dtype=torch.float64).rows.advantage_T.numpy()


def test_advantages_from_before_the_draw_are_no_verdict():
    case = ("pow", "gae", "advantages")
    batch = batch_of(case, advantages=own_advantages(case))
    found, skipped, clean = reported(batch, options_of(case))
    assert "RDA026" not in clean
    assert "before rows were drawn" in skipped["RDA026"]
    # The rows end in masks, which is another rule's.
    assert {one.code for one in found} == {"RDA029"}
    # Without the option they are what they should be.
    found, _, clean = reported(batch, options_of(case, stated=False))
    assert {one.code for one in found} == {"RDA029"}
    assert "RDA026" in clean


def test_the_fix_gives_rows_their_own():
    for case in CASES:
        fixed = choose("own-advantages").apply(of(case))
        found = evaluate(batch_of(case, "f64"), fixed, dtype=torch.float64)
        mask_T = batch_of(case).column("response_mask") & batch_of(case).column("response_mask_pre")
        wanted_T = torch.tensor(own_advantages(case))
        assert (found.rows.advantage_T - wanted_T).abs()[mask_T].max() < 1e-6


@pytest.mark.slow
def test_other_faults_of_the_same_rows_are_not_taken_for_a_draw():
    """Noise, another discount, a shift, and rewards of other rows with a critic that tells rows apart."""
    case = ("pow", "gae", "advantages")
    own = own_advantages(case)
    draw = np.random.default_rng(3)
    other = evaluate(batch_of(case), of(("pow", "plain", "advantages"), stated=False), dtype=torch.float64)
    for made in (own + 0.1 * draw.normal(size=own.shape), other.rows.advantage_T.numpy(), own + 0.5, 2 * own):
        found, _, _ = reported(batch_of(case, advantages=made), options_of(case, stated=False))
        assert found
        assert "RDA026" not in {one.code for one in found}


def test_a_value_for_each_row_says_nothing_of_a_draw():
    """A critic that is 0: every row has one advantage, and any wrong reward gives that of another row."""
    rewards = [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]]
    lengths = [4] * 8
    zeros = {"values": [[0.0] * 4] * 8}
    own = evaluate(
        toy_batch(rewards, lengths=lengths, per_token=zeros), objective_of("verl", adv_estimator="gae")
    ).rows.advantage_T
    moved = own.reshape(8, 4)[[3, 2, 2, 0, 7, 6, 6, 1]].tolist()
    batch = toy_batch(rewards, lengths=lengths, policy=-1.0, per_token={**zeros, "advantages": moved})
    found, skipped, clean = reported(batch, {"algorithm.adv_estimator": "gae"})
    assert "RDA026" not in {one.code for one in found}
    assert "RDA026" in skipped
    assert "RDA026" not in clean


def test_evidence_is_counted_against_what_is_asked(monkeypatch):
    case = ("pow", "gae", "advantages")
    plain = evaluate(batch_of(case), of(case, stated=False))
    seen = Seen(plain, None, {}, TRAINERS["verl"])
    bits = drawn_rows.evidence(plain, drawn_rows.RESAMPLED[0])
    assert 20 * drawn_rows.ENOUGH_BITS < bits < drawn_rows.BITS_OF_FLOAT * batch_of(case).tokens
    # The masks that the estimator saw are those of the file, so that both give the same.
    for asked, found in ((bits * 1.01, ()), (bits * 0.99, drawn_rows.RESAMPLED)):
        monkeypatch.setattr(drawn_rows, "ENOUGH_BITS", asked)
        assert tuple(drawn_rows.DRAWN_ROWS.solve([[seen]])) == found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trainer__use_v1": False}, "V1 trainer alone"),
        ({"algorithm__rollout_correction__rollout_is": "token"}, "of other rows"),
        ({"algorithm__rollout_correction__rollout_rs": "token_k1",
          "algorithm__rollout_correction__rollout_rs_threshold": "0.5_2"}, "of other rows"),
    ],
)  # fmt: skip
def test_what_is_refused(options, words):
    with pytest.raises(UsageError, match=words):
        objective_of("verl", adv_estimator="gae", use_pf_ppo=True, **options)


def test_other_estimators_do_not_read_the_option():
    assert objective_of("verl", adv_estimator="grpo", use_pf_ppo=True).advantage.drawn is None


def test_older_releases_draw_whole_rows():
    with pytest.raises(UsageError, match="V1 trainer alone"):
        objective_of("verl@0.7.0", adv_estimator="gae", use_pf_ppo=True)
