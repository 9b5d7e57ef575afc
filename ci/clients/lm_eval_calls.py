"""lm-eval: two tasks from local files, over the completions endpoint."""

import json
import tempfile
from pathlib import Path

from calls import Calls, Server
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

calls = Calls()
# Each line is split at a token boundary, because lm-eval locates the end by the start's number of
# tokens.
LINES = (
    *(("def __init__(", "self"), ("import os.", "path"), ("len(", "self")),
    *(("isinstance(value", ", str"), ("return self", ".value")),
)
TASK = """\
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {path}}}}}
validation_split: validation
"""
CHOICES = """\
output_type: multiple_choice
doc_to_text: "{{{{start}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
LIKELIHOOD = """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}]
"""
UNTIL = """\
output_type: generate_until
doc_to_text: "{{{{start}}}}"
doc_to_target: "{{{{text}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def evaluate(server: Server, task: str, text: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        rows = [
            {"start": start, "choices": [end, "@@@@"], "answer": 0, "text": start + end}
            for start, end in LINES
        ]
        data = directory / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (directory / f"{task}.yaml").write_text((TASK + text).format(task=task, path=data))
        found = simple_evaluate(
            model="local-completions",
            model_args={
                "model": server.model,
                "base_url": f"{server.url}/v1/completions",
                "tokenizer": server.tokenizer,
                "tokenizer_backend": "huggingface",
                "num_concurrent": 4,
                "max_retries": 1,
                "max_length": 200,
            },
            tasks=[task],
            task_manager=TaskManager(include_path=str(directory), include_defaults=False),
            bootstrap_iters=0,
        )
    return found["results"][task]


@calls.add("multiple choice")
def _(server: Server) -> str:
    # The shipped checkpoints were trained on code: transformers finds each line's own ending more
    # likely than four signs, by a factor of e^10 or more.
    accuracy = evaluate(server, "local_choices", CHOICES)["acc,none"]
    assert accuracy == 1, f"accuracy {accuracy:.2f}"
    return f"accuracy {accuracy:.2f}"


@calls.add("likelihood of texts")
def _(server: Server) -> str:
    perplexity = evaluate(server, "local_likelihood", LIKELIHOOD)["byte_perplexity,none"]
    assert 1 < perplexity < 40
    return f"perplexity {perplexity:.2f} per byte"


@calls.add("generation until a line's end")
def _(server: Server) -> str:
    return f"exact match {evaluate(server, 'local_until', UNTIL)['exact_match,none']:.2f}"


if __name__ == "__main__":
    calls.run()
