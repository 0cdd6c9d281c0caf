"""An extension of Griffe for the reference pages: docstrings as Markdown.

Roles such as ``:class:`Plan``` become code. A line of a section that is about several names, ``tp, ep: degrees``, is taken apart:
Griffe would read the second name as the type of the first.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([^`]+)`")
_SEVERAL = re.compile(r"^( {4})((?:\w+, )+)(\w+): ", re.MULTILINE)


class AsMarkdown(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _SEVERAL.sub(_apart, _ROLE.sub(r"`\1`", obj.docstring.value))


def _apart(line: re.Match[str]) -> str:
    indent, others, last = line.groups()
    return "".join(f"{indent}{name}: see {last}.\n" for name in others.rstrip(", ").split(", ")) + f"{indent}{last}: "
