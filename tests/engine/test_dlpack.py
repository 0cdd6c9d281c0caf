"""Arrays of other libraries in an all_to_all: their own memory is sent, and a tensor comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from synthetic_profiles import synthetic_profile

from commlayer import Communicator, communicator, discover_topology
from commlayer.measure.benchmark import world_groups
from commlayer.profiles.errors import TensorError
from commlayer.testing.plugin import ClusterFactory


class Lent:
    """The least that the protocol asks of an array."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._array.__dlpack__(*args, **kwargs)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "complex64"])
def test_an_array_is_taken_where_it_is(dtype: str) -> None:
    array = np.arange(12).reshape(4, 3).astype(dtype)
    for lender in (array, Lent(array)):
        tensor = communicator._as_tensor(lender)
        assert tensor.data_ptr() == array.ctypes.data
        assert tuple(tensor.shape) == (4, 3)
        assert str(tensor.dtype) == f"torch.{dtype}"
        array[1, 2] = 99
        assert tensor[1, 2] == 99
    same = torch.ones(2, requires_grad=True)
    assert communicator._as_tensor(same) is same


@pytest.mark.cluster
def test_arrays_are_exchanged(emulated_cluster: ClusterFactory) -> None:
    """Another library's arrays, strided ones too, give what tensors give, at once and later."""

    def job() -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        topology = discover_topology()
        profile = synthetic_profile(nodes=topology.num_nodes, ranks_per_node=topology.ranks_per_node)
        with Communicator(*world_groups(topology), profile=profile, timeout_s=20.0) as members:
            array = (np.arange(24.0) + 100 * members.grid.ep_index).reshape(4, 6)
            for x in (array, array.T[:, ::2], array[:, 1:3].astype(np.int16)):
                expected = members.all_to_all(torch.from_numpy(x.copy()))
                found = members.all_to_all(Lent(x))
                later = members.all_to_all(x, async_op=True).wait()
                assert type(found) is type(later) is torch.Tensor
                assert torch.equal(found, expected)
                assert torch.equal(later, expected)
            for wrong in ([1.0, 2.0], np.array(["a", "b"])):
                with pytest.raises(TensorError, match=r"rank \d: .*__dlpack__, got a (ndarray|list)"):
                    members.all_to_all(wrong)  # type: ignore[arg-type]

    with emulated_cluster(nodes=2, ranks_per_node=2) as cluster:
        cluster.run(job)
