"""The shape class of a training run is chosen over all its rounds by predicted time, and kept."""

import dataclasses
import json
import signal
from functools import partial
from io import StringIO

import gin
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxmux import AdamW, Engine, Interrupted, LoRA, Task
from jaxmux.cli import gin_bindings
from jaxmux.cli.main import run_command
from jaxmux.cli.plan_command import _load
from jaxmux.data import GlobalBatches, Sample, Samples, load_tokenizer
from jaxmux.engine import PreparedTask, prepare_task
from jaxmux.engine.rounds.rounds import ReplicaInput, training_rounds
from jaxmux.engine.tasks.prepared_task import size_of
from jaxmux.models import Backbone, BackboneConfig
from jaxmux.objectives import ORPO, SimPO
from jaxmux.planner import PlanningError
from jaxmux.planner.costs import CostSource, PoolSpec
from jaxmux.planner.costs.cost_models import estimated_memory
from jaxmux.planner.costs.device_profile import AttentionPoint, UpdatePoint, write_profile
from jaxmux.planner.devices import ONE_DEVICE, Deployment, Replica
from jaxmux.planner.packing import (
    PricedShape,
    ShapeClass,
    ShapeRequest,
    plain_shape,
    sample_rounds,
)
from jaxmux.planner.pipeline import Plan, TaskLoad, make_plan
from jaxmux.planner.replicas import (
    ShapeCosts,
    assign_samples,
    make_deployment_plan,
    predicted_round_seconds,
)
from jaxmux.runs import mesh_choice, run_shape
from jaxmux.runs.console import RunConsole
from jaxmux.runs.run_layout import choose_layout
from jaxmux.runs.run_shape import best_shape, choose_run_shape, run_costs

CONFIG = BackboneConfig(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)
# Seconds per token of a layer, of attention in rows of one sequence, and of attention in rows of
# several sequences.
LAYER, DENSE, PACKED = 1e-6, 1e-7, 5e-6

SOURCE = CostSource("estimated", "a test", "cpu", 2**34)


def prepared(name: str, lengths, batch_size: int = 16, steps: int = 100) -> PreparedTask:
    ids = [np.zeros(length + 1, np.int32) for length in lengths]
    samples = [Sample(tokens, np.arange(len(tokens)) > 0, i) for i, tokens in enumerate(ids)]
    return PreparedTask(
        task=Task(name, "none", LoRA(4), AdamW(), batch_size=batch_size, steps=steps),
        targets={"self_attn.q_proj": np.ones(4, bool)},
        make_adapter=dict,
        samples=Samples(samples, len(samples), 0, 0),
        batches=GlobalBatches(samples, batch_size, seed=0),
        steps=steps,
        eval_samples=[],
    )


@pytest.fixture
def tasks() -> list[PreparedTask]:
    rng = np.random.default_rng(0)
    short = rng.integers(40, 64, 200)
    return [prepared("short", short), prepared("long", rng.integers(60, 120, 200), steps=40)]


def price(point) -> float:
    """Seconds of a point of the profile."""
    match point:
        case UpdatePoint():
            return 1e-6
        case AttentionPoint():
            return (DENSE if point.max_sequences == 1 else PACKED) * point.tokens
        case _:
            return LAYER * point.tokens


@pytest.fixture
def ship(tmp_path, monkeypatch, small_profile):
    """Writes a profile and makes it the only one that ships."""
    monkeypatch.setattr(run_shape, "PROFILES", str(tmp_path))

    def write(config=CONFIG, dtype="float32", device="cpu") -> None:
        size = estimated_memory(size_of(config, jnp.dtype(dtype))).backbone
        made = {"device": device, "dtype": dtype, "tokens": (512, 2048), "rank": 4}
        profile = small_profile(size, price, peak=lambda _: 1000, **made)
        write_profile(profile, tmp_path / "profile.json")

    return write


def chosen(tasks, **given):
    costs = run_costs(tasks, CONFIG, jnp.float32)
    return choose_run_shape(tasks, costs, ShapeRequest(2048, **given))


@pytest.mark.parametrize(
    ("objective", "given", "fits"),
    [
        (SimPO(), {}, True),
        (SimPO(), {"row_len": 256}, True),
        (SimPO(), {"row_len": 128}, False),
        (SimPO(), {"row_len": 256, "chunk_len": 64, "max_sequences": 1}, False),
        (ORPO(), {}, False),
    ],
)
def test_rows_hold_pairs_that_train_in_one_pass(objective, given, fits, tasks):
    lengths = np.random.default_rng(1).integers(90, 110, 64)
    task = prepared("pairs", lengths, batch_size=4)
    samples = task.samples.samples
    task = dataclasses.replace(
        task,
        task=dataclasses.replace(task.task, objective=objective),
        batches=GlobalBatches(samples, 4, seed=0, members=2),
    )
    shape = chosen([task], **given).alignment.shape
    assert task.pairs_fit(shape) == fits
    assert shape.row_len == given.get("row_len", 256 if fits else 128)
    # Beside short samples, rows hold more sequences.
    both = chosen([task, *tasks], **given).alignment.shape
    assert task.pairs_fit(both) == fits
    load = _load(task, shape)
    assert load.scored == (not fits) and load.longest_pair == (task.longest_pair if fits else 0)
    assert list(load.batches[0]) == list(
        np.add.reduceat([s.stream_length for s in task.batches[0]], range(0, 8, 1 + fits))
    )


def by_plain_rule(tasks) -> PricedShape:
    rounds = sample_rounds([task.batch_lengths for task in tasks])
    costs = run_costs(tasks, CONFIG, jnp.float32)
    lengths = [length for task in tasks for length in task.lengths]
    return plain_shape(rounds, ShapeRequest(2048), costs.replica.microbatch, lengths)


def load(task: PreparedTask) -> TaskLoad:
    """The task as plans describe it."""
    lengths = [s.stream_length for s in task.samples.samples]
    batches = task.batch_lengths
    size, held_out = task.task.batch_size, [s.stream_length for s in task.eval_samples]
    return TaskLoad(task.task.name, task.pool, size, task.steps, lengths, batches, held_out)


@pytest.mark.long
def test_best_shape_is_the_shape_class_of_a_training_run(tasks):
    backbone = Backbone.random(CONFIG)
    assert best_shape(tasks, backbone, 2048) == chosen(tasks).alignment.shape
    with pytest.raises(PlanningError, match="no tasks"):
        best_shape([], backbone)


def test_lengths_of_batches_are_those_of_every_step(tasks):
    lengths = tasks[1].batch_lengths
    assert len(lengths) == 40
    assert lengths[39] == [s.stream_length for s in tasks[1].batches[39]]
    with pytest.raises(IndexError, match="step 40 of 40"):
        lengths[40]


@pytest.mark.long
@pytest.mark.parametrize(
    ("batch_size", "least_chunk_len"),
    [
        *((4, 128), (16, 64), (300, 64)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 64), (16, 128), (300, 128))),
    ],
)
def test_plan_of_one_device_has_the_shape_class_that_training_chooses(batch_size, least_chunk_len):
    rng = np.random.default_rng(batch_size)
    # The task with long samples trains longer, so the first rounds differ from the others.
    tasks = [
        prepared("short", rng.integers(40, 64, 400), batch_size, steps=5),
        prepared("long", rng.integers(60, 500, 400), batch_size),
    ]
    costs = run_costs(tasks, CONFIG, jnp.float32)._replace(least_chunk_len=least_chunk_len)
    request = ShapeRequest(2048, least_chunk_len=least_chunk_len)
    plan = make_plan([load(task) for task in tasks], request, costs.replica, SOURCE, rounds=2)
    assert plan.shape == choose_run_shape(tasks, costs, request).alignment.shape


@pytest.mark.long
def test_plan_of_a_pipeline_has_the_microbatches_that_training_runs():
    """Round by round, with the same samples in the same order."""
    rng, replica = np.random.default_rng(5), Replica.uniform(pp=2, tp=1)
    tasks = [
        prepared(name, rng.integers(*sizes, 400), batch_size, steps=6)
        for name, sizes, batch_size in (
            ("short", (40, 64), 24),
            ("middle", (60, 200), 16),
            ("long", (200, 500), 12),
            ("few", (100, 400), 4),
        )
    ]
    costs = run_costs(tasks, CONFIG, jnp.float32, replica=replica)
    request = ShapeRequest(2048)
    plan = make_plan([load(task) for task in tasks], request, costs.replica, SOURCE, rounds=6)
    assert plan.shape == choose_run_shape(tasks, costs, request).alignment.shape
    assert len(plan.groups) > 1

    pipeline = ReplicaInput(plan.shape, replica, groups="planned")
    pool = PoolSpec(slots=4, rank=4)
    rounds = training_rounds(dict(enumerate(tasks)), dict.fromkeys(range(4), 0), pool, [pipeline])
    trained = [
        {(slot, step, i) for slot, own in microbatch.samples.items() for i in own}
        for step, a_round in enumerate(rounds)
        for microbatch in a_round.microbatches
    ]
    assert trained == [{(s.slot, s.step, s.sample) for s in own} for own in plan.microbatches]


@pytest.mark.long
def test_plans_of_a_deployment_have_the_microbatches_that_training_runs():
    """Each replica trains its share, in the same groups, and together they train every sample."""
    rng, deployment = np.random.default_rng(6), Deployment.parse("pp2 + 2*(tp1)")
    tasks = [
        prepared(name, rng.integers(*sizes, 400), batch_size, steps=4)
        for name, sizes, batch_size in (
            ("short", (40, 64), 40),
            ("middle", (60, 200), 30),
            ("long", (200, 500), 24),
        )
    ]
    costs = {
        replica: run_costs(tasks, CONFIG, jnp.float32, replica=replica).replica
        for replica in deployment.counts
    }
    loads = [load(task) for task in tasks]
    several = make_deployment_plan(loads, ShapeRequest(1024), deployment, costs, SOURCE, rounds=4)
    assert len(several.plans[0].groups) > 1
    shapes = {plan.replica: (costs[plan.replica], plan.shape) for plan in several.plans}

    rounds = training_rounds(
        dict(enumerate(tasks)),
        dict.fromkeys(range(3), 0),
        PoolSpec(slots=3, rank=4),
        [ReplicaInput(plan.shape, plan.replica, groups="planned") for plan in several.plans],
        dispatch=partial(assign_samples, deployment.replicas, ShapeCosts(shapes)),
    )
    trained = [[], [], []]
    for step, a_round in enumerate(rounds):
        for own in a_round.microbatches:
            samples = {(slot, step, i) for slot, each in own.samples.items() for i in each}
            trained[own.replica].append(samples)
    assert trained == [
        [{(s.slot, s.step, s.sample) for s in own} for own in plan.microbatches]
        for plan in several.plans
    ]
    every = [sample for own in trained for microbatch in own for sample in microbatch]
    assert len(every) == len(set(every)) == 4 * (40 + 30 + 24)
    assert several.round_seconds == max(p.prediction.round_seconds for p in several.plans)
    batches = [task.batches for task in loads]
    assert several.round_seconds == predicted_round_seconds(batches, deployment, shapes)


def test_rows_of_replicas_hold_held_out_samples_and_large_rounds_take_longer():
    deployment = Deployment.parse("2*(tp1)")
    short = np.random.default_rng(8).integers(20, 60, 6000)
    costs = {
        ONE_DEVICE: run_costs([prepared("a", short, 64)], CONFIG, jnp.float32).replica,
    }

    def plan(task: TaskLoad):
        return make_deployment_plan([task], ShapeRequest(1024), deployment, costs, SOURCE, rounds=1)

    held_out = load(prepared("a", short, 64))._replace(only_read=[300])
    assert plan(held_out).plans[0].shape.row_len == 512

    small, large = (load(prepared("a", short, size, steps=1)) for size in (512, 2048))
    priced = {ONE_DEVICE: (costs[ONE_DEVICE], plan(small).plans[0].shape)}
    seconds = [predicted_round_seconds([t.batches], deployment, priced) for t in (small, large)]
    # Of a large round only a part is packed, and its time is scaled up.
    assert seconds[1] == pytest.approx(4 * seconds[0], rel=0.1)


def test_a_row_that_is_too_short_for_a_sample_names_the_task():
    tasks = [prepared("a", [100, 200], 2)]
    costs = {ONE_DEVICE: run_costs(tasks, CONFIG, jnp.float32).replica}
    request, deployment = ShapeRequest(1024, row_len=128), Deployment.parse("2*(tp1)")
    with pytest.raises(PlanningError, match="task 'a'.*200 places.*row_len=256"):
        make_deployment_plan([load(tasks[0])], request, deployment, costs, SOURCE, rounds=1)


def test_a_replica_without_memory_for_long_samples_gets_short_rows():
    rng, deployment = np.random.default_rng(7), Deployment.parse("pp2 + tp1")
    tasks = [prepared("a", rng.integers(60, 120, 200), 20, steps=2)]
    tasks.append(prepared("b", rng.integers(900, 1000, 20), 2, steps=2))
    costs = {
        replica: run_costs(tasks, CONFIG, jnp.float32, replica=replica).replica
        for replica in deployment.counts
    }
    small = costs[ONE_DEVICE]
    # Microbatches of 256 tokens, or of one row if rows are longer.
    request = ShapeRequest(256)
    needed = small.memory.peak(ShapeClass(1, 512, 64, 1), small.pool, "full")
    memory = dataclasses.replace(small.memory, memory=int(1.1 * needed))
    costs[ONE_DEVICE] = dataclasses.replace(small, memory=memory)
    loads = [load(task) for task in tasks]
    several = make_deployment_plan(loads, request, deployment, costs, SOURCE, rounds=2)
    long, short = several.plans
    assert long.shape.row_len == 1024 > short.shape.row_len
    assert {sample.slot for own in short.microbatches for sample in own} == {0}

    alone = Deployment.parse("2*(tp1)")
    with pytest.raises(PlanningError, match="mesh .* task 'b' takes 9.. places .* larger replica"):
        make_deployment_plan(loads, request, alone, costs, SOURCE, rounds=2)


def test_three_given_lengths_leave_nothing_to_choose(tasks):
    given = {"row_len": 512, "chunk_len": 128, "max_sequences": 3}
    shapes = [chosen(some, **given).alignment.shape for some in (tasks, tasks[:1], tasks[1:])]
    assert shapes == [ShapeClass(4, 512, 128, 3)] * 3


def test_choice_is_better_than_the_plain_rule_and_the_log_names_the_costs(tasks, caplog):
    with caplog.at_level("INFO", logger="jaxmux"):
        choice = chosen(tasks)
    assert choice == chosen(tasks)
    plain = by_plain_rule(tasks)
    assert choice.alignment.seconds < plain.seconds
    assert choice.alignment.padding < plain.padding
    run_shape, padding = choice.alignment.shape, choice.alignment.padding
    assert str(choice) == (
        f"microbatches of {run_shape.rows} rows of {run_shape.row_len} tokens, chunks of "
        f"{run_shape.chunk_len} ({padding:.0%} padding)"
    )
    assert len(str(choice)) <= 80
    line = caplog.messages[0]
    assert line.startswith(str(choice))
    assert "the fastest by costs estimated for NVIDIA H200" in line


def test_both_lengths_given_leave_nothing_to_choose(tasks):
    choice = chosen(tasks, row_len=256, chunk_len=128)
    run_shape = choice.alignment.shape
    assert run_shape == ShapeClass(8, 256, 128, run_shape.max_sequences)


def test_held_out_samples_fit_a_row_too(tasks):
    held_out = prepared("long", [500]).samples.samples
    wider = [tasks[0], dataclasses.replace(tasks[1], eval_samples=held_out)]
    assert chosen(wider).alignment.shape.row_len >= 500


def test_costs_are_those_of_a_profile_of_this_device_and_backbone(tasks, ship):
    assert chosen(tasks).alignment.shape.max_sequences > 1
    ship()
    choice = chosen(tasks)
    assert choice.source == "measured for cpu"
    # In this profile, packed attention takes more time than the padding that it saves.
    assert choice.alignment.shape.max_sequences == 1


@pytest.mark.parametrize(
    "other",
    [
        {"config": dataclasses.replace(CONFIG, intermediate_size=1024)},
        {"dtype": "bfloat16"},
        {"device": "NVIDIA H200"},
    ],
    ids=["backbone", "dtype", "device"],
)
def test_profile_of_something_else_is_not_used(tasks, ship, other):
    ship(**other)
    assert "estimated" in chosen(tasks).source


def test_measured_and_predicted_round_stand_side_by_side(
    train, make_task, tmp_path, ship, backbone, capsys
):
    """Only with costs that were measured on such a device."""
    task = make_task(steps=8)
    summary = train(tmp_path / "estimated", task)
    assert 0 < summary.round_seconds < summary.wall_seconds
    assert summary.predicted_round_seconds is None
    assert "a round (predicted" not in capsys.readouterr().out
    ship(config=BackboneConfig.from_folder(backbone))
    summary = train(tmp_path / "measured", task)
    line = f"{summary.round_seconds:.3g} s a round"
    line += f" (predicted: {summary.predicted_round_seconds:.3g} s)\n"
    assert line in capsys.readouterr().out
    update = price(UpdatePoint(parameters=1, slots=1, optimizer="adamw"))
    assert update < summary.predicted_round_seconds < 1e4 * update


def test_a_continued_run_keeps_its_shape_class(
    train, make_task, tmp_path, monkeypatch, adapter_bytes
):
    """A run that continues does not choose a shape class again."""
    task = make_task("a", steps=4, batch_size=14)
    options = {"row_len": None, "chunk_len": None, "max_sequences": None, "checkpoint_every": 2}
    train(tmp_path / "whole", task, **options)

    train_round = Engine.train_round

    def train_round_and_stop(engine, *arguments, **options):
        if engine.rounds == 2:
            signal.raise_signal(signal.SIGTERM)
        return train_round(engine, *arguments, **options)

    monkeypatch.setattr(Engine, "train_round", train_round_and_stop)
    with pytest.raises(Interrupted):
        train(tmp_path / "stopped", task, **options)

    def choose_otherwise(*_):
        raise AssertionError("chosen again")

    monkeypatch.setattr(Engine, "train_round", train_round)
    monkeypatch.setattr(mesh_choice, "choose_run_shape", choose_otherwise)
    train(tmp_path / "stopped", task, **options)
    found, expected = (adapter_bytes(tmp_path / d / "adapters") for d in ("stopped", "whole"))
    assert found == expected
    with pytest.raises(AssertionError, match="chosen again"):
        train(tmp_path / "stopped", task, restart=True, **options)


TWO_LENGTHS = (
    "fine_tune.tasks = [@tiny/Task(), @long/Task()]",
    "long/Task.name = 'long'",
    "long/Task.batch_size = 3",
    "long/Task.steps = 2",
    "long/Task.adapter = @tiny/LoRA()",
    "long/Task.optimizer = @SGD()",
    "SGD.learning_rate = 1e-2",
    "tiny/LoRA.target_modules = ['q_proj']",
)
SWEEP = (
    "fine_tune.tasks = [@Sweep(), @long/Task()]",
    "Sweep.task = @tiny/Task()",
    "Sweep.space = {'optimizer.learning_rate': [1e-3, 1e-2]}",
    "fine_tune.tasks_at_once = 1",
    *TWO_LENGTHS[1:],
)
CHOSEN = {"row_len": None, "chunk_len": None, "max_sequences": None, "tokens_per_microbatch": 512}
PLANNED = {
    "one task": ((), {"row_len": None, "max_sequences": None}),
    "two lengths": (TWO_LENGTHS, CHOSEN | {"remat": "auto"}),
    "a sweep of which one trains at a time": (SWEEP, CHOSEN),
    "a limit of memory": (
        TWO_LENGTHS,
        CHOSEN | {"memory_gib": 0.1, "reserved_slots": 3, "remat": "auto"},
    ),
}


@pytest.fixture
def command(capsys):
    """Runs a command on a config; returns the lines that it prints."""

    def run(name: str, *arguments: str) -> list[str]:
        assert run_command(name, arguments, prog=f"jaxmux {name}") == 0
        return capsys.readouterr().out.splitlines()

    yield run
    gin.clear_config()


def planned_shapes(lines: list[str]) -> list[str]:
    return [line for line in lines if "microbatches of " in line]


@pytest.mark.long
@pytest.mark.parametrize(
    ("lines", "options"),
    [
        # The last case has two lengths, too, and slots that were reserved.
        pytest.param(*case, id=name, marks=[] if name == "a limit of memory" else pytest.mark.slow)
        for name, case in PLANNED.items()
    ],
)
def test_training_has_the_shape_and_padding_of_its_plan(
    lines, options, write_config, data, command, tmp_path
):
    long = () if not lines else (f"long/Task.data = {data['long']!r}",)
    config = f"--gin_file={write_config(*lines, *long, run=options)}"
    planned = command("plan", config, "--rounds=2", f"--out={tmp_path}")
    trained = command("train", config, f"--run_dir={tmp_path / 'run'}")
    assert planned_shapes(planned) == planned_shapes(trained) and planned_shapes(trained)
    plan = Plan.from_json(json.loads((tmp_path / "plan.json").read_text()))
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["shape"]
    assert dataclasses.asdict(plan.shape) == recorded


@pytest.mark.parametrize("mesh", ["pp2", "pp2 + tp1", "dp2"])
def test_plans_of_devices_that_are_not_there_have_the_shapes_of_training(
    mesh, write_config, data, command, tmp_path
):
    """The shapes that training chooses before it needs the devices."""
    long = f"long/Task.data = {data['long']!r}"
    config = write_config(*TWO_LENGTHS, long, run=CHOSEN | {"mesh": mesh})
    planned = command("plan", f"--gin_file={config}", "--rounds=2", f"--out={tmp_path}")
    gin_bindings.parse([config], [])
    run, said = gin_bindings.run_config(), StringIO()
    backbone = BackboneConfig.from_folder(run.backbone)
    tokenizer = load_tokenizer(run.backbone)
    tasks = [prepare_task(task, backbone, tokenizer) for task in run.tasks]
    layout = choose_layout(tasks, backbone, run, None, RunConsole(Console(file=said)))
    assert planned_shapes(planned) == planned_shapes(said.getvalue().splitlines())
    written = json.loads((tmp_path / "plan.json").read_text())
    plans = [Plan.from_json(own) for own in written.get("plans", [written])]
    assert tuple(plan.shape for plan in plans) == layout.shapes
