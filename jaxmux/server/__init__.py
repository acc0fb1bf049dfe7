"""Trains tasks that come and go on one engine, and serves tenants with it.

    live = LiveTraining(engine, prepare)
    threading.Thread(target=live.run).start()
    live.register(jaxmux.Task("billing", "billing.jsonl", steps=100), priority=1)
    for event in live.events():
        ...

`LiveTraining` owns an engine and keeps a queue of tasks with priorities. `planner.scheduling`
chooses the tasks that train.
"""

from .store import Event, Store
from .task import Meter, StateChange, TaskStatus
from .training import LiveTraining

# These modules import names of this package that are defined above.
from .server import ServerOptions, tuning_server  # isort: skip
from .serving import serve  # isort: skip

__all__ = [
    "Event",
    "LiveTraining",
    "Meter",
    "ServerOptions",
    "StateChange",
    "Store",
    "TaskStatus",
    "serve",
    "tuning_server",
]
