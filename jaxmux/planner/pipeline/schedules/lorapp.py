"""mLoRA's LoRAPP: a pipeline that stays full because each task waits for its own updates only."""

from .gpipe_1f1b import one_f_one_b_depth
from .greedy_orders import LaunchRule, greedy_orders
from .schedule import PipelineSchedule, Workload
from .tick_layout import TickRule, lay_out


def lorapp(workload: Workload, rule: TickRule = "single") -> PipelineSchedule:
    """Returns the LoRAPP schedule in its 1F1B mode (mLoRA 3.2.1), for microbatches of several
    tasks.

    While the microbatches of one task wait for its optimizer update, those of other tasks fill the
    pipeline. The first stage prefers forward passes: it starts the first microbatch that waits for
    no update, and passes over those that wait. (`one_forward_one_backward` passes over none.) All
    other stages prefer backward passes, which free memory. At most `one_f_one_b_depth(S, rule)`
    microbatches are in flight (between forward and backward pass) on the stages.

    The bubble ratio is the idle fraction of the stages' time. With S equal stages, T tasks and one
    microbatch per global batch, it is max{(S-T)/S, 0} without warm-up and drain. With n
    microbatches per global batch it is max{(S-1+n-T·n) / (S+n-1), 0} (mLoRA 3.2.2, which writes D
    for S, L for T and N for n). If stages start ticks together and the rule is "single", this holds
    only if forward passes take as long as backward passes. With "paired" ticks about twice as many
    microbatches are in flight, so S stages need 2S tasks to be full.

    Args:
      workload: the microbatches with their times, in an order in which the tasks take turns, for
        example from `round_robin_microbatches`.
      rule: the passes that may share a tick (column of the schedule): "single", "paired" or
        "alternating", as for `one_forward_one_backward`.

    Raises:
      PlanningError: the buffers do not suffice for any microbatch to continue.
    """
    launch = LaunchRule(
        in_flight=one_f_one_b_depth(workload.stages, rule), skip_blocked=True, forward_first=1
    )
    return lay_out(workload, greedy_orders(workload, launch), rule)
