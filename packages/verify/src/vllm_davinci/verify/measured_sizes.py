"""Sizes that `costs` measures; `fit` derives a chip's rates from the two largest."""

PRODUCT_SIZES = (1024, 2048, 4096, 8192)
COPY_MIB = (64, 256)
MEMORY_MIB = (512, 1024)
CACHED_MIB = 16
ATTENTION_TOKENS = (2048, 4096)
