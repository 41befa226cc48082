"""Changes of the real code itself, for a while."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from math import sqrt

import torch
from parity.real_runs import trl_class
from parity.real_setup import SIZE
from torch import Tensor


@contextmanager
def _edited(trainer: str, function: str, change: ast.NodeTransformer) -> Iterator[None]:
    """TRL's own function with an edit of its syntax tree."""
    cls = trl_class(trainer)
    real = getattr(cls, function)
    tree = change.visit(ast.parse(textwrap.dedent(inspect.getsource(real))))
    made: dict[str, object] = {}
    exec(compile(ast.fix_missing_locations(tree), function, "exec"), vars(sys.modules[cls.__module__]), made)
    setattr(cls, function, made[function])
    try:
        yield
    finally:
        setattr(cls, function, real)


class _Constant(ast.NodeTransformer):
    def __init__(self, old: float, new: float) -> None:
        self.old, self.new = old, new

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(self.new) if node.value == self.old else node


class _Assigned(ast.NodeTransformer):
    """Another value for the first assignment to a name."""

    def __init__(self, name: str, value: str) -> None:
        self.name, self.value, self.done = name, value, False

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        (target,) = node.targets
        if isinstance(target, ast.Name) and target.id == self.name and not self.done:
            self.done = True
            node.value = ast.parse(self.value, mode="eval").body
        return node


def trl_epsilon(trainer: str, value: float):
    return lambda: _edited(trainer, "_generate_and_score_completions", _Constant(1e-4, value))


def trl_kl(expression: str):
    words = expression.replace("policy", "per_token_logps").replace("ref", "ref_per_token_logps")
    return lambda: _edited("trl", "_compute_loss", _Assigned("per_token_kl", words))


@contextmanager
def biased() -> Iterator[None]:
    """verl's standard deviations divide by n."""
    real = torch.std
    torch.std = lambda x, *args, **kwargs: real(x, *args, unbiased=False, **kwargs)
    try:
        yield
    finally:
        torch.std = real


@contextmanager
def biased_groups() -> Iterator[None]:
    """TRL's standard deviations of groups divide by n."""
    module = sys.modules[trl_class("trl").__module__]
    real = module.nanstd

    def nanstd(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        return real(x) if dim is None else real(x, dim=dim, keepdim=keepdim) * sqrt((SIZE - 1) / SIZE)

    module.nanstd = nanstd
    try:
        yield
    finally:
        module.nanstd = real


@contextmanager
def verl_epsilon(value: float = 1e-4) -> Iterator[None]:
    from verl.trainer.ppo import core_algos

    function = inspect.unwrap(core_algos.get_adv_estimator_fn("grpo"))
    real = function.__defaults__
    assert real.count(1e-6) == 1
    function.__defaults__ = tuple(value if each == 1e-6 else each for each in real)
    try:
        yield
    finally:
        function.__defaults__ = real
