"""Run by tests/test_triton.py: compiles the attention kernels for GPUs that this machine does not have.

    compile_triton.py

Prints the bytes of shared memory that each of them takes.
"""

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memrl.kernels.attention import triton_kernels
from memrl.kernels.attention.triton_backend import _block, _tile

AMPERE = GPUTarget("cuda", 80, 32)


def shared_memory(kernel, pointers: dict[str, str], **constants) -> int:
    signature = {}
    for name in kernel.arg_names:
        kind = pointers.get(name, "i32")
        signature[name] = "constexpr" if name in constants else "fp32" if name == "scale" else kind
    # As at a launch: addresses and strides that 16 divides, which lets the compiler copy ahead into shared memory.
    plain = {*constants, "scale", "num_queries", "num_keys", "table_width"}
    aligned = [i for i, name in enumerate(kernel.arg_names) if name not in plain]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    return triton.compile(source, target=AMPERE, options={"num_stages": 2}).metadata.shared


def main() -> None:
    head_size, group = 128, 7  # Qwen2.5-7B
    pointers = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16"),
        **dict.fromkeys(("starts_ptr", "table_ptr", "lengths_ptr"), "*i32"),
        "lse_ptr": "*fp32",
    }
    block = _block(torch.empty(1, head_size, dtype=torch.bfloat16))
    sizes = {"GROUP": group, "HEAD": head_size, "WIDTH": _tile(head_size), "KEYS": block, "DOT": tl.bfloat16}
    print(shared_memory(triton_kernels.attend_sequences, pointers, ROWS=block, CAUSAL=True, **sizes))
    pointers["out_ptr"] = "*fp32"
    print(shared_memory(triton_kernels.attend_pages, pointers, ROWS=_tile(group), PAGE=64, **sizes))


main()
