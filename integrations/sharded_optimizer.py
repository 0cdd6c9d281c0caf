"""An optimizer whose work and state are shared out over data-parallel ranks, with parameters that
travel in a wire format.

Megatron's distributed optimizer, ZeRO's first stage: each rank keeps the *main parameters* (FP32)
of its shard and the state of the user's optimizer for it, and steps them alone. One step is::

    gradients of the model ──reduce_scatter──► of this rank's shard ──► optimizer ──► main shard ──all_gather──► model

Parameters may be gathered in FP8 (MegaScale-MoE, section 7): half of BF16's bytes. The main shard
is never rounded: what one step loses on the wire the next does not inherit. All ranks, the owner
too, compute with the same decoded bits.

The parameters become views of one flat buffer for each group and dtype, into which they are
gathered: no copy of the model is made on the way. Rejected: a whole parameter for each rank, as
torch's ZeroRedundancyOptimizer has it, which cannot be even, and sends each parameter by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commlayer.integrations.flat_buffers import all_gather_flat, reduce_scatter_flat, views_in
from commlayer.integrations.spread_parameters import refuse_spread
from commlayer.integrations.wire_choice import WireChoice, compressed_group, require_same_wire
from commlayer.profiles.errors import GroupError, TensorError, UsageError
from commlayer.scheduler.wire import ROW_ELEMENTS
from commlayer.transport.c10d import all_gather_single, reduce_scatter_single

__all__ = ["ParameterShard", "ShardedOptimizer"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Parameters of one group and dtype, flat. n ranks, s elements each, zeros behind the last
    parameter."""

    parameters: tuple[nn.Parameter, ...]
    model: torch.Tensor  # [n·s], of which they are views
    gradients: torch.Tensor  # [n·s], FP32
    main: nn.Parameter  # [s], FP32


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """The shard of one parameter. ``bounds``: of each rank of the group, which of the parameter's
    elements it has, the first and the one behind the last. ``tensors``: this rank's: the main
    parameter, and what the inner optimizer keeps for each element."""

    bounds: tuple[tuple[int, int], ...]
    tensors: tuple[torch.Tensor, ...]


class ShardedOptimizer:
    """An optimizer of shards: it steps ``parameters`` with the user's optimizer, each rank a shard
    of them.

        optimizer = ShardedOptimizer(model.parameters(), partial(torch.optim.AdamW, lr=1e-3), group,
        wire="bf16") loss.backward() optimizer.step() optimizer.zero_grad()

    Without wire formats the parameters are those of the unsharded optimizer, up to the order of
    sums; after construction and every step all ranks hold the same bits. For elementwise optimizers
    (SGD, Adam, AdamW, …): a shard knows nothing of the parameters' shapes. Construction,
    :meth:`step` and :meth:`load_state_dict` are collective.

    Args:
        parameters: of the model, or dicts of them with options, as torch's optimizers take them;
            float32, bfloat16 or float16. Those that need no gradient are left out. Their memory
            moves: make the optimizer after ``model.to(…)``.
        optimizer: makes the inner optimizer of the main shards, from dicts of parameters with
            options.
        group: the data-parallel ranks, with one model; None: all ranks.
        wire: formats in which gradients, FP32 here, may travel; None: what COMMLAYER_WIRE says of
            dp, else their own. ``in_place`` is allowed.
        parameter_wire: formats in which parameters may travel, from the model's dtype. None: their
            own, whatever COMMLAYER_WIRE says. A group of one rank sends, and rounds, nothing.
        average: gradients are the mean over ranks, as in DDP; False: the sum.

    Attributes:
        optimizer: the inner one, for learning rate schedules.

    Raises:
        TensorError: parameters of another dtype. UsageError: no parameters, one in two groups, a
            DTensor or a parameter of FSDP1, or no such format.
        GroupError: this rank is not in ``group``, or the group is not of backend commlayer, with a
            format.
        DisagreementError: ranks were given different formats.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        *,
        wire: WireChoice = None,
        parameter_wire: WireChoice = None,
        average: bool = True,
    ) -> None:
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup):  # None before init_process_group, or GroupMember.NON_GROUP_MEMBER
            raise GroupError("ShardedOptimizer needs a process group of which this rank is a member")
        self._group, self._rank, self._size = group, group.rank(), group.size()
        self._average = average
        self._reducing = compressed_group(group, wire, "dp", "gradients of ShardedOptimizer")
        chosen = "native" if parameter_wire is None else parameter_wire
        self._gathering = compressed_group(group, chosen, "dp", "parameters of ShardedOptimizer")
        require_same_wire(group, "ShardedOptimizer", self._reducing, self._gathering)
        self._buffers: list[_Buffer] = []
        inner: list[dict[str, Any]] = []
        for options in _as_groups(parameters):
            by_dtype = _by_dtype(options.pop("params"))
            made = [_make_buffer(of_dtype, self._rank, self._size) for of_dtype in by_dtype]
            self._buffers += made
            inner.append({"params": [buffer.main for buffer in made], **options})
        self.optimizer = optimizer(inner)
        self._before_reduction: list[Callable[[], object]] = []
        self.gather_parameters()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups, of main shards: for learning rates."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def step(self) -> None:
        """Reduce gradients, step the main shard, gather parameters. Raises as collectives do;
        NonFiniteError for FP8."""
        self.reduce_gradients()
        self.optimizer.step()
        self.gather_parameters()

    def zero_grad(self) -> None:
        """Drop the gradients of the model."""
        for buffer in self._buffers:
            for parameter in buffer.parameters:
                parameter.grad = None

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Make the gradients of this rank's main shards, ``grad`` of the inner optimizer's
        parameters, from those of all models, which stay as they are; one that is missing counts as
        zero. A part of :meth:`step`, for what comes between.
        """
        for hook in self._before_reduction:
            hook()
        scale = 1.0 / self._size if self._average else 1.0
        pending = []
        for buffer in self._buffers:
            for parameter, view in zip(buffer.parameters, views_in(buffer.gradients, buffer.parameters), strict=True):
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(parameter.grad).mul_(scale)
            # What lies behind the last parameter: a reduce_scatter in place has left its own there.
            buffer.gradients[sum(parameter.numel() for parameter in buffer.parameters) :].zero_()
            if buffer.main.grad is None:
                buffer.main.grad = torch.empty_like(buffer.main)
            out, x = buffer.main.grad, buffer.gradients
            if self._reducing is None:
                pending.append(reduce_scatter_single(out, x, group=self._group, async_op=True))
            else:
                pending.append(reduce_scatter_flat(self._reducing, out, x))
        for work in pending:
            work.wait()

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Gather the model's parameters from all ranks' main shards. A part of :meth:`step`."""
        pending = []
        for buffer in self._buffers:
            main = buffer.main.detach().to(buffer.model.dtype)
            if self._gathering is None:
                pending.append(all_gather_single(buffer.model, main, group=self._group, async_op=True))
            else:
                pending.append(all_gather_flat(self._gathering, buffer.model, main))
        for work in pending:
            work.wait()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks over which it shares its work out."""
        return tuple(dist.get_process_group_ranks(self._group))

    def call_before_reduction(self, hook: Callable[[], object]) -> Callable[[], None]:
        """Have ``hook`` called whenever gradients are about to be reduced, which every :meth:`step`
        begins with, until what is returned is called."""
        self._before_reduction.append(hook)
        return lambda: self._before_reduction.remove(hook)

    def shard_of(self, parameter: nn.Parameter) -> ParameterShard | None:
        """Find the shard of one of the model's parameters; None where the optimizer does not step
        it.

        The tensors are views: what is written to them is the optimizer's state.
        """
        for buffer in self._buffers:
            begin = 0
            for each in buffer.parameters:
                if each is parameter:
                    break
                begin += each.numel()
            else:
                continue
            share, numel = buffer.main.numel(), parameter.numel()
            starts = [rank * share - begin for rank in range(self._size)]
            bounds = tuple((min(max(start, 0), numel), min(max(start + share, 0), numel)) for start in starts)
            low, high = bounds[self._rank]
            first = low - starts[self._rank]
            flats = [flat for flat in self._kept(buffer).values() if flat.shape == buffer.main.shape]
            return ParameterShard(bounds, tuple(flat[first : first + high - low] for flat in flats))
        return None

    @torch.no_grad()
    def whole(self) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        """Gather the state of all shards: for each of the model's parameters ``main`` and what the
        inner optimizer keeps, in the parameter's shape; numbers of all elements alike, such as
        ``step``, as they are. Collective. It takes the memory of all ranks' shards on each of them;
        ``load_whole`` takes it on any number of ranks."""
        state: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        for buffer in self._buffers:
            for name, flat in self._kept(buffer).items():
                if flat.shape == buffer.main.shape:
                    gathered = flat.new_empty(self._size * flat.numel())
                    all_gather_single(gathered, flat, group=self._group)
                    views = views_in(gathered, buffer.parameters)
                else:
                    views = [flat] * len(buffer.parameters)
                for parameter, view in zip(buffer.parameters, views, strict=True):
                    state.setdefault(parameter, {})[name] = view
        return state

    @torch.no_grad()
    def load_whole(self, state: dict[nn.Parameter, dict[str, torch.Tensor]]) -> None:
        """Take what :meth:`whole` gave, on this or another number of ranks, and gather the model's
        parameters. Collective.

        The inner optimizer has its state already, of whatever values. Raises UsageError for
        parameters that are missing.
        """
        for buffer in self._buffers:
            if any(parameter not in state for parameter in buffer.parameters):
                raise UsageError(f"rank {dist.get_rank()}: the state has not all parameters of this ShardedOptimizer")
            for name, flat in self._kept(buffer).items():
                if flat.shape != buffer.main.shape:
                    flat.copy_(state[buffer.parameters[0]][name])
                    continue
                full = flat.new_zeros(self._size * flat.numel())
                for parameter, view in zip(buffer.parameters, views_in(full, buffer.parameters), strict=True):
                    view.copy_(state[parameter][name])
                flat.copy_(full.view(self._size, -1)[self._rank])
        self.gather_parameters()

    def _kept(self, buffer: _Buffer) -> dict[str, torch.Tensor]:
        state = self.optimizer.state.get(buffer.main, {})
        tensors = {name: state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)}
        return {"main": buffer.main.detach(), **tensors}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's shard: main parameters, the inner optimizer's state, and
        of which shard. Each rank saves its own.
        """
        return {
            "main": [buffer.main.detach().clone() for buffer in self._buffers],
            "optimizer": self.optimizer.state_dict(),
            "shard": self._shard(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a shard that :meth:`state_dict` gave, and gather the model's parameters.

        Raises UsageError for the shard of another rank, size of group, or model, and what the inner
        optimizer refuses: before anything is changed.
        """
        if state["shard"] != self._shard():
            raise UsageError(
                f"rank {dist.get_rank()}: the state is of shard {state['shard']}, here it is {self._shard()} (rank and size of "
                "the group, elements of its buffers): each rank loads what it saved, with the same model and group"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        for buffer, main in zip(self._buffers, state["main"], strict=True):
            buffer.main.copy_(main)
        self.gather_parameters()

    def _shard(self) -> tuple[int, int, list[int]]:
        return self._rank, self._size, [buffer.model.numel() for buffer in self._buffers]


def _as_groups(parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Dicts with "params", a list of those that need gradients. Raises UsageError for none, or one
    that comes twice."""
    options_of_groups: list[Any] = list(parameters)
    if not options_of_groups or not isinstance(options_of_groups[0], dict):
        options_of_groups = [{"params": options_of_groups}]
    groups = []
    seen: set[int] = set()
    for options in options_of_groups:
        trained = [parameter for parameter in options["params"] if parameter.requires_grad]
        refuse_spread(
            ((f"the parameter {index} of its group, {list(each.shape)},", each) for index, each in enumerate(trained)),
            "ShardedOptimizer",
            "each of its ranks holds a shard already; give it to the optimizer itself, and ShardedOptimizer the others",
        )
        ids = {id(parameter) for parameter in trained}
        if ids & seen or len(ids) < len(trained):
            raise UsageError("a parameter comes twice: name each once, in one group")
        seen |= ids
        if trained:
            groups.append({**options, "params": trained})
    if not groups:
        raise UsageError("ShardedOptimizer has nothing to step: no parameter needs a gradient")
    return groups


def _by_dtype(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """In the order of their first. Raises TensorError for a dtype that no FP32 main parameter
    stands for."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.dtype not in _DTYPES:
            raise TensorError(f"expected parameters of float32, bfloat16 or float16, got {parameter.dtype}")
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    return list(by_dtype.values())


def _make_buffer(parameters: list[nn.Parameter], rank: int, size: int) -> _Buffer:
    """Move the parameters into a new buffer."""
    first = parameters[0]
    total = sum(parameter.numel() for parameter in parameters)
    # Whole rows: blocks that share a scale never cross from one rank's shard to the next's.
    share = -(-total // (size * ROW_ELEMENTS)) * ROW_ELEMENTS
    model = torch.zeros(size * share, dtype=first.dtype, device=first.device)
    for parameter, view in zip(parameters, views_in(model, parameters), strict=True):
        view.copy_(parameter.detach())
        parameter.data = view
    main = model.view(size, share)[rank].to(torch.float32, copy=True)
    gradients = torch.zeros_like(model, dtype=torch.float32)
    return _Buffer(tuple(parameters), model, gradients, nn.Parameter(main))
