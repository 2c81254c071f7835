"""`python -m memrl.data squad`: SQuAD questions on long documents."""

import argparse

from memrl.data.commands.hotpotqa import add_documents_command


def add_command(commands: argparse._SubParsersAction) -> None:
    add_documents_command(commands, "squad", "SQuAD", "v1.1 or v2.0, .json or .json.gz; questions without an answer are left out")
