"""Sums whose terms come in a random order: `pytest -p random_order [--every N]`, or `with RandomOrder(seed)`.

Libraries choose the order of their additions by the processor, its instructions, the number of threads and the size of
the input, and a GPU adds in yet another. No number may leave its radius by that, and no verdict may change. As a
plug-in it holds for every test but those marked `one_order`, which compare bits; `--every` takes a fixed part of them.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

REDUCTIONS = {"sum", "nansum", "mean", "nanmean", "std", "var", "std_mean", "var_mean", "logsumexp", "norm"}
PRODUCTS = {"mv", "mm", "matmul", "__matmul__", "dot", "inner"}


class RandomOrder(TorchFunctionMode):
    """Put the terms of every sum of torch, and of numpy's sums over runs, in a random order.

    Attributes:
        active: how many of them are entered: none where bits may be compared.
        changed: how many sums were.
    """

    active = 0

    def __init__(self, seed=0):
        super().__init__()
        self.seed, self.changed = seed, 0
        self.patch = pytest.MonkeyPatch()

    def __enter__(self):
        RandomOrder.active += 1
        self.patch.setattr(np, "add", _Add(np.add, self))
        return super().__enter__()

    def __exit__(self, *error):
        RandomOrder.active -= 1
        self.patch.undo()
        return super().__exit__(*error)

    def order(self, count):
        """Draw an order of so many terms: as a library does, the same one each time."""
        self.changed += 1
        return torch.randperm(count, generator=torch.Generator().manual_seed(1000 * self.seed + count))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Shuffle the terms, then let torch add."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in REDUCTIONS:
            args = self._shuffled(args, kwargs)
        elif name in PRODUCTS:
            left, right, *others = args
            order = self.order(left.shape[-1])
            args = left[..., order], right.index_select(max(right.dim() - 2, 0), order), *others
        elif name == "segment_reduce" and kwargs.get("offsets") is not None:
            runs = torch.repeat_interleave(kwargs["offsets"].diff())
            args = args[0][: len(runs)][self._within(runs)], *args[1:]
        elif name in {"index_add", "index_add_"}:
            x, dim, index, source, *others = args
            order = self.order(len(index))
            args = x, dim, index[order], source.index_select(dim, order), *others
        elif name == "cumsum" and args[0].dim() == 1 and args[0].is_floating_point() and len(args[0]) > 1:
            return self._in_two(func, args, kwargs)
        return func(*args, **kwargs)

    def _shuffled(self, args, kwargs):
        x, *others = args
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or not x.numel():
            return args
        dims = kwargs.get("dim", kwargs.get("axis", others[0] if others else None))
        if not isinstance(dims, int | tuple | list) or isinstance(dims, bool) or dims == ():
            dims = range(x.dim())
        for dim in (dims,) if isinstance(dims, int) else dims:
            x = x.index_select(dim, self.order(x.shape[dim]))
        return x, *others

    def _within(self, runs):
        """Draw an order that leaves every term in its run."""
        order = self.order(len(runs))
        return order[torch.argsort(runs[order], stable=True)]

    def _in_two(self, func, args, kwargs):
        """Add up the second part for itself, as a parallel scan does."""
        x, *others = args
        at = 1 + int(self.order(len(x) - 1)[0])
        first, second = (func(part, *others, **kwargs) for part in (x[:at], x[at:]))
        return torch.cat([first, first[-1] + second])


class _Add:
    """`numpy.add`, whose sums over runs are in a random order."""

    def __init__(self, add, mode):
        self.add, self.mode = add, mode

    def __getattr__(self, name):
        return getattr(self.add, name)

    def __call__(self, *args, **kwargs):
        return self.add(*args, **kwargs)

    def reduceat(self, x, starts, axis=0, dtype=None, out=None):
        """Shuffle the terms of each run, then let numpy add."""
        if axis == 0 and np.issubdtype(x.dtype, np.floating) and len(starts) and np.all(np.diff(starts) > 0):
            runs = torch.from_numpy(np.searchsorted(starts, np.arange(len(x)), side="right"))
            x = x[self.mode._within(runs).numpy()]
        return self.add.reduceat(x, starts, axis, dtype, out)


def pytest_addoption(parser):
    """Add how many tests are left out."""
    parser.addoption("--every", type=int, default=1, metavar="N", help="run the first of every N tests of a file")


def pytest_collection_modifyitems(config, items):
    """Leave out what compares bits, and of the rest of each file all but the first of every N.

    Tests that are slow one by one are in the whole alone; of a family of which some are slow, those count as well.
    """
    every, places, left_out = config.getoption("every"), Counter(), []
    for item in items:
        slow = item.get_closest_marker("slow")
        if item.get_closest_marker("one_order") or (every > 1 and slow and slow.kwargs.get("every")):
            left_out.append(item)
            continue
        if places[item.path] % every:
            left_out.append(item)
        places[item.path] += 1
    config.hook.pytest_deselected(items=left_out)
    left = set(left_out)
    items[:] = [item for item in items if item not in left]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Run every test so."""
    with RandomOrder(len(item.nodeid)):
        return (yield)
