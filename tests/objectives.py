"""What a trainer computes under some options."""

from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.trainers import table
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version


def objective_of(trainer: str, **options: object) -> Objective:
    """The objective in the newest version known or in ``NAME@VERSION``; dots in the names of options may be ``__``."""
    trainer, _, version = trainer.partition("@")
    spec = table.TRAINERS[trainer]
    named = {name.replace("__", "."): value for name, value in options.items()}
    return spec.objective_of(
        resolve(spec.options, parse_version(version or spec.newest), [Layer("test", named)], trainer=trainer)
    )
