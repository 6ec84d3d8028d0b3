"""The frame of all HTML pages: shared style and scripts, and rendering into one file that fetches nothing.

The content of a page, above all traces, is untrusted. The template escapes it, its JSON contains no `<`, the scripts
insert it as text nodes, and the page's content security policy allows only the page's script.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

ASSETS = Path(__file__).parent / "assets"
STYLE, BASE = "style.css", "base.js"


def render(
    folder: Path, template: str, scripts: Sequence[str], data: Any, blobs: Mapping[str, str], **texts: Any
) -> str:
    """Render a page as HTML.

    Args:
        folder: folder of the page's template and scripts.
        scripts: file names, joined in this order after `BASE` into one module.
        data: JSON data for the scripts.
        blobs: element id -> base64 data for the scripts.
        texts: variables of the template.
    """
    sources = [ASSETS / BASE, *(folder / name for name in scripts)]
    script = "\n" + "\n".join(path.read_text(encoding="utf-8") for path in sources)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.FileSystemLoader([folder, ASSETS]),
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(
        policy=f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'",
        style=Markup((ASSETS / STYLE).read_text(encoding="utf-8")),
        script=Markup(script),
        report=Markup(as_json(data)),
        blobs={name: Markup(blob) for name, blob in blobs.items()},
        **texts,
    )


def as_json(value: Any) -> str:
    """JSON that is safe in a script element: without `<`, and ASCII only."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
