"""The flash-attn package, handed out as it is (Dao, 2023). Pages must be a multiple of 256 tokens."""

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]
