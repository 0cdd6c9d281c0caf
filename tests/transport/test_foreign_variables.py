"""The variables of torch, Gloo and NCCL: each is decided, the documents say how, and the decision holds."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from commlayer.profiles.errors import SettingsError
from commlayer.testing.plugin import ClusterFactory
from commlayer.transport.foreign_variables import VARIABLES, refuse_variables, variable_findings

ROOT = Path(__file__).parents[2]
TORCH = Path(torch.__file__).parent
FAMILIES = (b"TORCH_GLOO", b"GLOO", b"TORCH_DIST", b"TORCH_DISTRIBUTED", b"TORCH_NCCL", b"TORCH_FR")
NAMES = rb"(?:" + b"|".join(FAMILIES) + rb")_[A-Z0-9_]+[A-Z0-9]"
OTHERS_IN_HEADERS = rb"NCCL_[A-Z0-9_]+[A-Z0-9]"
"""The older names of torch's own; headers of torch quote no variables of NCCL's."""


NEWER = {
    "TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P",
    "TORCH_DIST_NAN_CHECK",
    "TORCH_DIST_USE_NCCL2",
    "TORCH_FR_DUMP_ON_TIMEOUT",
    "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT",
    "TORCH_NCCL_TEARDOWN_ON_TIMEOUT",
}
"""Names that torch 2.15 reads, and the torch of development does not, so that its libraries do not show them."""


def quoted_names(data: bytes, names: bytes) -> Iterator[str]:
    return (found[1].decode() for found in re.finditer(rb"[\"'](" + names + rb")[\"']", data))


def variables_of_torch() -> set[str]:
    """The variables of these families that the installed torch reads: its libraries, its headers, its Python."""
    found: set[str] = set()
    for library in sorted((TORCH / "lib").glob("libtorch_*.so")):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for family in FAMILIES:  # one after the other: a pattern that begins with a text is looked for fast
                names = re.finditer(family + rb"_[A-Z0-9_]+\0", data)
                found |= {name[0][:-1].decode() for name in names if data[name.start() - 1] == 0}
    for header in (TORCH / "include/torch/csrc/distributed").rglob("*.h*"):
        found.update(quoted_names(header.read_bytes(), NAMES + rb"|" + OTHERS_IN_HEADERS))
    for source in (TORCH / "distributed").rglob("*.py"):
        found.update(quoted_names(source.read_bytes(), NAMES))
    return found


def test_what_torch_reads_is_decided() -> None:
    found = variables_of_torch()
    assert {"TORCH_GLOO_LAZY_INIT", "GLOO_DEVICE_TRANSPORT", "TORCH_NCCL_BLOCKING_WAIT"} <= found
    undecided = sorted((found | NEWER) - VARIABLES.keys())
    assert not undecided, f"decide in commlayer/transport/foreign_variables.py, and in docs/launching.md: {undecided}"


def test_the_documents_say_what_is_decided() -> None:
    text = (ROOT / "docs/launching.md").read_text(encoding="utf-8")
    section = text.partition("## Variables of torch, Gloo and NCCL\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| `"]
    said = {name.strip("`"): (choice, does) for name, choice, does in rows}
    assert len(rows) == len(said)
    assert said == {name: (variable.choice, variable.does) for name, variable in VARIABLES.items()}


def test_a_transport_that_is_not_gloos_default_is_refused() -> None:
    for value in ("", "TCP", " tcp"):
        refuse_variables({"GLOO_DEVICE_TRANSPORT": value})
    with pytest.raises(SettingsError, match="GLOO_DEVICE_TRANSPORT must be TCP, or unset, got 'TCP_TLS'"):
        refuse_variables({"GLOO_DEVICE_TRANSPORT": "TCP_TLS"})
    assert variable_findings({"GLOO_DEVICE_TRANSPORT": "IBVERBS"})[0][0] == "bad"


def test_doctor_says_what_is_overridden() -> None:
    ((mark, _, _, words),) = variable_findings({"TORCH_GLOO_LAZY_INIT": "1"})
    assert mark == "warn"
    assert words.startswith("overridden: ")
    assert variable_findings({"TORCH_GLOO_LAZY_INIT": "0"}) == [("ok", "TORCH_GLOO_LAZY_INIT", "0", "as by default")]


@pytest.mark.cluster
def test_groups_connect_when_they_are_made_whatever_torch_is_told(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # read when the first device is made
        dist.init_process_group("commlayer", timeout=timedelta(seconds=60))
        size = dist.get_world_size()
        groups = [dist.group.WORLD, dist.new_group(), dist.new_group()]
        for group in groups:
            x = torch.ones(100_000)
            dist.all_reduce(x, group=group)
            assert bool((x == size).all())
        (peer,) = {0, 1} - {dist.get_rank()}
        y = torch.zeros(3)
        works = [dist.isend(torch.ones(3), peer, group=groups[1]), dist.irecv(y, peer, group=groups[1])]
        assert all(work is not None and work.wait() for work in works)
        assert y.tolist() == [1.0, 1.0, 1.0]
        dist.destroy_process_group()

    emulated_cluster(nodes=2, ranks_per_node=1).run(job)


@pytest.mark.cluster
def test_a_refused_transport_ends_the_job_and_says_why(emulated_cluster: ClusterFactory) -> None:
    def job() -> str:
        if os.environ["RANK"] == "1":
            os.environ["GLOO_DEVICE_TRANSPORT"] = "TCP_TLS"
        with pytest.raises(Exception, match="GLOO_DEVICE_TRANSPORT must be TCP, or unset") as error:
            dist.init_process_group("commlayer", timeout=timedelta(seconds=1000))
        return type(error.value).__name__

    cluster = emulated_cluster(nodes=2, ranks_per_node=1)
    assert cluster.run(job) == ["PeerError", "SettingsError"]
