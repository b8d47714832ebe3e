"""Compute the last block of a prompt once for all samples of a request.

vLLM shares whole blocks of the cache. It can also give a request a copy of a block that is shared
in part, but it looks for such blocks only in models with recurrent states. Here the first sample of
a request is computed one step before the others. The others get a copy of the block where the
prompt ends, and compute only the prompt's last token.
"""

from weakref import WeakValueDictionary

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request


def share_last_blocks(cache: KVCacheManager) -> bool:
    """Let samples find the last block of the prompt too.

    Return False if the model has other layers than full attention.
    """
    managers = cache.coordinator.single_type_managers
    if [type(manager) for manager in managers] != [FullAttentionManager]:
        return False

    (manager,), whole_blocks = managers, cache.get_computed_blocks
    firsts: WeakValueDictionary[tuple[str, str | None], Request] = WeakValueDictionary()

    def computed_blocks(request: Request, *longest: int | None) -> tuple[KVCacheBlocks, int, int]:
        """Return blocks that the request starts with, and how many tokens in them are computed.

        The last number is 0 here. vLLM 0.33 also says how many tokens may be computed at most, or
        None.
        """
        # Samples that begin after other weights were loaded have another salt.
        key = request.request_id.rpartition("/")[0], request.cache_salt
        first = firsts.setdefault(key, request)
        blocks = manager.req_to_blocks.get(first.request_id)
        if not blocks:  # it has not begun, or has ended
            firsts[key] = request
            return whole_blocks(request, *longest)
        is_computed = first.num_computed_tokens >= request.num_prompt_tokens
        if request.num_output_tokens or not is_computed or any(longest):
            return whole_blocks(request, *longest)

        num_computed = request.num_prompt_tokens - 1
        return KVCacheBlocks((blocks[: -(-num_computed // manager.block_size)],)), num_computed, 0

    cache.get_computed_blocks = computed_blocks
    return True
