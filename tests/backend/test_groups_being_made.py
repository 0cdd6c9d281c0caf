"""A group that is being made is seen by who asks what ranks wait for, from a rank's first act on."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore  # torch.distributed has it too, but not for type checkers

from commlayer.backend.joining import GroupRequest, joining_group
from commlayer.diagnosis import inquiry
from commlayer.diagnosis.call_logs import CallLog
from commlayer.diagnosis.inquiry import own_answer
from commlayer.profiles.errors import CollectiveTimeoutError


def test_a_rank_that_waits_for_others_to_join_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "_inquiries", [])
    request = GroupRequest("0", 0, (0, 1), HashStore(), timedelta(seconds=2), is_default=True)
    errors: list[BaseException] = []

    def join() -> None:
        try:
            with joining_group(request):
                pass
        except CollectiveTimeoutError as error:
            errors.append(error)

    joins = threading.Thread(target=join)
    joins.start()
    found: list[CallLog] = []
    while joins.is_alive() and not found:
        answer = own_answer()
        found = [] if answer is None else [call for call in answer.calls if call.stage]
    joins.join()
    (call,) = found
    assert (call.kind, call.state, call.stage) == ("init_process_group", "started", "joining")
    assert [str(each) for each in errors] == [
        "rank 0, joining the job of 2 ranks: rank 1 did not come within 2 s: look at the log of each"
    ]
    assert own_answer() is None
