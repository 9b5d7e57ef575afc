"""Worker methods for tests of adapters; vLLM makes the class a base of the worker."""

from typing import Any

from vllm.lora.layers import FusedMoEWithLoRA


class AdapterWorker:
    model_runner: Any

    def layers_with(self, adapter_id: int) -> list[str]:
        """Returns checkpoint names of the layers whose slot holds a delta of the adapter."""
        manager = self.model_runner.lora_manager._adapter_manager
        slot = manager.lora_index_to_id.index(adapter_id)
        found = []
        for name, layer in manager.modules.items():
            names = manager.packed_modules.get(name, [name])
            if isinstance(layer, FusedMoEWithLoRA):
                each_expert = 3  # gate, down, up
                first = layer.ep_rank * layer.local_num_experts * each_expert
                names = names[first : first + layer.local_num_experts * each_expert]
                begin = slot * len(names)
                slices = layer.lora_b_stacked[begin : begin + len(names)]
            else:
                stacked = layer.lora_b_stacked
                slices = [b[slot] for b in (stacked if isinstance(stacked, tuple) else (stacked,))]
            found += [
                each for each, b in zip(names, slices, strict=True) if bool(b.count_nonzero())
            ]
        return found

    def wrapped_layers(self) -> dict[str, str]:
        """Maps each layer with adapters to the class of the wrapped layer."""
        manager = self.model_runner.lora_manager._adapter_manager
        return {name: type(each.base_layer).__name__ for name, each in manager.modules.items()}

    def slots(self) -> list[int | None]:
        """Returns the adapter in each slot."""
        return list(self.model_runner.lora_manager._adapter_manager.lora_index_to_id)
