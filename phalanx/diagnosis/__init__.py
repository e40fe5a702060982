"""Who hung or crashed, and why: the first cause of a failure, in one report.

In the launcher: `Diagnosis` decides when to look, `Evidence` reads what ranks have left (error files, exit codes,
heartbeats, stacks), `inquiry` asks the ranks of all nodes for their collectives, `blame` compares these, and
`exits` says how a rank ended. In a rank: `records` reads its collectives, `answer` writes them for the launcher,
`overdue` finds late ones; `out_of_memory`, `numbers` and `nonfinite` explain what went wrong inside a step.

Other rooms use the names of this page alone (`phalanx.features`); each is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.lazy import lazy_names

if TYPE_CHECKING:
    from phalanx.diagnosis.answer import answer_launcher, write_calls
    from phalanx.diagnosis.blame import Blame
    from phalanx.diagnosis.calls import process_of, read_calls
    from phalanx.diagnosis.evidence import Evidence
    from phalanx.diagnosis.exits import RankExit, explain, find_first_cause
    from phalanx.diagnosis.inquiry import Diagnosis
    from phalanx.diagnosis.memory_breakdown import optimizer_states
    from phalanx.diagnosis.nonfinite import give_back, nonfinite_error
    from phalanx.diagnosis.numbers import NumberWatch
    from phalanx.diagnosis.out_of_memory import MemoryWatch
    from phalanx.diagnosis.point_to_point import record_messages
    from phalanx.diagnosis.records import CallHistory
    from phalanx.diagnosis.stacks import latest_dump

_NAMES = {
    ".answer": "answer_launcher write_calls",
    ".blame": "Blame",
    ".calls": "process_of read_calls",
    ".evidence": "Evidence",
    ".exits": "RankExit explain find_first_cause",
    ".inquiry": "Diagnosis",
    ".memory_breakdown": "optimizer_states",
    ".nonfinite": "give_back nonfinite_error",
    ".numbers": "NumberWatch",
    ".out_of_memory": "MemoryWatch",
    ".point_to_point": "record_messages",
    ".records": "CallHistory",
    ".stacks": "latest_dump",
}
__getattr__ = lazy_names(__name__, _NAMES)

__all__ = [
    "Blame",
    "CallHistory",
    "Diagnosis",
    "Evidence",
    "MemoryWatch",
    "NumberWatch",
    "RankExit",
    "answer_launcher",
    "explain",
    "find_first_cause",
    "give_back",
    "latest_dump",
    "nonfinite_error",
    "optimizer_states",
    "process_of",
    "read_calls",
    "record_messages",
    "write_calls",
]
