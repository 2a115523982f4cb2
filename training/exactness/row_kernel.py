"""Triton kernel of the sum of squares of each row, for matrices anywhere in memory. Imported on GPUs only.

Its bits do not depend on the number of rows or on their place: a program sums one row; lane i takes the elements i,
i + BLOCK, ... in order, and the lanes are added in the order that the compiler fixed. All that differs between calls is
read from memory, so every call runs the same binary; no program shares a sum, so there are no atomics.
"""

import triton
import triton.language as tl

BLOCK = 1024  # lanes


@triton.jit  # type: ignore[untyped-decorator]
def row_sums_kernel(matrices, owners, sums, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the sums of fp32 rows. `matrices`: each one's address, first row, width; `owners`: each row's matrix."""
    row = tl.program_id(0)
    entry = matrices + 3 * tl.load(owners + row)
    first_row, width = tl.load(entry + 1), tl.load(entry + 2)  # int64: products of them may pass 2^31
    values = tl.load(entry).to(tl.pointer_type(tl.float32)) + (row - first_row) * width
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        value = tl.load(values + start + lanes, mask=start + lanes < width, other=0.0)
        total += value * value
    tl.store(sums + row, tl.sum(total))
