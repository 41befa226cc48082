"""Findings by cause: what follows from another is told under it and counts with it, and no error is hidden."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from engine.test_clean import noise
from search.test_causes import SETUPS, a_batch, configured, planted

from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.verdict import exit_code
from rolloutdoctor.commands.check.several import RENDERERS as SEVERAL
from rolloutdoctor.engine.causal_order import ANY, FAMILIES, FOLLOWS, NO_CAUSES, RANKS, by_cause, rank_of
from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate_rows
from rolloutdoctor.evaluation.tokens import token_pass
from rolloutdoctor.results.audit import Cause, Refuted
from rolloutdoctor.results.findings import Finding, InputSummary, Measure, Report, Severity
from rolloutdoctor.results.several import CheckedRun
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.testing import diagnose
from rolloutdoctor.trainers.table import find
from rolloutdoctor.views.style import Style
from rolloutdoctor.views.table import RENDERERS
from rolloutdoctor.views.verdict import verdict

WARNING, INFO = Severity.WARNING, Severity.INFO

CODES = {rule.code: rule.name for rule in RULES}
NO_CONTEXT = Context(frozenset())


def finding(code, severity=Severity.ERROR, verdict="confirmed", **more):
    return Finding(code, CODES[code], severity, verdict, f"headline of {code}", "m", "e", "advice", {}, **more)


def told(*findings, context=NO_CONTEXT):
    return [(one.code, one.follows_from) for one in by_cause(findings, context)]


def unexplained(**stages):
    return {name: SimpleNamespace(stage=stage) for name, stage in stages.items()}


def test_the_table_names_rules_and_has_no_circle():
    # RDA006 and RDA004, RDT013 with RDT003, RDT004 and RDT005, RDA015 and RDI004, RDT014 with RDT003 and RDT013, RDI012
    # with RDT005: conditions that exclude each other.
    excluding = {
        "_all_of_rows",
        "_fell_with_length",
        "_gradient_rose_before",
        "_is_of_copies",
        "_is_cut_at_jump",
        "_began_before_jump",
        "_began_before_cuts",
    }
    table = [(cause, codes) for cause, codes, holds in FOLLOWS if cause != ANY and holds.__name__ not in excluding]
    links = {(cause, code) for cause, codes in table for code in codes}
    assert {code for link in links for code in link} <= CODES.keys()
    left = {code for link in links for code in link}
    while left:
        roots = left - {code for cause, code in links if cause in left}
        assert roots, left
        left -= roots


@pytest.mark.parametrize(
    ("cause", "code"),
    [(cause, code) for cause, codes, holds in FOLLOWS for code in codes if holds.__name__ == "_always"],
)
def test_every_link_without_a_condition(cause, code):
    assert told(finding(code), finding(cause)) == [(cause, None), (code, cause)]
    assert told(finding(code)) == [(code, None)]


def begun(code, onset, severity=Severity.ERROR, verdict="confirmed"):
    return replace(finding(code, severity, verdict), measures={"onset": Measure(onset, "step")})


def cut(share):
    return replace(finding("RDI012", WARNING), measures={"truncated_share": Measure(share, "1")})


def shortened(onset, cut):
    found = replace(begun("RDT013", onset, WARNING), headline="the response length fell for good")
    return replace(found, measures={**found.measures, "truncated_last": Measure(cut, "1")})


def test_the_ranks_name_rules_and_differ_from_their_families():
    assert RANKS.keys() | NO_CAUSES <= CODES.keys()
    assert not [code for code, rank in RANKS.items() if FAMILIES[code[:3]] is rank]
    # One of a lower rank follows only where it began later, or is a view of the same event.
    links = [(cause, code) for cause, codes, holds in FOLLOWS if cause != ANY for code in codes]
    assert {(cause, code) for cause, code in links if rank_of(cause) > rank_of(code)} == {
        ("RDT004", "RDT002"), ("RDT003", "RDT002"), ("RDT006", "RDT001"), ("RDT006", "RDG003"), ("RDM001", "RDG005"),
        ("RDG015", "RDG011"), ("RDT001", "RDA011"), ("RDT003", "RDA017"), ("RDI012", "RDT002"), ("RDI012", "RDT001"),
        ("RDI012", "RDG002"), ("RDI012", "RDG003"),
    }  # fmt: skip


@pytest.mark.parametrize(("nonfinite", "cause", "follows"), [(0, True, "RDG007"), (1, True, None), (0, False, None)])
def test_a_negative_kl_follows_from_the_estimator_that_gives_it(nonfinite, cause, follows):
    counts = {"negative_kl_steps": 2, "nonfinite_steps": nonfinite, "impossible_steps": 0}
    measures = {name: Measure(value, "steps") for name, value in counts.items()}
    negative = replace(finding("RDM003", Severity.WARNING), measures=measures)
    made = Cause("kl-loss-is-k1", "RDG007", "words", "train/kl_loss", 6, 0, 6, 0.5, "do") if cause else None
    estimator = replace(finding("RDG007", Severity.WARNING, "exposed"), cause=made)
    assert dict(told(negative, estimator))["RDM003"] == follows


@pytest.mark.parametrize(("last", "follows"), [(0.89, None), (0.9, "RDT006")])
def test_equal_rewards_follow_from_truncation_of_nearly_all(last, follows):
    cut = begun("RDT006", 6, WARNING)
    cut = replace(cut, measures={**cut.measures, "truncated_last": Measure(last, "1")})
    order = told(begun("RDT001", 22), cut)
    assert dict(order)["RDT001"] == follows
    assert order[0][0] == (follows or "RDT001")


@pytest.mark.parametrize(
    ("words", "onset", "follows"),
    [
        ("the response length fell for good at step 19", 18, "RDT013"),
        ("the response length fell for good at step 19", 17, "RDT013"),
        ("the response length fell for good at step 19", 16, None),
        ("the response length fell for good at step 19", 22, None),
        ("the gradient norm rose for good at step 19", 19, None),
    ],
)
def test_a_reward_that_falls_with_the_length_follows_from_it(words, onset, follows):
    order = told(begun("RDT005", onset), replace(begun("RDT013", 19, WARNING), headline=words))
    assert dict(order)["RDT005"] == follows


@pytest.mark.parametrize("code", ["RDT001", "RDT003", "RDT004", "RDT005"])
@pytest.mark.parametrize(("onset", "follows"), [(20, "RDT013"), (19, None)])
def test_a_collapse_follows_from_a_gradient_that_rose_before_it(code, onset, follows):
    rose = replace(begun("RDT013", 19, WARNING), headline="the gradient norm rose for good at step 19")
    assert dict(told(begun(code, onset), rose))[code] == follows
    fell = replace(begun("RDT013", 5, WARNING), headline="the response length fell for good at step 5")
    assert dict(told(begun(code, onset), fell))[code] is None


@pytest.mark.parametrize(
    ("shown", "copies", "elsewhere", "follows"),
    [(4, 4, 0, "RDI015"), (4, 3, 0, "RDI015"), (4, 5, 0, None), (4, 4, 1, None)],
)
def test_copies_that_fill_up_the_batch_are_no_repeated_samples(shown, copies, elsewhere, follows):
    counts = {"impossible_copies": copies, "impossible_copies_in_other_groups": elsewhere}
    repeated = replace(finding("RDI009"), measures={name: Measure(value, "rows") for name, value in counts.items()})
    padding = replace(finding("RDI015", Severity.WARNING, "exposed"), measures={"rows_shown": Measure(shown, "rows")})
    order = told(repeated, padding)
    assert dict(order)["RDI009"] == follows
    assert order[0][0] == ("RDI015" if follows else "RDI009")


BY_PADDING = "log-probs of the sampler are late by the padding of their row in 150 sampled rows of 150"
OF_COPIES = {"copies": Measure(144, "rows"), "differing_copies": Measure(62, "rows")}
OTHER_ROWS = Cause("rewards-of-other-rows", "RDI004", "words", "advantages", 4, 1, 4, 0.5, "do")


@pytest.mark.parametrize(
    ("findings", "order"),
    [
        # The temperature of the sampler, a warning, before the lengths that it makes, an error.
        ([begun("RDT006", 12), finding("RDO003", WARNING)], [("RDO003", None), ("RDT006", "RDO003")]),
        # One story: KL, entropy, reward, whichever code is the smaller.
        (
            [begun("RDT005", 5), begun("RDT002", 5), begun("RDT003", 3), begun("RDT004", 2, WARNING)],
            [("RDT004", None), ("RDT003", "RDT004"), ("RDT002", "RDT004"), ("RDT005", "RDT002")],
        ),
        # A learning rate explains what began with it or later, and nothing before.
        ([begun("RDT004", 9), begun("RDT009", 9, WARNING)], [("RDT009", None), ("RDT004", "RDT009")]),
        ([begun("RDT004", 8), begun("RDT009", 9, WARNING)], [("RDT004", None), ("RDT009", None)]),
        # A verifier that dies explains the KL that rises later; of one that died later the KL is not the consequence.
        ([begun("RDT004", 9), begun("RDT002", 4, WARNING)], [("RDT002", None), ("RDT004", None)]),
        ([begun("RDT008", 4, WARNING), begun("RDT002", 9)], [("RDT002", None), ("RDT008", None)]),
        # A guess goes by its weight, and so does a choice.
        ([begun("RDT004", 9), finding("RDO003", WARNING, "exposed")], [("RDT004", None), ("RDO003", None)]),
        ([begun("RDT004", 9), finding("RDA001", WARNING)], [("RDT004", None), ("RDA001", None)]),
        ([finding("RDA001", WARNING), finding("RDA002", WARNING)], [("RDA001", None), ("RDA002", None)]),
        # Lengths last, but where they changed first.
        ([begun("RDT006", 9), begun("RDT003", 8, WARNING)], [("RDT003", None), ("RDT006", "RDT003")]),
        ([begun("RDT006", 7), begun("RDT003", 8, WARNING)], [("RDT006", None), ("RDT003", None)]),
        # Information is last, whatever it is about.
        ([begun("RDT006", 7, WARNING), finding("RDI009", Severity.INFO)], [("RDT006", None), ("RDI009", None)]),
        # Equal responses with a noisy judge, padding rows, a policy that does not move.
        ([finding("RDI004"), finding("RDI009", WARNING)], [("RDI009", None), ("RDI004", "RDI009")]),
        # Advantages that are those of other rows are proved by the log, whatever the responses are.
        (
            [replace(finding("RDI004"), cause=OTHER_ROWS), finding("RDI009", WARNING)],
            [("RDI004", None), ("RDI009", None)],
        ),
        # Equal responses with different rewards are a noisy judge or other rows; more than that shows the latter.
        (
            [replace(finding("RDI004", WARNING), measures=OF_COPIES), finding("RDA015", WARNING)],
            [("RDA015", None), ("RDI004", "RDA015")],
        ),
        ([finding("RDI004", WARNING), finding("RDA015", WARNING)], [("RDI004", None), ("RDA015", "RDI004")]),
        # A reward whose noise may be meant explains no warning.
        (
            [replace(finding("RDI004", WARNING), measures=OF_COPIES), finding("RDA015", Severity.INFO)],
            [("RDI004", None), ("RDA015", None)],
        ),
        # Places that a shift by the padding leaves empty are no placeholders, and no tokens of a tool.
        (
            [replace(finding("RDI008"), headline=BY_PADDING), finding("RDI006"), finding("RDI005", WARNING)],
            [("RDI008", None), ("RDI006", "RDI008"), ("RDI005", "RDI008")],
        ),
        ([finding("RDI008"), finding("RDI006")], [("RDI006", None), ("RDI008", None)]),
        ([finding("RDI009", WARNING), finding("RDI015", WARNING)], [("RDI015", None), ("RDI009", "RDI015")]),
        ([finding("RDG011", WARNING), finding("RDG015", WARNING)], [("RDG015", None), ("RDG011", "RDG015")]),
        ([begun("RDT002", 3), begun("RDA011", 3)], [("RDT002", None), ("RDA011", "RDT002")]),
        # What is sampled changed within one step, and with it what it makes: lengths, entropy, rewards.
        (
            [begun("RDT006", 25), begun("RDT014", 25, WARNING), begun("RDT005", 26)],
            [("RDT014", None), ("RDT005", "RDT014"), ("RDT006", "RDT014")],
        ),
        ([begun("RDT003", 25), begun("RDT014", 25, WARNING)], [("RDT014", None), ("RDT003", "RDT014")]),
        ([begun("RDT003", 22), begun("RDT014", 25, WARNING)], [("RDT003", None), ("RDT014", "RDT003")]),
        ([begun("RDT005", 22), begun("RDT014", 25, WARNING)], [("RDT005", None), ("RDT014", None)]),
        # An entropy that rises somewhat is not why a verifier gives one value.
        (
            [
                begun("RDT001", 46),
                replace(begun("RDT003", 13, WARNING), headline="the entropy rose from 1.93 to 2.23"),
            ],
            [("RDT001", None), ("RDT003", None)],
        ),
        # A length that fell to another limit is no such change, and makes one; else the length fell with it.
        ([shortened(25, cut=0.95), begun("RDT014", 25, WARNING)], [("RDT013", None), ("RDT014", "RDT013")]),
        ([shortened(25, cut=0.85), begun("RDT014", 25, WARNING)], [("RDT014", None), ("RDT013", "RDT014")]),
        # What cuts every response of the run gives them all one reward; what cuts most of them need not.
        (
            [cut(0.96), finding("RDT002", WARNING), begun("RDT001", 1)],
            [("RDI012", None), ("RDT002", "RDI012"), ("RDT001", "RDI012")],
        ),
        (
            [cut(0.85), finding("RDT002", WARNING), begun("RDT001", 1)],
            [("RDT002", None), ("RDT001", "RDT002"), ("RDI012", None)],
        ),
        # A reward for length makes lengths, and groups that have one.
        ([begun("RDT001", 34), finding("RDT019", WARNING)], [("RDT019", None), ("RDT001", "RDT019")]),
        ([begun("RDT006", 34), finding("RDT019", WARNING)], [("RDT019", None), ("RDT006", "RDT019")]),
        # Of information too, inputs come before dynamics and these before lengths; what began before a state.
        (
            [finding("RDI012", INFO), finding("RDT016", INFO), finding("RDO012", INFO, "exposed")],
            [("RDO012", None), ("RDT016", None), ("RDI012", None)],
        ),
        (
            [finding("RDI012", INFO), finding("RDT016", INFO), begun("RDO015", 1, INFO, "exposed")],
            [("RDO015", None), ("RDT016", None), ("RDI012", None)],
        ),
    ],
)
def test_causes_come_before_their_consequences(findings, order):
    assert told(*findings) == order
    assert told(*findings[::-1]) == order


@pytest.mark.parametrize(
    ("cause", "found", "follows"),
    [
        (("warning", "exposed"), ("error", "confirmed"), False),
        (("info", "confirmed"), ("warning", "exposed"), False),
        (("warning", "exposed"), ("warning", "confirmed"), False),
        (("warning", "confirmed"), ("error", "confirmed"), True),
        (("warning", "confirmed"), ("warning", "exposed"), True),
        (("error", "confirmed"), ("error", "confirmed"), True),
        (("info", "exposed"), ("info", "confirmed"), True),
    ],
)
def test_a_weaker_cause_counts_only_if_it_is_proved(cause, found, follows):
    one, other = (
        finding(code, Severity[kind.upper()], of) for code, (kind, of) in (("RDI007", cause), ("RDG005", found))
    )
    assert ("RDG005", "RDI007" if follows else None) in told(one, other)


def test_a_confirmed_cause_that_weighs_less_comes_first_and_hides_nothing():
    effects = finding("RDA001"), finding("RDM004")
    masked = finding("RDI007", Severity.WARNING)
    assert told(*effects, masked) == [("RDI007", None), ("RDA001", "RDI007"), ("RDM004", "RDI007")]
    report = Report("0.1.0", "cpu", "float32", InputSummary(), findings=by_cause((*effects, masked), NO_CONTEXT))
    assert report.worst() is Severity.ERROR
    assert told(*effects, replace(masked, verdict="exposed"))[-1] == ("RDI007", None)
    assert told(*effects, replace(masked, severity=Severity.INFO))[-1] == ("RDI007", None)


def test_what_logged_values_name_comes_before_what_describes_the_rows():
    cause = Cause("denominator-counts-rejected-tokens", "RDG010", "words", "loss", 4, 0, 4, 0.1, explains=("loss",))
    assert told(finding("RDA001"), finding("RDG010", cause=cause)) == [("RDG010", None), ("RDA001", None)]


@pytest.mark.parametrize(
    ("rows", "disagree", "more", "first"),
    [(3, 3, {}, "RDA006"), (3, 4, {}, "RDA004"), (3, 3, {"advantages/mean": "advantages"}, "RDA004")],
)
def test_tokens_with_another_advantage_than_their_row_explain_as_many_rows(rows, disagree, more, first):
    """Every such row disagrees: where as many do, there are no others."""
    found = replace(finding("RDA006"), measures={"rows": Measure(rows, "rows"), "dead_rows": Measure(0, "rows")})
    left = {**unexplained(**more), "advantages": SimpleNamespace(stage="advantages", disagree=disagree)}
    second = "RDA004" if first == "RDA006" else "RDA006"
    context = replace(NO_CONTEXT, unexplained=left)
    assert told(finding("RDA004"), found, context=context) == [(first, None), (second, first)]


def test_an_identity_that_fails_follows_from_what_changed_its_metrics():
    failed = replace(finding("RDM008"), headline="actor/loss = actor/pg_loss + kl_loss_coef * actor/kl_loss fails in 3")
    cause = Cause("metric-times", "RDM007", "words", "actor/loss", 4, 0, 4, 0.1, explains=("actor/loss",))
    scaled = finding("RDM007", cause=cause)
    assert told(failed, scaled) == [("RDM007", None), ("RDM008", "RDM007")]
    other = replace(scaled, cause=replace(cause, explains=("actor/ppo_kl",)))
    assert ("RDM008", None) in told(failed, other)
    context = replace(NO_CONTEXT, unexplained=unexplained(**{"actor/loss": "loss"}))
    assert told(failed, finding("RDG005"), context=context) == [("RDG005", None), ("RDM008", "RDG005")]
    refuted = Refuted("actor_rollout_ref.actor.kl_loss_coef", "0.1", False, "words", "evidence")
    context = replace(NO_CONTEXT, refuted=(refuted,))
    assert told(failed, finding("RDI014"), context=context) == [("RDI014", None), ("RDM008", "RDI014")]


def test_an_option_of_the_kl_that_is_refuted_follows_from_a_kl_that_counts_twice():
    cause = Cause("kl-in-reward-and-loss", "RDG009", "words", "advantages", 4, 0, 4, 0.1, explains=("advantages",))
    twice, refuted = finding("RDG009", cause=cause), finding("RDI014")

    def context(*options):
        trainer = find("verl")
        return replace(NO_CONTEXT, trainer=trainer, refuted=tuple(Refuted(one, "", False, "", "") for one in options))

    of_kl = "algorithm.use_kl_in_reward"
    assert told(twice, refuted, context=context(of_kl)) == [("RDG009", None), ("RDI014", "RDG009")]
    # Another option, the same without a hypothesis, and nothing refuted, have a cause of their own.
    for found, options in (
        (twice, (of_kl, "algorithm.gamma")), (finding("RDG009"), (of_kl,)), (twice, ()),
    ):  # fmt: skip
        assert ("RDI014", None) in told(found, refuted, context=context(*options))


def test_the_order():
    """Errors, confirmed before exposed, then warnings; what follows stands under its cause, whatever it weighs."""
    findings = [
        finding("RDO002", Severity.WARNING, "exposed"),
        finding("RDO001", Severity.INFO),
        finding("RDO003", Severity.WARNING, "confirmed"),
        finding("RDI005", Severity.WARNING, "confirmed"),
        finding("RDI001", Severity.ERROR, "exposed"),
        finding("RDA007"),
        finding("RDA004"),
        finding("RDG002", Severity.INFO),
    ]
    assert told(*findings) == [
        ("RDA004", None), ("RDA007", "RDA004"), ("RDI001", None), ("RDI005", None), ("RDO003", None),
        ("RDO002", "RDO003"), ("RDO001", "RDO003"), ("RDG002", None),
    ]  # fmt: skip
    assert by_cause(findings[::-1], NO_CONTEXT) == by_cause(findings, NO_CONTEXT)


def test_noise_of_rewards_does_not_follow_from_logged_advantages():
    assert ("RDA007", None) in told(finding("RDA004"), finding("RDA007", Severity.WARNING))


def test_what_a_hypothesis_explains_follows_from_its_rule():
    cause = Cause("groups-by-position", "RDI003", "words", "advantages", 4, 0, 4, 0.1, explains=("advantages", "loss"))
    rule = finding("RDI003", cause=cause)
    context = replace(NO_CONTEXT, unexplained=unexplained(loss="loss"))
    assert told(finding("RDG005"), rule, context=context) == [("RDI003", None), ("RDG005", "RDI003")]
    context = replace(NO_CONTEXT, unexplained=unexplained(loss="loss", kl="kl"))
    assert ("RDG005", None) in told(finding("RDG005"), rule, context=context)


def of_other_advantages(trainer, *, is_used):
    """A run whose advantages are noise; the loss is made of them, or as the rewards say."""
    batch, metrics = planted(trainer, [], a_batch())
    logged_N = noise(len(batch)).float().double()
    if is_used:
        made = configured(trainer)
        rows = replace(evaluate_rows(batch, made.objective), advantage_N=logged_N)
        tokens, _ = token_pass(batch, {"": rows}, rows.score_N.dtype, ())[""]
        metrics = dict(made.trainer.metrics(Evaluation(batch, made.objective, rows, tokens, rows.score_N.dtype)))
    batch = replace(batch, per_row={**batch.per_row, "advantage": logged_N})
    return diagnose([batch], trainer=trainer, options=SETUPS[trainer], logged=metrics)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("trainer", ["trl", "verl", "slime"])
def test_a_loss_made_of_the_logged_advantages_is_no_second_error(trainer):
    found = {one.code: one for one in of_other_advantages(trainer, is_used=True).findings}
    assert found["RDA004"].follows_from is None
    assert re.search("the update used the logged advantages: .*loss", found["RDA004"].message)
    assert not {"RDG005", "RDM004"} & found.keys()


@pytest.mark.slow
def test_a_loss_that_is_wrong_by_itself_counts_by_itself():
    batch, metrics = planted("trl", [], a_batch())
    noisy = replace(batch, per_row={**batch.per_row, "advantage": noise(len(batch))})
    found = diagnose([noisy], trainer="trl", options=SETUPS["trl"], logged={**metrics, "loss": 0.3})
    assert {one.code: one.follows_from for one in found.findings if one.severity is Severity.ERROR} == {
        "RDA004": None,
        "RDA007": "RDA004",
        "RDG005": None,
    }
    assert "RDG005" not in {one.code for one in of_other_advantages("trl", is_used=False).findings}


def a_report(*findings):
    return Report("0.1.0", "cpu", "float32", InputSummary(rows=4, steps=1), findings=by_cause(findings, NO_CONTEXT))


BOTH = a_report(finding("RDA007"), finding("RDA004"), finding("RDG002", Severity.INFO))


@pytest.mark.parametrize("name", RENDERERS)
def test_every_format_says_what_follows_under_its_cause(name):
    text = RENDERERS[name](BOTH, Style(width=200))
    if name == "json":
        assert [one["follows_from"] for one in json.loads(text)["findings"]] == [None, "RDA004", None]
    elif name == "jsonl":
        assert [json.loads(line).get("follows_from") for line in text.splitlines()[1:4]] == [None, "RDA004", None]
    else:
        assert text.count("follows from RDA004") == 1
    assert [*dict.fromkeys(re.findall("headline of (RD.[0-9]+)", text.partition("Healthy")[0]))] == [
        "RDA004",
        "RDA007",
        "RDG002",
    ]
    if name in ("full", "concise", "markdown", "github"):
        assert "1 error, 1 info, 1 consequence" in text


def test_a_consequence_is_no_failure_and_no_annotation_of_its_own():
    assert 'failures="1"' in RENDERERS["junit"](BOTH, Style())
    github = RENDERERS["github"](BOTH, Style())
    assert github.count("::error") == 1
    assert "::notice title=RDA007" in github


def test_a_consequence_counts_with_its_cause():
    assert BOTH.worst() is Severity.ERROR
    assert not re.search("more fault", verdict(BOTH))
    assert exit_code(BOTH, opt.FailOn.error) == 1
    # Where a baseline takes the cause out, what follows from it counts unless it is in the baseline, too.
    left = replace(BOTH, findings=BOTH.findings[1:])
    assert exit_code(left, opt.FailOn.error) == 1


@pytest.mark.parametrize("name", ["full", "concise", "markdown"])
def test_several_runs_in_a_line_each(name):
    runs = [(CheckedRun("a", ("a",), BOTH), 1)]
    text = " ".join("".join(SEVERAL[name](runs, ["a"], Style(width=160))).split())
    assert "RDA004 headline of RDA004; RDA007 follows from RDA004 (4 rows, 1 step)" in text
