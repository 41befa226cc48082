"""What a test proves: which values of a trainer's options, compared with what, and how closely.

A test says so with two marks, and compares with one function::

    pytestmark = [compared("package")]

    @pytest.mark.parametrize("mode", values_of("verl", "loss_mode", ["vanilla", "gspo"]))
    def test_loss(mode, dtype):
        agree(own_T, wanted_T, dtype)

`python tests/proof/table.py` (``make parity``) prints the table of all of them with the worst errors measured;
tests/proof/results.md holds it without the errors. A value of an option that no test covers fails in
`proof/test_complete.py`.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.results.errors import CannotComputeError

AGAINST = ("package", "golden", "autograd", "loop", "log")
"""The real function of the installed package, its stored results, autograd of the loss written a second time, a slow
loop that shares no code, and what the real trainer logged."""

SINGLE, DOUBLE = 1e-6, 1e-10


@dataclass(frozen=True)
class Bound:
    """Largest difference allowed, as a share of the largest magnitude.

    Attributes:
        single: in float32; None: not compared.
        double: in float64; None: not compared.
        why: the cause, needed if `single` is wider than 1e-6, `double` wider than 1e-10, or one is None.
    """

    single: float | None = SINGLE
    double: float | None = DOUBLE
    why: str = ""

    def __post_init__(self) -> None:
        plain = self.single is not None and self.single <= SINGLE and self.double is not None and self.double <= DOUBLE
        if not plain and not self.why:
            raise ValueError(f"{self}: say why it is wider than {SINGLE} and {DOUBLE}, or why one is missing")

    def at(self, dtype: torch.dtype) -> float:
        """The bound in a precision; comparing where there is none is a mistake of the test."""
        found = self.single if dtype == torch.float32 else self.double
        assert found is not None, f"{self} has no bound in {dtype}"
        return found


EXACT = Bound()
ONLY_DOUBLE = Bound(None, DOUBLE, "an identity of formulas, checked in float64 alone")


@dataclass(frozen=True)
class Claim:
    """One value of one option in one comparison."""

    trainer: str
    option: str
    value: str
    against: str
    bound: Bound
    others: tuple[tuple[str, Bound], ...] = ()
    """Quantities with a bound of their own."""

    def plain(self) -> dict[str, object]:
        """As JSON."""
        return asdict(self)


def covers(trainer: str, option: str, *values: object) -> pytest.MarkDecorator:
    """Mark a test or a parameter with values of an option, under the trainer's own names."""
    return pytest.mark.covers(trainer, option, *values)


def compared(against: str, bound: Bound = EXACT, **quantities: Bound) -> pytest.MarkDecorator:
    """Mark a module, a test or a parameter with what it is compared with; the innermost mark holds.

    Args:
        against: one of `AGAINST`.
        bound: of everything that `agree` compares.
        quantities: bounds of the quantities that `agree` names.
    """
    assert against in AGAINST, against
    return pytest.mark.compared(against, bound, **quantities)


def values_of(trainer: str, option: str, values: Iterable[object], *marks: pytest.MarkDecorator) -> list:
    """Values of an option as parameters of a test, each marked as covered."""
    return [pytest.param(value, marks=[covers(trainer, option, value), *marks], id=str(value)) for value in values]


def claims_of(item: pytest.Item) -> list[Claim]:
    """What the marks of a test claim."""
    named = list(item.iter_markers("covers"))
    if not named:
        return []
    own = [mark for mark in item.own_markers if mark.name == "compared"]
    # Marks of parameters come after those of the function.
    mark = own[-1] if own else item.get_closest_marker("compared")
    assert mark is not None, f"{item.nodeid} covers something, and does not say what it is compared with"
    against, bound = mark.args
    others = tuple(mark.kwargs.items())
    return [
        Claim(trainer, option, str(value), against, bound, others)
        for trainer, option, *values in (mark.args for mark in named)
        for value in values
    ]


@dataclass
class Measured:
    """Worst errors, by claim and precision.

    Each is a share of the magnitude, beyond what `agree` was told of upstream's rounding, and a share of what is
    allowed.
    """

    claims: list[Claim] = field(default_factory=list)
    errors: dict[tuple[Claim, str, str], tuple[float, float]] = field(default_factory=dict)
    compared: int = 0


RUNNING = Measured()
"""What the running test claims, and what was measured so far; `proof.plugin` keeps it."""


def fail_alike(match: str | None = None) -> AbstractContextManager:
    """Upstream raised where this package must; that is a comparison too."""
    RUNNING.compared += 1
    return pytest.raises(CannotComputeError, match=match)


def agree(
    own: Tensor | float | Sequence[float],
    wanted: Tensor | float | Sequence[float],
    dtype: torch.dtype,
    what: str = "",
    *,
    scale: Tensor | float | None = None,
    rounding: Tensor | float = 0.0,
    where: Tensor | None = None,
) -> None:
    """Compare within the bound that the running test is marked with, and keep the worst error.

    Args:
        own: computed here.
        wanted: computed upstream; equal infinities and NaN agree.
        dtype: the precision in which both were computed, float32 or float64.
        what: the quantity; it may have a bound of its own.
        scale: magnitude that the bound is a share of, one or one for each value; by default the largest of `wanted`.
        rounding: what upstream's own rounding may add, derived from the data, one or one for each value.
        where: positions that are compared, bool.
    """
    __tracebackhide__ = True
    assert RUNNING.claims, "the running test has no `covers` mark"
    claim = RUNNING.claims[0]
    bound = dict(claim.others).get(what, claim.bound).at(dtype)
    own_T, wanted_T = _flat(own), _flat(wanted)
    assert own_T.shape == wanted_T.shape, f"{what}: {own_T.shape} against {wanted_T.shape}"
    # Most comparisons are of a few values, for which numpy takes half of torch's time.
    size_T, rounding_T = (
        np.broadcast_to(_flat(0.0 if each is None else each), own_T.shape) for each in (scale, rounding)
    )
    if where is not None:
        kept_T = where.reshape(-1).numpy()
        own_T, wanted_T, size_T, rounding_T = (each[kept_T] for each in (own_T, wanted_T, size_T, rounding_T))
    RUNNING.compared += 1
    finite_T = np.isfinite(own_T) & np.isfinite(wanted_T)
    if not finite_T.all():
        same_T = finite_T | (own_T == wanted_T) | (np.isnan(own_T) & np.isnan(wanted_T))
        assert same_T.all(), f"{what}: {own_T[~same_T][:3].tolist()} against {wanted_T[~same_T][:3].tolist()}"
        own_T, wanted_T, size_T, rounding_T = (each[finite_T] for each in (own_T, wanted_T, size_T, rounding_T))
    if not own_T.size:
        return
    if scale is None:
        size_T = np.full_like(wanted_T, np.abs(wanted_T).max())
    error_T = np.abs(own_T - wanted_T)
    # Where everything is 0 there is no magnitude to take a share of.
    size_T = np.where(size_T > 0, size_T, 1.0)
    allowed_T = bound * size_T + rounding_T
    share_T = error_T / allowed_T
    worst = int(share_T.argmax())
    assert error_T[worst] <= allowed_T[worst], (
        f"{what}: {float(own_T[worst])!r} against {float(wanted_T[worst])!r} upstream in {dtype}, "
        f"{error_T[worst]:.3g} apart where {allowed_T[worst]:.3g} is allowed"
    )
    beyond_T = np.maximum(error_T - rounding_T, 0.0)
    found = float((beyond_T / size_T).max()), float(share_T[worst])
    precision = "float32" if dtype == torch.float32 else "float64"
    for claim in RUNNING.claims:
        key = claim, what, precision
        before = RUNNING.errors.get(key, (0.0, 0.0))
        RUNNING.errors[key] = max(before[0], found[0]), max(before[1], found[1])


def _flat(values: Tensor | float | Sequence[float]) -> NDArray[np.float64]:
    """Values as numpy's, in float64 and one axis."""
    if isinstance(values, Tensor):
        return values.detach().double().reshape(-1).numpy()
    return np.asarray(values, dtype=np.float64).reshape(-1)
