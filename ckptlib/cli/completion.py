"""`ckptlib completion`: prints what bash, zsh and fish need to complete commands, options, paths and steps.

At each TAB, the shell runs the command itself, which looks at the disk of this host and asks no store.
"""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class
from typing_extensions import override

from ckptlib.format import keys

NAME = "ckptlib"
VARIABLE = "_CKPTLIB_COMPLETE"
"""The environment variable by which a shell asks; click looks for it."""

MOST_STEPS = 200
"""The most steps that are offered, the newest ones."""


class Place(click.types.StringParamType):
    """A URL, or a path of this machine; paths can be completed."""

    @override
    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="dir")]


class Step(click.types.StringParamType):
    """A step of the root that the command line named before."""

    @override
    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        words = ["latest", *map(str, steps_in(str(ctx.params.get("url") or "")))]
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]


TYPES = {"url": Place(), "new_url": Place(), "out": Place(), "step": Step(), "first": Step(), "second": Step()}
"""The types for arguments that take any text, by the name of the argument."""


def steps_in(url: str) -> list[int]:
    """Returns the committed steps of a root on this machine, newest first, with those that a rewind abandoned. Returns
    none if there is no such root."""
    try:
        names = os.listdir(Path(url.removeprefix("file://")) / keys.STEPS)
    except (OSError, ValueError):  # ValueError: a name with a null
        return []
    saves = (keys.parse_manifest_key(keys.STEPS + name) for name in names)
    return sorted({save.step for save in saves if save is not None}, reverse=True)[:MOST_STEPS]


def complete_arguments(group: click.Group) -> None:
    """Makes the arguments of all commands of a group complete in the shell."""
    for one in group.commands.values():
        for argument in one.params:
            if isinstance(argument, click.Argument) and argument.type is click.STRING:
                argument.type = TYPES.get(argument.name or "", click.STRING)


@click.command("completion", short_help="Print what a shell needs to complete commands.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Prints a script that completes commands, options, paths and steps in your shell.

    \b
    bash:  echo 'eval "$(ckptlib completion bash)"' >> ~/.bashrc
    zsh:   echo 'eval "$(ckptlib completion zsh)"' >> ~/.zshrc
    fish:  mkdir -p ~/.config/fish/completions
           ckptlib completion fish > ~/.config/fish/completions/ckptlib.fish

    Steps are completed where URL is a path of this machine. No store is asked.
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(ctx.find_root().command, {}, NAME, VARIABLE).source())
