"""Codecs by name; what is not used is not imported."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ckptlib.codecs import registry
from ckptlib.codecs.codec import Content
from ckptlib.errors import FormatError


@pytest.mark.parametrize("name", ["planes", "zstd"])
def test_each_is_found_by_the_name_it_has(name: str) -> None:
    codec = registry.find(name)
    assert codec.name == name
    assert re.fullmatch("[a-z0-9-]+", name)
    assert codec is registry.find(name)


@pytest.mark.parametrize("name", ["", "zip", registry.RAW, "planes\n", "x" * 1000])
def test_others_are_named_in_an_error_of_bounded_length(name: str) -> None:
    with pytest.raises(FormatError, match=r"is not one of raw, .*update ckptlib") as caught:
        registry.find(name)
    assert len(str(caught.value)) < 200


def test_a_base_is_for_codecs_that_take_one() -> None:
    raw = memoryview(bytes(4096))
    frame = registry.find("zstd").encode(raw, Content("int8", 1))  # type: ignore[union-attr, call-arg, arg-type]
    out = memoryview(bytearray(4096))
    registry.decode("zstd", memoryview(frame), out)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="codec 'zstd' takes no base"):
        registry.decode("zstd", memoryview(frame), out, raw)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="codec 'patch' has no base"):
        registry.decode("patch", memoryview(b""), out)


def test_no_compressor_is_loaded_before_a_codec_is_made() -> None:
    script = (
        "import sys, ckptlib.writer.process, ckptlib.codecs.registry as registry\n"
        "assert not {'zstandard', 'ckptlib.codecs.planes'} & sys.modules.keys()\n"
        "registry.find('planes')\n"
        "assert 'zstandard' in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=150)
