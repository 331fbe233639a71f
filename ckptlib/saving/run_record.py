"""The record of a run in its generation: the user's config, the command line and the git revision of the program.

It is made only on request, is of bounded size, and lacks values that look like secrets: anybody who can list a root can
read it. Git is asked without hooks, prompts or locks, and not for long; if it has no answer, none is recorded.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptlib.format.documents import dump_body
from ckptlib.format.values import Json, encode

log = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 64 * 1024
"""The most bytes of a config as JSON: `ckptlib ls` reads the records of all generations."""

MAX_ARGV_BYTES = 16 * 1024

GIT_S = 5.0
"""The most seconds for git, in all; an answer takes some 10 ms."""

HIDDEN = "(hidden)"

_SECRETS = re.compile(
    r"^(?!-*n(?:um)?[_-]).*(?:secret|password|passwd|passphrase|credentials?|(?:api|access|secret|private)[_-]?key)$",
    re.IGNORECASE | re.DOTALL,
)
"""Names whose values are secrets, whatever these are; but for counts of them, such as n_credentials."""
_TOKENS = re.compile(r"token$", re.IGNORECASE)
_NO_SECRET = re.compile(r"[<\[].*[>\]]|.{0,7}", re.DOTALL)
"""Values of tokens that are no secrets: a `pad_token` of <pad>, [PAD] or !."""
_KNOWN = re.compile(
    r"hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{20,}|://[^/@\s:]*:[^/@\s]+@"
)
"""Values that are secrets, whatever their name."""


def encode_config(config: Mapping[str, object]) -> Json:
    """Encodes a config as JSON, with secrets hidden. Raises TypeError, UnsupportedState, or ValueError if it is too
    large."""
    if not isinstance(config, Mapping):
        raise TypeError(f"config={repr(config)[:80]}: expected a dict, such as dict(vars(args))")
    hidden: list[str] = []
    encoded = encode(_without_secrets(dict(config), "config", hidden), "config")
    nbytes = len(dump_body({"config": encoded}))
    if nbytes > MAX_CONFIG_BYTES:
        raise ValueError(
            f"config= has {nbytes:,} bytes as JSON; at most {MAX_CONFIG_BYTES:,} are recorded, with each start of the "
            "job. Put what is large into the state, which is saved"
        )
    _warn(hidden)
    return encoded


def recorded_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Returns the tags, with secrets hidden."""
    hidden: list[str] = []
    found = {name: _hide(name, text, f"tags.{name}", hidden) for name, text in tags.items()}
    _warn(hidden)
    return found


def run_record(config: Json, code: bool) -> dict[str, Json]:
    """Returns the record of this process. `config`: encoded, None for none. `code`: adds its command line, and the
    program's revision."""
    found: dict[str, Json] = {} if config is None else {"config": config}
    if code:
        program = getattr(sys.modules.get("__main__"), "__file__", None)
        git = revision(Path(program).parent if program else Path())
        found |= {"argv": [*_argv(sys.argv)], **({} if git is None else {"git": git})}
    return found


def _argv(arguments: Sequence[str]) -> list[str]:
    hidden: list[str] = []
    shown: list[str] = []
    left, before = MAX_ARGV_BYTES, ""
    for n, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        text = argument if equals and name.startswith("-") else _hide(before, argument, f"argv[{n}]", hidden)
        if equals and text == argument:
            text = f"{name}={_hide(name, value, f'argv[{n}]', hidden)}"
        before = argument if argument.startswith("-") else ""
        text = text.encode(errors="backslashreplace").decode()
        left -= len(text)
        if left < 0:
            shown.append(f"... and {len(arguments) - n} more")
            break
        shown.append(text)
    _warn(hidden)
    return shown


def _without_secrets(value: object, where: str, hidden: list[str], name: str = "") -> object:
    """Returns the value without secrets, with dicts, lists and tuples made anew. `name`: its key in a dict."""
    if isinstance(value, str):
        return _hide(name, value, where, hidden)
    if _SECRETS.search(name) and value is not None and not isinstance(value, bool):  # a number, or several of them
        hidden.append(where)
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: _without_secrets(inner, f"{where}.{key}", hidden, str(key)) for key, inner in value.items()}
    if type(value) is list or type(value) is tuple:
        items = [_without_secrets(inner, f"{where}[{n}]", hidden) for n, inner in enumerate(value)]
        return items if type(value) is list else tuple(items)
    return value


def _hide(name: str, value: str, where: str, hidden: list[str]) -> str:
    named = _SECRETS.search(name) or (_TOKENS.search(name) and not _NO_SECRET.fullmatch(value))
    if value and (named or _KNOWN.search(value)):
        hidden.append(where)
        return HIDDEN
    return value


def _warn(hidden: Sequence[str]) -> None:
    if hidden:
        log.warning(
            "%s: looks like a secret and is not recorded: whoever can read the root would see it. Pass secrets by the "
            "environment",
            ", ".join(hidden[:8]),
        )


def revision(directory: Path) -> Json:
    """Returns the commit that is checked out there, and whether tracked files differ from it; None if git does not
    say."""
    deadline = time.monotonic() + GIT_S
    commit = _git(directory, deadline, "rev-parse", "--verify", "HEAD")
    if commit is None or re.fullmatch("[0-9a-f]{40,64}", commit.strip()) is None:
        return None
    changes = _git(directory, deadline, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    return {"commit": commit.strip(), "dirty": None if changes is None else bool(changes.strip())}


def _git(directory: Path, deadline: float, *arguments: str) -> str | None:
    """Returns git's output; None if it fails, is not there, or takes too long: then it is killed."""
    quiet = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        process = subprocess.Popen(
            ["git", "-C", str(directory), *quiet, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        log.info("the git revision is not recorded: %s", error)
        return None
    try:
        printed, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes it has started
        log.warning("the git revision is not recorded: git %s took longer than %.0f s", arguments[0], GIT_S)
        return None
    return printed.decode(errors="replace") if process.returncode == 0 else None
