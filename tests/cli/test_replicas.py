"""Several replicas of one program that write into the same folders: each is kept apart, and reported by itself."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result

from commlayer import statistics
from commlayer.auditing.at_exit import close_audit_report
from commlayer.calls import counters
from commlayer.cli.main import main
from commlayer.diagnosis.inquiry import inquiry_of
from commlayer.diagnosis.log_files import write_log
from commlayer.diagnosis.snapshot import rank_log
from commlayer.failures.detector import job_detector
from commlayer.profiles.errors import SettingsError
from commlayer.settings import Settings
from commlayer.testing.plugin import ClusterFactory


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.mark.cluster
def test_each_replica_is_reported_by_itself(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    """Two jobs of two ranks, one after the other, in the same three folders; one is torchft's, which says so in its own way."""
    folders = {name: tmp_path / name for name in ("audit", "trace", "calls")}

    def job(variable: str, name: str) -> None:
        os.environ[variable] = name
        os.environ |= {f"COMMLAYER_{each.upper()}": str(folders[each]) for each in ("audit", "trace")}
        os.environ["COMMLAYER_DIAGNOSE_DIR"] = str(folders["calls"])
        dist.init_process_group("commlayer")
        dist.all_reduce(torch.ones(1 << 16))
        detector = job_detector((0, 1))
        assert detector is not None
        folder = Path(inquiry_of(detector).folder)  # type: ignore[union-attr, arg-type]
        folder.mkdir(parents=True, exist_ok=True)
        write_log(folder, rank_log(name, dist.get_rank(), (0, 1), "asked", {}))
        dist.destroy_process_group()
        close_audit_report()

    for variable, name in (("COMMLAYER_REPLICA", "blue"), ("REPLICA_GROUP_ID", "7")):
        emulated_cluster(2, 1).run(lambda variable=variable, name=name: job(variable, name))
    names = ["blue", "replica-7"]
    for command, folder in (("audit", "audit"), ("trace", "trace"), ("diagnose", "calls")):
        assert sorted(each.name for each in folders[folder].iterdir()) == names
        told = run(command, folders[folder])
        assert told.exit_code == 0, told.output
        assert re.findall(r"^replica (\S+)", told.output, re.M) == names
        found = json.loads(run(command, folders[folder], "--json").stdout)
        assert list(found["replicas"]) == names
        one = json.loads(run(command, folders[folder] / "blue", "--json").stdout)
        assert one.keys() == found["replicas"]["blue"].keys()
        refused = run(command, folders[folder], "--output", tmp_path / "page.html")
        assert refused.exit_code != 0
        assert "2 replicas" in refused.output
        assert str(folders[folder] / "blue") in refused.output
    assert {path.name for path in folders["trace"].glob("*/merged.json")} == {"merged.json"}
    assert 'rank="1"' in run("audit", folders["audit"], "--prometheus").stdout
    # An only replica, and files that lie in the folder itself as they always did, are read as ever.
    (folders["calls"] / "replica-7").rename(tmp_path / "away")
    assert "replica" not in json.loads(run("diagnose", folders["calls"], "--json").stdout)
    assert json.loads(run("diagnose", folders["calls"] / "blue", "--json").stdout) == one


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "x" * 101, "two words"])
def test_a_name_that_is_no_folders_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="COMMLAYER_REPLICA"):
        Settings.from_environment({"COMMLAYER_REPLICA": name})


def test_the_users_name_goes_before_torchfts() -> None:
    both = {"COMMLAYER_REPLICA": "blue", "REPLICA_GROUP_ID": "7"}
    assert Settings.from_environment(both).in_replica("logs") == "logs/blue"
    assert Settings.from_environment({"REPLICA_GROUP_ID": "a/b"}).in_replica("logs") == "logs"
    assert Settings.from_environment(both).in_replica(None) is None


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_printing", None)
    monkeypatch.setattr(counters, "_groups", [])
    monkeypatch.setattr("atexit.register", lambda _: None)
    of_group = counters.GroupCounters("torchft quorum 3", 5, [0, 1])
    of_group.flat["barrier"].add(0, 1000)


@pytest.mark.usefixtures("announced")
def test_a_replicas_first_rank_prints_under_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever its rank in a quorum is."""
    statistics.print_at_exit(0)
    statistics.name_replica("west")
    statistics.name_replica("east")
    statistics._print()
    assert "commlayer, west, rank 0" in capfd.readouterr().err


@pytest.mark.usefixtures("announced")
def test_a_replicas_other_ranks_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    statistics.print_at_exit(1, "west")
    statistics._print()
    assert capfd.readouterr().err == ""
