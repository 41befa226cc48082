"""Fixes: their variants, and how they stand upstream."""

from collections.abc import Mapping

from rolloutdoctor.commands.explain.layout import hanging, indented


def lines() -> Mapping[str, str]:
    """Return name to what it changes."""
    from rolloutdoctor.search.hypotheses.fixes import FIXES

    return {fix.name: fix.summary for fix in FIXES.values()}


def names() -> list[str]:
    """Return the name of every fix."""
    return list(lines())


def is_known(name: str) -> bool:
    """Tell whether a fix has this name, a variant with it or not."""
    return name.partition(":")[0] in lines()


def listing(*, verbose: bool = False) -> str:
    """List the fixes; verbose: all that there is to say of each."""
    from rolloutdoctor.search.hypotheses.fixes import FIXES

    if verbose:
        return "\n".join(f"{page(name)}\n" for name in FIXES)
    listed = [hanging(f"{fix.name:<29} ", f"{fix.summary} ({fix.status})", 30) for fix in FIXES.values()]
    return "\n".join([*listed, "", "`rolloutdoctor explain NAME` explains one, `rolloutdoctor explain fixes -v` all."])


def page(name: str, *, verbose: bool = False) -> str:
    """Explain a fix."""
    from rolloutdoctor.search.hypotheses.fixes import FIXES

    fix = FIXES[name.partition(":")[0]]
    lines = [
        f"{fix.name}  (upstream: {fix.status}{'; contested' if fix.contested else ''})",
        indented(f"For {fix.concerned()}{f'; needs {fix.needs}' if fix.needs else ''}.", 2),
        indented(f"{fix.summary}.", 2),
        indented(fix.story, 2),
    ]
    for position, (variant, note) in enumerate(fix.notes.items()):
        default = " (default)" if position == 0 else ""
        trainers = ", ".join(fix.trainers(variant)) if variant in fix.only_where else ""
        only = f" [{trainers} only]" if trainers else ""
        lines.append(indented(f"{fix.name}:{variant}{default}{only}: {note}", 4))
    lines += [f"    {thread.url}  {thread.words}" for thread in fix.upstream]
    return "\n".join([*lines, *(f"    {source}" for source in fix.sources)])


def body(name: str) -> dict[str, object]:
    """Return a fix for programs."""
    from rolloutdoctor.search.hypotheses.fixes import FIXES

    fix = FIXES[name.partition(":")[0]]
    return {
        "name": fix.name,
        "summary": fix.summary,
        "story": fix.story,
        "status": fix.status,
        "contested": fix.contested,
        "needs": fix.needs,
        "trainers": list(fix.trainers()),
        "releases": dict(fix.releases),
        "variants": [
            {"name": variant, "note": fix.notes[variant], "trainers": list(fix.trainers(variant))}
            for variant in fix.variants
        ],
        "upstream": [vars(thread) for thread in fix.upstream],
        "references": list(fix.references),
    }


def bodies() -> list[dict[str, object]]:
    """Return every fix for programs."""
    from rolloutdoctor.search.hypotheses.fixes import FIXES

    return [body(name) for name in FIXES]
