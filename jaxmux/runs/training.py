"""The training of a run's tasks, from the choice of the devices to the exported adapters."""

import dataclasses
import gc
import operator
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from typing import NamedTuple

import jax

from jaxmux.engine import Engine, PreparedTask, QueuedEngine
from jaxmux.engine.devices.programs_ahead import ProgramsAhead
from jaxmux.errors import Interrupted, OutOfDeviceMemory, first_line, ran_out_of_memory
from jaxmux.models import Backbone, backbone_dtype, device_memory, planned_remat
from jaxmux.peft import Adapter
from jaxmux.planner import PlanningError
from jaxmux.planner.devices import Deployment
from jaxmux.sharding import PlacedBackbone
from jaxmux.sweeps import Sweep
from jaxmux.tasks import TaskError

from .checkpoints import Checkpoints, RunPosition, array_specs, newest_run, number_by_rounds
from .console import RunConsole, StartTimeline
from .mesh_choice import pool_with_places
from .metrics import MetricsWriter
from .processes import Processes, StopSignals
from .recorder import Recorder, RunFiles
from .run_directory import RunDirectory
from .run_inputs import RunInputs, configuration_of
from .run_layout import RunLayout, engine_options, layout_with_places, load_on
from .run_options import AUTO_MESH, RunOptions
from .run_shape import smaller_text
from .summary import Summary
from .sweep_results import brackets_of
from .task_warnings import of_options
from .trackers import RunTrackers, TrackedRun


class Results(NamedTuple):
    """The results of training. `adapters` has, by name, the adapters of the tasks that have a
    prompt and succeeded. `model` is the backbone on the devices."""

    summary: Summary
    adapters: dict[str, Adapter]
    model: Backbone | list[PlacedBackbone]


class _Attempt:
    """An attempt to train in a layout, which may run out of memory.

    Attributes:
      has_trained: whether a round has ended in this layout, or a checkpoint has been restored.
      predicted_memory: predicted peak memory of its first round, in bytes; None if unknown.
    """

    def __init__(self, layout: RunLayout):
        self.layout, self.has_trained = layout, False
        self.predicted_memory: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The training of a run's tasks, from the choice of the devices to the exported adapters.

    Attributes:
      backbone: the backbone's folder.
      sweeps: the sweeps whose configurations are among the tasks.
      directory: the run directory; None in a process that writes nothing.
      config_text: as for `fine_tune`.
      stop: signals that stop training.
      timeline: records the start.
    """

    backbone: str
    inputs: RunInputs
    sweeps: Sequence[Sweep]
    options: RunOptions
    directory: RunDirectory | None
    config_text: str | None
    processes: Processes
    console: RunConsole
    stop: StopSignals
    timeline: StartTimeline

    def run(self) -> Results:
        """Trains the tasks. If the planner chose a layout of several devices and a device runs out
        of memory before the first round has ended, training starts again with the next best layout.

        Raises:
          BackboneError, PlanningError, RunDirectoryError: an input cannot be used; the message
            names it. Nothing has been trained by this call.
          Interrupted: a signal arrived; the state is saved.
        """
        config, prepared = self.inputs.config, self.inputs.prepared
        options, processes, console = self.options, self.processes, self.console
        console.announce(prepared, config)
        for warning in of_options(options, config):
            console.say(f"warning: {warning}")
        if self.directory:
            # Print this before `_begin` deletes anything.
            console.announce_restart(self.directory)
        if processes.count > 1:
            timed = [p.task.name for p in prepared if p.task.max_seconds]
            if timed:
                raise TaskError(
                    f"task {timed[0]!r}: max_seconds needs a single process, because the processes "
                    "of a run have different clocks; give steps"
                )
            # All processes must plan with the same memory.
            memory = options.memory or processes.least(device_memory())
            options = dataclasses.replace(options, memory_gib=memory and memory / 2**30)
        failed: list[Deployment] = []
        out_of_memory = None
        while True:
            try:
                with self.timeline.span("choose devices and shapes"):
                    layout = processes.agree(
                        processes.on_first(
                            lambda: layout_with_places(
                                prepared,
                                config,
                                options,
                                self.directory.shapes,
                                console,
                                may_wait=bool(self.sweeps),
                                failed=failed,
                            )
                        )
                    )
            except PlanningError:
                if out_of_memory is None:
                    raise
                raise OutOfDeviceMemory(out_of_memory) from None
            attempt = _Attempt(layout)
            try:
                return self._train_in(attempt, options)
            except (OutOfDeviceMemory, jax.errors.JaxRuntimeError) as e:
                was_chosen = options.mesh == AUTO_MESH and layout.deployment.devices > 1
                # With several processes, the others cannot learn of the error, so all processes
                # end.
                if attempt.has_trained or not was_chosen or processes.count > 1:
                    raise
                if not ran_out_of_memory(e):
                    raise
                out_of_memory = first_line(e)
            # The exception held references to the layout's arrays.
            gc.collect()
            failed.append(layout.deployment)
            console.say(
                f"mesh {layout.deployment} does not fit into memory after all ({out_of_memory}); "
                "trying the next best one"
            )

    def _train_in(self, attempt: _Attempt, options: RunOptions) -> Results:
        """Trains the tasks in a layout. `options` contains the memory that all processes have."""
        config, prepared, layout = self.inputs.config, self.inputs.prepared, attempt.layout
        processes, console, directory = self.processes, self.console, self.directory
        brackets = brackets_of(self.sweeps, prepared)
        chosen_options = engine_options(
            options,
            config,
            layout.shape,
            replica_shapes=layout.shapes if layout.costs else (),
            sequence_costs=layout.costs,
        )
        places = layout.places or len(prepared)
        make = Engine
        if len(prepared) > 1:
            pool = pool_with_places(prepared, chosen_options.reserved, places)
            chosen_options = dataclasses.replace(chosen_options, reserved=pool)
            shrinking = layout.shrinking(prepared, self.inputs.config, options)
            make = partial(QueuedEngine, places=places, brackets=brackets, shrinking=shrinking)
        dtype = backbone_dtype(options.dtype)
        console.say("compiling the training step; this can take a minute")
        with ExitStack() as stack:
            programs = None
            if layout.deployment.devices == 1:
                programs = ProgramsAhead.of_tasks(config, dtype, chosen_options, prepared[:places])
                stack.enter_context(closing(programs))
            with self.timeline.span("load the backbone"):
                model = processes.together(
                    lambda: load_on(
                        layout.deployment,
                        self.backbone,
                        dtype,
                        config,
                        options.backbone_cache,
                        console.say,
                    )
                )
            admission, *others = layout.admissions or (None,)
            engine = make(model, chosen_options, admission, programs, others)
            goes_on = processes.agree(processes.on_first(lambda: directory.goes_on))
            with self.timeline.span("register the tasks"):
                engine.register_tasks(prepared, begin=not goes_on)
            engine.refuse_implementations()
            checkpoints = processes.on_first(lambda: self._begin(layout))
            if checkpoints:
                stack.enter_context(closing(checkpoints))
            stack.enter_context(closing(engine))
            position = self._restore(engine, checkpoints, goes_on)
            attempt.has_trained = position.rounds > 0
            files = None
            if checkpoints:
                run = TrackedRun(
                    directory.path.name,
                    directory.path,
                    position.rounds,
                    configuration_of(self.backbone, [p.task for p in prepared], options),
                )
                trackers = RunTrackers(options.trackers, run, console.say)
                metrics = MetricsWriter(directory, position, trackers, console.say)
                stack.enter_context(closing(metrics))
                files = RunFiles(directory, checkpoints, metrics)
            recorder = Recorder(engine, files, position, processes, console)
            with self.timeline.span("measure held-out losses"):
                recorder.record(engine.drain())
            seconds = self._train(engine, recorder, attempt)
            summary = recorder.finish(
                seconds,
                self.sweeps,
                predicted_memory_bytes=attempt.predicted_memory,
                predicted_round_seconds=layout.round_seconds,
            )
            adapters = {p.task.name: engine.adapter(p.task.name) for p in _with_prompts(engine)}
        return Results(summary, adapters, model)

    def _begin(self, layout: RunLayout) -> Checkpoints:
        directory, inputs = self.directory, self.inputs
        directory.begin(
            inputs.fingerprints,
            layout.added_to(directory.shapes),
            self.config_text,
            inputs.samples,
            inputs.rendering,
        )
        folder = directory.checkpoints
        checkpoints = Checkpoints(folder, self.options.keep_checkpoints, self.console.say)
        number_by_rounds(folder)
        return checkpoints

    def _restore(
        self, engine: Engine, checkpoints: Checkpoints | None, goes_on: bool
    ) -> RunPosition:
        """Restores the newest checkpoint and returns its position. If there is none, starts to
        measure the losses before training. With `goes_on`, checkpoints are expected, and the engine
        has its tasks without their initial adapters. `checkpoints` is None in a process that reads
        none."""
        saved = self.processes.on_first(lambda: newest_run(checkpoints, engine))
        # The arrays are sent separately, task by task.
        described = self.processes.agree(saved and saved._replace(arrays={}))
        if described is None:
            if goes_on:
                engine.begin_tasks()
            engine.begin_evaluation(engine.names)
            return RunPosition()
        specs = array_specs(engine, described.tasks)
        arrays_by_task = saved.arrays if saved else dict.fromkeys(specs)
        arrays = {
            name: self.processes.share_arrays(arrays_by_task[name], specs[name]) for name in specs
        }
        described._replace(arrays=arrays).restore(engine)
        if not engine.finished:
            self.console.say(f"going on from the checkpoint after round {engine.rounds}")
        return described.position

    def _train(self, engine: Engine, recorder: Recorder, attempt: _Attempt) -> float | None:
        """Trains until every task has ended, and records the progress. Returns the median seconds
        from one round to the next, in the later half of the rounds; None if there were too few."""
        ends: list[float] = []
        # The number of the signal that stops all processes.
        signal = 0

        def stopped() -> bool:
            nonlocal signal
            signal = signal or self.processes.stop_number(self.stop.number)
            return bool(signal)

        self.console.start(engine)
        size = engine.size
        try:
            with self.stop.deferred(self.console.say):
                while not engine.finished:
                    saves = (engine.rounds + 1) % self.options.checkpoint_every == 0
                    with nullcontext() if ends else self.timeline.span("first round"):
                        updates = engine.train_round(stopped, stream=bool(ends) and not saves)
                        if not ends:
                            # Show the first results at once, although the devices are idle
                            # meanwhile.
                            updates += engine.drain()
                            attempt.has_trained = True
                            attempt.predicted_memory = _predicted_memory(engine, attempt.layout)
                    recorder.record(updates)
                    if engine.size != size:
                        size, names = engine.size, engine.names
                        left = sum(engine.progress(name).status == "running" for name in names)
                        self.console.say(smaller_text(left, len(names), engine.options.shape))
                    if not ends:
                        recorder.record_start(self.timeline)
                    ends.append(time.monotonic())
                    if stopped():
                        recorder.save()
                        recorder.wait()
                        # No process may leave before the checkpoint is on disk.
                        self.processes.gather(None)
                        raise Interrupted(signal, saved=True)
                    if engine.rounds % self.options.checkpoint_every == 0:
                        recorder.save()
                    self.processes.end_round()
                recorder.save()
        finally:
            self.console.stop()
        later = ends[len(ends) // 2 :]
        return statistics.median(map(operator.sub, later[1:], later)) if len(later) > 2 else None


def _predicted_memory(engine: Engine, layout: RunLayout) -> int | None:
    """Predicted peak memory in bytes of rounds of the engine's size; None if unknown."""
    # With GPipe, the peak depends on the length of every round.
    is_gpipe = engine.options.schedule == "gpipe"
    if not layout.admissions or engine.remat is None or is_gpipe:
        return None
    admission = layout.admissions[0]
    if len(layout.shapes) == 1:
        reserved = admission.reserved._replace(slots=engine.size.slots)
        shape = engine.options.shape
        admission = dataclasses.replace(admission, shape=shape, reserved=reserved)
    pools = [engine.prepared(name).pool for name in engine.names[: engine.size.slots]]
    in_flight = admission.costs.full_depth
    return int(admission.peak(pools, planned_remat(engine.remat), in_flight))


def _with_prompts(engine: Engine) -> list[PreparedTask]:
    """The tasks that succeeded and have a prompt to complete after training."""
    return [
        p
        for p in map(engine.prepared, engine.names)
        if p.task.sample_prompt is not None and engine.progress(p.task.name).status == "succeeded"
    ]
