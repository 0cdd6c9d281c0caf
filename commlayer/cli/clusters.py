"""``commlayer clusters``: the clusters that search, estimate and what-if know by name."""

from __future__ import annotations

import click

from commlayer.cli.commands import Command
from commlayer.cli.option_types import json_option
from commlayer.cli.tables import print_json, print_table
from commlayer.scheduler.mapping import clusters as known

__all__ = ["clusters"]


@click.command("clusters", cls=Command)
@json_option
def clusters(as_json: bool) -> None:
    """List the clusters that are known by name: GPU, GPUs that NVLink joins, network, rates of a GPU, source.

    Others are described in a file (docs/clusters.md), or measured with `commlayer measure`.
    """
    rows = [
        {
            "name": each.name,
            "gpu": each.gpu.name,
            "domain": each.domain,
            "fabric": each.fabric,
            "inter_gbps": each.peaks.inter_gbps,
            "intra_gbps": each.peaks.intra_gbps,
            "source": each.source,
            "gpu_source": each.gpu.source,
            "fabric_source": each.inter.source if each.inter else "",
        }
        for each in map(known.load, known.names())
    ]
    if as_json:
        print_json(rows)
        return
    columns = ["name", "GPU", ">GPUs on NVLink", "network", ">inter GB/s", ">intra GB/s", "~source"]
    table = [list(row.values())[: len(columns)] for row in rows]
    cells = [
        [f"{cell:g}" if isinstance(cell, float) else str(cell) or "as its source" for cell in row] for row in table
    ]
    print_table(columns, cells, spare=(6,))
