"""Cache per object, such as a step or an evaluation, dropped with the object (weak keys)."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

Asked = TypeVar("Asked")
Found = TypeVar("Found")


def remembered(find: Callable[[Asked], Found]) -> Callable[[Asked], Found]:
    """Remember what was found of everything that is still in use; it may not hold what it was found of."""
    cache: WeakKeyDictionary[Asked, Found] = WeakKeyDictionary()

    @wraps(find)
    def inner(asked: Asked) -> Found:
        if asked not in cache:
            cache[asked] = find(asked)
        return cache[asked]

    return inner
