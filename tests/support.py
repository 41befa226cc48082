"""Support matrix of README and docs: trainers, releases, and the rules that can run on a log, a dump and a recording.

It is made of the tables of trainers, importers and metric names, and of the dumps that importers are tested with.
"""

import re
from dataclasses import replace
from functools import cache

from importers.importing import DATA
from importers.test_contract import DUMPS

from rolloutdoctor.data.schema import COLUMNS
from rolloutdoctor.engine.configure import configure
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.plan import make_plan
from rolloutdoctor.engine.prepare import context_for, prepare
from rolloutdoctor.importers.base import Importer
from rolloutdoctor.importers.table import IMPORTERS
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.metric_names import table as names
from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.trainers.options import Layer
from rolloutdoctor.trainers.table import TRAINERS

DUMPED = tuple(one for one in IMPORTERS if one.name not in ("journal", "mapped", "responses"))
"""Importers of what programs write by themselves."""

HOLDS = {
    "rewards": ("reward", "token_rewards"),
    "advantages": ("advantage", "advantages"),
    "masks": ("response_mask",),
    "the sampler's log-probs": ("rollout_log_probs",),
    "the trainer's": ("old_log_probs", "policy_log_probs"),
    "the reference's": ("ref_log_probs",),
}
"""What a dump holds to the columns of which one has it."""


MARKUP = r"\\\g<0>"
"""A character that is no markup."""


def dumps_of(writer: str) -> list[Importer]:
    """Return the importers of what a trainer writes by itself: they have its name, or begin with it."""
    return [one for one in DUMPED if f"{one.name}-".startswith(f"{writer}-")]


def writers() -> list[str]:
    """Return those whose objective is computed, then those whose log or dump alone is read."""
    known = [*TRAINERS, *(name for name in names.TRAINERS if name not in TRAINERS)]
    return known + [one.name for one in DUMPED if not any(one in dumps_of(name) for name in known)]


def metrics_of(writer: str) -> frozenset[str]:
    """Return names of metrics that its newest release logs, one of each."""
    logged = names.find(writer) if writer in (*names.TRAINERS, *names.SAME) else ()
    return frozenset(re.sub(r"\[.*?\]", "", one.pattern).replace("*", "x") for one in logged if not one.until)


def planned(writer: str, context: Context) -> int:
    """Count the rules that can run, with the metrics of a trainer and a common configuration of its newest release."""
    if writer in TRAINERS:
        stated = Layer("a common configuration", TRAINERS[writer].roles.must_state)
        configured = configure(RunMetadata(writer, TRAINERS[writer].newest), None, [stated])
        known = context_for(context.columns, metrics_of(writer), configured)
        context = replace(context, trainer=known.trainer, config=known.config, objective=known.objective)
    return len(make_plan(RULES, replace(context, metrics=metrics_of(writer), version_stated=True)).rules)


@cache
def of_log(writer: str) -> int:
    """Return how many rules can run on its log alone; 0 where it has none."""
    return planned(writer, Context(frozenset(), has_rows=False)) if metrics_of(writer) else 0


@cache
def recorded(writer: str) -> int:
    """Return how many rules can run on a run with all columns."""
    return planned(writer, Context(frozenset(column.name for column in COLUMNS)))


@cache
def dumped(writer: str, importer: str) -> tuple[int, str]:
    """Return how many rules can run on a dump with its log, and what it holds: the best of those that tests read."""
    found = []
    for sources in (paths for dump, paths in DUMPS.items() if dump.partition(",")[0] == importer):
        paths = [str(DATA / path) for path in sources]
        with open_any(paths, trainer=None, options=ConvertOptions(), tell=lambda text: None) as run:
            held = ", ".join(words for words, columns in HOLDS.items() if run.columns & {*columns})
            found.append((planned(writer, prepare(run, CheckOptions(device="cpu")).context), held))
    return max(found)


def of_dump(writer: str) -> int:
    """Return how many rules can run on the best of its own dumps and the log; 0 where none is read."""
    return max((dumped(writer, one.name)[0] for one in dumps_of(writer)), default=0)


def recorder(writer: str) -> str:
    """Return the module that records a trainer's rollouts, as its own remedies name it."""
    words = " ".join(TRAINERS[writer].recording.values()) if writer in TRAINERS else ""
    found = re.findall(r"rolloutdoctor\.recorders\.(\w+)", words)
    return f"`recorders.{found[0] if found else 'own_loop'}`"


def releases(writer: str) -> str:
    """Return the releases and commits that were read; empty where none was."""
    if writer not in TRAINERS:
        return ""
    return ", ".join(map(str, TRAINERS[writer].read_code))


def whole() -> str:
    """Return the table of docs/support.md."""
    rows = ["| trainer | read | log alone | its own dump | recorded |", "| --- | --- | ---: | --- | --- |"]
    for writer in writers():
        dumps = (
            f"{re.sub('[*_]', MARKUP, one.summary)}: {words}; **{rules}**"
            for one in dumps_of(writer)
            for rules, words in [dumped(writer, one.name)]
        )
        record = f"{recorder(writer)}: **{recorded(writer)}**" if writer in TRAINERS else recorder(writer)
        rows.append(f"| `{writer}` | {releases(writer)} | {_count(of_log(writer))} | {'<br>'.join(dumps)} | {record} |")
    return "\n".join(rows)


def short() -> str:
    """Return the table of the README: trainers whose objective is computed, and in its last line all others."""
    rows = ["| trainer | read | log alone | its own dump | recorded |", "| --- | --- | ---: | ---: | ---: |"]
    for writer in TRAINERS:
        counts = of_log(writer), of_dump(writer), recorded(writer)
        rows.append(f"| `{writer}` | {releases(writer)} | {' | '.join(map(_count, counts))} |")
    others = [writer for writer in writers() if writer not in TRAINERS]
    most = max(map(of_log, others)), max(map(of_dump, others))
    return "\n".join([*rows, f"| {', '.join(others)} | | up to {most[0]} | up to {most[1]} | |"])


def _count(rules: int) -> str:
    return f"**{rules}**" if rules else ""
