"""The evidence that a job has left of its calls: files of every kind that is read, told apart by
looking into them, and judged together.

Kinds say more or less. The logs of our own ranks say most, then dumps of torch's Flight Recorder,
then lines of NCCL's watchdogs, then NCCL's RAS; the kind that says most is judged, and stacks add
where programs are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from commlayer.diagnosis.call_logs import RankLog
from commlayer.diagnosis.causes import with_cause
from commlayer.diagnosis.diagnosis_words import ranks_words
from commlayer.diagnosis.dump_readings import diagnose_dumps, without_contradictions
from commlayer.diagnosis.evidence_files import EvidenceFile, each_file, named
from commlayer.diagnosis.findings import Diagnosis, diagnose
from commlayer.diagnosis.log_files import parse_log
from commlayer.diagnosis.program_ends import ProgramEnd, has_ends, read_ends, with_ends
from commlayer.diagnosis.program_stacks import ProgramPlace, has_stacks, read_stacks, with_places
from commlayer.diagnosis.ras_output import (
    RasOutput,
    diagnose_ras,
    is_ras_json,
    is_ras_text,
    read_ras,
)
from commlayer.diagnosis.recorder_dumps import Dump, begins_as_dump, read_dump, read_dumps
from commlayer.diagnosis.watchdog_lines import (
    has_watchdog_lines,
    read_watchdog_lines,
    watchdog_part,
)
from commlayer.diagnosis.watchdog_readings import diagnose_watchdogs
from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import printable, shortened

__all__ = ["Evidence", "Judged", "gather_evidence"]

_MOST_NAMED = 4
_RAS_BEGINS = re.compile(rb"(?m)^(?=NCCL version )")
"""Where an output of RAS begins: several may follow each other in a text."""
Judged = dict[str, tuple[list[RankLog], Diagnosis]]
"""The logs and the diagnosis of each job, by name; of the only one without."""


@dataclass
class Evidence:
    """All that was found in files, by kind. ``dump_paths``: dumps that have not been read yet;
    ``unknown``: names of files of no kind; ``keeps_all``: all calls of dumps are kept, also those
    that ended long ago; ``log_names``: the files of ``logs``, by rank."""

    logs: list[RankLog] = field(default_factory=list)
    log_names: dict[int, str] = field(default_factory=dict)
    dump_paths: list[Path] = field(default_factory=list)
    dumps: list[Dump] = field(default_factory=list)
    watchdogs: list[tuple[str, bytes]] = field(default_factory=list)
    ras: list[RasOutput] = field(default_factory=list)
    places: list[ProgramPlace] = field(default_factory=list)
    ends: list[ProgramEnd] = field(default_factory=list)
    num_stacks: int = 0
    unknown: list[str] = field(default_factory=list)
    keeps_all: bool = False

    @property
    def is_empty(self) -> bool:
        """Tell whether there is nothing that can be judged or shown."""
        return not (self.logs or self.dump_paths or self.dumps or self.watchdogs or self.ras or self.places)

    def check_not_empty(self, paths: Sequence[Path], damaged: Sequence[str]) -> None:
        """Raise UsageError where there is nothing to judge in ``paths``, with what is
        ``damaged``."""
        if not self.is_empty:
            return
        if damaged:
            raise UsageError("\n".join(damaged))
        raise UsageError(
            "expected logs of commlayer, dumps of torch's Flight Recorder, logs with lines of NCCL's watchdogs, outputs of "
            f"ncclras or stacks, got {self.in_words() or 'no file in ' + ', '.join(map(named, paths[:4]))}"
        )

    def read_dumps(self, damaged: list[str], advance: Callable[[str], None] = lambda _: None) -> None:
        """Read the dumps, in several processes where they are many. ``damaged`` takes what is wrong
        with those that are left out, also because they contradict others."""
        dumps = read_dumps(self.dump_paths, damaged, advance, self.dumps, keeps_all=self.keeps_all)
        self.dumps = without_contradictions(dumps, damaged)
        self.dump_paths = []

    def judged(self) -> Judged:
        """Find what is wrong, by the kind that says most; where that names nobody, by the next one
        that does. Of dumps that have no time it is said which they are: of no call in them it can
        be told that it is overdue."""
        first: Judged = {}
        results: Judged = {}
        for judge, is_there in (
            (self._by_logs, self.logs),
            (lambda: {"": diagnose_dumps(self.dumps, self.places, self.ends)}, self.dumps),
            (
                lambda: self._inferred(diagnose_watchdogs(read_watchdog_lines(self.watchdogs), self.ends)),
                self.watchdogs,
            ),
            (lambda: self._inferred(diagnose_ras(self.ras)), self.ras),
        ):
            results = judge() if is_there else {}
            if _adds(first, results) if first else any(map(_names_somebody, results.values())):
                break
            first = first or results
        else:
            # No file names a call: where programs are, if there are stacks.
            sentence = (
                "cannot tell: no line names a rank and a call that has timed out: give the job's dumps or whole logs"
            )
            if self.places:
                sentence = "stacks tell where programs are, and not in which calls: give the job's dumps or logs too"
            ranks = tuple(sorted({place.rank for place in self.places}))
            nothing = Diagnosis(findings=(), waits=(), ranks=ranks, without=(), is_timeout=False, open=(sentence,))
            results = first or {"": ([], with_places(nothing, self.places))}
        undated = [dump.rank for dump in self.dumps if not dump.has_time and not self.logs]
        if undated:
            sentence = (
                f"cannot tell how long {ranks_words(sorted(undated))} had been waiting: the archive does not say when dumps "
                "were written (zip's local time is not enough): pack them as tar, or give the files"
            )
            for name, (logs, diagnosis) in results.items():
                results[name] = logs, msgspec.structs.replace(diagnosis, open=(*diagnosis.open, sentence))
        return results

    def _by_logs(self) -> Judged:
        twice = [rank for rank, count in Counter(log.rank for log in self.logs).items() if count > 1]
        if twice:
            raise UsageError(
                f"expected one log of each rank, got several of {ranks_words(twice)}: give the logs of one replica"
            )
        diagnosis = with_places(diagnose(self.logs), self.places)
        return {"": (self.logs, with_cause(diagnosis, self.logs, knows_members=True))}

    def _inferred(self, results: Judged) -> Judged:
        """The results of logs that were inferred, with places and with causes, which are likely at
        most."""
        judged = {}
        for name, (logs, result) in results.items():
            diagnosis = with_ends(with_places(result, self.places), self.ends)
            if diagnosis.findings or diagnosis.waits or diagnosis.under_way:
                diagnosis = with_cause(diagnosis, logs, circles_are="likely", at_most="likely")
            judged[name] = logs, diagnosis
        return judged

    def in_words(self) -> str:
        """Say how many files were taken as what."""
        backends = ", ".join(sorted({backend for dump in self.dumps for backend in dump.backends}))
        parts = []
        if self.logs:
            parts.append(f"{counted(len(self.logs), 'log')} of commlayer's ranks")
        if self.dumps:
            whose = ranks_words([dump.rank for dump in self.dumps])
            parts.append(
                f"{counted(len(self.dumps), 'dump')} of torch's Flight Recorder ({backends or 'empty'}): {whose}"
            )
        if self.watchdogs:
            parts.append(f"{counted(len(self.watchdogs), 'log')} with lines of NCCL's watchdogs")
        if self.ras:
            parts.append(f"{counted(len(self.ras), 'output')} of NCCL's RAS")
        if self.num_stacks:
            parts.append(f"{counted(self.num_stacks, 'file')} with stacks of {counted(len(self.places), 'rank')}")
        if self.ends:
            parts.append(
                f"how the {counted(len(self.ends), 'program')} of {ranks_words(sorted({end.rank for end in self.ends}))} ended"
            )
        if self.unknown:
            more = ", …" if len(self.unknown) > _MOST_NAMED else ""
            names = ", ".join(named(name) for name in self.unknown[:_MOST_NAMED])
            parts.append(f"{counted(len(self.unknown), 'file')} not understood: {names}{more}")
        return "; ".join(parts)


def _names_somebody(judged: tuple[list[RankLog], Diagnosis]) -> bool:
    """Whether a kind says what is wrong, or that all have come, so that no weaker one is asked.

    Of ranks that it says nothing of, a weaker one may know more.
    """
    diagnosis = judged[1]
    is_silent = diagnosis.cause is None or diagnosis.cause.what == "no dump"
    has_named = any(missing.why != "silent" for missing in diagnosis.waits)
    return bool(diagnosis.findings) or has_named or not is_silent


def _adds(first: Judged, results: Judged) -> bool:
    """Whether a weaker kind names somebody, and contradicts nothing that a stronger one has said.

    Where the stronger one has found that ranks have left nothing, only these may be blamed.
    """
    causes = [judged[1].cause for judged in results.values() if _names_somebody(judged)]
    blamed = {rank for cause in causes if cause and cause.certainty != "unknown" for rank in cause.ranks}
    silent = {rank for _, diagnosis in first.values() if diagnosis.cause is not None for rank in diagnosis.without}
    is_open = all(diagnosis.cause is None for _, diagnosis in first.values())
    return bool(blamed) and (is_open or blamed <= silent)


def gather_evidence(
    paths: Sequence[Path],
    damaged: list[str],
    advance: Callable[[str], None] = lambda _: None,
    *,
    keeps_all: bool = False,
) -> Evidence:
    """Look into all files among ``paths``, in folders and archives too.

    ``damaged`` takes what is wrong with files that cannot be read; ``advance`` is called with the
    name of each file. ``keeps_all``: see :class:`Evidence`.
    """
    evidence = Evidence(keeps_all=keeps_all)
    for file in each_file(paths, damaged, advance):
        try:
            _take(evidence, file)
        except UsageError as error:  # noqa: PERF203
            damaged.append(printable(str(error), keep=""))
    return evidence


def _take(evidence: Evidence, file: EvidenceFile) -> None:
    """Put a file where it belongs. Raises UsageError for one that is damaged, and for an older log
    of a rank, which is left out."""
    name, head = Path(file.name), file.head.lstrip()
    if begins_as_dump(file.head, name.name):
        if file.path is not None:
            evidence.dump_paths.append(file.path)
        else:
            evidence.dumps.append(read_dump(name, file.content(), file.written_ns, keeps_all=evidence.keeps_all))
    elif name.name.startswith("calls-") and head[:1] == b"{":
        log, newer_name = parse_log(file.content(), name), printable(file.name, keep="")
        # Of several logs of a rank of one job the newest.
        other = next((each for each in evidence.logs if (each.job, each.rank) == (log.job, log.rank)), None)
        older_name = evidence.log_names.get(log.rank, "")
        if other is not None and log.now_ns < other.now_ns:
            newer_name, older_name = older_name, newer_name
        elif other != log:
            evidence.logs = [*(each for each in evidence.logs if each is not other), log]
            evidence.log_names[log.rank] = newer_name
        if other not in (None, log):
            raise UsageError(
                f"{shortened(older_name)}: expected one log of each rank, got a newer one of rank {log.rank}, "
                f"{shortened(newer_name)}: the older one is left out"
            )
    elif is_ras_json(head):
        evidence.ras.append(read_ras(file.name, file.content()))
    elif b"\0" in head:
        evidence.unknown.append(file.name)
    else:  # a text, which may have several kinds in it
        data = file.content()
        places = read_stacks(file.name, data) if has_stacks(data) else []
        ends = read_ends(data) if has_ends(data) else []
        outputs = [read_ras(file.name, part) for part in _RAS_BEGINS.split(data) if is_ras_text(part)]
        lines = [(file.name, watchdog_part(data))] if has_watchdog_lines(data) else []
        evidence.watchdogs += lines
        evidence.places += places
        evidence.num_stacks += bool(places)
        evidence.ends += ends
        evidence.ras += outputs
        if not (lines or places or outputs or ends):
            evidence.unknown.append(file.name)
