"""Launches on an emulated accelerator: a dispatch mode that times what torch computes on CPU
tensors.

Loaded into a rank when torch is there. FLOPs are those of :mod:`torch.utils.flop_counter`; its
registry lacks what torch runs on the CPU for attention, which is counted by the formula of the
GPU's, and grouped products, which are counted as the products that they are made of.

Dispatch modes belong to a thread. Autograd runs the backward pass of CPU tensors in the thread that
asks for it, where the mode is, and hands its state on to threads of its own
(``at::ThreadLocalState`` has it). Threads that the program starts enter it when they start; those
of commlayer do not, because what they compute (sums of what arrived) NCCL computes beside the
device's queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, cast

import torch
from torch.nn.attention.bias import CausalBias
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from commlayer.device_time import await_device, use_device_time
from commlayer.emulation.accelerators.device_clock import DeviceClock, device_clock

__all__ = ["Launches", "start_launches"]

Formula = Callable[..., float]
aten = torch.ops.aten

_WAITING = frozenset(
    {
        aten._local_scalar_dense,
        aten.is_nonzero,
        aten.equal,
        aten.nonzero,
        aten.masked_select,
        aten.bincount,
        aten._unique2,
        aten.unique_dim,
        aten.unique_consecutive,
    }
)
"""Operations whose result the host needs at once: a value, or a shape that depends on values."""
_NO_KERNEL = frozenset({aten.detach, aten.alias, aten.lift_fresh, aten.set_, aten.resize_, aten.is_same_size})
_THREADS_OF_OURS = "commlayer"


_NO_DISPATCH: Any = torch.Tensor.__torch_dispatch__


def _no_flops(*args: Any, **kwargs: Any) -> float:
    return 0.0


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> float:
    """The products of all groups: where both operands have groups it is a batched product; where
    one is ragged, all of its rows (or columns) meet one group's operand each, as in one product."""
    if a.dim() == b.dim() == 3:
        return float(flop_registry[aten.bmm](a, b, out_val=out_val))
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    return 2.0 * rows * inner * columns


_ALSO: dict[Any, Formula] = {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
if hasattr(aten, "_grouped_mm"):  # not in torch 2.6
    _ALSO[aten._grouped_mm] = _grouped_mm


class Launches(TorchDispatchMode):
    """Times the operations of one thread, by the clock of the process's accelerator."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads its compiler at the first operation: a second, on every rank

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        clock = device_clock()
        if clock is None:
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not _NO_DISPATCH for kind in types):
            # A DTensor, for instance: what it does with the tensors that it is made of comes here.
            return NotImplemented
        kind = _kinds.get(func)
        if kind is None:
            kind = _kinds[func] = _kind_of(func)
        return kind(self, clock, func, args, kwargs)


_entered: Callable[[], Any] = cast("Any", Launches)
"""Typed here, because torch does not annotate it."""
Kind = Callable[[Launches, DeviceClock, Any, tuple[Any, ...], dict[str, Any]], Any]
_kinds: dict[Any, Kind] = {}


def _kind_of(func: Any) -> Kind:
    """How ``func`` is treated, whatever its arguments."""
    packet = getattr(func, "_overloadpacket", None)
    formula = _ALSO.get(packet) or flop_registry.get(packet)
    if formula is not None:
        return _timed_by(formula)
    if packet is None:  # a higher-order operator, whose parts are seen one by one
        return _run
    namespace = func.namespace
    if packet in _WAITING or namespace in ("c10d", "_c10d_functional"):
        is_late_to_matter = namespace != "aten" and ("recv" in func.__name__ or "wait" in func.__name__)
        return _run if is_late_to_matter else _run_after_all
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return _run_in_parts  # in inference mode, what is made of other operations comes whole
    if func.is_view or packet in _NO_KERNEL or "empty" in func.__name__:
        return _run
    return _timed_by(_no_flops)


def _run(mode: Launches, clock: DeviceClock, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _run_after_all(mode: Launches, clock: DeviceClock, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    clock.synchronize()
    return func(*args, **kwargs)


def _run_in_parts(mode: Launches, clock: DeviceClock, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with mode:
        result = func.decompose(*args, **kwargs)
    return func(*args, **kwargs) if result is NotImplemented else result


def _timed_by(formula: Formula) -> Kind:
    def run(mode: Launches, clock: DeviceClock, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if formula is _no_flops and clock.device.bytes_per_s is None:
            return func(*args, **kwargs)
        at = clock.now()
        result = func(*args, **kwargs)
        tensors = [x for x in _tensors((args, kwargs.values(), result)) if x.device.type == "cpu"]
        if tensors:
            num_bytes = 0
            if clock.device.bytes_per_s is not None:
                # Read and written: each tensor once, an expanded one as much as it has.
                sizes = {(x.data_ptr(), x.numel()): min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors}
                num_bytes = sum(sizes.values())
            clock.launched(at, float(formula(*args, **kwargs, out_val=result)), num_bytes)
        return result

    return run


def _tensors(things: Any) -> Iterable[torch.Tensor]:
    if isinstance(things, torch.Tensor):
        yield things
    elif not isinstance(things, (str, torch.Size)) and isinstance(things, Iterable):
        for thing in things:
            yield from _tensors(thing)


def start_launches(clock: DeviceClock) -> None:
    """Give this process the accelerator of ``clock``, until its end: its main thread, and each that
    it starts."""
    first = not _started
    _started.append(clock)
    use_device_time(clock)
    if not first:
        return
    _entered().__enter__()
    CausalBias.__new__ = _made  # type: ignore[assignment,method-assign]
    _follow_threads()
    # Where a GPU's host waits. A step's end is none of those, but where programs read the clock.
    register_optimizer_step_post_hook(lambda *_: await_device())
    torch.cpu.synchronize = lambda device=None: await_device()  # as torch.cuda's waits for a GPU
    for name in ("tolist", "numpy"):
        setattr(torch.Tensor, name, _after_all(getattr(torch.Tensor, name)))


_started: list[DeviceClock] = []


def _made(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a CausalBias, which torch cannot do where a mode sees its memory made. It has none."""
    with torch._C._DisableTorchDispatch():
        return torch.Tensor.__new__(kind, *args, **kwargs)


def _after_all(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def read(*args: Any, **kwargs: Any) -> Any:
        await_device()
        return method(*args, **kwargs)

    return read


def _follow_threads() -> None:
    start = threading.Thread.start

    @wraps(start)
    def started(self: threading.Thread) -> None:
        if not self.name.startswith(_THREADS_OF_OURS):
            run = self.run

            def run_with_launches() -> None:
                with _entered():
                    run()

            self.run = run_with_launches  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = started  # type: ignore[method-assign]
