"""Groups of blocks that FSDP gathers and reduces together: fewer, larger collectives where blocks are small."""

GROUP_PARAMETERS = 25_000_000  # at least
SMALLEST_GROUPS = 4  # for so many blocks: a group moves while another one computes


def group_length(block_parameters: int, blocks: int) -> int:
    """Return the blocks of a group; the last one may have fewer."""
    return min(-(-GROUP_PARAMETERS // block_parameters), -(-blocks // SMALLEST_GROUPS))
