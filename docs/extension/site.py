"""Directives of this site: `{public-names}` and `{error-messages}`, and the language gin."""

import inspect
from collections import defaultdict
from typing import Any

from docutils import nodes
from pygments.lexers.python import PythonLexer
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import jaxmux
from docs.conf import ROOT
from docs.extension.error_messages import AREAS, Message, collect


class PublicNames(SphinxDirective):
    """The public names that modules of jaxmux define, which are its arguments."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        lines = ["````{eval-rst}", ".. currentmodule:: jaxmux", ""]
        for module in self.arguments[0].split():
            self.env.metadata.setdefault("public-names", {})[module] = self.env.docname
            for name in jaxmux._NAMES[module]:
                value = getattr(jaxmux, name)
                kind = "class" if inspect.isclass(value) else "function"
                kind = "exception" if kind == "class" and issubclass(value, BaseException) else kind
                lines += [f".. auto{kind}:: {name}", "   :members:" * (kind == "class"), ""]
        return self.parse_text_to_nodes("\n".join([*lines, "````"]))


class ErrorMessages(SphinxDirective):
    """The error messages of the source, by folder."""

    def run(self) -> list[nodes.Node]:
        by_area: dict[str, list[Message]] = defaultdict(list)
        for message in collect(ROOT):
            by_area[message.area].append(message)
        if unknown := by_area.keys() - AREAS.keys():
            raise self.error(f"AREAS has no title for the messages of {', '.join(unknown)}")
        found = []
        for area, title in AREAS.items():
            section = nodes.section(ids=[nodes.make_id(f"messages {area}")])
            section += nodes.title("", title)
            for message in sorted(by_area[area], key=lambda m: m.text.lstrip("…: ").lower()):
                section += self._entry(message)
            found.append(section)
        return found

    @staticmethod
    def _entry(message: Message) -> nodes.Node:
        source = f"{message.exception} in {message.path}, line {message.line}"
        entry = nodes.container(classes=["error-message"])
        entry += nodes.paragraph("", "", nodes.literal("", message.text))
        entry += nodes.paragraph("", source, classes=["error-source"])
        return entry


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directives."""
    app.add_directive("public-names", PublicNames)
    app.add_directive("error-messages", ErrorMessages)
    # Configs of gin look like Python to a highlighter.
    app.add_lexer("gin", PythonLexer)
    return {"parallel_read_safe": True}
