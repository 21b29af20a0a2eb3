import pytest
import torch

from headrace.errors import RunError
from headrace.rollout.native.kv_cache import (
    BlockAllocator,
    PagedKVCache,
    block_bytes,
    free_memory_bytes,
    zeros,
)


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


def test_write_gather_copy_and_release() -> None:
    cache = PagedKVCache(num_layers=2, num_blocks=3, block_size=2)
    assert cache.nbytes == 0
    with pytest.raises(RunError, match="layer 0 is read before"):
        cache.gather(0, torch.tensor([0]))
    key = torch.tensor([[[1.0], [10.0]], [[2.0], [20.0]], [[3.0], [30.0]]])  # 3 tokens, 2 heads, head size 1
    cache.write(0, torch.tensor([5, 0, 1]), key, -key)
    assert cache.nbytes == 2 * 12 * 4
    # slot 5 is the second place of block 2; a token's heads lie together
    keys, values = cache.gather(0, torch.tensor([2, 0]))
    assert keys[..., 0].tolist() == [[0, 0], [1, 10], [2, 20], [3, 30]]
    assert values[..., 0].tolist() == [[0, 0], [-1, -10], [-2, -20], [-3, -30]]
    rows, _ = cache.rows(0)
    assert rows[:, 0].tolist() == [2, 20, 3, 30, 0, 0, 0, 0, 0, 0, 1, 10]
    with pytest.raises(RunError, match="layer 1 is read before"):
        cache.rows(1)
    # both pairs read before either writes, and layer 1, never written, is left alone
    cache.copy_blocks([(0, 1), (2, 0)])
    keys, values = cache.gather(0, torch.arange(3))
    assert keys[..., 0].tolist() == [[0, 0], [1, 10], [2, 20], [3, 30], [0, 0], [1, 10]]
    assert values[:, 1, 0].tolist() == [0, -10, -20, -30, 0, -10]
    cache.release()
    assert cache.nbytes == 0


def test_gathering_a_like_number_of_blocks_takes_no_new_memory() -> None:
    cache = PagedKVCache(num_layers=2, num_blocks=8, block_size=2)
    for layer, heads in enumerate((2, 1)):  # layers may differ in heads
        key = torch.arange(16.0 * heads).view(16, heads, 1)
        cache.write(layer, torch.arange(16), key, key)
    first, _ = cache.gather(0, torch.tensor([1, 2, 3, 4]))
    again, _ = cache.gather(0, torch.tensor([5, 6, 7, 0, 1]))
    assert again.data_ptr() == first.data_ptr()
    assert again[:, 1, 0].tolist() == [21, 23, 25, 27, 29, 31, 1, 3, 5, 7]
    other, _ = cache.gather(1, torch.tensor([7, 0]))
    assert other.data_ptr() == first.data_ptr()
    assert other[:, :, 0].tolist() == [[14], [15], [0], [1]]
    more, _ = cache.gather(0, torch.arange(8))
    assert more[:, 0, 0].tolist() == list(range(0, 32, 2))


def test_block_bytes() -> None:
    # 2 (keys, values) x 3 layers x 16 slots x 2 heads x 8 numbers x 2 bytes
    assert block_bytes(3, 16, 2, 8, torch.bfloat16) == 3072
    assert free_memory_bytes(torch.device("cpu")) > 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_memory_of_a_pool_is_zero_and_starts_a_cache_line(dtype: torch.dtype) -> None:
    pool = zeros((700, 16, 2, 32), dtype, torch.device("cpu"))
    assert (pool.dtype, tuple(pool.shape), pool.is_contiguous()) == (dtype, (700, 16, 2, 32), True)
    assert pool.data_ptr() % 64 == 0
    assert not pool.any()
    pool[-1, -1, -1, -1] = 1
    assert float(pool.sum()) == 1
    assert zeros((0, 16, 2, 32), dtype, torch.device("cpu")).numel() == 0


def test_reading_a_released_cache_is_refused() -> None:
    cache = PagedKVCache(num_layers=1, num_blocks=2, block_size=2)
    cache.write(0, torch.tensor([0]), torch.ones(1, 1, 1), torch.ones(1, 1, 1))
    assert [x.sum() for x in (*cache.tokens(0), *cache.rows(0))] == [1, 1, 1, 1]
    cache.release()
    for read in (cache.tokens, cache.rows):
        with pytest.raises(RunError, match="layer 0 is read before"):
            read(0)
    cache.write(0, torch.tensor([1]), torch.ones(1, 1, 1), torch.ones(1, 1, 1))
    assert cache.rows(0)[0][:, 0].tolist() == [0, 1, 0, 0]
