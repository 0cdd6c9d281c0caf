"""The programs in docs/trainers and docs/launching.md run, and give the losses that they give on Gloo."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_deepspeed
import tiny_megatron
import torch
from judged import check_words, no_alarms, nothing_is_light, plans, said  # noqa: F401  fixtures among them
from megatron_on_cpu import stand_in_for_cuda
from synthetic_profiles import synthetic_profile
from torch.distributed.run import get_args_parser

import commlayer.backend.create
from commlayer.profiles.curve import Curve
from commlayer.profiles.links import Resource
from commlayer.settings import Settings
from commlayer.statistics import Stats, stats
from commlayer.testing.plugin import ClusterFactory

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
PAGES = [*sorted(DOCS.glob("trainers/*.md")), DOCS / "launching.md"]


def programs() -> dict[str, str]:
    """The blocks whose first line is a comment with a file's name, by that name."""
    found: dict[str, str] = {}
    for page in PAGES:
        for block in re.findall(r"^```\w+\n(# \S+\.\w+\n.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
            name = block.split()[1]
            assert name not in found, f"two programs are called {name}"
            found[name] = block
    return found


PROGRAMS = programs()


def import_what_is_imported(program: str) -> None:
    """Load a program's libraries here, before the ranks are forked: once, not in each of them."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:  # transformers loads each name when it is first asked for
                getattr(importlib.import_module(node.module), alias.name)


KEPT: list[object] = []
"""Groups left behind: freed in a rank, DDP's reducer may hang in the destructor of a Gloo group (see tiny_moe.py)."""


def perform(path: Path, environment: dict[str, str], arguments: list[str]) -> tuple[str, Stats]:
    """A rank's job: the program as if called from the shell. Returns what it printed, and commlayer's statistics."""
    os.environ.update(environment)
    commlayer.backend.autoload()  # what `import torch` does in a fresh process; this one has the parent's
    os.chdir(path.parent)
    torch.set_num_threads(1)
    sys.argv = [str(path), *arguments]
    if "megatron" in path.read_text(encoding="utf-8"):
        stand_in_for_cuda()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        KEPT.append(runpy.run_path(str(path), run_name="__main__"))
    return printed.getvalue(), stats()


def run_on_two_nodes(
    emulated_cluster: ClusterFactory, tmp_path: Path, name: str, program: str, **environment: str
) -> tuple[list[float], set[tuple[str, str]]]:
    """The losses that rank 0 of 2 x 2 prints, and which collectives went by which plans."""
    import_what_is_imported(program)
    path = tmp_path / name
    path.write_text(program, encoding="utf-8")
    results = emulated_cluster(2, 2).run(perform, path, environment, [])
    printed, moved = results[0]
    losses = [float(number) for number in re.findall(r"loss (\d+\.\d+)", printed)]
    assert losses, f"{name} printed no loss: {printed!r}"
    return losses, plans(moved)


def without_commlayer(program: str) -> str:
    """The program as it was before: its backend Gloo, no line of commlayer's."""
    ours = re.compile(r"^(import commlayer|from commlayer|plan_\w+\().*\n", re.M)
    reported = re.compile(r"^if dist.get_rank\(\) == 0:\n    for group in commlayer.*\n(?:    .*\n)+", re.M)
    before = ours.sub("", reported.sub("", program)).replace('"commlayer"', '"gloo"')
    return before.replace("register_experts()", '"all_to_all"')


TRAINERS = sorted(name for name in PROGRAMS if name.endswith(".py"))
LIBRARIES = ("transformers", "accelerate", "lightning", "megatron", "deepspeed")
PREPARED = {"megatron": tiny_megatron.load, "deepspeed": tiny_deepspeed.load}
"""The stand-ins that have to be there before these are imported."""


LONGER = ("accelerate_loop.py", "mixtral_trainer.py", "train_lightning.py")
"""Programs of trainers that no other test trains for twenty steps."""
EVERY_LOSS = """
for entry in trainer.state.log_history if arguments.process_index == 0 else []:
    if "loss" in entry:
        print(f"loss {entry['loss']:.6f}")
"""
"""The lines that show the losses that transformers' Trainer prints with four digits."""


def with_twenty_steps(name: str) -> str:
    program, changes = re.subn(r"(range\(|max_steps=)3\b", r"\g<1>20", PROGRAMS[name])
    assert changes == 1
    return program + (EVERY_LOSS if name == "mixtral_trainer.py" else "")


SAYS = {
    "train_deepspeed.py": "DeepSpeed's MoE layers exchange tokens over EP 4 by our dispatcher, planned from profile synthetic; ",
    "train_megatron.py": "Megatron-Core's MoE layers dispatch over EP 4, planned from profile synthetic; ",
    "mixtral_experts.py": "tokens go to experts on 4 ranks by all_to_all × 1, planned from profile synthetic",
    "mixtral_trainer.py": 'COMMLAYER_AS=gloo: init_process_group("gloo") made a group of the backend commlayer',
}
"""The beginning of the line that a program says when it first plans; others say none."""
WITHOUT_OPTIMIZER = ("train_megatron.py", "keep_backend.py")
"""Programs that make their steps themselves, or none."""


@pytest.fixture
def sums_profile(tmp_path: Path) -> Path:
    """A profile by which sums go over nodes, and that has no curves of what is only moved."""
    sizes = tuple(4**k for k in range(3, 14))

    def curve(collective: str, link: Resource, ranks: int, latency_us: float) -> Curve:
        return Curve(collective, link, ranks, sizes, tuple(latency_us + size / 100 for size in sizes))

    flat = ("all_reduce", "reduce_scatter_single", "all_to_all", "all_gather")
    path, made = tmp_path / "cluster.json", synthetic_profile(nodes=2, ranks_per_node=2)
    curves = (
        *made.curves,
        *(curve(name, Resource.INTER, 4, 1e4) for name in flat),
        curve("all_gather", Resource.INTER, 2, 10.0),
        curve("all_to_all", Resource.INTRA, 2, 10.0),
        curve("reduce", Resource.DEVICE, 1, 1.0),
    )
    made.replace(curves=curves).save(path)
    return path


@pytest.mark.cluster
@pytest.mark.usefixtures("nothing_is_light")
@pytest.mark.parametrize("name", TRAINERS)
def test_a_program_trains_as_on_gloo(
    emulated_cluster: ClusterFactory, tmp_path: Path, sums_profile: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """Losses are the same by plans from a profile; and it says what it plans, what stayed flat, and no more than on Gloo."""
    program = with_twenty_steps(name) if name in LONGER else PROGRAMS[name]
    for library in LIBRARIES:
        if library in program:
            pytest.importorskip(library, reason=f"NOT TESTED: {library} is not installed (extra 'trainers')")
            PREPARED.get(library, int)()
    before = without_commlayer(program)
    assert "commlayer" not in before
    expected, nothing = run_on_two_nodes(emulated_cluster, tmp_path, name, before)
    assert not nothing
    known = said(capfd)
    opted_in = {} if before != program else {"COMMLAYER_AS": "gloo"}
    losses, moved = run_on_two_nodes(
        emulated_cluster, tmp_path, name, program, COMMLAYER_PROFILE=str(sums_profile), **opted_in
    )
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(losses) >= (20 if name in LONGER else 1)
    sums = {plan for collective, plan in moved if collective in ("all_reduce", "reduce_scatter")}
    assert any(plan.startswith(("hierarchical", "pipelined")) for plan in sums), "gradients were not planned"
    planned = [SAYS[name]] if name in SAYS else []
    check_words(said(capfd), known, *planned, steps=name not in WITHOUT_OPTIMIZER)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("train_deepspeed.py", 3),
        ("train_megatron.py", 3),
        ("mixtral_experts.py", 3),
        ("train_lightning.py", 1),
        ("accelerate_loop.py", 1),
        ("mixtral_trainer.py", 0),
    ],
)
def test_three_lines_at_most_bring_a_trainer_our_plans(name: str, lines: int) -> None:
    shown = PROGRAMS[name].splitlines()
    kept = set(without_commlayer(PROGRAMS[name]).splitlines())
    changed = [line for line in shown if line not in kept]
    assert len(changed) == lines, changed
    assert all("commlayer" in line or line.startswith("plan_") or "register_experts()" in line for line in changed)


@pytest.mark.cluster
def test_torchrun_on_two_machines(
    emulated_cluster: ClusterFactory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The real thing: torchrun on each node, fresh interpreters, the backend found by its entry point."""
    path = tmp_path / "train_ddp.py"
    path.write_text(PROGRAMS[path.name], encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "static", str(path)]
    status = emulated_cluster(2, 1).command(torchrun, per_node=True, timeout_s=90)
    printed = capfd.readouterr()
    assert status == 0, printed.err
    assert "step 2: loss" in printed.out


@pytest.mark.parametrize("page", ["megatron", "torchtitan"])
def test_the_line_for_two_machines_is_torchruns(page: str) -> None:
    text = (DOCS / "trainers" / f"{page}.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if "torchrun --nnodes 2" in line]
    words = shlex.split(line)
    given = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
    assert (given.nnodes, given.nproc_per_node, given.rdzv_backend) == ("2", "8", "c10d")


@pytest.mark.cluster
def test_accelerate_launch_by_the_variable_alone(
    emulated_cluster: ClusterFactory, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real thing: its launcher for each rank, fresh interpreters, and a program in which no line is commlayer's."""
    pytest.importorskip("accelerate", reason="NOT TESTED: accelerate is not installed (extra 'trainers')")
    program = re.sub(
        r"^dist\.init_process_group.*\n", "", without_commlayer(PROGRAMS["accelerate_loop.py"]), flags=re.M
    )
    path = tmp_path / "accelerate_loop.py"
    path.write_text(program.replace("Accelerator(cpu=True)", "Accelerator()"), encoding="utf-8")
    for name, value in {
        "COMMLAYER_AS": "gloo",
        "COMMLAYER_STATS": "1",
        "HF_HOME": str(tmp_path),
        "COLUMNS": "200",
    }.items():
        monkeypatch.setenv(name, value)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", str(path)]
    status = emulated_cluster(2, 1).command(launch, timeout_s=120)
    printed = capfd.readouterr()
    assert status == 0, printed.err
    assert "step 2: loss" in printed.out
    assert printed.err.count('COMMLAYER_AS=gloo: init_process_group("gloo") made a group') == 1
    assert "commlayer, rank 0" in printed.err, "no table of what was moved"


def test_a_slurm_task_becomes_a_rank(tmp_path: Path) -> None:
    path = tmp_path / "task.sh"
    path.write_text(PROGRAMS[path.name], encoding="utf-8")
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'node7\\nnode8\\n'\n", encoding="utf-8")
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456"}
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    show = f"import os; print(*(os.environ[name] for name in {names}))"
    shown = subprocess.run(
        ["bash", str(path), "-c", show],
        env=slurm | {"SLURM_JOB_NODELIST": "node[7-8]", "PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.split() == ["3", "8", "1", "node7", "23456"]


def test_the_slurm_script_is_one() -> None:
    script = PROGRAMS["per_machine.sbatch"]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    options = re.findall(r"--[a-z-]+", script[script.index("torchrun") :])
    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    assert options
    assert set(options) <= known


def test_the_pytorchjob_is_one() -> None:
    yaml = pytest.importorskip("yaml", reason="NOT TESTED: PyYAML is not installed (extra 'trainers' brings it)")
    job = yaml.safe_load(PROGRAMS["pytorchjob.yaml"])
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {role: spec["replicas"] for role, spec in replicas.items()} == {"Master": 1, "Worker": 3}
    for spec in replicas.values():
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch", "the operator finds its container by this name"
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        assert Settings.from_environment(environment).profile == "/profiles/cluster.json"


def test_the_pages_name_settings_that_exist() -> None:
    known = {f"COMMLAYER_{field.name.upper()}" for field in dataclasses.fields(Settings)} | {"COMMLAYER_AS"}
    for page in PAGES:
        named = set(re.findall(r"COMMLAYER_[A-Z_]+", page.read_text(encoding="utf-8")))
        assert named <= known, page
