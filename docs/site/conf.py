"""Sphinx' settings for `make site`; the pages are put together by pages.py."""

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

# What the header says is C: quotes stay as they are, and a type that is linked to must be there.
smartquotes = False
nitpicky = True
OTHERS = "DLManagedTensor DLManagedTensorVersioned DLTensor DLDevice DLDataType int32_t int64_t uint8_t uint32_t uint64_t size_t"
# Annotations name types of Python and of frameworks, which have no page here.
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
# Summaries are fetched, which browsers refuse for files: without them the search works from a folder, too.
html_show_search_summary = False
