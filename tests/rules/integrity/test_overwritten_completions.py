"""What an importer found out about the files, told apart: rows lost, mixed, duplicated, and truncated lines."""

from rules.checking import found_by, values

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import toy_batch

CODE = "RDI002"
NOTHING = {"lost_rows": 0, "lost_steps": 0, "mixed_rows": 0, "repeated_rows": 0, "torn_lines": 0}


def found_in(*logged):
    """The finding about one step for each of the mappings, their names without ``import/``."""
    batches = [toy_batch([[1, 0]], step=step) for step in range(len(logged))]
    metrics = [{f"import/{name}": float(value) for name, value in one.items()} for one in logged]
    return found_by(CODE, batches, trainer="trl", logged=metrics)


def test_steps_count_as_lost_where_rows_are():
    # Rows of an evaluation among the training rows lose nothing, and neither do copies.
    found = found_in({"lost_rows": 8}, {"mixed_rows": 2}, {"lost_rows": 4}, {"repeated_rows": 3})
    assert values(found) == NOTHING | {"lost_rows": 12, "lost_steps": 2, "mixed_rows": 2, "repeated_rows": 3}
    assert (found.severity, found.verdict) == (Severity.WARNING, "confirmed")
    assert found.headline == (
        "an evaluation overwrote 12 training rows of 2 steps, 2 evaluation rows among training rows, "
        "3 rows duplicated in later files"
    )
    assert [(one.step, one.weight) for one in found.examples] == [(0, 8.0), (2, 4.0), (1, 2.0)]


def test_copies_alone_are_information():
    found = found_in({"repeated_rows": 4})
    assert values(found) == NOTHING | {"repeated_rows": 4}
    assert found.severity is Severity.INFO
    assert found.examples == ()


def test_a_truncated_line_is_a_warning():
    found = found_in({"torn_lines": 1})
    assert values(found) == NOTHING | {"torn_lines": 1}
    assert (found.severity, found.headline) == (Severity.WARNING, "1 truncated line")


def test_whole_files_are_clean():
    assert found_in({}) is None
    assert found_in({"lost_rows": 0, "mixed_rows": 0, "repeated_rows": 0, "torn_lines": 0}) is None
