"""What all HTML pages have: style, scripts that several use, and a file with everything in it, nothing fetched.

What a page shows, traces above all, is untrusted. The template escapes it, JSON has no `<`, the scripts make text nodes
of it, and the page's policy lets no other script run than its own.
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
    """A page as text.

    Args:
        folder: where the page's own template and scripts are.
        scripts: in the order in which they stand in the page, as one module, after `BASE`.
        data: for the scripts, as JSON.
        blobs: base64 for the scripts, by the id of its element.
        texts: what the template writes itself.
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
    """JSON that can stand in a script element: without `<`, and ASCII only."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
