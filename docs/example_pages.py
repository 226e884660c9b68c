"""Every file of examples/ and docker/ is a page of the site: its source, to copy; of a notebook its output, too.

MkDocs calls these functions (mkdocs.yml, hooks). The pages are in no navigation: links of the repository lead to them.
"""

import json
import re
from pathlib import Path

from mkdocs.structure.files import File

LANGUAGES = {".py": "python", ".sbatch": "bash", ".sh": "bash", ".yaml": "yaml", ".json": "json", "": "dockerfile"}


def on_files(files, config):
    """Add the pages."""
    root = Path(config.docs_dir).parent
    for path in sorted([*root.glob("examples/**/*"), *root.glob("docker/*")]):
        if path.suffix in (*LANGUAGES, ".ipynb") and path.is_file():
            page = _notebook(path) if path.suffix == ".ipynb" else _block(LANGUAGES[path.suffix], path.read_text())
            name = path.relative_to(root).as_posix()
            head = "" if path.suffix == ".ipynb" else f"# {name}\n\n"
            files.append(File.generated(config, f"{name}.md", content=head + page))
    return files


def on_page_markdown(markdown, page, **_):
    """Let links to these files lead to their pages."""
    folder = "" if page.file.src_uri.startswith("examples/") else "(?:examples|docker)/"
    suffixes = "|".join(re.escape(each) for each in (*LANGUAGES, ".ipynb") if each)
    return re.sub(rf"\]\(((?:\.\./)?{folder}[\w/-]+(?:{suffixes})|[./]*docker/Dockerfile)\)", r"](\1.md)", markdown)


def _block(language, text):
    return f"````{language}\n{text.rstrip()}\n````\n"


def _notebook(path):
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts += [text] if cell["cell_type"] == "markdown" else [_block("python", text)]
        for output in cell.get("outputs", []):
            if "text" in output:
                parts.append(_block("text", "".join(output["text"])))
            elif picture := output["data"].get("image/png"):
                parts.append(f"![](data:image/png;base64,{''.join(picture.split())})")
    return "\n\n".join(parts) + "\n"
