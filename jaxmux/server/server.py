"""A server that trains the tasks of many tenants, and whose tasks survive the end of its
process."""

import dataclasses
import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxmux.data import load_tokenizer
from jaxmux.engine import Engine, EngineOptions, EngineSize, prepare_task
from jaxmux.field_checks import Count, Names, Positive, checked_dataclass, parts_of
from jaxmux.models import (
    BackboneConfig,
    backbone_dtype,
    backbone_fingerprint,
    check_backbone,
    checkpoint_tensors,
    device_memory,
    resolve_backbone,
)
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.admission import Admission
from jaxmux.planner.packing import MIN_CHUNK_LEN, ShapeClass, smallest_shape_class
from jaxmux.runs.metrics import LOG_BYTES
from jaxmux.runs.run_inputs import configuration_of
from jaxmux.runs.run_layout import engine_options, load_on, refuse_mesh
from jaxmux.runs.run_options import RunOptions
from jaxmux.runs.run_shape import pool_costs
from jaxmux.runs.task_warnings import of_live_task, of_options
from jaxmux.runs.trackers import RunTrackers, TrackedRun, refuse_missing
from jaxmux.tasks import Task

from . import LiveTraining
from .folder import ServerDirectory
from .store import ServerStore

# Without `round_tokens`, a round trains at most this many microbatches of one task.
_MICROBATCHES = 4


@checked_dataclass(kw_only=True)
class ServerOptions(RunOptions):
    """Settings of a tuning server. The settings of `RunOptions` mean the same, but have other
    defaults: a server does not know its tasks when it starts, so it needs the largest sizes that
    tasks may have.

    Attributes:
      row_len: tokens of a row, a power of two of at least 64; the longest sample that a task may
        have.
      chunk_len: tokens of a chunk, a power of two of at least 64 (128 for the Hopper kernels). None
        takes the shortest chunk that the device's kernels support.
      max_sequences: most samples of a row; None allows one sample per 16 tokens.
      round_tokens: most tokens of one task that a round trains, see `EngineOptions`; None means
        four microbatches of the mesh. If a task's global batches are larger, its results depend on
        this number in their last bits.
      reserved_slots: number of tasks that train at the same time.
      reserved_rank: the highest rank that a task may have. Low-rank adapters in `reserved_adapters`
        add to the rank, linears and dropout that all tasks may have.
      reserved_targets: the linears that tasks may adapt, chosen like `LoRA.target_modules`.
      reserved_dropout: whether tasks may have dropout.
      elastic: whether pool and microbatches begin with a quarter of their sizes, and grow up to
        these sizes and shrink with the load. A task's results then depend on its neighbours, but
        only in the order of sums. False keeps all sizes; with one replica of the backbone, the bits
        of a task's results then depend on this task alone.
      prepared_at_once: number of tasks whose data are read at the same time, during training. Also
        the number of initial adapters that are computed at the same time, of those that take long.
      slow_preparation_seconds: a task whose data take longer to read, in seconds, no longer counts
        in `prepared_at_once`, so that other data are read meanwhile, of at most 32 tasks in total.
      most_ended: number of ended tasks whose status is kept.
      most_preparation_seconds: a task fails if reading its data takes longer, in seconds, or
        computing its initial adapter.
      trackers: programs that show the metrics, as in `RunOptions`. A server is one run there.
      events_bytes: size in bytes at which events.jsonl is set aside as events.<n>.jsonl, and
        rounds.jsonl as rounds.<n>.jsonl. The last three of these files are kept.
    """

    row_len: Count = 1024
    round_tokens: Count | None = None
    reserved_slots: Count = 8
    reserved_rank: Count = 16
    reserved_targets: Names | None = "all-linear"
    reserved_dropout: bool = True
    elastic: bool = False
    prepared_at_once: Count = 2
    slow_preparation_seconds: Positive = 30.0
    most_ended: Count = 10_000
    most_preparation_seconds: Positive = 600.0
    events_bytes: Count = LOG_BYTES
    trackers: Names = ()

    def __post_init__(self):
        super().__post_init__()
        if self.schedule == "gpipe":
            raise PlanningError(
                "schedule='gpipe' keeps the values of all microbatches of a round, and a server "
                "does not know its rounds; use schedule='auto'"
            )

    def most_tokens(self, shape: ShapeClass) -> int:
        """Most tokens of one task that a round trains."""
        shards = sum(replica.shards for replica in self.deployment.replicas)
        return self.round_tokens or _MICROBATCHES * shards * shape.tokens

    def shape(self, least_chunk_len: int = MIN_CHUNK_LEN) -> ShapeClass:
        """The shape class of the microbatches. `least_chunk_len` is the number of tokens of the
        shortest chunk that the device's kernels support. Raises PlanningError if a length is not a
        power of two of at least 64."""
        chunk_len = self.chunk_len or least_chunk_len
        found = smallest_shape_class([1], self.tokens_per_microbatch, chunk_len, self.row_len)
        if self.max_sequences is None:
            return found
        return dataclasses.replace(found, max_sequences=self.max_sequences)


def server_admissions(
    options: ServerOptions, config: BackboneConfig, engine_options: EngineOptions
) -> tuple[Admission, ...]:
    """Predict whether the pool and microbatches of a size fit into memory, one for each kind of
    replica, that of the first replica first. Empty if the devices' memory is unknown, as on CPU
    without `memory_gib`. Raises PlanningError if the server does not fit in its first size; the
    message says what would fit."""
    if not (options.memory or device_memory()):
        return ()
    pool, shape, found = engine_options.reserved, engine_options.shape, []
    for replica in options.deployment.counts:
        costs = pool_costs(
            pool,
            config,
            backbone_dtype(options.dtype),
            options.remat,
            options.memory,
            replica,
            schedule=options.schedule,
        )
        admission = Admission(costs.replica, shape, reserved=pool, more_stages=False)
        if reason := admission.refusal(pool.slots, shape.rows):
            place = f"mesh {replica}: " if options.mesh else ""
            raise PlanningError(f"{place}{reason}")
        found.append(admission)
    return tuple(found)


_log = logging.getLogger("jaxmux")

# A server never needs more open files than this. Some systems refuse a higher limit, even if the
# hard limit is infinite.
_MOST = 2**16


def permit_open_files() -> None:
    """Raises the soft limit of open files to the hard limit, but at most to 65,536, because each
    task with a million tokens has an open file (`TokenFile`). Logs if the limit cannot be
    raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError) as e:
        _log.warning("the limit of open files stays at %d: %s", soft, e)


DEFAULTS = ServerOptions()
# Tokens of the shortest chunk that the kernels for Hopper GPUs support.
_HOPPER_CHUNK = 128


@contextmanager
def tuning_server(
    backbone: str | Path,
    folder: str | Path,
    options: ServerOptions = DEFAULTS,
    *,
    say: Callable[[str], None] = print,
) -> Iterator[LiveTraining]:
    """Opens a server for tasks that come and go. The tasks of an earlier server in the same folder
    go on, to the same bits as without the interruption.

        with tuning_server("/models/Llama-3.2-1B", "runs/server") as server:
            threading.Thread(target=server.run).start()
            server.register(Task("billing", "billing.jsonl", steps=100)).result()
            ...
            server.close()

    The changes of a command are on disk before its future is done; the tasks' usage is on disk a
    second later. Checkpoints of the tasks are written every `options.checkpoint_every` rounds and
    at the end.

    Args:
      backbone: Hugging Face checkpoint folder with config.json, safetensors and a tokenizer. A path
        may begin with "jaxmux:" for a folder that ships with jaxmux.
      folder: folder of the server. It gets adapters/<task> (Hugging Face PEFT folders of the tasks
        that have succeeded), events.jsonl, rounds.jsonl and the events.<n>.jsonl and
        rounds.<n>.jsonl before them, server.db (the table of tasks), checkpoints, server.json (the
        record of what is served) and the files of trackers.
      options: sizes of microbatches and pool, memory, checkpoints and other settings.
      say: prints one line. It is called for damaged checkpoints, for files that cannot be written,
        for sizes that differ from those of the earlier server, and with the number of a task's
        warnings.

    Returns:
      A context manager that gives the `LiveTraining`. The thread that calls its `run` owns the
      devices. At the end, the context closes the server and waits until `run` has returned.

    Raises:
      BackboneError, PlanningError, RunDirectoryError: the backbone, option or folder that the
        message names cannot be used.
    """
    path = str(Path(resolve_backbone(backbone)).absolute())
    config = BackboneConfig.from_folder(path, options.backbone_format)
    tokenizer = load_tokenizer(path)
    check_backbone(path)
    refuse_missing(options.trackers)
    if jax.process_count() > 1:
        raise PlanningError("a server trains in one process; start it in one")
    refuse_mesh(options.deployment, config)
    fingerprint, dtype = backbone_fingerprint(path), backbone_dtype(options.dtype)
    shape = options.shape(_HOPPER_CHUNK if jax.default_backend() == "gpu" else MIN_CHUNK_LEN)
    most = EngineSize(options.reserved_slots, shape.rows)
    own_options = engine_options(options, config, shape, round_tokens=options.most_tokens(shape))
    sizes = _sizes(options, own_options)
    if options.elastic:
        own_options = own_options.of_size(EngineSize(*(-(-each // 4) for each in most)))
    admissions = server_admissions(options, config, own_options)
    permit_open_files()
    with ExitStack() as stack:
        identity = {
            "backbone": path,
            "fingerprint": fingerprint,
            "dtype": str(dtype),
            "backbone_format": options.backbone_format,
        }
        directory = stack.enter_context(ServerDirectory(folder, identity))
        model = load_on(options.deployment, path, dtype, config, options.backbone_cache, say)
        first, *others = admissions or (None,)
        engine = stack.enter_context(
            closing(Engine(model, own_options, first, more_admissions=others))
        )
        run = TrackedRun(
            directory.path.name, directory.path, None, configuration_of(path, [], options)
        )
        store = ServerStore(
            directory,
            engine.backbone,
            options.keep_checkpoints,
            RunTrackers(options.trackers, run, say),
            say,
            options.events_bytes,
        )
        stack.enter_context(closing(store))
        live = LiveTraining(
            engine,
            partial(
                prepare_task,
                config=config,
                tokenizer=tokenizer,
                base_fingerprint=fingerprint,
                base=checkpoint_tensors(path, dtype, options.backbone_format),
                base_model=str(path),
            ),
            store=store,
            save_every=options.checkpoint_every,
            prepared_at_once=options.prepared_at_once,
            slow_preparation_seconds=options.slow_preparation_seconds,
            most_preparation_seconds=options.most_preparation_seconds,
            most_ended=options.most_ended,
            most=most if options.elastic else None,
            warnings=partial(of_live_task, config=config),
        )
        stack.callback(live.wait)
        stack.callback(live.close)
        for warning in of_options(options, config):
            say(f"warning: {warning}")
        directory.record_sizes(sizes, say)
        yield live
        live.close()
        live.wait()
        # `run` has already saved everything, but a caller of `step` may not have.
        live.save()


def _sizes(options: ServerOptions, most: EngineOptions) -> dict[str, Any]:
    """The sizes on which the bits of tasks depend, by the names of the options that set them.
    `most` are the options of the engine at its largest size."""
    pool, adapter = most.reserved, parts_of(Task)["adapter"]
    return dataclasses.asdict(most.shape) | {
        "round_tokens": most.round_tokens,
        "reserved_slots": pool.slots,
        "reserved_rank": pool.rank,
        "reserved_targets": list(pool.modules),
        "reserved_dropout": pool.dropout,
        "reserved_adapters": [*map(adapter.to_object, options.reserved_adapters)],
        "elastic": options.elastic,
        "mesh": str(options.deployment),
    }
