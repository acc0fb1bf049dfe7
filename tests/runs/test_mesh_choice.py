"""The choice of a mesh for all devices."""

import dataclasses

import pytest

from jaxmux.models import BackboneConfig
from jaxmux.planner import PlanningError
from jaxmux.planner.costs import device_models
from jaxmux.planner.devices import Deployment, Replica
from jaxmux.profiling import in_other_names, random_task
from jaxmux.runs import RunOptions, run_shape
from jaxmux.runs.console import RunConsole
from jaxmux.runs.mesh_choice import (
    choose_mesh,
    fewer_devices,
    fit_longest,
    fit_replica,
    possible_meshes,
)
from jaxmux.runs.run_directory import RecordedShapes
from jaxmux.runs.run_layout import choose_layout

CONFIG = BackboneConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)
LARGE = dataclasses.replace(
    CONFIG, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
)


def choice(config, devices, **options):
    task = random_task(config, "task", [2048] * 16, 16, 1, 16)
    options = RunOptions(mesh="auto", dtype="bfloat16", **options)
    return choose_mesh(in_other_names(task, 2), config, options, devices)


def test_all_layouts_that_the_backbone_allows_are_tried():
    config = dataclasses.replace(CONFIG, num_layers=2, num_heads=6, num_kv_heads=2, hidden_size=99)
    found = {str(replica) for replica in possible_meshes(4, config)}
    # tp4 does not divide 6 heads, fsdp2 not 99 columns, and there are no 4 layers.
    assert found == {"pp1,dp4", "pp2,dp2", "pp1,dp2,tp2", "pp2,tp2"}


@pytest.mark.parametrize(
    ("mesh", "devices", "expected"),
    [("pp4,tp4", 8, "pp2,tp4"), ("tp8", 6, "pp1,tp4"), ("fsdp4,tp4", 8, "pp1,fsdp4,tp2")],
)
def test_the_mesh_that_is_named_for_fewer_devices_is_possible(mesh, devices, expected):
    found = fewer_devices(Replica.parse(mesh), devices, CONFIG)
    assert found in possible_meshes(found.devices, CONFIG)
    assert str(found) == expected


def test_one_device_is_one_device():
    assert choice(CONFIG, 1).deployment == Deployment((Replica(),))


def test_a_named_schedule_takes_a_pipeline_that_can_follow_it():
    config = dataclasses.replace(CONFIG, num_layers=6)
    found = choice(config, 4, schedule="interleaved")
    # Four stages of two parts would need eight layers.
    assert {mesh.deployment.replicas[0].pp for mesh in found.meshes} == {2}
    assert all(mesh.deployment.replicas[0].parts == 2 for mesh in found.meshes)
    with pytest.raises(PlanningError, match="mesh 'auto': no layout of 1 device fits; schedule='1"):
        choice(CONFIG, 1, schedule="1f1b")


def test_the_values_of_a_schedule_have_to_fit_into_memory():
    """GPipe keeps those of a whole round, MuxTune's template those of 2S - 1 microbatches."""
    task = random_task(CONFIG, "task", [2048] * 64, 64, 1, 16)
    options = RunOptions(
        mesh="pp2", dtype="bfloat16", memory_gib=30, remat="lean", row_len=2048, chunk_len=128
    )

    def fit(**fields):
        chosen = dataclasses.replace(options, **fields)
        (replica,) = chosen.deployment.replicas
        return fit_replica([task], CONFIG, chosen, replica)

    fit().require([task])
    gpipe = fit(schedule="gpipe", tokens_per_microbatch=4096)
    assert gpipe.in_flight == 32
    with pytest.raises(PlanningError, match="'gpipe' keeps the values of all 32 micro"):
        gpipe.require([task])
    with pytest.raises(PlanningError, match="gpipe.* name a remat policy"):
        fit(schedule="gpipe", remat="auto").require([task])
    assert fit(schedule="template").in_flight == 3 == fit().in_flight + 1
    with pytest.raises(PlanningError, match="needs it for 3 with schedule='template'; try"):
        fit(schedule="template", memory_gib=18).require([task])


@pytest.mark.long
def test_a_backbone_that_fits_is_copied_and_a_large_one_divided():
    assert choice(CONFIG, 2).deployment == Deployment.parse("dp2")
    large = choice(LARGE, 2)
    assert large.deployment.devices == 2
    assert Deployment.parse("dp2") not in [mesh.deployment for mesh in large.meshes]


def test_the_message_names_the_choice_and_what_comes_after_it():
    text = str(choice(CONFIG, 2))
    assert text.startswith("mesh pp1,dp2 (") and "s a round) is predicted to be the fastest" in text
    assert text.count("s a round") == 3


def test_layouts_that_do_not_fit_are_refused_with_the_leanest_one():
    message = "mesh 'auto': no layout of 2 devices fits; task 'task0' does not fit even alone on"
    with pytest.raises(PlanningError, match=message):
        choice(LARGE, 2, memory_gib=20)


def test_a_small_replica_leaves_long_samples_to_others():
    """With the memory of a small GPU, one device holds shorter samples than four."""
    task = random_task(CONFIG, "task", [100, 16384], 2, 1, 16)
    options = RunOptions(dtype="bfloat16", memory_gib=22)
    rows = {
        mesh: fit_longest([task], CONFIG, options, Replica.parse(mesh), 1).shape.row_len
        for mesh in ("tp1", "tp2", "tp4")
    }
    assert 128 <= rows["tp1"] < rows["tp4"] == 16384
    with pytest.raises(PlanningError):
        fit_replica([task], CONFIG, options, Replica()).require([task])
    with pytest.raises(PlanningError):
        fit_longest([task], CONFIG, dataclasses.replace(options, memory_gib=12), Replica(), 1)


@pytest.mark.long
def test_a_large_replica_for_the_long_sample_and_small_ones_for_the_rest():
    """LobRA's case: a device has memory for the short samples only."""
    lengths = [*range(100, 580, 8), 16000]
    task = random_task(CONFIG, "task", lengths, len(lengths), 1, 16)
    options = RunOptions(mesh="auto", dtype="bfloat16", memory_gib=22)
    found = choose_mesh([task], CONFIG, options, 4)
    assert str(found.deployment) == "pp1,tp2 + 2*(pp1,tp1)"
    single = found.meshes[1]
    assert len(single.deployment.replicas) == 1 and found.meshes[0].seconds < 0.95 * single.seconds


def test_a_run_keeps_its_shape_classes_on_every_mesh_on_which_it_goes_on():
    """Also if it trains elsewhere in between."""
    tasks = [random_task(CONFIG, "task", [100] * 20 + [16000], 21, 1, 16)]

    def layout(mesh, memory, recorded=None):
        options = RunOptions(mesh=mesh, dtype="bfloat16", memory_gib=memory)
        return choose_layout(tasks, CONFIG, options, recorded, RunConsole())

    first = layout("tp2 + 2*(tp1)", 22)
    large, small, _ = first.shapes
    assert large.row_len == 16384 > small.row_len
    recorded = first.added_to(None)
    assert RecordedShapes.from_json(recorded.to_json()) == recorded
    alone = layout("tp1", 80, recorded)
    assert alone.shapes == (large,) and alone.added_to(recorded) == recorded
    assert layout("tp2 + 2*(tp1)", 80, recorded).shapes == first.shapes
    others = layout("2*(tp1)", 80, recorded)
    assert min(shape.row_len for shape in others.shapes) == 16384
    assert len(others.added_to(recorded).several) == 2


@pytest.mark.slow
def test_replicas_are_not_preferred_for_the_gaps_of_a_pipeline(monkeypatch):
    """Rounds stream through a pipeline without a gap, so two replicas of two devices, which
    exchange gradients, are no faster than one pipeline of both."""
    monkeypatch.setattr(run_shape, "device_models", lambda *given: device_models(*given[:3]))
    config = dataclasses.replace(LARGE, backbone_format="float8")
    tasks = [random_task(config, f"task{i}", [2048] * 16, 8, 6, 16, seed=i) for i in range(4)]
    options = RunOptions(
        mesh="auto", dtype="bfloat16", memory_gib=104.85, row_len=2048, chunk_len=128
    )
    found = choose_mesh(tasks, config, options, 4)
    assert str(found.deployment) == "pp2,tp2"
    assert all(len(mesh.deployment.replicas) == 1 for mesh in found.meshes)
    failed = choose_mesh(tasks, config, options, 4, failed=[found.deployment])
    assert failed.meshes == found.meshes[1:]
