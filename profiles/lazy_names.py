"""Public names of a package, loaded on first use (PEP 562), so that importing the package loads next to nothing.

A package says once where its names come from, for type checkers and for this module alike:

    if TYPE_CHECKING:
        from commlayer.profiles.curve import Curve
    __all__ = ["Curve"]
    __getattr__, __dir__ = lazy_names(__name__)

The block is read from the source when the first name is asked for, as lazy_loader's ``attach_stub`` reads a stub. A table beside
the block was rejected: two lists of one thing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(package: str, modules: Sequence[str] = ()) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the functions ``__getattr__`` and ``__dir__`` of ``package`` from its ``__all__`` and its ``if TYPE_CHECKING:``.

    ``modules``: those of its own modules that are loaded on first use too.
    """
    here = sys.modules[package]

    @cache
    def homes() -> dict[str, tuple[str, str]]:
        import ast
        import linecache  # neither of which is needed where no name is asked for

        source = "".join(linecache.getlines(str(here.__file__), vars(here)))  # inspect's way, without importing inspect
        blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
        imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
        return {name.asname or name.name: (str(node.module), name.name) for node in imports for name in node.names}

    def load(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in here.__all__:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; public names: {', '.join(here.__all__)}"
            )
        home, attribute = homes()[name]
        value = getattr(import_module(home), attribute)
        setattr(here, name, value)  # the next use finds it without coming here
        return value

    def names() -> list[str]:
        return sorted({*vars(here), *here.__all__, *modules})

    return load, names
