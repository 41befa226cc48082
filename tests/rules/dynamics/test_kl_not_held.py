"""RDT015: a KL coefficient below 0, of a known trainer and of none."""

import json

import pytest

import rolloutdoctor as rd
from rolloutdoctor.engine.gathering import measure
from rolloutdoctor.engine.merged import merged, saved_state
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.prepare import prepare
from rolloutdoctor.engine.state_file import saved_of
from rolloutdoctor.engine.stored import members_of
from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.results.findings import Severity

VERL = "".join(
    f"step:{n} - actor/pg_loss:0.{n} - actor/grad_norm:1.{n} - critic/score/mean:0.{n} - actor/kl_loss:0.0{n}\n"
    for n in range(1, 6)
)


def logged(folder, coefficient, *, is_on=True):
    actor = {"clip_ratio": 0.2, "use_kl_loss": is_on, "kl_loss_coef": coefficient, "ppo_mini_batch_size": 4}
    config = {"actor_rollout_ref": {"actor": actor, "rollout": {"n": 4}}, "algorithm": {"adv_estimator": "grpo"}}
    path = folder / "log.txt"
    path.write_text(f"{config}\n{VERL}")
    return path


def found(path):
    return next((one for one in rd.check(path).findings if one.code == "RDT015"), None)


@pytest.mark.parametrize(
    ("coefficient", "is_on", "is_found"),
    [(-0.1, True, True), (-1e-6, True, True), (0, True, False), (0.1, True, False), (-0.1, False, False)],
)
def test_a_stated_coefficient_below_0_is_a_warning_where_the_term_is_on(tmp_path, coefficient, is_on, is_found):
    one = found(logged(tmp_path, coefficient, is_on=is_on))
    assert (one is not None) is is_found
    if one is not None:
        assert (one.severity, one.verdict) == (Severity.WARNING, "confirmed")
        assert one.headline == f"the KL coefficient is {coefficient:g}: the loss rewards distance from the reference"
        assert one.measures["onset"].value == 1


@pytest.mark.parametrize(("beta", "is_found"), [(-0.1, True), (0.0, False), (0.1, False)])
def test_that_of_an_unknown_trainer_is_exposed(tmp_path, beta, is_found):
    rows = [{"step": n, "reward": 0.5 + n % 2 / 10, "kl": 0.01 * n, "grad_norm": 1.0} for n in range(1, 13)]
    lines = [{"type": "config", "beta": beta, "num_generations": 8}, *rows]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    one = found(tmp_path / "log.jsonl")
    assert (one is not None) is is_found
    assert one is None or one.verdict == "exposed"


def test_a_state_keeps_what_is_refused(tmp_path):
    path = str(logged(tmp_path, -0.1))
    with open_any([path], trainer=None, options=ConvertOptions(), tell=lambda text: None, logs_alone=True) as run:
        prepared = prepare(run, CheckOptions(device="cpu"))
        members = members_of(saved_state(prepared, measure(prepared)))
    report = merged([("a.state", saved_of("a.state", members))])
    assert any("the KL coefficient is -0.1" in one.headline for one in report.findings)
