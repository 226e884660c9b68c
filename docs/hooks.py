"""README, CONTRIBUTING, CHANGELOG and the README of examples/ are pages of the site: no text stands twice.

MkDocs calls these functions (mkdocs.yml, hooks). Links in docs/ are those of the repository, so that they work there.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

SHOWN = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples/README.md",
}
REFERENCE = re.compile(r"^- `(ringreduce\.[\w.]+)[^`]*`: .*$", re.MULTILINE)  # as in reference.py
OPTIONS = {
    "ringreduce.torch.distributed.RingProcessGroup": "{ members: false }",
    "ringreduce.collectives": "{ members: false, show_root_heading: false }",
}
"""Of mkdocstrings, for names that are not shown with all they have."""


def whole_docstring(found):
    """What mkdocstrings is to put in place of a line of reference.md."""
    options = OPTIONS.get(found[1])
    return f"::: {found[1]}" + (f"\n    options: {options}" if options else "") + "\n"


def on_files(files, config):
    """Add the pages and pictures that are not in docs/."""
    root = Path(config.docs_dir).parent
    there = {root / source: name for source, name in SHOWN.items()}
    there |= {path: str(path.relative_to(root)) for path in root.glob("bench/*.png")}
    for path, name in there.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, **_):
    """Turn links of the repository into those of the site.

    A page with a wide drawing gets the room of the table of contents, one with a wide table the navigation's, too.
    """
    if any(
        len(line) > 96 for block in re.findall(r"```text\n(.*?)```", markdown, re.DOTALL) for line in block.splitlines()
    ):
        page.meta["hide"] = ["toc"]
    if re.search(r"^\|(-+:?\|){8}", markdown, re.MULTILINE):  # a table of so many columns
        page.meta["hide"] = ["navigation", "toc"]
    if page.file.src_uri == "reference.md":
        markdown = REFERENCE.sub(whole_docstring, markdown)
    if page.file.src_uri.startswith("examples/"):
        return markdown.replace("](../docs/", "](../")
    markdown = markdown.replace("](docs/", "](").replace("](../", "](")
    for source, name in SHOWN.items():
        markdown = markdown.replace(f"]({source})", f"]({name})")
    return markdown
