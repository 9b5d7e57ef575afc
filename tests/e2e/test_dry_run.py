"""`vllm-davinci dry-run`: one process models a rank of several, with modelled times."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci.planner.deployments.table import deployment
from vllm_davinci_testing.engines import model_zoo
from vllm_davinci_testing.engines.server_process import FORKED_WORKERS, answers
from vllm_davinci_testing.processes.forked import Ended, run_alone, run_command
from vllm_davinci_testing.processes.programs import run_to_end
from vllm_davinci_testing.processes.ranks import free_port
from vllm_davinci_testing.processes.waiting import becomes_true

LIMIT_S = 300
# A split step's all-to-all moves the share of rows that a phantom rank's counts would give.
ALL_TO_ALL_IN_UBATCHES = {
    "moe_communication": "all_to_all",
    "dbo": {"enabled": True, "split": "token", "min_total_tokens_to_split": 100},
}
BESIDE = {
    "weight_prefetch_config": {"enabled": True, "min_bytes": 0},
    "torchair_graph_config": {"enable_multistream_moe": True},
}
RANKS = ("--tensor-parallel-size=4", "--enable-expert-parallel")
UTILIZATION = 0.92  # vLLM's default
LARGE_VOCABULARY = '--hf-overrides={"vocab_size": 1000000000}'
# Steps of 32 prompts leave no memory for a cache of given size.
LARGE_STEP = ("--requests=32", "--prompt-tokens=1000", "--output-tokens=2", "--enforce-eager")


def cache_of(gib: float) -> str:
    return f"--kv-cache-memory-bytes={int(gib * 2**30)}"


COMMAND = "vllm_davinci.meta"


def arguments_of(model: Path, *options: str) -> list[str]:
    work = ["--requests=3", "--prompt-tokens=128", "--output-tokens=4"]
    return ["dry-run", f"--model={model}", "--chip=ascend910b2", *work, *options]


def dry_run(model: Path, *options: str) -> Ended:
    """Runs a dry-run in a fork of a process that has imported vLLM."""
    return run_command(COMMAND, *arguments_of(model, *options), limit_s=LIMIT_S)


def dry_run_of_its_own(model: Path, *options: str) -> Ended:
    """Runs a dry-run as users do: in an interpreter without prior imports."""
    done = run_to_end([sys.executable, "-m", COMMAND, *arguments_of(model, *options)], LIMIT_S)
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def config_only(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of tiny_deepseek without weights and tokenizer."""
    directory = tmp_path_factory.mktemp("config")
    shutil.copy(repository / "checkpoints" / "tiny_deepseek" / "config.json", directory)
    return directory


@pytest.fixture(scope="module")
def int8_config_only(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of tiny_deepseek's int8 export without weights."""
    directory = tmp_path_factory.mktemp("int8_config")
    source = repository / "checkpoints" / "tiny_deepseek"
    Exporter(source, directory, "W8A8_DYNAMIC", torch.bfloat16, {}).run(lambda _: None)
    for weights in directory.glob("*.safetensors*"):
        weights.unlink()
    return directory


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def modelled(report: dict[str, Any]) -> dict[str, Any]:
    """Returns the report without what depends on this host."""
    for step in report["steps"]:
        step.pop("wall_seconds")
        step.pop("variants")
    return {key: report[key] for key in ("machine", "world_size", "memory", "steps")}


@pytest.mark.parametrize(
    "first", [dry_run, pytest.param(dry_run_of_its_own, marks=pytest.mark.nightly("planning"))]
)
def test_one_rank_of_four_is_modelled_from_a_config_alone_twice_alike(first, config_only, tmp_path):
    reports, timelines = [], []
    for run, start in (("first", first), ("second", dry_run)):
        files = [f"--json={tmp_path / run}.json", f"--trace={tmp_path / run}.timeline"]
        files += ["--sensitivity"] if run == "second" else []  # --sensitivity changes nothing else
        done = start(config_only, *RANKS, *files, f"--additional-config={json.dumps(BESIDE)}")
        assert done.status == 0, done.stderr[-3000:]
        assert "All times are modelled" in done.stdout
        assert ("machines: each of" in " ".join(done.stdout.split())) == (run == "second")
        reports.append(modelled(json.loads((tmp_path / f"{run}.json").read_text())))
        timelines.append((tmp_path / f"{run}.timeline").read_bytes())
    assert reports[0] == reports[1]
    assert timelines[0] == timelines[1]

    report = reports[0]
    assert report["world_size"] == 4
    assert [step["tokens"] for step in report["steps"]] == [[128] * 3, *[[1] * 3] * 3]
    memory = report["memory"]
    assert 0 < memory["weight_bytes"] < memory["cache_bytes"] < memory["total_bytes"] == 64 << 30
    # All parts together stay within the limit, and the cache has its planned size.
    parts = ("weight_bytes", "activation_bytes", "other_bytes", "graph_bytes", "piece_bytes")
    assert memory["piece_bytes"] < 2 << 20  # segments are expandable
    used = memory["cache_bytes"] + sum(memory[part] for part in parts)
    assert used <= UTILIZATION * memory["total_bytes"]
    shape = json.loads((config_only / "config.json").read_text())
    token_bytes = (
        2 * shape["num_hidden_layers"] * (shape["kv_lora_rank"] + shape["qk_rope_head_dim"])
    )
    assert memory["cache_bytes"] // token_bytes - memory["cache_tokens"] in range(1024)
    assert (memory["token_bytes"], memory["request_bytes"]) == (token_bytes, 0)
    for step in report["steps"]:
        found = step["modelled"]
        assert 0 < found["communication_ps"] < found["any_ps"] <= found["host_ps"]
        assert found["busy_ps"]["links_0"] > 0
        assert step["exposed_communication_ps"] <= found["communication_ps"]
        assert step["overlap_bound_ps"] <= found["host_ps"]
    tasks = [event for event in json.loads(timelines[0]) if event["ph"] == "X"]
    assert any("FusedInferAttention" in task["name"] for task in tasks)
    streams = {task["tid"]: Counter[str]() for task in tasks}
    for task in tasks:
        streams[task["tid"]][task["name"]] += task["cat"] != "event" or "event wait" in task["name"]
    main = [found for found in streams.values() if any("FusedInfer" in name for name in found)]
    shared = [found for found in streams.values() if found["aclnnSwiGlu"] and found not in main]
    # Each stage of the shared experts waits for the routed experts' stage that it overlaps.
    assert shared and all(found["event wait"] == 3 * found["aclnnSwiGlu"] for found in shared)
    # Weights are prefetched on a stream of their own, so that no other work waits for them.
    assert not any(found["prefetch"] for found in main)
    beside = [found for found in streams.values() if found not in [*main, *shared]]
    assert any(set(+found) == {"event wait", "prefetch"} for found in beside)


@pytest.mark.thorough
def test_some_chunks_of_a_prompt_tell_the_time_of_all(config_only: Path, tmp_path: Path) -> None:
    work = ("--requests=1", "--prompt-tokens=960", "--output-tokens=4")
    reports = {}
    for samples in (None, 3, 15):
        path = tmp_path / f"{samples}.json"
        sampled = () if samples is None else (f"--sampled-chunks={samples}",)
        limits = ("--max-num-batched-tokens=64", "--max-model-len=1024", f"--json={path}")
        done = dry_run(config_only, *RANKS, *work, *limits, *sampled)
        assert done.status == 0, done.stderr[-3000:]
        reports[samples] = json.loads(path.read_text())
    chunks = [step for step in reports[None]["steps"] if sum(step["tokens"]) == 64]
    assert len(chunks) == 15 and reports[None]["prompt"] is None
    whole = sum(step["modelled"]["host_ps"] for step in chunks) / 10**12
    for samples in (3, 15):
        prompt = reports[samples]["prompt"]
        assert (prompt["chunks"], len(prompt["modelled_chunks"])) == (15, samples)
        # The host limits this model's speed, and it waits for each chunk that is modelled alone.
        assert prompt["time_s"] == pytest.approx(whole, rel=0.03)
        # Decodes after the sampled prompt take the same time.
        decodes = [reports[each]["steps"][-1]["modelled"]["host_ps"] for each in (None, samples)]
        assert decodes[0] == pytest.approx(decodes[1], rel=0.01)


def test_the_largest_steps_run_beside_the_captured_graphs(config_only: Path) -> None:
    source = f"""
        import runpy, sys
        from vllm_davinci.planner.dry_run.executor import PhantomWorker

        run = PhantomWorker._run_largest_steps

        def told(worker, captured_bytes):
            print("captured:", captured_bytes, worker.model_runner.graphs.captured_bytes)
            run(worker, captured_bytes)

        PhantomWorker._run_largest_steps = told
        sys.argv = {[COMMAND, *arguments_of(config_only)]!r}
        runpy.run_module({COMMAND!r}, run_name="__main__", alter_sys=True)
        """
    done = run_alone(source)
    assert done.status == 0, done.output[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("captured:")]
    _, passed, captured = line.split()
    assert int(passed) == int(captured) > 0


@pytest.mark.nightly("planning")
def test_a_rank_of_64_has_all_heads_of_a_large_model(config_only: Path, tmp_path: Path) -> None:
    """64 data-parallel ranks, each with all 128 heads, as usual for decode engines."""
    config = json.loads((config_only / "config.json").read_text())
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 128)
    model = write_config(tmp_path / "model", {**config, **heads, "n_routed_experts": 64})
    options = ["--chip=ascend910c", "--topology=supernode", "--enable-expert-parallel"]
    report = tmp_path / "report.json"
    # The published command has other hosts' addresses and a server's options.
    published = "--data-parallel-size 64 --data-parallel-size-local 16 --headless --port 8006"
    served = ["--served-model-name", "auto", "--data-parallel-address", "10.0.0.1"]
    done = dry_run(model, *options, *published.split(), *served, f"--json={report}")
    assert done.status == 0, done.stderr[-3000:]
    assert (
        "--data-parallel-address, --data-parallel-size-local, --headless, --port do nothing here"
    ) in done.stderr
    found = json.loads(report.read_text())
    assert found["world_size"] == 64
    assert found["layout"]["data_parallel_size"] == 64
    assert all(step["modelled"]["communication_ps"] > 0 for step in found["steps"])


@pytest.mark.nightly("planning")
def test_experts_of_two_data_parallel_ranks_are_reached_by_fused_launches(tmp_path: Path) -> None:
    """On a 910B, fused launches need groups of at least 16 ranks: 2 data-parallel ranks of 8."""
    config = model_zoo.BY_NAME["qwen3_moe_hidden1024"].config()
    config.update({"num_attention_heads": 8, "num_key_value_heads": 8, "num_experts": 16})
    config.architectures = ["Qwen3MoeForCausalLM"]
    model = write_config(tmp_path / "model", config.to_dict())
    timeline = tmp_path / "timeline.json"
    done = dry_run(
        model,
        *("--topology=two-meshes-of-8", "--tensor-parallel-size=8", "--data-parallel-size=2"),
        *("--enable-expert-parallel", f"--trace={timeline}"),
        f"--additional-config={json.dumps({'moe_communication': 'fused'})}",
    )
    assert done.status == 0, done.stderr[-3000:]
    names = {event["name"] for event in json.loads(timeline.read_text()) if event["ph"] == "X"}
    assert {"expert_dispatch", "expert_combine"} <= names, names


@pytest.mark.nightly("planning")
def test_a_deployment_of_the_table_is_run_by_its_name(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--deployment=qwen3-0.6b-a2", "--output-tokens=2", f"--json={report}"]
    options.append("--enable-prefix-caching")  # each prompt is computed all the same
    done = run_command(COMMAND, "dry-run", *options, limit_s=LIMIT_S)
    assert done.status == 0, done.stderr[-3000:]
    found = json.loads(report.read_text())
    assert found["machine"]["chip"] == "ascend910b3"
    assert [step["tokens"] for step in found["steps"]] == [[1024] * 4, [1] * 4]
    assert not Path(found["model"]).exists()  # the directory existed during the run


@pytest.mark.nightly("planning")
def test_rows_of_deepseek_v4_take_the_memory_that_its_config_implies(tmp_path: Path) -> None:
    """Padding adds little per token; windows may start and end inside a page."""
    report = tmp_path / "report.json"
    work = ("--requests=1", "--prompt-tokens=16", "--output-tokens=1", "--enforce-eager")
    row = "--deployment=deepseek-v4-flash-a2-tp8"
    done = run_command(COMMAND, "dry-run", row, *work, f"--json={report}", limit_s=LIMIT_S)
    assert done.status == 0, done.stderr[-3000:]
    memory = json.loads(report.read_text())["memory"]
    config = deployment("deepseek-v4-flash-a2-tp8").checkpoint.configuration()
    size, key, ratios = config["head_dim"], config["index_head_dim"], config["compress_ratios"]
    overlapping, others = ratios.count(4), ratios.count(128)
    # Rows and keys have 2 bytes per entry; projections, values and gates have 4.
    token = overlapping * 2 * (size + key) / 4 + others * 2 * size / 128
    windows = len(ratios) * config["sliding_window"] * 2 * size
    states = overlapping * 8 * 4 * 4 * (size + key) + others * 128 * 2 * 4 * size
    print("COUNTED", token, memory["token_bytes"], windows + states, memory["request_bytes"])
    assert token <= memory["token_bytes"] <= 1.02 * token
    assert windows + states <= memory["request_bytes"] <= 1.5 * (windows + states)


@pytest.fixture(scope="module")
def small_chip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a chip file with a quarter of the memory, most of it for collectives' buffers."""
    file = tmp_path_factory.mktemp("chip") / "small.toml"
    memory = 'memory = { value = 12, unit = "GiB", source = "of this test" }'
    file.write_text(f'based_on = "ascend910b2"\nsoc = "Ascend910B2"\n{memory}\n')
    return file


def in_ubatches(chip: Path, *options: str) -> list[str]:
    """Returns options that split most of each step of a four-layer DeepSeek-R1."""
    return [
        *("dry-run", "--deployment=deepseek-r1-dual-batch-overlap-published-order"),
        *(f"--chip={chip}", '--hf-overrides={"num_hidden_layers": 4}', "--max-model-len=8192"),
        *("--tensor-parallel-size=8", "--data-parallel-size=2", "--enable-expert-parallel"),
        *("--max-num-batched-tokens=16384", "--max-num-seqs=4", *options),
    ]


@pytest.mark.nightly("planning")
def test_a_step_in_ubatches_that_takes_more_than_a_whole_one_has_its_memory(small_chip, tmp_path):
    report = tmp_path / "report.json"
    options = in_ubatches(small_chip, "--gpu-memory-utilization=0.7", f"--json={report}")
    done = run_command(COMMAND, *options, limit_s=LIMIT_S)
    assert done.status == 0, done.stderr[-3000:]
    found = json.loads(report.read_text())
    assert [step["tokens"] for step in found["steps"]] == [[4096] * 4, [1] * 4]
    memory = found["memory"]
    by_kind = memory["largest_steps"]
    whole = max(size for name, size in by_kind.items() if name.endswith("whole"))
    split = max(size for name, size in by_kind.items() if "cut at" in name)
    assert whole < 0.9 * split
    # Steps of all kinds ran with the planned cache; none needed more memory than planned.
    assert {name.partition(" of ")[2].partition(",")[0] for name in by_kind} == {
        "prompts",
        "decodes and a prompt",
        "decodes",
    }
    assert split <= memory["activation_bytes"]
    assert memory["cache_bytes"] > 1 << 30


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--gpu-memory-utilization=0.7", "--kv-cache-memory-bytes=5200000000"],
            "of npu:0 after the weights, and the largest step takes 3.",
        ),
        (["--gpu-memory-utilization=0.45"], "The KV cache does not fit: one request of 8192"),
    ],
)
def test_what_has_no_memory_for_a_step_in_ubatches_is_refused_at_the_start(
    small_chip: Path, options: list[str], message: str
) -> None:
    done = run_command(COMMAND, *in_ubatches(small_chip, *options), limit_s=LIMIT_S)
    assert done.status == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("vllm-davinci dry-run: ") and message in last, done.stderr[-3000:]


@pytest.mark.nightly("planning")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chip=ascend910b5"], "there is no chip 'ascend910b5'. Did you mean"),
        (["--tensor-parallel-size=16"], "16 ranks do not fit into topology node-of-8"),
        (
            [*RANKS, '--additional-config={"dynamic_eplb": true}'],
            "moves weights between real ranks",
        ),
        (["--routing=0.5", *RANKS], "expected 1 to 4, the range of the busiest of 4 expert ranks"),
        (["--requests=0"], "must be at least 1"),
        (["--sampled-chunks=2"], "--sampled-chunks is at least 3"),
        ([*RANKS, "--sampled-chunks=3", cache_of(0.0017)], "Lower --concurrency"),
        (["--serve", "--json=report.json"], "--serve has no report"),
        ([*RANKS, LARGE_VOCABULARY], "buffers of the start do not fit into 64 GiB of each"),
        ([*RANKS, cache_of(63.12), *LARGE_STEP], "and the largest step takes 10"),
    ],
)
def test_impossible_settings_are_refused_with_advice(config_only, options, message):
    done = dry_run(config_only, *options)
    assert done.status in (1, 2)
    assert message in " ".join(done.stderr.split()), done.stderr[-2000:]


@pytest.mark.nightly("planning")
@pytest.mark.parametrize(
    ("layout", "sends"),
    [
        (
            [
                *("--tensor-parallel-size=2", "--data-parallel-size=2", "--enable-expert-parallel"),
                f"--additional-config={json.dumps(ALL_TO_ALL_IN_UBATCHES)}",
            ],
            {"ubatch 0", "ubatch 1"},
        ),
        (["--tensor-parallel-size=2", "--pipeline-parallel-size=2"], set()),
    ],
    ids=["data parallel", "pipeline parallel"],
)
def test_other_layouts_serve_requests_in_a_closed_loop(int8_config_only, tmp_path, layout, sends):
    """sends: labels of the ubatches that send rows to experts on other ranks"""
    report, timeline = tmp_path / "report.json", tmp_path / "timeline.json"
    work = ["--prompt-tokens=128,64", "--concurrency=2", "--quantization=ascend"]
    # A server's front-end options are accepted and have no effect, so that its command can be used.
    front_end = ["--port=1", "--served-model-name=small"]
    files = [f"--json={report}", f"--trace={timeline}"]
    done = dry_run(int8_config_only, *layout, *work, *front_end, *files)
    assert done.status == 0, done.stderr[-3000:]
    found = json.loads(report.read_text())
    assert found["world_size"] == 4
    tasks = [event for event in json.loads(timeline.read_text()) if event["ph"] == "X"]
    sent = [task for task in tasks if task["name"].startswith("all_to_all")]
    assert {task["args"].get("label", "") for task in sent} - {""} == sends
    # The first two requests end after four tokens; the third begins then.
    tokens = [step["tokens"] for step in found["steps"]]
    assert tokens == [[128, 64], *[[1, 1]] * 3, [128], *[[1]] * 3]
    served = found["served"]
    assert served["completed"] == 3
    total_s = sum(step["modelled"]["host_ps"] for step in found["steps"]) / 10**12
    assert served["duration_s"] == pytest.approx(total_s)
    assert served["request_throughput"] == pytest.approx(3 / total_s)
    assert 0 < served["mean_tpot_ms"] < served["mean_ttft_ms"]


@pytest.mark.nightly("planning")
def test_a_server_answers_in_modelled_time(config_only: Path, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", COMMAND, "dry-run", f"--model={config_only}"]
    options = ["--chip=ascend910b2", "--serve", "--time-scale=20", f"--port={port}", *RANKS]
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, *options], env={**os.environ, **FORKED_WORKERS}, stdout=output, stderr=output
        )
    try:
        assert becomes_true(lambda: is_healthy(port, server), LIMIT_S)
        asked = {"model": str(config_only), "prompt": "w5 w6 w7", "max_tokens": 5}
        begin = time.monotonic()
        answer = httpx.post(
            f"{address}/v1/completions", json=asked | {"ignore_eos": True}, timeout=LIMIT_S
        )
        seconds = time.monotonic() - begin
    finally:
        server.terminate()
        server.wait(LIMIT_S)
    assert answer.status_code == 200, log.read_text()[-3000:]
    assert answer.json()["usage"]["completion_tokens"] == 5
    assert answer.json()["choices"][0]["text"].split() == ["w0"] * 5
    # Five eager steps of 1 to 3 modelled ms each.
    assert seconds > 5 * 0.001 * 20


def is_healthy(port: int, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, "the server has ended"
    return answers(port)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    done = dry_run(tmp_path)
    assert done.status == 2
    assert "has no config.json" in done.stderr
