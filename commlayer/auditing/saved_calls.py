"""The file in which a rank keeps one call whose results differed: what the call was, and the bytes that went in and came out.

A line that names the format, the length of a header, the header (JSON, typed), then the bytes of the rank's input, of what the
plan gave and of what the backend's own call gave. Nothing in it is executed. A reader trusts no number in it: sizes follow from
the call, the header must be written as this version writes it, and files of different calls are not mixed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta

from commlayer.auditing.comparing import Allowance
from commlayer.engine.plain import as_bytes
from commlayer.profiles.errors import PlanError, UsageError
from commlayer.profiles.files import read_file, write_file
from commlayer.profiles.printable import printable, shortened
from commlayer.profiles.strict_json import parse_record
from commlayer.scheduler.call_moves import MovesKind
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.moves import MAX_TAGS
from commlayer.scheduler.plan import Gather, Plan, Span, Strategy
from commlayer.scheduler.rails import exchange_over
from commlayer.scheduler.traffic import Traffic
from commlayer.scheduler.wire import NATIVE, Wire
from commlayer.transport.contract import CallMemory

__all__ = [
    "MOST_SAVED_BYTES",
    "CallShape",
    "SavedCall",
    "SavedHeader",
    "read_call",
    "saved_name",
    "write_call",
]

_MAGIC = b"commlayer shadow 1\n"
_MOST_HEADER = 8 << 20
MOST_SAVED_BYTES = 1 << 30
"""A rank's call of more bytes, its input and both outputs together, is not kept."""
_MOST_RANKS = 4096
_NAME = re.compile(r"rank-(\d{5,})\.shadow")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64),
        *(torch.bool, torch.complex64, torch.complex128),
    )
}

Size = Annotated[int, Meta(ge=0, le=1 << 40)]
Count = Annotated[int, Meta(ge=1, le=MAX_TAGS)]
Place = Annotated[int, Meta(ge=0, lt=_MOST_RANKS)]


class CallShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A call as all ranks of its group know it, so that another process can make the same plan.

    ``kind``: how its moves are found. ``blocks``: bytes that each rank owns, where the caller says it.
    """

    kind: MovesKind
    traffic: Traffic
    strategy: Strategy
    chunks: Count
    pieces: Count
    gather: Gather
    wire: Wire
    span: Span
    dtype: str
    op: Literal["sum", "product", "min", "max", "band", "bor", "bxor"]
    root: Place
    nodes: tuple[tuple[Place, ...], ...]
    blocks: tuple[Size, ...] | None
    non_finite: Literal["raise", "pass"]

    @classmethod
    def of(
        cls,
        kind: MovesKind,
        plan: Plan,
        nodes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        *,
        op: str = "sum",
        root: int = 0,
        blocks: Sequence[int] | None = None,
        non_finite: str = "raise",
    ) -> CallShape:
        """The shape of a call of ``plan`` on a group with these nodes."""
        return cls(
            kind=kind,
            traffic=plan.traffic,
            strategy=plan.strategy,
            chunks=plan.chunks,
            pieces=plan.pieces,
            gather=plan.gather,
            wire=plan.wire,
            span=plan.steps[0].leg.span,
            dtype=str(dtype).removeprefix("torch."),
            op=op,  # type: ignore[arg-type]  # the plans' own names
            root=root,
            nodes=tuple(map(tuple, nodes)),
            blocks=None if blocks is None else tuple(blocks),
            non_finite=non_finite,  # type: ignore[arg-type]
        )

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return sum(map(len, self.nodes))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of its tensors."""
        return _DTYPES[self.dtype]

    @property
    def is_float_sum(self) -> bool:
        """Whether it reduces floating point, so that another order gives other bits."""
        return self.traffic.collective in ("all_reduce", "reduce_scatter") and self.torch_dtype.is_floating_point

    def allowance(self, sizes: Sequence[torch.Tensor]) -> Allowance | None:
        """How far the results of two ways may be apart; ``sizes``: of :func:`~commlayer.auditing.comparing.sizes_of`, of a
        rank's own result, reduced; none where bits must be the same."""
        if not sizes:
            return None
        is_encoded_twice = self.traffic.collective == "all_reduce" and not self.wire.is_native
        smallest = sizes[1] if len(sizes) > 1 else None
        return Allowance(
            self.op, self.size, self.torch_dtype, sizes[0], smallest, self.wire, is_result_encoded=is_encoded_twice
        )

    def own_part(self, whole: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """The elements that a rank gets of tensors as long as the input of a sum."""
        if self.traffic.collective != "reduce_scatter":
            return list(whole)
        width, n = self.torch_dtype.itemsize, self.size
        blocks = (self.traffic.logical_bytes // n,) * n if self.blocks is None else self.blocks
        start = sum(blocks[:rank]) // width
        return [each[start : start + blocks[rank] // width] for each in whole]

    @property
    def is_in_place(self) -> bool:
        """Whether input and output are one memory."""
        return self.traffic.collective in ("all_reduce", "broadcast")

    def plan(self) -> Plan:
        """Make the call's plan again. Raises PlanError for numbers of which there is none."""
        if self.kind == "over":
            return exchange_over(self.span, tuple(map(len, self.nodes)), self.traffic.logical_bytes)
        return build(self.traffic, self.strategy, self.chunks, self.gather, self.wire, self.pieces)

    def check(self) -> str:
        """Why there can be no such call; "" where there can."""
        members = sorted(member for node in self.nodes for member in node)
        if members != list(range(len(members))) or not 2 <= len(members) <= _MOST_RANKS:
            return f"nodes must hold each member of a group once, got {shortened(str(self.nodes))}"
        traffic = self.traffic
        if traffic.nodes != tuple(map(len, self.nodes)) and self.kind != "in place":
            return f"traffic is of nodes of {traffic.nodes} ranks, the group's are {shortened(str(self.nodes))}"
        if self.dtype not in _DTYPES or self.root >= len(members) or traffic.group_size != len(members):
            return f"dtype {self.dtype!r}, root {self.root} and {traffic.group_size} ranks do not fit the group"
        if self.chunks * self.pieces * len(members) > 16 * MAX_TAGS:
            return f"{self.chunks} chunks in {self.pieces} pieces over {len(members)} ranks are too many"
        if self.blocks is not None and (len(self.blocks) != len(members) or sum(self.blocks) != traffic.logical_bytes):
            return f"blocks must add up to {traffic.logical_bytes} bytes, got {shortened(str(self.blocks))}"
        if (self.kind.startswith("encoded") or self.kind == "in place") == self.wire.is_native:
            return f"a call of kind {self.kind!r} does not go in {self.wire}"
        return "" if self.wire is NATIVE or self.wire.row_elements <= 1 << 30 else "rows are too long"

    def sizes(self, rank: int, sent: Sequence[int], received: Sequence[int]) -> tuple[int, int]:
        """The bytes of a rank's input and of its output."""
        whole, n = self.traffic.logical_bytes, self.size
        if self.kind in ("split", "over", "encoded exchange"):
            return sum(sent), sum(received)
        part = whole // n if self.blocks is None else self.blocks[rank]
        collective = self.traffic.collective
        if collective == "all_gather":
            return part, whole
        return (whole, part) if collective == "reduce_scatter" else (whole, whole)


class SavedHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The header of a file, before its bytes.

    ``number``: of the group's planned calls, from 0; ``sent`` and ``received``: bytes for, and from, each member, of exchanges;
    ``first``: this rank's first element that differed, −1: none; ``said``: by the job.
    """

    call: CallShape
    group: str
    number: Size
    made_ns: Annotated[int, Meta(ge=0, le=1 << 62)]
    global_ranks: tuple[Size, ...]
    rank: Place
    sent: tuple[Size, ...]
    received: tuple[Size, ...]
    first: Annotated[int, Meta(ge=-1, le=1 << 40)]
    said: str

    def about(self) -> SavedHeader:
        """The part of it that is the same in the files of all ranks."""
        return msgspec.structs.replace(self, rank=0, sent=(), received=(), first=-1)


class SavedCall(msgspec.Struct, frozen=True):
    """One rank's file: its header, and the bytes of its input, of the plan's result and of the backend's own call's."""

    header: SavedHeader
    input: torch.Tensor
    planned: torch.Tensor
    flat: torch.Tensor


def saved_name(rank: int) -> str:
    """The name of the file of ``rank`` in the job."""
    return f"rank-{rank:05}.shadow"


def write_call(folder: Path, saved: SavedCall) -> Path:
    """Write a rank's file, which only its user may read, as the folder if it is made here. Raises OSError."""
    parts = [CallMemory(as_bytes(tensor)) for tensor in (saved.input, saved.planned, saved.flat)]
    total = sum(len(part.bytes) for part in parts)
    if total > MOST_SAVED_BYTES:
        raise OSError(f"{total} bytes are more than the {MOST_SAVED_BYTES} that are kept")
    header = msgspec.json.encode(saved.header)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / saved_name(saved.header.global_ranks[saved.header.rank])
    content = b"".join([_MAGIC, len(header).to_bytes(4, "little"), header, *(part.bytes for part in parts)])
    write_file(path, content)
    os.chmod(path, 0o600)
    return path


def read_call(path: Path) -> list[SavedCall]:
    """Read the files of all ranks of a call, in the group's order; ``path``: their folder, or one of them.

    Raises UsageError for a file that is damaged, of another format, or of another call, and where a rank's is missing.
    """
    folder = path if path.is_dir() else path.parent
    wanted = (
        path
        if path.is_file()
        else next((each for each in sorted(folder.iterdir()) if _NAME.fullmatch(each.name)), None)
    )
    if wanted is None:
        raise UsageError(
            f"{path}: expected files such as {saved_name(0)}, got none: name the folder that the warning named"
        )
    first = _read(wanted)
    found = []
    for rank, global_rank in enumerate(first.header.global_ranks):
        place = folder / saved_name(global_rank)
        if not place.exists():
            raise UsageError(
                f"{folder}: expected a file of each of ranks {shortened(str(first.header.global_ranks))}, got none of rank "
                f"{global_rank}: copy {place.name} from its machine"
            )
        saved = _read(place)
        if saved.header.about() != first.header.about() or saved.header.rank != rank:
            raise UsageError(f"{place}: expected the call of {wanted.name}, got another one: give every call a folder")
        found.append(saved)
    _check_splits(folder, [saved.header for saved in found])
    return found


def _read(path: Path) -> SavedCall:
    try:
        data = read_file(path, MOST_SAVED_BYTES + _MOST_HEADER, begins=_MAGIC)
    except OSError as error:
        raise UsageError(f"{path}: cannot read the call: {error.strerror or error}") from error
    start = len(_MAGIC) + 4
    if not data.startswith(_MAGIC) or len(data) < start:
        raise UsageError(f"{path}: expected a call that COMMLAYER_SHADOW kept, format 1, got another file")
    stop = start + int.from_bytes(data[len(_MAGIC) : start], "little")
    if stop > min(len(data), start + _MOST_HEADER):
        raise UsageError(f"{path}: expected a header, got a damaged file: copy it again")
    header = _header(path, data[start:stop])
    sizes = header.call.sizes(header.rank, header.sent, header.received)
    edges = [stop, stop + sizes[0], stop + sizes[0] + sizes[1], stop + sizes[0] + 2 * sizes[1]]
    if edges[-1] != len(data):
        raise UsageError(f"{path}: expected {edges[-1]} bytes, got {len(data)}: the file is damaged, copy it again")
    whole = torch.frombuffer(bytearray(data[stop:]) or bytearray(1), dtype=torch.uint8)
    parts = [whole[a - stop : b - stop].clone() for a, b in pairwise(edges)]
    return SavedCall(header, *parts)


def _header(path: Path, data: bytes) -> SavedHeader:
    header = parse_record(data, SavedHeader, path, "the header of a call")
    is_ours = msgspec.json.encode(header) == data
    wrong = header.call.check() if is_ours else "it is not written as this version writes it"
    size = header.call.size
    if not wrong and (len(header.global_ranks) != size or header.rank >= size or max(header.global_ranks) >= 1 << 31):
        wrong = f"ranks {shortened(str(header.global_ranks))} are not those of the group"
    is_exchange = header.call.kind in ("split", "over", "encoded exchange")
    if not wrong and not (len(header.sent) == len(header.received) == (size if is_exchange else 0)):
        wrong = "splits are missing, or of another call"
    if not wrong and any(part % header.call.torch_dtype.itemsize for part in _parts_of(header)):
        wrong = "its sizes cut elements"
    if not wrong:
        with contextlib.suppress(PlanError):
            header.call.plan()
            return header
        wrong = "no plan is of that shape"
    raise UsageError(f"{path}: no sound call: {printable(wrong)}")


def _parts_of(header: SavedHeader) -> tuple[int, ...]:
    return (*header.call.sizes(header.rank, header.sent, header.received), *(header.call.blocks or ()))


def _check_splits(folder: Path, headers: Sequence[SavedHeader]) -> None:
    if not headers[0].sent:
        return
    for a, sender in enumerate(headers):
        for b, receiver in enumerate(headers):
            if sender.sent[b] != receiver.received[a]:
                raise UsageError(
                    f"{folder}: ranks {sender.global_ranks[a]} and {sender.global_ranks[b]} exchange {sender.sent[b]} and "
                    f"{receiver.received[a]} bytes: the files are of different calls"
                )
