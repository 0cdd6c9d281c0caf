"""The one reader of our JSON files, and their writer: bounded, errors that name the place, text that fits a screen."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from commlayer.profiles.errors import ProfileError, UsageError
from commlayer.profiles.files import MOST_BYTES, StrPath, read_file
from commlayer.profiles.printable import shortened

__all__ = ["convert", "each_sound", "json_kind", "parse_object", "parse_record", "pretty", "read_data", "require_field"]

_T = TypeVar("_T")
_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
_PROFILE = "commlayer profile"


def parse_object(data: bytes | str, where: str, what: str = _PROFILE) -> dict[str, Any]:
    """Read the JSON object in ``data``; ``what`` it is, messages say.

    Raises:
        UsageError: beginning with ``where``: not UTF-8, not JSON (with line and column), not an object, an object
            that names a field twice, or text with half of a surrogate pair, which could not be written again. Of a profile it is
            a ProfileError.
    """
    refused = ProfileError if what == _PROFILE else UsageError
    # The standard parser, not msgspec's: it knows line and column, and it lets NaN through to the check that can name
    # the field.
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        content = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, where, refused))
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise refused(f"{where}: expected Unicode text, got {half}, which is half of a surrogate pair") from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise refused(f"{where}: expected UTF-8 text, got byte 0x{byte:02x} at offset {error.start}") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        remedy = "measure again" if what == _PROFILE else "copy it again"
        raise refused(
            f"{where}: {place}: expected JSON, got a damaged text ({error.msg}). Restore the file, or {remedy}"
        ) from error
    except UsageError:
        raise
    except (RecursionError, ValueError) as error:  # nested too deep; a number of thousands of digits
        raise refused(
            f"{where}: expected a {what}, got JSON that no {what.removeprefix('commlayer ')} needs ({error})"
        ) from error
    if not isinstance(content, dict):
        raise refused(f"{where}: expected a JSON object with a {what}, got a JSON {json_kind(content)}")
    return content


def require_field(
    content: Mapping[str, Any],
    name: str,
    expected: object,
    where: str,
    why: str = "",
    refused: type[UsageError] = UsageError,
) -> None:
    """Raise ``refused``, which begins with ``where`` and ends with ``why``, unless field ``name`` is ``expected``."""
    value = content.get(name)
    if value != expected or isinstance(value, bool):
        got = f"got {shortened(repr(value))}" if name in content else "but it is missing"
        raise refused(f"{where}: field {name}: expected {expected!r}, {got}{why}")


def read_data(path: StrPath, what: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Read the bytes of a file that has a JSON object; ``what`` it is ("the trace of a rank"), messages say.

    Raises UsageError, which begins with the path: a file that cannot be read, is too large, or begins as no object does.
    """
    try:
        return read_file(path, most_bytes, begins=b"{")
    except OSError as error:
        raise UsageError(f"{shortened(str(path))}: cannot read {what}: {error.strerror or error}") from error


def parse_record(data: bytes, kind: type[_T], path: StrPath, what: str) -> _T:
    """Read a file's ``data`` as a ``kind`` at once: for large files that a rank has written. Raises UsageError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # also text that is not UTF-8; nested too deep
        raise UsageError(
            f"{shortened(str(path))}: expected {what}, got a damaged or foreign file: {shortened(str(error), 400)}. Copy it "
            "again, or remove it to go on without"
        ) from error


def each_sound(paths: Iterable[Path], read: Callable[[Path], _T], damaged: list[str] | None) -> Iterator[_T]:
    """Yield what ``read`` makes of each path, and put the errors of those that it refuses into ``damaged``: one damaged file
    hides no other.

    Raises UsageError, with the errors of all, at the end: where ``damaged`` is None, or nothing could be read.
    """
    is_any, errors = False, list[str]()
    for path in paths:
        try:
            content = read(path)
        except UsageError as error:  # noqa: PERF203
            errors.append(str(error))
        else:
            is_any = True
            yield content
    if errors and (damaged is None or not is_any):
        raise UsageError("\n".join(errors))
    if damaged is not None:
        damaged += errors


def json_kind(value: object) -> str:
    """The kind of a value that JSON has, by JSON's own name: object, array, string, number, boolean or null."""
    return _KINDS.get(type(value), "number")


def _unique(pairs: list[tuple[str, Any]], where: str, refused: type[UsageError]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise refused(f"{where}: field {shortened(key)}: expected it once in its object, got it again")
        content[key] = value
    return content


def convert(content: Any, target: type[_T], where: str, allowed: Mapping[str, str], *, strict: bool = True) -> _T:
    """Convert as ``msgspec.convert`` does, with errors of the form "where: field curves[0].bytes[1]: reason".

    Args:
        content: plain dicts, lists, strings and numbers.
        target: a Struct type.
        where: begins every message.
        allowed: for a field of few values, the values: msgspec names only the wrong one.
        strict: numbers are no text.

    Raises:
        ProfileError: names the field and the reason; the cause is chained.
    """
    try:
        return msgspec.convert(content, target, strict=strict)
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
    field = shortened(path.lstrip(".")) or "(the whole)"
    raise ProfileError(f"{where}: field {field}: {shortened(reason, 1000)}") from error


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
