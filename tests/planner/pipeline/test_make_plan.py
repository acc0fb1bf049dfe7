"""Plans: complete, legal, the same after a file, and refused with the change that would help."""

import dataclasses
import json
import time

import numpy as np
import pytest
from matplotlib.axes import Axes

from jaxmux.cli.plan_picture import draw_schedule
from jaxmux.cli.plan_tables import plan_tables
from jaxmux.cli.plan_trace import chrome_trace
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.adapter_times import AdapterTimes
from jaxmux.planner.costs.attention_memory import PackedBytes
from jaxmux.planner.costs.cost_models import estimated_models
from jaxmux.planner.costs.device_profile import BackboneSize
from jaxmux.planner.costs.estimates import estimated_memory, estimated_times
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.costs.replica_costs import ReplicaCosts
from jaxmux.planner.devices import Replica
from jaxmux.planner.packing.shape_class import ShapeClass
from jaxmux.planner.pipeline import make_plan as make_plan_module
from jaxmux.planner.pipeline import plan_value as plan_module
from jaxmux.planner.pipeline.groupings import Grouping
from jaxmux.planner.pipeline.make_plan import (
    ShapeRequest,
    TaskLoad,
    make_plan,
    shared_pool,
    try_smaller_microbatches,
)
from jaxmux.planner.pipeline.plan_value import FORMAT, Plan
from jaxmux.planner.pipeline.schedules import validate

ROUNDS = 4
ONE = Replica()
REQUEST = ShapeRequest(tokens=4096, least_chunk_len=128)


@pytest.fixture(scope="module")
def size() -> BackboneSize:
    """Llama-3.1-8B."""
    d, kv, f = 4096, 1024, 14336
    linears = {
        "self_attn.q_proj": (d, d),
        "self_attn.k_proj": (d, kv),
        "self_attn.v_proj": (d, kv),
        "self_attn.o_proj": (d, d),
        "mlp.gate_proj": (d, f),
        "mlp.up_proj": (d, f),
        "mlp.down_proj": (f, d),
    }
    weights = 2 * sum(k * n for k, n in linears.values())
    outside = 2 * 2 * 128256 * d
    packed = PackedBytes.of(32, 8, 128, itemsize=2)
    return BackboneSize("Llama", 32, d, 128256, linears, weights, outside, 2, {}, 2**29, packed)


def draw(tasks: int = 4, samples: int = 32) -> list[TaskLoad]:
    """Tasks as unlike as data sets are, from 100 to 800 tokens a sample on average."""
    rng = np.random.default_rng(0)
    loads = []
    for i, mean in enumerate(np.geomspace(100, 800, tasks)):
        sizes = np.clip(rng.lognormal(np.log(mean), 0.4, (ROUNDS, samples)), 16, 2000)
        batches = sizes.astype(int).tolist()
        lengths = [length for batch in batches for length in batch]
        loads.append(TaskLoad(f"task{i}", PoolSpec(1, 2**i), samples, 100, lengths, batches))
    return loads


def costs_of(size, tasks, mesh=ONE, memory=None, remat="auto") -> ReplicaCosts:
    models = estimated_models(size, memory, mesh)
    return ReplicaCosts(models.times, models.memory, shared_pool(tasks), mesh, remat)


def plan_of(size, tasks, mesh=ONE, request=REQUEST, memory=None, remat="auto") -> Plan:
    models = estimated_models(size, memory, mesh)
    costs = costs_of(size, tasks, mesh, memory, remat)
    return make_plan(tasks, request, costs, models.source, ROUNDS)


@pytest.fixture(scope="module")
def tasks() -> list[TaskLoad]:
    return draw()


@pytest.fixture(scope="module")
def plan(size, tasks) -> Plan:
    return plan_of(size, tasks, Replica.uniform(4, 2))


@pytest.mark.parametrize("mesh", [Replica(), Replica.uniform(2, 1), Replica.uniform(4, 2)], ids=str)
def test_every_sample_of_every_round_is_placed_once_and_nothing_overlaps(size, tasks, mesh):
    plan = plan_of(size, tasks, mesh)
    placed = [(s.slot, s.step, s.sample) for own in plan.microbatches for s in own]
    assert sorted(placed) == [
        (slot, step, sample)
        for slot, task in enumerate(tasks)
        for step, batch in enumerate(task.batches)
        for sample in range(len(batch))
    ]
    for own in plan.microbatches:
        owner = np.full((plan.shape.rows, plan.shape.row_len), -1)
        for s in own:
            assert s.tokens == tasks[s.slot].batches[s.step][s.sample]
            cells = owner[s.row, s.offset : s.offset + s.tokens]
            assert len(cells) == s.tokens and (cells == -1).all()
            cells[:] = s.slot
        for chunk in owner.reshape(-1, plan.shape.chunk_len):
            assert len(set(chunk) - {-1}) <= 1


def test_schedule_is_legal_and_its_jobs_are_the_microbatches(plan):
    validate(plan.schedule)
    assert len(plan.schedule.jobs) == len(plan.microbatches)
    for job, own in zip(plan.schedule.jobs, plan.microbatches, strict=True):
        assert set(job.batches) == {(s.slot, s.step) for s in own}


def test_plan_survives_a_file(plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_json()))
    assert Plan.from_json(json.loads(path.read_text())) == plan


def test_json_has_the_documented_keys(plan):
    data = plan.to_json()
    assert data["format"] == FORMAT
    documented = plan_module.__doc__
    parts = [data, data["costs"], data["prediction"], *data["tasks"], *data["baselines"]]
    for key in {key for part in parts for key in part}:
        assert f'"{key}"' in documented


def test_file_of_another_format_is_refused(plan):
    with pytest.raises(PlanningError, match="format is 'jaxmux.schedule/1'"):
        Plan.from_json(plan.schedule.to_json())
    data = plan.to_json()
    del data["shape"]
    with pytest.raises(PlanningError, match="lacks 'shape'"):
        Plan.from_json(data)


def test_prediction_is_what_the_schedule_takes(plan):
    simulation = plan.simulate()
    own = plan.prediction
    assert own.bubble_ratio == pytest.approx(simulation.bubble_ratio())
    rounds = simulation.makespan / plan.rounds
    assert own.step_seconds == pytest.approx(rounds + own.update_seconds)
    assert plan.simulate(unit=1e-3).makespan == pytest.approx(1e3 * simulation.makespan)


def test_plan_is_at_least_as_fast_as_its_baselines(plan):
    names = {baseline.name: baseline for baseline in plan.baselines}
    assert set(names) == {"1F1B per task", "batch everything"}
    for baseline in plan.baselines:
        assert plan.prediction.step_seconds <= baseline.step_seconds
    assert plan.prediction.bubble_ratio < names["1F1B per task"].bubble_ratio


def test_grouping_that_one_group_outdoes_over_all_rounds_gives_way_to_it(size, monkeypatch):
    """Here: tasks that fill no microbatch alone."""

    def choose_apart(batches, shape, costs):
        slots = tuple(batches[0])
        alone = Grouping(tuple((s,) for s in slots), tuple((i,) for i in range(len(slots))))
        return make_plan_module._plan_with(alone, batches, shape, costs)

    monkeypatch.setattr(make_plan_module, "_choose_grouping", choose_apart)
    request = REQUEST._replace(tokens=16384)
    plan = plan_of(size, draw(tasks=8, samples=4), Replica.uniform(2, 1), request)
    assert plan.groups == (tuple(range(8)),)
    (together,) = [b for b in plan.baselines if b.name == "batch everything"]
    assert plan.prediction.step_seconds == together.step_seconds


def test_tasks_of_one_device_are_one_htask(size, tasks):
    plan = plan_of(size, tasks)
    assert plan.htasks == (tuple(range(len(tasks))),) and plan.buckets == ((0,),)
    assert [baseline.name for baseline in plan.baselines] == ["one task at a time"]


def test_shape_class_depends_on_rounds_of_the_whole_run(size):
    """Not on how many of them are shown."""
    short, long = [[100] * 16] * 8, [[900] * 16] * 92
    lengths = [100, 900]
    load = TaskLoad("late", PoolSpec(1, 8), 16, 100, lengths, short + long)
    first = load._replace(batches=short)
    for mesh in (ONE, Replica.uniform(2, 1)):
        shapes = [plan_of(size, [own], mesh).shape for own in (load, first)]
        assert shapes[0] != shapes[1]


def test_every_task_is_in_one_htask_and_every_htask_in_one_bucket(plan, tasks):
    assert sorted(slot for htask in plan.htasks for slot in htask) == list(range(len(tasks)))
    assert sorted(i for bucket in plan.buckets for i in bucket) == list(range(len(plan.htasks)))
    for job in plan.schedule.jobs:
        assert set(job.tasks) & set(plan.groups[job.bucket])


def test_smaller_microbatches_are_proposed_where_a_pipeline_runs_dry(size, tasks, plan):
    costs = costs_of(size, tasks, Replica.uniform(4, 1))
    large = REQUEST._replace(tokens=16384)
    dry = plan_of(size, tasks, Replica.uniform(4, 1), large)
    smaller = try_smaller_microbatches(dry, tasks, large, costs)
    assert smaller.tokens < dry.shape.tokens
    assert smaller.step_seconds < dry.prediction.step_seconds
    found = plan_of(
        size, tasks, Replica.uniform(4, 1), large._replace(tokens=smaller.tokens)
    ).prediction
    assert (smaller.step_seconds, smaller.bubble_ratio) == pytest.approx(
        (found.step_seconds, found.bubble_ratio)
    )
    alone = plan_of(size, tasks)
    assert try_smaller_microbatches(alone, tasks, REQUEST, costs_of(size, tasks)) is None


def test_smaller_microbatches_are_proposed_where_padding_is_high(size):
    """By the N that was asked for, however it is rounded up to rows."""
    loads, mesh = draw(samples=8), Replica.uniform(2, 1)
    request, costs = REQUEST._replace(tokens=6000), costs_of(size, loads, mesh)
    padded = plan_of(size, loads, mesh, request)
    assert padded.prediction.bubble_ratio < 0.15
    smaller = try_smaller_microbatches(padded, loads, request, costs)
    assert smaller.tokens in (3000, 1500)
    found = plan_of(size, loads, mesh, request._replace(tokens=smaller.tokens)).prediction
    assert found.step_seconds == pytest.approx(smaller.step_seconds)
    assert found.step_seconds < 0.95 * padded.prediction.step_seconds


def test_records_that_gave_no_sample_are_told_by_task(plan):
    lines = [part for part in plan_tables(plan, dropped={"task1": 12}) if isinstance(part, str)]
    (line,) = [line for line in lines if "dropped" in line]
    assert line.startswith("task task1: 12 of 140 records dropped")


def test_picture_tells_the_bubble_ratio_of_a_pipeline_only(
    size, tasks, plan, tmp_path, monkeypatch
):
    titles = []
    monkeypatch.setattr(Axes, "set_title", lambda _, title, **__: titles.append(title))
    for own in (plan, plan_of(size, tasks)):
        draw_schedule(own.schedule, own.simulate(), tmp_path / "schedule.png", "title")
    ratio = f"{plan.prediction.bubble_ratio:.1%}"
    assert titles == [f"title: bubble ratio {ratio}", "title"]


@pytest.mark.parametrize("unit", [1, 1e-3, 3e-5])
def test_trace_begins_at_0_whatever_the_rounding(plan, unit):
    events = chrome_trace(plan.schedule, plan.simulate(unit=unit))["traceEvents"]
    assert min(event["ts"] for event in events if "ts" in event) == 0
    assert min(event["dur"] for event in events if "dur" in event) > 0


def test_32_tasks_are_planned_in_seconds(size):
    loads = [task._replace(name=f"{task.name}.{i}") for i in range(8) for task in draw(samples=16)]
    start = time.process_time()
    plan = plan_of(size, loads, Replica.uniform(4, 1))
    assert time.process_time() - start < 8
    assert len(plan.tasks) == 32 and plan.prediction.bubble_ratio < 0.05


def test_tensor_parallelism_and_stages_share_time_and_memory(size, tasks):
    shape = ShapeClass(4, 2048, 128, 128)
    one, four = (costs_of(size, tasks, mesh) for mesh in (Replica(), Replica.uniform(2, 2)))
    assert one.microbatch(shape) / 4 < four.microbatch(shape) < one.microbatch(shape)
    peaks = [costs.peak(shape, costs.policies(shape), 1) for costs in (one, four)]
    assert peaks[1] < peaks[0] / 2


def test_estimate_of_a_llama_layer_is_near_the_times_it_is_made_of(size):
    """8192 tokens: the linears at 735 TFLOP/s both ways, and attention of 512 tokens, 0.77 ms."""
    times, shape = estimated_times(size), ShapeClass(16, 512, 128, 1)
    frozen = dataclasses.replace(times, adapters=AdapterTimes.none())
    frozen = frozen.layer(shape, (8192,), PoolSpec(1, 16)).total
    linears = 2 * 2 * 8192 * 218_103_808 / 735e12
    assert frozen == pytest.approx(linears + 0.77e-3, rel=0.1)


def test_estimated_memory_keeps_what_the_model_keeps(size):
    """Values that a layer names, by hand: its input, q, k, v, attention's output, the stream
    between, gate and up."""
    kept = estimated_memory(size).backbone.kept
    assert kept["dots"] == (2 * (4096 + 6144 + 4096 + 4096 + 2 * 14336), 2 * 7)
    assert kept["full"] == (2 * 4096, 0)


def test_estimated_memory_does_not_grow_with_the_length_of_rows(size):
    memory, pool = estimated_memory(size), PoolSpec(1, 16)
    shapes = [ShapeClass(2**15 // n, n, 128, 1) for n in (128, 2048, 32768)]
    peaks = [memory.peak(shape, pool, "dots") for shape in shapes]
    assert peaks == pytest.approx([peaks[0]] * 3, rel=0.01)
    layers = memory.resident(pool) + 32 * memory.kept(2**15, 16, "dots")
    assert peaks[0] == pytest.approx(layers + 1.25 * memory.kept(2**15, 0, "norms"), rel=0.01)


def test_task_that_fits_nowhere_is_named_with_the_change_that_helps(size, tasks):
    with pytest.raises(PlanningError, match=r"task 'task0' does not fit even alone on pp1") as e:
        plan_of(size, tasks, memory=17 * 2**30)
    stages = int(str(e.value).split(" pipeline stages")[0].split()[-1])
    assert plan_of(size, tasks, Replica.uniform(stages, 1), memory=17 * 2**30)
    with pytest.raises(PlanningError, match="does not fit"):
        plan_of(size, tasks, Replica.uniform(stages - 1, 1), memory=17 * 2**30)


def test_tasks_that_do_not_fit_together_are_told_how_many_do(size, tasks):
    """The pool's rank is the highest of all."""
    wide = [task._replace(pool=PoolSpec(1, 256)) for task in tasks]
    with pytest.raises(
        PlanningError,
        match=r"task 'task2' does not fit beside 'task0', 'task1': .* 4 slots .* at most 2 slots",
    ):
        plan_of(size, wide, memory=40 * 2**30)


def test_buckets_are_shown_with_the_tokens_of_their_own_tasks(plan, tasks):
    (table,) = [
        part
        for part in plan_tables(plan)
        if not isinstance(part, str) and part.columns[0].header == "bucket"
    ]
    shown = [int(cell.replace(",", "")) for cell in table.columns[2].cells]
    own = [
        sum(sum(map(sum, tasks[slot].batches)) for h in bucket for slot in plan.htasks[h])
        for bucket in plan.buckets
    ]
    assert len(own) > 1
    np.testing.assert_allclose(shown, [*own, sum(own)] / np.float64(ROUNDS), atol=0.5)


def test_row_length_that_no_row_can_have_is_refused_as_such(size, tasks):
    with pytest.raises(PlanningError, match="row_len=300 is not a power of two"):
        plan_of(size, tasks, request=REQUEST._replace(row_len=300))


def test_recomputing_more_for_room_in_the_pipeline_is_tried(size, tasks, monkeypatch):
    memory = 13 * 2**30
    plan = plan_of(size, tasks, Replica.uniform(2, 1), memory=memory)
    monkeypatch.setattr(make_plan_module, "_depths", lambda shape, costs: [costs])
    shallow = plan_of(size, tasks, Replica.uniform(2, 1), memory=memory)
    assert plan.remat.count("full") > shallow.remat.count("full")
    assert plan.prediction.step_seconds < 0.9 * shallow.prediction.step_seconds
    assert plan.prediction.memory_bytes <= memory
    # What there is to compare with does not depend on it.
    assert plan.baselines == shallow.baselines


def test_policy_that_needs_too_much_is_refused(size, tasks):
    with pytest.raises(PlanningError, match="remat='dots' needs .* fit with remat='auto'"):
        plan_of(size, tasks, memory=20 * 2**30, remat="dots")
    assert plan_of(size, tasks, memory=20 * 2**30)


def test_sample_beyond_the_row_is_named(size, tasks):
    longest = max(tasks[3].lengths)
    request = REQUEST._replace(row_len=1024)
    with pytest.raises(PlanningError, match=f"'task3': its longest sample has {longest} tokens"):
        plan_of(size, [tasks[3]], request=request)


def test_held_out_samples_fit_a_row_too(size, tasks):
    loads = [tasks[0]._replace(held_out=[4000])]
    assert plan_of(size, loads).shape.row_len >= 4000


def test_no_tasks_are_refused(size, tasks):
    with pytest.raises(PlanningError, match="there are no tasks"):
        make_plan([], REQUEST, costs_of(size, tasks), estimated_models(size, None, ONE).source, 1)


@pytest.mark.parametrize("text", ["pp4,tp2", "tp2,pp4", "pp=4, tp=2"])
def test_mesh_is_read_in_any_order(text):
    assert Replica.parse(text) == Replica.uniform(4, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp2", "'dp2' is no axis"),
        ("", "'' is no axis"),
        ("pp4,pp2", "pp is given twice"),
        ("tp0", "tp should be at least 1"),
    ],
)
def test_malformed_mesh_is_refused(text, message):
    with pytest.raises(PlanningError, match=message):
        Replica.parse(text)


def test_impossible_mesh_names_the_nearest_that_is_possible():
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    Replica.uniform(32, 8).require(32, heads)
    with pytest.raises(PlanningError, match="33 stages for 32 layers.* fit with pp32"):
        Replica.uniform(33, 1).require(32, heads)
    with pytest.raises(PlanningError, match="tp16 does not divide num_key_value_heads=8.* is tp8"):
        Replica.uniform(1, 16).require(32, heads)


def test_costs_know_their_optimizer(size, tasks):
    lion = [task._replace(pool=task.pool._replace(optimizer="lion")) for task in tasks]
    assert shared_pool(lion).optimizer == "lion"
    assert shared_pool([*lion, tasks[0]]).optimizer == "adamw"
    unknown = dataclasses.replace(costs_of(size, tasks), pool=PoolSpec(1, 1, optimizer="adafactor"))
    with pytest.raises(PlanningError, match="adafactor"):
        unknown.update()
