"""The documentation site: the pages of this folder, and an API page from the docstrings; `make docs`."""

import re
from typing import Any

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml

import constmem

project = "constmem"
author = "the constmem authors"
version = release = constmem.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "constmem"
exclude_patterns = ["_build"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "dollarmath"]
html_math_renderer = "mathml"  # which browsers show by themselves: MathJax would be fetched from elsewhere
html_show_copyright = False
default_role = "code"  # one backtick means code, as in Markdown
autodoc_inherit_docstrings = False  # those of PyTorch are in its own documentation
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# What classes inherit is on the page, unless it is from these, of others.
OTHERS = "Module, BaseEstimator, RegressorMixin, ClassifierMixin, _MetadataRequester, BaseException"
autodoc_default_options = {"members": True, "show-inheritance": True, "inherited-members": OTHERS}
napoleon_use_rtype = False
napoleon_attr_annotations = False  # shapes are no markup
linkcheck_anchors = False
STAR = re.compile(r"(?<![\w`*\\])\*(?=\w+[ ,)])")  # of an axis, (*b, n), which is no emphasis
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")
SECTION = re.compile(r"(Args|Attributes|Example|Returns|Raises):")


def set_formulas_apart(*given: Any) -> None:
    """Make indented paragraphs of a docstring literal blocks: they are formulas or tables."""
    lines: list[str] = given[-1]
    found: list[str] = []
    inside = False
    for i, line in enumerate(lines):
        indented = line.startswith("    ")
        if line.strip() and not indented:
            inside = bool(SECTION.fullmatch(line.strip()))
        if indented and not inside and (i == 0 or not lines[i - 1].strip()):
            last = next((text for text in reversed(found) if text.strip()), "")
            if not last.startswith("    "):
                found += ["::", ""]
        code = (indented and not inside) or line.lstrip().startswith((">>>", "..."))
        found.append(line if code else STAR.sub(r"\\*", line))
    lines[:] = found


def without_outside_links(_: Any, __: str, content: list[str]) -> None:
    """Pages link to sources beside this folder, which a code host shows and the site does not hold."""
    content[0] = OUTSIDE.sub(r"\1", content[0])


def skip(_: Any, __: str, name: str, *___: Any) -> bool | None:
    """Leave out what scikit-learn adds to every estimator."""
    return True if re.fullmatch(r"set_\w+_request", name) else None


def formula(writer: Any, node: Any) -> None:
    """Write a formula within a line as MathML."""
    writer.body.append(tex2mathml(node.astext()))
    raise SkipNode


def formula_apart(writer: Any, node: Any) -> None:
    """Write a formula on a line of its own as MathML."""
    writer.body.append(f"<div>{tex2mathml(node.astext(), as_block=True)}</div>")
    raise SkipNode


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (formula, None), (formula_apart, None))
    app.connect("source-read", without_outside_links)
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", set_formulas_apart, priority=100)  # before napoleon
