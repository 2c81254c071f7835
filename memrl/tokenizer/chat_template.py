"""Render a checkpoint's chat template, which is a program of unknown origin, in a process of its own with little time and memory.

The process imports jinja2 alone, so it starts in a tenth of a second. A fork of this process would cost less, but it fails where
the memory is nearly full of weights.
"""

import contextlib
import importlib.util
import json
import resource
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

CPU_SECONDS, MEMORY_BYTES = 2, 2**29  # milliseconds and 50 MB are usual
WALL_SECONDS = 60  # a template cannot wait; this is for a machine that stands still


@lru_cache(maxsize=256)
def render_chat_template(template: str, messages: str, tools: str, special_tokens: tuple[tuple[str, str], ...]) -> str:
    """The text of the messages and of the start of the assistant's next one.

    Args:
        messages: list of messages, as JSON.
        tools: list of the tools' schemas, as JSON; "null" without tools.
        special_tokens: names and texts that the template may use, such as ("bos_token", "<s>").

    Raises:
        ValueError: the template fails, or takes more than its time or memory; with the reason.
    """
    values = {"messages": json.loads(messages), "tools": json.loads(tools), "documents": None, "add_generation_prompt": True}
    values |= dict(special_tokens)
    # -I and -S: neither the current folder nor anything that is not named here can be imported.
    found = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    folders = [str(Path(spec.origin).parents[1]) for spec in found if spec is not None and spec.origin is not None]
    limits = f"it takes more than {CPU_SECONDS} s or {MEMORY_BYTES // 2**20} MiB"
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", __file__, str(CPU_SECONDS), str(MEMORY_BYTES), *folders],
            input=json.dumps([template, values]).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=WALL_SECONDS,
        )
        outcome = json.loads(child.stdout or "{}")
    except (subprocess.TimeoutExpired, json.JSONDecodeError):
        outcome = {}
    if "text" not in outcome:
        raise ValueError(outcome.get("error", limits))
    return outcome["text"]


def environment():
    """Jinja as `transformers` sets it up for chat templates (`transformers.utils.chat_template_utils`)."""
    from datetime import datetime

    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}, which marks the assistant's words for training and changes no text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def main() -> None:
    """The child: read [template, values] from standard input, write {"text": ...} or {"error": ...}."""
    cpu_seconds, memory_bytes = map(int, sys.argv[1:3])
    sys.path += sys.argv[3:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    template, values = json.load(sys.stdin)
    try:
        text = environment().from_string(template).render(**values)
        outcome = {"text": text}
        if len(text) > memory_bytes // 64:
            raise MemoryError
    except MemoryError:
        outcome = {"error": f"it takes more than {memory_bytes // 2**20} MiB"}
    except Exception as error:
        outcome = {"error": " ".join(str(error).split())[:300] or type(error).__name__}
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
