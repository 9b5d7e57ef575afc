"""Operations that Triton-Ascend adds to Triton's language, for virtual NPUs.

Kernels import `triton.language.extra.cann.extension`, which `driver` lets Python find here.
"""
