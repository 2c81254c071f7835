"""Who answers: a model folder on this machine, or a model's name on a server; checked before anything slow begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from memrl.agents.limits import check_turn
from memrl.agents.memory import AgentConfig
from memrl.evaluation.eval_ranks import Ranks
from memrl.evaluation.eval_settings import local_source
from memrl.evaluation.tasks import Task
from memrl.reading.open_model import ReaderOptions, check_seed, decoding, load_settings, model_window, open_llm

if TYPE_CHECKING:
    from memrl.evaluation.methods import Method, MethodOptions
    from memrl.llm import LocalLLM
    from memrl.tokenizer import Tokenizer

_GENERIC = ("model", "best")  # what train.py calls every model that it writes; the run's name says more


class Options(Protocol):
    """The fields of `eval.py`'s options that are used here."""

    model: str
    task: str
    lengths: str | None
    methods: str
    samples: int | None
    repeats: int
    seed: int
    out: str | None
    resume: str
    label: str | None
    endpoint: str | None
    tokenizer: str | None


def check_options(options: Options, reader: ReaderOptions) -> None:
    """Raise a ValueError for numbers that cannot be, and for options that do not go together."""
    for name in ("samples", "repeats"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    check_seed(options.seed)
    if options.repeats > 1 and reader.temperature == 0:
        raise ValueError(
            f"repeats is {options.repeats}, but at temperature 0 all readings of a document are the same; give --temperature 1, "
            "or leave --repeats out"
        )
    if options.endpoint is None and options.tokenizer is not None:
        raise ValueError("tokenizer is given without an endpoint; a model folder has its own, so leave --tokenizer out")
    if options.endpoint is not None and options.tokenizer is None:
        raise ValueError("endpoint is given without a tokenizer; give --tokenizer DIR, the served model's Hugging Face folder")
    if options.endpoint is not None and reader.yarn:
        raise ValueError("yarn stretches a model on this machine; start the server with it, and leave --yarn out")


@dataclass(frozen=True)
class Target:
    """What is measured.

    Attributes:
        label: what the model is called in rows and tables.
        tokenizer_folder: the model folder, or for an endpoint the one given.
    """

    options: Options
    reader: ReaderOptions
    label: str
    agent: AgentConfig
    tokenizer: Tokenizer
    tokenizer_folder: Path

    def default_folder(self) -> Path:
        if self.options.endpoint is not None:
            return Path("eval") / self.label.replace("/", "-")
        model = Path(self.options.model).resolve()
        return model.parent / "eval" / model.name

    def source(self) -> dict[str, Any]:
        """For the results' fingerprint."""
        if self.options.endpoint is not None:
            return {"endpoint": self.options.endpoint, "served_model": self.options.model}
        return local_source(self.options.model, self.reader)

    def make_methods(self, names: Sequence[str], options: MethodOptions) -> list[Method]:
        from memrl.evaluation.methods import make_methods

        window = None if self.options.endpoint is not None else model_window(self.options.model, self.reader)
        return make_methods(names, options, self.agent, window)

    def open_llm(self, methods: Iterable[Method], tasks: Iterable[Task]) -> LocalLLM:
        """The model behind an `llm`, or the server's; raises a ValueError where that cannot work."""
        if self.options.endpoint is not None:
            from memrl.endpoint import RemoteLLM

            llm = RemoteLLM(
                self.options.endpoint,
                self.options.model,
                self.tokenizer,
                decoding(self.reader),
                self.agent.prompts.system,
                concurrency=self.reader.max_rows,
            )
            llm.check()
            return llm
        llm = open_llm(self.options.model, self.tokenizer, self.agent, self.reader)
        # A file's documents may all be short, and tokenising them would take a while; what does not fit fails there, and is run
        # again by a command with a larger cache.
        least = {} if any(task.length_unit for task in tasks) else {"document_tokens": 0, "question_tokens": 0}
        for method in methods:
            check_turn(llm.sampler, method.longest_turn(self.tokenizer, **least), method.lower)
        return llm


def open_target(options: Options, reader: ReaderOptions, ranks: Ranks) -> Target:
    """Agent settings and tokenizer, read; the weights are not.

    Raises:
        ValueError: no such folder, or something in it or in the options is not as it must be.
    """
    folder = options.model if options.tokenizer is None else options.tokenizer
    if options.endpoint is not None and not Path(folder).is_dir():
        raise ValueError(f"tokenizer {folder}: there is no such folder; give the served model's Hugging Face folder")
    if options.endpoint is None:
        reader = replace(reader, device=ranks.device(reader.device))
    agent, tokenizer = load_settings(folder, reader)
    return Target(options, reader, options.label or _label(options), agent, tokenizer, Path(folder))


def _label(options: Options) -> str:
    if options.endpoint is not None:
        return options.model
    path = Path(options.model).resolve()
    return f"{path.parent.name}/{path.name}" if path.name in _GENERIC else path.name
