"""Calls operators through the C interface, if torch_npu has no Python function for them."""

import ctypes
from typing import Any, NamedTuple, Self

import torch

from vllm_davinci.vnpu import library_directory

_ACL_TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.uint8: 4,
    torch.int16: 6,
    torch.uint16: 7,
    torch.uint32: 8,
    torch.int64: 9,
    torch.uint64: 10,
    torch.float64: 11,
    torch.bool: 12,
    torch.complex64: 16,
    torch.complex128: 17,
    torch.bfloat16: 27,
}
_ACL_INT4 = 29
_ND, _FRACTAL_NZ = 2, 29  # aclFormat


class Tiled(NamedTuple):
    """A matrix described as FRACTAL_NZ."""

    tensor: torch.Tensor


class Tiles(NamedTuple):
    """The tiles of a matrix in FRACTAL_NZ: [.., columns / w, rows / 16, 16, w]."""

    tensor: torch.Tensor


class FourBit(NamedTuple):
    """4-bit integers: `tensor` has eight in each int32.

    tiles: sizes of FRACTAL_NZ tiles, in 4-bit integers
    """

    tensor: torch.Tensor
    tiles: tuple[int, ...] = ()


class Number(float):
    """A number passed as an aclScalar of `dtype`."""

    def __new__(cls, value: float, dtype: torch.dtype = torch.float64) -> Self:
        return super().__new__(cls, value)

    def __init__(self, value: float, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype


_C_PLAIN: Any = {bool: ctypes.c_bool, int: ctypes.c_int64, float: ctypes.c_double}
_C_TYPES = {
    torch.float64: ctypes.c_double,
    torch.float32: ctypes.c_float,
    torch.int8: ctypes.c_int8,
    torch.int32: ctypes.c_int32,
    torch.int64: ctypes.c_int64,
}


Argument = (
    torch.Tensor
    | FourBit
    | Tiled
    | Tiles
    | list[torch.Tensor | Tiled]
    | bool
    | int
    | float
    | str
    | ctypes._SimpleCData
    | tuple[int, ...]
    | None
)


def _int64s(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _handle(library: ctypes.CDLL, function: str, *arguments: object) -> ctypes.c_void_p:
    create = getattr(library, function)
    create.restype = ctypes.c_void_p
    made = create(*arguments)
    assert made is not None, f"{function} failed"
    return ctypes.c_void_p(made)


def _tensor(
    library: ctypes.CDLL, tensor: torch.Tensor, layout: int, storage_sizes: tuple[int, ...]
) -> ctypes.c_void_p:
    return _handle(
        library,
        "aclCreateTensor",
        _int64s(tuple(tensor.shape)),
        ctypes.c_uint64(tensor.dim()),
        _ACL_TYPES[tensor.dtype],
        _int64s(tensor.stride()),
        ctypes.c_int64(tensor.storage_offset()),
        layout,
        _int64s(storage_sizes),
        ctypes.c_uint64(len(storage_sizes)),
        ctypes.c_void_p(tensor.untyped_storage().data_ptr()),
    )


def _four_bit(
    library: ctypes.CDLL, packed: torch.Tensor, tiles: tuple[int, ...]
) -> ctypes.c_void_p:
    contiguous = max(dim for dim in range(packed.dim()) if packed.stride(dim) == 1)
    numbers = [
        (dim == contiguous, packed.shape[dim], packed.stride(dim)) for dim in range(packed.dim())
    ]
    storage = tiles or (8 * packed.untyped_storage().nbytes() // packed.itemsize,)
    return _handle(
        library,
        "aclCreateTensor",
        _int64s(tuple(size * 8 if is_packed else size for is_packed, size, _ in numbers)),
        ctypes.c_uint64(packed.dim()),
        _ACL_INT4,
        _int64s(tuple(1 if is_packed else step * 8 for is_packed, _, step in numbers)),
        ctypes.c_int64(8 * packed.storage_offset()),
        _FRACTAL_NZ if tiles else _ND,
        _int64s(storage),
        ctypes.c_uint64(len(storage)),
        ctypes.c_void_p(packed.untyped_storage().data_ptr()),
    )


def _converted(library: ctypes.CDLL, argument: Argument) -> ctypes._SimpleCData:
    match argument:
        case torch.Tensor():
            entries = argument.untyped_storage().nbytes() // argument.itemsize
            return _tensor(library, argument, _ND, (entries,))
        case Tiled(tensor):
            *batch, rows, columns = tensor.shape
            wide = 32 // tensor.itemsize
            tiles = (*batch, -(-columns // wide), -(-rows // 16), 16, wide)
            return _tensor(library, tensor, _FRACTAL_NZ, tiles)
        case Tiles(tensor):
            return _tensor(library, tensor, _FRACTAL_NZ, tuple(tensor.shape))
        case FourBit(tensor, tiles):
            return _four_bit(library, tensor, tiles)
        case list():
            handles = [_converted(library, tensor).value for tensor in argument]
            array = (ctypes.c_void_p * len(handles))(*handles)
            return _handle(library, "aclCreateTensorList", array, ctypes.c_uint64(len(handles)))
        case None:
            return ctypes.c_void_p()
        case str():
            return ctypes.c_char_p(argument.encode())
        case Number():
            c_type = _C_TYPES[argument.dtype]
            value = c_type(argument if argument.dtype.is_floating_point else int(argument))
            return _handle(
                library, "aclCreateScalar", ctypes.byref(value), _ACL_TYPES[argument.dtype]
            )
        case tuple():
            return _handle(
                library, "aclCreateIntArray", _int64s(argument), ctypes.c_uint64(len(argument))
            )
        case bool() | int() | float():
            return _C_PLAIN[type(argument)](argument)
        case _:
            return argument


def call(name: str, *arguments: Argument) -> None:
    """Runs aclnn`name` on the current stream and waits for it.

    arguments: tensors on the device (or FourBit, Tiled, Tiles), lists of them (aclTensorList),
    tuples of ints (aclIntArray), Number (aclScalar), bool, int (int64_t), float (double), str
    (char*), None (a null pointer), or a ctypes value for any other type of C. Handles live until
    the process ends. Raises RuntimeError with the device's error text if a phase returns an error
    code.
    """
    launch(name, *arguments)
    torch.npu.synchronize()


def launch(name: str, *arguments: Argument) -> None:
    """Like `call`, without waiting for the result."""
    size, executor = _prepare(name, *arguments)
    workspace = torch.empty(size.value, dtype=torch.uint8, device="npu")
    _launch(name, workspace.data_ptr(), size, executor)


def call_in(address: int, size: int, name: str, *arguments: Argument) -> None:
    """Like `launch`, with the caller's workspace.

    address, size: of the workspace, in bytes; address 0 is a null pointer
    """
    _, executor = _prepare(name, *arguments)
    _launch(name, address, ctypes.c_uint64(size), executor)


def workspace_size(name: str, *arguments: Argument) -> int:
    """Runs only the first phase of aclnn`name`; returns the requested bytes of workspace.

    arguments: as in `call`; None for a null pointer
    """
    return _prepare(name, *arguments)[0].value


def _prepare(name: str, *arguments: Argument) -> tuple[ctypes.c_uint64, ctypes.c_void_p]:
    library = ctypes.CDLL(str(library_directory() / "libopapi.so"))
    workspace, executor = ctypes.c_uint64(), ctypes.c_void_p()
    converted = [_converted(library, argument) for argument in arguments]
    prepare = getattr(library, f"aclnn{name}GetWorkspaceSize")
    _check(name, prepare(*converted, ctypes.byref(workspace), ctypes.byref(executor)))
    return workspace, executor


def _launch(name: str, address: int, size: ctypes.c_uint64, executor: ctypes.c_void_p) -> None:
    library = ctypes.CDLL(str(library_directory() / "libopapi.so"))
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    _check(
        name,
        getattr(library, f"aclnn{name}")(ctypes.c_void_p(address or None), size, executor, stream),
    )


def _check(name: str, code: int) -> None:
    if code == 0:
        return
    text = ctypes.CDLL(str(library_directory() / "libascendcl.so")).aclGetRecentErrMsg
    text.restype = ctypes.c_char_p
    message = text() or b""
    raise RuntimeError(f"aclnn{name} returned {code}: {message.decode()}")
