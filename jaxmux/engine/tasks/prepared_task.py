"""Makes a task ready to train: reads and tokenizes its data, divides them into global batches,
finds the linears that the task adapts, and checks its initial adapter. Tasks that cannot be trained
are refused here.

The sizes of the backbone and the lengths of the samples in global batches, which planners need, are
computed here too.
"""

import dataclasses
import functools
import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import batched
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxmux.data import (
    GlobalBatches,
    Rendering,
    Sample,
    Samples,
    Source,
    SplitPart,
    StoredSamples,
    TokenFile,
    load_samples,
)
from jaxmux.data.batches import GivenBatches, copies, epoch_counts
from jaxmux.data.preferences import LABEL
from jaxmux.data.rollouts import GROUP, REWARD
from jaxmux.data.stored_samples import joined, stored, stream_lengths
from jaxmux.data.tokenizers import encode
from jaxmux.installation import resolve_path
from jaxmux.models import MODULES, BackboneConfig, linear_sizes
from jaxmux.models.adapter_ops import LOW_RANK_KIND, OUTSIDE
from jaxmux.models.loss import block_bytes
from jaxmux.models.modules import abstract_weights, divisible_weights, layer_linears
from jaxmux.models.weight_sharding import FSDP, TP, WeightSharding
from jaxmux.objectives import LOSS, Bound, Objective, Policy
from jaxmux.peft import (
    AdapterError,
    LayerMask,
    dropout_of,
    import_adapter,
    kind_of,
    size_of_adapter,
)
from jaxmux.peft.kind import AdapterKind, BaseTensors
from jaxmux.peft.leaves import named_leaves
from jaxmux.peft.peft_folder import refuse_other_tokens
from jaxmux.planner.costs.device_profile import BackboneSize, PackedBytes
from jaxmux.planner.costs.pool_spec import KindSize, PoolSpec
from jaxmux.planner.devices import FSDP_BLOCKS, KEY_BLOCKS, TP_BLOCKS
from jaxmux.planner.packing import ShapeClass
from jaxmux.sharding.stage_mesh import KEY_MODULES
from jaxmux.tasks import Task, TaskError

# Cache: the sample lengths of global batches that have been read, by step.
_LENGTHS: WeakKeyDictionary[GlobalBatches, dict[int, list[int]]] = WeakKeyDictionary()
# Odd, and about 2**32 divided by the golden ratio, so that multiples of it lie far apart.
_ID_STRIDE = 0x9E3779B1


class TaskData(NamedTuple):
    """The data of a task as in `PreparedTask`, and for each source of the training data, its part
    of `samples` with its own counts."""

    samples: Samples
    batches: GlobalBatches
    steps: int
    eval_samples: Sequence[Sample]
    sources: tuple[Samples, ...]


class Loaded:
    """A cache of the data of tasks with the same backbone: samples by source, longest sample and
    held-out part, and the file of their tokens."""

    def __init__(self):
        self.tokens = TokenFile()
        self.samples: dict[tuple[Any, ...], Samples] = {}


def read_data(
    task: Task, config: BackboneConfig, tokenizer: Any, loaded: Loaded | None = None
) -> TaskData:
    """Reads and tokenizes a task's training and held-out data. `loaded` is a cache of the data of
    tasks with the same backbone, to which the data of this task are added; None reads everything.
    Raises a TaskError that names the task if data cannot be read or have no sample."""
    loaded = Loaded() if loaded is None else loaded
    try:
        sources = _training_samples(task, config, tokenizer, loaded)
        samples = _together(sources)
        batches = batches_of(task, samples.samples, task.epochs)
    except ValueError as e:
        raise TaskError(f"task {task.name!r}: {e}") from e
    held_out = read_held_out(task, config, tokenizer, loaded)
    _refuse_missing_labels(task, held_out)
    steps = len(batches) if task.steps is None else task.steps
    return TaskData(samples, batches, steps, held_out, sources)


def _refuse_missing_labels(task: Task, held_out: StoredSamples | tuple[()]) -> None:
    """Raises TaskError if the metrics that a task names need held-out answers of a label that none
    has."""
    if task.objective.records != "labels" or not held_out:
        return
    named = {"best_metric": task.best_metric}
    if task.stop_when is not None:
        named["stop_when"] = Bound.of(task.stop_when).metric
    labels = task.objective.trained(held_out.numbers[LABEL])
    for field, metric in named.items():
        for label, answers, others in ((1, "desirable", "rejected"), (0, "undesirable", "chosen")):
            needed = metric not in (LOSS, "kl") and not metric.endswith(f"/{others}")
            if needed and label not in labels:
                raise TaskError(
                    f"task {task.name!r}: {field} names {metric}, and no held-out answer is "
                    f"{answers}"
                )


def batches_of(task: Task, samples: Sequence[Sample], epochs: int | None = None) -> GlobalBatches:
    """The global batches of a task with these samples."""
    members = task.objective.members
    return GlobalBatches(samples, task.batch_size, task.seed, epochs, members=members)


def read_held_out(
    task: Task, config: BackboneConfig, tokenizer: Any, loaded: Loaded | None = None
) -> Sequence[Sample]:
    """Reads and tokenizes only a task's held-out data; empty if the task has none. Arguments and
    errors are those of `read_data`."""
    parts = read_held_out_by_source(task, config, tokenizer, loaded)
    return joined(_with_other_ids(part.samples for _, part in parts)) if parts else ()


def read_held_out_by_source(
    task: Task, config: BackboneConfig, tokenizer: Any, loaded: Loaded | None = None
) -> list[tuple[Source, Samples]]:
    """Like `read_held_out`, for each source of the held-out data. The ids of the samples are those
    that `load_samples` gives them."""
    loaded = Loaded() if loaded is None else loaded
    try:
        if task.eval_data:
            return [(task.eval_data, _load(task.eval_data, task, config, tokenizer, None, loaded))]
        if task.validation_fraction is not None:
            parts = _of_sources(task, config, tokenizer, loaded, held_out=True)
            return list(zip(task.sources, parts, strict=True))
    except ValueError as e:
        raise TaskError(f"task {task.name!r}: {e}") from e
    return []


def with_virtual_tokens(samples: StoredSamples, adapter: Any) -> StoredSamples:
    """The samples with the positions that a task's adapter fills before them. They do not count in
    the task's longest sample (`Task.max_length`)."""
    return samples.with_virtual_tokens(kind_of(adapter).virtual_tokens(adapter))


def _training_samples(
    task: Task, config: BackboneConfig, tokenizer: Any, loaded: Loaded
) -> tuple[Samples, ...]:
    """For each source of a task, the samples that are not held out, as often as in an epoch."""
    parts = _of_sources(task, config, tokenizer, loaded, held_out=False)
    members = task.objective.members
    counts = epoch_counts([len(part.samples) // members for part in parts], task.sources)
    repeated = [
        copies(part.samples, count, task.seed, members)
        for part, count in zip(parts, counts, strict=True)
    ]
    pairs = zip(parts, _with_other_ids(repeated), strict=True)
    return tuple(part._replace(samples=samples) for part, samples in pairs)


def _with_other_ids(parts: Iterable[StoredSamples]) -> list[StoredSamples]:
    """The samples of each source. Records of the same index in different sources get other ids, and
    so other dropout masks."""
    return [samples.with_ids_shifted(n * _ID_STRIDE) for n, samples in enumerate(parts)]


def _of_sources(
    task: Task, config: BackboneConfig, tokenizer: Any, loaded: Loaded, *, held_out: bool
) -> list[Samples]:
    """For each source of a task, the samples that are held out, or those that are not."""
    parts: list[Samples] = []
    for number, source in enumerate(task.sources):
        part = None
        if (fraction := task.validation_fraction) is not None:
            part = SplitPart(fraction, task.split_seed, held_out, number)
        parts.append(_load(source, task, config, tokenizer, part, loaded))
    return parts


def _together(sources: Sequence[Samples]) -> Samples:
    sums = map(_sum, zip(*(source[1:] for source in sources), strict=True))
    return Samples(joined([source.samples for source in sources]), *sums)


def _sum(values: Sequence[Any]) -> Any:
    """The sum of counts, the first text that is not empty, or the combined rendering."""
    if isinstance(values[0], Rendering):
        return Rendering.together(values)
    if isinstance(values[0], Counter):
        return sum(values, Counter())
    return next(filter(None, values), "") if isinstance(values[0], str) else sum(values)


def _load(
    source: Source,
    task: Task,
    config: BackboneConfig,
    tokenizer: Any,
    part: SplitPart | None,
    loaded: Loaded,
) -> Samples:
    source = dataclasses.replace(source, path=resolve_path(source.path))
    objective = task.objective
    mismatched_in = task.batch_size if objective.needs_mismatched else None
    key = source, task.max_length, part, objective.records, mismatched_in
    if (samples := loaded.samples.get(key)) is None:
        samples = load_samples(
            source,
            tokenizer,
            max_length=task.max_length,
            vocab_size=config.vocab_size,
            part=part,
            tokens=loaded.tokens,
            records=objective.records,
            mismatched_in=mismatched_in,
        )
        loaded.samples[key] = samples
    stored = with_virtual_tokens(samples.samples, task.adapter)
    if isinstance(objective, Policy):
        rewards, groups = (stored.numbers[name] for name in (REWARD, GROUP))
        stored = stored.with_numbers(advantage=objective.advantages(rewards, groups))
    return samples._replace(samples=stored)


class BatchLengths(Sequence[list[int]]):
    """By step, the stream lengths in tokens of the samples of a task's global batch that are
    trained, or of `members` consecutive ones together. The stream length is the number of tokens
    minus 1, because the model does not read the last token. A global batch is read only when its
    lengths are requested."""

    def __init__(self, batches: GlobalBatches, steps: int, objective: Objective, members: int = 1):
        self.batches, self.steps, self._objective = batches, steps, objective
        self._members = members

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> list[int]:
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of {self.steps}")
        # The search for a mesh requests the same steps repeatedly.
        known = _LENGTHS.setdefault(self.batches, {})
        if (at := (step, self._members)) not in known:
            batch = self._objective.trained(self.batches[step])
            known[at] = unit_lengths(batched(batch, self._members))
        return known[at]


def unit_lengths(units: Iterable[Sequence[Sample]]) -> list[int]:
    """The stream length of each unit of samples, which follow each other in a row."""
    return [sum(sample.stream_length for sample in unit) for unit in units]


# An arbitrary mesh that divides linears along both axes.
_DIVIDED = WeightSharding(tp=2, fsdp=2)


def size_of(config: BackboneConfig, dtype: jnp.dtype) -> BackboneSize:
    """A backbone's sizes for the cost models; the field `kept` is empty, and no weights are
    allocated. `dtype` is that of the weights and of the activations between layers."""
    weights = abstract_weights(config, dtype)
    divided = jax.eval_shape(divisible_weights, weights)
    itemsize = jnp.dtype(dtype).itemsize
    return BackboneSize(
        name=config.architecture,
        layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        linears={module: linear_sizes(config, module) for module in MODULES},
        layer_bytes=_nbytes(weights["layers"]) // config.num_layers,
        divided_layer_bytes=_nbytes(divided["layers"]) // config.num_layers,
        outside_bytes=_nbytes({name: w for name, w in weights.items() if name != "layers"}),
        stream_bytes=itemsize,
        kept={},
        head_block_bytes=block_bytes(config.vocab_size),
        packed=PackedBytes.of(config.num_heads, config.num_kv_heads, config.head_dim, itemsize),
        backbone_format=config.linear_format,
    )


def mesh_sizes(config: BackboneConfig) -> dict[str, int]:
    """The sizes of a backbone that a mesh has to divide, by their key in config.json, for
    `planner.devices.Replica.require`."""
    return {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_size": config.hidden_size,
        **_scale_blocks(config),
    }


def _scale_blocks(config: BackboneConfig) -> dict[str, int]:
    """For each key of `mesh_sizes` that concerns blocks with one scale, the largest number that
    divides the block counts of all weights along that axis."""
    blocks: dict[str, list[int]] = {}
    weights = jax.eval_shape(divisible_weights, abstract_weights(config))
    for module, weight in layer_linears(weights).items():
        keys = {TP: KEY_BLOCKS if module in KEY_MODULES else TP_BLOCKS, FSDP: FSDP_BLOCKS}
        axes = {role: keys[axis] for role, axis in _DIVIDED.mesh_axes(module).items()}

        def note(leaf: jax.ShapeDtypeStruct, names: tuple[str | None, ...], axes=axes) -> None:
            for name, size in zip(names, leaf.shape[leaf.ndim - len(names) :], strict=True):
                if name in axes:
                    blocks.setdefault(axes[name], []).append(size)

        if not weight.is_plain:
            weight.map_axes(note)
    return {key: math.gcd(*sizes) for key, sizes in blocks.items()}


def _nbytes(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


class EarlierLength(NamedTuple):
    """The number of steps that a task had before it was extended, when `until` updates had been
    dispatched."""

    until: int
    steps: int


@dataclasses.dataclass(frozen=True)
class PreparedTask:
    """A task (fine-tuning job) with its tokenized data and the linears that it adapts.
    `prepare_task` makes it. `Engine.register_tasks` and `best_shape` take it.

    Attributes:
      targets: by point (for LoRA, the path of a linear within a layer, "mlp.up_proj"), a bool mask
        [L] of the layers in which the task adapts it, from `AdapterKind.targets`.
      make_adapter: function that returns the initial adapter at the task's own rank; for LoRA, by
        path of a linear, its `Factors`. The arrays are made only when an engine adds the task,
        because they are as large as the trained adapter.
      batches: the global batches (the samples of one optimizer update); `batches[k]` is the k-th,
        from 0.
      steps: number of global batches that the task trains.
      eval_samples: the tokenized held-out data; empty if the task has none.
      size: the sizes of the adapter's arrays other than low-rank factors (rank and linears give the
        sizes of those); None for LoRA, which has no other arrays.
      earlier: the numbers of steps before extensions, in the order of the updates.
    """

    task: Task
    targets: dict[str, LayerMask]
    make_adapter: Callable[[], Any]
    samples: Samples
    batches: GlobalBatches | GivenBatches
    steps: int
    eval_samples: Sequence[Sample]
    size: KindSize | None = None
    earlier: tuple[EarlierLength, ...] = ()

    @functools.cached_property
    def lengths(self) -> list[int]:
        """The different stream lengths of training and held-out samples, in tokens, ascending. The
        stream length of a sample is its number of tokens minus 1, because the model does not read
        the last token, plus the number of virtual tokens that the adapter adds."""
        parts = [stream_lengths(part) for part in (self.samples.samples, self.eval_samples)]
        return np.unique(np.concatenate(parts)).tolist()

    @property
    def batch_lengths(self) -> BatchLengths:
        return BatchLengths(self.batches, self.steps, self.task.objective)

    @functools.cached_property
    def longest_pair(self) -> int | None:
        """Stream length of both answers of the longest training pair together, if the objective has
        a `rule_of_pairs`; None if it has not, or if the pairs are not known before training."""
        samples = self.samples.samples
        if self.task.objective.rule_of_pairs is None or not len(samples):
            return None
        lengths = np.asarray(stream_lengths(samples))
        return int(lengths.reshape(-1, self.task.objective.members).sum(axis=1).max())

    def pairs_fit(self, shape: ShapeClass) -> bool:
        """Whether microbatches of this shape can hold both answers of every pair, so that the task
        trains in one pass, although its objective needs log-probabilities."""
        longest = self.longest_pair
        return longest is not None and longest <= shape.row_len and shape.max_sequences > 1

    @property
    def pair_lengths(self) -> BatchLengths:
        """Like `batch_lengths`, with the lengths of whole pairs."""
        objective = self.task.objective
        return BatchLengths(self.batches, self.steps, objective, objective.members)

    def packed_lengths(self, shape: ShapeClass) -> BatchLengths:
        """The lengths of what is packed into microbatches of this shape: pairs if they fit."""
        return self.pair_lengths if self.pairs_fit(shape) else self.batch_lengths

    @property
    def longest(self) -> int:
        """Stream length of the longest training or held-out sample, in tokens."""
        return self.lengths[-1] if self.lengths else 0

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest training or held-out sample, as `Task.max_length` counts them."""
        return self.longest + 1 - self.kind.virtual_tokens(self.task.adapter)

    @functools.cached_property
    def kind(self) -> AdapterKind:
        return kind_of(self.task.adapter)

    @functools.cached_property
    def pool(self) -> PoolSpec:
        """The sizes of a pool that holds only this task."""
        return pool_of_task(self.task, self.targets, self.size)

    def refuse_rows_of(self, row_len: int) -> None:
        """Raises TaskError if the longest training or held-out sample does not fit into a row of
        `row_len` tokens. A sample takes its stream length."""
        if self.longest > row_len:
            raise TaskError(
                f"task {self.task.name!r}: its longest sample takes {self.longest} places in a "
                f"row, and a row has {row_len}; lower max_length or raise row_len"
            )

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of the training and held-out samples, by a description such as "data of task 'a'".
        A run directory records them, so that a training run does not continue with other data.
        Virtual tokens do not change them."""
        parts = {"data": self.samples.samples, "held-out data": self.eval_samples}
        of_task = f"of task {self.task.name!r}"
        return {f"{part} {of_task}": _hash(samples) for part, samples in parts.items()}

    @property
    def refused_extension(self) -> str | None:
        """Why the task cannot get more steps; None if it can."""
        if not self.task.objective.needs_reference or self.steps >= self.batches.batches_per_epoch:
            return None
        return (
            f"task {self.task.name!r}: cannot get more than its {self.steps} steps, which are less "
            "than an epoch, because its objective knows the reference of their samples only"
        )

    @functools.cached_property
    def trained_samples(self) -> Int[np.ndarray, " trained"]:
        """The indices of the training samples on which the task trains, ascending: all of them, or
        fewer if its steps are less than an epoch."""
        if self.steps >= self.batches.batches_per_epoch:
            return np.arange(len(self.samples.samples))
        return np.unique([i for step in range(self.steps) for i in self.batches.indices(step)])

    @functools.cached_property
    def relative_rates(self) -> dict[str, np.ndarray]:
        """By path of a trained leaf ("lora/mlp.up_proj/a"), a float32 array [L]: the learning rate
        of the leaf in each layer, divided by the task's learning rate; 0 in layers that are not
        adapted."""
        rates = self.kind.relative_rates(self.task.adapter, self.targets)
        return named_leaves(self.kind.in_pools(rates))

    @property
    def begins_slowly(self) -> bool:
        """Whether the initial adapter takes long to compute."""
        return self.task.resume_from is None and self.kind.begins_slowly(self.task.adapter)

    def with_adapter(self) -> "PreparedTask":
        """Returns a prepared task whose initial adapter is computed now and kept until
        `make_adapter` is called. For large backbones this takes long, so it can be done in a thread
        beside training."""
        ahead = [self.make_adapter()]

        def make_adapter() -> Any:
            return ahead.pop() if ahead else self.make_adapter()

        return dataclasses.replace(self, make_adapter=make_adapter)

    def extended(self, steps: int, at: int) -> "PreparedTask":
        """Returns a prepared task with another number of steps. It is extended when `at` updates
        have been dispatched; from then on, its learning-rate schedule covers all of the new steps.
        Earlier extensions that would take effect after `at` are dropped."""
        if reason := self.refused_extension:
            raise TaskError(reason)
        task = dataclasses.replace(self.task, steps=steps, epochs=None)
        batches = batches_of(task, self.samples.samples)
        earlier = tuple(length for length in self.earlier if length.until < at)
        if at > 0:
            earlier += (EarlierLength(at, self.steps_at(at - 1)),)
        return dataclasses.replace(self, task=task, batches=batches, steps=steps, earlier=earlier)

    def steps_at(self, step: int) -> int:
        """The number of steps of the task as known when the update of global batch `step` (from 0)
        is dispatched."""
        return next((each.steps for each in self.earlier if step < each.until), self.steps)

    def learning_rate(self, updates: int, step: int) -> float:
        """The learning rate of the update of global batch `step` (from 0), by the schedule of the
        task's optimizer. Skipped updates do not count in `updates`, the number of updates applied
        before."""
        optimizer = self.task.optimizer
        return optimizer.learning_rate * optimizer.schedule.factor(updates, self.steps_at(step))

    def dropout_key(self, step: int) -> np.uint32:
        """The seed of the task's dropout masks for one global batch. It depends only on the task's
        name, its seed and `step`, the index of the global batch from 0."""
        text = f"{self.task.name}/{self.task.seed}/{step}"
        return np.uint32(zlib.crc32(text.encode()))


def pool_of_task(task: Task, targets: Mapping[str, LayerMask], size: KindSize | None) -> PoolSpec:
    """The sizes of a pool that holds only one task; `targets` and `size` are as in
    `PreparedTask`."""
    pool = pool_of_adapter(task.adapter, targets, size)
    return pool._replace(optimizer=task.optimizer.kind)


def pool_of_adapter(adapter: Any, targets: Iterable[str], size: KindSize | None) -> PoolSpec:
    """The sizes of a pool that holds only one adapter, which `adapter` specifies. `targets` are the
    points of `PreparedTask.targets`, and `size` is as there."""
    others = () if size is None else (size,)
    kind = kind_of(adapter)
    if size is not None and not kind.low_rank:
        return PoolSpec(1, 1, (), others=others)
    rank, dropout = kind.rank_in(LOW_RANK_KIND, adapter), dropout_of(adapter) > 0
    linears = tuple(point for point in targets if point not in OUTSIDE)
    return PoolSpec(1, rank, linears, dropout, others=others)


def prepare_task(
    task: Task,
    config: BackboneConfig,
    tokenizer: Any,
    base_fingerprint: str = "",
    base: BaseTensors | None = None,
    loaded: Loaded | None = None,
    base_model: str = "",
) -> PreparedTask:
    """Makes a task ready to train: tokenizes its data and finds the linears that it adapts. If
    `task.resume_from` names an adapter, it is read and checked here. The arrays of the initial
    adapter are made only when an engine adds the task.

    Args:
      config: configuration of the backbone (`Backbone.config`).
      tokenizer: the backbone's tokenizer, from `load_tokenizer`.
      base_fingerprint: hash of the backbone (`Backbone.fingerprint`). An adapter in
        `task.resume_from` that records another backbone is refused. Empty checks nothing.
      base: function that returns a tensor of the backbone by its name, from `checkpoint_tensors`.
        Kinds that are trained as differences from the backbone need it for `task.resume_from`.
      loaded: cache of the data of tasks with this backbone and tokenizer, as for `read_data`.
      base_model: name or path of the backbone. If the folder `task.resume_from` names another one,
        a warning says so. Empty checks nothing.

    Raises:
      TaskError: the task cannot be trained. The message names the task and the field, file, line or
        key at fault.
    """
    kind = kind_of(task.adapter)
    try:
        first = dataclasses.replace(task, adapter=kind.with_tokens(task.adapter, tokenizer))
        targets = dict(kind.targets(first.adapter, config))
        if task.resume_from is not None:
            refuse_other_tokens(task.resume_from, tokenizer)
            _saved_adapter(task, targets, config, base, base_fingerprint, base_model)
        _refuse_sample_prompt(task, config, tokenizer)
    except ValueError as e:
        raise TaskError(f"task {task.name!r}: {e}") from e
    data = read_data(task, config, tokenizer, loaded)
    make_adapter = functools.partial(
        _first_adapter, first, targets, config, base=base, batches=data.batches
    )
    return PreparedTask(
        task,
        targets,
        make_adapter,
        samples=data.samples,
        batches=data.batches,
        steps=data.steps,
        eval_samples=data.eval_samples,
        size=size_of_adapter(task.adapter, config),
    )


def driven_task(
    task: Task, config: BackboneConfig, base: BaseTensors | None = None
) -> PreparedTask:
    """A task that gets its global batches from `Engine.train_on`, one after another. Its data are
    not read.

    Args:
      task: the task; `data`, `batch_size`, `steps` and `epochs` are not used.
      config, base: as for `prepare_task`.

    Raises:
      TaskError: the task cannot be trained, has held-out data, an objective with a reference, or
        what depends on the number of its steps.
    """
    kind, held_out = kind_of(task.adapter), task.eval_data or task.validation_fraction
    if held_out or task.objective.needs_reference:
        raise TaskError(
            f"task {task.name!r}: a task without data of its own has no held-out data, and no "
            "objective with a reference"
        )
    schedule = task.optimizer.schedule
    if schedule.kind != "constant" or schedule.warmup_ratio or task.max_seconds:
        raise TaskError(
            f"task {task.name!r}: a task without data of its own does not know its length, so it "
            "has no schedule but a constant one, no warmup_ratio and no max_seconds"
        )
    try:
        targets = dict(kind.targets(task.adapter, config))
    except ValueError as e:
        raise TaskError(f"task {task.name!r}: {e}") from e
    batches = GivenBatches()
    return PreparedTask(
        task,
        targets,
        functools.partial(_first_adapter, task, targets, config, base=base, batches=batches),
        samples=Samples(stored(()), read=0),
        batches=batches,
        steps=0,
        eval_samples=(),
        size=size_of_adapter(task.adapter, config),
    )


def _refuse_sample_prompt(task: Task, config: BackboneConfig, tokenizer: Any) -> None:
    """Raises ValueError if `sample_prompt` is empty or leaves no room for a completion."""
    if task.sample_prompt is not None:
        ((ids, _),) = encode(tokenizer, [task.sample_prompt], is_rendered=False)
        tokens = len(ids)
        virtual = kind_of(task.adapter).virtual_tokens(task.adapter)
        context = config.max_position_embeddings - virtual
        if not 0 < tokens < context:
            taken = f", less {virtual} virtual tokens" * (virtual > 0)
            raise ValueError(
                f"sample_prompt has {tokens} tokens; it should have at least 1 and fewer than the "
                f"backbone's context of {context}{taken}"
            )


def _hash(samples: Sequence[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(len(sample.input_ids).to_bytes(4))
        digest.update(sample.input_ids.tobytes())
        digest.update(sample.target_mask.tobytes())
        for values in sample.values.values():
            digest.update(values.tobytes())
        digest.update(repr(sorted(sample.numbers.items())).encode() if sample.numbers else b"")
    return digest.hexdigest()[:16]


def _first_adapter(
    task: Task,
    targets: dict[str, LayerMask],
    config: BackboneConfig,
    base: BaseTensors | None,
    batches: GlobalBatches,
) -> Any:
    if task.resume_from is not None:
        return _saved_adapter(task, targets, config, base)
    kind = kind_of(task.adapter)
    try:
        if kind.reads_samples:
            samples = first_epoch(batches, task.objective)
            return kind.initial(task.adapter, targets, config, task.seed, base, samples)
        return kind.initial(task.adapter, targets, config, task.seed, base)
    except ValueError as e:
        raise TaskError(f"task {task.name!r}: {e}") from e


def first_epoch(batches: GlobalBatches, objective: Objective) -> Iterator[Sample]:
    """The trained samples of the first epoch."""
    for number in range(batches.batches_per_epoch):
        yield from objective.trained(batches[number])


def _saved_adapter(
    task: Task,
    targets: dict[str, LayerMask],
    config: BackboneConfig,
    base: BaseTensors | None,
    base_fingerprint: str = "",
    base_model: str = "",
) -> Any:
    """Reads the adapter in the folder `resume_from`. Raises AdapterError if it differs from the
    task's specification."""
    saved, adapter = import_adapter(task.resume_from, config, base_fingerprint, base, base_model)
    kind = kind_of(task.adapter)
    if kind_of(saved) is not kind:
        # Two kinds may share a class of specifications; then its fields tell them apart.
        hint = f"; what it holds is {saved}" if type(saved) is type(task.adapter) else ""
        raise AdapterError(
            f"{task.resume_from}: holds an adapter of the kind {kind_of(saved).name!r}, the task "
            f"asks for {kind.name!r}{hint}"
        )
    expected = kind.as_stored(task.adapter)
    for field in kind.identity:
        saved_value, wanted = getattr(saved, field), getattr(expected, field)
        if saved_value != wanted:
            raise AdapterError(
                f"{task.resume_from}: {field} is {saved_value}, the task asks for {wanted}"
            )
    if not _same_targets(kind.targets(saved, config), targets):
        raise AdapterError(
            f"{task.resume_from}: target modules are {_shown(saved)}, "
            f"the task asks for {_shown(task.adapter)}"
        )
    return adapter


def _same_targets(one: Mapping[str, LayerMask], other: Mapping[str, LayerMask]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[m], other[m]) for m in one)


def _shown(spec: Any) -> str:
    targets = spec.target_modules
    return targets if isinstance(targets, str) else ", ".join(targets)
