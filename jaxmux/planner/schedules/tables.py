"""A schedule as the arrays that the lockstep executor takes: what every stage does in a tick."""

from typing import NamedTuple

import numpy as np

from .schedule import NONE, Schedule


class TickTables(NamedTuple):
    """int32[S, T] each. In tick t stage s, in this order:

    1. writes what arrived from the left to slot `arriving_activation` of its activation ring, what
       arrived from the right to slot `arriving_gradient` of its gradient ring, and, on the last
       stage, the gradient of the loss that was computed since the tick before to slot
       `arriving_loss` of the same ring; −1: nothing of use has arrived;
    2. runs job `backward_mb` with chunk `backward_chunk` on the gradient in `backward_gradient` and
       the residuals in `backward_residual`; −1: no backward;
    3. runs job `forward_mb` with chunk `forward_chunk` on the activation in `forward_activation`
       (−1: on the token ids) and keeps the residuals in `forward_residual`; −1: no forward;
    4. sends its activation right and its gradient left around the ring.

    Slots of ops that do not run are −1.
    """

    forward_mb: np.ndarray
    forward_chunk: np.ndarray
    forward_activation: np.ndarray
    forward_residual: np.ndarray
    backward_mb: np.ndarray
    backward_chunk: np.ndarray
    backward_gradient: np.ndarray
    backward_residual: np.ndarray
    arriving_activation: np.ndarray
    arriving_gradient: np.ndarray
    arriving_loss: np.ndarray


def tick_tables(schedule: Schedule) -> TickTables:
    """The executor's arrays of a legal schedule."""
    stages, last = schedule.stages, schedule.virtual_stages - 1
    stage = np.arange(stages)[:, None]
    forward_mb, backward_mb = schedule.forward_mb, schedule.backward_mb
    forward_virtual = schedule.forward_chunk * stages + stage
    backward_virtual = schedule.backward_chunk * stages + stage
    sends_right = (forward_mb != NONE) & (forward_virtual < last)
    sends_left = (backward_mb != NONE) & (backward_virtual > 0)
    to_loss = (forward_mb != NONE) & (forward_virtual == last)

    def at_ops(slots: np.ndarray, virtual: np.ndarray, mb: np.ndarray) -> np.ndarray:
        return np.where(mb == NONE, NONE, slots[virtual, mb]).astype(np.int32)

    def at_arrivals(
        slots: np.ndarray, sends: np.ndarray, mb: np.ndarray, virtual: np.ndarray, hop: int
    ) -> np.ndarray:
        arriving = np.full_like(mb, NONE)
        sender, tick = np.nonzero(sends)
        target = virtual[sender, tick] + hop
        arriving[target % stages, tick + 1] = slots[target, mb[sender, tick]]
        return arriving

    return TickTables(
        forward_mb=forward_mb,
        forward_chunk=schedule.forward_chunk,
        forward_activation=at_ops(schedule.activation_slot, forward_virtual, forward_mb),
        forward_residual=at_ops(schedule.residual_slot, forward_virtual, forward_mb),
        backward_mb=backward_mb,
        backward_chunk=schedule.backward_chunk,
        backward_gradient=at_ops(schedule.gradient_slot, backward_virtual, backward_mb),
        backward_residual=at_ops(schedule.residual_slot, backward_virtual, backward_mb),
        arriving_activation=at_arrivals(
            schedule.activation_slot, sends_right, forward_mb, forward_virtual, 1
        ),
        arriving_gradient=at_arrivals(
            schedule.gradient_slot, sends_left, backward_mb, backward_virtual, -1
        ),
        arriving_loss=at_arrivals(schedule.gradient_slot, to_loss, forward_mb, forward_virtual, 0),
    )
