"""`vllm serve` options in a dry-run: options without effect are named, impossible ones refused."""

from pathlib import Path

import pytest

from vllm_davinci.planner.dry_run.engine import start_engine
from vllm_davinci.planner.dry_run.engine_arguments import PhantomEngineArgs, parse
from vllm_davinci.planner.dry_run.workload import Workload
from vllm_davinci.planner.errors import DryRunError
from vllm_davinci.vnpu.timing import load_machine

TINY_LLAMA = Path(__file__).parents[4] / "checkpoints" / "tiny_llama"
MODEL = f"--model={Path(__file__).parent}"  # nothing is downloaded
PUBLISHED = (
    "--headless --data_parallel_size 4 --data-parallel-size-local 2 -dpr 2 --port 8006 "
    "--data_parallel_address=10.0.0.1 --data-parallel-rpc-port 13389 -tp=2 --max_num_seqs 8 "
    "--distributed-executor-backend=ray --load-format safetensors --served-model-name auto"
)


def arguments_of(*given: str) -> PhantomEngineArgs:
    machine = load_machine("ascend910c", "supernode")
    return PhantomEngineArgs.for_machine(
        parse([MODEL, "--max-num-seqs=1"], given), "balanced", machine
    )


def test_a_published_command_is_accepted_and_options_without_effect_are_named(capsys):
    found = arguments_of(*PUBLISHED.split())
    assert found.world_size == 8
    assert (found.layout.data_parallel_size, found.max_num_seqs) == (4, 8)
    # The engine must not get other ranks' addresses, or it would look for them.
    assert found.data_parallel_address is None
    assert found.data_parallel_size_local is None
    assert found.distributed_executor_backend is None
    assert found.load_format == "dummy"
    (told,) = capsys.readouterr().err.strip().splitlines()
    assert told == (
        "vllm-davinci dry-run: --data-parallel-address, --data-parallel-rpc-port, "
        "--data-parallel-size-local, --data-parallel-start-rank, --distributed-executor-backend, "
        "--headless, --load-format, --port do nothing here: one rank runs, and no "
        "weights are read."
    )


def test_front_end_options_have_an_effect_with_a_front_end(capsys):
    given = ["--port=8006", "--host=::", "--reasoning-parser=qwen3"]
    assert parse([MODEL], given, has_server=True).reasoning_parser == "qwen3"
    assert capsys.readouterr().err == ""
    assert not parse([MODEL], given).reasoning_parser  # a reasoning parser would need a tokenizer
    assert "--host, --port, --reasoning-parser do nothing here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--kv-transfer-config.kv_role=kv_both"],
            "--kv-transfer-config needs another engine: leave it out",
        ),
        (["--enable-eplb"], "--enable-eplb moves weights between real ranks"),
        (["--worker-cls=own.Worker"], "--worker-cls is set by dry-run itself: leave it out"),
        (
            ["--distributed-executor-backend=external_launcher"],
            "is not supported by dry-run: leave it out",
        ),
        (["--data-parallel-size=1024"], "1024 ranks do not fit into topology supernode"),
    ],
)
def test_what_needs_other_ranks_or_engines_is_refused_by_name(given, message):
    with pytest.raises(Exception, match=message) as raised:
        arguments_of(*given)
    assert type(raised.value).__name__ in (DryRunError.__name__, "MachineError")


def test_requests_longer_than_the_model_name_their_options() -> None:
    machine = load_machine("Ascend910B3", "supernode")  # a SoC name, as `doctor` prints it
    work = Workload(requests=1, concurrency=1, prompt_tokens=(1024,), output_tokens=(4,))
    with pytest.raises(DryRunError, match=r"has 1028 tokens, and the model 1024 positions\. Lower"):
        start_engine(str(TINY_LLAMA), work, "balanced", [], machine)
