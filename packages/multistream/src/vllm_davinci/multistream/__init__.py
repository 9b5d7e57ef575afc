"""Streams, events and ubatches for any torch device."""

from vllm_davinci.multistream.costs import StepCosts
from vllm_davinci.multistream.device import current_device
from vllm_davinci.multistream.errors import CostsError, MultistreamError, SplitError
from vllm_davinci.multistream.events import EventPool
from vllm_davinci.multistream.fork import Fork
from vllm_davinci.multistream.interleave import Interleave
from vllm_davinci.multistream.lifetime import KeepAlive
from vllm_davinci.multistream.policy import Decision, Reason, SplitPolicy, StepFacts
from vllm_davinci.multistream.split import CutMode, Split, UBatch, choose_cuts, split_at
from vllm_davinci.multistream.streams import Role, StreamPool
from vllm_davinci.multistream.turns import communicate, current_ubatch

__all__ = [
    "CostsError",
    "CutMode",
    "Decision",
    "EventPool",
    "Fork",
    "Interleave",
    "KeepAlive",
    "MultistreamError",
    "Reason",
    "Role",
    "Split",
    "SplitError",
    "SplitPolicy",
    "StepCosts",
    "StepFacts",
    "StreamPool",
    "UBatch",
    "choose_cuts",
    "communicate",
    "current_device",
    "current_ubatch",
    "split_at",
]
