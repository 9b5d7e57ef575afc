"""Calls the first phase of CANN's operators through the C interface, which checks arguments.

Nothing is launched and no tensor is allocated: an operand describes sizes, dtype and strides over a
small block of device memory, which the first phase does not read.
"""

import ctypes
import math
from collections.abc import Mapping
from typing import Any

LIBRARIES = ("libopapi.so", "libopapi_nn.so", "libopapi_math.so", "libopapi_transformer.so")
"""CANN's operator libraries; the later ones exist from CANN 8.5 on."""

_ACL_TYPES = {
    "float32": 0,
    "float16": 1,
    "int8": 2,
    "int32": 3,
    "uint8": 4,
    "int16": 6,
    "uint16": 7,
    "uint32": 8,
    "int64": 9,
    "uint64": 10,
    "float64": 11,
    "bool": 12,
    "complex64": 16,
    "complex128": 17,
    "bfloat16": 27,
}
_ITEM_BYTES = {
    "float32": 4, "float16": 2, "int8": 1, "int32": 4, "uint8": 1, "int16": 2, "uint16": 2,
    "uint32": 4, "int64": 8, "uint64": 8, "float64": 8, "bool": 1, "complex64": 8,
    "complex128": 16, "bfloat16": 2,
}  # fmt: skip
_C_NUMBERS = {
    "float64": ctypes.c_double,
    "float32": ctypes.c_float,
    "int8": ctypes.c_int8,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
}
_ND, _FRACTAL_NZ = 2, 29  # aclFormat

TAKEN = "taken"
ABSENT = "absent"


class FirstPhase:
    """Calls first phases, with operands at one address of device memory.

    address: at least 64 bytes that outlive this object
    """

    def __init__(self, address: int) -> None:
        self._address = ctypes.c_void_p(address)
        self._libraries = [library for name in LIBRARIES if (library := _loaded(name)) is not None]
        runtime = ctypes.CDLL("libascendcl.so")
        self._message = runtime.aclGetRecentErrMsg
        self._message.restype = ctypes.c_char_p

    def answer(self, operator: str, arguments: Mapping[str, Any]) -> tuple[str, str]:
        """TAKEN, or ABSENT if no library has the operator, or the status; and the message.

        operator:  name without "aclnn"
        arguments: in the order of the C interface, as `calls.json.xz` writes them
        """
        prepare = self._symbol(f"aclnn{operator}GetWorkspaceSize")
        if prepare is None:
            return ABSENT, ""
        workspace, executor = ctypes.c_uint64(), ctypes.c_void_p()
        converted = [self._converted(value) for value in arguments.values()]
        status = prepare(*converted, ctypes.byref(workspace), ctypes.byref(executor))
        if status == 0:
            self._drop(executor)
            return TAKEN, f"{workspace.value} bytes of workspace"
        return str(status), (self._message() or b"").decode(errors="replace").strip()

    def _symbol(self, name: str) -> Any:
        for library in self._libraries:
            if (found := getattr(library, name, None)) is not None:
                return found
        return None

    def _drop(self, executor: ctypes.c_void_p) -> None:
        """Frees the executor of a call that is not launched, if CANN can."""
        destroy = self._symbol("aclDestroyAclOpExecutor")
        if destroy is not None and executor.value is not None:
            destroy(executor)

    def _made(self, function: str, *arguments: object) -> ctypes.c_void_p:
        create = self._symbol(function)
        create.restype = ctypes.c_void_p
        return ctypes.c_void_p(create(*arguments))

    def _tensor(self, said: Mapping[str, Any]) -> ctypes.c_void_p:
        """Creates the description of a tensor; its strides determine the storage size."""
        sizes, dtype = tuple(said["sizes"]), said["dtype"]
        strides = _strides(sizes, said.get("lies", ""))
        entries = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
        storage: tuple[int, ...] = (0 if 0 in sizes else entries,)
        layout = _ND
        if said.get("lies") == "tiled":
            *batch, rows, columns = sizes
            wide = 32 // _ITEM_BYTES[dtype]
            layout, storage = _FRACTAL_NZ, (*batch, -(-columns // wide), -(-rows // 16), 16, wide)
        return self._made(
            "aclCreateTensor",
            _int64s(sizes),
            ctypes.c_uint64(len(sizes)),
            _ACL_TYPES[dtype],
            _int64s(strides),
            ctypes.c_int64(0),
            layout,
            _int64s(storage),
            ctypes.c_uint64(len(storage)),
            self._address,
        )

    def _scalar(self, value: float, dtype: str) -> ctypes.c_void_p:
        kind: Any = _C_NUMBERS[dtype]
        number = kind(value if dtype.startswith("float") else int(value))
        return self._made("aclCreateScalar", ctypes.byref(number), _ACL_TYPES[dtype])

    def _list(self, function: str, handles: list[ctypes.c_void_p]) -> ctypes.c_void_p:
        array = (ctypes.c_void_p * len(handles))(*(each.value for each in handles))
        return self._made(function, array, ctypes.c_uint64(len(handles)))

    def _converted(self, value: Any) -> Any:
        match value:
            case None:
                return ctypes.c_void_p()
            case bool():
                return ctypes.c_bool(value)
            case int():
                return ctypes.c_int64(value)
            case float():
                return ctypes.c_double(value)
            case str():
                return ctypes.c_char_p(value.encode())
            case {"sizes": _}:
                return self._tensor(value)
            case {"tensors": tensors}:
                return self._list("aclCreateTensorList", [self._tensor(each) for each in tensors])
            case {"ints": numbers}:
                return self._made("aclCreateIntArray", _int64s(numbers), len(numbers))
            case {"scalar": number, "dtype": dtype}:
                return self._scalar(number, dtype)
            case {"int8": number}:
                return ctypes.c_int8(number)
            case {"int32": number}:
                return ctypes.c_int32(number)
            case {"float32": number}:
                return ctypes.c_float(number)
        raise TypeError(f"no argument of CANN is written as {value!r}")


def _loaded(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _int64s(values: Any) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _strides(sizes: tuple[int, ...], lies: str) -> tuple[int, ...]:
    """Strides by layout. apart: gaps between rows, or a vector's entries; by_columns:
    transposed."""
    steps = [max(1, math.prod(sizes[at + 1 :])) for at in range(len(sizes))]
    if lies == "apart":
        steps = [2] if len(sizes) == 1 else [*(2 * step for step in steps[:-1]), 1]
    elif lies == "by_columns":
        steps = [max(1, math.prod(sizes[:at])) for at in range(len(sizes))]
    return tuple(steps)
