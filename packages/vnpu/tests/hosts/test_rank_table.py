"""Rank tables: which values are read, and which tables are refused."""

import json

import pytest

from vllm_davinci.vnpu.hosts.rank_table import read_rank_table


def table(*servers: tuple[str, list[int]]) -> dict[str, object]:
    return {
        "version": "1.0",
        "server_count": str(len(servers)),
        "server_list": [
            {
                "server_id": address,
                "device": [
                    {"device_id": str(i), "device_ip": f"192.168.1.{rank}", "rank_id": str(rank)}
                    for i, rank in enumerate(ranks)
                ],
            }
            for address, ranks in servers
        ],
        "status": "completed",
    }


@pytest.fixture
def write(tmp_path):
    def write_table(content: object) -> str:
        path = tmp_path / "ranks.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write_table


def test_ranks_meet_at_the_host_of_rank_0(write):
    path = write(table(("10.0.0.2", [2, 3]), ("10.0.0.1", [0, 1])))
    read = read_rank_table(path, {})
    assert (read.num_ranks, read.address, read.port) == (4, "10.0.0.1", 60000)
    assert read_rank_table(path, {"HCCL_IF_BASE_PORT": "50000"}).port == 50000


def test_another_table_has_another_secret(write):
    one = read_rank_table(write(table(("10.0.0.1", [0, 1]))), {})
    other = read_rank_table(write(table(("10.0.0.1", [1, 0]))), {})
    assert one.secret != other.secret


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a rank table"),
        ({"server_list": [{"device": [{"rank_id": "0"}]}]}, "server_id"),
        (table(("10.0.0.1", [0, 2])), r"names the ranks \[0, 2\]"),
        (table(), r"names the ranks \[\]"),
        (table(("10.0.0.1", [0])) | {"status": "initializing"}, "its status is 'initializing'"),
    ],
)
def test_an_invalid_rank_table_is_refused(write, content, message):
    with pytest.raises(ValueError, match=message):
        read_rank_table(write(content), {})
