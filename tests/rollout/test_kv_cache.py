import pytest
import torch

from headrace.errors import RunError
from headrace.rollout.native.kv_cache import BlockAllocator, PagedKVCache, block_bytes, free_memory_bytes


def test_a_shared_block_is_free_only_after_its_last_holder_left() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(2)
    allocator.share(blocks)
    assert allocator.is_shared(blocks[0])
    allocator.release(blocks)
    assert (allocator.num_used, allocator.is_shared(blocks[0])) == (2, False)
    allocator.release(blocks)
    assert (allocator.num_free, allocator.peak_used) == (3, 2)


def test_misuse_is_refused() -> None:
    allocator = BlockAllocator(2)
    with pytest.raises(RunError, match="asked for 3 blocks and has 2"):
        allocator.allocate(3)
    block = allocator.allocate(1)
    allocator.release(block)
    with pytest.raises(RunError, match="after it was freed"):
        allocator.release(block)
    with pytest.raises(RunError, match="after it was freed"):
        allocator.share(block)


def test_write_copy_and_release() -> None:
    cache = PagedKVCache(num_layers=2, num_blocks=3, block_size=2)
    assert cache.nbytes == 0
    key = torch.arange(6.0).view(3, 1, 2)  # 3 tokens, 1 head, head size 2
    keys, values = cache.write(0, torch.tensor([5, 0, 1]), key, -key)
    # slot 5 is the second place of block 2
    assert keys.tolist() == [[2, 3, 4, 5], [0, 0, 0, 0], [0, 0, 0, 1]]
    assert values[0].tolist() == [-2, -3, -4, -5]
    # both pairs read before either writes, and layer 1, never written, is left alone
    cache.copy_blocks([(0, 1), (2, 0)])
    assert keys.tolist() == [[0, 0, 0, 1], [2, 3, 4, 5], [0, 0, 0, 1]]
    assert cache.nbytes == 2 * keys.numel() * 4
    cache.release()
    assert cache.nbytes == 0


def test_block_bytes() -> None:
    # 2 (keys, values) x 3 layers x 16 slots x 2 heads x 8 numbers x 2 bytes
    assert block_bytes(3, 16, 2, 8, torch.bfloat16) == 3072
    assert free_memory_bytes(torch.device("cpu")) > 1 << 20
