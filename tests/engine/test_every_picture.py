"""What holds of every picture: it is the same however its steps come, and it says which column it lacks."""

import re
from dataclasses import asdict, dataclass, replace

import pytest
import torch
from engine.runs import TRL, full_columns, write

import rolloutdoctor as rd
from rolloutdoctor.commands.plot.query import GATHERED, check_and_draw
from rolloutdoctor.data.schema import BY_NAME, Kind
from rolloutdoctor.engine.gathering import Gathered
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.prepare import PreparedRun, prepare
from rolloutdoctor.engine.run_steps import run_steps
from rolloutdoctor.pictures.table import PICTURES
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.search.hypotheses.fixes import ChosenFix, choose

STEPS = 4
LOGGED = {
    "kl": [0.1, 0.2, 0.3, 0.4],
    "loss": [0.0, 0.1, 0.0, 0.1],
    "clip_ratio/low_mean": [0.1, 0.2, 0.1, 0.2],
    "clip_ratio/high_mean": [0.1, 0.2, 0.1, 0.2],
    "clip_ratio/region_mean": [0.2, 0.4, 0.2, 0.5],
}
PPO = {
    "schema_version": 1,
    "trainer": "slime",
    "trainer_version": "0.3.0",
    "config": {"advantage_estimator": "ppo", "kl_coef": 0.1},
}

WAYS = {
    "step by step": [[[0], [1], [2], [3]]],
    "backwards": [[[3, 2, 1, 0]]],
    "in parts": [[[0, 1]], [], [[2], [3]]],
    "in shuffled parts": [[[3, 1]], [[2], [0]]],
}
"""Parts of the steps; in each, steps that are passed on at once."""


@dataclass(frozen=True)
class Source:
    """A run of which pictures are made, with some fixes."""

    ready: PreparedRun
    fixes: tuple[ChosenFix, ...] = ()

    def planned(self, context=None):
        """Return what gathers each picture; of one that cannot be made, the reason."""
        planned = {}
        for kind, figure in GATHERED.items():
            try:
                planned[kind] = figure.plan(context or self.ready.context, self.fixes)
            except InputError as error:
                planned[kind] = str(error)
        return planned

    def figures(self, context=None):
        """Return what gathers each picture that can be made."""
        return {kind: figure for kind, figure in self.planned(context).items() if not isinstance(figure, str)}

    def batches(self, figures):
        """Yield the steps with the columns that some figures read."""
        columns = frozenset().union(*(figure.columns for figure in figures.values()))
        return self.ready.run.batches(columns, dtype=torch.float32)

    def pass_on(self, passes, figures):
        """Pass steps to figures, some at once."""
        batches = {one.step: one for one in self.batches(figures)}
        assert sorted(batches) == list(range(STEPS))
        for steps in passes:
            run_steps([batches[step] for step in steps], [*figures.values()], torch.float32, self.ready.metrics)

    def gathered(self, parts):
        """Return the figures with what other figures gathered of each part."""
        whole = {kind: Gathered() for kind in self.figures()}
        for passes in parts:
            figures = self.figures()
            self.pass_on(passes, figures)
            whole = {kind: whole[kind] + figure.gathered() for kind, figure in figures.items()}
        figures = self.figures()
        for kind, figure in figures.items():
            figure.take(whole[kind])
        return figures


def source(path, *fixes, trainer=None):
    options = CheckOptions(device="cpu", rules=(), split="train")
    return Source(prepare(rd.open(path, trainer=trainer), options, lenient=False), tuple(choose(fix) for fix in fixes))


@pytest.fixture(scope="module")
def columns():
    """Return the columns of rows, those that only some runs have among them."""
    columns = full_columns(steps=STEPS)
    correct = [{"correct": reward, "format": 1.0} for reward in columns["reward"]]
    return columns | {"rewards": correct, "kl": columns["entropy"], "advantages": columns["old_log_probs"]}


@pytest.fixture(scope="module")
def sources(tmp_path_factory, columns):
    """Return runs of which every picture can be made."""
    folder = tmp_path_factory.mktemp("pictures")
    logged = [(step, name, series[step]) for name, series in LOGGED.items() for step in range(STEPS)]
    rows = write(folder / "rows.parquet", columns, row_group_size=17, logged=logged)
    tokens = write(folder / "tokens.parquet", columns | {"values": columns["entropy"]}, PPO, logged=logged)
    return {
        "as configured": source(rows),
        "with a fix": source(rows, "rejected-rows"),
        "of tokens": source(tokens),
        "a log alone": source(folder / "rows.metrics.jsonl", trainer="trl"),
    }


@pytest.fixture(scope="module")
def in_order(sources):
    """Return the same, with the figures of all steps in order."""
    return {name: (one, one.gathered([[range(STEPS)]])) for name, one in sources.items()}


def test_every_picture_is_made(in_order):
    made = {name: {kind for kind, figure in figures.items() if figure.seen} for name, (_, figures) in in_order.items()}
    assert set().union(*made.values()) == set(GATHERED), "give a run of `sources` what the picture needs"
    assert made["a log alone"] >= {"overview", "audit"}


def whole(figure):
    """Return all that a picture is made of."""
    return repr(asdict(figure.data()))


def tables(figure):
    """Return the tables of a figure as they were declared at least."""
    frames = figure.gathered().tables
    for name, frame in frames.items():
        declared = dict(figure.schemas.get(name, {}))
        assert {column: frame.schema.get(column) for column in declared} == declared
    return {name: dict(frame.schema) for name, frame in frames.items()}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_order_and_the_parts_of_the_steps_change_nothing(in_order, way):
    for one, figures in in_order.values():
        for kind, figure in one.gathered(WAYS[way]).items():
            assert whole(figure) == whole(figures[kind]), kind
            assert tables(figure) == tables(figures[kind]), kind


def test_a_picture_names_the_column_that_it_lacks(sources):
    for name in ("as configured", "of tokens"):
        context, planned = sources[name].ready.context, sources[name].planned()
        for column in sorted(context.columns):
            for kind, figure in sources[name].planned(replace(context, columns=context.columns - {column})).items():
                if not isinstance(figure, str):
                    assert column not in figure.columns, (kind, column)
                elif figure != planned.get(kind):
                    assert re.search(rf"\b{column}\b", figure.partition(": ")[0]), (kind, column, figure)


def test_of_a_run_without_columns_every_picture_says_what_it_lacks(tmp_path):
    bare = write(tmp_path / "run.parquet", {"step": [0, 1], "sample_id": ["1", "2"]})
    _, gallery = check_and_draw(rd.open(bare), GATHERED, CheckOptions(device="cpu", rules=()))
    assert not gallery.drawn
    for kind, why in gallery.left_out.items():
        words, _, remedy = why.partition(": ")
        assert remedy, kind
        assert re.search(r"^missing columns? \w|^no column says .*\(|^nothing was logged", words), (kind, why)


@pytest.mark.parametrize("trainer", [TRL, PPO], ids=["trl", "ppo"])
def test_a_step_in_which_a_column_is_null_is_passed_over(tmp_path, columns, trainer):
    names = sorted(name for name in columns if BY_NAME[name].kind is not Kind.IDENTIFIER and name != "step")
    path = tmp_path / "run.parquet"
    columns = {name: [*cells[:6]] * len(names) for name, cells in columns.items()}
    columns["step"] = [step for step in range(len(names)) for _ in range(6)]
    for step, name in enumerate(names):
        columns[name][6 * step : 6 * step + 6] = [None] * 6
    one = source(write(path, columns, trainer))
    together, batches = one.figures(), [*one.batches(one.figures())]
    run_steps(batches, [*together.values()], torch.float32, one.ready.metrics)
    for batch in batches:
        figures = one.figures()
        run_steps([batch], [*figures.values()], torch.float32, one.ready.metrics)
        for kind, figure in figures.items():
            # The overview is made of the report.
            assert whole(figure) if kind == "overview" else PICTURES[kind].title(figure.data())
    for kind, figure in one.figures().items():
        run_steps(one.batches({kind: figure}), [figure], torch.float32, one.ready.metrics)
        assert whole(figure) == whole(together[kind]), kind
