"""gin at the entry point: the names that configs may set, and configs that can run no code.

Library code does not know gin. Only the classes listed here can be configured. A config that
imports a module is refused, because importing runs the module's code.
"""

import contextlib
import dataclasses
import re
import tokenize
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import gin
from gin import config_parser
from pydantic import SkipValidation

from jaxmux.data import Source
from jaxmux.distributions import DISTRIBUTIONS
from jaxmux.field_checks import checked_dataclass
from jaxmux.objectives import OBJECTIVES
from jaxmux.optimizers import OPTIMIZERS, Schedule
from jaxmux.peft import SPECIFICATIONS
from jaxmux.runs import RunOptions
from jaxmux.server.server import ServerOptions
from jaxmux.similar_names import did_you_mean
from jaxmux.specifications.limits import TenantLimits
from jaxmux.sweeps import Sweep
from jaxmux.tasks import Task

from .gin_messages import ConfigError, config_error, parameter_like, syntax_message, with_quotes


@checked_dataclass(kw_only=True)
class RunConfig(RunOptions):
    """The part of a config about a training run. Configs call it `fine_tune`.

    Attributes:
      backbone: Hugging Face checkpoint folder with config.json, safetensors and a tokenizer.
      tasks: the tasks to train; a `Sweep` stands for the tasks of all its configurations.
    """

    backbone: SkipValidation[str]
    tasks: SkipValidation[Sequence[Task | Sweep]]


@checked_dataclass(kw_only=True)
class ServeConfig(ServerOptions):
    """The part of a config about a server. Configs call it `serve`.

    Attributes:
      backbone: Hugging Face checkpoint folder with config.json, safetensors and a tokenizer.
    """

    backbone: SkipValidation[str]


# The classes that configs may set, by the name that configs use.
_CONFIGURABLE = {"fine_tune": RunConfig, "serve": ServeConfig} | {
    part.__name__: part
    for part in (
        Task,
        Sweep,
        *DISTRIBUTIONS,
        Source,
        *SPECIFICATIONS.values(),
        *OPTIMIZERS.values(),
        *OBJECTIVES.values(),
        Schedule,
        TenantLimits,
    )
}


# For each binding, the scopes to which it refers: "billing" for @billing/LoRA(). `_REPLACED` has
# the scopes of bindings that later bindings replaced. Like gin's own state, both are global.
_REFERENCES: dict[tuple[str, str, str], set[str]] = {}
_REPLACED: set[str] = set()
_FIELDS = {
    name: [field.name for field in dataclasses.fields(part)] for name, part in _CONFIGURABLE.items()
}


def parse(files: Sequence[str], bindings: Sequence[str]) -> None:
    """Reads config files, then single bindings (`Task.max_length=512`), into gin's global state.
    Raises ConfigError if a file is missing or malformed, sets an unknown name, or imports a
    module."""
    gin.clear_config()
    _REFERENCES.clear()
    _REPLACED.clear()
    for name, configurable in _CONFIGURABLE.items():
        if f"jaxmux.{name}" not in gin.config._REGISTRY:
            gin.external_configurable(configurable, name=name, module="jaxmux")
    noted = _Noted()
    checked: list[_Text] = []
    for file in files:
        checked += _look_through_file(Path(file), noted, within=())
    for binding in bindings:
        checked += _look_through(_Text(binding), f"--gin.{binding}", noted, within=())
    for binding in bindings:
        name, is_set, value = binding.partition("=")
        if is_set and "." not in name and name.strip() not in noted.macros:
            raise ConfigError(
                f"--gin.{binding}: {name.strip()!r} is no parameter; the name of one says whose it "
                f"is, such as {parameter_like(name.strip(), value, _FIELDS)}"
            )
    try:
        # gin itself would keep byte order marks, and would end lines at carriage returns.
        for text in checked:
            gin.parse_config(text)
        gin.finalize()
    except (OSError, SyntaxError, TypeError, ValueError) as e:
        raise config_error(e, _FIELDS) from None


def run_config(backbone: str | None = None, tasks: Sequence[Task | Sweep] = ()) -> RunConfig:
    """The training run of the config, with its tasks and their parts built.

    Args:
      backbone: replaces the config's backbone; None keeps it.
      tasks: used if the config sets no tasks; if empty, the config has to set them.

    Raises:
      ConfigError: a parameter without a default is not given, or a value is refused.
      PlanningError: an option is outside its range.
    """
    arguments = ({"tasks": tasks} if tasks else {}) | _bindings("fine_tune")
    if backbone is not None:
        arguments["backbone"] = backbone
    if missing := {"backbone", "tasks"} - arguments.keys():
        hint = "; it is one for --watch=DIR" if _bindings("serve") else ""
        raise ConfigError(f"the config does not set fine_tune.{min(missing)}{hint}")
    tasks = arguments["tasks"]
    if not isinstance(tasks, list | tuple) or not all(isinstance(t, Task | Sweep) for t in tasks):
        raise ConfigError(
            f"fine_tune.tasks should be a list of @NAME/Task() or @NAME/Sweep(), found {tasks!r}"
        )
    if not tasks:
        raise ConfigError("fine_tune.tasks is empty")
    _refuse_unknown_scopes()
    return RunConfig(**arguments)


def serve_config() -> tuple[ServeConfig, TenantLimits]:
    """The server of the config, and the limits of its tenants. Raises ConfigError if the backbone
    is not given, a value is refused, or the config has tasks, and PlanningError if an option is
    outside its range."""
    arguments = _bindings("serve")
    if "backbone" not in arguments:
        raise ConfigError("the config does not set serve.backbone, which --watch needs")
    for name in _CONFIGURABLE:
        if name not in ("serve", "TenantLimits") and _bindings(name):
            raise ConfigError(
                f"the config sets parameters of {name}, but with --watch tasks come from the "
                "directory"
            )
    _refuse_unknown_scopes()
    try:
        limits = TenantLimits(**_bindings("TenantLimits"))
    except ValueError as e:
        raise ConfigError(f"TenantLimits: {e}") from None
    return ServeConfig(**arguments), limits


def resolved_config() -> str:
    """A config of a training run with the same settings, and the defaults of everything that was
    built."""
    own = [field for field in dataclasses.fields(RunConfig) if field.name in ("backbone", "tasks")]
    lines = _resolved("fine_tune", (*own, *dataclasses.fields(RunOptions)))
    return "\n".join(lines) + "\n\n" + gin.operative_config_str(max_line_length=100)


def resolved_serve_config() -> str:
    """A config of a server with the same settings, and all defaults."""
    own = [field for field in dataclasses.fields(ServeConfig) if field.name == "backbone"]
    lines = _resolved("serve", (*own, *dataclasses.fields(ServerOptions)))
    lines += ["", *_resolved("TenantLimits", dataclasses.fields(TenantLimits))]
    return "\n".join(lines) + "\n"


def _bindings(name: str) -> dict[str, Any]:
    """The parameters that the config sets, with the objects to which they refer. Raises ConfigError
    if these objects cannot be built."""
    try:
        return gin.get_bindings(name)
    except RecursionError:
        raise ConfigError(f"the config refers to itself, for example by @{name}()") from None
    except (RuntimeError, TypeError, ValueError) as e:
        raise config_error(e, _FIELDS) from None


def _resolved(name: str, fields: Sequence[dataclasses.Field]) -> list[str]:
    given = gin.get_bindings(name, resolve_references=False)
    return [f"{name}.{own.name} = {given.get(own.name, own.default)!r}" for own in fields]


def _refuse_unknown_scopes() -> None:
    """Raises ConfigError for a binding in a scope in which nothing was built: it is a typo such as
    `moood/LoRA.rank`, unless a later binding has replaced the reference to the scope."""
    built = {scope for scope, _ in gin.config._OPERATIVE_CONFIG}
    replaced, found = set(), set(_REPLACED)
    while found - replaced:
        replaced |= found
        found = {s for (own, *_), scopes in _REFERENCES.items() if own in replaced for s in scopes}
    for (scope, selector), parameters in gin.config._CONFIG.items():
        if selector == "gin.macro":  # A macro's name stands where others have a scope.
            continue
        if scope and not any(f"/{scope}/" in f"/{own}/" for own in built | replaced):
            name = selector.split(".")[-1]
            known = sorted(filter(None, built))
            hint = did_you_mean(scope, known) or f"the names are {', '.join(known)}"
            raise ConfigError(
                f"{scope}/{name}.{min(parameters)}: nothing in the config has the name {scope!r}, "
                f"as in @{scope}/{name}(); {hint}"
            )


class _Text(StringIO):
    """Text of a config, whose lines end only in LF or CRLF. `name` is its file, for gin's error
    messages; None for an argument."""

    def __init__(self, text: str, name: str | None = None):
        super().__init__(text, newline="\n")
        self.text, self.name = text, name

    def part(self, begin: int, end: int | None) -> "_Text":
        """The lines from `begin` to before `end`, counted from 1, with the same line numbers. `end`
        None means all lines from `begin` on."""
        lines = self.text.split("\n")
        return _Text("\n" * (begin - 1) + "\n".join(lines[begin - 1 : end and end - 1]), self.name)


def _look_through_file(file: Path, noted: "_Noted", within: tuple[Path, ...]) -> list[_Text]:
    """Checks a file, and all files that it includes, before gin acts on any of them. Returns the
    texts that gin must read, in order; includes divide the text of a file."""
    if file in within:
        raise ConfigError(f"{file}: includes itself")
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as e:
        raise ConfigError(f"{file}: cannot be read ({e.strerror})") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{file}: is no text ({e})") from None
    text = _without_returns(text, file)
    return _look_through(_Text(text, str(file)), str(file), noted, (*within, file))


def _without_returns(text: str, file: Path) -> str:
    """A text in which carriage returns that end no line are replaced. They may occur in comments,
    but Python, which reads values, would end a line at them."""
    blank = re.sub(r"\r(?!\n)", " ", text)
    if blank == text:
        return text
    comments = {}
    # Text that is not Python is refused with a better message when gin reads it.
    with contextlib.suppress(SyntaxError, tokenize.TokenError):
        for token in tokenize.generate_tokens(_Text(blank).readline):
            if token.type == tokenize.COMMENT:
                line, comments[line] = token.start
    for number, line in enumerate(text.split("\n"), 1):
        if "\r" in line.rstrip("\r")[: comments.get(number)]:
            raise ConfigError(
                f"{file}:{number}: a carriage return (\\r) stands within the line; lines end in "
                "\\n or \\r\\n"
            )
    return blank


def _look_through(
    text: _Text, where: str, noted: "_Noted", within: tuple[Path, ...]
) -> list[_Text]:
    """Notes the references in a text, and refuses statements on which gin must not act. Returns the
    texts that gin must read, in order."""
    checked, begin = [], 1
    try:
        parser = config_parser.ConfigParser(text, noted)
        for statement in parser:
            line = statement.location.line_num
            if isinstance(statement, config_parser.BindingStatement):
                binding = statement.scope, statement.selector, statement.arg_name
                _REPLACED.update(_REFERENCES.get(binding, ()))
                _REFERENCES[binding] = noted.take()
                if noted.classes:
                    name = noted.classes.pop()
                    place = f"{where}:{line}" if within else where
                    raise ConfigError(f"{place}: @{name} needs parentheses: @{name}()")
            if isinstance(statement, config_parser.ImportStatement):
                raise ConfigError(
                    f"{where}:{line}: configs may not import modules ({statement.module}); "
                    "all of jaxmux's names are known without"
                )
            if isinstance(statement, config_parser.IncludeStatement):
                checked.append(text.part(begin, line))
                begin = parser.current_token.start[0]
                checked += _look_through_file(Path(statement.filename), noted, within)
    except SyntaxError as e:
        place = f"{where}:{e.lineno}" if within else where
        hint = with_quotes(e, argument=not within)
        message = f"a string needs quotes: {hint}" if hint else syntax_message(e.msg)
        raise ConfigError(f"{place}: {message}") from None
    except tokenize.TokenError as e:
        message, (line, _) = e.args
        raise ConfigError(f"{where}:{line}: {message}") from None
    return [*checked, text.part(begin, None)]


class _Noted(config_parser.ParserDelegate):
    """Notes references and macros without looking anything up.

    Attributes:
      macros: names of the macros that are used.
      classes: references without parentheses, which mean a class and not an object.
    """

    def __init__(self) -> None:
        self._scopes: set[str] = set()
        self.macros: set[str] = set()
        self.classes: list[str] = []

    def take(self) -> set[str]:
        scopes, self._scopes = self._scopes, set()
        return scopes

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> None:
        self._scopes.add(scoped_configurable_name.rpartition("/")[0])
        if not evaluate:
            self.classes.append(scoped_configurable_name)

    def macro(self, macro_name: str) -> None:
        self.macros.add(macro_name)
