"""Write the shipped profiles that come from papers and published peaks: ``python -m commlayer.profiles.catalog.build``.

Each number stands here once, beside where it comes from. Profiles that were measured (the emulated clusters) are files
of their own in this folder; this program does not touch them.
"""

from __future__ import annotations

from pathlib import Path

from commlayer.profiles.curve import Curve
from commlayer.profiles.links import Peaks, Resource, bus_factor
from commlayer.profiles.printable import say
from commlayer.profiles.profile import Profile

__all__ = ["build_catalog", "main"]

_KIB, _GIB = 1 << 10, 1 << 30

# Assumed, not measured and not published: the order of magnitude of one small NCCL call, or of one copy kernel.
_LATENCY_US = {Resource.INTER: 20.0, Resource.INTRA: 10.0, Resource.DEVICE: 5.0}

_PUBLISHED = (
    "Published peaks only, NOT measurements: every curve is an assumed latency (inter {inter:g} us, intra {intra:g} "
    "us, device {device:g} us; our assumption) plus bytes x bus factor / peak, that is, full efficiency at large "
    "sizes. Real links reach less. No contention between links is known, so none is stored. Measure your cluster "
    "with `commlayer measure` before you trust a plan made with this. "
)


def _published(
    name: str, source: str, inter_gbps: float, intra_gbps: float, memory_gbps: float, environment: dict[str, str]
) -> Profile:
    # A copy reads and writes each byte: it moves its payload at half of the memory's rate.
    peaks = Peaks(inter_gbps=inter_gbps, intra_gbps=intra_gbps, device_gbps=memory_gbps / 2)
    wanted = [
        ("all_to_all", Resource.INTER, 2),
        ("all_gather", Resource.INTRA, 2),
        ("all_gather", Resource.INTRA, 4),
        ("all_gather", Resource.INTRA, 8),
        ("copy", Resource.DEVICE, 1),
    ]
    latencies = {str(link): latency for link, latency in _LATENCY_US.items()}
    return Profile.create(
        name=name,
        kind="published",
        source=_PUBLISHED.format(**latencies) + source,
        topology="2x8",
        peaks=peaks,
        gather="remote",
        curves=[_latency_and_peak(collective, link, size, peaks) for collective, link, size in wanted],
        environment=environment,
    )


def _latency_and_peak(collective: str, link: Resource, group_size: int, peaks: Peaks) -> Curve:
    """t = latency + S · bus factor / peak, at 1 KiB … 8 GiB.

    The sizes are a factor 2 apart, so that interpolation is at most 1.5 % high.
    """
    sizes = tuple(_KIB << i for i in range((8 * _GIB // _KIB).bit_length()))
    factor = bus_factor(collective, group_size)
    # bytes / (GB/s) is ns, hence the 1e3
    times = tuple(round(_LATENCY_US[link] + size * factor / (peaks.of(link) * 1e3), 6) for size in sizes)
    source = f"assumed latency {_LATENCY_US[link]:g} us + peak {peaks.of(link):g} GB/s"
    return Curve(collective, link, group_size, sizes, times, source=source)


def _monta() -> Profile:
    """MoNTA's cluster, from its table 8 and the text around it."""
    peaks = Peaks(
        inter_gbps=25,  # "IB 200Gb/s"
        intra_gbps=200,  # B2 in eq. 12; table 5 for A800, one direction; the text's 400 GB/s counts both directions
        device_gbps=1600,  # not printed: implied by table 8's copy, 64 MB at 80 % in 0.05 ms
    )
    # "From Fig. 13, we can obtain r1 = 0.741, r2 = 0.803", for the 256K sequence: 32 times the 8K sequence of 256 MB.
    large = 32 * 256e6
    return Profile.create(
        name="monta-a800-2x8",
        kind="paper",
        source=(
            "MoNTA: Accelerating Mixture-of-Experts Training with Network-Traffic-Aware Parallel Optimization. "
            "Volumes and efficiencies of table 8 (8K sequence), and the large-volume efficiencies 0.741 and 0.803 "
            "that the text reads from fig. 13 for the 256K sequence, stored at 8192 MB (32 times the 8K sequence's "
            "256 MB). Only what the paper states: no other sizes, groups or collectives. The device peak is not "
            "printed; it is implied by table 8's copy (64 MB at 80 % in 0.05 ms). The paper describes contention "
            "between all_gather and copy but gives no numbers for it, so no interference is stored; for the same "
            "reason no error is stored."
        ),
        topology="2x8",
        peaks=peaks,
        gather="whole",
        curves=[
            Curve.from_efficiency(
                "all_to_all",
                Resource.INTER,
                2,
                [(8e6, 0.427), (32e6, 0.633), (256e6, 0.741), (large, 0.741)],
                peaks.inter_gbps,
                source="table 8 (8, 32, 256 MB); fig. 13 as read by the text (8192 MB)",
            ),
            Curve.from_efficiency(
                "all_gather",
                Resource.INTRA,
                8,
                [(64e6, 0.726), (256e6, 0.776), (large, 0.803)],
                peaks.intra_gbps,
                source="table 8 (64, 256 MB); fig. 13 as read by the text (8192 MB)",
            ),
            Curve.from_efficiency(
                "copy", Resource.DEVICE, 1, [(64e6, 0.80)], peaks.device_gbps, source="table 8 (64 MB)"
            ),
        ],
        environment={
            "gpu": "A800 SXM4 80GB",
            "network": "InfiniBand 200 Gb/s",
            "torch": "2.2",
            "cuda": "12.3",
            "nccl": "2.19.3",
            "os": "Ubuntu 22.04",
        },
    )


def build_catalog() -> list[Profile]:
    """The profiles that this program writes."""
    h800 = _published(
        "h800-2x8",
        "intra 200 GB/s: MegaScale-MoE table 4 (400 GB/s, both directions) and MoNTA table 5 (200, one direction). "
        "Memory 3400 GB/s: MegaScale-MoE table 4; a copy reads and writes, so 1700. inter 50 GB/s: assumed. Neither "
        "paper states the network of an H800 cluster; this is the nominal rate of one 400 Gb/s network card per GPU, "
        "the faster of the two InfiniBand rates (25 or 50 GB/s) that MoNTA names.",
        inter_gbps=50,
        intra_gbps=200,
        memory_gbps=3400,
        environment={"gpu": "H800", "network": "one 400 Gb/s card per GPU (assumed)"},
    )
    h100_eos = _published(
        "h100-eos-2x8",
        "intra 450 and inter 50 GB/s, one direction: MoE Parallel Folding, section 4.1 (Eos: NVLink 450 GB/s, "
        "InfiniBand 400 Gb/s). Memory 3350 GB/s: NVIDIA's data sheet of the H100 SXM; a copy reads and writes, so "
        "1675.",
        inter_gbps=50,
        intra_gbps=450,
        memory_gbps=3350,
        environment={"gpu": "H100 SXM (DGX H100, Eos)", "network": "InfiniBand 400 Gb/s"},
    )
    return [h100_eos, h800, _monta()]


def main() -> None:
    """Write each profile beside this file."""
    for profile in build_catalog():
        path = Path(__file__).with_name(f"{profile.name}.json")
        profile.save(path)
        say(f"{path.name}: {profile.fingerprint}")


if __name__ == "__main__":
    main()
