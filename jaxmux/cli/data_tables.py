"""Shows reports about data as tables and lines of text on a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from string import ascii_lowercase

from rich.table import Table
from rich.text import Text

from jaxmux.planner.numbers import numbered
from jaxmux.printable import escaped

from .data_report import AnswerLengths, PackingReport, ShownSample, SourceReport, TaskReport
from .plan_tables import NumberTable

# Without colours, these marks enclose text that counts in the loss.
MARKS = "⟦", "⟧"
_STYLE = "bold green"
_BAR = 40
_ROW = 64
_MOST_ROWS = 8


def task_parts(report: TaskReport, colours: bool) -> Iterator[Table | Text | str]:
    """The tables and lines that describe the data of a task, in the order of the report. Text may
    have colours if `colours` is True."""
    unit = f" {report.unit}s" * (report.unit != "sample")
    line = [f"{report.samples:,} {report.unit}s in an epoch", f"{report.held_out:,} held out"]
    line += [
        f"{report.steps:,} steps of {report.batch_size}{unit} are {report.epochs:.2f} epochs",
        f"longest {report.longest:,} of at most {report.max_length:,} tokens",
    ]
    yield f"task {report.name}: {', '.join(line)}"
    # The model does not read the last token of a sample.
    if report.longest - 1 > report.context:
        yield f"the backbone was made for {report.context:,} tokens (max_position_embeddings)"
    of_pairs = report.unit == "pair"
    # Of a pair, each answer may be cut.
    yield _sources(report.sources, members=1 + of_pairs)
    for source in report.sources:
        yield from _warnings(source)
    if report.template_date:
        yield (
            f"its chat template writes the date, here {report.template_date}; training takes that "
            "of the run's beginning, and keeps it"
        )
    yield from report.warnings
    if report.answers:
        yield _answers(report.answers)
    if of_pairs:
        yield f"the chosen answer is the longer one in {report.longer_chosen:.0%} of the pairs\n"
    yield "tokens of a prompt with an answer" if report.answers else "tokens of a sample"
    yield from _bars(report.histogram)
    if report.shown:
        begin, end = MARKS
        how = "green" if colours else f"between {begin} and {end}"
        yield f"\nthe first {report.unit}s; tokens that carry loss are {how}"
    for sample in report.shown:
        yield from _sample(sample, report.unit, colours)
    yield ""


def packing_parts(report: PackingReport) -> Iterator[str]:
    """The lines that describe the rows of the first microbatch."""
    shape = report.shape
    yield (
        f"first round: {numbered(report.rows_used, 'row')} of {shape.row_len:,} places in "
        f"{_microbatches(report.microbatches)}, in chunks of {shape.chunk_len}; "
        f"{report.padding:.0%} padding"
    )
    yield (
        "a sample of n tokens takes n - 1 places: the last one is only predicted; virtual tokens "
        "of a trained prompt take one each; a pair is two samples, the prompt with each answer"
    )
    names = dict.fromkeys(name for row in report.rows for name, *_ in row)
    letters = {name: ascii_lowercase[i % len(ascii_lowercase)] for i, name in enumerate(names)}
    for number, row in enumerate(report.rows[:_MOST_ROWS]):
        used = sum(tokens for *_, tokens in row)
        counts = [(name, [tokens for task, _, tokens in row if task == name]) for name in names]
        held = ", ".join(
            f"{letters[name]} {name}: {numbered(len(tokens), 'sample')} in {sum(tokens):,} places"
            for name, tokens in counts
            if tokens
        )
        yield f"row {number:<3} {_drawn(row, letters, shape.row_len)}"
        yield f"        {held}; {1 - used / shape.row_len:.0%} padding"
    if len(report.rows) > _MOST_ROWS:
        yield f"and {numbered(len(report.rows) - _MOST_ROWS, 'row')} more"
    yield (
        "`jaxmux plan` shows the rows and chunks that are predicted to be fastest; these are the "
        "shortest, unless the config sets row_len and chunk_len"
    )


def _microbatches(count: int) -> str:
    return "1 microbatch" if count == 1 else f"{count} microbatches"


def _drawn(row: Sequence[tuple[str, int, int]], letters: dict[str, str], row_len: int) -> str:
    """A row as a line. A sample is a series of its task's letter, alternately in lower and upper
    case; a dot is padding."""
    width = min(_ROW, row_len)
    line = ["."] * width
    for number, (name, offset, tokens) in enumerate(row):
        letter = letters[name].upper() if number % 2 else letters[name]
        first = offset * width // row_len
        last = (offset + tokens - 1) * width // row_len
        line[first : last + 1] = letter * (last + 1 - first)
    return "".join(line)


def _sources(sources: Sequence[SourceReport], members: int) -> Table:
    table = NumberTable("source", "records", "epoch", "share", "tokens", "loss", "cut", "left out")
    for source in sources:
        left_out = source.dropped + source.bad_records
        table.add_row(
            source.path,
            f"{source.records:,}",
            f"{source.epoch_samples:,}",
            f"{source.share:.1%}",
            f"{source.epoch_tokens:,}",
            f"{source.target_share:.1%}",
            f"{source.truncated / (members * source.records):.1%}",
            f"{left_out / source.records:.1%}",
        )
    return table


def _answers(answers: Mapping[str, AnswerLengths]) -> Table:
    table = NumberTable("tokens that carry loss", "number", "shortest", "mean", "median", "longest")
    for name, lengths in answers.items():
        table.add_row(
            f"{name} answer",
            f"{lengths.count:,}",
            f"{lengths.shortest:,}",
            f"{lengths.mean:,.1f}",
            f"{lengths.median:,.4g}",
            f"{lengths.longest:,}",
        )
    return table


def _warnings(source: SourceReport) -> Iterator[str]:
    if source.dropped:
        yield f"{source.path}: {source.dropped:,} records dropped (over-long, or no targets left)"
    if source.bad_records:
        count = f"{numbered(source.bad_records, 'bad record')} left out"
        yield f"{source.path}: {count}, the first because of {source.first_bad_record}"
    if source.equal_answers:
        pairs = numbered(source.equal_answers, "pair")
        yield f"{source.path}: {pairs} of equal answers, from which nothing is learned"
    if source.cut_targets:
        yield f"{source.path}: {source.cut_targets:.1%} of the tokens that carry loss are cut off"
    if source.unknown_targets:
        share = f"{source.unknown_targets:.1%} of the tokens that carry loss"
        yield f"{source.path}: {share} are unknown to the tokenizer"


def _bars(histogram: Sequence[tuple[int, int, int]]) -> Iterator[str]:
    most = max(count for *_, count in histogram)
    for low, high, count in histogram:
        bar = "█" * -(-count * _BAR // most)
        yield f"{low:>9,} – {high:<9,} {bar:<{_BAR}} {count:,}"


def _sample(sample: ShownSample, unit: str, colours: bool) -> Iterator[Text]:
    targets = sum(sample.targets)
    cut = ", at max_length" * sample.at_max_length
    counts = f"{len(sample.tokens):,} tokens, {targets:,} carry loss{cut}"
    name = f"{unit} {sample.number}" + f", {sample.answer}" * bool(sample.answer)
    yield Text(f"── {sample.source}, {name}: {counts}")
    text = Text()
    for part, is_target in sample.parts:
        part = escaped(part, keep="\n\t")
        if is_target and not colours:
            text.append(part.join(MARKS))
        else:
            text.append(part, style=_STYLE if is_target else "")
    yield text
