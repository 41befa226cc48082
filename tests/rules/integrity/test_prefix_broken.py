"""RDI021: contexts that were rewritten or begun anew, and rows that go on from one another."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rules.checking import outcomes, values

import rolloutdoctor as rd

CODE = "RDI021"
PROMPT, TOOL = [1, 2, 3], [50, 51]


def turns(*contexts, step=0, trajectory=0):
    """Rows of one trajectory, each with its prompt and three tokens of the policy."""
    return [
        {
            "step": step,
            "group_id": "g",
            "sample_id": f"{trajectory}/{number}",
            "trajectory_id": trajectory,
            "reward": float(trajectory),
            "prompt_ids": prompt,
            "response_ids": said(number),
            "response_mask": [1, 1, 1],
        }
        for number, prompt in enumerate(contexts)
    ]


def said(number):
    return [10, 11, 12 + number]


def checked(rows):
    return rd.check(rows, select=[CODE])


GOES_ON = [*PROMPT, *said(0), *TOOL]


def test_rows_that_go_on_are_clean():
    rows = turns(PROMPT, GOES_ON, [*GOES_ON, *said(1), *TOOL])
    assert outcomes(checked(rows)) == {CODE: "clean"}


@pytest.mark.parametrize(
    ("second", "rewritten", "new", "kept"),
    [
        ([*PROMPT, 12, *TOOL], 1, 0, 0),  # thinking was stripped
        ([*PROMPT, 10, 11, 99, 98, *TOOL], 1, 0, 2 / 3),  # tokenized again
        ([*PROMPT, 70, 71], 1, 0, 0),  # a summary
        ([7, 8], 0, 1, None),  # a sub-agent
        (PROMPT[:2], 0, 1, None),  # cut from behind
    ],
)
def test_what_became_of_the_context(second, rewritten, new, kept):
    report = checked([*turns(PROMPT, second), *turns(PROMPT, GOES_ON, trajectory=1)])
    (found,) = report.findings
    assert (found.severity.label, found.verdict) == ("info", "confirmed")
    wanted = {"broken_share": 1 / 4, "broken_rows": 1, "rewritten_rows": rewritten, "new_rows": new}
    wanted |= {"continued_rows": 1, "trajectories": 1} | ({} if kept is None else {"kept_share": kept})
    assert values(found) == pytest.approx(wanted)
    assert found.examples[0].sample_id == "0/1"


def test_a_sub_agent_in_between_breaks_nothing_after_it():
    (found,) = checked(turns(PROMPT, [7, 8], GOES_ON, [7, 8, *said(1), *TOOL])).findings
    assert {name: values(found)[name] for name in ("new_rows", "continued_rows")} == {
        "new_rows": 1,
        "continued_rows": 2,
    }


def test_a_retry_from_the_same_prompt_is_no_break():
    assert outcomes(checked(turns(PROMPT, PROMPT, GOES_ON))) == {CODE: "clean"}


def test_rows_of_other_steps_and_trajectories_do_not_count():
    rows = [*turns(PROMPT), *turns([*PROMPT, 9], trajectory=1), *turns([*PROMPT, 9], step=1)]
    assert outcomes(checked(rows)) == {CODE: "not applicable"}


def test_unknown_prompts_say_nothing():
    rows = turns(PROMPT, None, [7, 8])
    assert outcomes(checked(rows)) == {CODE: "skipped"}


def test_a_trajectory_in_two_files_is_not_compared(tmp_path):
    rows = turns(PROMPT, [7, 8], [9, 9])
    for name, part in (("a", rows[:1]), ("b", rows[1:])):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / f"{name}.parquet")
    report = rd.check(tmp_path, select=[CODE])
    assert outcomes(report) == {CODE: "skipped"}
    assert report.skipped[0].reason == "the rows of no trajectory were read together"
