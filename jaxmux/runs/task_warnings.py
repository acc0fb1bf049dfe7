"""Warnings about tasks that can be trained but whose settings, data or results look like mistakes.

Each warning is one line with the suspicious number. A training run prints the warnings of
`before_training` once, when it begins, and those of `after_training` with its results. A server
shows both kinds in the task's status (`of_live_task`), and their number on its terminal.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmux.data import Samples
from jaxmux.data.preferences import LABEL
from jaxmux.engine import PreparedTask, TaskProgress
from jaxmux.models import BackboneConfig, linear_sizes
from jaxmux.models.adapter_ops import OUTSIDE
from jaxmux.objectives import KTO, SFT
from jaxmux.peft import LayerMask, LoRA, full_name
from jaxmux.peft.lora import matching
from jaxmux.planner.numbers import numbered
from jaxmux.tasks import Task

from .run_options import RunOptions

if TYPE_CHECKING:
    from jaxmux.server import ServerOptions

# A warning is printed if a fraction is larger than this.
UNKNOWN_TOKENS = 0.01
CUT_TOKENS = 0.1
DROPPED_RECORDS = 0.05
ENDLESS_CHATS = 0.5
# If a loss differs from the loss of uniform predictions by less than this, in nats, nothing was
# learnt.
_NEAR_UNIFORM = 0.05
# The limits of the weight of desirable answers over that of undesirable ones (Ethayarajh et al.
# 2024, Eq. 8).
_BALANCE = 1.0, 4 / 3
# A loss counts as risen if it rose by at least this, in nats.
_RISE = 0.01


def before_training(prepared: PreparedTask, config: BackboneConfig) -> list[str]:
    return [*_of_settings(prepared, config), *_of_data(prepared, config)]


def of_live_task(
    prepared: PreparedTask, progress: TaskProgress | None, config: BackboneConfig
) -> list[str]:
    """The warnings about a task of a server. `progress` is the task's final progress, or None
    before the task begins."""
    if progress is None:
        return before_training(prepared, config)
    results = {"steps": progress.step, "objective": prepared.task.objective.kind}
    return after_training({**progress.to_json(), **results}, config)


def of_options(options: "RunOptions | ServerOptions", config: BackboneConfig) -> list[str]:
    context = config.max_position_embeddings
    if not options.row_len or options.row_len <= context:
        return []
    return [
        f"row_len is {options.row_len}, beyond the backbone's context of {context} tokens "
        "(max_position_embeddings); a row holds several samples, so this only makes rows longer"
    ]


def after_training(results: Mapping[str, Any], config: BackboneConfig) -> list[str]:
    """The warnings about a task's results. `results` is its entry in `Summary.tasks`."""
    warnings = []
    if (skipped := results["skipped"]) and results["status"] != "failed":
        warnings.append(
            f"{skipped} of its {numbered(results['steps'], 'update')} "
            f"{'was' if skipped == 1 else 'were'} skipped, because a loss, a gradient or an update "
            "was not finite; the learning rate may be too high"
        )
    # Summaries of earlier versions name no objective. Only this loss is one of predictions.
    if results.get("objective", SFT.kind) != SFT.kind:
        return warnings
    first, last = results["train_loss_first"], results["train_loss_last"]
    uniform = math.log(config.vocab_size)
    rose = results["steps"] - skipped >= 2 and last - first >= _RISE
    if rose and abs(last - uniform) <= _NEAR_UNIFORM:
        warnings.append(
            f"its loss rose from {first:.4f} to {last:.4f}, the loss of uniform predictions over "
            f"{config.vocab_size} tokens; the learning rate may be too high"
        )
    return warnings


def _of_settings(prepared: PreparedTask, config: BackboneConfig) -> list[str]:
    task, warnings = prepared.task, []
    optimizer, adapter = task.optimizer, task.adapter
    if optimizer.learning_rate == 0:
        warnings.append("learning_rate is 0, so training does not change the adapter")
    if isinstance(adapter, LoRA) and adapter.alpha == 0:
        warnings.append("alpha is 0, so the adapter has no effect")
    if optimizer.weight_decay > 1:
        warnings.append(f"weight_decay is {optimizer.weight_decay:g}; usual values are at most 0.1")
    if task.batch_size > (records := task.objective.count(prepared.samples.samples)):
        warnings.append(
            f"batch_size is {task.batch_size}, above the "
            f"{numbered(records, task.objective.unit)} of the data; every step trains on all of "
            "them"
        )
    warmup = optimizer.schedule.warmup_steps
    if warmup >= prepared.steps:
        warnings.append(
            f"warmup_steps is {warmup}, but the task trains {numbered(prepared.steps, 'step')}; "
            "the learning rate never reaches its peak"
        )
    if task.eval_data and task.eval_data.chat_template not in _templates(task):
        warnings.append("eval_data has another chat_template than data")
    if isinstance(adapter, LoRA):
        linears = [point for point in prepared.targets if point not in OUTSIDE]
        widths = [min(linear_sizes(config, module)) for module in linears]
        narrowest = min(widths, default=config.hidden_size)
        rank = adapter.largest_rank
        if rank > narrowest:
            warnings.append(f"rank is {rank}, but the narrowest linear has width {narrowest}")
        warnings += _unused_patterns(adapter, prepared.targets)
    return warnings


def _templates(task: Task) -> set[str | None]:
    return {source.chat_template for source in task.sources}


def _unused_patterns(adapter: LoRA, targets: Mapping[str, LayerMask]) -> list[str]:
    names = [
        full_name(module, layer) for module, mask in targets.items() for layer in mask.nonzero()[0]
    ]
    return [
        f"{field} has {key!r}, which matches no linear that is adapted"
        for field in ("rank_pattern", "alpha_pattern")
        for key, value in getattr(adapter, field)
        if all(matching([(key, value)], name, None) is None for name in names)
    ]


def _of_data(prepared: PreparedTask, config: BackboneConfig) -> list[str]:
    warnings, data = [], prepared.samples
    if prepared.longest > (context := config.max_position_embeddings):
        warnings.append(f"the backbone was made for {context} tokens (max_position_embeddings)")
    length = prepared.task.max_length
    if _above(data.unknown_target_tokens, data.target_tokens, UNKNOWN_TOKENS):
        warnings.append(
            f"{data.unknown_target_tokens / data.target_tokens:.1%} of the completion tokens are "
            "unknown to the tokenizer"
        )
    if _above(data.cut_target_tokens, data.target_tokens, CUT_TOKENS):
        warnings.append(
            f"max_length={length} cuts off {data.cut_target_tokens / data.target_tokens:.0%} of "
            "the completion tokens"
        )
    if _above(data.dropped, data.read, DROPPED_RECORDS):
        warnings.append(
            f"max_length={length} drops {data.dropped} of {data.read} records "
            f"({data.dropped / data.read:.0%})"
        )
    if data.equal_answers:
        warnings.append(
            f"in {numbered(data.equal_answers, 'pair')} the chosen and the rejected answer are the "
            "same tokens, from which it learns nothing"
        )
    if prepared.task.objective.records == "rollouts":
        warnings += _of_rollouts(data)
    warnings += of_labels(prepared.task, data)
    if data.skipped:
        warnings.append(
            f"{data.skipped} of {data.read} records are skipped, the first because of "
            f"{data.first_skipped}"
        )
    return [*warnings, *of_texts(data)]


def of_labels(task: Task, data: Samples) -> list[str]:
    """The warning about the numbers of desirable and undesirable answers."""
    if not isinstance(objective := task.objective, KTO):
        return []
    labels = objective.trained(data.samples).numbers[LABEL]
    desirable = int(labels.sum())
    undesirable = len(labels) - desirable
    if not desirable or not undesirable:
        which = "desirable" if desirable else "undesirable"
        return [f"all {len(labels)} answers are {which}, and KTO compares both kinds"]
    least, most = _BALANCE
    pull, other = objective.desirable_weight * desirable, objective.undesirable_weight * undesirable
    ratio = pull / other if other else math.inf
    # Products of decimal fractions are not exact.
    if least <= round(ratio, 2) <= round(most, 2):
        return []
    warning = (
        f"desirable_weight times {desirable:,} desirable answers, divided by undesirable_weight "
        f"times {undesirable:,} undesirable ones, is {ratio:.3g}; it should be between {least:g} "
        f"and {most:.3g}"
    )
    if other:
        low, high = (limit * other / desirable for limit in _BALANCE)
        warning += f", as with a desirable_weight of {low:.3g} to {high:.3g}"
    return [warning]


def _of_rollouts(data: Samples) -> list[str]:
    numbers, warnings = data.samples.numbers, []
    rewards, groups = numbers["reward"], numbers["group"]
    there = ~np.isnan(rewards)
    if data.without_logprobs:
        is_all = data.without_logprobs == len(rewards)
        which = "its" if is_all else f"{data.without_logprobs} of its {len(rewards)}"
        warnings.append(
            f"{which} rollouts have no logprobs, so they are taken for samples of the policy at "
            "the time when it trains on them"
        )
    of_group = [rewards[there & (groups == group)] for group in np.unique(groups[there])]
    lone = sum(len(each) == 1 for each in of_group)
    flat = sum(len(each) > 1 and np.ptp(each) == 0 for each in of_group)
    if lone:
        warnings.append(
            f"{lone} of {numbered(len(of_group), 'group')} {'has' if lone == 1 else 'have'} one "
            "answer, from which it learns nothing"
        )
    if flat:
        warnings.append(
            f"in {flat} of {numbered(len(of_group), 'group')} all rewards are equal, from which it "
            "learns nothing"
        )
    return warnings


def of_texts(data: Samples) -> list[str]:
    """The warnings about how records were made into text."""
    warnings = []
    if data.unread_fields:
        fields = [
            f"{name!r} ({numbered(count, 'record')})"
            for name, count in data.unread_fields.most_common()
        ]
        warnings.append(
            f"its data have fields that are not read: {', '.join(fields)}; if they matter, write "
            "them into the fields of the form, or name them by Source.columns"
        )
    if data.special_records:
        warnings.append(_special_text(data))
    if _above(data.endless, data.read, ENDLESS_CHATS):
        warnings.append(
            f"in {numbered(data.endless, 'chat')} no special token ends what the assistant says, "
            "so answers will not end; let the chat template write {{ eos_token }} behind them"
        )
    if data.joined_prompt:
        warnings.append(
            f"the tokenizer joins the end of the generation prompt {data.joined_prompt!r} with the "
            "answer behind it, so generated answers begin unlike those of the data; let the chat "
            "template end the prompt without a space, and begin the answer with it"
        )
    if (templates := len(data.rendering.chat_templates)) > 1:
        warnings.append(
            f"{templates} different chat templates render its chats; give all sources the same "
            "chat_template"
        )
    return warnings


def _special_text(data: Samples) -> str:
    number = data.special_records
    records = f"{numbered(number, 'record')} {'spells' if number == 1 else 'spell'}"
    return (
        f"the text of {records} special tokens such as {data.special_text!r}; set "
        "Source.special_tokens='escape' to keep them text"
    )


def _above(part: int, whole: int, limit: float) -> bool:
    return whole > 0 and part / whole > limit
