"""The interface of an adapter kind, through which the engine, checkpoints and commands use it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmux.data import Sample
from jaxmux.models import BackboneConfig, Calibration, calibration_of
from jaxmux.models.adapter_ops import AT_HEAD, LOW_RANK_KIND, OUTSIDE, TIED, AdapterOp
from jaxmux.pallas_kernels.grouped_lora import Factors
from jaxmux.planner.costs.pool_spec import KindSize, PointSize, PointWork

from .targets import LayerMask, full_name, linears_of

# The file with the arrays, in folders of Hugging Face PEFT.
WEIGHTS = "adapter_model.safetensors"

# Maps the name of a tensor of the backbone to a function that changes its float32 values.
Changes = Mapping[str, Callable[[np.ndarray], np.ndarray]]

# Takes the name of a tensor in Hugging Face's checkpoint of the backbone and returns the values.
BaseTensors = Callable[[str], np.ndarray]


class AdapterKind(NamedTuple):
    """One kind of adapter: a name and the functions that describe, create and store its arrays.

    The adapters of all tasks are stacked in *pools* of arrays, one pool for each kind. Every task
    has a *slot* in the pools. A *point* is a place of the backbone at which an adapter does
    something, for example the path of a linear within a layer ("mlp.up_proj"). A pool, or the
    adapter of a single task, is a tree whose first keys are points (for LoRA: `Factors` with a and
    b below each linear).

    A kind may have low-rank factors besides its own arrays (`AdapterOp.low_rank`). The factors of
    all tasks lie in the pool of LoRA, whatever the kind, so that one product serves all tasks. The
    kind's own arrays are then a dict below each linear, in which "scale" is the scale of the
    low-rank product. The adapter of a single task has these arrays and the factors "a" and "b" in
    one dict. At points outside the layers, such a kind has only its own arrays.

    A specification is a frozen dataclass. If the kind has low-rank factors, the specification has
    an attribute `dropout`: the dropout rate of the inputs of the low-rank products.

    Attributes:
      name: name of the kind in pools and checkpoints, for example "lora".
      specification: class of the values that describe one task's adapter, for example `LoRA`.
      op: the operations of the kind at the points of a layer; None for LoRA, whose factors are part
        of the frozen products.
      targets: function (specification, config) that returns, by point, a bool mask [L] of the
        layers in which the adapter does something. It raises ValueError if there are none.
      leaves: function (config, points, slots, rank) that describes a pool with T slots and rank R
        as a tree of `LeafSpec`, without the low-rank factors. R is at least the largest rank of any
        task.
      initial: function (specification, targets, config, seed, base) that returns the arrays with
        which a task begins, at the task's rank and without the slot axis. `base` returns tensors of
        the backbone. If `base` is None, kinds that compute their arrays from the backbone raise
        ValueError (`base_values`).
      relative_rates: function (specification, targets) that returns a tree with a float32 array [L]
        for each trained array: its learning rate in each of the L layers, divided by the task's
        learning rate; 0 in layers that are not adapted.
      recognise: function (settings) that tells whether an adapter_config.json with these values
        belongs to this kind.
      settings: function (specification, config, serving) that returns the values of
        adapter_config.json, without the values that all adapters have. With `serving`, the values
        are those of an adapter whose scales are multiplied into the arrays, for servers that
        support only the scale 1.
      from_settings: function (settings, config), the inverse of `settings`. It raises ValueError or
        KeyError if no adapter of this kind has these settings.
      tensors: function (specification, adapter, config, serving, base) that returns the arrays of a
        folder by name. `base` is as for `initial`, for kinds that are stored as whole weights.
      from_tensors: function (specification, tensors, config, base), the inverse of `tensors`. It
        removes the tensors that it uses from `tensors`, and raises ValueError if one is missing or
        has the wrong shape.
      identity: attributes that must be equal in the specification of an adapter from a folder and
        in that of a task that continues the adapter, besides the targets.
      weights_file: name of the file with the arrays.
      rank: function (specification) that returns the size of the axis "rank" of the kind's arrays;
        by default the attribute `rank`, or 1 if there is none.
      size_field: the attribute of a specification with which users set this size, for messages.
      factor_rank: function (specification) that returns the rank of the low-rank factors; None if
        it is `rank`.
      serves: function (specification) that tells whether a specification belongs to this kind, for
        classes that several kinds share.
      merged: function (specification, adapter, config) that returns, by name of a tensor of the
        backbone, a function from the tensor's float32 values to the values with the adapter merged;
        None if adapters of this kind cannot be merged.
      work: function (config, point, rank) that returns the work of a pool of this rank at a point,
        for predicted times. None means two FLOPs for each trained value, and two reads and one
        write of the backbone's width.
      virtual_tokens: function (specification) that returns the number of positions that the adapter
        fills before every sequence. These positions hold -1, -2, … in place of tokens;
        `embedding_output` of the op gives the rows that enter the first layer there.
      with_tokens: function (specification, tokenizer) that returns the specification with its text
        replaced by the text's tokens, because `initial` has no tokenizer. It raises ValueError if
        the text has no tokens.
      as_stored: function (specification) that returns the specification of the same adapter after
        it was written to a folder and read again; only the attributes in `identity` need to be
        right.
      reads_samples: whether `initial` takes a sixth argument: the samples of the task's training
        data in the order in which they are trained, or None. Samples are made only as far as
        `initial` iterates.
      begins_slowly: function (specification) that tells whether `initial` takes long, because it
        reads all weights of the backbone or runs the backbone; a server computes few such adapters
        at once. By default the attribute of this name, or False if there is none.
      same_in_any_rows: whether a task gets the same bits on a CPU in microbatches with any number
        of rows. It is False if XLA computes small products differently for more tokens.
    """

    name: str
    specification: type
    op: AdapterOp | None
    targets: Callable[[Any, BackboneConfig], Mapping[str, LayerMask]]
    leaves: Callable[[BackboneConfig, Sequence[str], int, int], Any]
    initial: Callable[..., Any]
    relative_rates: Callable[[Any, Mapping[str, LayerMask]], Any]
    recognise: Callable[[Mapping[str, Any]], bool]
    settings: Callable[[Any, BackboneConfig, bool], dict[str, Any]]
    from_settings: Callable[[Mapping[str, Any], BackboneConfig], Any]
    tensors: Callable[[Any, Any, BackboneConfig, bool, BaseTensors | None], dict[str, np.ndarray]]
    from_tensors: Callable[[Any, dict[str, np.ndarray], BackboneConfig, BaseTensors | None], Any]
    identity: tuple[str, ...] = ()
    weights_file: str = WEIGHTS
    rank: Callable[[Any], int] = lambda specification: getattr(specification, "rank", 1)
    size_field: str = "rank"
    factor_rank: Callable[[Any], int] | None = None
    serves: Callable[[Any], bool] = lambda specification: True
    merged: Callable[[Any, Any, BackboneConfig], Changes] | None = None
    work: Callable[[BackboneConfig, str, int], PointWork] | None = None
    virtual_tokens: Callable[[Any], int] = lambda specification: 0
    with_tokens: Callable[[Any, Any], Any] = lambda specification, tokenizer: specification
    as_stored: Callable[[Any], Any] = lambda specification: specification
    reads_samples: bool = False
    begins_slowly: Callable[[Any], bool] = lambda specification: getattr(
        specification, "begins_slowly", False
    )
    same_in_any_rows: bool = True

    @property
    def low_rank(self) -> bool:
        """Whether the adapters have low-rank factors besides their own arrays."""
        return self.op is not None and self.op.low_rank

    def rank_in(self, pool: str, specification: Any) -> int:
        """Size of the axis "rank" of an adapter's arrays in a pool: the pool of this kind, or the
        pool of the low-rank factors (`LOW_RANK_KIND`)."""
        of_factors = self.factor_rank if pool == LOW_RANK_KIND else None
        return (of_factors or self.rank)(specification)

    def in_pools(self, adapter: Any) -> dict[str, Any]:
        """Splits adapters of this kind, a tree by point, into the pools in which their arrays lie.
        The inverse is `from_pools`."""
        if not self.low_rank:
            return {self.name: adapter}
        linears = linears_of(adapter)
        arrays_of_kind = adapter | {
            point: {name: leaf for name, leaf in arrays.items() if name not in Factors._fields}
            for point, arrays in linears.items()
        }
        factors = {
            p: Factors(*(arrays[n] for n in Factors._fields)) for p, arrays in linears.items()
        }
        return {
            LOW_RANK_KIND: factors,
            self.name: {p: arrays for p, arrays in arrays_of_kind.items() if arrays},
        }

    def from_pools(self, pools: Mapping[str, Any]) -> Any:
        """Joins the arrays from all pools of this kind, by name of the pool, into a tree by
        point."""
        if not self.low_rank:
            return pools[self.name]
        arrays_of_kind = pools[self.name]
        linears = {
            point: factors._asdict() | arrays_of_kind.get(point, {})
            for point, factors in pools[LOW_RANK_KIND].items()
        }
        return linears | {
            point: arrays for point, arrays in arrays_of_kind.items() if point in OUTSIDE
        }

    def size(self, rank: int, points: Sequence[str], config: BackboneConfig) -> KindSize:
        """Sizes of a pool of this kind with this rank, without the low-rank factors."""

        def count(point: str, rank: int) -> tuple[int, int, int]:
            specs = jax.tree.leaves(self.leaves(config, [point], 1, rank))
            sizes = [(spec, int(np.prod(spec.shape))) for spec in specs]
            return (
                sum(size for spec, size in sizes if spec.trained),
                sum(size for spec, size in sizes if not spec.trained),
                sum(size for spec, size in sizes if not (spec.trained or spec.divides_layers)),
            )

        def end(point: str) -> int | None:
            specs = jax.tree.leaves(self.leaves(config, [point], 1, 1))
            ends = {spec.place for spec in specs if {"first", "last"} & {*spec.axes}}
            return min(ends, default=None)

        def work(point: str, rank: int) -> PointWork:
            if self.work:
                return self.work(config, point, rank)
            stream = config.num_layers * config.hidden_size
            return PointWork(2 * count(point, rank)[0], 3 * stream)

        def size(point: str) -> PointSize:
            (one, frozen, whole), (two, more_frozen, more) = count(point, 1), count(point, 2)
            per_rank = two - one
            (flops, moved, kept), (more_flops, _, more_kept) = work(point, 1), work(point, 2)
            return PointSize(
                point,
                trained_per_rank=per_rank,
                trained=one - per_rank,
                frozen_per_rank=more_frozen - frozen,
                frozen=2 * frozen - more_frozen,
                flops_per_rank=more_flops - flops,
                flops=2 * flops - more_flops,
                moved=moved,
                kept=2 * kept - more_kept,
                kept_per_rank=more_kept - kept,
                at_head=point in AT_HEAD,
                at_both_ends=point == TIED,
                whole_per_rank=more - whole,
                whole=2 * whole - more,
                end=end(point),
            )

        return KindSize(self.name, rank, tuple(map(size, sorted(points))))


def base_values(
    base: BaseTensors | None, name: str, rows: Sequence[int] | None = None
) -> np.ndarray:
    """A tensor of the backbone by its Hugging Face name, or some of its rows, as float32. Raises
    ValueError if `base` is None."""
    if base is None:
        raise ValueError(
            "the weights of the backbone are needed; give base, from checkpoint_tensors"
        )
    tensor = base(name) if rows is None else base(name)[np.asarray(rows)]
    return np.asarray(tensor, np.float32)


def calibrated(
    config: BackboneConfig,
    base: BaseTensors | None,
    samples: Iterable[Sample] | None,
    tokens: int,
) -> Calibration:
    """Prepares initial values that depend on the backbone and on the first `tokens` tokens of a
    task's `samples` (see `AdapterKind.initial`). Raises ValueError if `base` or `samples` is None,
    or none of the tokens counts in the loss."""
    if samples is None:
        raise ValueError(
            "the initial values depend on the task's training data; give samples, its tokenized "
            "training samples"
        )
    return calibration_of(config, partial(base_values, base), samples, tokens)


def changed_weights(
    targets: Mapping[str, LayerMask],
    change: Callable[[str, int], Callable[[np.ndarray], np.ndarray]],
) -> Changes:
    """Changes of the weights of linears, for `AdapterKind.merged`. `change(path, layer)` returns
    the function that changes one weight."""
    return {
        f"{full_name(module, layer)}.weight": change(module, layer)
        for module, mask in targets.items()
        for layer in np.flatnonzero(mask).tolist()
    }


def spec_tree(points: Mapping[str, Any]) -> dict[str, Any]:
    """A tree from leaves with names such as "mlp.down_proj/input": the halves of a name are the
    keys."""
    tree: dict[str, Any] = {}
    for name, leaf in points.items():
        point, part = name.split("/")
        tree.setdefault(point, {})[part] = leaf
    return tree
