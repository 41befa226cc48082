"""Answers that responses state, compared with reference answers: of texts alone, and only where both are plain."""

import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

UNKNOWN, EQUAL, OTHER = 0, 1, 2
"""The stated answer against the reference: nothing plain to compare, equal, or another number."""

IN_MODEL, IN_TOOL, NOWHERE = 1, 2, 3
"""Where a reference answer stands: in what the model wrote, only in what tools returned, or nowhere; 0: not known."""

_MARKED = (
    re.compile(r"####[ \t]*(\S[^\n]*)"),
    re.compile(r"<answer>([^<]{0,400})</answer>"),
    re.compile(r"(?:^|\n)[ *]*(?:final )?answer[ *]*:[ *]*([^\n]+)", re.IGNORECASE),
)
"""Ways to state an answer beside LaTeX's box: GSM8K's mark, tags, and a line of its own."""

_BOX = "\\boxed{"

_TOOL = re.compile(
    r"<(tool_response|information|observation)>.*?(?:</\1>|\Z)"
    r"|<\|im_start\|>(?:tool|user)\b.*?(?:<\|im_end\|>|\Z)"
    r"|<\|start_header_id\|>(?:ipython|tool|user)<\|end_header_id\|>.*?(?:<\|eot_id\|>|\Z)",
    re.DOTALL,
)
_OTHERS_TURN = re.compile(r"(?:^|\n)(?:tool|user): .*?(?=\n(?:assistant|tool|user): |\Z)", re.DOTALL)
"""A turn of messages that an importer wrote as text, the first of which is the model's."""

_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_WORDS = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}")
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)(?:/\d+)?")
_MOST_DIGITS = 40


def compared(response: object, truth: object) -> int:
    """Compare the answer that a response states with the reference answer, as one number.

    Args:
        response: text, or messages with `role` and `content`.
        truth: the reference answer; a solution that ends in one may be given.

    Returns:
        ``relation + 4 * way + 32 * thinks + 64 * place``: `UNKNOWN`, `EQUAL` or `OTHER`; the number of the way in which
        the answer is stated, 0 without; 1 if the response has ``</think>``; and where the reference answer stands.

    >>> compared("2 + 40 = 42, so #### 42", "42.0") % 4, compared("the answer: 41", 42) % 4
    (1, 0)
    """
    reference = _reference(truth)
    if reference is None or response is None:
        return UNKNOWN
    model, tool = _parts(response)
    _, way, stated = max(_stated(model), default=(0, 0, ""))
    relation, thinks = _relation(_plain(stated), reference), "</think>" in model
    return relation + 4 * way + 32 * thinks + 64 * _place(model, tool, reference)


def _stated(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield place, number and answer of the last statement in each way."""
    start = text.rfind(_BOX)
    if start >= 0:
        depth, begin = 1, start + len(_BOX)
        for brace in re.finditer(r"[{}]", text[begin : begin + 400]):
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                yield start, 1, text[begin : begin + brace.start()]
                break
    for way, pattern in enumerate(_MARKED, 2):
        last = None
        for match in pattern.finditer(text):
            last = match
        if last is not None:
            yield last.start(), way, last[1]


def _reference(truth: object) -> str | None:
    """A reference answer without what surrounds it; None if it is none of one value."""
    if isinstance(truth, (list, tuple)) and len(truth) == 1:
        truth = truth[0]
    if not isinstance(truth, (str, int, float)):
        return None
    text = str(truth)
    return _plain(max(_stated(text), default=(0, 0, text))[2]) or None


def _plain(text: str) -> str:
    r"""An answer without dollars, spacing, emphasis, thousands' commas and a final dot.

    >>> _plain(r"$\text{1,234}$."), _plain(r"\dfrac{1}{2}"), _plain("(B)")
    ('1234', '1/2', 'B')
    """
    text = _WORDS.sub(r"\1", text[:400]).replace("\\!", "").replace("\\,", "").replace("{,}", "")
    text = _FRACTION.sub(r"\1/\2", text).replace("\\(", "").replace("\\)", "").strip(" \t\n*$.")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return re.sub(r"^\(([A-Za-z])\)$", r"\1", text)


def _number(text: str) -> Fraction | None:
    if len(text) > _MOST_DIGITS or not _NUMBER.fullmatch(text) or re.search(r"/0+$", text):
        return None
    numerator, _, below = text.partition("/")
    return Fraction(numerator) / Fraction(below or 1)


def _relation(stated: str, reference: str) -> int:
    if not stated:
        return UNKNOWN
    if stated == reference:
        return EQUAL
    answer, target = _number(stated), _number(reference)
    if answer is None or target is None:
        return UNKNOWN
    if answer == target:
        return EQUAL
    # A tolerance, or a percentage, is the verifier's own.
    is_near = abs(answer - target) <= max(abs(answer), abs(target)) / 100
    return UNKNOWN if is_near or answer in (100 * target, target / 100) else OTHER


def _parts(response: object) -> tuple[str, str]:
    """What the model wrote, and what tools and users wrote, of a response of several turns."""
    if isinstance(response, str):
        pattern = _OTHERS_TURN if response.startswith("assistant: ") else _TOOL
        spans = [match[0] for match in pattern.finditer(response)]
        return (pattern.sub(" ", response), " ".join(spans)) if spans else (response, "")
    messages = (
        [message for message in response if isinstance(message, Mapping)] if isinstance(response, Sequence) else []
    )
    assistant = [
        str(message.get("content") or "") for message in messages if message.get("role") in ("assistant", None)
    ]
    others = [
        str(message.get("content") or "") for message in messages if message.get("role") not in ("assistant", None)
    ]
    return "\n".join(assistant), "\n".join(others)


def _place(model: str, tool: str, reference: str) -> int:
    """Where the reference answer stands, if tools wrote something and it is long enough not to be there by chance.

    What shares a word with the model's text may be the same answer in other words, and is not known to be absent.
    """
    if not tool or sum(each.isalnum() for each in reference) < 4:
        return 0
    pattern = re.compile(rf"(?<![\w.]){re.escape(reference)}(?![\w]|\.\d)", re.IGNORECASE)
    model, tool = (re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text) for text in (model, tool))
    if pattern.search(model):
        return IN_MODEL
    words = {word.casefold() for word in re.findall(r"\w{3,}", reference)}
    if not words or words & {word.casefold() for word in re.findall(r"\w{3,}", model)}:
        return 0
    return IN_TOOL if pattern.search(tool) else NOWHERE
