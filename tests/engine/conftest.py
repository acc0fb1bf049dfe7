"""A tiny random Llama and tasks of random samples, for the engine tests.

Every test builds its engines with the same few shapes, so that few programs are compiled.
"""

import dataclasses
import logging
from functools import partial

import jax
import numpy as np
import pytest

from jaxmux.data import GlobalBatches, Sample, Samples, stored
from jaxmux.engine import Engine, EngineOptions, PreparedTask, TaskEvaluation
from jaxmux.engine.devices import programs
from jaxmux.engine.tasks.prepared_task import first_epoch, with_virtual_tokens
from jaxmux.models import Backbone, BackboneConfig, checkpoint_tensors, save_backbone
from jaxmux.optimizers import SGD, AdamW
from jaxmux.peft import LoRA, initial_adapter, kind_of, own_leaves, resolve_targets, size_of_adapter
from jaxmux.peft.leaves import named_leaves
from jaxmux.planner.costs.pool_spec import PoolSpec, merge_pool_specs
from jaxmux.planner.packing import ShapeClass
from jaxmux.tasks import Task

CONFIG = BackboneConfig(
    architecture="LlamaForCausalLM",
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
SHAPE = ShapeClass(rows=2, row_len=128, chunk_len=64, max_sequences=8)
# One row, so that global batches take several microbatches. Tests should prefer this shape with the
# default linears and sizes: many share its programs.
SMALL = ShapeClass(rows=1, row_len=128, chunk_len=64, max_sequences=8)
SLOTS, RANK = 4, 8


@pytest.fixture(scope="session")
def config() -> BackboneConfig:
    """The shape of the backbone."""
    return CONFIG


@pytest.fixture(scope="session")
def backbone(config) -> Backbone:
    """Random weights large enough that adapters move the loss at once."""
    random = Backbone.random(config, seed=5)
    weights = jax.tree.map(lambda w: w if w.ndim == 1 else 5 * w, random.weights)
    return dataclasses.replace(random, weights=weights)


@pytest.fixture(scope="session")
def make_task(config):
    """Makes a prepared task of random samples; keyword arguments are those of `Task` and `LoRA`.

    Its adapter is on one linear of the attention and one of the MLP, because fewer modules are
    compiled faster. Where the linears matter, tests use `make_wide_task`.
    """

    def make(
        name: str,
        *,
        rank: int = 4,
        dropout: float = 0.0,
        targets: str | tuple[str, ...] = ("q_proj", "down_proj"),
        loraplus_ratio: float = 1.0,
        samples: int = 24,
        lengths: tuple[int, int] = (5, 90),
        **fields,
    ) -> PreparedTask:
        adapter = LoRA(
            rank, 2.0 * rank, dropout, target_modules=targets, loraplus_ratio=loraplus_ratio
        )
        fields = {"batch_size": 6, "steps": 5, "optimizer": AdamW(1e-2)} | fields
        task = Task(name, data="random.jsonl", adapter=adapter, **fields)
        drawn = random_samples(sum(name.encode()), samples, lengths)
        masks = resolve_targets(adapter.target_modules, config)
        return PreparedTask(
            task=task,
            targets=masks,
            make_adapter=partial(initial_adapter, adapter, masks, config, task.seed),
            samples=Samples(drawn, len(drawn), 0, 0),
            batches=GlobalBatches(drawn, task.batch_size, task.seed),
            steps=task.steps,
            eval_samples=[],
        )

    return make


@pytest.fixture(scope="session")
def make_paired(make_task):
    """Makes a task of random pairs or labelled answers, three in a global batch."""

    def make(name, objective, **fields):
        fields = {"optimizer": SGD(0.1), "batch_size": 3, "steps": 4, "lengths": (5, 60)} | fields
        prepared = make_task(name, samples=14, objective=objective, **fields)
        parts = [prepared.samples.samples, random_samples(3, 4, (5, 60))]
        if objective.records == "labels":
            parts = [
                [
                    sample._replace(numbers={"label": i // objective.members % 2})
                    for i, sample in enumerate(part)
                ]
                for part in parts
            ]
        samples, held_out = parts
        return dataclasses.replace(
            prepared,
            samples=prepared.samples._replace(samples=samples),
            batches=GlobalBatches(samples, 3, prepared.task.seed, members=objective.members),
            eval_samples=held_out if "eval_data" in fields else [],
        )

    return make


@pytest.fixture(scope="module")
def make_rollouts(make_task):
    """Makes a task of random rollouts with values of their tokens, six in a global batch."""

    def make(name, objective, **fields):
        fields = {"optimizer": SGD(0.05), "steps": 3} | fields
        prepared = make_task(name, samples=12, lengths=(5, 60), **fields)
        samples = as_rollouts(prepared.samples.samples, seed=8, mean=-5, deviation=1)
        task = dataclasses.replace(prepared.task, objective=objective)
        return dataclasses.replace(
            prepared,
            task=task,
            samples=prepared.samples._replace(samples=samples),
            batches=GlobalBatches(samples, task.batch_size, task.seed),
        )

    return make


@pytest.fixture(scope="session")
def make_wide_task(make_task):
    """`make_task` with adapters on all linears, for tests of what linears compute together: of
    isolation, and of devices that divide them."""
    return partial(make_task, targets="all-linear")


@pytest.fixture(scope="session")
def base_tensor(backbone, tmp_path_factory):
    """The tensors of the backbone by their names in Hugging Face's checkpoint."""
    folder = tmp_path_factory.mktemp("backbone")
    save_backbone(backbone, folder)
    return checkpoint_tensors(folder, np.dtype(np.float32))


@pytest.fixture(scope="session")
def make_task_with(make_task, config, base_tensor):
    """Makes a prepared task with an adapter of any kind. Its arrays begin with random values, so
    that no gradient is zero."""

    def make(name: str, spec, seed: int, **fields) -> PreparedTask:
        prepared = make_task(name, seed=seed, **fields)
        task, kind = dataclasses.replace(prepared.task, adapter=spec), kind_of(spec)
        targets = kind.targets(spec, config)
        rng = np.random.default_rng(seed)
        data = (
            (first_epoch(prepared.batches, prepared.task.objective),) if kind.reads_samples else ()
        )
        first = kind.initial(spec, targets, config, seed, base_tensor, *data)
        rates = named_leaves(kind.relative_rates(spec, targets))
        names = iter(named_leaves(first))

        def moved(leaf, value):
            rate = rates.get(next(names))
            if not leaf.trained:
                return value
            noise = 0.1 * rng.standard_normal(value.shape).astype(np.float32)
            # What lies outside the layers has the rate of the first or the last one.
            rate = rate[-1:] if "last" in leaf.axes else rate[: len(value)]
            rate = rate.reshape(-1, *[1] * (value.ndim - 1))
            return value + rate * noise

        adapter = jax.tree.map(moved, own_leaves(spec, list(targets), config), first)
        if kind.low_rank:
            # What follows from the factors is computed from those in a folder.
            tensors = kind.tensors(spec, adapter, config, False, base_tensor)
            adapter = kind.from_tensors(spec, tensors, config, base_tensor)
        samples = with_virtual_tokens(stored(prepared.samples.samples), spec)
        return dataclasses.replace(
            prepared,
            task=task,
            samples=prepared.samples._replace(samples=samples),
            batches=GlobalBatches(samples, task.batch_size, task.seed, task.epochs),
            targets=targets,
            make_adapter=lambda: adapter,
            size=size_of_adapter(spec, config),
        )

    return make


def measured_to_the_end(engine: Engine) -> list[TaskEvaluation]:
    """Trains to the end; returns all measurements of held-out data."""
    found = []
    while not engine.finished:
        engine.train_round()
        found += engine.take_evaluations()
    engine.drain()
    return found + engine.take_evaluations()


def random_samples(seed: int, count: int, lengths: tuple[int, int]) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        length = int(rng.integers(*lengths))
        ids = rng.integers(CONFIG.vocab_size, size=length).astype(np.int32)
        samples.append(Sample(ids, np.arange(length) >= min(3, length - 1), i))
    return samples


def as_rollouts(samples, seed: int, mean: float, deviation: float) -> list[Sample]:
    """Samples with normal log-probabilities of their tokens, and a normal advantage each."""
    rng = np.random.default_rng(seed)
    return [
        sample._replace(
            values={
                "logprobs": rng.normal(mean, deviation, len(sample.input_ids)).astype(np.float32),
                "advantages": np.full(len(sample.input_ids), rng.normal(), np.float32),
            }
        )
        for sample in samples
    ]


@pytest.fixture(scope="session")
def make_engine(backbone):
    """Makes an engine in which the given tasks are registered, in this order."""

    def make(
        *tasks: PreparedTask,
        shape: ShapeClass = SHAPE,
        slots: int = SLOTS,
        rank: int = RANK,
        modules: tuple[str, ...] = (),
        **options,
    ) -> Engine:
        reserved = PoolSpec(slots, rank, modules)
        engine = Engine(backbone, EngineOptions(shape, reserved, **options))
        engine.register_tasks(tasks)
        return engine

    return make


@pytest.fixture(scope="session")
def train():
    """Trains an engine, to the end or for some rounds; returns every task's updates by name."""

    def run(engine: Engine, rounds: int | None = None) -> dict[str, list]:
        updates = []
        while not engine.finished and (rounds is None or rounds > 0):
            updates += engine.train_round()
            rounds = None if rounds is None else rounds - 1
        updates += engine.drain()
        return {name: [u for u in updates if u.task == name] for name in engine.names}

    return run


@pytest.fixture(scope="session")
def assert_same_bits():
    """Compares two trees of arrays of the same structure, NaN equal to NaN."""

    def check(one, other):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        jax.tree.map(np.testing.assert_array_equal, one, other)

    return check


@pytest.fixture(scope="module")
def model_of_tasks(backbone) -> Backbone:
    """The backbone of `make_mixed`; a file may have another one."""
    return backbone


@pytest.fixture(scope="module")
def pool(tasks) -> PoolSpec:
    """A pool with room for all `tasks` of a file, which are prepared tasks by name."""
    return merge_pool_specs([prepared.pool for prepared in tasks.values()])


@pytest.fixture(scope="module")
def make_mixed(model_of_tasks, pool):
    """Makes an engine with room for all `tasks` of a file, in which some are registered."""

    def make(*prepared: PreparedTask, **options) -> Engine:
        engine = Engine(model_of_tasks, EngineOptions(SHAPE, pool, **options))
        engine.register_tasks(prepared)
        return engine

    return make


@pytest.fixture(scope="module")
def together(make_mixed, tasks, train):
    """The results of all `tasks` of a file together, by name: updates and arrays."""
    engine = make_mixed(*tasks.values())
    updates = train(engine)
    return {name: (updates[name], engine.task_arrays(name)) for name in tasks}


@pytest.fixture(scope="module")
def assert_same_alone(make_mixed, tasks, together, train, assert_same_bits):
    """Trains one of the `tasks` of a file alone, with the bits that it has got `together`. They
    come one after another to the same engine."""
    engine = make_mixed()

    def check(name: str) -> None:
        engine.register_tasks([tasks[name]])
        updates, arrays = together[name]
        alone, own = train(engine)[name], engine.task_arrays(name)
        engine.release(name)
        assert [(u.loss, u.grad_norm) for u in alone] == [(u.loss, u.grad_norm) for u in updates]
        assert_same_bits(own, arrays)

    return check


@pytest.fixture
def replace_adapter():
    """A prepared task that begins with other factors: `change` maps each array of the old ones."""

    def replace(prepared: PreparedTask, change) -> PreparedTask:
        return dataclasses.replace(
            prepared, make_adapter=lambda: jax.tree.map(change, prepared.make_adapter())
        )

    return replace


@pytest.fixture(scope="module")
def trace_once():
    """Equal layers are traced once in a file, however often remat policies are chosen for them."""
    kept_bytes, known = programs.kept_bytes, {}

    def remembered(config, options, *arrays):
        leaves, structure = jax.tree.flatten(arrays)
        key = config, options, structure, tuple((x.shape, x.dtype) for x in leaves)
        if key not in known:
            known[key] = kept_bytes(config, options, *arrays)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "kept_bytes", remembered)
        yield


@pytest.fixture
def compiles():
    """Names of the functions that are compiled during the test, in any thread, in order."""
    names = []

    class Handler(logging.Handler):
        def emit(self, record):
            if record.getMessage().startswith("Compiling "):
                names.append(record.getMessage().split()[1])

    logger, handler = logging.getLogger("jax._src.interpreters.pxla"), Handler()
    logger.addHandler(handler)
    # `jax.log_compiles()` would hold for this thread only.
    jax.config.update("jax_log_compiles", True)
    jax.jit(lambda x: x + len(names))(0.0)
    assert names, "JAX no longer logs what it compiles as this fixture expects"
    names.clear()
    yield names
    jax.config.update("jax_log_compiles", False)
    logger.removeHandler(handler)


@pytest.fixture(scope="session")
def drive_at_random():
    """Trains tasks to their ends while they come, go, pause and go on at random between rounds,
    without a break. Returns every task's updates, and its arrays after the last one."""

    def drive(engine: Engine, tasks: dict[str, PreparedTask], seed: int, slots: int = SLOTS):
        rng = np.random.default_rng(seed)
        waiting, suspended = list(tasks.values()), []
        updates = {name: [] for name in tasks}
        arrays = {}

        def record(found):
            for update in found:
                updates[update.task].append(update)

        while len(arrays) < len(tasks):
            for name in engine.names:
                if engine.progress(name).status == "succeeded":
                    arrays[name] = engine.snapshot(name)
                    engine.release(name)
            for name in engine.names:
                if rng.random() < 0.2:
                    suspended.append(engine.suspend(name))
            while suspended and len(engine.names) < slots and rng.random() < 0.5:
                engine.resume(suspended.pop(int(rng.integers(len(suspended)))))
            while waiting and len(engine.names) < slots and rng.random() < 0.5:
                engine.register_tasks([waiting.pop()])
            # A task whose training has begun may leave, and then begins anew.
            if engine.names and rng.random() < 0.1:
                name = str(rng.choice(engine.names))
                if engine.progress(name).status == "running":
                    waiting.append(engine.prepared(name))
                    engine.release(name)
                    record(engine.drain())
                    updates[name].clear()
            record(engine.train_round())
        return updates, {name: snapshot() for name, snapshot in arrays.items()}

    return drive
