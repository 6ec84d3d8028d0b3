"""A local stand-in for the Hugging Face hub: the part of its HTTP interface that an upload uses.

Its answers agree with the hub's in everything that huggingface_hub reads, and it records all requests. Its limits: it
checks cards by a few of the hub's documented rules, and accepts large files only by LFS's basic transfer
(HF_HUB_DISABLE_XET=1), not by Xet.
"""

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN, READ_TOKEN = "hf_a_token_that_may_write", "hf_a_token_that_may_read"
_CARD = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class FakeHub:
    """Uploaded repositories, with their visibility and files, and the requests in order."""

    def __init__(self) -> None:
        self.visibility: dict[str, str] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.blobs: dict[str, bytes] = {}
        self.url = ""


def find_card_problems(text: str) -> list[str]:
    """Problems for which the hub would refuse a model card's metadata, as far as its rules are documented and
    `ModelCardData` does not know them."""
    header = _CARD.match(text)
    metadata = yaml.safe_load(header[1]) if header else None
    if not isinstance(metadata, dict):
        return ["no metadata"]
    base = metadata.get("base_model", [])
    problems = [
        f'"base_model" with value "{name}" is not valid. Use a model id from https://hf.co/models.'
        for name in ([base] if isinstance(base, str) else base)
        if not _HUB_ID.fullmatch(name)
    ]
    if metadata.get("base_model_relation") not in (None, "adapter", "merge", "quantized", "finetune"):
        problems.append('"base_model_relation" is not valid')
    if metadata.get("license") == "other" and "license_name" not in metadata:
        problems.append('"license_name" is required where "license" is "other"')
    return problems


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve a hub without repositories on a free port until the block ends."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, body: Any = None) -> None:
            content = json.dumps(body if body is not None else {}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def owner(self) -> str | None:
            return {TOKEN: "me", READ_TOKEN: "reader"}.get((self.headers.get("Authorization") or "")[len("Bearer ") :])

        def do_GET(self) -> None:
            hub.requests.append(f"GET {self.path}")
            if self.path == "/api/whoami-v2":
                name = self.owner()
                self.answer(200 if name else 401, {"name": name, "type": "user", "orgs": []})
            elif self.path.startswith("/api/models/"):
                repository = "/".join(self.path.partition("?")[0].split("/")[3:5])
                if repository in hub.files:
                    self.answer(200, {"id": repository, "private": True, "sha": "0" * 40, "siblings": []})
                else:
                    self.do_HEAD()
            else:
                self.answer(404)

        def do_HEAD(self) -> None:  # asks for a file of another repository, which does not exist
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_PUT(self) -> None:
            hub.requests.append(f"PUT {self.path}")
            hub.blobs[self.path.rpartition("/")[2]] = self.body()
            self.answer(200)

        def do_POST(self) -> None:
            hub.requests.append(f"POST {self.path}")
            content, path = self.body(), self.path.partition("?")[0]
            if self.owner() != "me":
                self.answer(403 if self.owner() else 401, {"error": "no write access"})
            elif path == "/api/repos/create":
                wanted = json.loads(content)
                repository = f"{wanted['organization']}/{wanted['name']}"
                if repository in hub.files:
                    self.answer(409, {"error": "You already created this model repo", "url": f"{hub.url}/{repository}"})
                    return
                hub.files[repository] = {}
                hub.visibility[repository] = wanted.get("visibility", "the owner's default")
                self.answer(200, {"url": f"{hub.url}/{repository}"})
            elif path == "/api/validate-yaml":
                errors = [{"message": problem} for problem in find_card_problems(json.loads(content)["content"])]
                self.answer(400 if errors else 200, {"errors": errors, "warnings": []})
            elif "/preupload/" in path:
                is_large = re.compile(r".*\.safetensors|tokenizer\.json")
                files = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if is_large.fullmatch(file["path"]) else "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(content)["files"]
                ]
                self.answer(200, {"files": files})
            elif path.endswith(".git/info/lfs/objects/batch"):
                objects = [
                    {**one, "actions": {"upload": {"href": f"{hub.url}/blob/{one['oid']}", "header": {}}}}
                    for one in json.loads(content)["objects"]
                ]
                self.answer(200, {"objects": objects, "transfer": "basic"})
            elif "/commit/" in path:
                self.commit("/".join(path.split("/")[3:5]), content)
            else:
                self.answer(404)

        def commit(self, repository: str, content: bytes) -> None:
            for line in content.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    hub.files[repository][value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    hub.files[repository][value["path"]] = hub.blobs[value["oid"]]
            self.answer(200, {"commitUrl": f"{hub.url}/{repository}/commit/{'0' * 40}", "commitOid": "0" * 40})

    return Handler
