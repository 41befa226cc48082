import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Layer, Option, resolve
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import TRAINERS, find

OPTIONS = [(trainer.name, option) for trainer in TRAINERS.values() for option in trainer.options]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**300, max_value=10**400),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["true", "False", " 0.5 ", "1e-3", "nan", "-inf", "none", "NULL", "group", "grpo", "1,2", "[1, 2]"]
    ),
    st.binary(max_size=3),
    st.dates(),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner), st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)

KINDS = {
    "number": (float, int),
    "integer": (int,),
    "flag": (bool,),
    "word": (str,),
    "numbers": (tuple,),
    "any": (object,),
}


@pytest.mark.slow(every=True)
@settings(max_examples=200)
@given(value=anything)
def test_any_value_is_read_or_refused_in_a_sentence(value):
    """Each value by every option: to draw it takes longer than to read it so often."""
    for _, option in OPTIONS:
        check_read(option, value)


def check_read(option, value):
    try:
        found = option.read(value, "here")
    except UsageError as error:
        refused = str(error)
        assert option.name in refused
        assert "(here)" in refused
        return
    where = option.name
    if found is None:
        assert option.optional or option.kind == "any", where
    else:
        assert isinstance(found, KINDS[option.kind]), where
        assert isinstance(found, bool) == (option.kind == "flag") or option.kind == "any", where
    if option.choices and found is not None:
        assert found in option.choices, where
    if option.computed is not None and not option.loss_alone:
        assert found in option.computed, where
    if isinstance(found, int | float) and option.kind != "any":
        assert not math.isnan(found), where
        assert option.low is None or found >= option.low, where
        assert option.high is None or found <= option.high, where
    # What was read can be read again, as it is and as text.
    assert option.read(found, "again") == found
    if found is not None and option.kind in ("number", "integer", "flag", "word"):
        assert option.read(str(found), "as text") == found


def test_defaults_can_be_read():
    for trainer, option in OPTIONS:
        where = f"{trainer}: {option.name}"
        for default in {option.default, *(before for _, before in option.changes)}:
            if option.computed is None or default in option.computed:
                assert option.read(default, where) == default, where
        assert option.meaning, where
        assert option.meaning[0] != " ", where
        assert option.wanted(), where


@pytest.mark.parametrize("trainer", TRAINERS)
def test_names_are_unique(trainer):
    names = [option.name for option in TRAINERS[trainer].options]
    assert len(set(names)) == len(names)


NUMBER = Option("n", "number", 1.0, "a number", low=0, high=1)
WHOLE = Option("w", "integer", 1, "a whole number", low=1)
FLAG = Option("f", "flag", False, "a flag")
WORD = Option("k", "word", "a", "a word", choices=("alpha", "beta"), optional=True)
LIST = Option("l", "numbers", None, "numbers")


@pytest.mark.parametrize(
    ("option", "value", "found"),
    [
        (NUMBER, " 0.5 ", 0.5),
        (NUMBER, "1e-3", 0.001),
        (NUMBER, 1, 1.0),
        (WHOLE, "4", 4),
        (WHOLE, 4.0, 4),
        (WHOLE, "4.0", 4),
        (FLAG, "True", True),
        (FLAG, "false", False),
        (WORD, "alpha", "alpha"),
        (WORD, "None", None),
        (WORD, None, None),
        (LIST, "1, 2.5", (1.0, 2.5)),
        (LIST, "[1,2]", (1.0, 2.0)),
        (LIST, [1, 2], (1.0, 2.0)),
        (LIST, "null", None),
    ],
)
def test_read(option, value, found):
    assert option.read(value, "here") == found
    assert type(option.read(value, "here")) is type(found)


@pytest.mark.parametrize(
    ("option", "value", "below"),
    [
        (NUMBER, -0.1, -0.1),
        (NUMBER, "-1e-6", -1e-6),
        (NUMBER, 0, None),
        (NUMBER, 1.5, None),
        (NUMBER, "-inf", None),
        (NUMBER, "nan", None),
        (NUMBER, {"value": -1}, None),
        (WHOLE, 0, 0.0),
        (FLAG, -1, None),
        (Option("a", "number", 0.0, "any number"), -1, None),
    ],
)
def test_below(option, value, below):
    assert option.below(value) == below


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (NUMBER, "half", r"n = 'half' \(here\): expected a number >= 0 and <= 1$"),
        (NUMBER, 1.5, r"n = 1.5 \(here\) is out of range: expected a number >= 0 and <= 1$"),
        (NUMBER, "nan", r"n = 'nan' \(here\) is out of range"),
        (NUMBER, True, r"n = True \(here\): expected a number"),
        (NUMBER, None, r"n = None \(here\): expected a number"),
        (NUMBER, 10**400, r"n = 1000.* \(here\): expected a number"),
        (WHOLE, 2.5, r"w = 2.5 \(here\): expected a whole number >= 1$"),
        (WHOLE, 0, r"w = 0 \(here\) is out of range"),
        (WHOLE, "inf", r"w = 'inf' \(here\): expected a whole number"),
        (FLAG, "yes", r"f = 'yes' \(here\): expected true or false$"),
        (FLAG, 1, r"f = 1 \(here\): expected true or false"),
        (WORD, "alpa", r"k = 'alpa' \(here\): expected one of alpha, beta or null; did you mean 'alpha'\?$"),
        (LIST, "1,x", r"l = '1,x' \(here\): expected numbers separated by commas or null$"),
    ],
)
def test_refused(option, value, message):
    with pytest.raises(UsageError, match=message):
        option.read(value, "here")


def test_what_upstream_accepts_and_this_does_not_compute():
    option = Option("k", "word", "a", "a word", choices=("a", "b"), computed=("a",), why_not="no router here")
    with pytest.raises(UsageError, match=r"^k = b \(here\): no router here \(computed: a\)$"):
        option.read("b", "here")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1.10.0.dev0", (1, 10, 0)),
        ("v0.3", (0, 3, 0)),
        ("2", (2, 0, 0)),
        ("1.2.3rc1", (1, 2, 3)),
        ("0.9.1+cu12", (0, 9, 1)),
        ("0.3.1.2", (0, 3, 1, 2)),
    ],
)
def test_versions(text, found):
    assert parse_version(text) == found


@pytest.mark.parametrize("text", ["", "main", "-1", ".1", "latest"])
def test_not_versions(text):
    with pytest.raises(UsageError, match="is not a version"):
        parse_version(text)


def test_default_by_version():
    option = Option("f", "flag", True, "a flag", changes=(("1.10.0", False),))
    versions = ["1.9.9", "1.10.0", "1.10", "2"]
    assert [option.default_at(parse_version(version)) for version in versions] == [False, True, True, True]
    option = Option("w", "integer", 3, "a number", changes=(("0.2", 1), ("1.0", 2)))
    assert [option.default_at(parse_version(version)) for version in ("0.1", "0.2", "0.9", "1.0")] == [1, 2, 2, 3]


LATE = Option("late", "integer", 1, "came and went", since="0.18", until="1.2", changes=(("0.2", 7),))
WORDS = Option("words", "word", "a", "words", choices=("a", "b"), values_since={"b": "0.22"})


@pytest.mark.parametrize(
    ("version", "name", "value", "words"),
    [
        ("0.17.9", "late", 2, "late = 2 (test): the option came with 0.18, and the run is of 0.17.9"),
        ("1.2", "late", 2, "late = 2 (test): the option is gone since 1.2, and the run is of 1.2.0"),
        ("0.21.0", "words", "b", "words = b (test): it came with 0.22, and the run is of 0.21.0"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_what_a_release_does_not_have_is_refused_by_name(strict, version, name, value, words):
    with pytest.raises(UsageError) as error:
        resolve((LATE, WORDS), parse_version(version), [Layer("test", {name: value}, strict=strict)], trainer="t")
    assert str(error.value) == words


@pytest.mark.parametrize("version", ["0.18", "0.22", "1.1.9"])
def test_what_a_release_has_is_taken(version):
    config = resolve((LATE,), parse_version(version), [Layer("test", {"late": 2})], trainer="t")
    assert config["late"] == 2


def test_without_the_option_its_release_does_what_is_known():
    """Nothing is assumed then, and stating the same is no contradiction."""
    for layers in ([], [Layer("test", {"late": 1})]):
        config = resolve((LATE,), parse_version("0.17"), layers, trainer="t")
        assert config["late"] == 1
        assert not config.settings["late"].assumed
    assert resolve((LATE,), parse_version("0.1"), [], trainer="t")["late"] == 7
    assert "has no such option" in resolve((LATE,), parse_version("0.1"), [], trainer="t").settings["late"].origin


def test_resolve():
    config = resolve(
        (NUMBER, WHOLE, FLAG),
        (1, 2),
        [Layer("first", {"n": 0.25}), Layer("second", {"n": 0.75, "w": "3"})],
        trainer="t",
    )
    assert {name: (each.value, each.origin, each.assumed) for name, each in config.settings.items()} == {
        "n": (0.25, "first", False),
        "w": (3, "second", False),
        "f": (False, "default of t 1.2", True),
    }
    assert list(config.settings) == ["n", "w", "f"]  # the trainer's order, not that of the layers
    assert config["n"] == config.number("n") == config.optional_number("n") == 0.25


def test_typed_values():
    config = resolve((WORD, LIST), (1,), [Layer("here", {"k": "beta"})], trainer="t")
    assert config.word("k") == "beta"
    assert config.optional_number("l") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trll", r"no trainer 'trll' \(known: trl, trl-rloo, verl, slime, .*\); did you mean 'trl'\?"),
        ("", "no trainer ''"),
    ],
)
def test_unknown_trainers(name, message):
    with pytest.raises(UsageError, match=message):
        find(name)
