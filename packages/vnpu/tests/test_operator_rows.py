"""Documents and commands read the operator library's rows."""

from vllm_davinci_testing.processes.programs import output_of


def test_a_process_without_torch_finds_libtorch_and_lists_all_rows():
    """Loads the library like a C++ program linked with CANN's libraries."""
    (line,) = output_of(
        """
        import sys
        from vllm_davinci.vnpu.operator_rows import constraints
        rows = constraints()
        assert "torch" not in sys.modules
        print(len(rows), len({row.operator for row in rows}), all(row.source for row in rows))
        """
    )
    rows, operators, have_sources = line.split()
    assert int(rows) > 600 and int(operators) > 30
    assert have_sources == "True"
