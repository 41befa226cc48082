import numpy as np
import pytest
from rules.sampling import run, sample, write_run

from rolloutdoctor.io.run import open_run
from rolloutdoctor.trainers.table import ALIASES


def gap(rollouts):
    return (rollouts.trainer.astype(float) - rollouts.sampler)[rollouts.mask]


def test_a_seed_gives_one_run():
    one, other = sample(3), sample(3)
    assert (one.sampler == other.sampler).all()
    assert (one.response_ids == other.response_ids).all()


def test_siblings_share_contexts():
    found = sample(0, noise=0.0)
    firsts = found.rows[:-1]
    pairs = {}
    for row, first in enumerate(firsts):
        pairs.setdefault((found.prompts[row], found.response_ids[first]), set()).add(found.trainer[first])
    assert len(pairs) < len(firsts)
    assert all(len(values) == 1 for values in pairs.values())


def test_a_healthy_engine_is_calibrated_and_near_the_trainer():
    found = sample(0, size=16)
    assert abs(gap(found)).mean() < 0.02
    surprise = -found.trainer.astype(float) - found.entropy
    assert abs(surprise.mean()) < 4 * surprise.std() / np.sqrt(len(surprise))


def test_the_normaliser_hides_a_temperature():
    # Within a context a difference of log-probs is 1/T exactly; over contexts its slope is another.
    found = sample(0, noise=0.0, temperature=0.5)
    slope = np.polyfit(found.trainer, found.sampler, 1)[0]
    assert slope < 1.5
    firsts = found.rows[:-1]
    apart_s, apart_o = np.diff(found.sampler[firsts].astype(float)), np.diff(found.trainer[firsts].astype(float))
    same = (np.diff(found.prompts) == 0) & (abs(apart_o) > 0.5)
    assert apart_s[same] / apart_o[same] == pytest.approx(2, rel=1e-4)


def test_truncated_support_is_one_sided():
    found = sample(0, top_p=0.9, noise=0.0)
    assert gap(found).max() < 1e-6
    assert gap(found).min() >= np.log(0.9) - 1e-6


def test_a_run_file(tmp_path):
    write_run(tmp_path / "run.parquet", run(2, prompts=3, turns=1, observed=float("nan")))
    (one, _) = open_run([tmp_path / "run.parquet"], trainer=None, aliases=ALIASES).batches(["response_ids", "entropy"])
    assert len(one) == 24
    assert one.has("response_ids", "entropy")
