"""Libraries that transfer blocks between engines, and our connectors that use them."""

from dataclasses import dataclass

from packaging.version import Version


@dataclass(frozen=True)
class Carrier:
    """A library that transfers blocks between engines, and our connector that uses it.

    names:        vLLM's connectors that ours replaces; users write the first
    connector:    our connector
    module:       its module
    packages:     packages that contain the library; one suffices
    tested_from, tested_below: range of tested versions, the same as in the extra
    how_to_get:   installation hint for errors
    unserved:     unsupported keys of kv_connector_extra_config
    """

    names: tuple[str, ...]
    connector: str
    module: str
    packages: tuple[str, ...]
    tested_from: Version
    tested_below: Version
    how_to_get: str
    unserved: tuple[str, ...] = ()


NIXL = Carrier(
    names=("NixlConnector", "NixlPullConnector"),  # vLLM's two names for the same connector
    connector="NPUNixlConnector",
    module="vllm_davinci.core.kv_transfer.connector",
    packages=("nixl",),
    tested_from=Version("1.5"),
    tested_below=Version("2"),
    how_to_get="Install it: pip install 'vllm-davinci[pd]'.",
    unserved=("bidirectional_kv_xfer",),
)
MOONCAKE = Carrier(
    names=("MooncakeConnector",),
    connector="NPUMooncakeConnector",
    module="vllm_davinci.core.kv_transfer.mooncake_connector",
    packages=("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
    tested_from=Version("0.3.13"),
    tested_below=Version("0.4"),
    how_to_get="Install it: pip install 'vllm-davinci[mooncake]', and the system's libibverbs.so.1 "
    "(Debian's package libibverbs1), without which it does not load.",
)
CARRIERS = {
    name: carrier for carrier in (NIXL, MOONCAKE) for name in (*carrier.names, carrier.connector)
}
# A key of kv_connector_extra_config: seconds after which a transfer times out.
TRANSFER_TIMEOUT, TRANSFER_TIMEOUT_S = "transfer_timeout", 60.0
PROTOCOL = "mooncake_protocol"
