"""Turns of TRL's responses: who wrote which tokens, by the mask of its tool loop, and what failed in a tool."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

_FAILED = "{'error': "
"""Start of the message in which TRL's tool loop says that a call failed (`GRPOTrainer._tool_call_loop`)."""

MOST_LETTERS = 400
"""Letters of an error that are kept."""


def turn_cells(
    masks: Sequence[Sequence[int]], errors: Sequence[Sequence[str | None] | None]
) -> list[list[dict[str, object]]]:
    """Return the turns of each response: what the policy sampled, and what tools answered between.

    Args:
        masks: of each response, 1 for each token that the policy sampled, 0 for one of a tool, as TRL generated it.
        errors: of each response, what failed in each tool turn; None where that is not known.

    >>> turn_cells([[1, 1, 0, 1]], [["no such file"]])[0][1]
    {'author': 'tool', 'start': 2, 'stop': 3, 'turn': 1, 'version': None, 'status': None, 'error': 'no such file'}
    """
    return [_of_row(np.asarray(mask, np.bool_), failed) for mask, failed in zip(masks, errors, strict=True)]


def _of_row(mask: np.ndarray, failed: Sequence[str | None] | None) -> list[dict[str, object]]:
    edges = np.flatnonzero(np.diff(mask)) + 1
    starts, stops = [0, *edges.tolist()][: len(mask)], [*edges.tolist(), len(mask)]
    is_model = mask[starts].tolist()
    is_known = failed is not None and len(failed) == len(is_model) - sum(is_model)
    left = iter(failed if failed is not None and is_known else ())
    return [
        {
            "author": "model" if by_model else "tool",
            "start": start,
            "stop": stop,
            "turn": turn,
            "version": None,
            "status": None,
            "error": None if by_model else next(left, None),
        }
        for turn, (by_model, start, stop) in enumerate(zip(is_model, starts, stops, strict=False))
    ]


def tool_errors(messages: object, *, text: bool) -> list[str | None] | None:
    """Return what failed in each run of tool messages of a response; None if it is not made of messages.

    Args:
        messages: the completion as TRL hands it to the reward functions.
        text: False to say only that a call failed.
    """
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        return None
    runs = groupby(messages, lambda message: message.get("role") == "tool")
    return [_error([str(message.get("content")) for message in run], text=text) for is_tool, run in runs if is_tool]


def _error(contents: Sequence[str], *, text: bool) -> str | None:
    failed = [content for content in contents if content.startswith(_FAILED)]
    if not failed:
        return None
    return "; ".join(failed)[:MOST_LETTERS] if text else "a tool call failed"
