"""Options of trainers, under their own names."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rolloutdoctor.commands.explain.layout import hanging, indented, word
from rolloutdoctor.commands.explain.trainers import meaning, option_body

if TYPE_CHECKING:
    from rolloutdoctor.trainers.options import Option
    from rolloutdoctor.trainers.spec import Trainer


def lines() -> Mapping[str, str]:
    """Return the name of every option to its meaning in the first trainer that has it."""
    from rolloutdoctor.trainers.table import TRAINERS

    return {option.name: option.meaning for trainer in reversed(TRAINERS.values()) for option in trainer.options}


def _called(name: str) -> "list[tuple[Trainer, Option]]":
    """Trainers with an option of a name, or with one that ends in it after a dot."""
    from rolloutdoctor.trainers.table import TRAINERS

    return [
        (trainer, option)
        for trainer in TRAINERS.values()
        for option in trainer.options
        if f".{option.name}".endswith(f".{name}")
    ]


def is_known(name: str) -> bool:
    """Tell whether some trainer has an option of this name, or one that ends in it after a dot."""
    return bool(_called(name))


def listing(*, verbose: bool = False) -> str:
    """List the options of every trainer, by name."""
    return "\n".join(hanging(f"{name:<42} ", words, 43) for name, words in sorted(lines().items()))


def page(name: str, *, verbose: bool = False) -> str:
    """Explain an option, trainer by trainer."""
    lines = [f"{name} (option)"]
    for trainer, option in _called(name):
        gone = f" (until {option.until})" if option.until else ""
        lines += [
            "",
            f"  {trainer.name}: {option.name} = {word(option.default)}{gone}",
            indented(f"{meaning(option)}.", 6),
        ]
    return "\n".join(lines)


def body(name: str) -> dict[str, object]:
    """Return an option for programs, trainer by trainer."""
    return {
        "name": name,
        "trainers": [
            {"trainer": trainer.name, **option_body(option, option.default)} for trainer, option in _called(name)
        ],
    }


def bodies() -> list[dict[str, object]]:
    """Return every option for programs."""
    return [body(name) for name in sorted(lines())]
