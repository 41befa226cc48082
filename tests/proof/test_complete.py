"""Every name that upstream knows is compared: its registries and the names that its code asks for, against the claims.

A name that a new version brings has no row in the table, and fails here until it is compared, or refused with a reason.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache

import pytest
from proof.claims import AGAINST, Bound, covers
from proof.table import claimed, markdown, rows_of

from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers import table
from rolloutdoctor.trainers.options import Layer, Option, resolve
from rolloutdoctor.trainers.releases import parse_version

pytestmark = [pytest.mark.filterwarnings("ignore")]

REAL = {"package", "golden"}
"""What is compared with the real code; the rest is compared with formulas."""


@cache
def proven(against: frozenset[str] = frozenset(REAL)) -> dict[tuple[str, str], set[str]]:
    """Values that are compared, by trainer and option; names of options are shortened as far as they stay unique."""
    found: dict[tuple[str, str], set[str]] = {}
    for claim in claimed():
        if claim["against"] in against:
            found.setdefault((claim["trainer"], full_name(claim["trainer"], claim["option"])), set()).add(
                claim["value"]
            )
    return found


def full_name(trainer: str, option: str) -> str:
    """The full name of a shortened one; a name that the trainer has not, such as a metric, is kept."""
    names = {each.name: each for each in table.TRAINERS[trainer].options}
    if option in names:
        return option
    fits = [name for name in names if name.endswith(f".{option}")]
    first = [name for name in fits if not names[name].yields] or fits
    return first[0] if len(first) == 1 else option


def asked_for(function: Callable, name: str) -> set[str]:
    """Words that the source of a function or class compares a variable or an attribute with."""

    def is_it(node: ast.expr) -> bool:
        return (isinstance(node, ast.Name) and node.id == name) or (
            isinstance(node, ast.Attribute) and node.attr == name
        )

    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Compare) and is_it(node.left):
            words = [each for side in node.comparators for each in ast.walk(side) if isinstance(each, ast.Constant)]
            found |= {word.value for word in words if isinstance(word.value, str)}
    return found


def of_verl() -> dict[str, set[str]]:
    """Names that verl's functions know, by option."""
    algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    kl = asked_for(algos.kl_penalty_forward, "kl_penalty") - {"full"}
    kl |= {f"{name}+" for name in kl}
    return {
        "algorithm.adv_estimator": set(algos.ADV_ESTIMATOR_REGISTRY),
        "actor_rollout_ref.actor.policy_loss.loss_mode": set(algos.POLICY_LOSS_REGISTRY),
        "actor_rollout_ref.actor.loss_agg_mode": asked_for(algos.agg_loss, "loss_agg_mode"),
        "actor_rollout_ref.actor.kl_loss_type": kl,
        "algorithm.kl_penalty": kl,
        "algorithm.rollout_correction.rollout_rs": set(helper.SUPPORTED_ROLLOUT_RS_OPTIONS),
        "algorithm.rollout_correction.rollout_is": asked_for(helper.compute_rollout_correction_weights, "rollout_is"),
        "actor_rollout_ref.actor.policy_loss.rollout_correction.loss_type": asked_for(
            algos.compute_policy_loss_bypass_mode, "loss_type"
        ),
    }


def of_trl() -> dict[str, set[str]]:
    """Names that TRL's GRPOTrainer knows, by option."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    options = ("loss_type", "importance_sampling_level", "scale_rewards", "multi_objective_aggregation")
    return {option: asked_for(trainer, option) for option in (*options, "vllm_importance_sampling_mode")}


UPSTREAM = {"verl": of_verl, "trl": of_trl}


@pytest.mark.parity
@pytest.mark.parametrize("trainer", UPSTREAM)
def test_every_upstream_name_is_compared(trainer):
    for option, names in UPSTREAM[trainer]().items():
        assert len(names) > 1, option
        assert names <= proven().get((trainer, option), set()), option


@pytest.mark.parity
@pytest.mark.parametrize("trainer", UPSTREAM)
def test_every_upstream_name_is_an_option_here(trainer):
    known = {option.name: option for option in table.TRAINERS[trainer].options}
    for option, names in UPSTREAM[trainer]().items():
        if known[option].choices:
            assert names <= set(known[option].choices), option


def worded(trainer: str) -> list[Option]:
    """Options of a trainer whose values are words from a list."""
    return [option for option in table.TRAINERS[trainer].options if option.choices and option.decides]


INSIDE = "actor_rollout_ref.actor.policy_loss.rollout_correction."
"""The correction inside the bypass loss, whose functions are those of the correction before it."""


@pytest.mark.parametrize("trainer", table.TRAINERS)
def test_every_choice_that_is_computed_is_compared(trainer):
    """With the real code; slime's cannot be installed, and what its stored results lack is compared with formulas."""
    against = frozenset(AGAINST if trainer == "slime" else REAL)
    for option in worded(trainer):
        choices = set(option.choices) & set(option.computed or option.choices)
        choices = {value for value in choices if not refuses(trainer, option, value)}
        name = (
            option.name.replace(INSIDE, "algorithm.rollout_correction.") if "rollout_is" in option.name else option.name
        )
        absent = choices - proven(against).get((trainer, name), set())
        assert not absent, f"{name} {absent}: compare with the real code, and mark the test with what it covers"


NEEDED = {name: {"normalize_advantages": True} for name in ("slime", "miles")}
"""Options without which some values of others are refused."""


def refuses(trainer: str, option: Option, value: object) -> bool:
    """True if the trainer refuses a value by its name, where the other options let it have any."""
    made = table.TRAINERS[trainer]
    versions = [made.newest, option.values_since.get(value, ""), option.since, made.oldest]
    version = next(each for each in versions if each and option.exists_at(parse_version(each)))
    version = max(version, option.values_since.get(value, ""), key=lambda each: parse_version(each or "0"))
    try:
        made.objective(
            resolve(
                made.options,
                parse_version(version),
                [Layer("test", {**NEEDED.get(trainer, {}), option.name: value})],
                trainer=trainer,
            )
        )
    except UsageError as error:
        return f"{option.name} = {value}" in str(error)
    return False


def test_no_value_that_is_refused_is_said_to_be_compared():
    claims = {(claim["trainer"], full_name(claim["trainer"], claim["option"]), claim["value"]) for claim in claimed()}
    for trainer in table.TRAINERS:
        for option in worded(trainer):
            stated = {value for value in option.choices if (trainer, option.name, value) in claims}
            assert not {value for value in stated if refuses(trainer, option, value)}, option.name


def test_every_value_is_one_of_the_option():
    """A claim about a value that the option does not take proves nothing."""
    for claim in claimed():
        name = full_name(claim["trainer"], claim["option"])
        option = next((each for each in table.TRAINERS[claim["trainer"]].options if each.name == name), None)
        if option is not None and option.choices:
            assert claim["value"] in (*option.choices, "None"), claim


def test_a_wide_bound_needs_a_cause():
    with pytest.raises(ValueError, match="say why"):
        Bound(5e-6)
    with pytest.raises(ValueError, match="say why"):
        Bound(None)
    assert Bound(None, 1e-10, "float64 alone").at.__self__.double == 1e-10


def test_the_table_follows_the_claims():
    """Without the claim there is no row."""
    claims = claimed()
    rows = rows_of(claims)
    assert len(rows) > 20
    first, _ = rows[0]
    without = [claim for claim in claims if claim["option"] != first["option"]]
    assert len(rows_of(without)) < len(rows)
    assert "`gspo`" in markdown(claims)
    assert "`gspo`" not in markdown([claim for claim in claims if claim["value"] != "gspo"])
    assert covers("verl", "loss_mode", "gspo").args == ("verl", "loss_mode", "gspo")
