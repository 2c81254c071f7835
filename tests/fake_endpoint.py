"""A real HTTP server on a free port with the part of the OpenAI protocol that memrl uses, and with failures on request."""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Reply:
    """One answer: by default a completion with `text`.

    Attributes:
        text: the message's content; None is sent as null.
        message: the error's message if `status` is not 200.
        seconds: to wait first.
        cut: "connect" closes the connection before the answer, "body" in the middle of it.
        trickle: seconds between the bytes of the answer; 0 sends it at once.
        raw: the whole body, sent unchanged with the content type `kind`.
        tool_calls: the message's, in OpenAI's form.
    """

    text: str | None = ""
    finish_reason: str = "stop"
    status: int = 200
    message: str = "no"
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    cut: str = ""
    trickle: float = 0.0
    raw: str | None = None
    kind: str = "application/json"
    reasoning: str | None = None
    tool_calls: list | None = None

    def body(self, model: str, question: str) -> bytes:
        if self.raw is not None:
            return self.raw.encode()
        if self.status != 200:
            return json.dumps({"error": {"message": self.message, "type": "x", "param": None, "code": self.status}}).encode()
        message = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls is not None:
            message["tool_calls"] = self.tool_calls
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        sizes = {"prompt_tokens": len(question.split()), "completion_tokens": len((self.text or "").split())}
        usage = sizes | {"total_tokens": sum(sizes.values())}
        head = {"id": "x", "object": "chat.completion", "created": 0, "model": model}
        return json.dumps(head | {"choices": [choice], "usage": usage}).encode()


class FakeEndpoint:
    """The server, as a context manager; `url` is its address without a path.

    Attributes:
        bodies: of all chat requests, in the order of their arrival; `headers` and `paths` likewise.
        most_at_once: requests that were being answered at the same time.
    """

    def __init__(
        self,
        answer: Callable[[dict], str | Reply] = lambda body: "yes",
        *,
        models: Sequence[str] | None = ("fake",),
        script: Sequence[Reply] = (),
        key: str | None = None,
        refuses: Sequence[str] = (),
    ):
        """
        Args:
            answer: makes the reply to a request's JSON; runs in the request's own thread.
            models: names listed by /v1/models; None has no such route.
            script: replies to the first requests; `answer` makes all later ones.
            key: the only accepted key; None accepts any.
            refuses: parameters that a request must not have.
        """
        self.answer, self.models, self.script, self.key, self.refuses = answer, models, list(script), key, refuses
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.paths: list[str] = []
        self.most_at_once = self._at_once = 0
        self._lock, self._closed = threading.Lock(), threading.Event()

    def __enter__(self) -> "FakeEndpoint":
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def questions(self) -> list[str]:
        """The user messages of all chat requests."""
        return [body["messages"][-1]["content"] for body in self.bodies]

    def times_asked(self, pattern: str) -> Counter[str]:
        """How often each match of `pattern` was in a user message."""
        return Counter(match for question in self.questions for match in re.findall(pattern, question))

    def _reply(self, body: dict, headers: dict, path: str) -> Reply:
        with self._lock:
            self.bodies.append(body)
            self.headers.append(headers)
            self.paths.append(path)
            scripted = self.script.pop(0) if self.script else None
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            return Reply(status=401, message="bad key")
        if scripted is not None:
            return scripted
        if refused := [name for name in self.refuses if name in body]:
            return Reply(status=400, message=f"Unknown parameter: '{refused[0]}'")
        if self.models and body["model"] not in self.models:
            return Reply(status=404, message=f"The model `{body['model']}` does not exist.")
        reply = self.answer(body)
        return Reply(reply) if isinstance(reply, str) else reply


class _Handler(BaseHTTPRequestHandler):
    fake: FakeEndpoint
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        fake = self.fake
        if fake.models is None or not self.path.endswith("/v1/models"):
            self._send(Reply(status=404, message="no such route"), b'{"detail": "Not Found"}')
        elif fake.key is not None and self.headers.get("authorization") != f"Bearer {fake.key}":
            reply = Reply(status=401, message="bad key")
            self._send(reply, reply.body("", ""))
        else:
            models = [{"id": name, "object": "model", "created": 0, "owned_by": "x"} for name in fake.models]
            self._send(Reply(), json.dumps({"object": "list", "data": models}).encode())

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with fake._lock:
            fake._at_once += 1
            fake.most_at_once = max(fake.most_at_once, fake._at_once)
        try:
            reply = fake._reply(body, {name.lower(): value for name, value in self.headers.items()}, self.path)
            fake._closed.wait(reply.seconds)
        finally:
            with fake._lock:
                fake._at_once -= 1
        self._send(reply, reply.body(body["model"], body["messages"][-1]["content"]))

    def _send(self, reply: Reply, content: bytes) -> None:
        if reply.cut == "connect":
            self.close_connection = True
            return
        try:
            self.send_response(reply.status)
            self.send_header("content-type", reply.kind)
            self.send_header("content-length", str(len(content)))
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            if reply.cut == "body":
                content = content[: len(content) // 2]
            for begin in range(0, len(content), 1 if reply.trickle else len(content) or 1):
                self.wfile.write(content[begin : begin + 1] if reply.trickle else content)
                time.sleep(reply.trickle)
        except ConnectionError:  # the client has left
            self.close_connection = True
        if reply.cut == "body":
            self.close_connection = True
