"""What the commands share: the URL and the options of its store, --json, and how errors end a command."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from ckptlib.cli.output import Output
from ckptlib.errors import CkptError
from ckptlib.stores import Store, open_store
from ckptlib.stores.secrets import Secrets, without_userinfo

OPTIONS_VARIABLE = "CKPTLIB_STORAGE_OPTIONS"

Command = TypeVar("Command", bound=Callable[..., Any])


def storage_options(given: tuple[str, ...]) -> dict[str, object]:
    """Returns the options of the environment, updated by those of the command line. Raises UsageError."""
    text = os.environ.get(OPTIONS_VARIABLE, "")
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{OPTIONS_VARIABLE} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.UsageError(f"{OPTIONS_VARIABLE} holds JSON, but not an object")
    for option in given:
        name, equals, value = option.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--option {name}: expected key=value")
        found[name] = _value(name, value)
    return found


def _value(name: str, text: str) -> object:
    """Returns a value as text, unless only JSON can express it. Digits stay text: keys of digits alone are common."""
    if text not in ("true", "false", "null") and not text.startswith(("{", "[")):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--option {name}: looks like JSON, but is not valid ({error})") from None


def open_url(url: str, options: Mapping[str, object]) -> Store:
    """Opens a store. Raises UsageError for a URL or options that no store takes, StoreError if a server is not
    reached."""
    try:
        return open_store(url, options)
    except FileNotFoundError as error:  # has no filename if a relative URL has no working directory
        lacks = error.filename or "the working directory"
        raise click.UsageError(f"{without_userinfo(url)}: {lacks} is not there: {error.strerror}") from None
    except (ValueError, TypeError, ImportError) as error:
        shown = without_userinfo(url)
        told = str(error) if str(error).startswith(shown) else f"{shown}: {error}"
        raise click.UsageError(Secrets(url, {}).hide(told)) from None


def with_store(command: Command) -> Command:
    """Gives a command the argument URL and its options, and calls it with a store."""

    @click.argument("url")
    @functools.wraps(command)
    def opened(url: str, option: tuple[str, ...], **arguments: Any) -> Any:
        try:
            store = open_url(url, storage_options(option))
        except CkptError as error:
            Output(arguments["as_json"]).error(error)
            sys.exit(1)
        with store:
            return command(store=store, **arguments)

    return with_storage_options(opened)  # type: ignore[return-value]


def with_storage_options(command: Command) -> Command:
    return click.option(
        "--option",
        metavar="KEY=VALUE",
        multiple=True,
        help=f"Option passed to the storage; may be repeated. {OPTIONS_VARIABLE} holds a JSON object of options.",
    )(command)


def with_output(command: Command) -> Command:
    """Gives a command --json and an `output`; exits by its result (false: exit status 1) or its error."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
    @functools.wraps(command)
    def shown(as_json: bool, **arguments: Any) -> None:
        output = Output(as_json)
        try:
            good = command(output=output, **arguments)
        except (CkptError, ImportError) as error:  # ImportError: an optional package that a root's digests need
            output.error(error)
            good = False
        sys.exit(0 if good else 1)

    return shown  # type: ignore[return-value]
