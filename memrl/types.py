"""The data types that every part of memrl shares. Read this file first.

A *sample* is a document with a question. An agent reads it and produces a *trajectory*: one *turn* per chunk, each of which
rewrites the memory, and a last turn that answers. The G trajectories of one sample are a *group*; the advantage of each is its
reward relative to the group's mean (MemAgent, arXiv 2507.02259, section 3).

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
        context: the document, of any length; may be empty.
        answers: the gold answers; empty if unknown (`memrl infer`).
        match: "any": each of the answers alone is correct. "all": every one of them must be named.
        metadata: further fields of the data set, such as the position of the evidence.
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

    The token ids are those that the sampler read and produced. They are never decoded and encoded again, so training sees exactly
    what was sampled.

    Attributes:
        kind: "memory" or "answer" for the memory agent; other agents use words of their own.
        prompt_ids: token ids of the rendered prompt, chat template included.
        response_ids: sampled token ids, the stop token included if there is one. The loss is taken on exactly these.
        response_logprobs: natural-log probability of each response id under the sampling distribution, fp32.
        finish_reason: "stop" (a stop token ended it) or "length" (it reached its token cap).
        text: the response as text, without the stop token.
        max_new_tokens: the token cap; 0 if it is not known.
        memory: text of the memory after this turn, if the agent has told it (`Session.remember`).
        reward: of this turn alone, set by the agent or the rollout; trained on if rl.outcome_weight is below 1.
        advantage: of each of its tokens; set by training.
        tool_calls: calls of tools that a server sent besides the text, in OpenAI's form. The local sampler leaves calls in the
            text (`memrl/agents/tool_calls.py`).
    """

    kind: str
    prompt_ids: list[int]
    response_ids: list[int]
    response_logprobs: list[float]
    finish_reason: str
    text: str = ""
    max_new_tokens: int = 0
    memory: str | None = None
    reward: float = 0.0
    advantage: float = 0.0
    tool_calls: list[dict] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass
class Trajectory:
    """All turns of one reading of one document.

    Attributes:
        turns: in the order in which they were sampled; the last one is the answer.
        response: text of the last turn.
        memory: text of the memory that the answer was given from.
        reward: what training maximises: the strict verifier's score or a reward function's. Set by the rollout.
        penalty: penalty of overlong turns, at most 0; training adds it to the reward.
        advantage: of the outcome: reward plus penalty, relative to the group's baseline; set by training.
        scores: all other scores by name, the lenient verifier's and the agent's own among them.
        error: why there is no reward, in one line: the agent or the reward function failed; empty if there is one.
        left_out: without a reward, it is left out of its group's baseline, of the loss and of the mean reward (reward.on_error).
    """

    turns: list[Turn] = field(default_factory=list)
    response: str = ""
    memory: str = ""
    reward: float = 0.0
    penalty: float = 0.0
    advantage: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    error: str = ""
    left_out: bool = False


@dataclass
class Group:
    """The trajectories of one sample, which share a baseline.

    Attributes:
        id: unique within a step. Groups are identified by it, never by their prompts, because two samples may be equal.
    """

    id: int
    sample: Sample
    trajectories: list[Trajectory]
