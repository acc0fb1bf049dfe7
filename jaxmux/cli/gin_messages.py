"""Translates gin's errors for users who do not know gin."""

import re
import shlex
from collections.abc import Iterable, Mapping

from jaxmux.errors import InputError
from jaxmux.field_checks import why_left_out
from jaxmux.similar_names import did_you_mean

# For each class that configs may set, by name, its fields.
Fields = Mapping[str, Iterable[str]]


class ConfigError(InputError):
    """A gin config cannot be used. The message names the file, the line or the parameter."""


def config_error(error: Exception, fields: Fields) -> ConfigError:
    """A ConfigError for gin's error: one line that begins with the place of the config at fault.
    `fields` has the fields that configs may set."""
    message, *call = str(error).split("\n  In call to configurable", maxsplit=1)
    message, _, place = message.partition("\n  In ")
    where = _where(place)
    if unknown := re.match(r"No configurable matching (?:reference )?'(@?.*?)'", message):
        name = re.split(r"[/.@]", unknown[1].removesuffix("()"))[-1]
        hint = _hint(name, fields, "there are")
        return ConfigError(f"{where}there is no {unknown[1]!r}; {hint}")
    if unknown := re.match(r"Configurable '(\S+)' doesn't have a parameter named '(\w+)'", message):
        name, field = unknown.groups()
        if name not in fields:  # gin has some names of its own, such as "singleton"
            hint = _hint(name, fields, "there are")
            return ConfigError(f"{where}there is no {name!r}; {hint}")
        hint = _hint(field, fields[name], "its fields are")
        return ConfigError(f"{where}{name} has no field {field!r}; {hint}")
    if macro := re.match(r"No bindings specified for '(.*)/gin.macro'", message):
        name = macro[1]
        return ConfigError(f"%{name} is used, but not set; add a line {name} = VALUE")
    if required := re.match(r"(\S+) set to `%gin.REQUIRED`", message):
        if required[1].endswith("/macro.value"):
            name = required[1].removesuffix("/macro.value")
            return ConfigError(f"{name} is not set; a text is given by '--gin.{name}=\"TEXT\"'")
        return ConfigError(f"not set: {required[1]}")
    if missing := re.match(r"(?:\w+\.)*?(\w+)\.__init__\(\) missing .*?: (.*)", message):
        where = f"{missing[1]}: "
        message = "not set: " + ", ".join(re.findall(r"'(\w+)'", missing[2]))
    if call and (found := re.match(r" '(\w+)' .*? in scope '([^']*)'", call[0])):
        where = f"{found[2]}/{found[1]}: "
    return ConfigError(where + message.strip())


def _where(place: str) -> str:
    """The file and line, or the argument, at which gin found an error; empty if gin does not
    say."""
    if found := re.match(r'file "(.*)", line (\d+)', place):
        return f"{found[1]}:{found[2]}: "
    if found := re.match(r"bindings string line \d+\n\s*(.*)", place):
        return f"--gin.{found[1].strip()}: "
    return ""


def _hint(name: str, known: Iterable[str], otherwise: str) -> str:
    hint = why_left_out(name) or did_you_mean(name, known)
    return hint or f"{otherwise} {', '.join(known)}"


def parameter_like(name: str, value: str, fields: Fields) -> str:
    """An argument that sets a parameter, as a hint for an argument without an owner, such as
    `--gin.steps=3`. `value` is as the user wrote it; `fields` has the fields that configs may
    set."""
    owners = [owner for owner, own in fields.items() if name in own]
    setting = f"{owners[0]}.{name}={value}" if owners else "Task.steps=100"
    return shlex.quote(f"--gin.{setting}")


def with_quotes(error: SyntaxError, argument: bool) -> str:
    """The line at which gin found a syntax error, with the quotes that its value lacks; empty if
    the value does not look like a string without quotes. With `argument`, the line is a binding,
    and is returned as an argument for a shell."""
    word = re.search(r"Failed to parse token '(\w+)'", error.msg)
    name, _, value = (error.text or "").partition(" #")[0].partition("=")
    value = value.strip()
    if value.capitalize() in ("True", "False", "None"):
        return ""
    if not re.match(r"[A-Za-z_/.~]", value):
        return repr(word[1]) if word else ""
    if argument:
        return shlex.quote(f'--gin.{name}="{value}"')
    return f'{name.strip()} = "{value}"'


def syntax_message(message: str) -> str:
    """gin's message about a line that it cannot read, replaced by a clearer one if there is one."""
    return _SYNTAX.get(message.rstrip("."), message.rstrip("."))


_SYNTAX = {
    "Unable to parse value": "there is no value behind '='",
    "Couldn't parse statement, expected ':' or '='": "expected NAME.FIELD = VALUE",
    "Malformatted scope or selector": "expected NAME.FIELD = VALUE, or NAME/CLASS.FIELD = VALUE",
    "Unexpected token": "expected NAME.FIELD = VALUE",
    "Expected newline": "there is more behind the value",
    "Expected ')'": "expected ')': parentheses behind a name stay empty, and fields are set on "
    "lines of their own, such as NAME/LoRA.rank = 8",
}
