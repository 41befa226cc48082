"""An estimator or a loss is named by its formula, its spec and its trainers; everything else asks for what it is."""

import ast
import re

import pytest
from test_trainer_names import MODULES, texts

from rolloutdoctor.formulas.losses.surrogates import SURROGATES
from rolloutdoctor.objective.estimators import SPECS
from rolloutdoctor.trainers.trl.loss_types import LOSS_TYPES

PLACES = ("formulas/", "objective/estimators.py", "trainers/", "metric_names/")
OTHER_MEANINGS = {"raw", "grpo", "rloo"}
"""Also a score and trainers; and the baselines that the search for causes tries."""


@pytest.mark.parametrize("names", [SPECS, SURROGATES, LOSS_TYPES], ids=["estimators", "terms", "loss types"])
def test_names_stay_in_their_places(names):
    wanted = names.keys() - OTHER_MEANINGS
    quoted = re.compile(rf"[\"']({'|'.join(wanted)})[\"']")
    found = set()
    for file, path in MODULES.items():
        source = path.read_text(encoding="utf-8")
        if not file.startswith(PLACES) and quoted.search(source):
            found |= {(text, file) for text, _ in texts(ast.parse(source)) if text in wanted}
    found -= {
        ("cispo_capped", "evaluation/radii/clipping.py"),
        ("dppo_tv", "objective/objective.py"),
        ("dro", "objective/objective.py"),
        ("kl_cov", "objective/objective.py"),
        ("ppo_delta_clip", "objective/objective.py"),
        ("ppo_dual_clip", "objective/objective.py"),
        ("probability_band", "objective/objective.py"),
        ("ratio_masked", "objective/objective.py"),
    }
    assert not found, f"{found}: ask for a property, or choose another name; a property of `Surrogate` is a line above"


PRODUCTS = {"mv", "mm", "bmm", "matmul", "einsum", "dot", "vdot", "inner", "tensordot", "addmm", "addmv", "baddbmm"} | {
    *("chain_matmul", "multi_dot", "corrcoef", "cov", "convolve", "correlate", "linear", "bilinear", "cdist")
}
SOLVERS = {
    ("linalg.pinv", "ops/ledger.py"): "contrasts between classes, which are differences of means to rounding",
    ("linalg.lstsq", "commands/why/units.py"): "weights that are used where they reproduce every reward",
    ("linalg.lstsq", "search/hypotheses/advantage_lines.py"): "weights that are rounded, then tested against the log",
    (
        "linalg.lstsq",
        "rules/fitted_identities.py",
    ): "sums whose distance is judged by a bound, and rounded to six digits",
    (
        "linalg.lstsq",
        "search/solved_advantages.py",
    ): "weights that are rounded to three digits, then tested as candidates",
    ("linalg.svd", "search/hypotheses/advantage_lines.py"): "weights that are rounded, then tested against the log",
}
"""Calls of LAPACK, with why their last digits decide nothing."""


@pytest.mark.slow
def test_no_sum_in_an_order_that_the_processor_chooses():
    """Matrix products add up as their library likes: on Intel, AMD and a GPU in three orders.

    Multiply, then add with `sum`, or with `formulas.advantages.float32.row_sums` where float32 is the subject.
    """
    products, solvers = set(), set()
    for file, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                products.add((f"{file}:{node.lineno}", "@"))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                parts = ast.unparse(node.func).split(".")
                if parts[-1] in PRODUCTS and parts[0] not in {"pl", "re"}:
                    products.add((f"{file}:{node.lineno}", ast.unparse(node.func)))
                if "linalg" in parts:
                    solvers.add((".".join(parts[-2:]), file))
    assert products == set()
    assert solvers == SOLVERS.keys()


@pytest.mark.slow
def test_a_module_gives_a_name_to_one_thing():
    """The second constant of a name changes what reads the first one, and no linter says so."""
    twice = []
    for file, path in MODULES.items():
        names = [
            target.id
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        ]
        twice += [f"{file}: {name}" for name in set(names) if names.count(name) > 1]
    assert not twice
