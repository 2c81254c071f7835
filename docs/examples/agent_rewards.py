"""Rewards from the papers of the gated and the passes agent, for `reward.function` (docs/agents.md).

train.py ... --reward.function docs/examples/agent_rewards.py:gates --rl.outcome_weight 0.9
"""

from itertools import groupby

from memrl.agents.gated import read_gates
from memrl.verify import strict_match

TOO_EARLY, TOO_LATE = -0.75, -0.5
MOST_PASSES, PASS_WEIGHT = 3, 0.2


def gates(trajectory, answers, metadata, tags=True):
    """GRU-Mem, arXiv 2602.10560, equations 8 to 11: the answer, the exit, the form, and for each turn its update gate.

    `metadata` must name the sections with evidence, counted from 0: a list `evidence_chunks`, or one number `needle_chunk`.
    """
    evidence = metadata["evidence_chunks"] if "evidence_chunks" in metadata else [metadata["needle_chunk"]]
    seen = [read_gates(turn.text, tags) for turn in trajectory.turns if turn.kind == "memory"]
    update = [1.0 if (gate.update is not None) == (place in evidence) else -1.0 for place, gate in enumerate(seen)]
    last_read, last_needed = len(seen) - 1, max(evidence)
    leave = TOO_EARLY if last_read < last_needed else TOO_LATE if last_read > last_needed else 0.0
    form = float(all(gate.well_formed for gate in seen))
    answer = strict_match(trajectory.response, answers)
    return {"reward": answer + leave + form, "turns": [*update, 0.0], "exit": leave, "format": form}


def word_gates(trajectory, answers, metadata):
    """As `gates`, for models that write bare words (`agent.options.tags` false)."""
    return gates(trajectory, answers, metadata, tags=False)


def passes(trajectory, answers, metadata):
    """PI-Mem, arXiv 2608.03048, equation 4: the answer, and up to 0.2 for fewer passes over the document."""
    num_passes = sum(kind == "check" for kind, _ in groupby(turn.kind for turn in trajectory.turns))
    saved = (MOST_PASSES - num_passes) / (MOST_PASSES - 1)
    return {"reward": strict_match(trajectory.response, answers) + PASS_WEIGHT * saved, "passes": num_passes}
