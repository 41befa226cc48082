"""Every n-th token of a step: means over them are those of all but for chance, and cost the same for any length."""

from functools import cached_property

from torch import Tensor

from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops.segments import Runs

MOST = 2**15
"""So many tokens of a step are looked at: of a longer one every second token, every third, and so on."""


class EveryNth:
    """The tokens of a block that are looked at.

    They are counted through the step, so that it does not matter where a block begins.

    Attributes:
        stride: of how many adjacent tokens of the step one is looked at.
        runs: the tokens that are looked at, by row.
    """

    def __init__(self, block: TokenBlock) -> None:
        self._block = block
        self._columns: dict[str, Tensor] = {}
        self.stride = max(1, -(-block.tokens_of_step // MOST))
        self._first = -block.tokens.start % self.stride
        self.runs = block.runs
        if self.stride > 1:
            offsets = (block.runs.offsets + (block.tokens.start + self.stride - 1)) // self.stride
            self.runs = Runs(offsets - offsets[0])

    def column(self, name: str) -> Tensor:
        """Return the values of a token column, ``[t]``."""
        if name not in self._columns:
            self._columns[name] = self.pick(self._block.column(name))
        return self._columns[name]

    @cached_property
    def trained_T(self) -> Tensor:
        """Return the mask of trained tokens, ``[t]`` bool."""
        return self.pick(self._block.trained_T)

    def pick(self, x_T: Tensor) -> Tensor:
        """Return the values at these tokens, of values of all tokens of the block, ``[T] -> [t]``."""
        return x_T if self.stride == 1 else x_T[self._first :: self.stride].contiguous()


def every_nth(block: TokenBlock) -> EveryNth:
    """Return the tokens of a block that are looked at, chosen once for all rules."""
    return block.cached("every n-th token", lambda: EveryNth(block))
