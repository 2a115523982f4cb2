"""The kernel of the exact gradient norm: correct values in Triton's interpreter on a CPU, no atomics when compiled."""

import sys

import pytest

from tests.cuda.emulated import ATOMIC_PTX
from tests.launch import execute

VALUES = """
import torch
from triton.runtime import interpreter

plain_patch = interpreter._patch_lang_tensor


def patch(tensor, scope):  # NumPy 2.4 rejects how torch 2.11's Triton converts the end of a loop to an integer
    plain_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = patch
from training.exactness.row_sums import by_kernel
generator = torch.Generator().manual_seed(0)
shapes = [(3, 5), (2, 1024), (0, 7), (4, 2500), (2, 3, 4), (1, 1)]  # rows of several blocks, shards without rows
matrices = [torch.randn(shape, generator=generator) for shape in shapes]
vectors = [torch.randn(count, generator=generator) for count in (6, 0, 1)]
sums = by_kernel([*matrices, *vectors])
expected = [matrix.double().square().flatten(1).sum(1) for matrix in matrices] + [v.double().square() for v in vectors]
torch.testing.assert_close(sums, torch.cat(expected).float(), rtol=1e-6, atol=0)
assert torch.equal(by_kernel(matrices), sums[: sum(map(len, matrices))])
assert torch.equal(by_kernel(vectors), sums[sum(map(len, matrices)) :])
shard = by_kernel([matrices[3][1:3], vectors[0][2:]])
assert torch.equal(shard, torch.cat([sums[6:8], vectors[0][2:].square()]))
"""


@pytest.mark.oldest_torch
def test_each_row_is_summed_in_order() -> None:
    done = execute(sys.executable, "-c", VALUES, TRITON_INTERPRET="1")  # Triton reads this variable on import
    assert done.returncode == 0, done.stderr


@pytest.mark.oldest_torch
@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles_without_atomics(capability: int) -> None:
    import triton  # not at the top of this file, because `make test` collects the file without Triton
    from triton.backends.compiler import GPUTarget

    from training.exactness.row_kernel import BLOCK, row_sums_kernel

    signature = {"matrices": "*i64", "owners": "*i32", "sums": "*fp32", "BLOCK": "constexpr"}
    source = triton.compiler.ASTSource(row_sums_kernel, signature, {"BLOCK": BLOCK})
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    assert f".target sm_{capability}" in ptx
    assert not ATOMIC_PTX.search(ptx)
