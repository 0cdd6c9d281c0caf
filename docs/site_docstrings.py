"""An extension of Griffe for the reference pages: the roles of docstrings, such as ``:class:`Plan```, as Markdown code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([^`]+)`")


class Roles(griffe.Extension):
    """Turns each role into the name that it is about."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
