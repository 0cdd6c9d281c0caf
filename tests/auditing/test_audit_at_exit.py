"""Audits as ranks write and print them: at exit, meanwhile, and not in children; two jobs on the emulated cluster."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from commlayer.auditing import at_exit
from commlayer.auditing.at_exit import AuditReport, agreed_job
from commlayer.auditing.audit_files import audit_name, read_audits
from commlayer.auditing.job_audit import merge_audits
from commlayer.auditing.ledger import Ledger
from commlayer.profiles import catalog
from commlayer.profiles.curve import Curve
from commlayer.profiles.profile import Profile
from commlayer.scheduler.experience.link_rates import LinkRates
from commlayer.testing.plugin import ClusterFactory


def profile_2x2() -> Profile:
    """A profile of two nodes of two ranks, with the times of one of two nodes of four."""
    base = catalog.load("emulated-2x4")
    curves: dict[tuple[str, str, int], Curve] = {}
    for curve in base.curves:
        small = msgspec.structs.replace(curve, group_size={8: 4, 4: 2}.get(curve.group_size, curve.group_size))
        curves.setdefault(small.key, small)
    return base.replace(name="small", topology="2x2", curves=curves.values())


class OneStore:
    """A store of one process."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        assert expected == ""
        return self.kept.setdefault(key, desired).encode()


def test_ranks_agree_on_the_jobs_name() -> None:
    store = OneStore()
    assert agreed_job(store) == agreed_job(store)
    assert agreed_job(OneStore()) != agreed_job(store)


def report(folder: Path | None, *, is_printed: bool = False) -> AuditReport:
    return AuditReport(job="j", rank=0, world_size=2, folder=folder, is_printed=is_printed)


def test_the_file_is_written_once_more_at_the_end_and_not_after(tmp_path: Path) -> None:
    open_ = report(tmp_path / "new")
    open_.write()
    (audit,) = read_audits(tmp_path / "new")
    assert (audit.is_final, audit.rank, audit.groups) == (False, 0, ())
    open_.close()
    assert read_audits(tmp_path / "new")[0].is_final
    (tmp_path / "new" / audit_name(0)).unlink()
    open_.close()
    open_.write()
    assert not (tmp_path / "new" / audit_name(0)).exists()


def test_the_file_is_written_while_the_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that a signal ends has left a file."""
    monkeypatch.setattr(at_exit, "_EVERY_S", 0.01)
    open_ = report(tmp_path)
    while not (tmp_path / audit_name(0)).exists():
        time.sleep(0.01)  # pytest's own time limit ends this where nothing is written
    assert not read_audits(tmp_path)[0].is_final
    open_.close()


def test_a_rank_that_a_signal_ends_has_left_what_it_wrote_last(tmp_path: Path) -> None:
    """torchrun's agent sends SIGTERM to the ranks that are left."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        report(tmp_path).write()
        signal.alarm(60)
        signal.pause()
    while not (tmp_path / audit_name(0)).exists():
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    assert not read_audits(tmp_path)[0].is_final


def test_the_file_of_a_job_that_is_over_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_ = report(tmp_path)
    monkeypatch.setattr(at_exit, "_report", open_)
    at_exit.note_job_over()
    open_.write()
    assert read_audits(tmp_path)[0].is_final
    open_.close()


def test_a_child_writes_and_prints_nothing(tmp_path: Path, capfd: Any) -> None:
    open_ = report(tmp_path, is_printed=True)
    pid = os.fork()
    if pid == 0:
        open_.write()
        open_.close()
        os._exit(0 if at_exit.audit_report() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert list(tmp_path.iterdir()) == []
    open_.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    open_ = report(tmp_path / "file")
    open_.write()
    open_.close()
    err = capfd.readouterr().err
    assert err.count("commlayer: rank 0: the audit cannot be written to") == 1


PROGRAM = """
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("commlayer")
half = dist.new_group([0, 2], group_desc="half")
x = torch.ones(1 << 16)
for _ in range(3):
    dist.all_reduce(x)
if dist.get_rank() in (0, 2):
    dist.all_reduce(x[:1000], group=half)
dist.destroy_process_group()
"""


def test_a_job_leaves_a_file_of_each_rank_and_a_table_of_rank_0(
    emulated_cluster: ClusterFactory, capfd: Any, tmp_path: Path
) -> None:
    profile_2x2().save(tmp_path / "profile.json")
    variables = {"COMMLAYER_PROFILE": str(tmp_path / "profile.json"), "COMMLAYER_AUDIT": str(tmp_path / "audit")}
    variables |= {"COMMLAYER_STATS": "1", "COLUMNS": "200"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        status = emulated_cluster(2, 2).command([sys.executable, "-c", PROGRAM], timeout_s=100)
    out = capfd.readouterr()
    assert status == 0, out.err
    audits = read_audits(tmp_path / "audit")
    assert [(audit.rank, audit.is_final, len(audit.groups)) for audit in audits] == [
        (0, True, 2),
        (1, True, 1),
        (2, True, 2),
        (3, True, 1),
    ]
    assert len({audit.job for audit in audits}) == 1
    job = merge_audits(audits)
    whole, half = job.groups
    assert [(calls.collective, calls.num_calls, calls.rank_calls) for calls in whole.calls] == [("all_reduce", 3, 12)]
    assert (half.ranks, half.nodes, half.description) == ((0, 2), ((0,), (2,)), "half")
    assert all(calls.promised_us > 0 and calls.measured_us > 0 for group in job.groups for calls in group.calls)
    text = out.out + out.err
    assert text.count("what calls were promised to take and took on rank 0") == 1
    assert "half (" in text


def test_an_audit_says_which_links_have_changed(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    path, folder = tmp_path / "profile.json", tmp_path / "audit"
    profile_2x2().save(path)

    def job() -> None:
        os.environ.update(COMMLAYER_PROFILE=str(path), COMMLAYER_AUDIT=str(folder), COMMLAYER_REPLAN="off")
        torch.set_num_threads(1)
        dist.init_process_group("commlayer")
        group: Any = dist.group.WORLD
        dist.all_reduce(torch.ones(1000))
        ledger, choices = group.instruments.find(Ledger), group._planned.choices
        ledger.use_choices(choices.at_other_rates(LinkRates(0.5, (1.0, 0.5))))
        dist.barrier()
        dist.destroy_process_group()

    emulated_cluster(2, 2).run(job)
    (group,) = merge_audits(read_audits(folder)).groups
    assert group.fabric_rate == pytest.approx(0.5)
    assert [(node.ranks, node.rate) for node in group.slow_nodes] == [((2, 3), 0.5)]
