"""benchmarks/agents.py: its documents, its plan of runs, and what its tables say about made-up results."""

from types import SimpleNamespace

import pytest

from benchmarks import agents, agents_table
from benchmarks.agents import CELLS, EARLY, VARIANTS, Stages, plan
from benchmarks.agents_cells import make_documents, solve_cells
from benchmarks.reading_cost import COST, right_and_short

SEEDS = (0, 1, 2)


def figures(right: list[int], cells=CELLS, read: float = 8.0) -> dict[str, dict]:
    costs = {name: [read] * len(right) for name in ("turns", "prompt_tokens", "response_tokens", "read")}
    return {cell: {"right": [float(value) for value in right], "seconds": 1.0, **costs} for cell in cells}


def by_seed(*rights: list[int], **options) -> dict[int, dict]:
    return {seed: figures(right, **options) for seed, right in zip(SEEDS, rights, strict=False)}


def test_an_early_document_has_all_its_evidence_in_the_first_fifth():
    for sample in make_documents(EARLY[0], seed=0, number=5):
        assert max(sample.metadata["evidence_chunks"]) < 0.2 * sample.metadata["num_chunks"]


def test_documents_depend_on_the_seed_and_the_oracle_answers_all_of_them():
    for cell in CELLS[:6]:
        first, again, other = (make_documents(cell, seed, 3) for seed in (0, 0, 1))
        assert first == again and first[0].context != other[0].context
        assert solve_cells("oracle", {cell: first})[cell]["right"] == [1.0] * 3


def test_the_first_run_of_a_seed_makes_the_start_of_the_others(tmp_path):
    runs = plan(list(VARIANTS), [0, 1], tmp_path, 4, ["--rl.steps=3"])
    first = {run.seed: run for run in reversed(runs)}
    assert all(run.source is (None if run is first[run.seed] else first[run.seed]) for run in runs)
    assert {run.config.rl.steps for run in runs} == {3}
    reader = next(run for run in runs if run.kind.model_of)
    assert reader.needs is not None and reader.needs.variant == reader.kind.model_of and not reader.is_ready(())
    assert reader.evaluations()[0][0] == reader.needs.folder / "model"


def test_agents_differ_only_if_the_interval_excludes_zero_and_all_seeds_agree():
    base = by_seed([0] * 40, [0] * 40)
    cell = CELLS[0]
    assert agents_table.differs(agents_table.paired_change(by_seed([1] * 40, [1] * 40), base, cell)) == agents_table.BETTER
    assert agents_table.differs(agents_table.paired_change(base, by_seed([1] * 40, [1] * 40), cell)) == agents_table.WORSE
    assert agents_table.differs(agents_table.paired_change(by_seed([1] * 40, [0] * 40), base, cell)) == ""
    assert agents_table.differs(agents_table.paired_change(by_seed([0] * 40, [0] * 40), base, cell)) == ""


def test_a_change_is_paired_by_document_and_seed():
    change = agents_table.paired_change(by_seed([1, 1, 0, 0], [1, 0, 0, 0]), by_seed([1, 0, 1, 0], [0, 0, 0, 0]), CELLS[0])
    assert change is not None and (change.mean, change.least, change.most) == (1 / 8, 0.0, 1 / 4)


def test_the_tables_show_each_agent_before_and_after(monkeypatch):
    monkeypatch.setattr(agents, "make_documents", lambda cell, seed, number: make_documents("counting:8", seed, number))
    after = by_seed([1] * 30, [1] * 30, cells=(*CELLS, *EARLY))
    found = {
        "memory": Stages(by_seed([0] * 30, [0] * 30), after, {0: [0.9] * 6, 1: [0.5] * 6}),
        "passes": Stages(by_seed([0] * 30, [0] * 30), by_seed([0] * 30, [0] * 30)),
        "retrieval": Stages(by_seed([0, 1] * 15, [0, 1] * 15), {}),
        "outcome": Stages({}, by_seed([1] * 30, [1] * 30), {0: [0.95] * 8, 1: [0.2] * 8}),
    }
    text = agents.show_tables(found, [0, 1], 4)
    assert "| memory | 0 → 100▲ [94, 100]" in text
    assert "| retrieval | 50 [38, 62]" in text
    assert "| oracle | 100" in text
    assert f"{2 * len(CELLS)} of these cells differ" in text
    assert "| outcome | 5, never | 5, never |" in text
    assert "| two hop forward early, 32 | memory | 100 [94, 100] | 25 (25 to 25) |" in text


@pytest.mark.parametrize(("text", "read", "reward"), [("\\boxed{a}", 4, 1 - COST), ("\\boxed{a}", 1, 1 - COST / 4), ("a", 1, 0)])
def test_the_reading_cost_is_taken_from_right_answers_only(text, read, reward):
    turns = [SimpleNamespace(kind="memory")] * read + [SimpleNamespace(kind="answer")]
    assert right_and_short(SimpleNamespace(turns=turns, response=text), ["a"], {"num_chunks": 4}) == reward
