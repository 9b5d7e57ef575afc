"""aclnnAddLora multiplies each row by its slot's matrices, as plain torch does."""

import pytest
import torch
import torch_npu

from vllm_davinci_testing.processes.forked import run_alone


def expected(y, x, weight_b, indices, weight_a, layer, scale, offset):
    found = y.float().clone()
    for row, slot in enumerate(indices.tolist()):
        if slot < 0:
            continue
        shrunk = x[row].float()
        if weight_a is not None:
            shrunk = weight_a[slot, layer].float() @ shrunk
        found[row, offset : offset + weight_b.shape[2]] += (
            weight_b[slot, layer].float() @ shrunk
        ) * scale
    return found.to(y.dtype)


@pytest.mark.parametrize("with_a", [True, False], ids=["two_products", "one_product"])
@pytest.mark.parametrize(("rows", "offset"), [(1, 0), (13, 32)])
def test_rows_get_the_products_of_their_slots(rows: int, offset: int, with_a: bool):
    generator = torch.Generator().manual_seed(rows)
    rank = 16

    def made(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).half()

    y, x = made(rows, 160), made(rows, 48)
    weight_b = made(3, 2, 64, rank if with_a else 48)
    weight_a = made(3, 2, rank, 48) if with_a else None
    indices = torch.randint(-1, 3, (rows,), generator=generator, dtype=torch.int32)
    on_npu = [each if each is None else each.npu() for each in (y, x, weight_b, indices, weight_a)]
    options = {"layer_idx": 1, "scale": 0.5, "y_offset": offset, "y_slice_size": 64}
    for call in (torch_npu.npu_batch_gather_matmul, torch_npu.npu_batch_gather_matmul_):
        wanted = expected(y, x, weight_b, indices, weight_a, 1, 0.5, offset)
        found = call(*on_npu, **options).cpu()
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
        # Both calls accumulate into their first argument.
        assert torch.equal(on_npu[0].cpu(), found)
        without = indices == -1
        assert torch.equal(found[without], y[without])
        y = found


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("layer_idx=2", "layer_idx must name a layer"),
        ("y_slice_size=32", "y_slice_size must be"),
        ("y_offset=48", "within y's columns"),
        ("indices=torch.full((4,), 3, dtype=torch.int32)", "indices must name slots"),
    ],
)
def test_invalid_values_are_refused(change: str, told: str):
    ended = run_alone(
        f"""
        import torch, torch_npu
        torch.npu.set_device(0)
        none = torch.zeros(4, dtype=torch.int32)
        def call(layer_idx=0, y_offset=0, y_slice_size=64, indices=none):
            y, x = torch.zeros(4, 96).half().npu(), torch.zeros(4, 32).half().npu()
            b, a = torch.zeros(3, 2, 64, 16).half().npu(), torch.zeros(3, 2, 16, 32).half().npu()
            torch_npu.npu_batch_gather_matmul_(
                y, x, b, indices.npu(), a, layer_idx, 1.0, y_offset, y_slice_size
            )
            torch.npu.synchronize()
        call({change})
        """
    )
    assert told in ended.output
