"""Checks one layer of a checkpoint: it must have the tensors of its scheme and no others."""

from collections.abc import Mapping

from vllm_davinci.core.quantization.scheme import FLOAT, SCHEMES, Layout, Scheme
from vllm_davinci.core.quantization.tensors import dtype_name
from vllm_davinci.core.weight_files.files import StoredTensor
from vllm_davinci.core.weight_files.issues import CheckReport
from vllm_davinci.core.weight_files.layer_names import VOCABULARY, shortened


def extra_names() -> frozenset[str]:
    """Suffixes of tensor names that some scheme has in addition to a weight."""
    known = (spec.name for kind in SCHEMES.values() for spec in kind().stored(Layout()))
    return frozenset(known) - {"weight"} | {"weight_scale_second", "weight_offset_second"}


def check_layer(
    prefix: str,
    weight: StoredTensor,
    scheme: Scheme,
    layout: Layout,
    tensors: Mapping[str, StoredTensor],
    report: CheckReport,
) -> None:
    """Checks a layer. scheme: of the stored layer"""
    specs = scheme.stored(layout)
    if scheme.name == FLOAT and not weight.dtype.is_floating_point:
        report.problem(
            f"{prefix}.weight",
            f"holds {dtype_name(weight.dtype)} and would be loaded as {FLOAT}: its scales would be"
            " ignored. Give it its type in the description",
        )
    others = extra_names() - {spec.name for spec in specs}
    if left := sorted(f"{prefix}.{name}" for name in others if f"{prefix}.{name}" in tensors):
        report.problem(
            shortened(left), f"belongs to a layer of another type, and this is {scheme.name}"
        )
    if scheme.name == FLOAT:
        return
    if prefix.rpartition(".")[2] in VOCABULARY:
        report.problem(
            f"{prefix}.weight", f"is {scheme.name}; embeddings and LM heads are {FLOAT} only"
        )
    if len(weight.shape) != 2:
        report.problem(f"{prefix}.weight", f"has shape {list(weight.shape)} and must be a matrix")
        return
    rows, columns = specs[0].extent.matrix((weight.shape[0], weight.shape[1]))
    if reason := scheme.refusal_of_groups(layout.group_size):
        report.problem(f"{prefix}.weight", f"is {scheme.name}: {reason}")
    for spec in specs:
        name = f"{prefix}.{spec.name}"
        tensor = tensors.get(name)
        if tensor is None:
            if not spec.is_optional:
                report.problem(name, f"is missing: {scheme.name} needs it. Export the model again")
            continue
        expected = spec.extent.shapes(rows, columns, layout.group_size)
        if tensor.shape not in expected:
            told = " or ".join(str(list(shape)) for shape in expected)
            report.problem(name, f"has shape {list(tensor.shape)} and must have {told}")
        if not spec.accepts(tensor.dtype):
            report.problem(
                name, f"holds {dtype_name(tensor.dtype)} and must hold {spec.accepted()}"
            )
