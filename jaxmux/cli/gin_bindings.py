"""gin at the entry point: the names that configs may set, and configs that can run no code.

Library code knows nothing of gin. Only what is listed here can be configured, and a config that
imports a module is refused: importing runs whatever the module holds.
"""

import inspect
import re
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gin
from gin import config_parser

from jaxmux.data import Source
from jaxmux.optimizers import SGD, AdamW, Lion, Schedule
from jaxmux.peft import LoRA
from jaxmux.runs import fine_tune
from jaxmux.tasks import Task

_CONFIGURABLE = (fine_tune, Task, Source, LoRA, AdamW, SGD, Lion, Schedule)

# Parameters of `fine_tune` that the command line sets.
_OF_THE_COMMAND = ("run_dir", "restart", "config_text", "console")


class ConfigError(ValueError):
    """A gin config cannot be used; the message names the file, the line or the parameter."""


def parse(files: Sequence[str], bindings: Sequence[str]) -> None:
    """Reads config files, then single bindings (`Task.max_length=512`), into gin's global state.

    Raises:
      ConfigError: a file is missing or malformed, sets an unknown name, or imports a module.
    """
    gin.clear_config()
    _register()
    for file in files:
        _refuse_imports(Path(file), within=())
    for binding in bindings:
        for included in _refuse_import_statements(binding, f"--gin.{binding}"):
            _refuse_imports(Path(included), within=())
    try:
        gin.parse_config_files_and_bindings(list(files), list(bindings), finalize_config=True)
    except (OSError, SyntaxError, TypeError, ValueError) as e:
        raise ConfigError(_without_postscript(e)) from None


def fine_tune_arguments() -> dict[str, Any]:
    """What the config says about `fine_tune`, with its tasks and their parts built.

    Raises:
      ConfigError: a parameter without a default is not given, or a value is refused.
    """
    try:
        arguments = gin.get_bindings("fine_tune")
    except (RuntimeError, TypeError, ValueError) as e:
        raise ConfigError(_without_postscript(e)) from None
    if missing := {"backbone", "tasks"} - arguments.keys():
        raise ConfigError(f"the config does not set fine_tune.{min(missing)}")
    tasks = arguments["tasks"]
    if not isinstance(tasks, list | tuple) or not all(isinstance(t, Task) for t in tasks):
        raise ConfigError(f"fine_tune.tasks should be a list of @NAME/Task(), found {tasks!r}")
    if not tasks:
        raise ConfigError("fine_tune.tasks is empty")
    _refuse_unknown_scopes()
    return arguments


def resolved_config() -> str:
    """A config that sets the same, with the defaults of everything that was built."""
    defaults = inspect.signature(fine_tune).parameters
    given = gin.get_bindings("fine_tune", resolve_references=False)
    lines = [
        f"fine_tune.{name} = {given.get(name, parameter.default)!r}"
        for name, parameter in defaults.items()
        if name not in _OF_THE_COMMAND
    ]
    return "\n".join(lines) + "\n\n" + gin.operative_config_str(max_line_length=100)


def _refuse_unknown_scopes() -> None:
    """A binding in a scope in which nothing was built is a typo: `moood/LoRA.rank`."""
    built = {scope for scope, _ in gin.config._OPERATIVE_CONFIG}
    for (scope, selector), parameters in gin.config._CONFIG.items():
        if selector == "gin.macro":  # A macro's name stands where others have a scope.
            continue
        if scope and not any(f"/{scope}/" in f"/{own}/" for own in built):
            name = f"{scope}/{selector.split('.')[-1]}"
            raise ConfigError(
                f"{name} ({', '.join(parameters)}): nothing in the config uses the scope "
                f"{scope!r}; it uses {', '.join(sorted(filter(None, built)))}"
            )


def _register() -> None:
    for configurable in _CONFIGURABLE:
        name = configurable.__name__
        if f"jaxmux.{name}" not in gin.config._REGISTRY:
            denied = _OF_THE_COMMAND if configurable is fine_tune else None
            gin.external_configurable(configurable, name=name, module="jaxmux", denylist=denied)


def _refuse_imports(file: Path, within: tuple[Path, ...]) -> None:
    """Looks through a file, and all it includes, before gin acts on any of it."""
    if file in within:
        raise ConfigError(f"{file}: includes itself")
    try:
        text = file.read_text()
    except OSError as e:
        raise ConfigError(f"{file}: cannot be read ({e.strerror})") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{file}: is no text ({e})") from None
    for included in _refuse_import_statements(text, str(file)):
        _refuse_imports(Path(included), (*within, file))


def _refuse_import_statements(text: str, where: str) -> list[str]:
    included = []
    try:
        for statement in config_parser.ConfigParser(text, _Ignore()):
            if isinstance(statement, config_parser.ImportStatement):
                line = statement.location.line_num
                raise ConfigError(
                    f"{where}:{line}: configs may not import modules ({statement.module}); "
                    "all of jaxmux's names are known without"
                )
            if isinstance(statement, config_parser.IncludeStatement):
                included.append(statement.filename)
    except SyntaxError as e:
        raise ConfigError(f"{where}:{e.lineno}: {e.msg}") from None
    except tokenize.TokenError as e:
        message, (line, _) = e.args
        raise ConfigError(f"{where}:{line}: {message}") from None
    return included


def _without_postscript(error: Exception) -> str:
    """gin's message, with the scope instead of the call that it adds to errors of what it calls."""
    message, *call = str(error).split("\n  In call to configurable", maxsplit=1)
    if message.startswith("No configurable matching"):
        known = ", ".join(configurable.__name__ for configurable in _CONFIGURABLE)
        message = message.replace(".\n", f"; there are {known}.\n", 1)
    if call and (found := re.match(r" '(\w+)' .*? in scope '([^']*)'", call[0])):
        return f"{found[2]}/{found[1]}: {message.strip()}"
    return message.strip()


class _Ignore(config_parser.ParserDelegate):
    """Takes references and macros for what they are: nothing is looked up yet."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> None:
        return None

    def macro(self, macro_name: str) -> None:
        return None
