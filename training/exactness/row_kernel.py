"""A Triton kernel that sums the squares of each matrix row. The matrices may be anywhere in memory. Only GPUs use it.

The bits of a row's sum do not depend on the number of rows or on the row's position. Each program of the kernel sums
one row: lane i adds the elements i, i + BLOCK, ... in order, and the lanes are added in an order that the compiler has
fixed. Everything that differs between calls is read from memory, so that every call runs the same binary. Programs
share no sums, so there are no atomic operations.
"""

import triton
import triton.language as tl

BLOCK = 1024  # lanes


@triton.jit  # type: ignore[untyped-decorator]
def row_sums_kernel(matrices, owners, sums, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the sum of squares of each fp32 row.

    `matrices` has the address, the first row and the width of each matrix; `owners` has the index of each row's matrix.
    """
    row = tl.program_id(0)
    entry = matrices + 3 * tl.load(owners + row)
    first_row, width = tl.load(entry + 1), tl.load(entry + 2)  # int64, because their products may exceed 2^31
    values = tl.load(entry).to(tl.pointer_type(tl.float32)) + (row - first_row) * width
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        value = tl.load(values + start + lanes, mask=start + lanes < width, other=0.0)
        total += value * value
    tl.store(sums + row, tl.sum(total))
