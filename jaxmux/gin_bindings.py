"""gin at the entry point: the names that configs may set, and configs that can run no code.

Library code knows nothing of gin. Only what is listed here can be configured, and a config that
imports a module is
refused: importing runs whatever the module holds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gin
from gin import config_parser

from .data import Source
from .optimizers import SGD, AdamW, Lion, Schedule
from .peft import LoRA
from .runs import fine_tune
from .tasks import Task

_CONFIGURABLE = (fine_tune, Task, Source, LoRA, AdamW, SGD, Lion, Schedule)


class ConfigError(ValueError):
    """A gin config cannot be used; the message names the file, the line or the parameter."""


def parse(files: Sequence[str], bindings: Sequence[str]) -> None:
    """Reads config files, then single bindings (`Task.max_length=512`), into gin's global state.

    Raises:
      ConfigError: a file is missing or malformed, sets an unknown name, or imports a module.
    """
    _register()
    gin.clear_config()
    for file in files:
        _refuse_imports(Path(file), seen=())
    for binding in bindings:
        _refuse_import_statements(binding, f"--gin.{binding}")
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
    return arguments


def resolved_config() -> str:
    """Everything the config has set, as a config that sets the same."""
    return gin.config_str(max_line_length=100)


def _register() -> None:
    for configurable in _CONFIGURABLE:
        name = configurable.__name__
        if name not in gin.config._REGISTRY:
            gin.external_configurable(configurable, name=name, module="jaxmux")


def _refuse_imports(file: Path, seen: tuple[Path, ...]) -> None:
    """Looks through a file, and all it includes, before gin acts on any of it."""
    try:
        text = file.read_text()
    except OSError as e:
        raise ConfigError(f"{file}: cannot be read ({e.strerror})") from None
    for included in _refuse_import_statements(text, str(file)):
        path = Path(included)
        if path not in seen:
            _refuse_imports(path, (*seen, path))


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
    return included


def _without_postscript(error: Exception) -> str:
    """gin's message, less the call it adds to errors of the code that it calls."""
    return str(error).split("\n  In call to configurable")[0].strip()


class _Ignore(config_parser.ParserDelegate):
    """Takes references and macros for what they are: nothing is looked up yet."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> None:
        return None

    def macro(self, macro_name: str) -> None:
        return None
