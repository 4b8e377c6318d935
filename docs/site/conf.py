"""Configures Sphinx for `make site`; pages.py writes the pages."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSION = ".".join(re.findall(r"#define GRADCODEC_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", (ROOT / "include/gradcodec.h").read_text()))

project = "GradCodec"
release = version = VERSION
copyright = "the authors of GradCodec"
extensions = ["myst_parser"]
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
suppress_warnings = ["myst.header"]  # pages of the repository may skip a level

# Comments of the header contain C, so quotes stay unchanged. A link to a type that does not exist is an error.
smartquotes = False
nitpicky = True
OTHERS = "DLManagedTensor DLManagedTensorVersioned DLTensor DLDevice DLDataType int32_t int64_t uint8_t uint32_t uint64_t size_t"
# Types of Python and of frameworks have no page on this site.
nitpick_ignore_regex = [("py:.*", ".*")]
nitpick_ignore = [("c:identifier", name) for name in OTHERS.split()]
c_maximum_signature_line_length = python_maximum_signature_line_length = 72
highlight_language = "none"

html_theme = "furo"
html_title = f"GradCodec {VERSION}"
html_static_path = [str(ROOT / "docs/site/static")]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
# Browsers refuse to fetch summaries from files. Without summaries the search also works from a folder.
html_show_search_summary = False
