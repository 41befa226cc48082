"""RDA016: rewards for what a tool wrote, from messages and from text with tags."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rolloutdoctor as rd

CODE = "RDA016"
CITIES = ("Canberra", "Ottawa", "Wellington", "Nairobi", "Helsinki", "Santiago", "Kathmandu", "Reykjavik")


def half(draw, truth):
    """One response in two answers."""
    return truth if draw.random() < 0.5 else "I do not know"


def response(said, tool, *, as_text):
    """A search agent's response: what it searched, what the tool found, what it said."""
    if as_text:
        return f"<tool_call>search</tool_call>\n<tool_response>{tool}</tool_response>\n{said}"
    return [
        {"role": role, "content": text} for role, text in (("assistant", "search"), ("tool", tool), ("assistant", said))
    ]


def report(path, reward, *, said=half, tool=lambda number, truth: f"It is {truth}.", as_text=True):
    """Check 256 responses to eight questions."""
    draw = np.random.default_rng(0)
    rows = []
    for number in range(256):
        truth = CITIES[number % 8]
        words, found = said(draw, truth), tool(number, truth)
        row = {"step": number // 64, "group_id": str(number // 8), "ground_truth": truth}
        row["response"] = response(words, found, as_text=as_text) if found else words
        row["reward"] = float(reward(words, found + words, truth, draw))
        rows.append(row)
    pq.write_table(pa.Table.from_pylist(rows), path / "run.parquet")
    return rd.check(path / "run.parquet", select=[CODE])


def of_model(words, text, truth, draw):
    return truth in words


@pytest.mark.parametrize("as_text", [True, False])
def test_a_verifier_that_reads_the_whole_response(as_text, tmp_path):
    (finding,) = report(tmp_path, lambda words, text, truth, draw: truth in text, as_text=as_text).findings
    assert (finding.severity.label, finding.verdict) == ("warning", "exposed")
    value = {name: one.value for name, one in finding.measures.items()}
    assert value["tool_only_rewarded"] == value["tool_only"] > 100
    assert value["in_model_rewarded_share"] == 1
    assert finding.examples[0].note == "the reference answer is only in what a tool wrote, and reward is 1"


def test_a_reward_of_the_environment_is_information(tmp_path):
    """No answer of the model is ever rewarded: the reward says whether the tool found it."""
    of_tool = report(tmp_path, lambda words, text, truth, draw: truth not in words and draw.random() < 0.6)
    (finding,) = of_tool.findings
    assert (finding.severity.label, finding.measures["in_model_rewarded_share"].value) == ("info", 0)


@pytest.mark.parametrize("as_text", [True, False])
def test_a_verifier_that_reads_the_model_is_clean(as_text, tmp_path):
    assert [code for code, _ in report(tmp_path, of_model, as_text=as_text).clean] == [CODE]


def test_an_answer_in_other_words_is_not_absent(tmp_path):
    """A judge takes what repeats a part of the reference answer."""
    found = report(
        tmp_path,
        lambda words, *_: "Canberra" not in words,
        said=lambda draw, truth: f"the capital, {truth}",
        tool=lambda number, truth: f"{truth}, the capital",
    )
    assert found.skipped


def test_what_is_rewarded_as_often_without_the_answer_is_information(tmp_path):
    found = report(
        tmp_path,
        lambda words, text, truth, draw: truth in words or draw.random() < 0.3,
        tool=lambda number, truth: f"It is {truth}." if number % 2 else "Nothing was found.",
    )
    assert found.findings[0].severity.label == "info"


def test_responses_of_one_turn_are_skipped(tmp_path):
    (skipped,) = report(tmp_path, of_model, tool=lambda number, truth: "").skipped
    assert "in a tool's text alone" in skipped.reason
