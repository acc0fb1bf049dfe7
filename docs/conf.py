"""Sphinx settings of the documentation; `make docs` builds it."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project = "jaxmux"
copyright = "the jaxmux authors, Apache-2.0"
release = version = version_of("jaxmux")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docs.extension.site",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["extension", "figures"]
nitpicky = True
# The reference has no links to other projects, because the build works without network.
nitpick_ignore_regex = [(r"py:.*", r".*")]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
highlight_language = "text"

# Docstrings write names in single backticks, which become links where the reference has the name.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
# The fields of a dataclass are the parameters of its constructor.
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
add_module_names = False

html_theme = "furo"
html_title = "jaxmux"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["extension/static"]
html_css_files = ["jaxmux.css"]
# No font, script or picture comes from another host.
html_theme_options = {
    "light_css_variables": {
        "font-stack": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
        "font-stack--monospace": "ui-monospace, 'SF Mono', Menlo, Consolas, monospace",
    },
}
