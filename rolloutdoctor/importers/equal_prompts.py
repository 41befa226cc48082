"""Groups of JSON Lines that say none: the responses of a step to one prompt."""

from collections import Counter
from collections.abc import Sequence

from rolloutdoctor.importers import base
from rolloutdoctor.importers.mapped_lines import OfPrompt, Place, digest, value_of
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.io.locations.paths import Source


def with_groups(where: dict[str, Place], files: Sequence[Source], sink: base.RunSink) -> dict[str, Place]:
    """Add the groups where nothing says them, and each prompt of a step has as many responses as any other.

    Args:
        where: canonical column to its place in the lines.
        files: of the rollouts.
        sink: takes a note that it was done.
    """
    prompt, step = where.get("prompt"), where.get("step")
    is_open = "reward" in where and "group_id" not in where and all(file.path.endswith(".jsonl") for file in files)
    if not is_open or not isinstance(prompt, str) or step is None:
        return where
    size = _responses_of_prompts(files, prompt, step)
    if size < 2:
        return where
    sink.note(f"no field says the group: the {size} responses of a step to one prompt are read as a group")
    return {**where, "group_id": OfPrompt(prompt)}


def _responses_of_prompts(files: Sequence[Source], prompt: str, step: Place) -> int:
    """Return how many rows of a step have one prompt; 0 where that differs, or all have the same prompt.

    A prompt that two groups of a step share has more rows than the others, and then nothing tells the groups apart.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for file in files:
        for line in lines.objects(file):
            if line.body is not None:
                counts[str(value_of(line.body, step)), digest(line.body.get(prompt))] += 1
    sizes = {*counts.values()}
    return sizes.pop() if len(sizes) == 1 and len({each for _, each in counts}) > 1 else 0
