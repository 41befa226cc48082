"""Acme's dump: ``*.acme``, a line a response: step, group, reward, log-probs."""

from pathlib import Path
from typing import ClassVar

from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.metadata import RunMetadata


class AcmeDump:
    """Reads what Acme's trainer dumps."""

    name = "acme"
    summary = "Acme's dump, NAME.acme"
    logs_beside = checks_files = omits_rows = False
    recording: ClassVar = {"*": "Acme records nothing else"}

    def detect(self, path):
        """By the ending of its name."""
        return "its name ends in .acme" if path.suffix == ".acme" else None

    def read(self, sources: list[Source], sink, options):
        """All lines at once."""
        sink.begin(RunMetadata(trainer="acme"))
        for source in sources:
            lines = [line.split() for line in Path(source.path).read_text().splitlines()]
            sink.write_from(
                source,
                {
                    "step": [int(line[0]) for line in lines],
                    "group_id": [line[1] for line in lines],
                    "reward": [float(line[2]) for line in lines],
                    "policy_log_probs": [[float(value) for value in line[3:]] for line in lines],
                    "response_mask": [[True] * len(line[3:]) for line in lines],
                },
            )


IMPORTER = AcmeDump()
