"""Options that the commands about mappings share: a job, a cluster, a trainer's software; degrees, once or several times."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import click

from commlayer.cli.option_types import (
    COUNT,
    NUM_GPUS,
    RATE_GBPS,
    TOKENS,
    NameOr,
    Parsed,
    RealNumber,
    WholeNumber,
    in_order,
)
from commlayer.cli.tables import echo_sentence
from commlayer.profiles import catalog as profile_catalog
from commlayer.profiles.errors import UsageError
from commlayer.profiles.files import read_file
from commlayer.profiles.known_names import is_path
from commlayer.profiles.profile import Profile
from commlayer.profiles.strict_json import parse_object
from commlayer.profiles.topology import Topology
from commlayer.readers.cluster_files import resolve as resolve_cluster
from commlayer.readers.dispatch_files import read_dispatch_kernels
from commlayer.readers.model_files import resolve as resolve_model
from commlayer.scheduler.mapping import catalog, clusters, declared_links, hardware
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.exports import TRAINERS
from commlayer.scheduler.mapping.fitted_estimator import FittedEstimator
from commlayer.scheduler.mapping.imbalance import Loads
from commlayer.scheduler.mapping.job import Attention, ExchangeKind, Job, Precision, Setup
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.offloading import KEPT, OFFLOADABLE, canonical_offload
from commlayer.scheduler.mapping.pipeline_layout import AUTO_LAYOUT, EVEN_LAYOUT, canonical_layout
from commlayer.scheduler.mapping.pipeline_schedule import SCHEDULES
from commlayer.scheduler.mapping.precisions import why_not
from commlayer.scheduler.mapping.recomputation import MODULES, RECOMPUTE, canonical, unfit_recomputation
from commlayer.scheduler.mapping.run_fit import RunFit
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import (
    DISPATCHERS,
    GRAPHS,
    MEGATRON,
    SOFTWARE,
    STATE_BYTES,
    DispatchPrecision,
    Software,
    software,
    with_dispatcher,
    with_fp8_activations,
    with_fused_experts,
    with_graphs,
    with_optimizer,
    with_overlap,
)
from commlayer.scheduler.mapping.space import Space
from commlayer.scheduler.mapping.variations import at_value

__all__ = [
    "EXPORT",
    "Request",
    "ask_fabric",
    "job_options",
    "margin_option",
    "read_request",
    "read_setup",
    "read_space",
    "resolve_shape",
    "search_job_options",
    "setup_options",
    "space_options",
]

_DEFAULT_SOFTWARE = MEGATRON
"""The software that is meant where nobody says which: the one of most published runs."""
EXPORT = click.Choice((*TRAINERS, "chakra"))

margin_option = click.option(
    "--memory-margin",
    "margin",
    type=RealNumber(min=0, max=1, max_open=True),
    default=0.05,
    show_default=True,
    help="Part of a GPU's memory to leave free, beside what CUDA, NCCL and fragments take.",
)

_DEGREES = {
    "tp": "Tensor parallelism of attention.",
    "cp": "Context parallelism.",
    "ep": "Expert parallelism.",
    "etp": "Tensor parallelism of experts.",
    "pp": "Pipeline stages.",
    "vpp": "Chunks of layers of each pipeline rank.",
    "micro-batch": "Sequences of a micro-batch.",
}
_WORDS = {
    "precision": (get_args(Precision), "Of matrix products."),
    "exchange": (get_args(ExchangeKind), "Collective by which tokens go to experts."),
    "attention": (get_args(Attention), "How tp splits attention."),
    "zero": (("0", "1", "2", "3"), "What data parallelism shards."),
    "schedule": (SCHEDULES, "Of micro-batches in the pipeline."),
}


def _modules(name: str, words: Sequence[str], canonical: Callable[[str], str]) -> Parsed:
    """Make the type of what happens to modules' activations: one of ``words``, or modules joined by +
    or commas, which ``canonical`` puts in order."""
    return Parsed(name, lambda text: canonical(text.replace(",", "+")), f"[{'|'.join(words)}|MODULE+...]")


RECOMPUTATION = _modules("recomputation", RECOMPUTE, canonical)
PIPELINE_LAYOUT = Parsed("layout", canonical_layout, "[even|auto|LAYOUT]")
_LAYOUT_HELP = "Layers of each chunk, such as 'Et*3|(tt|)*29m|L'; auto: the fastest that fits."
_RECOMPUTE_HELP = (
    "Activations that backward computes again; megascale: MegaScale-MoE's choice; selective: core_attn, as in Megatron-LM; "
    f"modules: {', '.join(MODULES)}."
)
OFFLOADING = _modules("offloading", (KEPT,), canonical_offload)
_OFFLOAD_HELP = (
    f"Modules whose inputs are in the host's memory until their backward pass: {', '.join(OFFLOADABLE)}; with --software "
    f"{' or '.join(name for name, each in SOFTWARE.items() if each.offloads)}."
)

_model_option = click.option(
    "--model",
    "-m",
    "model_name",
    type=NameOr("model", "PATH", catalog.names),
    required=True,
    help="Such as mixtral-8x22b; or a Hugging Face config.json.",
)
_cluster_options = in_order(
    "Cluster",
    click.option(
        "--cluster",
        "-c",
        "cluster_name",
        type=NameOr("cluster", "PATH", clusters.names),
        required=True,
        help="Such as h100-eos; or a measured profile, with --gpu; of one node, with --inter-gbps and --fabric.",
    ),
    click.option("--gpu", type=click.Choice(list(hardware.GPUS)), help="In place of the cluster's."),
    click.option("--inter-gbps", type=RATE_GBPS, help="Peak between nodes, GB/s of a GPU, one direction."),
    click.option(
        "--fabric",
        type=click.Choice(list(declared_links.FABRICS)),
        help="What the network is, in place of the cluster's.",
    ),
    click.option("--intra-gbps", type=RATE_GBPS, help="Peak inside a node."),
    click.option("--domain", type=COUNT, help="GPUs that NVLink joins."),
)
"""Add the option --cluster, and those that change what the cluster has, which :func:`_read_cluster` reads."""

_JOB = (
    "Job",
    _model_option,
    click.option(
        "--approximate",
        is_flag=True,
        help="Plan a model's nearest shape where it cannot be modelled, and say what is left out.",
    ),
    _cluster_options,
    click.option("--gpus", "-g", type=NUM_GPUS, required=True, help="In all."),
    click.option("--global-batch", type=COUNT, required=True, help="Sequences a step."),
)
"""The options of the job that stand before --sequence."""
_RUN = (
    click.option(
        "--mtp", type=WholeNumber(min=0), help="Modules of multi-token prediction that are trained.  [the model's]"
    ),
    click.option(
        "--capacity-factor",
        type=RealNumber(min=0.01, max=1000),
        help="Rows of every expert over its fair share, filled up or dropped.  [dropless]",
    ),
    click.option("--imbalance", type=RealNumber(min=1), default=1.0, help="Busiest rank over the mean.  [1]"),
    click.option(
        "--routing",
        type=click.Path(exists=True, path_type=Path),
        help="Recorded routing: the imbalance follows from its experts' popularity.",
    ),
    "Software",
    click.option(
        "--software",
        "software_name",
        type=click.Choice(list(SOFTWARE)),
        help="Whose way to run a step; megatron is as in NVIDIA's containers of NeMo 25.09 to 26.08."
        f"  [{_DEFAULT_SOFTWARE.name}, with a note on commlayer's own]",
    ),
    click.option(
        "--dispatcher",
        type=NameOr("dispatcher", "PATH", lambda: DISPATCHERS),
        help=f"Library that sends tokens to experts: {', '.join(DISPATCHERS)}; or aiconfigurator's table of "
        "DeepEP's times.  [the software's own; between nodes with a note on the others]",
    ),
    click.option(
        "--dispatch-precision",
        type=click.Choice(get_args(DispatchPrecision)),
        default="bf16",
        show_default=True,
        help="Of rows on their way to experts.",
    ),
    click.option("--shared-expert-overlap", is_flag=True, help="Shared experts compute beside the exchange of tokens."),
    click.option(
        "--use-transformer-engine-op-fuser", is_flag=True, help="Experts' SwiGLU and casts are part of their products."
    ),
    click.option(
        "--cuda-graphs",
        type=click.Choice(list(GRAPHS)),
        default="none",
        show_default=True,
        help="Parts of a layer that the host launches at once.",
    ),
    "Formats of the optimizer and of what is kept",
    click.option(
        "--main-grads-dtype", type=click.Choice(["fp32", "bf16"]), help="Of summed gradients.  [the software's]"
    ),
    click.option(
        "--main-params-dtype", type=click.Choice(["fp32", "fp16"]), help="Of the optimizer's weights.  [fp32]"
    ),
    click.option("--exp-avg-dtype", type=click.Choice(list(STATE_BYTES)), help="Of Adam's first moment.  [fp32]"),
    click.option("--exp-avg-sq-dtype", type=click.Choice(list(STATE_BYTES)), help="Of its second.  [fp32]"),
    click.option("--fp8-param-gather", is_flag=True, help="Weights of linear layers in FP8 alone, and gathered so."),
    click.option("--activation-func-fp8-input-store", is_flag=True, help="What goes into SwiGLU is kept in FP8."),
    click.option(
        "--optimizer-offload-fraction",
        type=RealNumber(0, 1),
        help="Of the optimizer's state, in the host's memory.  [0]",
    ),
    "Cluster",
    click.option(
        "--efficiency",
        type=RealNumber(min=0.01, max=10),
        help="Factor on the GPU's declared rates.  [the model family's, else the median of all]",
    ),
)
"""The options of the job, its software and its cluster that stand behind it."""
job_options = in_order(
    *_JOB, click.option("--sequence", type=TOKENS, required=True, help="Tokens in each, such as 4096 or 128K."), *_RUN
)
"""Add the options of the job, its cluster and its software, which :func:`read_request` reads."""
search_job_options = in_order(
    *_JOB,
    click.option(
        "--sequence",
        "sequences",
        type=TOKENS,
        multiple=True,
        required=True,
        help="Tokens in each, such as 4096 or 128K; several: the best mapping at each.",
    ),
    *_RUN,
)
"""The same, with as many lengths of sequences as are asked for."""


def _searched(name: str) -> str:
    """Write what a search looks at unless it is told otherwise."""
    values = getattr(Space(), name.replace("-", "_"))
    return "any" if values is None else ", ".join(map(str, values))


_OFFERED = "; ".join(f"{name}: {', '.join(each.recomputes)}" for name, each in SOFTWARE.items())
space_options = in_order(
    "Mappings that are searched",
    *(
        click.option(f"--{name}", type=COUNT, multiple=True, help=f"{text}  [{_searched(name)}]")
        for name, text in _DEGREES.items()
    ),
    *(
        click.option(f"--{name}", type=click.Choice(values), multiple=True, help=f"{text}  [{_searched(name)}]")
        for name, (values, text) in _WORDS.items()
    ),
    click.option("--recompute", type=RECOMPUTATION, multiple=True, help=f"{_RECOMPUTE_HELP}  [{_OFFERED}]"),
    click.option("--offload-modules", "offload", type=OFFLOADING, multiple=True, help=f"{_OFFLOAD_HELP}  [{KEPT}]"),
    click.option("--pipeline-layout", type=PIPELINE_LAYOUT, default=AUTO_LAYOUT, show_default=True, help=_LAYOUT_HELP),
    click.option("--folded", is_flag=True, help="Only mappings whose experts' groups are free of attention's.  [both]"),
    click.option("--unfolded", is_flag=True, help="Only those with etp = tp, and ep a part of dp."),
    click.option("--across-domains", is_flag=True, help="Let tp and etp leave NVLink domains."),
)
"""Add the options that narrow a search, which :func:`read_space` reads. Each may be repeated."""

_USUAL = {"zero": "1"}
_MODULES = ("recompute", "offload")
_STATE = (
    *("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
    *("fp8_param_gather", "optimizer_offload_fraction"),
)
setup_options = in_order(
    "Mapping",
    *(click.option(f"--{name}", type=COUNT, default=1, help=f"{text}  [1]") for name, text in _DEGREES.items()),
    *(
        click.option(
            f"--{name}", type=click.Choice(values), default=_USUAL.get(name, values[0]), show_default=True, help=text
        )
        for name, (values, text) in _WORDS.items()
    ),
    click.option("--recompute", type=RECOMPUTATION, default="none", show_default=True, help=_RECOMPUTE_HELP),
    click.option("--offload-modules", "offload", type=OFFLOADING, default=KEPT, show_default=True, help=_OFFLOAD_HELP),
    click.option("--pipeline-layout", type=PIPELINE_LAYOUT, default=EVEN_LAYOUT, show_default=True, help=_LAYOUT_HELP),
    click.option("--folded", is_flag=True, help="Experts' groups are free of attention's: the default."),
    click.option("--unfolded", is_flag=True, help="etp = tp, and ep a part of dp."),
)
"""Add the options of one mapping, which :func:`read_setup` reads."""


@dataclass(frozen=True)
class Request:
    """The job, cluster and software that a command is asked about.

    ``changed``: other software with what was asked of this. ``fit``: of the model, to runs that were measured.
    ``is_default_software``: nobody named it. ``dispatcher``: None where nobody named one.
    """

    job: Job
    cluster: Cluster
    software: Software
    changed: Callable[[Software], Software]
    efficiency: float | None = None
    fit: RunFit | None = None
    is_default_software: bool = False
    dispatcher: str | None = None

    def estimator(self) -> Estimator:
        return self.make(self.job, self.cluster, self.software)

    def make(self, job: Job, cluster: Cluster, software: Software) -> Estimator:
        """Make the request for a variation of the job or the cluster."""
        if self.fit is not None:
            return FittedEstimator(job, cluster, software, efficiency=self.efficiency, fit=self.fit)
        return Estimator(job, cluster, software, efficiency=self.efficiency)

    def check(self, space: Space) -> None:
        """Whether what is asked of the job and the software goes with the choices of a mapping that were made.

        Raises UsageError for what would change nothing, or cannot be.
        """
        software, gpu = self.software, self.cluster.gpu
        if software.keeps_fp8_weights and set(space.precision) == {"bf16"}:
            raise UsageError(
                "--fp8-param-gather: weights are kept in FP8 where products run in it: add --precision, such as fp8, or leave "
                "it out"
            )
        if (asked := [name for name in space.offload if name != KEPT]) and not software.offloads:
            raise UsageError(
                f"--offload-modules {asked[0]}: {software.name} keeps activations on the GPU: add --software megatron, "
                "or leave it out"
            )
        most_ep, most_etp = max(space.ep) if space.ep else None, max(space.etp) if space.etp else None
        self._check_exchange(most_ep, most_etp)
        self._check_graphs(most_ep, most_etp)
        there = [word for word in space.precision if not why_not(word, gpu)]
        for way in space.recompute or ():
            unfit = [unfit_recomputation(self.job.model, gpu, way, word, False) for word in there]
            if unfit and all(unfit):
                raise UsageError(f"--recompute {way} of {self.job.model.name}: {unfit[0]}")

    def _check_exchange(self, most_ep: int | None, most_etp: int | None) -> None:
        """Whether tokens can go as is asked, with ep and etp of at most so much; None: any."""
        model, imbalance = self.job.model, self.job.imbalance
        if imbalance > model.experts / model.top_k:
            raise UsageError(
                f"--imbalance {imbalance:g}: expected at most {model.experts / model.top_k:g}, the experts of {model.name} over "
                f"those of a token, {model.experts} / {model.top_k}: no rank can have more"
            )
        if most_ep is None:
            return
        if imbalance > most_ep:
            raise UsageError(
                f"--imbalance {imbalance:g}: expected at most ep={most_ep}, with which one rank has every row"
            )
        if self.software.overlaps_shared and most_ep == 1:
            raise UsageError("--shared-expert-overlap: with ep=1 no tokens are exchanged: leave it out, or give --ep")
        if self.software.dispatch_precision != "bf16" and most_ep == most_etp == 1:
            raise UsageError(
                "--dispatch-precision: with ep=1 and etp=1 no token goes to another rank: leave it out, or give --ep"
            )

    def _check_graphs(self, most_ep: int | None, most_etp: int | None) -> None:
        """Whether a CUDA graph can hold the whole step: not where the host reads in a layer how many
        tokens come, with ep of more than one rank for calls and of more than an NVLink domain for
        kernels that the host posts for. Raises UsageError."""
        job, software = self.job, self.software
        if "step" not in software.graphs or job.capacity_factor is not None or software.host != "waits":
            return
        by_calls = software.kernels is None or (most_etp or 1) > 1
        fabric = declared_links.FABRICS.get(self.cluster.fabric)
        if not by_calls and not (fabric and fabric.by_host):
            return
        limit = 1 if by_calls else int(self.cluster.domain)
        if most_ep is None or most_ep > limit:
            raise UsageError(
                f"--cuda-graphs full-iteration: with ep of more than {limit} the host reads in every layer how many tokens come, "
                "which no graph can hold: add --capacity-factor, take kernels that do not wait (--dispatcher hybridep with --etp "
                "1, between nodes on InfiniBand or RoCE), or graphs of attention+router"
            )


def read_request(given: dict[str, Any]) -> Request:
    """Take what :func:`job_options` gave out of ``given``, and return the request.

    Raises UsageError: an unknown model or cluster, with close names; a number that cannot be; options of which one would be
    ignored.
    """
    is_approximate = given.pop("approximate")
    model = resolve_model(given.pop("model_name"), approximate=is_approximate)
    if is_approximate and not model.approximates:
        echo_sentence(f"note: --approximate changes nothing: all that {model.name} has is modelled", err=True)
    modules = given.pop("mtp")
    if given["routing"] is not None and given["imbalance"] != 1:
        raise UsageError("--imbalance follows from --routing: give one of them")
    uneven = next((option for option in ("imbalance", "routing") if given[option] not in (None, 1)), None)
    if given["capacity_factor"] is not None and uneven is not None:
        raise UsageError(
            f"--{uneven}: with --capacity-factor every expert has as many rows, filled up or dropped, however uneven routing "
            "is: leave out one of them"
        )
    job = Job(
        model=model if modules is None else replace(model, mtp_layers=modules),
        gpus=given.pop("gpus"),
        global_batch=given.pop("global_batch"),
        sequence=given.pop("sequence"),
        capacity_factor=given.pop("capacity_factor"),
        imbalance=given.pop("imbalance"),
        loads=_loads(given.pop("routing"), model),
    )
    cluster = _read_cluster(given, job)
    name, dispatcher = given.pop("software_name"), given["dispatcher"]
    changed = _software_changes(given, job)
    runs = changed(_DEFAULT_SOFTWARE if name is None else software(name))
    return Request(
        job,
        cluster,
        runs,
        changed,
        efficiency=given.pop("efficiency"),
        is_default_software=name is None,
        dispatcher=dispatcher,
    )


def _software_changes(given: dict[str, Any], job: Job) -> Callable[[Software], Software]:
    """Take out of ``given`` what is asked of the software, whichever it is, and return what makes it so."""
    state = {name: given.pop(name) for name in _STATE}
    keeps_fp8, dispatcher = given.pop("activation_func_fp8_input_store"), given.pop("dispatcher")
    precision, is_beside = given.pop("dispatch_precision"), given.pop("shared_expert_overlap")
    fuses, graphs = given.pop("use_transformer_engine_op_fuser"), given.pop("cuda_graphs")
    if is_beside and not job.model.shared_width:
        raise UsageError(f"--shared-expert-overlap: {job.model.name} has no shared experts")
    if keeps_fp8 and not job.model.gated:
        raise UsageError(f"--activation-func-fp8-input-store is of SwiGLU, which {job.model.name} does not have")

    is_table = dispatcher is not None and dispatcher not in DISPATCHERS and is_path(dispatcher)
    measured = read_dispatch_kernels(dispatcher) if is_table else None

    def changed(runs: Software) -> Software:
        if any(value not in (None, False) for value in state.values()):
            runs = with_optimizer(runs, **{name: value for name, value in state.items() if value is not None})
        if keeps_fp8:
            runs = with_fp8_activations(runs)
        if fuses:
            runs = with_fused_experts(runs)
        if dispatcher is not None:
            runs = with_dispatcher(runs, dispatcher if measured is None else measured.name)
        if measured is not None:
            runs = replace(runs, kernels=measured)
        if graphs != "none":
            runs = with_graphs(runs, graphs)
        return with_overlap(runs, dispatch_precision=precision, overlaps_shared=is_beside)

    return changed


def _loads(routing: Path | None, model: ModelShape) -> Loads | None:
    """The popularity of experts that was recorded. numpy is loaded only here."""
    if routing is None:
        return None
    from commlayer.readers.routing_files import read_routing

    loads = Loads.of_counts(read_routing(routing).popularity())
    if len(loads.shares) != model.experts:
        raise UsageError(
            f"--routing {routing}: expected choices among the {model.experts} experts of {model.name}, got {len(loads.shares)}: "
            "record that model's, or name the one that was recorded with --model"
        )
    return loads


def _read_cluster(given: dict[str, Any], job: Job) -> Cluster:
    """Take what :func:`_cluster_options` gave out of ``given``, and return the cluster. Raises as :func:`read_request`."""
    cluster, fabric = _named_cluster(given.pop("cluster_name"), given.pop("gpu")), given.pop("fabric")
    if cluster.is_one_node and cluster.inter is None:
        cluster, fabric = _joined(cluster, job, given, fabric), None
    if fabric is not None:
        if fabric == cluster.fabric and given["inter_gbps"] is None:
            echo_sentence(f"note: --fabric {fabric} changes nothing: it is what {cluster.name} has", err=True)
        cluster = cluster.on(fabric)
    elif given["inter_gbps"] is not None:
        ask_fabric(cluster, f"--inter-gbps {given['inter_gbps']:g}")
    for kind in ("inter_gbps", "intra_gbps", "domain"):
        value = given.pop(kind)
        if value is not None:
            _, cluster = at_value(job, cluster, kind, value)
    return cluster


def _named_cluster(name: str, gpu: str | None) -> Cluster:
    """The cluster of a name or in a file, declared or measured, with the GPU that was asked for; says where it was measured on
    CPU ranks."""
    is_profile = name in profile_catalog.names() and name not in clusters.names()
    if name not in profile_catalog.names() and os.path.isfile(name):
        # Whoever reads it as a cluster says what is wrong with it.
        with contextlib.suppress(OSError, UsageError):
            is_profile = parse_object(read_file(name), name).get("format") == "commlayer-profile"
    if not is_profile:
        cluster = resolve_cluster(name)
        if gpu is not None:
            cluster = cluster.replace(gpu=hardware.GPUS[gpu], name=f"{cluster.name} with {hardware.GPUS[gpu].name}")
    elif gpu is None:
        raise UsageError(
            f"--cluster {name}: a measured profile says nothing about GPUs: add --gpu, one of {', '.join(hardware.GPUS)}"
        )
    else:
        cluster = Cluster.from_profile(profile_catalog.load_profile(name), hardware.GPUS[gpu])
    if any(profile.environment.get("backend") == "gloo" for profile in cluster.measured):
        echo_sentence(
            f"note: {cluster.name} was measured on CPU ranks (Gloo): its links and copies are theirs, and no "
            f"{cluster.gpu.name} has such: measure with commlayer measure --device cuda, or take a known cluster "
            "(commlayer clusters)",
            err=True,
        )
    return cluster


def _joined(cluster: Cluster, job: Job, given: dict[str, Any], fabric: str | None) -> Cluster:
    """The cluster that was measured on one node, or nodes like it, joined by the network that was asked
    for. Raises UsageError for a job that does not fit the node where no network was declared."""
    rate = given["inter_gbps"]
    if rate is None and fabric is None:
        if job.gpus > cluster.domain:
            raise UsageError(
                f"--gpus {job.gpus}: {cluster.name} was measured on one node of {cluster.domain} ranks: declare the "
                "network between such nodes with --inter-gbps and --fabric, or measure several"
            )
        return cluster
    if rate is None or fabric is None:
        have, lacking = ("fabric", "inter-gbps") if rate is None else ("inter-gbps", "fabric")
        raise UsageError(
            f"--{have}: {cluster.name} was measured on one node, and a network between such nodes has a kind and a "
            f"rate: add --{lacking}{'' if rate is None else ', one of ' + ', '.join(declared_links.FABRICS)}"
        )
    given["inter_gbps"] = None
    return cluster.joined(fabric, rate)


def ask_fabric(cluster: Cluster, option: str) -> None:
    """Raise UsageError where ``option`` gives a cluster's network another rate, and nobody has said
    with --fabric which network has it: latencies and efficiencies are those of the network."""
    if cluster.fabric:
        raise UsageError(
            f"{option}: {cluster.name} has {declared_links.FABRICS[cluster.fabric].words}: say what network has this rate with "
            f"--fabric, one of {', '.join(declared_links.FABRICS)}"
        )


def resolve_shape(cluster: str | None, shape: str | None, profile: str | None) -> tuple[Profile, float | None]:
    """Find the profile of one group: of a declared cluster's GPUs in ``shape``, with the TFLOP/s that products reach there, or a
    measured one.

    Raises UsageError for both or neither, and for what is not known.
    """
    if (cluster is None) == (profile is None) or (shape is None) != (cluster is None):
        raise UsageError("expected --cluster and --shape, such as -c h100-eos --shape 2x8, or else --profile")
    if profile is not None:
        return profile_catalog.load_profile(profile), None
    declared = resolve_cluster(str(cluster))
    nodes = tuple(map(len, Topology.parse(str(shape)).nodes))
    return declared.profile_of(nodes), declared.gpu.bf16_tflops * declared.gpu.gemm


def read_space(given: dict[str, Any]) -> Space:
    """Take what :func:`space_options` gave out of ``given``, and return the space to search; what was not given stays open."""
    chosen: dict[str, Any] = {}
    for option in (*_DEGREES, *_WORDS, *_MODULES):
        name = option.replace("-", "_")
        values = given.pop(name)
        if values:
            chosen[name] = tuple(map(int, values)) if name == "zero" else tuple(values)
    folded = _folded(given)
    if folded is not None:
        chosen["folded"] = (folded,)
    layout = given.pop("pipeline_layout")
    return Space(**chosen, pipeline_layout=layout, within_domain=not given.pop("across_domains"))


def _folded(given: dict[str, Any]) -> bool | None:
    """Take --folded and --unfolded out of ``given``; None: neither. Raises UsageError for both."""
    folded, unfolded = given.pop("folded"), given.pop("unfolded")
    if folded and unfolded:
        raise UsageError("expected --folded or --unfolded, got both: drop one")
    return True if folded else False if unfolded else None


def read_setup(given: dict[str, Any], gpus: int) -> Setup:
    """Take what :func:`setup_options` gave out of ``given``, and return the mapping. Raises GroupError for degrees that
    do not divide.
    """
    names = (*_DEGREES, *_WORDS, *_MODULES, "pipeline-layout")
    chosen = {name.replace("-", "_"): given.pop(name.replace("-", "_")) for name in names}
    return Setup(gpus=gpus, folded=_folded(given) is not False, **{**chosen, "zero": int(chosen["zero"])})
