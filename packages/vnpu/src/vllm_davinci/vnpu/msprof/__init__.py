"""CANN's `msprof` for virtual NPUs: exports recorded tasks in CANN's file formats.

torch_npu.profiler calls it by that name (torch_npu/profiler/analysis/prof_view/cann_parse) and
reads what it writes. Names of files, columns and events: MindStudio's "Profiling description" and
the assemblers of github.com/Ascend/msprof.
"""
