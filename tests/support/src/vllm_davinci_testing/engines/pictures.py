"""Noise images and videos for tests."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image


def image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Makes noise over a gradient, so that every patch differs."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 128, (height, width, 3), generator=generator, dtype=torch.uint8)
    ramp = torch.linspace(0, 127, width).to(torch.uint8)[None, :, None]
    return Image.fromarray((noise + ramp).numpy())


def video(frames: int, width: int, height: int, seed: int = 0) -> np.ndarray:
    """Makes [frames, height, width, 3] uint8 with different frames."""
    return np.stack([np.asarray(image(width, height, 100 * seed + n)) for n in range(frames)])


def video_metadata(frames: np.ndarray, fps: float) -> dict[str, Any]:
    """Returns the metadata that video loaders return with unsampled frames."""
    return {
        "total_num_frames": len(frames),
        "fps": fps,
        "duration": len(frames) / fps,
        "video_backend": "opencv",
        "frames_indices": list(range(len(frames))),
        "do_sample_frames": False,
    }


def mp4(path: Path, frames: np.ndarray, fps: float) -> bytes:
    """Writes the frames as a lossy MPEG-4 file; returns its content."""
    height, width = frames.shape[1:3]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, (width, height))
    assert writer.isOpened(), "OpenCV was built without an encoder of MPEG-4"
    for frame in frames:
        writer.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
    writer.release()
    return path.read_bytes()


def decoded(path: Path) -> np.ndarray:
    """Reads all frames of a file: [frames, height, width, 3] uint8."""
    capture = cv2.VideoCapture(str(path))
    frames = []
    while (read := capture.read())[0]:
        frames.append(cv2.cvtColor(read[1], cv2.COLOR_BGR2RGB))
    capture.release()
    return np.stack(frames)
