"""A model with planted outliers stays within its loss budget, thanks to moved scales or more
bits.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.export.budget import LayerCost, Loss, choose, steps
from vllm_davinci.core.export.calibration import WINDOW_TOKENS, text_windows
from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci.core.export.plan import Plan, make_plan, num_tokens
from vllm_davinci.core.quantization.rounding import InputRange
from vllm_davinci.core.quantization.scheme import find_scheme
from vllm_davinci.core.weight_files.files import read_config, read_header

VOCABULARY, LAYERS = 64, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
OUTLIER = 3000.0  # relative to the other channels


def text(rows: int, columns: int) -> torch.Tensor:
    """int64 [rows, columns]; most tokens are the previous token plus 5, all others random."""
    steps = torch.full((rows, columns), 5)
    others = torch.rand(rows, columns) < 0.3
    steps[others] = torch.randint(VOCABULARY, (int(others.sum()),))
    return steps.cumsum(1) % VOCABULARY


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a model on `text`, with outliers in its linear layers' inputs."""
    directory = tmp_path_factory.mktemp("outliers")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SIZES)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Embedding and head share a random table, so that the layers must determine the next token.
        table = model.get_input_embeddings().weight.requires_grad_(False)
        table.normal_(0, 0.5)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=3e-3)
        for _ in range(100):
            tokens = text(8, 24)
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for layer in model.model.layers:
                for norm, readers in (
                    (layer.input_layernorm, [getattr(layer.self_attn, f"{p}_proj") for p in "qkv"]),
                    (layer.post_attention_layernorm, [layer.mlp.gate_proj, layer.mlp.up_proj]),
                ):
                    norm.weight[5] *= OUTLIER
                    for reader in readers:
                        reader.weight[:, 5] /= OUTLIER
                layer.mlp.up_proj.weight[7] *= OUTLIER
                layer.mlp.down_proj.weight[:, 7] /= OUTLIER
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def windows() -> list[torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return list(text(8, 96).split(1))


Planned = Callable[..., Plan]


@pytest.fixture(scope="module")
def planned(source: Path, windows: list[torch.Tensor]) -> Planned:
    def plan(kind: str, budget: float, is_smoothed: bool, stored: set[str] | None = None) -> Plan:
        names = set(read_header(source / "model.safetensors"))
        return make_plan(
            source,
            kind,
            read_config(source),
            windows,
            torch.bfloat16,
            budget,
            is_smoothed,
            names if stored is None else stored,
            lambda count: None,
        )

    return plan


def test_moved_scales_keep_a_budget_that_rounding_alone_exceeds(planned: Planned):
    bare = planned("W8A8", float("inf"), False)
    assert bare.loss.share > 0.03
    assert set(bare.types.values()) == {"W8A8"} and not bare.folds
    assert any("set --budget" in warning for warning in bare.warnings)
    smoothed = planned("W8A8", 0.03, True)
    assert smoothed.loss.share <= 0.03
    assert set(smoothed.types.values()) == {"W8A8"}
    assert not any("--budget" in warning for warning in smoothed.warnings)


def test_without_moved_scales_few_layers_keep_more_bits_for_the_budget(planned: Planned):
    found = planned("W8A8", 0.03, False)
    assert found.loss.share <= 0.03
    kinds = [cost.kind for cost in found.costs]
    assert "W8A8" in kinds and set(kinds) > {"W8A8"}
    worst = max(found.costs, key=lambda cost: cost.losses["W8A8"])
    assert worst.kind != "W8A8"


def test_a_dynamic_export_gains_from_moved_scales_too(planned: Planned):
    bare, smoothed = (planned("W8A8_DYNAMIC", float("inf"), each) for each in (False, True))
    assert smoothed.loss.share < bare.loss.share / 4
    assert not any(cost.clipped for cost in smoothed.costs)


def test_the_export_has_the_plans_scales_and_types(planned, source, windows, tmp_path):
    plan = planned("W8A8", 0.03, True)
    Exporter(
        source, tmp_path / "out", "W8A8", torch.bfloat16, plan.ranges, plan.types, plan.folds
    ).run(lambda count: None)
    (written,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(written)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    expected = model(input_ids=windows[0]).logits
    scheme = find_scheme("W8A8", "all")
    for name, parameter in model.named_parameters():
        prefix = name.removesuffix(".weight")
        if f"{prefix}.deq_scale" in tensors:
            value = scheme.floats(lambda part, prefix=prefix: tensors[f"{prefix}.{part}"])
        else:
            value = tensors[name]
        parameter.data.copy_(value)
    assert (model(input_ids=windows[0]).logits - expected).std() < 0.03 * expected.std()
    moved = {name for name in plan.folds if name.endswith("norm.weight")}
    assert len(moved) == 2 * LAYERS


def test_every_token_is_reported(source: Path, windows: list[torch.Tensor]):
    told: list[int] = []
    names = set(read_header(source / "model.safetensors"))
    infinite = float("inf")
    config = read_config(source)
    make_plan(source, "W8A8", config, windows, torch.float32, infinite, True, names, told.append)
    assert sum(told) == num_tokens(windows)


def test_names_of_another_layout_are_refused(planned: Planned):
    with pytest.raises(CheckpointError, match=r"no layer of the checkpoint's names"):
        planned("W8A8", 0.03, True, {"decoder.0.weight"})


def test_a_budget_takes_only_the_steps_that_save_most():
    losses = [0.001, 0.2, 0.05, 0.002, 0.1]
    costs = [
        LayerCost(
            (f"layer {number}",),
            {"W8A8": loss, "W8A8_DYNAMIC": loss / 100, "FLOAT": 0.0},
            InputRange(0.0, 1.0),
            0.0,
            "W8A8",
        )
        for number, loss in enumerate(losses)
    ]
    measured = 0

    def measure(found: list[LayerCost]) -> Loss:
        nonlocal measured
        measured += 1
        return Loss(sum(cost.losses[cost.kind] for cost in found), 0.0)

    assert [step.number for step in steps(costs, "W8A8")][:3] == [1, 4, 2]
    assert choose(costs, "W8A8", 0.06, measure).share <= 0.06
    assert [cost.kind == "W8A8_DYNAMIC" for cost in costs] == [False, True, False, False, True]
    assert measured <= 5
    costs[1].losses["W8A8_DYNAMIC"] = 0.2  # has almost no effect
    assert [step.kind for step in steps(costs, "W8A8") if step.number == 1] == ["FLOAT"]
    assert choose(costs, "W8A8", 0.0, measure).share == 0.0
    assert {cost.kind for cost in costs} == {"FLOAT"}


def test_a_loss_that_is_less_certain_takes_more_steps():
    kinds = []
    for error in (0.0, 0.3):
        costs = [
            LayerCost(
                (f"layer {number}",),
                {"W8A8": 0.01, "W8A8_DYNAMIC": 0.0, "FLOAT": 0.0},
                InputRange(0.0, 1.0),
                0.0,
                "W8A8",
            )
            for number in range(8)
        ]

        def measure(found: list[LayerCost], error: float = error) -> Loss:
            share = sum(cost.losses[cost.kind] for cost in found)
            return Loss(share, error * share)

        assert choose(costs, "W8A8", 0.0401, measure).is_within(0.0401)
        kinds.append([cost.kind for cost in costs].count("W8A8"))
    assert kinds == [4, 2]


def test_windows_come_from_all_parts_of_a_text(source: Path, tmp_path: Path):
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    model = tmp_path / "model"
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(model)
    (model / "config.json").write_text((source / "config.json").read_text())
    file = tmp_path / "text"
    file.write_text(" ".join(f"w{part}" for part in range(8) for _ in range(WINDOW_TOKENS)))
    found = text_windows(model, file, 4 * WINDOW_TOKENS)
    assert [set(window[0].tolist()) for window in found] == [{0}, {2}, {4}, {6}]
    assert [window.shape for window in text_windows(model, file, 100)] == [(1, 100)]
    assert len(text_windows(model, file, 1 << 20)) == 8
