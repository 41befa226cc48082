"""Saved states add up to what one check over all parts gives, or are refused."""

import json
import random
from io import BytesIO

import polars as pl
import pytest
from engine.runs import TRL, VERL, random_columns, write
from hypothesis import given
from hypothesis import strategies as st

from rolloutdoctor.engine.check import report_of
from rolloutdoctor.engine.gathering import measure
from rolloutdoctor.engine.merged import merged, saved_state
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.prepare import prepare
from rolloutdoctor.engine.state_file import load_state
from rolloutdoctor.engine.stored import HEAD, _frame_of, json_of, members_of, write_parquet
from rolloutdoctor.io.archives import archived, unarchived
from rolloutdoctor.io.run import StepRange, open_run
from rolloutdoctor.results.errors import InputError, RolloutDoctorError, UsageError
from rolloutdoctor.rules.table import pick
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.trainers.options import Layer
from rolloutdoctor.views.style import Style
from rolloutdoctor.views.table import RENDERERS

STYLE = Style(width=100, color=False, unicode=True, verbose=False)
STEPS = 6


def parquet_of(frame):
    """A frame as the bytes of its file."""
    stream = BytesIO()
    write_parquet(frame, stream)
    return stream.getvalue()


def options_of(**given):
    return CheckOptions(device="cpu", **given)


def rendered(report):
    return {name: render(report, STYLE) for name, render in RENDERERS.items()}


def whole(paths, **given):
    run = open_run(paths)
    prepared = prepare(run, options_of(**given))
    return rendered(report_of(prepared, measure(prepared)))


def save(path, paths, **given):
    """Save the state of a check, as the command does, and read it back."""
    run, options = open_run(paths), options_of(**given)
    prepared = prepare(run, options)
    path.write_bytes(archived(members_of(saved_state(prepared, measure(prepared)))))
    return path.name, load_state(str(path))


@pytest.fixture
def columns():
    return random_columns(5, steps=STEPS)


def rows_of(columns, steps):
    return [row for row, step in enumerate(columns["step"]) if step in steps]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("cut", [1, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_split_by_steps(tmp_path, columns, cut, dtype):
    run = write(tmp_path / "run.parquet", columns, logged=[(step, "kl", 0.1 * step) for step in range(STEPS)])
    early = save(tmp_path / "a.state", [run], dtype=dtype, steps=StepRange(None, cut))
    late = save(tmp_path / "b.state", [run], dtype=dtype, steps=StepRange(cut, None))
    expected = whole([run], dtype=dtype)
    assert "RDM001" in expected["json"]
    assert rendered(merged([early, late])) == rendered(merged([late, early])) == expected


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("named", [True, False])
def test_split_by_files(tmp_path, columns, named):
    """Rows without a name of their own are named after their file where there are several."""
    if not named:
        del columns["sample_id"]
    one = write(tmp_path / "one.parquet", columns, rows=rows_of(columns, {0, 1, 4}))
    two = write(tmp_path / "two.parquet", columns, rows=rows_of(columns, {2, 3, 5}))
    parts = [save(tmp_path / f"{path.stem}.state", [path]) for path in (one, two)]
    expected = whole([one, two])
    assert json.loads(expected["json"])["findings"][0]["examples"]
    assert rendered(merged(parts)) == expected
    if not named:
        early = save(tmp_path / "early.state", [one], steps=StepRange(0, 1))
        late = save(tmp_path / "late.state", [one], steps=StepRange(1, 9))
        assert rendered(merged([early, late])) == whole([one])


@pytest.mark.slow
def test_split_by_split(tmp_path, columns):
    columns["split"] = ["eval" if row % 24 < 8 else "train" for row in range(len(columns["step"]))]
    run = write(tmp_path / "run.parquet", columns)
    parts = [save(tmp_path / f"{split}.state", [run], split=split) for split in ("train", "eval")]
    assert rendered(merged(parts)) == whole([run])


@pytest.mark.slow
def test_one_state_alone_and_only_some_of_its_rules(tmp_path, columns):
    run = write(tmp_path / "run.parquet", columns)
    state = save(tmp_path / "a.state", [run])
    assert rendered(merged([state])) == whole([run])
    assert rendered(merged([state], pick(["RDA"], []))) == whole([run], rules=pick(["RDA"], []))
    few = save(tmp_path / "b.state", [run], rules=pick(["RDG001"], []))
    with pytest.raises(UsageError, match=r"RDA001: not among the rules that were measured"):
        merged([few], pick(["RDA001"], []), required=True)


@pytest.mark.slow
def test_without_a_trainer_with_fixes_and_with_failing_steps(tmp_path, columns):
    run = write(tmp_path / "nobody.parquet", columns, None)
    parts = [save(tmp_path / f"{n}.state", [run], steps=StepRange(n, n + 3)) for n in (0, 3)]
    assert rendered(merged(parts)) == whole([run])
    given = {
        "trainer": "verl",
        "layers": (Layer("command line", {"adv_estimator": "reinforce_plus_plus_baseline"}),),
    }
    columns["response_mask"] = [
        mask * 0 if step in (2, 4) else mask
        for step, mask in zip(columns["step"], columns["response_mask"], strict=True)
    ]
    run = write(tmp_path / "failing.parquet", columns, None)
    parts = [save(tmp_path / f"{n}.state", [run], steps=StepRange(n, n + 3), **given) for n in (0, 3)]
    expected = whole([run], **given)
    assert "2 steps could not be evaluated, the first is step 2" in expected["full"]
    assert rendered(merged(parts)) == expected
    run = write(tmp_path / "fixed.parquet", columns)
    given = {"fixes": (choose("zero-std"),)}
    parts = [save(tmp_path / f"{n}.state", [run], steps=StepRange(n, n + 3), **given) for n in (0, 3)]
    assert rendered(merged(parts)) == whole([run], **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": "float64"}, "dtype is float32 in the first and float64 in the second"),
        ({"rules": pick(["RDA"], [])}, "the selection of rules is RDA001 RDA002"),
        ({"trainer": "trl@1.15.0"}, "its version is 1.16.0 in the first and 1.15.0 in the second"),
        ({"trainer": "verl", "layers": (Layer("", {"adv_estimator": "rloo"}),)}, "the trainer is trl in the first"),
        (
            {"layers": (Layer("command line", {"beta": 0.1}),)},
            r"beta is 0.5 \(file metadata\) in the first and 0.1 \(comm",
        ),
        (
            {"fixes": (choose("zero-std"),)},
            "the list of fixes is none in the first and .*zero-std:loss.* in the second",
        ),
    ],
)
def test_states_of_other_checks_do_not_add_up(tmp_path, columns, given, words):
    run = write(tmp_path / "run.parquet", columns)
    one = save(tmp_path / "a.state", [run], steps=StepRange(0, 3))
    other = save(tmp_path / "b.state", [run], steps=StepRange(3, 6), **given)
    with pytest.raises(InputError, match=words) as caught:
        merged([one, other])
    assert str(caught.value).startswith("a.state and b.state cannot be merged: ")
    assert str(caught.value).endswith("check the parts in the same way")


def test_overlapping_steps_do_not_add_up(tmp_path, columns):
    run = write(tmp_path / "run.parquet", columns)
    one = save(tmp_path / "a.state", [run], steps=StepRange(0, 4))
    other = save(tmp_path / "b.state", [run], steps=StepRange(3, 6))
    with pytest.raises(InputError, match=r"a.state and b.state both hold train rows of step 3"):
        merged([one, other])


def test_other_columns_and_other_metrics_do_not_add_up(tmp_path, columns):
    without = {name: cells for name, cells in columns.items() if name != "old_log_probs"}
    one = save(tmp_path / "a.state", [write(tmp_path / "1.parquet", columns, rows=rows_of(columns, {0}))])
    other = save(tmp_path / "b.state", [write(tmp_path / "2.parquet", without, rows=rows_of(columns, {1}))])
    with pytest.raises(InputError, match="column old_log_probs is present in the first and absent in the second"):
        merged([one, other])
    logs = write(tmp_path / "3.parquet", columns, rows=rows_of(columns, {2}), logged=[(2, "kl", 0.1)])
    with pytest.raises(InputError, match=r"a.state: RDM001 can run not there but on all parts together \(no logged KL"):
        merged([one, save(tmp_path / "c.state", [logs])])


def test_metrics_that_are_means_only_together_do_not_add_up(tmp_path, columns):
    # Each part logged one step, so nothing says that a line is a mean; together they are ten steps apart.
    columns["step"] = [10 * step for step in columns["step"]]
    parts = []
    for step in (0, 10):
        path = write(tmp_path / f"{step}.parquet", columns, rows=rows_of(columns, {step}), logged=[(step, "kl", 0.1)])
        parts.append(save(tmp_path / f"{step}.state", [path]))
    with pytest.raises(InputError, match=r"0.state: (RDM001 can run there but not|whether its logged metrics are)"):
        merged(parts)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", r"no state of a run \(File is not a zip file\); name a file that --save-state wrote"),
        (b'{"schema_version": 5}', "no state of a run"),
        (archived({}), "no state of a run"),
        (archived({HEAD: b"[]"}), "no state of a run"),
        (archived({HEAD: b'{"schema_version": 99, "version": "9.9"}'}), r"a state of rolloutdoctor 9.9 \(schema 99\)"),
        (archived({HEAD: b"[" * 100_000}), "no state of a run"),
    ],
)
def test_files_that_are_no_states(tmp_path, content, words):
    path = tmp_path / "a.state"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        load_state(str(path))
    with pytest.raises(InputError, match="No such file"):
        load_state(str(tmp_path / "none.state"))


@pytest.fixture(scope="module")
def content_of_a_state(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    save(folder / "a.state", [write(folder / "run.parquet", random_columns(5, steps=2))])
    return (folder / "a.state").read_bytes()


@pytest.mark.slow
def test_any_byte_that_changes_is_noticed(tmp_path, content_of_a_state):
    """Each file of a state has a checksum."""
    whole = merged([("a", load_state(str(_written(tmp_path, content_of_a_state))))])
    noticed = 0
    for place in range(0, len(content_of_a_state), 9973):
        broken = bytearray(content_of_a_state)
        broken[place] ^= 0x55
        path = _written(tmp_path, bytes(broken))
        try:
            found = merged([("broken", load_state(str(path)))])
        except InputError:
            noticed += 1
        else:
            # The day on which a file of the archive was written, which nobody reads.
            assert found == whole
    assert noticed > len(content_of_a_state) // 9973 * 0.9


def _written(folder, content):
    path = folder / "broken.state"
    path.write_bytes(content)
    return path


EDITS = {
    "removed": None,
    "null": None,
    "flag": True,
    "text": "x",
    "negative": -1,
    "huge": 2**70,
    "fraction": 0.5,
    "nan": float("nan"),
    "infinite": float("inf"),
    "list": [[]],
    "object": {"map": {"x": []}},
}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("edit", EDITS)
def test_any_field_may_be_edited(tmp_path, content_of_a_state, edit):
    """A state that somebody edited is refused in one sentence, or is still the state of some check."""
    members = unarchived(content_of_a_state)

    def places(value, where=()):
        inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
        for name, each in inner:
            yield (*where, name)
            yield from places(each, (*where, name))

    refused = []
    found = list(places(json.loads(members[HEAD])))
    assert len(found) > 100
    for place in found:
        broken = json.loads(members[HEAD])
        inner = broken
        for name in place[:-1]:
            inner = inner[name]
        if edit == "removed":
            del inner[place[-1]]
        else:
            inner[place[-1]] = EDITS[edit]
        content = archived(members | {HEAD: json.dumps(broken).encode()})
        try:
            merged([("broken.state", load_state(str(_written(tmp_path, content))))])
        except RolloutDoctorError as error:
            refused.append(str(error))
    assert len(refused) > len(found) // 5
    assert not [words for words in refused if "\n" in words]


@pytest.mark.parametrize("name", ["rows", "metrics", "audit"])
def test_tables_of_another_form_are_refused(tmp_path, content_of_a_state, name):
    members = unarchived(content_of_a_state)
    for frame in (pl.DataFrame({"step": [1]}), pl.DataFrame({"step": ["one"]})):
        content = archived(members | {f"{name}.parquet": parquet_of(frame)})
        with pytest.raises(InputError, match=rf"the state is damaged \({name}: column "):
            load_state(str(_written(tmp_path, content)))
    content = archived(members | {f"{name}.parquet": b"PAR1 and no more"})
    with pytest.raises(InputError, match="the state is damaged"):
        load_state(str(_written(tmp_path, content)))


numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=True, allow_infinity=True)


@pytest.mark.slow(every=True)
@given(
    st.recursive(
        st.none() | st.booleans() | numbers | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_option_comes_back_as_it_was(value):
    assert repr(json.loads(json_of(value))) == repr(value)


def test_what_cannot_be_stored_is_an_error():
    with pytest.raises(TypeError, match="object cannot be stored"):
        json_of(object())


@pytest.mark.slow
def test_config_of_every_kind(tmp_path, columns):
    run = write(tmp_path / "run.parquet", columns, VERL)
    state = save(tmp_path / "a.state", [run])
    assert rendered(merged([state])) == whole([run])
    assert TRL["trainer"] != VERL["trainer"]


@pytest.mark.slow
def test_damaged_tables_are_refused_without_a_stack_on_stderr(capfd):
    """Polars would print one of Rust's, or end the process; pages, footers, names and notes of fields are hit."""
    cells = {"a": [1, 2, None], "b": ["x", None, "zz"], "c": [1.5, None, float("nan")], "d": [[1, 2], [], None]}
    cells["e"] = pl.Series(["a", "b", "a"], dtype=pl.Categorical)
    frame = pl.DataFrame({name: pl.Series(column).append(pl.Series(column)) for name, column in cells.items()})
    content = parquet_of(frame)
    assert _frame_of("x.parquet", content).equals(frame)
    draw, refused = random.Random(3), []
    for _ in range(1500):
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            _frame_of("x.parquet", bytes(damaged))
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 1000
    assert all(sentence.startswith("x.parquet: ") for sentence in refused)
    assert capfd.readouterr().err == ""
