"""Reads checkpoints without ckptlib and without torch: numpy and xxhash are enough, and what FORMAT.md says.

It reads versions 1 and 2 of the format, increments included; it knows no codec, and says so where one was used.

    python read_with_numpy.py ROOT          lists the steps
    python read_with_numpy.py ROOT latest   shows what a step holds, every digest checked

From Python: `read("ROOT", find("ROOT", "latest")).tensors["model/head.weight"]`. Local directories only.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import re
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

SAVE = re.compile(r"([0-9]{12})-([0-9]{6})-([0-9a-f]{8})")
GENERATION = re.compile(r"[0-9]{6}-[0-9a-f]{8}")
HEAD = re.compile(rb'(\{"ckptlib":([0-9]+),"kind":"([a-z]+)"),"digest":"xxh3:([0-9a-f]{32})","body":')
xxh3 = xxhash.xxh3_128_hexdigest
NOT_IN_NUMPY: Any = {"bfloat16": "<u2", "complex32": [("real", "<f2"), ("imag", "<f2")]}  # nor float8, float4


@dataclass
class Step:
    """What a step holds, as one of its ranks would load it."""

    tensors: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)  # torch's names
    values: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)  # their state dicts; of optimizers, parameters by group


def blake3(data: bytes) -> str:
    from blake3 import blake3

    return str(blake3(data).hexdigest(length=16))


def document(root: Path, key: str, kind: str) -> Any:
    """The body of a document; where it cannot be read, of its copy, if there is one."""
    try:
        return checked((root / key).read_bytes(), key, kind)
    except (OSError, ValueError):
        if not (copy := root / "copies" / key).exists():
            raise
        return checked(copy.read_bytes(), key, kind)


def checked(data: bytes, key: str, kind: str) -> Any:
    """The body, which has the digests that it and its name say."""
    head = HEAD.match(data)
    if head is None or head[2] not in (b"1", b"2") or head[3].decode() != kind:
        raise ValueError(f"{key}: no {kind} of version 1 or 2")
    told = [head[4].decode(), *re.findall(r"[0-9a-f]{32}", key)]  # a part's name has the digest of its table, too
    table = data[data.rfind(b'"table":') + len(b'"table":') : -3]
    body, named = data[head.end() : -2], {"part": [table, data], "layout": [data]}.get(kind, [])
    covered = body if head[2] == b"1" else head[1] + body
    if data[-2:] != b"}\n" or told != [xxh3(text) for text in (covered, *named)]:
        raise ValueError(f"{key}: does not match its digest")
    return json.loads(body)


def history(root: str | Path) -> list[str]:
    """The visible saves, ascending, as <step>-<gen>-<nonce>."""
    saves = [path.stem for path in Path(root, "steps").glob("*.json") if SAVE.fullmatch(path.stem)]
    found, seen, limit, generation = list[str](), [""], "9" * 12, head(root, [save[13:] for save in saves])
    while generation not in seen:
        seen.append(generation)
        found += [save for save in saves if save[13:] == generation and save[:12] <= limit]
        try:
            origin = document(Path(root), f"generations/{generation}.json", "generation")["resumed_from"] or ""
        except (OSError, ValueError):  # lost or damaged: nobody knows what was before
            break
        generation, limit = origin[13:], min(limit, origin[:12])
    return sorted(found)


def head(root: str | Path, committed: list[str]) -> str:
    """The newest generation that has a step, or went back. Raises ValueError where a damaged record may say so."""
    newest = max(committed, default="")
    names = [path.stem for path in Path(root, "generations").glob("*.json") if path.stem > newest]
    for name in filter(GENERATION.fullmatch, sorted(names, reverse=True)):
        if document(Path(root), f"generations/{name}.json", "generation").get("rewind"):
            return name
    return newest


def find(root: str | Path, step: str) -> str:
    """The save of a step: its number, "latest", or a full name."""
    if SAVE.fullmatch(step):
        return step
    found = [save for save in history(root) if step == "latest" or int(save[:12]) == int(step)]
    if not found:
        raise ValueError(f"{root} has no step {step}")
    return found[-1]


def read(root: str | Path, save: str, rank: int = 0) -> Step:
    """Its tensors and values, every digest checked. `rank`: whose values, and whose tensors where each has its own."""
    root = Path(root)
    document(root, "ckptlib.json", "root")
    manifest = document(root, f"steps/{save}.json", "manifest")
    parts = [document(root, key, "part") for key in manifest["parts"]]
    layouts = {digest: document(root, f"layouts/{digest}.json", "layout") for digest in manifest["layouts"]}
    layout_of = [layouts[part["table"]["layout"]] for part in parts]
    firsts = [runs[0][0] for runs in manifest["layouts"].values()]
    seen = [rank, *(r for r in firsts if layout_of[r] is not layout_of[rank])]
    step, missing = Step(), dict[str, tuple[Any, bool]]()
    for r in seen:
        for name, dtype, shape, holding in layout_of[r]["tensors"]:
            own = layout_of[r]["holdings"][holding]["how"] == "per-rank"
            if name not in step.tensors and (r == rank or not own):
                step.tensors[name], step.dtypes[name] = np.zeros(shape, numpy_dtype(dtype)), dtype
                missing[name] = np.ones(shape, bool), own
        for alias, name in (tie for tie in layout_of[r]["aliases"].items() if tie[1] in step.tensors):
            step.tensors.setdefault(alias, step.tensors[name])
            step.dtypes.setdefault(alias, step.dtypes[name])
        for path, value in parts[r]["values"].items():
            step.values.setdefault(path, decode(value))
    for r in reversed(range(len(parts))):
        for name, box, elements in shards(root, parts[r], layout_of[r]):
            if name in missing and (r == rank or not missing[name][1]):
                step.tensors[name][box], missing[name][0][box] = elements, False
    if lost := [name for name, (mask, _) in missing.items() if mask.any()]:
        raise ValueError(f"{save}: no part has all of {', '.join(lost)}")
    for path, tree in ((path, tree) for r in reversed(seen) for path, tree in layout_of[r]["objects"].items()):
        step.objects[path] = tree["optimizer"]["groups"] if "optimizer" in tree else build(tree, path, step)
    return step


def shards(root: Path, part: Any, layout: Any) -> Any:
    """(name, box, elements) of each shard that a rank wrote."""
    shards, rows, data, at = part["table"]["shards"], iter(places(part)), bytearray(), 0
    digests, digest = iter(re.findall(".{32}", part["digests"])), xxh3 if part["algorithm"] == "xxh3" else blake3
    for tensor, offset, shape, count in zip(*map(shards.get, ("tensor", "offset", "shape", "chunks")), strict=True):
        data, at = (bytearray(), 0) if count else (data, at)
        for _ in range(count):
            pack, start, nbytes = next(rows)
            chunk = np.fromfile(root / part["packs"][pack][0], np.uint8, nbytes, offset=start).tobytes()
            if digest(chunk) != next(digests):
                raise ValueError(f"{part['packs'][pack][0]} [{start}:+{nbytes}]: does not match its digest")
            data += chunk
        name, dtype = layout["tensors"][tensor][:2]
        elements = np.frombuffer(data, numpy_dtype(dtype), math.prod(shape), at).reshape(shape)
        at += elements.nbytes
        yield name, tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True)), elements


def places(part: Any) -> list[tuple[int, int, int]]:
    """Of each chunk: its pack, its first byte there, and its bytes. Packs may be those of earlier saves."""
    chunks = part["table"]["chunks"]
    if "places" not in part:  # version 1
        return list(zip(chunks["pack"], chunks["offset"], chunks["nbytes"], strict=True))
    if any(part["places"].get("codec", [])):
        raise NotImplementedError(f"frames of {', '.join(part['places']['codecs'])}: this reader knows no codec")
    found = list[tuple[int, int, int]]()
    for pack, start, count in part["places"]["runs"]:
        for nbytes in chunks["nbytes"][len(found) : len(found) + count]:
            found.append((pack, start, nbytes))
            start += nbytes
    if len(found) != len(chunks["nbytes"]) or sum(row[2] for row in part["places"]["runs"]) != len(found):
        raise ValueError(f"{part['save']}: rank {part['rank']}: places are not of all chunks")
    return found


def numpy_dtype(name: str) -> Any:
    return np.dtype("u1" if name.startswith(("float8_", "float4_")) else NOT_IN_NUMPY.get(name, name))


def decode(data: Any) -> Any:
    """A value from its JSON. What is torch's comes as text or a tuple."""
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict) or not data:
        return data
    tag, body = next(iter(data.items()))
    if tag in PAIRS:
        return PAIRS[tag]({decode(key): decode(value) for key, value in body})
    return TAGS[tag](body) if tag.startswith("$") else {key: decode(value) for key, value in data.items()}


PAIRS: dict[str, Any] = {"$dict": dict, "$odict": OrderedDict, "$counter": Counter}
TAGS: dict[str, Any] = {
    "$nest": decode,
    **dict.fromkeys(("$tuple", "$torch.Size"), lambda body: tuple(decode(body))),
    **dict.fromkeys(("$torch.dtype", "$torch.device"), str),
    "$set": lambda body: set(decode(body)),
    "$frozenset": lambda body: frozenset(decode(body)),
    "$float": float,
    "$int": lambda text: int(text, 16),
    "$bytes": base64.b64decode,
    "$str": lambda text: base64.b64decode(text).decode("utf-8", "surrogatepass"),
    "$complex": lambda body: complex(*decode(body)),
    "$numpy": lambda body: np.dtype(body["dtype"]).type(decode(body["value"])),
    "$ndarray": lambda body: np.ndarray(body["shape"], body["dtype"], base64.b64decode(body["data"])),
}


def build(tree: Any, path: str, step: Step) -> Any:
    """What an object gave, from its tree; None where only other ranks have it. A tensor subclass is its parts."""
    if tree in ("tensor", "value"):
        return step.tensors.get(path) if tree == "tensor" else step.values.get(path)
    [(kind, branches)] = tree.items()
    if kind == "subclass":  # one within another stands there without this word
        kind, branches = "dict", [(key, one if one == "tensor" else {kind: one}) for key, one in branches["tensors"]]
    named = kind in ("dict", "odict")
    built: dict[Any, Any] = {}
    for key, branch in ((decode(key), branch) for key, branch in branches) if named else enumerate(branches):
        text = str(key).replace("%", "%25").replace("/", "%2F")
        built[key] = build(branch, f"{path}/{text}".removeprefix("/"), step)
    return {"dict": dict, "odict": OrderedDict, "list": list, "tuple": tuple}[kind](built if named else built.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("step", nargs="?", help="its number, latest, or a full name")
    parser.add_argument("--rank", type=int, default=0, help="whose values, and tensors where each has its own")
    options = parser.parse_args()
    if options.step is None:
        print(*history(options.root), sep="\n")
        return
    step = read(options.root, find(options.root, options.step), options.rank)
    for name, tensor in sorted(step.tensors.items()):
        print(name, step.dtypes[name], list(tensor.shape))
    for path, value in step.values.items():
        print(path, "=", repr(value))


if __name__ == "__main__":
    main()
