"""RDA014: rewards against stated and reference answers, from texts as trainers write them."""

import json

import numpy as np
import pytest

import rolloutdoctor as rd
from rolloutdoctor.data.answers import EQUAL, IN_MODEL, IN_TOOL, NOWHERE, OTHER, UNKNOWN, compared
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.rules.table import find

CODE = "RDA014"
TAIL = " and the reasoning above confirms that this result is consistent with the question." * 4
SETTLED = "A train goes 60 km in one hour, so in half an hour it goes half of that."


def gsm8k(text, truth):
    """The score of verl 0.9.1 for GSM8K: the last mark within the last 300 characters."""
    _, mark, answer = text[-300:].rpartition("#### ")
    return float(bool(mark) and answer.split()[:1] == [truth])


def rows(answers, truth=lambda number: str(10 + number)):
    """Responses to 64 questions, one right in two, that end as `answers` says of number and right or wrong."""
    found = []
    for number in range(64):
        for place in range(4):
            right = (number + place) % 2 == 0
            text = answers(number, place, truth(number) if right else str(900 + number))
            found.append({"number": number, "response": text, "ground_truth": truth(number), "right": float(right)})
    return found


def report(found, reward, tmp_path, **more):
    """Check rows that are written as verl writes them."""
    lines = [
        {
            "input": f"question {row['number']}",
            "output": row["response"],
            "gts": row["ground_truth"],
            "score": reward(row),
            "step": 1 + row["number"] // 16,
            **more,
        }
        for row in found
    ]
    for step in {line["step"] for line in lines}:
        text = "".join(json.dumps(line) + "\n" for line in lines if line["step"] == step)
        (tmp_path / f"{step}.jsonl").write_text(text)
    return check(rd.open(tmp_path), CheckOptions(rules=(find(CODE),), device="cpu"))


def test_an_answer_with_text_after_it_is_scored_wrong(tmp_path):
    found = rows(lambda number, place, answer: f"{SETTLED}\n#### {answer}\n" + TAIL * (place == 0))
    (finding,) = report(found, lambda row: gsm8k(row["response"], row["ground_truth"]), tmp_path).findings
    assert (finding.severity.label, finding.verdict) == ("warning", "exposed")
    value = {name: one.value for name, one in finding.measures.items()}
    told = {"equal_unrewarded": 32, "unexplained": 32, "equal": 128, "other_rewarded": 0, "other": 128}
    assert value == told | {"unstated": 0, "unstated_rewarded": 0}
    assert finding.headline == "32 responses of 128 that state the reference answer are not rewarded"
    assert finding.examples[0].note == "states the reference answer, and reward is 0"


@pytest.mark.parametrize(("paid", "is_told"), [(2, False), (3, True)])
def test_rewarded_responses_that_state_no_answer_are_counted(paid, is_told, tmp_path):
    found = rows(lambda number, place, answer: SETTLED if number < 8 else f"{SETTLED}\n#### {answer}")
    bare = [row for row in found if row["response"] == SETTLED]
    for place, row in enumerate(bare):
        row["right"] = float(place < paid)
    findings = report(found, lambda row: row["right"], tmp_path).findings
    assert bool(findings) is is_told
    for finding in findings:
        assert finding.severity.label == "info"
        assert finding.headline == "3 responses of 32 that state no answer in a known way are rewarded"
        assert finding.measures["unstated_rewarded"].value == paid


def test_the_score_is_that_of_the_real_function(tmp_path):
    score = pytest.importorskip("verl.utils.reward_score.gsm8k").compute_score
    found = rows(lambda number, place, answer: f"{SETTLED}\n#### {answer}\n" + TAIL * (place == 0))
    assert [score(row["response"], row["ground_truth"]) for row in found] == [
        gsm8k(row["response"], row["ground_truth"]) for row in found
    ]


def test_a_verifier_that_answers_no_is_found_and_one_that_passes_all_too(tmp_path):
    found = rows(lambda number, place, answer: f"so \\boxed{{{answer}}}")
    (finding,) = report(found, lambda row: 0.0, tmp_path).findings
    assert finding.severity.label == "warning"
    assert "no right answer is ever rewarded" in finding.message
    (finding,) = report(found, lambda row: 1.0, tmp_path).findings
    assert finding.headline == "128 responses of 128 that state another number are rewarded"


def test_a_demanded_format_is_information(tmp_path):
    """Right answers count in a box alone."""

    def answers(number, place, answer):
        return f"\\boxed{{{answer}}}" if place > 1 else f"Answer: {answer}"

    found = rows(answers)
    (finding,) = report(found, lambda row: row["right"] * ("boxed" in row["response"]), tmp_path).findings
    assert finding.severity.label == "info"
    assert finding.measures["unexplained"].value == 0
    assert "keep it if the reward asks for a format" in finding.advice


@pytest.mark.parametrize(
    "truth",
    [
        str,
        lambda number: f"{number}/7",
        lambda number: f"x^{number}",
        lambda number: f"\\frac{{{number}}}{{3}}",
        lambda number: f"{number},{500 + number}",
    ],
)
def test_a_verifier_that_is_right_is_clean(truth, tmp_path):
    found = rows(lambda number, place, answer: f"so it is $\\boxed{{{answer}}}$.", truth)
    assert [code for code, _ in report(found, lambda row: row["right"], tmp_path).clean] == [CODE]


def test_what_a_better_verifier_knows_is_not_compared(tmp_path):
    """Equal values in other words, percentages and tolerances."""
    pairs = [("\\sqrt{4}", "2"), ("50", "0.5"), ("3.14", "3.1416"), ("(1, 2)", "(1,2)"), ("about 7", "7"), ("1/0", "3")]
    assert {compared(f"\\boxed{{{stated}}}", truth) % 4 for stated, truth in pairs} == {UNKNOWN}
    found = rows(lambda number, place, answer: "\\boxed{\\sqrt{4}}", lambda number: "2")
    (skipped,) = report(found, lambda row: row["right"], tmp_path).skipped
    assert "states an answer that can be compared" in skipped.reason


def test_graded_rewards_are_skipped(tmp_path):
    draw = np.random.default_rng(0)
    found = rows(lambda number, place, answer: f"#### {answer}")
    (skipped,) = report(found, lambda row: float(draw.random()), tmp_path).skipped
    assert "a reward of two values" in skipped.reason


def test_a_dump_without_reference_answers_is_skipped(tmp_path):
    found = [{**row, "ground_truth": None} for row in rows(lambda number, place, answer: f"#### {answer}")]
    (skipped,) = report(found, lambda row: row["right"], tmp_path).skipped
    assert skipped.reason


@pytest.mark.parametrize(
    ("response", "truth", "relation"),
    [
        ("first \\boxed{1}, no: \\boxed{2}", "2", EQUAL),
        ("\\boxed{\\text{Paris}}", "Paris", EQUAL),
        ("<answer>\n1,024\n</answer>", 1024, EQUAL),
        ("**Final answer:** $12.50", "12.5", EQUAL),
        ("#### 7", ["7"], EQUAL),
        ("#### 7", "He has 3 + 4 = 7.\n#### 7", EQUAL),
        ("\\boxed{(B)}", "B", EQUAL),
        ("#### 8", "7", OTHER),
        ("\\boxed{1{2", "1", UNKNOWN),
        ("", "1", UNKNOWN),
        (None, "1", UNKNOWN),
        ("#### 1", None, UNKNOWN),
        ("#### 1", {"target": 1}, UNKNOWN),
        ([{"role": "assistant", "content": "#### 5"}, {"role": "user", "content": "#### 6"}], "5", EQUAL),
        ("\\boxed{" * 2000 + "<answer>" * 2000 + "####" * 2000, "1", UNKNOWN),
    ],
)
def test_stated_answers(response, truth, relation):
    assert compared(response, truth) % 4 == relation


@pytest.mark.parametrize(
    ("response", "place"),
    [
        ("<tool_response>It is Canberra.</tool_response> I do not know", IN_TOOL),
        ("<tool_response>It is Canberra.</tool_response> So Canberra", IN_MODEL),
        ("<information>Sydney</information> So Melbourne", NOWHERE),
        ("assistant: let me see\ntool: Canberra\nassistant: I do not know", IN_TOOL),
        ([{"role": "assistant", "content": None}, {"role": "tool", "content": "Canberra"}], IN_TOOL),
        ("Canberra", 0),
    ],
)
def test_where_the_reference_answer_stands(response, place):
    assert compared(response, "Canberra") // 64 == place
