"""Style of text, and the escaping of text that came out of a file."""

import math
from dataclasses import dataclass

from rolloutdoctor.results.escapes import visible
from rolloutdoctor.results.findings import Example, Measure, RunSetting, Setting, Severity


@dataclass(frozen=True)
class Style:
    """Capabilities of the terminal, file or page that shows a report.

    Attributes:
        width: columns of text.
        color: escape sequences for colour are understood.
        unicode: characters beyond ASCII are understood.
        verbose: show everything that is known.
        quiet: show the verdict alone.
        fail_at: the lowest severity that makes a job fail; None: none does.
    """

    width: int = 100
    color: bool = False
    unicode: bool = True
    verbose: bool = False
    quiet: bool = False
    fail_at: Severity | None = Severity.ERROR


COLORS = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "bold blue"}

_SPACES = str.maketrans("\n\r\t", "   ")


def plain(text: object, limit: int = 80) -> str:
    r"""Text from a file on one line, its control characters shown escaped, cut to `limit` characters.

    >>> print(plain("a\x1b[31mred\x1b[0m\nb"))
    a\x1b[31mred\x1b[0m b
    """
    # What is beyond the limit is not looked at: a text may be as long as a file.
    clean = visible(str(text)[: limit + 1].translate(_SPACES))
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


_TIMES = 10
"""Multiple from which on a share is no percentage any more."""


def shown(measure: Measure) -> str:
    """A measure for people: three significant digits, shares in per cent.

    >>> shown(Measure(0.01234, "share")), shown(Measure(None, "1")), shown(Measure(12345, "rows"))
    ('1.23 %', 'n/a', '12,345')
    """
    value = measure.value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "n/a"
    if isinstance(value, int):
        return f"{value:,}" if measure.unit != "step" else str(value)
    if measure.unit != "share":
        return f"{value:.4g}"
    return f"{100 * value:.3g} %" if abs(value) < _TIMES else f"{value:,.0f} times"


def where(place: Example) -> str:
    """Step, group and row of an example, and what is to be seen there.

    >>> where(Example(3, "g7", None, note="advantage 1"))
    'step 3 group g7: advantage 1'
    """
    names = [f"step {place.step}"]
    if place.group_id is not None:
        names.append(f"group {plain(place.group_id, 40)}")
    if place.sample_id is not None:
        names.append(f"row {plain(place.sample_id, 40)}")
    return f"{' '.join(names)}: {plain(place.note, 120)}"


def set_to(name: str, setting: Setting | RunSetting) -> str:
    """An option with its value, in the trainer's spelling.

    >>> set_to("beta", Setting(0.04, "command line")), set_to("use_kl_loss", Setting(None, "default"))
    ('beta=0.04', 'use_kl_loss=null')
    """
    return f"{plain(name)}={value_of(setting)}"


def value_of(setting: Setting | RunSetting) -> str:
    """The value of an option for people."""
    value = setting.value
    words = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else None
    return plain(words or (f"{value:g}" if isinstance(value, float) else value), 60)
