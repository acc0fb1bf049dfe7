"""The sizes of the pool that holds the arrays of all tasks, and what does not fit into it."""

from collections.abc import Iterator, Sequence

from jaxmux.models import MODULES, BackboneConfig
from jaxmux.optimizers import OPTIMIZERS
from jaxmux.peft import KINDS
from jaxmux.planner.costs.pool_spec import PoolSpec, merge_pool_specs
from jaxmux.tasks import TaskError

from .train_state import TrainState, pool_specs


def pool_of(
    config: BackboneConfig,
    tasks: Sequence[PoolSpec],
    reserved: PoolSpec,
    keep_moments: bool = False,
) -> tuple[PoolSpec, TrainState]:
    """The pool that holds tasks, and the description of its arrays.

    Args:
      config: configuration of the backbone.
      tasks: by task, the pool that would hold only this task.
      reserved: smallest sizes of the pool.
      keep_moments: whether the pool has room for the moments of `reserved.optimizer`.
    """
    pool = merge_pool_specs(tasks, reserved)
    if keep_moments and moments_of(reserved) > moments_of(pool):
        pool = pool._replace(optimizer=reserved.optimizer)
    modules = MODULES if pool.modules is None else sorted(pool.modules)
    sizes = pool.slots, pool.rank, pool.optimizer, pool.others
    return pool, pool_specs(config, modules, *sizes)


def refuse_outgrowing(name: str, own: PoolSpec, pool: PoolSpec) -> None:
    """Checks that a task fits into a pool.

    Args:
      name: name of the task.
      own: the pool that would hold only this task.
      pool: the pool.

    Raises:
      TaskError: the task needs another rank, linear, dropout or optimizer than the pool has.
    """
    modules = MODULES if pool.modules is None else pool.modules
    missing = ", ".join(sorted({*own.modules} - {*modules}))
    lacking = "; ".join(_missing_kinds(own, pool))
    adapts = f"it adapts {missing}"
    # By option of a server, what a task needs beyond it.
    problems = {
        "reserved_rank": f"its rank is {own.rank}, the pool's is {pool.rank}"
        * (own.rank > pool.rank),
        "reserved_targets": f"{adapts}, for which the pool has no arrays" * bool(missing),
        "reserved_adapters": lacking,
        "reserved_dropout": "it has dropout, for which the pool was not made"
        * (own.dropout and not pool.dropout),
    }
    for option, problem in problems.items():
        if problem:
            raise TaskError(f"task {name!r}: {problem} (option {option})")
    if moments_of(own) > moments_of(pool):
        raise TaskError(
            f"task {name!r}: its optimizer {own.optimizer} has more moments than the pool"
        )


def _missing_kinds(own: PoolSpec, pool: PoolSpec) -> Iterator[str]:
    """What a task needs of other adapter kinds than LoRA, and the pool lacks: a clause for each."""
    there = {size.kind: size for size in pool.others}
    for size in own.others:
        adapter, found = f"its adapter of the kind {size.kind!r}", there.get(size.kind)
        if found is None:
            yield f"{adapter} needs arrays that the pool does not have"
            continue
        if size.rank > found.rank:
            field = KINDS[size.kind].size_field
            yield f"{adapter} has size {size.rank} ({field}), the pool's is {found.rank}"
        points = {point.point for point in found.points}
        if missing := ", ".join(each.point for each in size.points if each.point not in points):
            yield f"{adapter} changes {missing}, for which the pool has no arrays"


def moments_of(pool: PoolSpec) -> int:
    """Number of moments for which a pool has room."""
    return OPTIMIZERS[pool.optimizer].moments
