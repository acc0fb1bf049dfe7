"""jaxmux's side of the comparison; the interpreter of the main environment runs it.

    python jaxmux_side.py [COMMAND FOLDER]

Without arguments it serves requests until its standard input ends. A request is a line of JSON: the
name of one of `COMMANDS`, a folder, and settings, whose paths are absolute or relative to the
folder. Most commands write adapter folders, .npz and .json files into the folder. The answer is a
line of JSON on standard output: what the command returns, and the traceback of its exception or
null. With arguments it runs one command, with the settings in FOLDER/request.json.
"""

import contextlib
import dataclasses
import io
import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from encoded_weights import encoded_weights, number_tables

from jaxmux.cli.main import main
from jaxmux.data import Sample, Source, fill_microbatch, load_samples, load_tokenizer, stored
from jaxmux.engine import Engine, EngineOptions, PreparedTask, prepare_task
from jaxmux.engine.tasks.prepared_task import with_virtual_tokens
from jaxmux.installation import resolve_path
from jaxmux.models import (
    MODULES,
    Backbone,
    BackboneConfig,
    ForwardOptions,
    SlotTable,
    backbone_dtype,
    checkpoint_tensors,
    hidden_states,
    load_backbone,
    logits_of,
    save_backbone,
    write_quantised,
)
from jaxmux.models.head_adapters import head_adapters
from jaxmux.objectives import OBJECTIVES
from jaxmux.optimizers import OPTIMIZERS, Schedule
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight
from jaxmux.pallas_kernels.grouped_lora import Factors
from jaxmux.peft import (
    KINDS,
    SPECIFICATIONS,
    Adapter,
    LeafSpec,
    LoRA,
    export_adapter,
    full_name,
    import_adapter,
    kind_of,
    ops_of,
    pad,
    resolve_targets,
    scale_of,
    write_merged,
)
from jaxmux.peft.leaves import named_leaves
from jaxmux.peft.peft_folder import _KNOWN_SETTINGS
from jaxmux.planner.packing import ShapeClass, pack_round
from jaxmux.specifications.reading import from_json
from jaxmux.tasks import Task

# Two short rows, so that a global batch of the test tasks does not fit into one microbatch.
SHAPE = ShapeClass(rows=2, row_len=128, chunk_len=64, max_sequences=8)
# Number of slots whose prompts a microbatch has, see `random_prompts`.
SLOTS = 3

Request = dict[str, Any]


def forward(folder: Path, request: Request) -> None:
    """Writes `logits/<case>.npz`, the logits of every case's prompts, packed into one microbatch.

    A case names a `backbone` folder to load. If it has a `random` configuration, a random backbone
    is created and saved there first. The prompts of slot i use the adapter folder `adapters[i]`, if
    there is one. The imported tensors of LoRA are written to `tensors/<case>-<i>.npz`. The first
    adapter is merged into a checkpoint in the folder `merged`, if the case has it.
    """
    for name, case in request["cases"].items():
        where = folder / case["backbone"]
        if "random" in case:
            backbone = random_backbone(BackboneConfig(**case["random"]))
            save_backbone(backbone, where)
        else:
            backbone = load_backbone(where)
        base = checkpoint_tensors(where, np.dtype(np.float32))
        adapters = [
            import_adapter(folder / adapter, backbone.config, base=base)
            for adapter in case.get("adapters", [])
        ]
        for i, (spec, adapter) in enumerate(adapters):
            if type(spec) is LoRA:
                tensors = hf_tensors(spec, adapter, backbone.config)
                save_arrays(folder / "tensors" / f"{name}-{i}.npz", tensors)
        if "merged" in case:
            spec, adapter = adapters[0]
            write_merged(folder / case["merged"], where, adapter, spec, backbone.config)
            continue
        logits = packed_logits(backbone, adapters, case["prompts"])
        save_arrays(folder / "logits" / f"{name}.npz", logits)


def train(folder: Path, request: Request) -> None:
    """Trains the tasks together, from their files to exported adapters.

    Writes:
      batches.json: for every task, step and sample, the token ids and the target mask.
      updates.json: the metrics of every update.
      microbatches.json: for every round and microbatch, the names of its tasks.
      initial/<task>, final/<task>, serving/<task>: the adapters.
      logits/final.npz: the logits of every task's prompts with its final adapter.
    """
    backbone = load_backbone(folder / request["backbone"])
    tokenizer = load_tokenizer(folder / request["backbone"])
    base = checkpoint_tensors(folder / request["backbone"], backbone.compute_dtype)
    tasks = [
        prepare_task(make_task(t, folder), backbone.config, tokenizer, base=base)
        for t in request["tasks"]
    ]
    engine, updates = trained(backbone, tasks, folder)
    export(engine, tasks, folder / "serving", serving=True)
    save_json(folder / "updates.json", updates)
    save_json(folder / "batches.json", {p.task.name: dump_batches(p) for p in tasks})
    planned = tasks_by_microbatch(tasks)
    assert engine.microbatches == sum(map(len, planned))
    save_json(folder / "microbatches.json", planned)
    adapters = [(p.task.adapter, engine.adapter(p.task.name)) for p in tasks]
    logits = packed_logits(backbone, adapters, request["prompts"])
    save_arrays(folder / "logits" / "final.npz", logits)


def train_objectives(folder: Path, request: Request) -> list[dict[str, Any]]:
    """Trains tasks with objectives of preferences together, exports their adapters to
    initial/<task> and final/<task>, and returns the metrics of every update."""
    backbone = load_backbone(folder / request["backbone"])
    tokenizer = load_tokenizer(folder / request["backbone"])
    tasks = [
        prepare_task(make_task(t, folder), backbone.config, tokenizer) for t in request["tasks"]
    ]
    return trained(backbone, tasks, folder)[1]


def trained(
    backbone: Backbone, tasks: Sequence[PreparedTask], folder: Path
) -> tuple[Engine, list[dict[str, Any]]]:
    """Trains tasks together, and exports their adapters to initial/<task> and final/<task>. Returns
    the engine and the fields of every update."""
    engine = Engine(backbone, EngineOptions(SHAPE))
    engine.register_tasks(tasks)
    export(engine, tasks, folder / "initial")
    updates = []
    while not engine.finished:
        updates += engine.train_round()
    updates += engine.drain()
    export(engine, tasks, folder / "final")
    return engine, [u._asdict() for u in updates]


def preferences(folder: Path, request: Request) -> dict[str, list]:
    """Returns the samples of files of preference records, by file, loaded with the options of the
    file."""
    tokenizer = load_tokenizer(request["tokenizer"])
    return {
        name: dump_samples(load_samples(Source(str(folder / name)), tokenizer, **options).samples)
        for name, options in request["files"].items()
    }


def prepare(folder: Path, request: Request) -> None:
    """Writes what training the tasks of a run directory begins with, without training them.

    Writes:
      tasks.json: for every task, its specification, as in run.json.
      batches.json: as `train` does.
      held_out.json: for every task and held-out sample, the token ids and the target mask.
      initial/<task>: the adapters.
    """
    run = json.loads((folder / request["run_dir"] / "run.json").read_text())
    backbone, base_format = run["backbone"], run["backbone_format"]
    config = BackboneConfig.from_folder(backbone, base_format)
    base = checkpoint_tensors(backbone, backbone_dtype(run["dtype"]), base_format)
    tokenizer = load_tokenizer(backbone)
    tasks = [
        prepare_task(from_json({"name": name, **fields}), config, tokenizer, base=base)
        for name, fields in run["tasks"].items()
    ]
    for prepared in tasks:
        task = prepared.task
        where = folder / "initial" / task.name
        export_adapter(where, prepared.make_adapter(), task.adapter, config, backbone, base=base)
    save_json(folder / "tasks.json", run["tasks"])
    save_json(folder / "batches.json", {p.task.name: dump_batches(p) for p in tasks})
    held_out = {p.task.name: dump_samples(p.eval_samples) for p in tasks}
    save_json(folder / "held_out.json", held_out)


def encode(folder: Path, request: Request) -> None:
    """Writes `encoded/<case>.npz`, the weights of every case in number formats with scales, and
    `encoded/tables.npz`, the numbers that codes stand for."""
    for name, case in request["cases"].items():
        offset = case["offset"] and np.float32(case["offset"])
        found = encoded_weights(np.load(folder / case["weights"]), case["dtype"], offset)
        save_arrays(folder / "encoded" / f"{name}.npz", found)
    save_arrays(folder / "encoded" / "tables.npz", number_tables())


def random_backbone(config: BackboneConfig) -> Backbone:
    """A random backbone with large enough weights that every part changes the logits.

    `Backbone.random` alone has small weights, norms of 1 and biases of 0.
    """
    backbone = Backbone.random(config)
    rng = np.random.default_rng(0)

    def enlarge(path, leaf):
        names = jax.tree_util.keystr(path)
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        if "norm" in names:
            return leaf + 0.3 * noise
        if "bias" in names:
            return leaf + 0.5 * noise
        return 8 * leaf

    weights = jax.tree_util.tree_map_with_path(enlarge, backbone.weights)
    return Backbone(config, weights, backbone.name_or_path)


def packed_logits(
    backbone: Backbone,
    adapters: Sequence[tuple[Any, Any]],
    prompts: Sequence[Sequence[Sequence[int]]],
) -> dict[str, np.ndarray]:
    """Logits of the prompts of all slots, packed into one microbatch.

    Returns the logits [tokens, vocabulary] of every prompt, by "<slot>-<prompt>".
    """
    # The model does not read the last token of a sample, so one is appended.
    batches = {
        slot: [Sample(np.asarray([*ids, 0]), np.arange(len(ids) + 1) > 0, 0) for ids in sequences]
        for slot, sequences in enumerate(prompts)
    }
    for slot, (spec, _) in enumerate(adapters):
        batches[slot] = with_virtual_tokens(stored(batches[slot]), spec)
    lengths = {slot: [s.stream_length for s in batch] for slot, batch in batches.items()}
    # The prompts of `SLOTS` slots fill the rows of SHAPE.
    shape = dataclasses.replace(SHAPE, rows=SHAPE.rows * len(prompts) // SLOTS)
    (placements,) = pack_round(lengths, shape).microbatches()
    slots_of_row = [{p.slot for p in placements if p.row == row} for row in range(shape.rows)]
    sequences_of_row = [sum(p.row == row for p in placements) for row in range(shape.rows)]
    assert min(sequences_of_row) > 1 and max(map(len, slots_of_row)) > 1, "packed too sparsely"
    microbatch = fill_microbatch(
        placements, batches, rows=shape.rows, row_len=shape.row_len, chunk_len=shape.chunk_len
    )
    scale = np.zeros(len(prompts), np.float32)
    scale[: len(adapters)] = [scale_of(spec) for spec, _ in adapters]
    slots = SlotTable(scale, np.zeros_like(scale), np.zeros(len(scale), np.uint32))

    pools = stack_adapters(backbone.config, adapters, len(prompts))
    options = ForwardOptions(
        attention="xla", max_sequences=SHAPE.max_sequences, adapter_ops=ops_of(pools)
    )

    logits, finite = logits_of_microbatch(
        backbone.config, options, backbone.weights, pools, microbatch, slots
    )
    assert finite.all()
    logits = np.asarray(logits).reshape(shape.rows, shape.row_len, -1)
    return {
        f"{p.slot}-{p.sample}": logits[p.row, p.offset : p.offset + lengths[p.slot][p.sample]][
            batches[p.slot][p.sample].virtual_tokens :
        ]
        for p in placements
    }


@partial(jax.jit, static_argnames=("config", "options"))
def logits_of_microbatch(config, options, weights, pools, microbatch, slots):
    at_head, _ = head_adapters(options.adapter_ops, pools, None, microbatch.chunk_slot)
    hidden, _, finite = hidden_states(
        config, weights, pools, None, microbatch, slots, options, at_head
    )
    return logits_of(weights, hidden, at_head), finite


def stack_adapters(
    config: BackboneConfig, adapters: Sequence[tuple[Any, Any]], slots: int
) -> dict[str, Any]:
    """By kind, the pool of the adapters in slots 0, 1, …, padded to the largest rank."""
    trees = [kind_of(spec).in_pools(adapter) for spec, adapter in adapters]
    trees += [{}] * (slots - len(trees))
    pools = {}
    for name in {"lora", *(name for tree in trees for name in tree)}:
        own = [spec for (spec, _), tree in zip(adapters, trees, strict=False) if name in tree]
        points = sorted({p for spec in own for p in kind_of(spec).targets(spec, config)})
        rank = max((kind_of(spec).rank_in(name, spec) for spec in own), default=1)
        pool = KINDS[name].leaves(config, points, 1, rank)
        specs = jax.tree.map(LeafSpec.of_slot, pool)
        padded = [pad(named_leaves(tree.get(name, {})), specs) for tree in trees]
        axes = jax.tree.map(lambda spec: spec.slot_axis, pool)
        pools[name] = jax.tree.map(lambda axis, *leaves: np.stack(leaves, axis), axes, *padded)
    return pools


def hf_tensors(spec: LoRA, adapter: Adapter, config: BackboneConfig) -> dict[str, np.ndarray]:
    """The factors in PEFT's layout, by PEFT's names."""
    tensors = {}
    if "embed_tokens" in adapter:
        own, name = adapter["embed_tokens"], "base_model.model.model.embed_tokens.lora_embedding"
        tensors |= {f"{name}_{n.upper()}": own[n][0].T for n in "ab"}
        own, name = adapter["lm_head"], "base_model.model.lm_head.lora"
        tensors |= {f"{name}_{n.upper()}.weight": own[n][0].T for n in "ab"}
        adapter = {path: Factors(own["a"], own["b"]) for path, own in adapter.items()}
        spec = dataclasses.replace(spec, target_modules=("k_proj",))
    for module, layers in resolve_targets(spec.target_modules, config).items():
        for layer in np.flatnonzero(layers):
            name = f"base_model.model.{full_name(module, layer)}"
            tensors[f"{name}.lora_A.weight"] = adapter[module].a[layer].T
            tensors[f"{name}.lora_B.weight"] = adapter[module].b[layer].T
    return tensors


def make_task(fields: Mapping[str, Any], folder: Path) -> Task:
    fields = dict(fields, data=str(folder / fields["data"]))
    if "resume_from" in fields:
        fields["resume_from"] = str(folder / fields["resume_from"])
    optimizer = dict(fields.pop("optimizer"))
    kind = OPTIMIZERS[optimizer.pop("kind")]
    schedule = Schedule(**optimizer.pop("schedule"))
    adapter = dict(fields.pop("adapter"))
    adapter = SPECIFICATIONS[adapter.pop("kind", "lora")](**adapter)
    if "objective" in fields:
        objective = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields["objective"].items()
        }
        fields["objective"] = OBJECTIVES[objective.pop("kind")](**objective)
    return Task(**fields, adapter=adapter, optimizer=kind(**optimizer, schedule=schedule))


def export(
    engine: Engine, tasks: Sequence[PreparedTask], folder: Path, serving: bool = False
) -> None:
    backbone = engine.backbone
    for task in (p.task for p in tasks):
        export_adapter(
            folder / task.name,
            engine.adapter(task.name),
            task.adapter,
            backbone.config,
            backbone.name_or_path,
            serving=serving,
            base=checkpoint_tensors(backbone.name_or_path, backbone.compute_dtype),
        )


def dump_batches(prepared: PreparedTask) -> list[list[dict[str, list]]]:
    return [dump_samples(prepared.batches[step]) for step in range(prepared.steps)]


def dump_samples(samples: Sequence[Sample]) -> list[dict[str, list]]:
    return [{"ids": s.input_ids.tolist(), "target": s.target_mask.tolist()} for s in samples]


def tasks_by_microbatch(tasks: Sequence[PreparedTask]) -> list[list[list[str]]]:
    rounds = []
    for step in range(max(p.steps for p in tasks)):
        lengths = {
            slot: [s.stream_length for s in p.batches[step]]
            for slot, p in enumerate(tasks)
            if step < p.steps
        }
        planned = pack_round(lengths, SHAPE).microbatches()
        rounds.append([sorted({tasks[p.slot].task.name for p in m}) for m in planned])
    return rounds


def decode(folder: Path, request: Request) -> None:
    """Writes `decoded/<backbone>.npz`, the weights of linears of every backbone in float32, as they
    are loaded and as they are read one by one; and in a .json file the formats of linears.

    A backbone in `written` is first made from a folder, in a format and with a dtype."""
    (folder / "decoded").mkdir(exist_ok=True)
    for name, (source, backbone_format, dtype) in request["written"].items():
        write_quantised(folder / source, folder / name, np.dtype(dtype), backbone_format)
    for name in request["backbones"]:
        backbone = load_backbone(folder / name, "float32")
        read = checkpoint_tensors(folder / name, np.dtype(np.float32))
        arrays, formats = {}, {}
        for module in MODULES:
            block, linear = module.split(".")
            weight = backbone.weights["layers"][block][linear]["kernel"]
            formats[module] = weight.format
            for layer, decoded in enumerate(np.asarray(jax.jit(FrozenWeight.decoded)(weight))):
                linear_of_layer = full_name(module, layer)
                arrays[f"loaded/{linear_of_layer}"] = decoded.T
                arrays[f"read/{linear_of_layer}"] = read(f"{linear_of_layer}.weight")
        save_arrays(folder / "decoded" / f"{name}.npz", arrays)
        save_json(folder / "decoded" / f"{name}.json", formats)


def settings(folder: Path, request: Request) -> None:
    """Writes `settings.json`, the keys of adapter_config.json that jaxmux knows."""
    save_json(folder / "settings.json", sorted(_KNOWN_SETTINGS))


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    path.parent.mkdir(exist_ok=True)
    np.savez(path, **arrays)


def save_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def command_line(folder: Path, request: Request) -> str:
    """Runs `jaxmux COMMAND …` with the given arguments, and returns what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(request["arguments"])
    assert code == 0, f"the exit code is {code}"
    return printed.getvalue()


def resolve(folder: Path, request: Request) -> str:
    """Returns the path of a file that ships with jaxmux."""
    return str(resolve_path(request["name"]))


COMMANDS = {
    f.__name__: f
    for f in (
        *(forward, train, train_objectives, preferences, prepare, encode, decode),
        *(settings, command_line, resolve),
    )
}


def serve() -> None:
    # What commands print must not be among the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        name, folder, request = json.loads(line)
        result = error = None
        try:
            result = COMMANDS[name](Path(folder), request)
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps([result, error]), file=answers, flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        name, where = sys.argv[1], Path(sys.argv[2])
        COMMANDS[name](where, json.loads((where / "request.json").read_text()))
    else:
        serve()
