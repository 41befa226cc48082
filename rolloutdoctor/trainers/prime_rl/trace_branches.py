"""Branches of a trace of verifiers, its graph of messages, as the rows that prime-rl trains on."""

from collections.abc import Mapping, Sequence

import numpy as np

from rolloutdoctor.data.schema import Kind
from rolloutdoctor.importers.reading import cells
from rolloutdoctor.results.errors import DataError

SPREAD = {"rollout_log_probs": "logprobs", "advantages": "advantages", "ref_log_probs": "reference_logprobs"}
"""Column to the field of a message that has one number for each of its sampled tokens."""

TOKENS = ("prompt_ids", "response_ids", "response_mask", *SPREAD, "turns")
_AUTHORS = {"tool": "tool", "user": "user"}
_DEEPEST_GRAPH = 100_000
_MOST_PLACES = 1_000_000
"""Messages of all branches together: a graph of a thousand messages has some ten branches."""

Node = Mapping[str, object]


def branches(trace: Mapping[str, object], where: str) -> list[dict[str, object]]:
    """Return the columns of tokens of each branch that is trained; nothing of a trace without tokens.

    A branch is the path from a first message to a last one, in the order of the last ones. A sampled message that
    several share is trained in the first of them, and is context in the others; a branch of which nothing is left to
    train is none. So does ``iter_trainable_branches`` (prime-rl, orchestrator/trajectories.py, since b453f40d8).

    Raises:
        DataError: if a field does not fit.
    """
    nodes = _nodes(trace.get("nodes"), where)
    leaves = _leaves(nodes)
    if _places(nodes, leaves) > _MOST_PLACES:
        raise DataError(f"{where}: branches of more than {_MOST_PLACES:,} messages in all, more than any trace has")
    parts = [_part(node, f"{where}, node {number}") for number, node in enumerate(nodes)]
    ends = _ends(trace.get("calls"))
    branches, trained = [], set[int]()
    for path in (_path(nodes, leaf) for leaf in leaves):
        masks = []
        for number in path:
            ids, mask, _ = parts[number]
            masks.append(np.zeros(len(ids), np.int64) if number in trained else mask)
        trained |= {number for number in path if parts[number][1].any()}
        if any(mask.any() for mask in masks):
            branches.append(_columns(nodes, path, [parts[number] for number in path], masks, ends))
    return branches


def _nodes(nodes: object, where: str) -> Sequence[Node]:
    """Return the messages of a trace; none where their links are no graph of paths."""
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        raise DataError(f"{where}: nodes is {cells.shown(nodes)} where a list of objects was expected")
    if len(nodes) > _DEEPEST_GRAPH:
        raise DataError(f"{where}: {len(nodes)} messages, more than any trace has")
    for number, node in enumerate(nodes):
        parent = node.get("parent")
        # A message comes after the one that it follows.
        if parent is not None and not (isinstance(parent, int) and 0 <= parent < number):
            return []
    return nodes


def _leaves(nodes: Sequence[Node]) -> list[int]:
    followed = {node.get("parent") for node in nodes}
    return [number for number in range(len(nodes)) if number not in followed]


def _places(nodes: Sequence[Node], leaves: Sequence[int]) -> int:
    """Count the messages of all branches together, without making them."""
    depths: list[int] = []
    for node in nodes:
        parent = node.get("parent")
        depths.append(depths[parent] + 1 if isinstance(parent, int) else 1)
    return sum(depths[leaf] for leaf in leaves)


def _path(nodes: Sequence[Node], leaf: int) -> list[int]:
    path = [leaf]
    while isinstance(parent := nodes[path[-1]].get("parent"), int):
        path.append(parent)
    return path[::-1]


def _part(node: Node, at: str) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return the ids of a message, which of them were sampled, and the numbers of these by column."""
    ids = cells.per_token(node.get("token_ids", []), Kind.TOKENS, f"{at}: token_ids")
    mask = cells.zeros_and_ones(node.get("mask", []), f"{at}: mask")
    cells.aligned({"mask": mask}, len(ids), at)
    columns = {}
    for column, name in SPREAD.items():
        numbers = cells.per_token(node.get(name) or [], Kind.FLOATS, f"{at}: {name}")
        if len(numbers) not in (0, int(mask.sum())):
            raise DataError(f"{at}: {name} has {len(numbers)} values for {int(mask.sum())} sampled tokens")
        if len(numbers):
            columns[column] = numbers
    return ids, mask, columns


def _columns(
    nodes: Sequence[Node],
    path: Sequence[int],
    parts: Sequence[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]],
    masks: Sequence[np.ndarray],
    ends: Mapping[int, tuple[str | None, str | None]],
) -> dict[str, object]:
    mask = np.concatenate(masks)
    start = cells.response_start(mask)
    ids = np.concatenate([part[0] for part in parts])
    columns: dict[str, object] = {
        "prompt_ids": ids[:start],
        "response_ids": ids[start:],
        "response_mask": mask[start:],
        "turns": _turns(nodes, path, parts, start, ends),
    }
    for column in SPREAD:
        if any(column in part[2] for part in parts):
            spread = [
                _spread(column, part, own_mask if column == "advantages" else part[1])
                for part, own_mask in zip(parts, masks, strict=True)
            ]
            columns[column] = np.concatenate(spread)[start:]
    return columns


def _spread(column: str, part: tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]], is_kept: np.ndarray) -> np.ndarray:
    """Give the numbers of the sampled tokens to these, and to the others what says that there is none."""
    ids, mask, columns = part
    values = np.full(len(ids), np.nan if column == "rollout_log_probs" else 0.0)
    if column in columns and is_kept.any():
        values[mask == 1] = columns[column]
    return values


def _turns(
    nodes: Sequence[Node],
    path: Sequence[int],
    parts: Sequence[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]],
    start: int,
    ends: Mapping[int, tuple[str | None, str | None]],
) -> list[dict[str, object]]:
    """Return who wrote the response, message by message: of what a model sampled its sampled tokens alone.

    The number of a turn is that of its message in the trace, the same in every branch.
    """
    turns: list[dict[str, object]] = []
    place = -start
    for number, (ids, mask, _) in zip(path, parts, strict=True):
        sampled = np.flatnonzero(mask)
        first, last = (int(sampled[0]), int(sampled[-1]) + 1) if len(sampled) else (0, len(ids))
        begin, end = max(0, place + first), place + last
        if end > begin:
            status, error = ends.get(number, (None, None))
            author = "model" if len(sampled) else _author(nodes[number])
            span = {"author": author, "start": begin, "stop": end, "turn": number}
            turns.append({**span, "version": None, "status": status, "error": error})
        place += len(ids)
    return turns


def _author(node: Node) -> str:
    """Return who wrote a message that no model sampled; what a harness made up as the model's is its template's."""
    message = node.get("message")
    role = message.get("role") if isinstance(message, dict) else None
    return _AUTHORS.get(str(role), "system")


def _ends(calls: object) -> dict[int, tuple[str | None, str | None]]:
    """Map a message to how the call that made it ended: its finish reason, and its error."""
    ends = {}
    for call in calls if isinstance(calls, list) else []:
        if isinstance(call, dict) and isinstance(call.get("node"), int):
            reason = call.get("finish_reason")
            ends[call["node"]] = None if reason is None else plain_text(reason), error_text(call.get("error"))
    return ends


def error_text(error: object) -> str | None:
    """Return an error of verifiers as one line: its type and message."""
    if not isinstance(error, dict):
        return None
    kind, message = (plain_text(error.get(name) or "") for name in ("type", "message"))
    return ": ".join(part for part in (kind, " ".join(message.split())) if part)[:400] or "error"


def plain_text(value: object) -> str:
    """Return a value as text that any file can hold."""
    return str(value).encode("utf-8", "replace").decode()
