"""`python -m memrl.data squad`: SQuAD questions on long documents."""

import argparse

from memrl.data.commands.hotpotqa import add_documents_command


def add_command(commands: argparse._SubParsersAction) -> None:
    layouts = "v1.1 or v2.0, .json, .json.gz, or the hub's .parquet; questions without an answer are left out"
    add_documents_command(commands, "squad", "SQuAD", layouts)
