"""Log-probabilities of the tokens of held-out samples, with adapters and with the bare backbone."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np

from jaxmux.data import Sample, StoredSamples
from jaxmux.data.stored_samples import joined
from jaxmux.engine import Engine, EngineOptions
from jaxmux.engine.rounds.results import LogProbs
from jaxmux.engine.rounds.rounds import divide
from jaxmux.models import Backbone
from jaxmux.runs import best_shape

from .losses import EvalCase, HeldOutData, first_with_data, untrained


class Score(NamedTuple):
    """The log-probabilities of a sample.

    Attributes:
      adapter: name of the adapter's task; None for the bare backbone.
      held_out: the data from which the sample comes.
      log_probs: of every token but the first, given those before it, float32 [n - 1] in nats for a
        sample of n tokens. NaN if the forward pass was not finite.
    """

    adapter: str | None
    held_out: HeldOutData
    sample: Sample
    log_probs: LogProbs


def scores_of(
    cases: Sequence[EvalCase],
    backbone: Backbone,
    tokens_per_microbatch: int = 8192,
    tokens_per_group: int = 2**18,
) -> Iterator[Score]:
    """Scores the samples of all cases with one engine. Samples are read from their file, scored and
    yielded in groups, so that memory need not hold all of them. If several cases have the same
    samples, the bare backbone scores them once, and the scores of a sample follow each other: first
    that of the bare backbone, then those of the adapters.

    Args:
      cases: at least one. An adapter has the same `task` in all of its cases; its samples come from
        one `Loaded`.
      tokens_per_microbatch: most tokens of one forward pass.
      tokens_per_group: most tokens of a group, unless it is a single sample.
    """
    firsts, config = first_with_data(cases), backbone.config
    samples_of: dict[str | None, list[StoredSamples]] = defaultdict(list)
    for case in cases:
        samples_of[case.task].append(case.samples)
    # The samples of a task only decide the shape of microbatches.
    samples_of.setdefault(None, [cases[0].samples])
    tasks = {case.task: case for case in cases}
    prepared = {}
    for number, (task, parts) in enumerate(samples_of.items()):
        samples, case = joined(parts), tasks.get(task)
        adapter = (case.spec, case.adapter) if case else ()
        size = max(1, int(tokens_per_group / samples.stream_lengths.mean()))
        prepared[task] = untrained(
            f"task.{number}", samples, config, *adapter, batch_size=min(size, len(samples))
        )
    options = EngineOptions(best_shape(list(prepared.values()), backbone, tokens_per_microbatch))
    with closing(Engine(backbone, options)) as engine:
        engine.register_tasks(list(prepared.values()))
        for first in dict.fromkeys(firsts):
            held_out = cases[first].held_out
            same = (case for case, data in zip(cases, firsts, strict=True) if data == first)
            names = list(dict.fromkeys([None, *(case.task for case in same)]))
            lengths = np.maximum(held_out.samples.stream_lengths, options.shape.least_tokens)
            for group in divide(lengths, tokens_per_group):
                batch = list(held_out.samples[group.start : group.stop])
                found = [engine.log_probs(prepared[name].task.name, batch) for name in names]
                for sample, *of_sample in zip(batch, *found, strict=True):
                    for name, log_probs in zip(names, of_sample, strict=True):
                        yield Score(name, held_out, sample, log_probs)
