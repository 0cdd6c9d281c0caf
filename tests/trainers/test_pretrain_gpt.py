"""Megatron-LM's own pretrain_gpt.py, with mock data, on 2 × 2 ranks without a GPU: as it is over Gloo, and in the ways of
docs/trainers/megatron.md.

``MEGATRON_LM_PATH`` in the environment names the folder of a checkout of the installed megatron-core's version: core_r0.16.0.
Without it nothing of this is tested, which is said, and is no failure.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_megatron import SPEC, core

pytestmark = [pytest.mark.cluster, pytest.mark.trainers, pytest.mark.timeout(600)]

CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
STEPS = 20
MODEL = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --num-experts 8
    --moe-router-topk 2 --moe-ffn-hidden-size 128 --expert-model-parallel-size 4 --disable-bias-linear --swiglu
    --micro-batch-size 2 --global-batch-size 8 --train-iters {STEPS} --lr 1e-3 --min-lr 1e-4 --mock-data --vocab-size 127
    --tokenizer-type NullTokenizer --hidden-dropout 0 --attention-dropout 0 --log-interval 1 --eval-iters 0
    --eval-interval 1000 --transformer-impl local --attention-backend unfused --no-bias-swiglu-fusion --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-create-attention-mask-in-dataloader
""".split()
"""A tiny model, without what only a GPU computes."""
HELPERS = Path(__file__).resolve().parents[1]
ON_CPU = ["-m", "megatron_on_cpu", "pretrain_gpt.py"]
RETURNS = re.compile(r"^( +return )(model_builder\(.*\))$", re.M)


@dataclass(frozen=True)
class Way:
    """A way to our dispatcher: ``words`` of the command line, ``edited`` by the page's line."""

    words: tuple[str, ...]
    edited: bool = False


ALLTOALL = ("--moe-token-dispatcher-type", "alltoall")
WAYS = {
    "model_provider": Way(ALLTOALL, edited=True),
    "spec": Way((*ALLTOALL, "--spec", *SPEC)),
}


def laid_out(folder: Path) -> Path:
    """Lay the checkout's programs and training loop into ``folder``, where they find the installed megatron-core."""
    if not CHECKOUT:
        pytest.xfail("NOT TESTED: MEGATRON_LM_PATH names no checkout of Megatron-LM")
    if find_spec("six") is None:
        pytest.xfail("NOT TESTED: six, which Megatron-LM imports, is not installed")
    checkout = Path(CHECKOUT).resolve()
    about = (checkout / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")
    version = ".".join(re.findall(r"^(?:MAJOR|MINOR) = (\d+)$", about, re.M))
    installed = core("package_info").__version__
    if not installed.startswith(f"{version}."):
        pytest.xfail(f"NOT TESTED: {checkout} is Megatron-LM {version}, the installed megatron-core is {installed}")
    for program in ("pretrain_gpt.py", "gpt_builders.py", "model_provider.py"):
        (folder / program).symlink_to(checkout / program)
    (folder / "megatron").mkdir()
    for part in (checkout / "megatron").iterdir():
        if part.name != "core":
            (folder / "megatron" / part.name).symlink_to(part)
    return folder


def edit(folder: Path) -> None:
    """Plan the model where model_provider.py returns it."""
    provider = folder / "model_provider.py"
    text, returns = RETURNS.subn(r"\1plan_megatron_moe(\2)", provider.read_text(encoding="utf-8"))
    assert returns == 1, "model_provider.py returns its model elsewhere in this version"
    provider.unlink()
    provider.write_text(f"from commlayer.integrations import plan_megatron_moe\n{text}", encoding="utf-8")


def losses(folder: Path, *words: str, **environment: str) -> tuple[list[str], str]:
    """The losses that the job prints, as it prints them, and all that it prints."""
    emulate = ["-m", "commlayer", "emulate", "--nodes", "2", "--ranks-per-node", "2", "--timeout", "240s", "--"]
    ran = subprocess.run(
        [sys.executable, *emulate, sys.executable, *ON_CPU, *MODEL, *words],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HELPERS), os.environ.get("PYTHONPATH")])),
            "COMMLAYER_PROFILE": "none",
            "COMMLAYER_STATS": "1",
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    printed = ran.stdout + ran.stderr
    assert ran.returncode == 0, printed[-4000:]
    return re.findall(r"lm loss: (\S+)", printed), printed


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The losses of the stock dispatcher over Gloo."""
    folder = laid_out(tmp_path_factory.mktemp("stock"))
    found, printed = losses(folder, *ALLTOALL, "--distributed-backend", "gloo")
    assert len(found) == STEPS, printed[-4000:]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_pretrain_gpt_has_the_stock_losses(way: str, tmp_path: Path, stock: list[str]) -> None:
    """The losses are the same as they are printed, in seven digits: each token has two choices."""
    folder = laid_out(tmp_path)
    if WAYS[way].edited:
        edit(folder)
    found, printed = losses(folder, *WAYS[way].words, COMMLAYER_AS="nccl")
    assert found == stock
    assert re.search(r"Megatron-Core.*all_to_all × 1", printed), printed[-4000:]
