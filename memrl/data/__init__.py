"""Samples: where they come from and how they are written down.

`custom` reads the JSON lines format, `hotpotqa` writes it from the HotpotQA files (`python -m memrl.data`),
`needle` generates the documents of the miniature, and `source` chooses what a training step reads. All that
is exported here imports the standard library only, so reading a data set does not wait for torch.
"""

from memrl.data.custom import JsonlSamples, load_jsonl

__all__ = ["JsonlSamples", "load_jsonl"]
