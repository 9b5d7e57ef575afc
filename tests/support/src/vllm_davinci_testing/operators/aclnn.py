"""Calls operators through the C interface, where no Python function of torch_npu reaches them."""

import ctypes

import torch

from vllm_davinci.vnpu import library_directory

_ACL_TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.uint8: 4,
    torch.int16: 6,
    torch.int64: 9,
    torch.float64: 11,
    torch.bool: 12,
    torch.bfloat16: 27,
}
_ND = 2  # aclFormat

Argument = (
    torch.Tensor | list[torch.Tensor] | bool | int | float | ctypes._SimpleCData | tuple[int, ...]
)


class Number(float):
    """A number that crosses the interface as an aclScalar."""


def _int64s(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _handle(library: ctypes.CDLL, function: str, *arguments: object) -> ctypes.c_void_p:
    create = getattr(library, function)
    create.restype = ctypes.c_void_p
    made = create(*arguments)
    assert made is not None, f"{function} failed"
    return ctypes.c_void_p(made)


def _converted(library: ctypes.CDLL, argument: Argument) -> ctypes._SimpleCData:
    match argument:
        case torch.Tensor():
            storage = argument.untyped_storage()
            return _handle(
                library,
                "aclCreateTensor",
                _int64s(tuple(argument.shape)),
                ctypes.c_uint64(argument.dim()),
                _ACL_TYPES[argument.dtype],
                _int64s(argument.stride()),
                ctypes.c_int64(argument.storage_offset()),
                _ND,
                _int64s((storage.nbytes() // argument.itemsize,)),
                ctypes.c_uint64(1),
                ctypes.c_void_p(storage.data_ptr()),
            )
        case list():
            handles = [_converted(library, tensor).value for tensor in argument]
            array = (ctypes.c_void_p * len(handles))(*handles)
            return _handle(library, "aclCreateTensorList", array, ctypes.c_uint64(len(handles)))
        case Number():
            return _handle(
                library,
                "aclCreateScalar",
                ctypes.byref(ctypes.c_double(argument)),
                _ACL_TYPES[torch.float64],
            )
        case tuple():
            return _handle(
                library, "aclCreateIntArray", _int64s(argument), ctypes.c_uint64(len(argument))
            )
        case bool():
            return ctypes.c_bool(argument)
        case int():
            return ctypes.c_int64(argument)
        case float():
            return ctypes.c_double(argument)
        case _:
            return argument


def call(name: str, *arguments: Argument) -> None:
    """Runs aclnn`name` on the current stream and waits for it.

    arguments: tensors on the device, lists of them (aclTensorList), tuples of ints (aclIntArray),
    Number (aclScalar), bool, int (int64_t), float (double), or a ctypes value for any other type
    of C. Handles live on to the end of the process. Raises RuntimeError with the device's error
    text when a phase returns an error code.
    """
    library = ctypes.CDLL(str(library_directory() / "libopapi.so"))
    workspace, executor = ctypes.c_uint64(), ctypes.c_void_p()
    converted = [_converted(library, argument) for argument in arguments]
    prepare = getattr(library, f"aclnn{name}GetWorkspaceSize")
    _check(name, prepare(*converted, ctypes.byref(workspace), ctypes.byref(executor)))
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    _check(name, getattr(library, f"aclnn{name}")(None, workspace, executor, stream))
    torch.npu.synchronize()


def _check(name: str, code: int) -> None:
    if code == 0:
        return
    text = ctypes.CDLL(str(library_directory() / "libascendcl.so")).aclGetRecentErrMsg
    text.restype = ctypes.c_char_p
    message = text() or b""
    raise RuntimeError(f"aclnn{name} returned {code}: {message.decode()}")
