"""The text of tests/lab/gradients/results.md."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from gradients import pictures
from gradients.statistics import (
    LEAST,
    SMALL,
    Step,
    agreement,
    by,
    of_alone,
    of_rows,
    pairs,
    read,
    same_sign,
    spearman,
)
from gradients.words import ADAM, INTRODUCTION, METHOD, PARTS, READING, SPIKES, WHERE

EDITS = {
    "RDG001": "KL of zero-variance groups (RDG001)",
    "RDA001": "masked responses in the baseline (RDA001)",
    "RDG005": "another average of the loss (RDG005)",
    "KL term": "the whole KL term",
}
SPACES = {"log-prob": "log-probs", "logit": "logits"}
PARTS_OF = ("embedding", "attention", "MLP", "norm", "head")


def number(value: float) -> str:
    """Two significant digits, or whole above 10."""
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"


def quantiles(values: np.ndarray) -> str:
    """Median, and the range of 90 %."""
    low, middle, high = np.quantile(values, (0.05, 0.5, 0.95))
    return f"{number(middle)} ({number(low)} to {number(high)})"


def percent(value: float) -> str:
    """A share for people."""
    return f"{100 * value:.0f} %" if value >= 0.1 else f"{100 * value:.2g} %"


def share_table(steps: Sequence[Step]) -> Iterator[str]:
    """How shares in each space go with those in parameters."""
    yield "| what is left out | by | steps | rank correlation | slope | 1 % is, in parameters, in 90 % of the steps |"
    yield "| --- | --- | ---: | ---: | ---: | --- |"
    for edit, words in EDITS.items():
        for space, name, title in (
            ("log-prob", "share", "log-probs, L2"),
            ("log-prob", "share_l1", "log-probs, L1"),
            ("logit", "share", "logits, L2"),
        ):
            found = agreement(*pairs(steps, edit, space, name))
            spread = f"{number(found.low)} % to {number(found.high)} %, {number(found.middle)} % in the median"
            yield f"| {words} | {title} | {found.steps} | {found.rank:.2f} | {found.slope:.2f} | {spread} |"


def angle_table(steps: Sequence[Step]) -> Iterator[str]:
    """How cosine, kappa and signs go together."""
    yield (
        "| what is left out | by | rank correlation of the cosine | of kappa | sign of the cosine agrees "
        "| larger or smaller than 1: kappa agrees |"
    )
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for edit, words in EDITS.items():
        for space, title in SPACES.items():
            cosine, kappa = pairs(steps, edit, space, "cosine"), pairs(steps, edit, space, "kappa")
            is_known = np.abs(kappa[0] - 1) > 1e-6
            side = same_sign(kappa[0][is_known] - 1, kappa[1][is_known] - 1) if is_known.mean() > 0.5 else np.nan
            rank = spearman(*kappa)
            cells = [f"{spearman(*cosine):.2f}", "always 1" if np.isnan(side) else f"{rank:.2f}"]
            cells += [percent(same_sign(*cosine)), "not told" if np.isnan(side) else percent(side)]
            yield f"| {words} | {title} | {' | '.join(cells)} |"


PROPERTIES: dict[str, Callable[[Step], object]] = {
    "stage": lambda step: step["stage"],
    "trained": lambda step: "adapters (LoRA)" if step["lora"] else "all weights",
    "head": lambda step: "tied to the embedding" if step["tied"] else "of its own",
    "layers": lambda step: step["depth"],
    "width": lambda step: f"{step['width']:3}".strip(),
    "tokens above 99 %": lambda step: (
        "under 1 %" if step["certain"] < 0.01 else "1 to 50 %" if step["certain"] < 0.5 else "50 % and more"
    ),
}


def where_table(steps: Sequence[Step]) -> Iterator[str]:
    """Factors from log-prob and logit shares to those in parameters, by what differs between trainings."""
    yield "| property | value | steps | factor from log-probs | factor from logits |"
    yield "| --- | --- | ---: | --- | --- |"
    edits = ("RDG001", "KL term")
    for name, key in PROPERTIES.items():
        of_logits = by(steps, key, edits, "logit")
        for value, factors in by(steps, key, edits).items():
            other = quantiles(of_logits[value]) if value in of_logits else ""
            yield f"| {name} | {value} | {len(factors)} | {quantiles(factors)} | {other} |"


def parts_table(steps: Sequence[Step]) -> Iterator[str]:
    """The share by group of parameters, over that of all parameters."""
    yield "| parameters | share of zero-variance groups over that of all parameters |"
    yield "| --- | --- |"
    for part in PARTS_OF:
        found = [each["edits"]["RDG001"] for each in steps if "RDG001" in each["edits"]]
        factors = [one[part]["share"] / one["parameter"]["share"] for one in found
                   if part in one and one["parameter"]["share"] > 1e-3]  # fmt: skip
        if factors:
            yield f"| {part} | {quantiles(np.array(factors))} |"


def rows_table(steps: Sequence[Step]) -> Iterator[str]:
    """Which responses carry a step, by each space."""
    yield (
        "| by | steps | rank correlation within a step | same largest response | responses with half of the squared "
        "norm differ by at most one | share of the largest, factor to parameters |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    for space, title in SPACES.items():
        found = of_rows(steps, space)
        near = (np.abs(found.carriers[:, 0] - found.carriers[:, 1]) <= 1).mean()
        factor = quantiles(found.top[:, 1] / found.top[:, 0])
        cells = (f"{found.rank:.2f}", percent(found.same_first), percent(float(near)), factor)
        yield f"| {title} | {len(found.top)} | {' | '.join(cells)} |"


def adam_table(steps: Sequence[Step]) -> Iterator[str]:
    """What a step's own gradient has of Adam's first moment and of the update."""
    yield "| | all steps | steps whose gradient is that of the KL term alone |"
    yield "| --- | --- | --- |"
    every = [each["adam"] for each in steps if each.get("adam") and each["step"] > 1]
    alone = [each["adam"] for each in of_alone(steps)]
    for name, words in (
        ("own by norm", "own share of the gradient norms that the first moment adds up"),
        ("own in moment", "own share of the first moment (L2)"),
        ("own in update", "own share of the update (L2)"),
        ("own along update", "own share of the update, along it"),
        ("size", "size of the update of a parameter, in learning rates (RMS)"),
    ):
        cells = (quantiles(np.array([one[name] for one in found])) for found in (every, alone))
        yield f"| {words} | {' | '.join(cells)} |"
    yield f"| steps | {len(every)} | {len(alone)} |"


def facts(steps: Sequence[Step]) -> dict[str, str]:
    """The numbers of the sentences."""
    share = agreement(*pairs(steps, "RDG001", "log-prob"))
    l1 = agreement(*pairs(steps, "RDG001", "log-prob", "share_l1"))
    logit = agreement(*pairs(steps, "RDG001", "logit"))
    with_update = [each for each in steps if each.get("adam") and "RDG001" in each["edits"] and each["step"] > 1]
    of_update = agreement(
        np.array([each["edits"]["RDG001"]["log-prob"]["share"] for each in with_update]),
        np.array([each["adam"]["dead in update"] for each in with_update]),
    )
    kappa = pairs(steps, "RDG001", "log-prob", "kappa")[1]
    return {
        "trainings": str(len({each["run"] for each in steps})),
        "steps": str(len(steps)),
        "most": percent(SMALL),
        **{f"low_{name}": number(one.low) for name, one in
           (("l2", share), ("l1", l1), ("logit", logit), ("update", of_update))},
        **{f"high_{name}": number(one.high) for name, one in
           (("l2", share), ("l1", l1), ("logit", logit), ("update", of_update))},
        "rank": f"{share.rank:.2f}",
        "rank_update": f"{of_update.rank:.2f}",
        "kappa": " to ".join(map(number, np.quantile(kappa, (0.05, 0.95)))),
        "apart": apart(steps),
        "same_half": percent(of_rows(steps, "log-prob").same_where_half),
    }  # fmt: skip


def apart(steps: Sequence[Step]) -> str:
    """How many steps have shares by log-probs and logits that differ by a factor of two.

    Raises:
        AssertionError: if in one the share by parameters is not on the side of the logits: the page says so of all.
    """
    found = [each["edits"]["RDG001"] for each in steps if "RDG001" in each["edits"]]
    shares = np.array([[one[space]["share"] for space in ("log-prob", "logit", "parameter")] for one in found])
    shares = shares[(shares > LEAST).all(1)]
    factor = shares[:, 1] / shares[:, 0]
    differs = (factor > 2) | (factor < 0.5)
    assert ((shares[differs, 2] > shares[differs, 0]) == (factor[differs] > 1)).all()
    return str(int(differs.sum()))


def spaced(lines: Sequence[str]) -> list[str]:
    """Put one empty line before each heading, table and paragraph, and no more."""
    found: list[str] = []
    for line in lines:
        before = found[-1] if found else ""
        begins = line.startswith("#") or (line.startswith("|") != before.startswith("|"))
        if before and line and begins:
            found.append("")
        if line or before:
            found.append(line)
    return found


def write(folder: Path, into: Path) -> None:
    """Write the page and its pictures."""
    steps = read(folder)
    pictures.shares(steps, into / "shares.png")
    pictures.moments(steps, into / "adam.png")
    told = facts(steps)
    tables = (
        (INTRODUCTION, ()), (METHOD, ()), (READING, share_table(steps)), ("", ("",)), ("", angle_table(steps)),
        (WHERE, where_table(steps)), (PARTS, parts_table(steps)), (SPIKES, rows_table(steps)),
        (ADAM, adam_table(steps)),
    )  # fmt: skip
    lines = [line for words, table in tables for line in (*words.format(**told).splitlines(), *table)]
    (into / "results.md").write_text("\n".join(spaced(lines)) + "\n")
