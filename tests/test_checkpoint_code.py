"""No file of a checkpoint can run code, on neither road of a resumed run: real DeepSpeed on one rank."""

import os
from pathlib import Path

import pytest
import torch

from memrl.engine import distributed
from memrl.engine.reshard import load_resharded
from tests.workers.engine_options import make_engine, parameters, update


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


@pytest.fixture(scope="module")
def engine():
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    distributed.init("cpu")
    engine = make_engine(2, "bfloat16", 1e-2)
    update(engine)
    yield engine
    engine.close()
    distributed.shutdown()


ROADS = {"resume": lambda engine, folder: engine.load(folder), "reshard": load_resharded}


@pytest.mark.parametrize("kind", ["optim", "model"])
@pytest.mark.parametrize("road", ROADS)
def test_a_payload_in_a_checkpoint_is_refused_and_not_run(engine, tmp_path, road, kind):
    assert sorted(path.name for path in engine.save(tmp_path)) == sorted(path.name for path in (tmp_path / "engine").iterdir())
    [file] = (tmp_path / "engine").glob(f"*{kind}_states.pt")
    content = torch.load(file, weights_only=False)
    torch.save(content | {"lr_scheduler": Payload(tmp_path / "proof")}, file)
    with pytest.raises(ValueError, match=r"a file holds \S*\.mkdir, which is no tensor; loading it could run code"):
        ROADS[road](engine, tmp_path)
    assert not (tmp_path / "proof").exists()
    torch.load(file, weights_only=False)  # as DeepSpeed itself would
    assert (tmp_path / "proof").exists() and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_what_was_saved_comes_back_on_both_roads(engine, tmp_path):
    engine.save(tmp_path)
    saved = parameters(engine)
    for load in ROADS.values():
        fresh = make_engine(2, "bfloat16", 1e-2)
        assert any(not torch.equal(value, saved[name]) for name, value in parameters(fresh).items())
        load(fresh, tmp_path)
        assert all(torch.equal(value, saved[name]) for name, value in parameters(fresh).items())
        fresh.close()
