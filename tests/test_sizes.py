"""What `make lint` says of units above their bounds."""

import pytest
from sizes import FUNCTION, faults, units


@pytest.mark.parametrize(
    ("lines", "allowed", "told"),
    [
        (60, {}, []),
        (61, {}, ["x.py:f: 61 lines, the bound is 60"]),
        (61, {"x.py:f": 61}, []),
        (62, {"x.py:f": 63}, []),
        (64, {"x.py:f": 63}, ["x.py:f: 64 lines, 63 are allowed"]),
        (60, {"x.py:f": 61}, ["x.py:f: fits its bound"]),
    ],
)
def test_a_unit_is_within_its_bound_or_excepted_and_no_larger(lines, allowed, told):
    found = faults([("x.py:f", lines, FUNCTION)], allowed)
    assert len(found) == len(told)
    assert all(one.startswith(start) for one, start in zip(found, told, strict=True))


def test_every_kind_of_unit_is_measured(tmp_path):
    files = {
        "rules/family/a_rule.py": "def judge():\n    pass\n",
        "rules/family/__init__.py": "",
        "rules/measures/sums.py": "",
        "importers/mapped.py": "",
        "importers/logs/printed.py": "",
        "pictures/kl.py": "",
        "commands/diff/query.py": "one = 1\n",
        "commands/diff/words.py": "two = 2\nthree = 3\n",
        "trainers/trl/options.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {name: (lines, bound) for name, lines, bound in units(tmp_path)}
    assert found == {
        "rules/family/a_rule.py": (2, 180),
        "importers/mapped.py": (0, 200),
        "importers/logs/printed.py": (0, 200),
        "pictures/kl.py": (0, 120),
        "commands/diff": (3, 350),
        "trainers/trl": (0, 720),
        "rules/family/a_rule.py:judge": (2, 60),
    }
