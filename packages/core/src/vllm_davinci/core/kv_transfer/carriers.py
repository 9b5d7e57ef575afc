"""Libraries that carry blocks from engine to engine, and our connectors that use them."""

from dataclasses import dataclass

from packaging.version import Version


@dataclass(frozen=True)
class Carrier:
    """A library that carries blocks from engine to engine, and our connector that uses it.

    names:        connectors of vLLM that ours takes the place of; users say the first
    connector:    ours
    module:       where it is
    packages:     that bring the library; one of them is enough
    tested_from, tested_below: versions that tests have run with, as the extra has them
    how_to_get:   what an error says where it is missing
    unserved:     keys of kv_connector_extra_config that ask for what is not served
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
    names=("NixlConnector", "NixlPullConnector"),  # the first is vLLM's other name of the second
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
# A key of kv_connector_extra_config: seconds after which a transfer is given up.
TRANSFER_TIMEOUT, TRANSFER_TIMEOUT_S = "transfer_timeout", 60.0
PROTOCOL = "mooncake_protocol"
