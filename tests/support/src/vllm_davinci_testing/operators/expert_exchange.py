"""The definition of an exchange with experts, which begins a rank's program."""

# On this chip the operators accept any number of ranks above one.
CHIP = {"VNPU_SOC": "Ascend910_9391"}

# Every rank knows all ranks' tokens, so that it can compute its expected rows.
DEFINITION = """
import torch_npu

HIDDEN, MOST_TOKENS = 1024, 7
name = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(rank)


def tokens_of(r, experts, k, dtype, size=None):
    generator = torch.Generator().manual_seed(1 + r)
    size = 1 + (3 * r + 2) % MOST_TOKENS if size is None else size
    x = torch.randn(size, HIDDEN, generator=generator).to(dtype)
    scores = torch.rand(size, experts, generator=generator)
    return x, scores.topk(k).indices.int(), scores.topk(k).values.float()


def expert(x, number):
    return (x.float() * (number + 1) / 8).to(x.dtype)


def rows_for(r, everyone, places, masks=None):
    # (expert, source, token, choice) of the rows of rank r, in order.
    experts, shared, shared_ranks = places
    local = experts // (world - shared_ranks)
    first = (r - shared_ranks) * local
    rows = []
    for e in range(first, first + local) if r >= shared_ranks else [None]:
        for source, (x, ids, _) in enumerate(everyone):
            for t in range(len(x)):
                active = [i for i in range(ids.shape[1]) if masks is None or masks[source][t][i]]
                if e is not None:
                    rows += [(e, source, t, i) for i in active if ids[t, i] == e]
                elif active:
                    copies = shared_ranks // shared
                    if source % copies == r % copies:
                        rows.append((r // copies, source, t, ids.shape[1] + r // copies))
    return rows


def options(places):
    experts, shared, shared_ranks = places
    return dict(group_ep=name, ep_world_size=world, ep_rank_id=rank, moe_expert_num=experts,
                shared_expert_num=shared, shared_expert_rank_num=shared_ranks,
                global_bs=MOST_TOKENS * world)


def equal(npu, cpu, what):
    assert torch.equal(npu.cpu(), cpu), (what, npu.cpu(), cpu)
"""
