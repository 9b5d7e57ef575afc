"""Data-parallel replicas split a step together or not at all."""

import json
import socket
import subprocess
import sys
from pathlib import Path

# Per replica: rows, graph mode, sizes of the micro-batches, whether it prefills.
# Then: rows of all, mode, parts, whether any of them prefills.
CASES = [
    (
        [[300, 0, [150, 150], True], [512, 0, [200, 312], True]],
        [[300, 512], 0, [[150, 200], [150, 312]], True],
    ),
    ([[300, 0, [150, 150], True], [512, 0, [], False]], [[300, 512], 0, None, True]),
    ([[300, 0, [150, 150], False], [1, 2, [], True]], [[300, 1], None, None, True]),
    ([[8, 2, [], False], [4, 2, [], False]], [[8, 4], 2, None, False]),
]


def test_one_replica_that_would_not_split_is_a_veto():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    script = Path(__file__).with_name("agreement_rank.py")
    wishes = json.dumps([wish for wish, _ in CASES])
    replicas = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "2", str(port), wishes],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for replica in replicas:
            printed, _ = replica.communicate(timeout=300)
            assert replica.returncode == 0
            assert json.loads(printed.splitlines()[-1]) == [expected for _, expected in CASES]
    finally:
        for replica in replicas:
            replica.kill()
