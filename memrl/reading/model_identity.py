"""All of a model folder that responses depend on, as JSON: results of two commands are joined only if it is equal."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memrl.tokenizer import TOKENIZER_FILES
from memrl.utils.checksums import hash_files

if TYPE_CHECKING:
    from memrl.reading.open_model import ReaderOptions
    from memrl.tokenizer import Tokenizer


def model_identity(folder: str | Path, options: ReaderOptions, tokenizer: Tokenizer) -> dict[str, Any]:
    """The weights, the model's shape and numerics as they will be used (`yarn` and `dtype` applied), and the tokenizer."""
    from memrl.model.hf_config import dtype_named, read_config, read_raw_config

    folder = Path(folder)
    config = asdict(read_config(folder, options.yarn))
    del config["initializer_range"]  # of new weights alone
    return {
        "weights": hash_files(sorted(folder.glob("*.safetensors*"))),  # the list of shards too
        "dtype": str(dtype_named(options.dtype, read_raw_config(folder))).removeprefix("torch."),
        "config": json.loads(json.dumps(config)),
        **tokenizer_identity(folder, tokenizer),
    }


def tokenizer_identity(folder: str | Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """How text becomes tokens, messages become prompts, and what ends a response."""
    template = json.dumps(tokenizer.hf.chat_template, sort_keys=True)
    return {
        "tokenizer": hash_files(path for name in TOKENIZER_FILES if (path := Path(folder) / name).is_file()),
        "chat_template": hashlib.sha256(template.encode()).hexdigest()[:16],
        "stop_ids": list(tokenizer.stop_ids),
    }
