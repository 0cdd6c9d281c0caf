"""Options of one group, as torch hands them on: ``pg_options`` of ``init_process_group`` and
``new_group``.

What the settings say for all groups of a job, these say for one. Ranks that were given different
ones hear of it when the group is made: their words travel with the addresses of its second mesh, so
that groups without options ask nobody anything more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

from torch._C._distributed_c10d import Backend

from commlayer.profiles.errors import SettingsError, UsageError
from commlayer.scheduler.lanes import LANES
from commlayer.scheduler.named_plans import AUTO, TRIED, plan_words
from commlayer.scheduler.plan import Strategy
from commlayer.scheduler.wire import WireFormat, parse_wire
from commlayer.settings import MOST_CONNECTIONS, Settings

__all__ = ["GroupOptions", "options_of"]

_TorchOptions: Any = Backend.Options
_RAREST = 1_000_000_000
_REPLAN = ("on", "audit", "off")
_REDUCTION = ("native", "ordered")


class GroupOptions(_TorchOptions):  # type: ignore[misc]  # of C++
    """Options of one group of backend ``commlayer``, instead of environment variables for all of
    them.

        dist.new_group(ranks, pg_options=GroupOptions(lane="dp", wire="bf16"))
        init_device_mesh(
            "cpu",
            (2, 4),
            mesh_dim_names=("dp", "ep"),
            backend_override={"ep": GroupOptions(lane="ep")},
        )

    All ranks of the group give the same. What is left None is as the job's settings say.

    Args:
        lane: the class of traffic, one of ``ep``, ``pp``, ``cp``, ``dp``, ``tp``; ``""``: none,
            whatever the group is called. As ``group.use_lane`` says it: calls that others go before
            are cut finely.
        wire: in which format the sums of FP32 tensors (all_reduce and reduce_scatter, SUM and AVG)
            may cross the links: ``bf16`` where the profile finds it faster, ``bf16!`` always,
            ``int8`` and ``int8!`` likewise, with a scale for each 128 elements, ``native`` never.
            What is gathered or exchanged goes as it is. On a device too, by the device's own
            profile.
        plan: one plan for every call to which it applies, such as ``hierarchical``, ``pipelined:4``
            or ``flat``; ``auto``: by the job's profile, whatever ``COMMLAYER_PLAN`` says (which,
            alone, has a job measure none); ``tried``: without a profile, the plans take turns in
            the group's first calls, and the fastest is kept (docs/plans.md).
        reduction: ``native``, or ``ordered`` for FP32 sums in rank order.
        audit: False: nobody keeps what this group's calls were promised to take and took, and it is
            not planned anew.
        replan: ``on``, ``audit`` or ``off``, as ``COMMLAYER_REPLAN``.
        shadow: of how many planned calls one runs flat too, and is compared; 0: none.
        connections: over how many connections, 1 to 32, the parts of a large message go from a rank
            to one on another node, where a plan sends it; a long link takes more bytes on its way
            than one connection keeps there.
        nccl: NCCL's own options, for tensors on CUDA.

    Raises UsageError for a value that is none of these, and for options of which one leaves another
    nothing to do.
    """

    def __init__(
        self,
        *,
        lane: str | None = None,
        wire: str | None = None,
        plan: str | None = None,
        reduction: str | None = None,
        audit: bool | None = None,
        replan: str | None = None,
        shadow: int | None = None,
        connections: int | None = None,
        nccl: Any = None,
    ) -> None:
        super().__init__("commlayer")
        _require_one_of("lane", lane, ("", *LANES))
        _require_one_of("reduction", reduction, _REDUCTION)
        _require_one_of("replan", replan, _REPLAN)
        if audit not in (None, True, False):
            _refuse("audit", "True or False", audit)
        if shadow is not None and (type(shadow) is not int or not 0 <= shadow <= _RAREST):
            _refuse("shadow", f"a whole number from 0 to {_RAREST}", shadow)
        if connections is not None and (type(connections) is not int or not 1 <= connections <= MOST_CONNECTIONS):
            _refuse("connections", f"a whole number from 1 to {MOST_CONNECTIONS}", connections)
        if nccl is not None and (not isinstance(nccl, _TorchOptions) or isinstance(nccl, GroupOptions)):
            _refuse("nccl", "ProcessGroupNCCL.Options", nccl)
        self.sum_formats = _sum_formats(wire)
        self.lane, self.wire, self.plan, self.reduction = (
            lane,
            _wire_words(wire, self.sum_formats),
            _plan_words(plan),
            reduction,
        )
        self.audit = None if audit is None else bool(audit)  # 1 is True, and one rank may say the one, one the other
        self.replan, self.shadow, self.connections, self.nccl = replan, shadow, connections, nccl
        self._check_together()

    def _check_together(self) -> None:
        """Refuse options of which one leaves another nothing to do."""
        name = (self.plan or AUTO).partition(":")[0]
        is_named = name not in (AUTO, TRIED)
        if name == Strategy.PIPELINED_COPY:
            raise UsageError(
                f"GroupOptions.plan: {name} is for tokens that a Communicator moves, and applies to no call of a group: give "
                "another plan, or plan='auto'"
            )
        if name != AUTO and WireFormat.NATIVE in self.sum_formats:
            raise UsageError(
                f"GroupOptions.wire: with plan {self.plan!r} no profile says whether {self.wire!r} is faster, so nothing would "
                f"be encoded: give wire='{self.wire}!', or plan='auto'"
            )
        is_watching = self.replan in ("on", "audit")
        if is_watching and self.audit is False:
            raise UsageError(
                f"GroupOptions.replan: {self.replan!r} compares what calls took with what was promised, and audit=False keeps "
                "neither: leave audit out, or give replan='off'"
            )
        if is_watching and is_named:
            raise UsageError(
                f"GroupOptions.replan: {self.replan!r} changes plans that a profile chose, and plan {self.plan!r} stays: give "
                "plan='auto', or replan='off'"
            )
        for option, is_asked in {"shadow": self.shadow, "connections": (self.connections or 1) > 1}.items():
            if is_asked and name == Strategy.FLAT:
                raise UsageError(
                    f"GroupOptions.{option}: it is for calls that go by a plan, and with plan='flat' none does: leave {option} "
                    "out, or give another plan"
                )

    def __copy__(self) -> GroupOptions:
        return self  # nobody changes it: one object may be given for several groups

    def __deepcopy__(self, memo: object) -> GroupOptions:
        return self

    def __repr__(self) -> str:
        return f"GroupOptions({', '.join(f'{name}={value}' for name, value in self.words().items())})"

    def words(self) -> dict[str, str]:
        """Return what was given, by name, in the same words however it was written: all ranks of a
        group must say the same."""
        names = ("lane", "wire", "plan", "reduction", "audit", "replan", "shadow", "connections")
        values = {name: getattr(self, name) for name in names}
        return {name: repr(value) for name, value in values.items() if value is not None}

    def over(self, settings: Settings) -> Settings:
        """Return the job's settings, with what these options say for their group."""
        values = {name: getattr(self, name) for name in ("reduction", "replan", "connections")}
        changes: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        if self.plan is not None:
            changes["plan"] = None if self.plan == "auto" else self.plan
        if self.shadow is not None:
            changes["shadow"] = self.shadow or None
        return replace(settings, **changes) if changes else settings


def options_of(given: Any) -> GroupOptions:
    """Read what a program gave as ``pg_options``: ours; NCCL's, which are for its tensors; Gloo's,
    of which torch uses none either; or nothing. Raises UsageError for anything else."""
    if isinstance(given, GroupOptions):
        return given
    if given is None:
        return GroupOptions()
    if not isinstance(given, _TorchOptions):
        raise UsageError(
            f"pg_options of a group of backend commlayer must be a commlayer.GroupOptions, such as GroupOptions(lane='ep'), or "
            f"torch's options of NCCL; got {given!r}"
        )
    made = GroupOptions()
    made.nccl = None if given.backend == "gloo" else given
    return made


def _require_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        _refuse(name, "one of " + ", ".join(repr(each) for each in allowed), value)


def _refuse(name: str, expected: str, got: object) -> NoReturn:
    raise UsageError(f"GroupOptions.{name}: expected {expected}, or None for what the settings say; got {got!r}")


def _plan_words(plan: object) -> str | None:
    """The plan as it is told to the other ranks."""
    if plan is None:
        return None
    if not isinstance(plan, str):
        _refuse("plan", "the name of a plan, such as 'pipelined:4'", plan)
    try:
        return plan_words(plan, "GroupOptions.plan")
    except SettingsError as error:
        raise UsageError(str(error)) from None


def _wire_words(wire: object, formats: tuple[WireFormat, ...]) -> str | None:
    """The same of the ``formats`` that ``wire`` means: ``BF16`` and ``native+bf16`` are
    ``bf16``."""
    if wire is None:
        return None
    if not formats:
        return str(WireFormat.NATIVE)
    names = "+".join(str(each) for each in formats if each is not WireFormat.NATIVE)
    return names + ("" if WireFormat.NATIVE in formats else "!")


def _sum_formats(wire: object) -> tuple[WireFormat, ...]:
    """The formats that sums may take, each once and in one order, however they were written; none
    where they go as they are."""
    if wire is None:
        return ()
    if not isinstance(wire, str):
        _refuse("wire", "bf16, int8, one of them with a ! behind it, or native", wire)
    wanted = parse_wire(wire.strip().lower())
    formats = tuple(each for each in WireFormat if each in wanted)
    if any(each in (WireFormat.FP8_E4M3, WireFormat.FP8_E5M2) for each in formats):
        raise UsageError(
            f"GroupOptions.wire: FP8 keeps three or four bits, too few for a group's own sums; got {wire!r}: use int8 or bf16 "
            "here, and say wire= where it is for activations: plan_fsdp, TokenDispatcher, GroupCommunicator (docs/compression.md)"
        )
    return () if formats == (WireFormat.NATIVE,) else formats
