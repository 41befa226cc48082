"""Group ids under verl's vectorised estimators: as its own function reads them, and under the fix of rejected rows."""

from dataclasses import replace

import numpy as np
import oracles
import pytest
import torch
from parity.padded import precision
from parity.test_verl_advantages import Config, algos, objective, upstream
from proof.claims import agree, compared, values_of

from rolloutdoctor.evaluation.evaluate import evaluate_rows
from rolloutdoctor.formulas.advantages.group_ids import by_number
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import random_batch

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), compared("package")]

__all__ = ["algos"]

IDS = {
    "one number spelt thrice": ["7", "007", "+7", "8"],
    "spaces, signs, underscores": [" 1_0", "10 ", "-0", "0"],
    "other digits": ["７", "7", "٣", "3"],
    "numbers that differ": ["4", "17", "0", "3"],
    "words": ["a", "b", "c", "d"],
    "one word among numbers": ["7", "007", "7.0", "8"],
    "exponents and hexadecimals": ["1e1", "10", "0xa", "010"],
    "an empty one": ["", "7", "07", "007"],
    "more than 64 bits": ["7", "007", "9223372036854775808", "8"],
    "less than 64 bits": ["7", "007", "-9223372036854775809", "8"],
    "uuids": ["6f9619ff-8b86-d011-b42d-00c04fc964ff", "7", "07", "007"],
}
FAILING = {
    "below zero": (["-3", "7", "1", "2"], IndexError, "as indices, and -3 is below 0; verl fails here"),
    "huge": (["7", "1", "2", str(2**62)], RuntimeError, "asks for a vector of as many groups; verl fails here"),
}


def batch_of(ids: list[str], seed: int = 0, **shares: float):
    batch = random_batch(seed, sizes=(4, 3, 2, 1), dtype=torch.float64, **{"empty": 0.0, "rejected": 0.0} | shares)
    return replace(batch, group_ids=ids)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "name", values_of("verl", "adv_estimator", ["grpo_vectorized", "rloo_vectorized", "grpo", "rloo"])
)
@pytest.mark.parametrize("case", IDS)
def test_advantages(algos, case, name, seed):
    batch = batch_of(IDS[case], seed)
    with precision(torch.float64):
        wanted_T = upstream(algos, name, batch, torch.float64, Config(norm_adv_by_std_in_grpo=True))
    recomputed_N = evaluate_rows(batch, objective(adv_estimator=name), torch.float64).advantage_N
    own_T = torch.repeat_interleave(recomputed_N, batch.rows.diff())
    agree(own_T, wanted_T, torch.float64, where=batch.column("response_mask"))


@pytest.mark.parametrize("case", FAILING)
def test_what_cannot_be_an_index(algos, case):
    ids, error, words = FAILING[case]
    batch = batch_of(ids)
    with pytest.raises(error):
        upstream(algos, "grpo_vectorized", batch, torch.float64, Config(norm_adv_by_std_in_grpo=True))
    with pytest.raises(CannotComputeError, match=words):
        evaluate_rows(batch, objective(adv_estimator="grpo_vectorized"), torch.float64)
    evaluate_rows(batch, objective(adv_estimator="rloo_vectorized"), torch.float64)


@pytest.mark.parametrize("draw", range(40))
def test_groups_are_those_of_the_real_index(draw):
    index = pytest.importorskip("verl.utils.groupwise")
    chosen = np.random.default_rng(draw)
    alphabet = list("0017 +_") + ["a"] * int(draw % 4 == 0) + ["-"] * int(draw % 3 == 0)
    ids = list(dict.fromkeys("".join(chosen.choice(alphabet, int(chosen.integers(1, 4)))) for _ in range(12)))
    if draw % 2:
        ids = [each for each in ids if _is_number(each)] or ["0"]
    wanted = index.as_torch_index(np.array(ids, dtype=object), device="cpu").tolist()
    groups = Groups.of(torch.arange(len(ids)))
    if min(wanted) < 0:
        with pytest.raises(CannotComputeError):
            by_number(groups, ids)
        return
    found = by_number(groups, ids).index_N.tolist()
    pairs = [(one, two) for one in range(len(ids)) for two in range(one)]
    assert [found[one] == found[two] for one, two in pairs] == [wanted[one] == wanted[two] for one, two in pairs]


def _is_number(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("variant", ["singleton-raw", "singleton-zero", "pr6452"])
@pytest.mark.parametrize("case", IDS)
def test_fixes_of_rloo_vectorized(case, variant):
    """Rows without a token have no say; ids are numbers in the variant of the pull request alone."""
    ids = IDS[case]
    batch = batch_of(ids, 3, rejected=0.3)
    mine = choose(f"rejected-rows:{variant}").apply(objective(adv_estimator="rloo_vectorized"))
    found = evaluate_rows(batch, mine, torch.float64)
    numbers = [int(each) for each in ids] if variant == "pr6452" and all(map(_is_number, ids)) else ids
    if any(isinstance(each, int) and not -(2**63) <= each < 2**63 for each in numbers):
        numbers = ids
    groups = [numbers[group] for group in batch.groups.index_N.tolist()]
    lengths = [int(row.sum()) for row in batch.column("response_mask").split(batch.rows.diff().tolist())]
    votes = [length > 0 for length in lengths]
    scores = batch.column("reward").tolist()
    wanted = oracles.advantages("rloo", scores, groups, votes, lengths, singleton="zero")
    assert found.advantage_N.tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-12)
