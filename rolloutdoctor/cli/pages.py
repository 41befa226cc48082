"""Reference pages as text: rules, fixes and trainers, printed from the code. Nothing here needs an option parser."""

import inspect
import json
import shutil
import textwrap
from collections.abc import Callable, Sequence
from functools import partial

from rolloutdoctor.results.version import __version__


def page_for(words: Sequence[str]) -> Callable[[], str] | None:
    """Return what makes the page that the words of a command line ask for; None where there is an option to parse.

    The option parser takes longer to import than any page to print.
    """
    match words:
        case ["--version"]:
            return version
        case ["rule"]:
            return rule
        case ["fixes"]:
            return fixes
        case ["trainers"]:
            return trainers
        case ["rule", code] if not code.startswith("-"):
            return partial(rule, code)
        case ["trainers", name] if not name.startswith("-"):
            return partial(trainers, name)
        case ["metrics"]:
            return metrics
        case ["metrics", name] if not name.startswith("-"):
            return partial(metrics, name)
    return None


def version() -> str:
    """The program's name and version."""
    return f"rolloutdoctor {__version__}"


def rule(code: str | None = None, *, as_json: bool = False) -> str:
    """Explain one rule, or list them all.

    Raises:
        UsageError: if there is no such rule.
    """
    from rolloutdoctor.rules.table import RULES, family, find

    chosen = RULES if code is None else (find(code),)
    if as_json:
        pages = [
            {
                "code": each.code,
                "name": each.name,
                "family": family(each),
                "summary": each.title(),
                "page": inspect.getdoc(type(each)),
                "measures": list(each.measures(None)),
                "fix": each.fix,
                "references": list(each.references),
            }
            for each in chosen
        ]
        return json.dumps(pages if code is None else pages[0], indent=2)
    if code is None:
        lines = [_hanging(f"{each.code}  {each.name:<22} ", each.title()) for each in chosen]
        return "\n".join([*lines, "", "`rolloutdoctor rule CODE` explains one."])
    (each,) = chosen
    parts = [
        f"{each.code} {each.name} ({family(each)})",
        _rendered(inspect.getdoc(type(each)) or ""),
        "Measures\n" + _indented(", ".join(each.measures(None)), 2),
        "References\n" + "\n".join(f"  {reference}" for reference in each.references),
    ]
    if each.fix:
        parts.insert(3, f"Fix\n  {each.fix.partition(':')[0]} (see `rolloutdoctor fixes`)")
    return "\n\n".join(parts)


def _rendered(page: str) -> str:
    """The page of a rule without its markup: a heading on a line, what is below it indented and filled."""
    title, *sections = page.split("\n## ")
    parts = [title.strip()]
    for section in sections:
        heading, _, body = section.partition("\n")
        blocks = [
            textwrap.indent(block, "  ") if ">>>" in block or "\n-" in f"\n{block}" else _indented(block, 2)
            for block in body.strip().split("\n\n")
        ]
        parts.append("\n".join([heading, "\n\n".join(blocks)]))
    return "\n\n".join(parts)


def causes(code: str | None = None, *, as_json: bool = False) -> str:
    """List the hypotheses that are tried where an audit disagrees, by the rule that reports them.

    Raises:
        UsageError: if there is no such rule.
    """
    from rolloutdoctor.rules.table import find
    from rolloutdoctor.search.hypotheses.bounded import BOUNDED, BoundedHypothesis
    from rolloutdoctor.search.hypotheses.hypothesis import Family, Hypothesis
    from rolloutdoctor.search.hypotheses.table import FAMILIES, FIX_CODE, HYPOTHESES
    from rolloutdoctor.trainers.table import TRAINERS

    examples = {trainer.name: trainer.example() for trainer in TRAINERS.values()}
    wanted = None if code is None else find(code).code
    every: tuple[Hypothesis | Family | BoundedHypothesis, ...] = (*HYPOTHESES, *FAMILIES, *BOUNDED)
    chosen = [one for one in every if one.code != FIX_CODE and wanted in (None, one.code)]
    body: list[dict[str, object]] = [
        {
            "name": one.name,
            "code": one.code,
            "rule": find(one.code).name,
            "shows_in": one.stage,
            "words": one.words,
            "remedy": one.remedy,
            "trainers": [name for name, objective in examples.items() if one.applies(objective)],
            "references": list(one.references),
        }
        for one in sorted(chosen, key=lambda one: one.code)
    ]
    if as_json:
        return json.dumps(body, indent=2)
    lines: list[str] = []
    previous = None
    for entry in body:
        if entry["code"] != previous:
            previous = entry["code"]
            lines += ["", f"{previous} {entry['rule']}"]
        lines += [f"  {entry['name']}", _indented(f"{entry['words']}.", 4)]
    if not lines:
        return f"{wanted} has no causes: it looks at the rows themselves; `rolloutdoctor rule {wanted}` explains it."
    lines += [
        "",
        "Each is an edit of the objective, the rows or a metric, tested against the logged values; the fixes of",
    ]
    return "\n".join([*lines[1:], "`rolloutdoctor fixes` are tried first."])


def fixes(*, as_json: bool = False) -> str:
    """List the fixes, their variants, and how they stand upstream."""
    from rolloutdoctor.search.hypotheses.fixes import FIXES

    if as_json:
        body = [
            {
                "name": fix.name,
                "summary": fix.summary,
                "story": fix.story,
                "status": fix.status,
                "contested": fix.contested,
                "needs": fix.needs,
                "trainers": list(fix.trainers()),
                "releases": dict(fix.releases),
                "variants": [
                    {"name": name, "note": fix.notes[name], "trainers": list(fix.trainers(name))}
                    for name in fix.variants
                ],
                "upstream": [vars(thread) for thread in fix.upstream],
                "references": list(fix.references),
            }
            for fix in FIXES.values()
        ]
        return json.dumps(body, indent=2)
    lines = []
    for fix in FIXES.values():
        lines.append(f"{fix.name}  (upstream: {fix.status}{'; contested' if fix.contested else ''})")
        lines.append(_indented(f"For {fix.concerned()}{f'; needs {fix.needs}' if fix.needs else ''}.", 2))
        lines.append(_indented(f"{fix.summary}.", 2))
        lines.append(_indented(fix.story, 2))
        for position, (name, note) in enumerate(fix.notes.items()):
            default = " (default)" if position == 0 else ""
            trainers = ", ".join(fix.trainers(name)) if name in fix.only_where else ""
            only = f" [{trainers} only]" if trainers else ""
            lines.append(_indented(f"{fix.name}:{name}{default}{only}: {note}", 4))
        lines += [f"    {thread.url}  {thread.words}" for thread in fix.upstream]
        lines += [f"    {source}" for source in fix.sources]
        lines.append("")
    return "\n".join(lines)


def trainers(name: str | None = None, *, as_json: bool = False) -> str:
    """List one trainer (``NAME[@VERSION]``), or all, and every option that is understood, with its default.

    Raises:
        UsageError: if there is no such trainer, or the version is none.
    """
    from rolloutdoctor.trainers.releases import parse_version
    from rolloutdoctor.trainers.table import PLANNED, TRAINERS, find

    wanted, _, version = (name or "").partition("@")
    chosen = [find(wanted)] if wanted else list(TRAINERS.values())
    body = []
    for trainer in chosen:
        at = trainer.release(version).numbers if version else parse_version(trainer.newest)
        options = [
            {
                "name": option.name,
                "default": option.default_at(at),
                "takes": option.wanted(),
                "computed": None if option.computed is None else list(option.computed),
                "loss_alone": option.loss_alone,
                "decides": option.decides,
                "meaning": option.meaning,
                "changed": [{"in": release, "before": before} for release, before in option.changes],
                "since": option.since or None,
                "until": option.until or None,
            }
            for option in trainer.options
            if option.exists_at(at)
        ]
        body.append(
            {
                "name": trainer.name,
                "version": version or trainer.read_code[-1].name,
                "read": [str(code) for code in trainer.read_code],
                "options": options,
                "not_recomputed": dict(trainer.log.not_recomputed),
            }
        )
    if as_json:
        return json.dumps(body, indent=2)
    lines = [] if wanted else _support()
    for page, trainer in zip(body, chosen, strict=True):
        read = ", ".join(map(str, trainer.read_code))
        lines.append(f"{trainer.name}  (read: {read}; defaults of {page['version']})")
        at = trainer.release(version).numbers if version else parse_version(trainer.newest)
        for option in trainer.options:
            if not option.exists_at(at):
                continue
            default = option.default_at(at)
            lines.append(f"  {option.name} = {_word(default)}")
            words = f"{option.meaning}; takes {option.wanted()}"
            if option.computed is not None:
                able = ", ".join(_word(value) for value in option.computed)
                what = "its loss is computed for" if option.loss_alone else "computed here:"
                words += f"; {what} {able} ({option.why_not})"
            for release, before in reversed(option.changes):
                words += f"; before {release} the default was {_word(before)}"
            words += f"; from {option.since} on" if option.since else ""
            words += "".join(
                f"; {_word(value)} from {since} on"
                for value, since in option.values_since.items()
                if since != option.since
            )
            lines.append(_indented(words, 6))
        if trainer.log.not_recomputed:
            lines.append("  logged metrics that are not recomputed:")
        lines += [_indented(f"{names}: {why}", 6) for names, why in trainer.log.not_recomputed.items()]
        lines.append("")
    if not wanted:
        lines += [f"{planned}: {why}." for planned, why in PLANNED.items()]
    return "\n".join(lines)


def _support() -> list[str]:
    """What is read and computed of each trainer, a line each."""
    from rolloutdoctor.metric_names.table import SAME
    from rolloutdoctor.metric_names.table import TRAINERS as LOGGED
    from rolloutdoctor.trainers.table import TRAINERS

    lines = [f"{'trainer':<15} metrics  code that was read, and how rollouts are recorded"]
    for name in dict.fromkeys((*TRAINERS, *LOGGED)):
        trainer, known = TRAINERS.get(name), len(LOGGED.get(SAME.get(name, name), ()))
        read = "log alone" if trainer is None else f"read: {', '.join(map(str, trainer.read_code))}"
        record = "record with rolloutdoctor.recorders.own_loop" if trainer is None else trainer.recording.get("*", "")
        lines.append(_hanging(f"{name:<15} {known:>7}  ", f"{read}; {record}" if record else read, 25))
    lines += ["", "metrics: names in its log that are understood; `rolloutdoctor metrics TRAINER` defines them."]
    return [*lines, "`rolloutdoctor check PATH --from ?` lists the dumps that are read. Options and defaults:", ""]


def metrics(trainer: str | None = None, *, as_json: bool = False) -> str:
    """List a trainer's metric names, by quantity; or every quantity, with the name that each trainer gives it.

    Raises:
        UsageError: if the metrics of that trainer are not known.
    """
    from rolloutdoctor.metric_names.identities import IDENTITIES
    from rolloutdoctor.metric_names.quantities import BY_NAME, QUANTITIES
    from rolloutdoctor.metric_names.table import SAME, TRAINERS, find

    chosen = TRAINERS if trainer is None else {trainer: find(trainer)}
    if as_json:
        body = [{"trainer": name, **vars(one)} for name, table in chosen.items() for one in table]
        return json.dumps([{key: entry[key] for key in entry if key != "spellings"} for entry in body], indent=2)
    lines: list[str] = []
    if trainer is None:
        for each in QUANTITIES:
            first = {
                name: one for name, table in chosen.items() for one in reversed(table) if one.quantity == each.name
            }
            words = "; ".join(f"{name}: {one.pattern}" for name, one in first.items())
            lines.append(_hanging(f"{each.name:<21}", words or "none", 21))
        return "\n".join([*lines, "", "`rolloutdoctor metrics TRAINER` defines a trainer's."])
    for quantity in dict.fromkeys(one.quantity for one in chosen[trainer]):
        lines.append(f"{quantity} ({BY_NAME[quantity].unit})")
        for one in chosen[trainer]:
            if one.quantity == quantity:
                lines.append(f"  {one.pattern}  ({one.releases()})")
                lines.append(_indented(f"{one.definition} ({one.source})", 6))
    for identity in IDENTITIES.get(SAME.get(trainer, trainer), ()):
        lines += [_hanging("", identity.text, 2), _indented(f"{identity.conditions()}{identity.source}", 6)]
    return "\n".join(lines)


def _word(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _indented(text: str, spaces: int) -> str:
    return _hanging(" " * spaces, text, spaces)


def _hanging(first: str, text: str, spaces: int = 31) -> str:
    """Lines of the width of the terminal, of which the first begins with a word and the others with spaces."""
    width = max(60, min(100, shutil.get_terminal_size((100, 24)).columns))
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * spaces,
        break_long_words=False,
        break_on_hyphens=False,
    )


def schema(name: str | None = None) -> str:
    """Return the JSON Schema of an output, or list the outputs.

    Raises:
        UsageError: if there is no such output.
    """
    from rolloutdoctor.results.errors import UsageError
    from rolloutdoctor.views.schema import OUTPUTS, listed, schema_of

    if name is None:
        return listed()
    if name not in OUTPUTS:
        raise UsageError(f"no output {name!r}; there are {', '.join(OUTPUTS)}")
    return schema_of(name)
