"""JSON in and out for people: errors that name the place, and text that fits a screen. Knows nothing of profiles."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import msgspec

from commlayer.profiles.errors import ProfileError

__all__ = ["convert", "json_kind", "parse_object", "pretty"]

_T = TypeVar("_T")
_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
_PROFILE = "profile"


def parse_object(data: bytes | str, where: str, what: str = _PROFILE) -> dict[str, Any]:
    """Read the JSON object in ``data``; ``what`` it is, messages say.

    Raises:
        ProfileError: beginning with ``where``: not UTF-8, not JSON (with line and column), not an object, an object
            that names a field twice, or text with half of a surrogate pair, which could not be written again.
    """
    # The standard parser, not msgspec's: it knows line and column, and it lets NaN through to the check that can name
    # the field.
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        content = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, where))
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ProfileError(f"{where}: expected Unicode text, got {half}, which is half of a surrogate pair") from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ProfileError(f"{where}: expected UTF-8 text, got byte 0x{byte:02x} at offset {error.start}") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        remedy = "measure again" if what == _PROFILE else "copy it again"
        raise ProfileError(
            f"{where}: {place}: expected JSON, got a damaged text ({error.msg}). Restore the file, or {remedy}"
        ) from error
    except ProfileError:
        raise
    except (RecursionError, ValueError) as error:  # nested too deep; a number of thousands of digits
        raise ProfileError(f"{where}: expected a commlayer {what}, got JSON that no {what} needs ({error})") from error
    if not isinstance(content, dict):
        raise ProfileError(f"{where}: expected a JSON object with a commlayer {what}, got a JSON {json_kind(content)}")
    return content


def json_kind(value: object) -> str:
    """The kind of a value that JSON has, by JSON's own name: object, array, string, number, boolean or null."""
    return _KINDS.get(type(value), "number")


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ProfileError(f"{where}: field {key}: expected it once in its object, got it again")
        content[key] = value
    return content


def convert(content: Any, target: type[_T], where: str, allowed: Mapping[str, str]) -> _T:
    """Convert as ``msgspec.convert`` does, with errors of the form "where: field curves[0].bytes[1]: reason".

    Args:
        content: plain dicts, lists, strings and numbers.
        target: a Struct type.
        where: begins every message.
        allowed: for a field of few values, the values: msgspec names only the wrong one.

    Raises:
        ProfileError: names the field and the reason; the cause is chained.
    """
    try:
        return msgspec.convert(content, target)
    except msgspec.ValidationError as error:
        _refuse(error, where, allowed)


def _refuse(error: msgspec.ValidationError, where: str, allowed: Mapping[str, str]) -> NoReturn:
    match = re.fullmatch(r"(?P<reason>.*?)(?: - at `(?:key in )?\$\.?(?P<path>[^`]*)`)?", str(error), re.DOTALL)
    reason, path = (match["reason"], match["path"] or "") if match else (str(error), "")
    if own := re.match(r"([a-z_0-9]+(?:\[\d+\])?): ", reason):  # raised by a __post_init__: "bytes[1]: expected …"
        path, reason = f"{path}.{own[1]}", reason[own.end() :]
    elif named := re.search(r"(unknown|required) field `([^`]*)`", reason):
        path = f"{path}.{named[2]}"
        reason = "unknown field" if named[1] == "unknown" else "expected this field, but it is missing"
    elif reason.startswith("Invalid enum value"):
        got = reason.removeprefix("Invalid enum value ")
        reason = f"expected {allowed.get(path.rpartition('.')[2], 'another value')}, got {got}"
    else:
        reason = reason.replace("Expected", "expected", 1).replace("`", "")
    raise ProfileError(f"{where}: field {path.lstrip('.') or '(the whole)'}: {reason}") from error


def pretty(value: Any, indent: str = "") -> str:
    """JSON with the members of an object, and of a list of objects, one per line; any other list on one line.

    A difference between two files then shows the field, and a curve of thirty sizes stays readable.
    """
    inner = indent + "  "
    if isinstance(value, dict) and value:
        lines = [f"{inner}{json.dumps(key)}: {pretty(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, (list, tuple)) and any(isinstance(item, dict) for item in value):
        lines = [f"{inner}{pretty(item, inner)}" for item in value]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
