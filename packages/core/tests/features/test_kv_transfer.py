"""Disaggregated prefill: settings that the start changes, or refuses by name."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from vllm_davinci.core.config.options import DavinciConfig
from vllm_davinci.core.config.setting import Setting
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features import kv_transfer
from vllm_davinci.core.features.feature import Engine
from vllm_davinci.core.features.kv_transfer import FEATURES, settle
from vllm_davinci.core.kv_transfer.carriers import MOONCAKE, NIXL
from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.formats.modelslim import QuantDescription
from vllm_davinci_testing.engines.refusals import refused_by


def config(asked: KVTransferConfig, **changes: Any) -> Any:
    parallel = dict.fromkeys(
        ("decode_context_parallel_size", "pipeline_parallel_size", "data_parallel_size"), 1
    )
    model = {"is_multimodal_model": False, "enable_prompt_embeds": False}
    named = {"architectures": ["AForCausalLM"]}
    return SimpleNamespace(
        kv_transfer_config=asked,
        cache_config=SimpleNamespace(kv_offloading_size=None, kv_offloading_backend="native"),
        lora_config=changes.get("lora_config"),
        quant_config=changes.get("quant_config"),
        parallel_config=SimpleNamespace(**{name: changes.get(name, 1) for name in parallel}),
        model_config=SimpleNamespace(**named, **{name: changes.get(name, False) for name in model}),
    )


def asked_for(connector: str = "NixlConnector", **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=connector, kv_role="kv_consumer", kv_connector_extra_config=extra
    )


def settle_kv_transfer(vllm_config: Any) -> list[Setting]:
    engine = Engine(vllm_config, DavinciConfig())
    settle(engine)
    return engine.changes


def refused(vllm_config: Any) -> str:
    return refused_by(FEATURES, Engine(vllm_config, DavinciConfig()))


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer, "version", lambda _: "1.5.1")


@pytest.mark.usefixtures("nixl")
@pytest.mark.parametrize("connector", ["NixlConnector", "NixlPullConnector"])
def test_our_connector_replaces_vllms_and_is_logged(connector: str):
    asked = asked_for(connector)
    told = [setting.told() for setting in settle_kv_transfer(config(asked))]
    assert (asked.kv_connector, asked.kv_buffer_device) == (NIXL.connector, "cpu")
    assert f"replaces '{connector}'" in told[0]
    assert settle_kv_transfer(config(asked)) == []


@pytest.mark.usefixtures("nixl")
@pytest.mark.parametrize(
    ("role", "kind"),
    [("kv_consumer", "W8A8"), ("kv_producer", "W8A8_MIX"), ("kv_both", "W8A8_MIX")],
)
def test_mixed_layers_are_static_in_an_engine_that_only_decodes(role: Any, kind: str):
    asked = asked_for()
    asked.kv_role = role
    expert = "model.layers.0.mlp.experts.0.up_proj.weight"
    types = {"p.weight": "W8A8_MIX", expert: "W8A8_MIX", "q.weight": "W8A8_DYNAMIC"}
    quantization = AscendQuantizationConfig(QuantDescription.parse(types))
    for is_first in (True, False):
        told = settle_kv_transfer(config(asked, quant_config=quantization))
        assert any("W8A8_MIX" in setting.key for setting in told) == (is_first and kind == "W8A8")
    assert quantization.description.types == {**types, "p.weight": kind}
    scheme = quantization.description.of_layer("p")
    assert scheme is not None and (scheme.name == "W8A8") == (kind == "W8A8")


def test_mooncakes_pages_use_tcp_and_this_is_logged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_transfer, "version", lambda _: "0.3.13.post1")
    asked = asked_for("MooncakeConnector")
    told = [setting.told() for setting in settle_kv_transfer(config(asked))]
    assert asked.kv_connector == MOONCAKE.connector
    assert asked.kv_connector_extra_config == {"mooncake_protocol": "tcp"}
    assert "replaces 'MooncakeConnector'" in told[0] and "mooncake_protocol" in told[1]
    assert settle_kv_transfer(config(asked)) == []


@pytest.mark.parametrize("protocol", ["rdma", "ascend"])
def test_other_protocols_of_mooncake_are_refused_by_name(protocol: str):
    asked = asked_for("MooncakeConnector", mooncake_protocol=protocol)
    said = refused(config(asked))
    assert f"mooncake_protocol '{protocol}'" in said and "Use 'tcp'" in said


@pytest.mark.usefixtures("nixl")
@pytest.mark.parametrize(
    ("extra", "changes", "named"),
    [
        ({"bidirectional_kv_xfer": True}, {}, "bidirectional_kv_xfer"),
        ({"backends": ["LIBFABRIC"]}, {}, "backends of NIXL other than UCX"),
        ({}, {"lora_config": SimpleNamespace()}, "--enable-lora"),
        ({}, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({}, {"data_parallel_size": 2}, "--data-parallel-size"),
        ({}, {"is_multimodal_model": True}, "images, videos or sound"),
        ({}, {"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
    ],
)
def test_unsupported_options_are_refused_by_name(extra, changes, named):
    assert named in refused(config(asked_for(**extra), **changes))


@pytest.mark.usefixtures("nixl")
@pytest.mark.parametrize("limit", [0, "long"])
def test_an_invalid_limit_is_refused(limit: object):
    with pytest.raises(ConfigurationError, match=f"transfer_timeout .* is {limit!r}"):
        settle_kv_transfer(config(asked_for(transfer_timeout=limit)))


@pytest.mark.parametrize("connector", ["NixlPushConnector", "MooncakeStoreConnector"])
def test_other_connectors_are_refused_by_name(connector: str):
    said = refused(config(asked_for(connector)))
    assert f"kv_connector {connector!r}" in said and "NixlConnector or MooncakeConnector" in said


@pytest.mark.parametrize(
    ("connector", "extra", "package"),
    [
        ("NixlConnector", "pd", "nixl"),
        ("MooncakeConnector", "mooncake", "mooncake-transfer-engine-non-cuda"),
    ],
)
@pytest.mark.parametrize(("found", "said"), [(None, "needs the {}"), ("0.2", "tested with {}")])
def test_a_missing_or_untested_package_ends_the_start_with_advice(
    connector, extra, package, found, said, monkeypatch
):
    def version(_: str) -> str:
        if found is None:
            raise kv_transfer.PackageNotFoundError
        return found

    monkeypatch.setattr(kv_transfer, "version", version)
    with pytest.raises(ConfigurationError, match=rf"{said.format(package)}.*davinci\[{extra}\]"):
        settle_kv_transfer(config(asked_for(connector)))
