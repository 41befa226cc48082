"""Every number that decides what a rule over rows says: one run just below it, and one just above."""

import re

import pytest
from rules.advantages import boundaries as advantages
from rules.dynamics import boundaries as dynamics
from rules.gradients import boundaries as gradients
from rules.integrity import boundaries as integrity
from rules.metrics import boundaries as metrics
from rules.off_policy import boundaries as off_policy
from rules.row_boundaries import is_decided_by, numbers_of_rules

from rolloutdoctor.rules import table

FAMILIES = (advantages, dynamics, gradients, integrity, metrics, off_policy)
BOUNDARIES = [boundary for family in FAMILIES for boundary in family.BOUNDARIES]


@pytest.mark.parametrize("boundary", BOUNDARIES, ids=lambda one: f"{one.code} {one.number}")
def test_a_number_is_where_it_is_said_to_be(boundary):
    for outcome, says in zip(boundary.outcomes(), boundary.says, strict=True):
        assert re.match(says, outcome), (outcome, says)


@pytest.mark.slow
@pytest.mark.parametrize("boundary", BOUNDARIES, ids=lambda one: f"{one.code} {one.number}")
def test_a_number_decides_between_the_two(boundary, monkeypatch):
    assert is_decided_by(boundary, boundary.number, monkeypatch)


def test_every_boundary_is_one_of_a_number():
    assert {(one.code, one.number) for one in BOUNDARIES} <= numbers_of_rules()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__.split(".")[1])
def test_every_number_has_its_rows(family):
    folder = f"rolloutdoctor.{family.__name__.removesuffix('.boundaries')}."
    numbers = {
        (code, name) for code, name in numbers_of_rules() if type(table.find(code)).__module__.startswith(folder)
    }
    assert numbers
    tested = {(one.code, one.number) for one in family.BOUNDARIES}
    how = f"a line each in BOUNDARIES of {family.__name__}; `near` and `count` make one"
    assert numbers == tested, f"{numbers - tested}: {how}"
