"""The ways in which programs print numbers, and which of them a text is in."""

from collections.abc import Sequence

from rolloutdoctor.importers.logs.bar_form import ProgressBars
from rolloutdoctor.importers.logs.block_forms import OF_TRAINERS, TWO_COLUMNS, WANDB_SUMMARY, WARNINGS
from rolloutdoctor.importers.logs.dict_forms import ANY_DICT, TRAINER
from rolloutdoctor.importers.logs.pair_lines import Pairs
from rolloutdoctor.importers.logs.printed import Form, Printed
from rolloutdoctor.importers.logs.repeated_lines import BLOCKS, RepeatedLines, Updates
from rolloutdoctor.importers.logs.rounds import Rounds
from rolloutdoctor.importers.logs.step_lines import OPENRLHF, SLIME, VERL
from rolloutdoctor.importers.logs.text_table import TextTable

_PAIRS = Pairs()

FORMS: tuple[Form, ...] = (
    VERL,
    SLIME,
    OPENRLHF,
    *OF_TRAINERS,
    TRAINER,
    TextTable(),
    TWO_COLUMNS,
    WANDB_SUMMARY,
    Rounds(),
    RepeatedLines(),
    ANY_DICT,
    _PAIRS,
    BLOCKS,
    ProgressBars(),
    WARNINGS,
    Updates(),
)
"""In the order in which they are tried: the narrowest first."""

ANY_NAMES = FORMS[-8:]
"""Forms that no trainer's names or layout tell."""


def form_of(lines: Sequence[str]) -> Form | None:
    """Return the form in which a text has numbers; None if it has none.

    Dicts that nothing counts may be those of responses, among lines of names and numbers with more in them.
    """
    form = next((form for form in FORMS if next(form.records(lines), None) is not None), None)
    if form is not ANY_DICT:
        return form
    dicts, counted = [*ANY_DICT.records(lines)], [*_PAIRS.records(lines)]
    is_part = all(record.step is None for record in dicts) and _numbers_in(dicts) < _numbers_in(counted)
    return _PAIRS if is_part else form


def _numbers_in(records: Sequence[Printed]) -> int:
    return sum(len(record.values) for record in records)


def is_step(line: str) -> bool:
    """Tell a line with the numbers of a step of verl or slime."""
    if "step" not in line and "rollout" not in line:
        return False
    return any(next(form.records([line]), None) is not None for form in FORMS[:2])
