"""Finds the blocks of code in pages, with the comments that say how they are tested."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(
    r"(?:^ *<!-- snippet: (?P<mark>[^\n]*) -->\n)?"
    r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_INCLUDED = re.compile(r"^```\{include\} (\S+)\n:start-after: (.*)\n:end-before: (.*)\n", re.M)


class Snippet(NamedTuple):
    """A block of code.

    Attributes:
      page: the file, relative to the repository.
      line: the line on which the code begins.
      language: for example "sh"; empty if the block names none.
      code: the text of the block.
      mark: the text of the comment before it, or an empty one.
    """

    page: str
    line: int
    language: str
    code: str
    mark: str

    @property
    def skipped(self) -> bool:
        """True if the block is not even checked."""
        return self.mark.startswith("skip, ")

    @property
    def runs(self) -> bool:
        """True if the block is run, or written to a file that others use."""
        return not self.mark.startswith(("skip, ", "check only, "))

    @property
    def file(self) -> str | None:
        """The file to which the block is written."""
        return self.mark if self.mark and self.runs else None


def pages(root: Path) -> list[Path]:
    """README.md and the pages of the site."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def snippets(root: Path, page: Path) -> Iterator[Snippet]:
    """The blocks of a page, with those of a part of another page that it includes."""
    text = page.read_text(encoding="utf-8")
    for included in _INCLUDED.finditer(text):
        other = page.parent / included[1]
        part = other.read_text(encoding="utf-8").split(included[2])[1].split(included[3])[0]
        yield from _found(part, page.relative_to(root).as_posix())
    yield from _found(text, page.relative_to(root).as_posix())


def _found(text: str, page: str) -> Iterator[Snippet]:
    for block in _BLOCK.finditer(text):
        indent, code = block["indent"], block["code"]
        code = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
        if block["language"].startswith("{"):  # a directive of Sphinx
            continue
        line = text.count("\n", 0, block.start("code")) + 1
        yield Snippet(page, line, block["language"], code, block["mark"] or "")


def commands(code: str) -> list[str]:
    """The commands of a shell block, without comments and with continued lines joined."""
    lines = code.replace("\\\n", " ").splitlines()
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
    return [line for line in lines if line]
