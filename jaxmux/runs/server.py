"""A server that trains the tasks of many tenants, and survives whatever ends its process."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxmux.backbone_folder import resolve_backbone
from jaxmux.data import load_tokenizer
from jaxmux.engine import Engine, EngineOptions, EngineSize, prepare_task
from jaxmux.live import LiveTraining
from jaxmux.models import (
    BackboneConfig,
    backbone_dtype,
    backbone_fingerprint,
    check_backbone,
    checkpoint_tensors,
)
from jaxmux.planner import PlanningError
from jaxmux.planner.packing import MIN_CHUNK_LEN

from .open_files import permit_open_files
from .run_inputs import configuration_of
from .run_layout import engine_options, load_on, refuse_mesh
from .server_directory import ServerDirectory
from .server_memory import server_admissions
from .server_options import ServerOptions
from .server_store import ServerStore
from .task_fields import part_to_json
from .task_warnings import of_live_task, of_options
from .trackers import RunTrackers, TrackedRun, refuse_missing

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
    go on, with the bits that they would have had without a break.

        with tuning_server("/models/Llama-3.2-1B", "runs/server") as server:
            threading.Thread(target=server.run).start()
            server.register(Task("billing", "billing.jsonl", steps=100)).result()
            ...
            server.close()

    A command is on disk before its future is done. Tasks, and what they have used, are saved every
    `options.checkpoint_every` rounds and at the end.

    Args:
      backbone: Hugging Face checkpoint folder with config.json, safetensors and a tokenizer. A path
        may begin with "jaxmux:" for a folder that ships with jaxmux.
      folder: folder of the server. It gets adapters/<task> (Hugging Face PEFT folders of the tasks
        that have succeeded), events.jsonl, rounds.jsonl and the events.<n>.jsonl and
        rounds.<n>.jsonl before them, checkpoints, journal (the commands since then), server.json
        (the record of what is served) and the files of trackers.
      options: sizes of microbatches and pool, memory, checkpoints and other settings.
      say: function that prints one line; it is told of damaged checkpoints, of what cannot be
        written, of sizes other than those of the earlier server, and how many warnings tasks have.

    Returns:
      A context manager that gives the `LiveTraining`. The thread that calls its `run` owns the
      devices. At the end, the context closes the server and waits until `run` has returned.

    Raises:
      BackboneError, PlanningError, RunDirectoryError: what the message names cannot be used.
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
        own_options = own_options.of_size(EngineSize(*(-(-own // 4) for own in most)))
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
        kept = store.read()
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
            saved=kept.saved,
            commands=kept.commands,
            totals=kept.totals,
            reached={name: told.steps for name, told in kept.told.items()},
            told={name: told.state for name, told in kept.told.items()},
            rounds=kept.rounds,
            save_every=options.checkpoint_every,
            prepared_at_once=options.prepared_at_once,
            slow_preparation_seconds=options.slow_preparation_seconds,
            most_preparation_seconds=options.most_preparation_seconds,
            most_ended=options.most_ended,
            most=most if options.elastic else None,
            warnings=partial(of_live_task, config=config),
        )
        # The arrays are kept by those tasks alone that have not gone on yet.
        del kept
        stack.callback(live.wait)
        stack.callback(live.close)
        for warning in of_options(options, config):
            say(f"warning: {warning}")
        directory.record_sizes(sizes, say)
        yield live
        live.close()
        live.wait()
        # `run` has saved everything, but not those who call `step`.
        live.save()


def _sizes(options: ServerOptions, most: EngineOptions) -> dict[str, Any]:
    """The sizes on which the bits of tasks depend, by the names of the options that set them.

    Args:
      options: settings of the server.
      most: options of its engine at its largest size.
    """
    pool = most.reserved
    return dataclasses.asdict(most.shape) | {
        "round_tokens": most.round_tokens,
        "reserved_slots": pool.slots,
        "reserved_rank": pool.rank,
        "reserved_targets": list(pool.modules),
        "reserved_dropout": pool.dropout,
        "reserved_adapters": [part_to_json("adapter", own) for own in options.reserved_adapters],
        "elastic": options.elastic,
        "mesh": str(options.deployment),
    }
