"""The four nouns of memrl. Read this file first.

A *sample* is a document with a question. An agent reads it and leaves a *trajectory*: one *turn* per chunk, each of which
rewrites the memory, and a last turn that answers. The G trajectories of one sample are a *group*, and the group's rewards are
each other's baseline (MemAgent, arXiv 2507.02259, section 3).

    group of sample s (group_size = 2, three chunks)            reward  advantage, the same on every token of the row
      trajectory 0   [memory c0] [memory c1] [memory c2] [answer]   1      +0.5
      trajectory 1   [memory c0] [memory c1] [memory c2] [answer]   0      -0.5

Every bracket is a `Turn`: an independent conversation that starts from a fresh prompt (question, memory so far, next chunk).
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sample:
    """One document with one question.

    Attributes:
        id: unique in its data set; names the sample in every result file.
        question: what is asked.
        context: the document, of any length; may be empty.
        answers: the gold answers. Empty where nobody knows (`infer.py`).
        match: "any": each of the answers alone is right. "all": every one of them has to be named.
        metadata: whatever the data set knows besides (where the evidence stands, for example).
    """

    id: str
    question: str
    context: str
    answers: tuple[str, ...] = ()
    match: str = "any"
    metadata: dict = field(default_factory=dict)


@dataclass
class Turn:
    """One prompt and one response: the unit of training.

    The ids are those that the sampler saw and produced. They are never decoded and encoded again, so what is trained on is
    what was sampled.

    Attributes:
        kind: "memory" or "answer" for the memory agent; other agents may use other words.
        prompt_ids: token ids of the rendered prompt, chat template included.
        response_ids: sampled token ids, the stop token included when there is one. The loss falls on exactly these.
        response_logprobs: natural-log probability of each response id under the sampling distribution, fp32.
        finish_reason: "stop" (a stop id ended it) or "length" (the token cap did).
        text: the response as text, without the stop token.
    """

    kind: str
    prompt_ids: list[int]
    response_ids: list[int]
    response_logprobs: list[float]
    finish_reason: str
    text: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass
class Trajectory:
    """All turns of one reading of one document.

    Attributes:
        turns: in the order in which they happened; the last one is the answer.
        response: text of the last turn.
        memory: text of the memory that the answer was given from.
        reward: what training maximises (the strict verifier's, or a reward function's); set by the rollout, not by the agent.
        penalty: what overlong turns cost, at most 0; training adds it to the reward.
        advantage: the reward, penalty included, against the group's baseline; set by training.
        scores: every other score by name, the lenient verifier among them.
        error: why the reward function gave no number, in one line; empty where all went well.
    """

    turns: list[Turn] = field(default_factory=list)
    response: str = ""
    memory: str = ""
    reward: float = 0.0
    penalty: float = 0.0
    advantage: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass
class Group:
    """The trajectories of one sample, which share a baseline.

    Attributes:
        id: explicit and unique within a step; groups are never recognised by their prompts, which may coincide.
    """

    id: int
    sample: Sample
    trajectories: list[Trajectory]
