"""A worker that counts its multimodal encoder's runs and steps."""

from typing import Any

import torch

from vllm_davinci.vnpu import HostCounts

# The model's modules that an encoder begins and ends with.
ENCODERS = (
    ("visual", "visual"),
    ("vision_tower", "multi_modal_projector"),
    ("vision_tower", "mm_projector"),
)


class EncoderWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls."""

    def watch_encoder(self) -> None:
        """Starts recording outputs and counts of each forward of the encoder."""
        self._forwards: list[tuple[torch.Tensor, HostCounts]] = []
        self._steps: list[HostCounts] = []
        begun: list[HostCounts] = []
        execute_model = self.model_runner.execute_model

        def execute(scheduled: Any, *arguments: Any) -> Any:
            # Count only waits for the step's own work: a slow device may make a step wait for the
            # previous step's copies.
            torch.npu.synchronize()
            before = HostCounts.now()
            output = execute_model(scheduled, *arguments)
            if scheduled.scheduled_encoder_inputs:
                self._steps.append(HostCounts.now() - before)
            return output

        self.model_runner.execute_model = execute
        model = self.model_runner.get_model()
        [(first, last)] = [
            names for names in ENCODERS if all(hasattr(model, name) for name in names)
        ]

        def begin(module: torch.nn.Module, arguments: Any, options: Any) -> None:
            begun.append(HostCounts.now())

        def end(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> None:
            counts = HostCounts.now() - begun.pop()
            self._forwards.append((output.flatten(0, -2).clone(), counts))

        # Installed first, so that preparation in other hooks is counted.
        getattr(model, first).register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        getattr(model, last).register_forward_hook(end)

    def watch_encoder_calls(self) -> None:
        """Starts counting calls of any model's encoder."""
        self._calls: list[HostCounts] = []
        model = self.model_runner.get_model()
        encode = model.embed_multimodal

        def counted(*arguments: Any, **options: Any) -> Any:
            torch.npu.synchronize()
            before = HostCounts.now()
            output = encode(*arguments, **options)
            self._calls.append(HostCounts.now() - before)
            return output

        model.embed_multimodal = counted

    def encoder_calls(self) -> list[HostCounts]:
        """Returns the counts of each call since counting began."""
        return self._calls

    def encoder_forwards(self) -> list[tuple[torch.Tensor, HostCounts]]:
        """Returns each forward's output, [tokens, hidden_size], and counts since counting began."""
        return [(output.cpu(), counts) for output, counts in self._forwards]

    def steps_of_encoder(self) -> list[HostCounts]:
        """Returns the counts of each step with new encoder input since counting began."""
        return self._steps
