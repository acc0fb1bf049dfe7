"""Tasks that come and go while training goes on.

    live = LiveTraining(engine, prepare)
    threading.Thread(target=live.run).start()
    live.register(jaxmux.Task("billing", "billing.jsonl", steps=100), priority=1)
    for event in live.events():
        ...

`LiveTraining` owns an engine and keeps a queue of tasks with priorities. `planner.scheduling`
chooses which of them train.
"""

from .commands import At, Command, End
from .events import Event
from .live_task import TaskStatus
from .live_training import LiveTraining
from .meter import Meter
from .saved_task import Extension, SavedTask
from .states import StateChange
from .store import Store

__all__ = [
    "At",
    "Command",
    "End",
    "Event",
    "Extension",
    "LiveTraining",
    "Meter",
    "SavedTask",
    "StateChange",
    "Store",
    "TaskStatus",
]
