"""The CANN runtime's own words for an error, of which torch_npu may pass on the number alone."""

import ctypes
import re

# As torch_npu writes it: ACL stream synchronize failed, error code:507048
_NUMBER = re.compile(r"error code\D{0,5}\d{6}\b")


def with_runtime_words(message: str) -> str:
    """A message of torch_npu with what the runtime has said in this thread, where it is not there.

    To be called in the thread in which the error was raised.
    """
    if _NUMBER.search(message) is None:
        return message
    recent = ctypes.CDLL("libascendcl.so").aclGetRecentErrMsg  # torch_npu has loaded it
    recent.restype = ctypes.c_char_p
    words = (recent() or b"").decode(errors="replace").strip()
    return f"{message}: {words}" if words and words not in message else message
