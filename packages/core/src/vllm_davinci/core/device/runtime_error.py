"""The CANN runtime's error text; torch_npu may pass on only the number."""

import ctypes
import re

# torch_npu's form: ACL stream synchronize failed, error code:507048
_NUMBER = re.compile(r"error code\D{0,5}\d{6}\b")


def with_runtime_words(message: str) -> str:
    """Appends the runtime's error text of this thread to torch_npu's message, unless contained.

    Call it in the thread that raised the error.
    """
    if _NUMBER.search(message) is None:
        return message
    recent = ctypes.CDLL("libascendcl.so").aclGetRecentErrMsg  # already loaded by torch_npu
    recent.restype = ctypes.c_char_p
    words = (recent() or b"").decode(errors="replace").strip()
    return f"{message}: {words}" if words and words not in message else message
