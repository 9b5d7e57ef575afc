"""Fused dispatch and combine between processes equal the same arithmetic in plain torch."""

import pytest

from vllm_davinci_testing.operators.expert_exchange import CHIP, DEFINITION
from vllm_davinci_testing.processes.ranks import check_ranks, run_ranks


def test_rows_come_to_their_experts_and_weighted_sums_go_back():
    check_ranks(
        DEFINITION
        + """
for dtype in (torch.bfloat16, torch.float16):
    for places, k in (((4 * world, 0, 0), 3), ((2 * (world - 1), 1, 1), 2)):
        shared = places[1] if places[2] else 0
        everyone = [tokens_of(r, places[0], k, dtype) for r in range(world)]
        x, ids, weights = everyone[rank]
        for v2 in (True, False):
            dispatch = torch_npu.npu_moe_distribute_dispatch
            combine = torch_npu.npu_moe_distribute_combine
            if v2:
                dispatch = torch_npu.npu_moe_distribute_dispatch_v2
                combine = torch_npu.npu_moe_distribute_combine_v2
            out = dispatch(x.npu(), ids.npu(), expert_token_nums_type=int(v2), **options(places))
            rows, _, assist, per_expert, ends, _, _ = out
            wanted = rows_for(rank, everyone, places)
            equal(rows[: len(wanted)], torch.stack([everyone[s][0][t] for _, s, t, _ in wanted])
                  if wanted else rows[:0].cpu(), "rows")
            local = 1 if rank < places[2] else places[0] // (world - places[2])
            first = 0 if rank < places[2] else (rank - places[2]) * local
            numbers = [w[0] for w in wanted]
            if rank < places[2]:
                counts = torch.tensor([len(wanted)])
            else:
                counts = torch.tensor([numbers.count(first + e) for e in range(local)])
            equal(per_expert, counts if v2 else counts.cumsum(0), "counts")
            assert ends[local * world - 1].item() == len(wanted)
            if v2:
                triples = torch.tensor([w[1:] for w in wanted], dtype=torch.int32)
                equal(assist[: 3 * len(wanted)], triples.flatten(), "assist")
            # Rows behind the last stay what they are: what is in them must not matter.
            results = torch.full_like(rows.cpu(), float("nan"))
            for row, (e, s, t, _) in enumerate(wanted):
                factor = 100 + e if rank < places[2] else e
                results[row] = expert(everyone[s][0][t], factor)
            sums = combine(results.npu(), ids.npu(), assist, ends, weights.npu(),
                           **options(places))
            expected = torch.zeros(x.shape)
            for i in range(k):
                expected += torch.stack(
                    [expert(x[t], ids[t, i].item()) for t in range(len(x))]
                ).float() * weights[:, i : i + 1]
            for s in range(shared):
                expected += expert(x, 100 + s).float()
            equal(sums, expected.to(dtype), ("sums", dtype, places, v2))
print("equal")
""",
        3,
        **CHIP,
    )


def test_two_shared_experts_have_copies_on_two_ranks_each():
    check_ranks(
        DEFINITION
        + """
places, k = (6, 2, 4), 2
everyone = [tokens_of(r, places[0], k, torch.bfloat16) for r in range(world)]
x, ids, weights = everyone[rank]
out = torch_npu.npu_moe_distribute_dispatch_v2(x.npu(), ids.npu(), **options(places))
rows, _, assist, per_expert, ends, _, _ = out
wanted = rows_for(rank, everyone, places)
assert per_expert.sum().item() == len(wanted)
equal(rows[: len(wanted)], torch.stack([everyone[s][0][t] for _, s, t, _ in wanted]), "rows")
sums = torch_npu.npu_moe_distribute_combine_v2(
    rows, ids.npu(), assist, ends, weights.npu(), **options(places))
expected = torch.zeros(x.shape)
for i in range(k):
    expected += x.float() * weights[:, i : i + 1]
for _ in range(2):
    expected += x.float()
equal(sums, expected.bfloat16(), "sums")
""",
        6,
        **CHIP,
    )


def test_inactive_tokens_and_choices_are_left_out():
    check_ranks(
        DEFINITION
        + """
places, k = (2 * world, 0, 0), 3
everyone = [tokens_of(r, places[0], k, torch.bfloat16, MOST_TOKENS) for r in range(world)]
x, ids, weights = everyone[rank]
poisoned = x.clone()
poisoned[4:] = float("nan")  # of inactive tokens: nobody may see it
shared = torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
for masks in (
    [torch.arange(MOST_TOKENS) < 4 - r for r in range(world)],
    [torch.rand(MOST_TOKENS, k, generator=torch.Generator().manual_seed(r)) < 0.5
     for r in range(world)],
):
    whole = [m if m.dim() == 2 else m.unsqueeze(1).expand(-1, k) for m in masks]
    mask = masks[rank].npu()
    given = poisoned if masks[0].dim() == 1 else x
    out = torch_npu.npu_moe_distribute_dispatch_v2(
        given.npu(), ids.npu(), x_active_mask=mask, **options(places))
    rows, _, assist, per_expert, ends, _, _ = out
    wanted = rows_for(rank, everyone, places, whole)
    assert per_expert.sum().item() == len(wanted)
    if wanted:
        equal(rows[: len(wanted)], torch.stack([everyone[s][0][t] for _, s, t, _ in wanted]), "x")
    sums = torch_npu.npu_moe_distribute_combine_v2(
        rows, ids.npu(), assist, ends, weights.npu(), x_active_mask=mask,
        shared_expert_x=shared.npu(), **options(places))
    expected = torch.zeros(x.shape)
    for i in range(k):
        expected += (x.float() * weights[:, i : i + 1]).masked_fill(~whole[rank][:, i : i + 1], 0)
    equal(sums, (expected + shared.float()).bfloat16(), "sums")
""",
        2,
        **CHIP,
    )


def test_dynamically_quantized_rows_have_a_scale_each():
    check_ranks(
        DEFINITION
        + """
from vllm_davinci.operators.quantization import dynamic_quant_in_launch

places, k = (2 * world, 0, 0), 2
everyone = [tokens_of(r, places[0], k, torch.bfloat16) for r in range(world)]
x, ids, weights = everyone[rank]
smooth = torch.rand(places[0], HIDDEN, generator=torch.Generator().manual_seed(5)) + 0.5
for scales in (None, smooth):
    out = torch_npu.npu_moe_distribute_dispatch_v2(
        x.npu(), ids.npu(), scales=None if scales is None else scales.npu(), quant_mode=2,
        **options(places))
    rows, row_scales = out[:2]
    wanted = rows_for(rank, everyone, places)
    wide = torch.stack([everyone[s][0][t].float() for _, s, t, _ in wanted])
    if scales is not None:
        wide = wide * scales[[e for e, *_ in wanted]]
    integers, integer_scales = dynamic_quant_in_launch(wide)
    equal(rows[: len(wanted)], integers, "int8")
    equal(row_scales[: len(wanted)], integer_scales, "scales")
""",
        2,
        **CHIP,
    )


@pytest.mark.parametrize("schedule", ["threads", "fuzz:3"])
def test_an_exchange_larger_than_a_round_runs_in_stream_order(schedule: str):
    check_ranks(
        DEFINITION
        + """
MOST_TOKENS = 512
places, k = (2 * world, 0, 0), 4
x, ids, weights = tokens_of(rank, places[0], k, torch.bfloat16, MOST_TOKENS)
side = torch.npu.Stream()
given, chosen, scales = x.npu(), ids.npu(), weights.npu()
for step in range(3):
    filled = given * (step + 1)
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        rows, _, assist, _, ends, _, _ = torch_npu.npu_moe_distribute_dispatch_v2(
            filled, chosen, **options(places))
        sums = torch_npu.npu_moe_distribute_combine_v2(
            rows, chosen, assist, ends, scales, **options(places))
    torch.npu.current_stream().wait_stream(side)
    expected = torch.zeros(x.shape)
    for i in range(k):
        expected += (x * (step + 1)).float() * weights[:, i : i + 1]
    equal(sums, expected.bfloat16(), step)
""",
        2,
        VNPU_SCHEDULE=schedule,
        VNPU_RACES="raise",
        **CHIP,
    )


def test_a_missing_wait_before_a_dispatch_is_a_race():
    ended = run_ranks(
        DEFINITION
        + """
places = (2 * world, 0, 0)
x, ids, weights = tokens_of(rank, places[0], 2, torch.bfloat16, 4)
given, chosen = x.npu(), ids.npu()
torch.npu.synchronize()
filled = given * 2
with torch.npu.stream(torch.npu.Stream()):
    torch_npu.npu_moe_distribute_dispatch_v2(filled, chosen, **options(places))
torch.npu.synchronize()
""",
        2,
        VNPU_RACES="raise",
        **CHIP,
    )
    assert all(rank.status != 0 for rank in ended)
    assert "expert_dispatch" in ended[0].output and "race" in ended[0].output.lower()
