"""Packages that a writer imports and does not need to write a dump: stand-ins for the make_*.py scripts beside."""

import importlib.abc
import importlib.machinery
import sys
from unittest.mock import MagicMock


class Stub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives a stand-in for every module of some packages."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path, target=None):
        known = any(name == each or name.startswith(f"{each}.") for each in self.names)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__, module.__file__ = [], spec, spec.name, None
        return module

    def exec_module(self, module):
        pass


def stub(*names):
    """Replace packages and modules by stand-ins, and everything below them."""
    sys.meta_path.insert(0, Stub(names))
