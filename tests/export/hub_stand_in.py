"""A stand-in for the Hugging Face Hub: as much of its HTTP interface as an upload of an export and its use call.

It keeps the branches' files in memory. Like the Hub it takes safetensors and tokenizer.model by git LFS, and refuses
a token that it does not know and a namespace that is not the token's. It lacks Xet, the Hub's transfer of large files.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN, OWNER = "hf_stand_in", "me"
FIRST_COMMIT = hashlib.sha1(b"the first commit").hexdigest()


class HubStandIn:
    """branches: files by path, of every branch of every repository, by "OWNER/NAME" and branch name."""

    def __init__(self):
        self.branches: dict[str, dict[str, dict[str, bytes]]] = {}
        self.messages: list[tuple[str, str]] = []
        """(branch, message) of every commit, in order."""
        self.large_files: dict[str, bytes] = {}
        self.fails_at: str | None = None
        """A part of the addresses that fail."""
        self.failure: int | str = 500
        """How they fail: this status; "cut": no answer; "lost": what was asked for is done, but without an answer."""
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn
    _is_lost = False

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._fails():
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(401, "Invalid credentials in Authorization header")
        path = urlsplit(self.path).path
        for pattern, answer in (
            (r"/api/repos/create", self._create),
            (r"/api/validate-yaml", lambda _: self._send({"errors": [], "warnings": []})),
            (r"/api/models/(?P<repository>[^/]+/[^/]+)/branch/(?P<branch>.+)", self._branch),
            (r"/api/models/(?P<repository>[^/]+/[^/]+)/preupload/(?P<branch>.+)", self._preupload),
            (r"/api/models/(?P<repository>[^/]+/[^/]+)/commit/(?P<branch>.+)", self._commit),
            (r"/[^/]+/[^/]+\.git/info/lfs/objects/batch", self._large_files),
        ):
            if found := re.fullmatch(pattern, path):
                return answer(body, **{name: unquote(part) for name, part in found.groupdict().items()})
        return self._refuse(404, f"no {path}")

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self._fails():
            return
        self.hub.large_files[hashlib.sha256(content).hexdigest()] = content
        self._send({})

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        if self._fails():
            return
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/refs", path):
            names = self.hub.branches[found[1]]
            branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": _commit_id(name)} for name in names]
            return self._send({"branches": branches, "converts": [], "tags": []})
        if re.fullmatch(r"/api/models/[^/]+/[^/]+/commits/main", path):
            ids, facts = (_commit_id("main"), FIRST_COMMIT), {"authors": [], "date": "2026-01-01T00:00:00.000Z"}
            return self._send([{"id": id, "title": "", "message": "", **facts} for id in ids])
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            files = self.hub.branches.get(found[1], {}).get(found[2] or "main")
            if files is None:
                return self._refuse(404, "Repository not found", "RepoNotFound")
            siblings = [{"rfilename": name} for name in files]
            return self._send({"id": found[1], "sha": _commit_id(found[2] or "main"), "siblings": siblings})
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            branches = self.hub.branches.get(found[1], {})
            files = next((files for name, files in branches.items() if found[2] in (name, _commit_id(name))), {})
            if found[3] in files:
                return self._send(
                    files[found[3]], {"ETag": f'"{_oid(files[found[3]])}"', "X-Repo-Commit": _commit_id(found[2])}
                )
        return self._refuse(404, "Entry not found", "EntryNotFound")

    do_HEAD = do_GET

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        owner = asked["organization"] or OWNER
        if owner != OWNER:
            return self._refuse(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        repository = f"{owner}/{asked['name']}"
        is_there = repository in self.hub.branches
        self.hub.branches.setdefault(repository, {"main": {".gitattributes": b""}})
        self._send({"url": f"{self.hub.url}/{repository}"}, status=409 if is_there else 200)

    def _branch(self, body: bytes, repository: str, branch: str) -> None:
        branches = self.hub.branches[repository]
        if branch in branches:
            return self._refuse(409, "Reference already exists")
        is_empty = json.loads(body).get("startingPoint") == FIRST_COMMIT
        branches[branch] = {".gitattributes": b""} if is_empty else dict(branches["main"])
        self._send({})

    def _preupload(self, body: bytes, repository: str, branch: str) -> None:
        there = self.hub.branches[repository][branch]
        self._send({"files": [
            {
                "path": file["path"],
                "uploadMode": "lfs" if _is_large(file["path"]) else "regular",
                "shouldIgnore": False,
                "oid": _oid(there[file["path"]], file["path"]) if file["path"] in there else None,
            }
            for file in json.loads(body)["files"]
        ]})  # fmt: skip

    def _large_files(self, body: bytes) -> None:
        objects = json.loads(body)["objects"]
        for file in objects:
            if file["oid"] not in self.hub.large_files:
                file["actions"] = {"upload": {"href": f"{self.hub.url}/upload/{file['oid']}"}}
        self._send({"transfer": "basic", "objects": objects})

    def _commit(self, body: bytes, repository: str, branch: str) -> None:
        files = self.hub.branches[repository][branch]
        for line in map(json.loads, body.splitlines()):
            match line["key"], line["value"]:
                case "header", header:
                    self.hub.messages.append((branch, header["summary"]))
                case "file", file:
                    files[file["path"]] = base64.b64decode(file["content"])
                case "lfsFile", file:
                    files[file["path"]] = self.hub.large_files[file["oid"]]
        self._send({"commitUrl": f"{self.hub.url}/{repository}/commit/x", "commitOid": _commit_id(branch)})

    def _fails(self) -> bool:
        """Whether this request was made to fail."""
        if not self.hub.fails_at or self.hub.fails_at not in self.path:
            return False
        match self.hub.failure:
            case int(status):
                self._refuse(status, "Internal Error")
            case "cut":
                self.close_connection = True
            case "lost":
                self._is_lost = True
                return False
        return True

    def _refuse(self, status: int, message: str, code: str = "") -> None:
        self._send({"error": message}, {"X-Error-Message": message, "X-Error-Code": code}, status)

    def _send(self, content: dict | list | bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        if self._is_lost:
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".model"))


def _oid(content: bytes, path: str = "") -> str:
    """As git and git LFS name a content."""
    if _is_large(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _commit_id(branch: str) -> str:
    """One per branch is enough: a test reads what was last committed."""
    return branch if re.fullmatch(r"[0-9a-f]{40}", branch) else hashlib.sha1(branch.encode()).hexdigest()
