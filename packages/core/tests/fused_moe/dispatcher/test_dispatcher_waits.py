"""Ranks wait only for rows sent to their experts."""

import json
from pathlib import Path

from vllm_davinci.vnpu import timeline
from vllm_davinci_testing.processes.ranks import check_ranks

RANK_PROGRAM = Path(__file__).with_name("moe_rank.py")


def test_a_wait_for_row_counts_times_out_and_names_the_layer():
    options = {"expert_tensor_parallel_size": 1, "moe_communication": "all_to_all"}
    variant = {"last_is_absent": True, "options": options}
    setting = {"tensor": 2, "data": 1, "variants": [variant]}
    # A long limit, so that the collective itself does not time out first.
    limits = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3", "HCCL_EXEC_TIMEOUT": "60"}
    waiting, _ = check_ranks(RANK_PROGRAM, 2, json.dumps(setting), **limits)
    (said,) = (line for line in waiting.splitlines() if line.startswith("after "))
    assert 2 <= float(said.split()[1]) < 30
    assert said.partition(": ")[2] == (
        "model.layers.0.mlp.experts: rank 0 of group 'ep' timed out after 2.1 s waiting for the "
        "row counts of the 2 ranks of the group. One of them has failed or is late: look for its "
        "error in the log above. A longer wait: VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=SECONDS."
    )


PACE = "aclnnMatmul=300000,all_to_all=300000/MiB"


def test_rows_travel_while_the_other_ubatch_computes(tmp_path: Path):
    options = {
        "expert_tensor_parallel_size": 1,
        "moe_communication": "all_to_all",
        "dbo": {"enabled": True},
    }
    # Each of a rank's 100 tokens has 3 experts: about 150 rows of 4 KiB go to each rank.
    variant = {"ubatches": [200, 200], "options": options}
    setting = {"tensor": 2, "data": 1, "options": options, "variants": [variant]}
    environment = {"VNPU_SCHEDULE": "threads", "VNPU_PACE": PACE, "VNPU_TRACE": str(tmp_path)}
    check_ranks(RANK_PROGRAM, 2, json.dumps(setting), **environment)
    traced = timeline.read([tmp_path])
    assert len(traced.processes) == 2
    for process in traced.processes:
        tasks = [task for task in traced.tasks if task.process == process]
        # Counts, rows and results of two steps; the first step allocates.
        *_, counts, rows, _ = (
            task
            for task in tasks
            if task.name.startswith("all_to_all") and task.label == "ubatch 0"
        )
        assert (counts.bytes_written, rows.bytes_written > 500_000) == (64, True)
        products = [
            task.busy for task in tasks if task.name == "aclnnMatmul" and task.label == "ubatch 1"
        ]
        begin, end = rows.busy
        beside = sum(
            max(0, min(end, product_end) - max(begin, product_begin))
            for product_begin, product_end in products
        )
        # The counts reached the host before the device finished these products, and the rows waited
        # neither for the products nor for the other ubatch's counts.
        assert beside > 0.8 * (end - begin) > 100_000
