"""The built site: it needs no other host, and everything can be reached."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from docs.extension.snippets import pages
from jaxmux import _NAMES

ROOT = Path(__file__).parents[2]
LOADED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=\"([^\"]+)\"|<link[^>]*\shref=\"([^\"]+)\"", re.DOTALL
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("sphinx")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", "docs", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_pages_load_nothing_from_other_hosts(site):
    texts = [page.read_text() for page in site.rglob("*.html")]
    loaded = {url for text in texts for pair in LOADED.findall(text) for url in pair}
    loaded.discard("")
    assert len(loaded) > 10
    assert [url for url in loaded if urlsplit(url).netloc] == []
    styles = [p.read_text() for p in site.rglob("*.css")]
    assert [s for s in styles if re.search(r"(?:@import|url\()[\s\"']*(?:https?:)?//", s)] == []


@pytest.mark.slow
def test_search_needs_no_server(site):
    """The index is a script, which a page from a file system may load."""
    assert (site / "searchindex.js").read_text().startswith("Search.setIndex(")
    assert 'src="searchindex.js"' in (site / "search.html").read_text()


@pytest.mark.slow
def test_public_names_are_in_the_reference(site):
    page = (site / "reference.html").read_text()
    names = [name for of_module in _NAMES.values() for name in of_module]
    assert [name for name in names if f'id="jaxmux.{name}"' not in page] == []


def test_the_reference_has_a_group_for_every_module():
    groups = re.findall(r"```\{public-names\} (.*)", (ROOT / "docs" / "reference.md").read_text())
    assert sorted(" ".join(groups).split()) == sorted(_NAMES)


def test_addresses_are_well_formed():
    text = "\n".join(page.read_text() for page in pages(ROOT))
    found = re.findall(r"\]\((\w+:[^)]*)\)", text)
    assert [a for a in found if not re.fullmatch(r"https://[\w.-]+\.\w+(/[\w./#?=&%-]*)?", a)] == []
