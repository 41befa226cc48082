"""RDI016: the separator between turns that an agent loop loses, by ids alone."""

from dataclasses import replace

import numpy as np
import pytest
from rules.checking import found_by, outcomes, report_on, values, without

from rolloutdoctor.testing import toy_batch

CODE = "RDI016"
START, END, BREAK, USER = 1, 2, 3, 4


def steps(*, separator=(BREAK,), rendered=(BREAK,), lost=1.0, turns=3, count=3, seed=0, ends=(END,)):
    """Conversations as a chat template has them: every turn is START, a role, text, END and what follows END.

    Args:
        separator: what an assistant's turn is followed by where nothing is lost.
        rendered: what a rendered turn is followed by, in turn.
        lost: share of the turns of the model behind which it is missing.
        turns: of the model, in each response.
        count: steps.
        seed: of the text.
        ends: ids at which the model stops, in turn.
    """
    draw, found = np.random.default_rng(seed), []
    for step in range(count):
        ids, masks, at = [], [], 0
        for _ in range(8):
            row, mask = [], []
            for turn in range(turns):
                text = draw.integers(10, 500, 6).tolist()
                row += [*text, ends[turn % len(ends)]]
                mask += [1] * 7
                if turn < turns - 1:
                    at += 1
                    own = [] if draw.random() < lost else list(separator)
                    tool = [*own, START, USER, *draw.integers(10, 500, 4).tolist(), END]
                    tool += [rendered[at % len(rendered)], START, 5]
                    row += tool
                    mask += [0] * len(tool)
            ids.append(row)
            masks.append(mask)
        found.append(toy_batch([[1, 0]] * 4, mask=masks, per_token={"response_ids": ids}, step=step))
    return found


def test_the_separator_is_lost():
    found = found_by(CODE, steps(), trainer=None)
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    assert found.headline.startswith("48 of 48 turns (100 %) lack the separator")
    value = values(found)
    assert (value["end_id"], value["separator_id"], value["rendered"], value["rendered_share"]) == (END, BREAK, 48, 1)
    assert "append id 3" in found.advice
    assert found.examples[0].note == "2 of 2 turns end without id 3"


def test_a_separator_may_have_the_first_id():
    value = values(found_by(CODE, steps(separator=(), rendered=(0,)), trainer=None))
    assert (value["separator_id"], value["rendered"]) == (0, 48)


def test_in_some_of_the_turns():
    found = found_by(CODE, steps(lost=0.4, count=6), trainer=None)
    assert 0.25 < values(found)["bare_share"] < 0.55


@pytest.mark.parametrize(
    "options",
    [
        {"lost": 0.0},
        # A template without a separator: the next turn begins at once, everywhere.
        {"separator": (), "rendered": (START,)},
    ],
    ids=["kept", "no separator"],
)
def test_clean(options):
    assert outcomes(report_on(steps(**options), trainer=None, select=[CODE])) == {CODE: "clean"}


def test_few_turns_without_it_are_information():
    found = found_by(CODE, steps(turns=2, count=1, lost=0.3), trainer=None)
    assert found.severity.label == "info"
    assert 1 <= values(found)["bare_turns"] < 8


def test_not_applicable():
    (one,) = report_on(steps(turns=1), trainer=None, select=[CODE]).not_applicable
    assert one.reason == "no response has several turns"
    (one,) = report_on(steps(rendered=(BREAK, 6)), trainer=None, select=[CODE]).not_applicable
    assert "none is a separator" in one.reason


def test_skipped():
    # Turns that end in several ways, and a template whose tool turns have another end.
    (one,) = report_on(steps(ends=(END, 7)), trainer=None, select=[CODE]).skipped
    assert one.reason.startswith("0 turns with one end-of-turn token")
    (one,) = report_on(steps(ends=(7,)), trainer=None, select=[CODE]).skipped
    assert one.reason.endswith("needs 8 of each")
    batches = [without(batch, "response_ids") for batch in steps()]
    assert outcomes(report_on(batches, trainer=None, select=[CODE])) == {CODE: "skipped"}


def test_a_stop_string_is_no_end_of_turn_token():
    """An agent loop stops at `</search>` and puts `<information>` behind it: both end in one id."""
    tag = 9
    row, mask = [], []
    for _ in range(2):
        row += [11, 12, 30, tag, 13, 14, 31, tag]
        mask += [1] * 8
        row += [BREAK, 32, tag, 40, 15, 16, 33, tag, BREAK]
        mask += [0] * 9
    row, mask = [*row, 17, END], [*mask, 1, 1]
    batches = [
        toy_batch([[1, 0]] * 4, mask=[mask] * 8, per_token={"response_ids": [row] * 8}, step=step) for step in range(3)
    ]
    (one,) = report_on(batches, trainer=None, select=[CODE]).skipped
    assert one.reason.startswith("0 turns with one end-of-turn token")


def test_steps_without_turns_between():
    empty = toy_batch([], lengths=[], per_token={"response_ids": []}, step=7)
    quiet = replace(steps(turns=1, count=1)[0], step=8)
    assert values(found_by(CODE, [*steps(count=2), empty, quiet], trainer=None))["turns"] == 32
