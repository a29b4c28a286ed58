"""The keeper of a process that lives on in a sandbox: a fork of its first process that does nothing
but wait for the process and for the host. Standard library only."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from typing import NoReturn

from etude.sandbox.command import Command, spawn


def keep(control: socket.socket, command: Command, own_pids: int) -> NoReturn:
    """Be the keeper of a process that lives on between commands.

    A "?" from the host is answered with a "?" and a newline; "k", or the end of its side, kills the
    process and all below it. The last word is a line with its exit status, or "!" and why it could
    not be started."""
    try:
        child, broken = spawn(command, own_pids)
        for descriptor in {command.directory, command.source, command.output}:
            os.close(descriptor)
        _attend(control, child)
        code = reaped(child, kill=True)
        raise_if_broken(broken)
        _say_last(control, str(code))
    except OSError as e:
        _say_last(control, f"!a process could not be started: {e}")
    finally:
        os._exit(0)


def _say_last(control: socket.socket, word: str) -> None:
    """Stay until the host has heard it: a socket that ends with a question unread, or that is asked
    when it has ended, takes what it said with it."""
    with contextlib.suppress(ConnectionError):
        control.sendall(f"{word}\n".encode())
        while control.recv(64):
            pass


def _attend(control: socket.socket, child: int) -> None:
    """Until the child has ended, or is to end."""
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(control, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if handle in ready:
            return
        try:
            word = control.recv(64)
            if not word or b"k" in word:
                return
            control.sendall(b"?\n" * len(word))
        except ConnectionError:
            return


def reaped(child: int, *, kill: bool) -> int:
    """Its exit status. Process 1 of a namespace is not reaped before every other process in it is
    gone."""
    if kill:
        os.kill(child, signal.SIGKILL)  # without effect on one that has ended
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def raise_if_broken(broken: int) -> None:
    reason = os.read(broken, 1000)
    os.close(broken)
    if reason:
        raise OSError(reason.decode())
