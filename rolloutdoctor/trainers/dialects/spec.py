"""Interface of dialects: how one program's configuration becomes options of the trainer that it runs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Layer


@dataclass(frozen=True)
class Dialect:
    """A program that runs a trainer that is computed here.

    Attributes:
        title: how sentences call it.
        trainer: name of the trainer that it runs.
        marks: keys that only its configurations have together.
        names: its key, of nested tables joined with dots, and the option that it becomes; of two keys of one option
            the later one counts. What is null is not handed on.
        implied: key and value of the configuration, with what the program then adds.
        defaults: options that it hands on where the configuration leaves them out, where they are not the trainer's.
        only: key to the values under which it runs the trainer as it is, and why not under others; the first value
            stands for a key that is left out.
        needed: option that it makes up where the configuration leaves it out, and from what.
        never: why no configuration is translated; empty where some are.
        package: first part of the names of its classes of options.
    """

    title: str
    trainer: str
    marks: frozenset[str]
    names: Mapping[str, str] = field(default_factory=dict)
    implied: Mapping[tuple[str, object], Mapping[str, object]] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    only: Mapping[str, tuple[tuple[object, ...], str]] = field(default_factory=dict)
    needed: Mapping[str, str] = field(default_factory=dict)
    never: str = ""
    package: str = ""

    def refuse(self, values: Mapping[str, object], origin: str) -> None:
        """Refuse a configuration with which the program computes something else than the trainer.

        Raises:
            UsageError: naming the key.
        """
        if self.never:
            raise UsageError(f"{origin} is a configuration of {self.title}: {self.never}")
        for key, (allowed, why) in self.only.items():
            value = values.get(key, allowed[0])
            if value not in allowed:
                raise UsageError(f"{key} = {value} ({origin}): {why}")

    def layers(self, values: Mapping[str, object], origin: str, stated: Collection[str] = ()) -> list[Layer]:
        """Translate a configuration into options of the trainer, and into what the program adds to them.

        Args:
            values: key, of nested tables joined with dots, to value.
            origin: words for the file.
            stated: options that something more important states.

        Raises:
            UsageError: if the program then computes something else, or an option cannot be known.
        """
        self.refuse(values, origin)
        options = {name: values[key] for key, name in self.names.items() if values.get(key) is not None}
        for name, source in self.needed.items():
            if name not in options and name not in stated:
                raise UsageError(
                    f"{origin} leaves out {name}, which {self.title} takes from {source}: state it with --set {name}=N"
                )
        added = dict(self.defaults)
        for (key, value), more in self.implied.items():
            added |= more if values.get(key) == value else {}
        mine = Layer(f"added by {self.title}", added, strict=False, trainer=self.trainer)
        return [Layer(origin, options, strict=False, trainer=self.trainer), mine]
