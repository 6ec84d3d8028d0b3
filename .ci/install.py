"""Installs packages into the environment whose Python runs this, with the arguments of `pip install`.

uv does it in a fraction of pip's time; pip does it where uv cannot be had, or fails. Both find the same packages: uv
does not read pip's configuration, so it is told what that says.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"  # has the version of uv


def main(arguments: list[str]) -> int:
    """Exit code of the installer that came last."""
    if subprocess.run([*PIP, "install", "--quiet", "uv", "--constraint", CONSTRAINTS]).returncode == 0:
        uv = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, *arguments]
        if subprocess.run(uv, env=uv_settings(pip_settings()) | os.environ).returncode == 0:
            return 0
    print("uv cannot do it here, pip takes over (minutes)", flush=True)
    return subprocess.run([*PIP, "install", *arguments]).returncode


def pip_settings() -> dict[str, str]:
    """What pip is configured with, by the name of the option: in the environment before `pip install`'s own before
    everything else's, as pip itself ranks them."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    found = {}
    for section in ("global", "install", ":env:"):
        for line in listed.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(f"{section}."):
                found[key.removeprefix(f"{section}.")] = str(ast.literal_eval(value))
    return found


def uv_settings(pip: dict[str, str]) -> dict[str, str]:
    """The environment in which uv looks where pip does."""
    lists = {"UV_INDEX": "extra-index-url", "UV_INSECURE_HOST": "trusted-host"}
    values = {"UV_DEFAULT_INDEX": "index-url", "UV_NO_INDEX": "no-index", "SSL_CERT_FILE": "cert"}
    found = {name: " ".join(pip[option].split()) for name, option in lists.items() if option in pip}
    found |= {name: pip[option] for name, option in values.items() if option in pip}
    if "find-links" in pip:
        found["UV_FIND_LINKS"] = ",".join(pip["find-links"].split())
    # The newest version that any index has, as pip chooses; uv's default is the first index that knows the name.
    return found | {"UV_INDEX_STRATEGY": "unsafe-best-match"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
