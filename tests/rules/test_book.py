"""The rule book: its table, the names and measures of the contract, and the page of every rule."""

import doctest
import pickle
import pkgutil
import re

import pytest

from rolloutdoctor import rules
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.rules.table import FAMILIES, RULES, find, pick

# Code, name and the measures that each rule must carry, as the contract has them.
CONTRACT = {
    "RDG001": (
        "zero-std-kl",
        "groups_share rows_share tokens_share grad_share_l1 grad_share_l2 relative_change_l1 kappa cosine "
        "kl_loss_share",
    ),
    "RDG002": (
        "loss-near-zero",
        "loss policy_loss kl_loss expected_loss_at_ratio_one grad_l1 grad_l2",
    ),
    "RDA001": (
        "rejected-in-baseline",
        "rejected_rows affected_groups baseline_drift_mean baseline_drift_max advantage_shift_mean "
        "advantage_shift_max sign_flips live_rows relative_change_l1 kappa cosine",
    ),
    "RDA002": ("singleton-group", "groups rows advantage_mass_share"),
    "RDA003": ("float-residue", "groups max_abs_advantage advantage_mass_share"),
    "RDM001": (
        "kl-metric-corrupted",
        "logged recomputed abs_error rel_error reward_share tokens_matching",
    ),
    "RDM002": ("eval-group-of-one", "rows masked_rows"),
    "RDI001": ("nonfinite-values", "tokens rows first_step"),
    "RDG003": (
        "reward-free-step",
        "steps_share reward_free_steps dead_steps grad_norm grad_norm_others grad_norm_ratio loss_by_kl",
    ),
    "RDG004": ("kl-only-loss", "steps_share kl_only_steps dead_steps loss kl_loss largest_policy_loss grad_norm"),
    "RDM003": (
        "logged-anomaly",
        "nonfinite_steps negative_kl_steps lowest_kl kl_max kl_peak grad_norm_max grad_norm_peak",
    ),
    "RDI002": ("overwritten-completions", "lost_rows lost_steps mixed_rows repeated_rows torn_lines"),
}
SECTIONS = ["What it does", "Why it matters", "How it is measured", "What to do", "Example"]

each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)


def test_table_lists_every_file():
    families = [one.name for one in pkgutil.iter_modules(rules.__path__) if one.ispkg and one.name != "measures"]
    folders = [f"{rules.__path__[0]}/{family}" for family in families]
    files = {module.name for module in pkgutil.iter_modules(folders)}
    assert {type(rule).__module__.rpartition(".")[2] for rule in RULES} == files
    assert len(RULES) == len(files)


def test_codes_and_names():
    codes, names = [rule.code for rule in RULES], [rule.name for rule in RULES]
    assert len(set(codes)) == len(codes)
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"RD[AGIMOT]\d{3}", code) for code in codes)
    assert {code[:3] for code in codes} <= FAMILIES.keys()
    assert codes == sorted(codes)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in names)


def test_the_contract_is_kept():
    assert {code: name for code, (name, _) in CONTRACT.items()}.items() <= {
        rule.code: rule.name for rule in RULES
    }.items()


@each_rule
def test_measures_of_the_contract(rule):
    found = rule.measures(None)
    assert found
    assert set(CONTRACT.get(rule.code, ("", ""))[1].split()) <= found.keys()
    assert all(measure.unit for measure in found.values())
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in found)


def test_the_contracts_logit_shares():
    names = {"grad_share_logits_l2", "grad_share_logits_l2_low", "grad_share_logits_l2_high"}
    assert names <= find("RDG001").measures(None).keys()


@each_rule
def test_page(rule):
    text = type(rule).__doc__
    assert re.findall(r"^\s*## (.*)$", text, re.MULTILINE) == SECTIONS
    assert rule.title()[0].isupper()
    assert rule.title()[-1] in ".:" or len(rule.title()) < 80
    assert rule.title().endswith(".")
    assert doctest.DocTestParser().get_examples(text)
    assert all(reference.startswith("https://") for reference in rule.references)
    assert rule.references


@each_rule
def test_rule_is_plain_data(rule):
    again = pickle.loads(pickle.dumps(rule))
    assert type(again) is type(rule)
    assert vars(again) == vars(rule) == {}


def test_pick():
    assert pick([], []) == RULES
    assert [rule.code for rule in pick(["RDA001", "RDA002", "RDA003"], ["RDA002", "float-residue"])] == ["RDA001"]
    assert [rule.code for rule in pick(["rdm001", "zero-std-kl"], [])] == ["RDG001", "RDM001"]
    assert pick(["RDA"], ["RD"]) == ()
    for word in ("RDA9", "", "A001", "R", "zero-std"):
        with pytest.raises(UsageError, match="no rule"):
            pick([word], [])
        with pytest.raises(UsageError, match="no rule"):
            pick([], [word])


def test_find():
    assert find("rda001") is find("rejected-in-baseline") is RULES[0]
    with pytest.raises(UsageError, match=r"no rule 'zero-std-kll'; did you mean 'zero-std-kl'\?"):
        find("zero-std-kll")
    with pytest.raises(UsageError, match=r"no rule 'rda0001'; did you mean 'RDA001'\?"):
        find("rda0001")
