"""The calls of a model in the output of a rollout of NeMo Gym, as rows of tokens and the turns in them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rolloutdoctor.data.schema import Kind
from rolloutdoctor.importers.reading import cells
from rolloutdoctor.results.errors import DataError

TOKENS = ("prompt_ids", "response_ids", "response_mask", "response_mask_pre", "rollout_log_probs", "turns")
_FAILED = ("failed", "timeout", "cancelled")

Item = Mapping[str, object]


@dataclass(frozen=True)
class _Call:
    """What the model was given and sampled in one call.

    Attributes:
        place: of the item in the output that carries the tokens, the last of the call.
        since: place of the first item after the call before.
        before: the items from there on, without the one that carries the tokens.
        asks_tool: that one is the call of a tool.
        prompt, ids: token ids.
        log_probs: of the sampled tokens.
    """

    place: int
    since: int
    before: Sequence[Item]
    asks_tool: bool
    prompt: np.ndarray
    ids: np.ndarray
    log_probs: np.ndarray


def pieces(output: object, where: str, *, failures: Mapping[str, str], is_masked: bool) -> list[dict[str, object]]:
    """Return the columns of tokens of each contiguous piece of a rollout; nothing where no item carries tokens.

    A call whose prompt begins with all tokens of the calls before it, prompt and sampled, goes on from them: what its
    prompt has beyond them stands in the response with a mask of 0. Another one begins a piece of its own, with its
    prompt: its context was rewritten, or it is a sub-agent's. NeMo-RL refuses such rollouts
    (``_postprocess_nemo_gym_to_nemo_rl_result``, nemo_rl/environments/nemo_gym.py).

    Args:
        output: of the response: messages, calls of tools, and what tools answered.
        where: file and line, for messages.
        failures: id of a tool call to how it failed.
        is_masked: the rollout is kept out of the loss; who wrote its tokens is not known, since a call may be missing.

    Raises:
        DataError: if a field does not fit.
    """
    pieces: list[list[_Call]] = []
    context = np.array([], np.int64)
    for call in _calls(output, where):
        if not pieces or not np.array_equal(call.prompt[: len(context)], context):
            pieces.append([])
        pieces[-1].append(call)
        context = np.concatenate([call.prompt, call.ids])
    return [_columns(calls, failures, is_masked=is_masked) for calls in pieces]


def _calls(output: object, where: str) -> Iterator[_Call]:
    if output is None:
        return
    if not isinstance(output, list):
        raise DataError(f"{where}: output is {cells.shown(output)} where a list was expected")
    before: list[Item] = []
    since = 0
    for place, item in enumerate(output):
        # An agent may give transitions, a list of items each, which carry no token ids.
        if not isinstance(item, dict):
            continue
        # A call that sampled nothing is no turn; so does NeMo-RL.
        if not item.get("generation_token_ids"):
            before.append(item)
            continue
        at = f"{where}, output item {place}"
        prompt, ids = (
            cells.per_token(item.get(name), Kind.TOKENS, f"{at}: {name}")
            for name in ("prompt_token_ids", "generation_token_ids")
        )
        log_probs = cells.per_token(item.get("generation_log_probs"), Kind.FLOATS, f"{at}: generation_log_probs")
        if len(log_probs) != len(ids):
            raise DataError(f"{at}: generation_log_probs has {len(log_probs)} values for {len(ids)} sampled tokens")
        yield _Call(place, since, before, str(item.get("type")).endswith("_call"), prompt, ids, log_probs)
        before, since = [], place + 1


def _columns(calls: Sequence[_Call], failures: Mapping[str, str], *, is_masked: bool) -> dict[str, object]:
    start = len(calls[0].prompt)
    last = calls[-1]
    ids = np.concatenate([last.prompt, last.ids])[start:]
    mask, log_probs = np.zeros(len(ids), np.uint8), np.full(len(ids), np.nan)
    turns: list[dict[str, object]] = []
    end = 0
    for number, call in enumerate(calls):
        begin = len(call.prompt) - start
        if begin > end:
            author, error = _who(call, calls[number - 1], failures)
            turns += [] if author is None else [_turn(author, end, begin, call.since, error)]
        end = begin + len(call.ids)
        mask[begin:end], log_probs[begin:end] = 1, call.log_probs
        turns.append(_turn("model", begin, end, call.place, None))
    return {
        "prompt_ids": calls[0].prompt,
        "response_ids": ids,
        "response_mask": mask * np.uint8(not is_masked),
        "response_mask_pre": mask,
        "rollout_log_probs": log_probs,
        "turns": None if is_masked else turns,
    }


def _turn(author: str, start: int, stop: int, number: int, error: str | None) -> dict[str, object]:
    span = {"author": author, "start": start, "stop": stop, "turn": number}
    return {**span, "version": None, "status": None, "error": error}


def _who(call: _Call, previous: _Call, failures: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return who wrote what stands between two calls, and how it failed; None where that cannot be told.

    The model's own items before the one that carries the tokens are of the same call. A response that was rebuilt from
    captured tokens has no answers of tools among its items, but what follows the call of a tool is its answer.
    """
    authors = [_author(item) for item in call.before]
    while authors and authors[-1] == "model":
        authors.pop()
    if not authors:
        return ("tool" if previous.asks_tool else None), None
    # Which of the tokens each wrote, where several did, nothing says.
    author = authors[0] if len({*authors}) == 1 and authors[0] != "model" else None
    return author, next(filter(None, (failures.get(str(item.get("call_id"))) for item in call.before)), None)


def _author(item: Item) -> str:
    if str(item.get("type")).endswith("_output"):
        return "tool"
    role = item.get("role")
    return {"user": "user", "system": "system", "developer": "system"}.get(str(role), "model")


def failed_tools(body: Item) -> dict[str, str]:
    """Map the id of a tool call that failed to how, where the collection observed its tools (`ng_trajectory`)."""
    calls = as_object(body.get("ng_trajectory")).get("tool_calls")
    return {
        str(call.get("tool_call_id")): cells.text(call.get("error_type") or call["status"]) or "failed"
        for call in (calls if isinstance(calls, list) else [])
        if isinstance(call, dict) and call.get("status") in _FAILED
    }


def as_object(value: object) -> dict[str, object]:
    """Return a value that should be an object; an empty one where it is none."""
    return value if isinstance(value, dict) else {}
