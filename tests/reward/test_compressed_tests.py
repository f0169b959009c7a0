"""Packed tests are read as text, whatever the pickle says; anything else in a pickle is refused, and so is a bomb."""

import base64
import os
import pickle
import struct
import zlib
from typing import Any

import pytest

from gspo.reward.code_tests import unpack, unpickle_text


class Calls:
    """What a hostile pickle holds: a call that unpickling makes."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def packed(pickled: bytes) -> str:
    return base64.b64encode(zlib.compress(pickled)).decode()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("text", ["[]", 'é\n"\\', "x" * 300, "x" * 2**17])
def test_every_protocol_of_a_text_is_read(text: str, protocol: int) -> None:
    assert unpack(packed(pickle.dumps(text, protocol))) == text


HOSTILE = {
    "REDUCE": pickle.dumps(Calls(os.system, "touch ran")),
    "REDUCE by an old protocol": pickle.dumps(Calls(os.system, "touch ran"), protocol=0),
    "GLOBAL alone": b"cos\nsystem\n.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "INST": b"(S'touch ran'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'touch ran'\no.",
    "NEWOBJ": b"\x80\x02cos\nPathLike\n)\x81.",
    "BUILD": b"\x80\x02ccollections\nOrderedDict\n)R}b.",
    "EXT1": b"\x80\x02\x82\x01.",
    "PERSID": b"Pfile\n.",
    "a list": pickle.dumps(["[]"]),
    "a number": pickle.dumps(7),
    "nothing": b".",
    "two texts": b"\x8c\x01a\x8c\x01b.",
    "no end": pickle.dumps("[]")[:-1],
    "a length beyond the data": b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x.",
    "a length beyond all memory": b"\x80\x04\x8e" + struct.pack("<Q", 2**64 - 1) + b"x.",
    "bytes": pickle.dumps(b"[1]"),
    "no pickle": b"\xff\xfe",
    "empty": b"",
}


@pytest.mark.parametrize("pickled", HOSTILE.values(), ids=HOSTILE)
def test_a_pickle_of_anything_but_a_text_is_refused_and_runs_nothing(
    pickled: bytes, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError):
        unpickle_text(pickled)
    assert not (tmp_path / "ran").exists()


def test_a_huge_place_in_the_memo_costs_no_memory() -> None:
    # pickle.loads makes an array of that many entries: 16 GiB.
    assert unpickle_text(b"\x80\x02X\x01\x00\x00\x00ar\xff\xff\xff\x7f.") == "a"


def test_what_would_be_too_long_is_refused_before_it_is_unpacked() -> None:
    bomb = packed(pickle.dumps("0" * 2**24))  # 16 KiB
    with pytest.raises(ValueError, match="more than 1,000,000 bytes"):
        unpack(bomb, max_bytes=1_000_000)
    assert len(unpack(bomb, max_bytes=2**25)) == 2**24


@pytest.mark.parametrize("text", ["é", "no base64!", base64.b64encode(b"no zlib").decode(), "", "[1"])
def test_what_is_packed_in_no_such_way_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        unpack(text)


def test_a_packed_text_that_is_cut_off_is_refused() -> None:
    cut_off = base64.b64encode(zlib.compress(pickle.dumps("[]" * 999))[:-9]).decode()
    with pytest.raises(ValueError, match="cut off"):
        unpack(cut_off)
