"""Takes a dry-run's options from a row of the table of deployments."""

import argparse
import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from vllm_davinci.planner.deployments.checkpoint import write_checkpoint
from vllm_davinci.planner.deployments.table import deployment


def take_deployment(options: argparse.Namespace, models: contextlib.ExitStack) -> list[str]:
    """Fills in options that the command line omits. Returns the row's options of `vllm serve`.

    models: stack that removes the model's directory on exit
    Raises DeploymentError for an unknown name.
    """
    row = deployment(options.deployment)
    if options.model is None:
        options.model = tempfile.mkdtemp(prefix="vllm-davinci-deployment.")
        directory = Path(options.model)
        models.callback(shutil.rmtree, directory, ignore_errors=True)
        write_checkpoint(row.checkpoint, directory)
    given = {
        "chip": row.chip,
        "topology": row.topology,
        "requests": row.requests,
        "prompt_tokens": (row.prompt_tokens,),
        "output_tokens": (row.output_tokens,),
    }
    for name, value in given.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    os.environ.update(row.environment)
    return row.arguments()
