"""Ranks tell each other data only: the codec, its fuzz, and a check that the source has no other way of reading."""

from __future__ import annotations

import ast
import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlayer import __version__
from commlayer.agree import discovery, tree
from commlayer.agree import messages as agree_codec
from commlayer.agree.discovery import Member
from commlayer.agree.messages import (
    ControlMessage,
    Peers,
    Reason,
    check_alike,
    decode,
    encode,
    gather_messages,
)
from commlayer.backend import world
from commlayer.measure import calibrate
from commlayer.measure.all_ranks import ProfileText
from commlayer.peer_words import LIMIT_BYTES
from commlayer.profiles.errors import DisagreementError, ProfileNotFoundError

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("commlayer", "profiles", "scheduler", "integrations", "benchmarks")

small = st.integers(min_value=-(2**63), max_value=2**63 - 1)
ranks = st.lists(small, max_size=4).map(tuple)
reasons = st.none() | st.builds(Reason, st.text(), st.text())
values = st.dictionaries(st.text(), st.text(), max_size=3)
MESSAGES: dict[type[ControlMessage], st.SearchStrategy[Any]] = {
    Member: st.builds(Member, small, st.text(), ranks, ranks, values, small, reasons),
    Reason: st.builds(Reason, st.text(), st.text()),
    ProfileText: st.builds(ProfileText, st.text()),
    world._Card: st.builds(world._Card, values, reasons),
    calibrate._Held: st.builds(calibrate._Held, st.text(), reasons),
    tree._Entry: st.builds(tree._Entry, st.text(), st.binary()),
    tree._Bundle: st.builds(
        tree._Bundle,
        st.lists(st.binary(), max_size=3).map(tuple),
        st.lists(st.tuples(small, small, small), max_size=3).map(tuple),
        st.none() | st.text(),
    ),
    agree_codec._Row: st.builds(
        agree_codec._Row, ranks, st.lists(st.binary(), max_size=3).map(tuple), st.none() | st.text()
    ),
}


@given(st.data())
def test_what_is_told_is_what_is_read(data: st.DataObject) -> None:
    type_ = data.draw(st.sampled_from(list(MESSAGES)))
    value = data.draw(MESSAGES[type_])
    assert decode(encode(value), type_, "rank 0") == value


def read(words: bytes, type_: type[ControlMessage]) -> None:
    """Either a message of the type, or the one error that says who and why."""
    try:
        assert type(decode(words, type_, "rank 7")) is type_
    except DisagreementError as error:
        assert "rank 7" in str(error)  # noqa: PT017
        assert "start the same commlayer" in str(error)  # noqa: PT017


@given(st.binary(max_size=300), st.sampled_from(list(MESSAGES)))
def test_any_bytes_are_read_or_refused(words: bytes, type_: type[ControlMessage]) -> None:
    read(words, type_)


@given(st.binary(max_size=300), st.sampled_from(list(MESSAGES)))
def test_any_content_in_a_sound_envelope_is_read_or_refused(content: bytes, type_: type[ControlMessage]) -> None:
    head = msgspec.msgpack.encode([__version__, type_.__name__])
    read(b"\x93" + head[1:] + content, type_)


@given(st.data())
def test_a_damaged_message_is_read_or_refused(data: st.DataObject) -> None:
    type_ = data.draw(st.sampled_from(list(MESSAGES)))
    words = bytearray(encode(data.draw(MESSAGES[type_])))
    for _ in range(data.draw(st.integers(1, 4))):
        words[data.draw(st.integers(0, len(words) - 1))] = data.draw(st.integers(0, 255))
    read(bytes(words[: data.draw(st.integers(0, len(words)))]), type_)
    read(bytes(words) + data.draw(st.binary(max_size=4)), type_)


def refused(words: bytes, type_: type[ControlMessage] = Member) -> str:
    with pytest.raises(DisagreementError) as caught:
        decode(words, type_, "rank 3")
    return str(caught.value)


def enveloped(type_: type[ControlMessage], content: Any, version: str = __version__) -> bytes:
    return msgspec.msgpack.encode([version, type_.__name__, content])


@pytest.mark.parametrize("length", [2**16, 2**28, 2**32 - 1])
def test_an_announced_list_takes_no_memory(length: int) -> None:
    words = enveloped(ProfileText, {"json": ""})
    assert "truncated" in refused(words.replace(b"\xa0", b"\xdd" + length.to_bytes(4, "big")), ProfileText)
    row = enveloped(agree_codec._Row, {"ranks": [1], "words": []})
    assert "truncated" in refused(row.replace(b"\x90", b"\xdd" + length.to_bytes(4, "big")), agree_codec._Row)


def test_deep_nesting_is_refused() -> None:
    assert "recursion" in refused(b"\x93\xa0\xa0" + b"\x91" * 500_000).lower()


def test_fields_that_are_unknown_missing_or_of_another_type_are_refused() -> None:
    sound = msgspec.to_builtins(Member(0, "host", (0,), (0,)))
    assert decode(enveloped(Member, sound), Member, "rank 3").rank == 0
    assert "unknown field `colour`" in refused(enveloped(Member, sound | {"colour": "red"}))
    assert "missing required field `rank`" in refused(
        enveloped(Member, {k: v for k, v in sound.items() if k != "rank"})
    )
    assert "Expected `int`, got `str`" in refused(enveloped(Member, sound | {"rank": "0"}))
    assert "versions may differ" in refused(enveloped(Member, []))


def test_the_error_says_which_versions_and_which_message() -> None:
    assert f"it runs commlayer '9.9', this rank '{__version__}'" in refused(enveloped(Member, {"rank": 0}, "9.9"))
    text = refused(encode(ProfileText("")))
    assert "what rank 3 says cannot be read: expected a Member, got a 'ProfileText'" in text
    assert "it makes another call" in text
    assert len(refused(enveloped(Member, {}, "9" * 10_000))) < 500


def test_a_pickle_is_refused() -> None:
    assert "expected a Member of commlayer, got 5 bytes" in refused(pickle.dumps(0)[:5])


def test_a_reason_travels_as_its_class_and_text() -> None:
    reason = Reason.of(ProfileNotFoundError("no such profile"))
    assert str(decode(encode(reason), Reason, "rank 0")) == "ProfileNotFoundError: no such profile"
    assert len(encode(Reason.of(ValueError("é" * 2**21)))) < LIMIT_BYTES


class OtherRankSays:
    """A group of two, of which the other one sends ``words``."""

    def __init__(self, words: bytes) -> None:
        self.words = torch.frombuffer(bytearray(words), dtype=torch.uint8)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Any:
        (mine, other), (value,) = outputs[0], inputs
        mine.copy_(value)
        if value.dtype == torch.int64:
            other.fill_(self.words.numel())
        else:
            other[: self.words.numel()] = self.words
        return self

    def wait(self, *_: object) -> None:
        return


def told(words: bytes) -> list[ProfileText]:
    peers = Peers(OtherRankSays(words), (4, 9), 0, torch.device("cpu"))
    return gather_messages(ProfileText("mine"), ProfileText, peers, 1.0, "to test")


def test_a_gather_reads_words_of_any_length_up_to_the_limit() -> None:
    for text in ("", "theirs", "theirs" * 10_000, "ends in zeros\0\0"):
        assert told(encode(ProfileText(text))) == [ProfileText("mine"), ProfileText(text)]
    longest = encode(ProfileText("x" * (LIMIT_BYTES - 100)))
    assert len(told(longest + b"")[1].json) == LIMIT_BYTES - 100
    with pytest.raises(
        DisagreementError, match="rank 9 says cannot be read: expected 1 to 1048576 bytes, it announces"
    ):
        told(encode(ProfileText("x" * LIMIT_BYTES)))
    with pytest.raises(DisagreementError, match="rank 9 says cannot be read: expected a ProfileText"):
        told(b"junk")


def test_what_must_be_alike_is_compared_by_name_also_where_a_rank_has_more_names() -> None:
    check_alike([(0, {"version": "1"}), (1, {"version": "1"})])
    with pytest.raises(DisagreementError, match="ranks disagree on version: rank 0 has 1, rank 5 has 2"):
        check_alike([(0, {"version": "1"}), (1, {"version": "1"}), (5, {"version": "2"})])
    with pytest.raises(DisagreementError, match="rank 32 has 2 and 4063 more ranks: start all ranks") as caught:
        check_alike([(rank, {"version": "2" if rank else "1"}) for rank in range(4096)])
    assert len(str(caught.value)) < 1000
    for everyones in ([(0, {}), (1, {"new": "1"})], [(0, {"new": "1"}), (1, {})]):
        with pytest.raises(DisagreementError, match=r"ranks disagree on new: rank 0 has .*, rank 1 has"):
            check_alike(everyones)


def member(rank: int, ep: tuple[int, ...], tp: tuple[int, ...], **more: Any) -> Member:
    return Member(rank, "host", ep, tp, **more)


FIRST_ROW = [(0, member(0, (0, 2), (0, 1))), (1, member(1, (1, 3), (0, 1)))]


@pytest.mark.parametrize(
    ("rank", "described"),
    [
        (3, member(7, (1, 3), (2, 3))),  # as another rank
        (3, member(3, (1, 5), (2, 3))),  # outside its ep group
        (3, member(3, (1, 3), (2, 9))),  # of another tp group
        (0, member(0, (0, 2), (2, 0), serial=9)),  # otherwise than to the other row
    ],
)
def test_a_description_that_no_group_can_give_names_its_rank(rank: int, described: Member) -> None:
    sound = [(2, member(2, (0, 2), (2, 3))), (3, member(3, (1, 3), (2, 3)))]
    discovery._check_told([FIRST_ROW, sound])
    second = [(2, member(2, (0, 2), (2, rank))), (rank, described)]
    with pytest.raises(DisagreementError, match=f"rank {rank} says that it is rank {described.rank} of the ep group"):
        discovery._check_told([FIRST_ROW, second])


@pytest.mark.parametrize(("ranks", "words"), [((2, 3), 1), ((2, 2), 2), ((3, 4), 2), ((), 0)])
def test_a_row_that_is_not_its_tellers_is_refused(ranks: tuple[int, ...], words: int) -> None:
    row = agree_codec._Row(ranks, (encode(ProfileText("")),) * words)
    with pytest.raises(DisagreementError, match="rank 2 says cannot be read: expected the words of its row"):
        agree_codec._opened(row, ProfileText, 2)


# The source has no other way of reading what comes from outside.

FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_NAMES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
    "_object_to_tensor",
    "_tensor_to_object",
}
ALLOWED = {
    "commlayer/emulation/rank_process.py",
    "commlayer/emulation/forked_ranks.py",
    "commlayer/diagnosis/recorder_dumps.py",
    "benchmarks/hangs.py",
    "benchmarks/hangs_at_scale.py",
}
"""One process tree of one user, dumps of torch's that are read as data, and dumps that were just made: see their docstrings."""
WRITES = {"commlayer/diagnosis/flight_recorder.py"}
"""Writes a pickle, for torch's own analyzer takes no other format; and reads none."""


def is_true(call: ast.Call, name: str) -> bool:
    return any(k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is True for k in call.keywords)


def offences_of_call(call: ast.Call) -> Iterator[str]:
    if isinstance(call.func, ast.Name) and call.func.id in ("eval", "exec", "__import__"):
        yield call.func.id
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.func.attr == "load":
        if call.func.value.id == "torch" and not is_true(call, "weights_only"):
            yield "torch.load without weights_only=True"
        if call.func.value.id == "yaml":
            yield "yaml.load"
    if is_true(call, "allow_pickle"):
        yield "allow_pickle"


def offences(source: str) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if (node.module or "").split(".")[0] in FORBIDDEN_MODULES and node.module else []
            found += [alias.name for alias in node.names if alias.name in FORBIDDEN_NAMES]
            found += ["torch.load" for alias in node.names if node.module == "torch" and alias.name == "load"]
        elif isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_NAMES:
            found.append(node.attr)
        elif isinstance(node, ast.Call):
            found += offences_of_call(node)
    return found


def test_no_source_runs_what_comes_from_outside() -> None:
    found = {}
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 150
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        if name in WRITES:
            assert "pickle.dumps(" in text
            assert "pickle.load" not in text
        elif name not in ALLOWED and (here := offences(text)):
            found[name] = here
    assert not found


def test_the_allowed_files_need_it_and_say_why() -> None:
    for name in ALLOWED:
        source = (ROOT / name).read_text(encoding="utf-8")
        assert offences(source)
        assert "pickle" in (ast.get_docstring(ast.parse(source)) or "")


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def later():\n    import pickle as p",
        "from pickle import loads",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "dist.broadcast_object_list([1])",
        "from torch.distributed import gather_object",
        "torch.load('x')",
        "torch.load('x', weights_only=False)",
        "from torch import load",
        "eval('1')",
        "exec(text)",
        "numpy.load('x', allow_pickle=True)",
        "yaml.load(text)",
        "import marshal",
    ],
)
def test_what_is_forbidden_is_found(source: str) -> None:
    assert offences(source)


@pytest.mark.parametrize("source", ["torch.load('x', weights_only=True)", "model.eval()", "json.loads(x)", "load(x)"])
def test_what_is_allowed_is_not_found(source: str) -> None:
    assert not offences(source)


def messages(type_: type[Any]) -> Iterator[type[Any]]:
    for each in type_.__subclasses__():
        yield each
        yield from messages(each)


def test_every_message_is_frozen_and_strict() -> None:
    found = list(messages(ControlMessage))
    assert set(MESSAGES) <= set(found)
    for each in found:
        config = each.__struct_config__
        assert config.frozen, each
        assert config.forbid_unknown_fields, each
        assert not dataclasses.is_dataclass(each)
