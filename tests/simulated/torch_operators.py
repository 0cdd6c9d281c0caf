"""The operators of a simulated device that torch sees: launched on the current stream, run later on the CPU.

One function stands for every operator of which this device has no form of its own (a boxed fallback). It asks torch's meta
device for the shapes of the results, takes memory for them, and launches the CPU's operator on the bytes of both. What needs
values to go on (``item``, ``nonzero``, a copy to the CPU), draws random numbers, or has no meta form makes the host wait for
the stream and runs at once, as on a GPU the first of these do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from commlayer.profiles.errors import InternalError, TensorError
from simulated.torch_memory import TorchMemory
from simulated.torch_streams import QueueRunner, StreamQueue

__all__ = ["DEVICE_NAME", "Operators"]

DEVICE_NAME = "simulated"
"""The device's name in torch."""

_CPU = torch._C.DispatchKey.CPU
_AT_ONCE = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_OF_CPU_INDEX = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")
_WRAPPED = (torch.float64, torch.int64, torch.bool, torch.complex128)
_MOST_SHAPES = 1024
_DLPACK_CPU, _DLPACK_EXTENSION = 1, 12
_DEVICE_TYPE_AT = 8
"""Where, in a DLTensor, the type of its device lies: behind the pointer to the data."""

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def on_device(host: torch.Tensor) -> torch.Tensor:
    """The tensor of the simulated device that shares the memory of ``host``, and holds it.

    By DLPack, the exchange format of tensors, which has a type for devices that it does not know; torch takes that for the one
    that it leaves to others.
    """
    capsule = torch._C._to_dlpack(host)
    where = _pointer_of(capsule, b"dltensor") + _DEVICE_TYPE_AT
    ctypes.c_int32.from_address(where).value = _DLPACK_EXTENSION
    made: torch.Tensor = torch._C._from_dlpack(capsule)
    return made


def _with_both_forms() -> list[str]:
    """The operators of which the CPU has a form, and other devices one made of simpler operators, which rounds otherwise."""
    of_cpu = set(torch._C._dispatch_get_registrations_for_dispatch_key("CPU"))
    found: set[str] = set()
    for key in ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"):
        found |= of_cpu & set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
    return sorted(name for name in found if name.startswith("aten::"))


def _overload(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


class _Operator:
    """What is known of one operator of torch's."""

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.name, self.label = schema.name, op.name()
        returns = schema.returns
        self.is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        self.is_view = self.is_view or schema.name in ("aten::set_",)
        self.written = [
            (place, argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.is_in_place = bool(returns) and all(r.alias_info is not None and r.alias_info.is_write for r in returns)
        self.resizes = any(argument.is_out for argument in schema.arguments)
        has_only_tensors = all(str(r.type) in ("Tensor", "List[Tensor]") for r in returns)
        self.is_at_once = not has_only_tensors or bool(_AT_ONCE & set(op.tags))
        self.is_mixed = bool(self.written) and bool(returns) and not self.is_in_place
        self.shapes: dict[Any, Any] = {}


class Operators:
    """Launches torch's operators. ``current``: the stream on which the calling thread launches."""

    def __init__(self, memory: TorchMemory, runner: QueueRunner, current: Callable[[], StreamQueue]) -> None:
        self._memory, self._runner, self._current = memory, runner, current
        self._known: dict[Any, _Operator] = {}
        self._libraries: list[Any] = []

    def register(self, streams: Callable[[torch.Stream], StreamQueue]) -> None:
        """Tell torch. Once in a process."""
        everything = torch.library.Library("_", "IMPL")
        everything.fallback(self._launch, "PrivateUse1")
        aten = torch.library.Library("aten", "IMPL")

        def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
            self._memory.use(tensor, streams(stream))

        for name, kernel in {
            "empty.memory_format": self._empty,
            "empty_strided": self._empty_strided,
            "copy_": self._copy,
            "_copy_from": self._copy_from,
            "resize_": self._resize,
            "record_stream": record_stream,
            "_fused_sdp_choice": _math_attention,
        }.items():
            aten.impl(name, kernel, "PrivateUse1")
        for name in _with_both_forms():
            aten.impl(name, partial(self._launch, _overload(name)), "PrivateUse1")
        self._libraries += [everything, aten]

    # TorchMemory

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without values, in memory of the current stream's."""
        reach = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        element = torch.empty((), dtype=dtype).element_size()
        array = self._memory.take(reach * element, self._current())
        if reach == 0:
            return on_device(torch.from_numpy(array).view(dtype).as_strided((0,), (1,))).as_strided(size, stride)
        return on_device(torch.from_numpy(array).view(dtype).as_strided(size, stride))

    def _empty(
        self,
        size: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        memory_format: Any = None,
    ) -> torch.Tensor:
        del layout, device, pin_memory
        shape = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
        return self.empty(shape.shape, shape.stride(), shape.dtype)

    def _empty_strided(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
    ) -> torch.Tensor:
        del layout, device, pin_memory
        return self.empty(size, stride, dtype or torch.get_default_dtype())

    def _resize(self, tensor: torch.Tensor, size: Sequence[int], *, memory_format: Any = None) -> torch.Tensor:
        shape = torch.empty(
            size, dtype=tensor.dtype, device="meta", memory_format=memory_format or torch.contiguous_format
        )
        made = self.empty(shape.shape, shape.stride(), tensor.dtype)
        kept = min(tensor.numel(), made.numel())
        if kept:
            made.view(-1)[:kept].copy_(tensor.reshape(-1)[:kept])
        torch.ops.aten.set_.source_Storage_storage_offset._op_dk(
            _CPU, tensor, made.untyped_storage(), 0, list(shape.shape), list(shape.stride())
        )
        return tensor

    # Copies

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        del non_blocking  # pageable memory: the host waits for what goes to it, and what comes from it is kept
        here, there = target.device.type == DEVICE_NAME, source.device.type == DEVICE_NAME
        if here:
            given = self._memory.alias(source) if there else source.detach().clone()
            taken = self._memory.alias(target)
            self._run(lambda: taken.copy_(given), "aten::copy_")
        else:
            self.synchronize("a copy to the CPU")
            target.copy_(self._memory.alias(source))
        return target

    def _copy_from(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return self._copy(target, source, non_blocking)

    # Operators

    def synchronize(self, purpose: str) -> None:
        """Have the host wait for the current stream."""
        self._runner.until(self._runner.record(self._current()), purpose)

    def _run(self, work: Callable[[], object], label: str) -> None:
        self._runner.launch(self._current(), label, work)

    def _launch(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        known = self._known.get(op)
        if known is None:
            known = self._known[op] = _Operator(op)
        if known.is_view:
            return op._op_dk(_CPU, *args, **kwargs)
        if known.name == "aten::remainder":  # of ``x % 8`` torch hands over the 8, and takes it back as a tensor only
            args = tuple(torch.tensor(each) if isinstance(each, int) else each for each in args)
        leaves, spec = tree_flatten((args, kwargs))
        self._require_same_device(known, leaves)
        self._memory.collect()
        if known.is_mixed or (known.is_at_once and not _is_sized(known, leaves)):
            return self._at_once(known, op, leaves, spec)
        if known.is_in_place and not known.resizes:
            return self._in_place(known, op, leaves, spec, args, kwargs)
        try:
            shapes = self._known_shapes(known, op, leaves, spec, _signature(args, kwargs))
        except NotImplementedError:
            known.is_at_once = True
            return self._at_once(known, op, leaves, spec)
        if known.resizes:
            self._fit(known, args, kwargs, shapes)
            return self._in_place(known, op, leaves, spec, args, kwargs)
        return self._later(known, op, leaves, spec, shapes)

    def _hosts(self, leaves: list[Any]) -> list[Any]:
        """The arguments of the CPU's operator, as they are now."""
        return [self._host(leaf) for leaf in leaves]

    def _host(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.device.type == DEVICE_NAME:
                return self._memory.alias(leaf)
            is_number = leaf.dim() == 0 and leaf.dtype in _WRAPPED  # a copy of a number takes part in promotion
            return leaf if is_number else leaf.detach().clone()
        if isinstance(leaf, torch.device) and leaf.type == DEVICE_NAME:
            return torch.device("cpu")
        return leaf

    def _known_shapes(self, known: _Operator, op: Any, leaves: list[Any], spec: Any, signature: Any) -> Any:
        """The shapes of the results, which the meta device is asked for once for arguments of the same shapes."""
        if signature is None:
            return self._shapes(op, leaves, spec)
        found = known.shapes.get(signature)
        if found is None:
            found = self._shapes(op, leaves, spec)
            if len(known.shapes) < _MOST_SHAPES:
                known.shapes[signature] = found
        return found

    @staticmethod
    def _shapes(op: Any, leaves: list[Any], spec: Any) -> Any:
        args, kwargs = tree_unflatten([_meta(leaf) for leaf in leaves], spec)
        return op(*args, **kwargs)

    def _in_place(
        self, known: _Operator, op: Any, leaves: list[Any], spec: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        given, named = tree_unflatten(self._hosts(leaves), spec)
        self._run(lambda: op(*given, **named), known.label)
        return _written(known, args, kwargs)

    def _fit(self, known: _Operator, args: Sequence[Any], kwargs: dict[str, Any], shapes: Any) -> None:
        outs = _written(known, args, kwargs)
        for out, shape in zip(_tensors(outs), _tensors(shapes), strict=True):
            if out.shape != shape.shape:
                self._resize(out, list(shape.shape))

    def _later(self, known: _Operator, op: Any, leaves: list[Any], spec: Any, shapes: Any) -> Any:
        given, named = tree_unflatten(self._hosts(leaves), spec)
        made = tree_map(self._like, shapes)
        places = [self._memory.alias(tensor) for tensor in _tensors(made)]

        def work() -> None:
            for place, result in zip(places, _tensors(op(*given, **named)), strict=True):
                if place.shape != result.shape:
                    raise InternalError(f"{known.label}: expected {list(place.shape)}, got {list(result.shape)}")
                place.copy_(result)

        self._run(work, known.label)
        return made

    def _at_once(self, known: _Operator, op: Any, leaves: list[Any], spec: Any) -> Any:
        self.synchronize(known.label)
        hosts = self._hosts(leaves)
        given, named = tree_unflatten(hosts, spec)
        results = op(*given, **named)
        own = {id(host): leaf for host, leaf in zip(hosts, leaves, strict=True) if isinstance(leaf, torch.Tensor)}
        return tree_map(lambda x: self._uploaded(x, own), results)

    def _uploaded(self, result: Any, own: dict[int, torch.Tensor]) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        if id(result) in own:
            return own[id(result)]
        made = self._like(result)
        return made if made.numel() == 0 else self._copy(made, result)

    def _like(self, shape: Any) -> Any:
        if not isinstance(shape, torch.Tensor):
            return shape
        return self.empty(shape.shape, shape.stride(), shape.dtype)

    @staticmethod
    def _require_same_device(known: _Operator, leaves: list[Any]) -> None:
        if known.name in _OF_CPU_INDEX:
            return
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.device.type != DEVICE_NAME and leaf.dim() > 0:
                raise TensorError(
                    f"{known.label}: expected all tensors on the device {DEVICE_NAME}, got one on {leaf.device}, "
                    f"shape {list(leaf.shape)}: move it there"
                )


def _is_sized(known: _Operator, leaves: list[Any]) -> bool:
    """Whether this call of an operator whose results may have any size says theirs: a lookup by numbers, not by a mask."""
    if known.name != "aten::index":
        return False
    _, *indices = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return all(index.dtype in (torch.int64, torch.int32) for index in indices)


def _signature(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The arguments on which shapes of results depend; None where these are not only tensors of the device and numbers."""
    found: list[Any] = [tuple(kwargs), torch.get_default_dtype()]
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.Tensor) and each.device.type == DEVICE_NAME:
            found.append((each.shape, each.stride(), each.dtype))
        elif each is None or isinstance(each, (bool, int, float, torch.dtype)):
            found.append((type(each), each))
        else:
            return None
    return tuple(found)


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and (leaf.device.type == DEVICE_NAME or leaf.dim() > 0):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _tensors(results: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(results)[0] if isinstance(leaf, torch.Tensor)]


def _written(known: _Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    written = [args[place] if place < len(args) else kwargs[name] for place, name in known.written]
    return written[0] if len(written) == 1 else tuple(written)


def _math_attention(*args: Any, **kwargs: Any) -> int:
    """Choose attention's form in plain operators: the others are of devices that torch knows."""
    del args, kwargs
    return 0
