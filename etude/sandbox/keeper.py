"""The keeper of a background process in a sandbox: a fork of the first process that only waits for
that process and for the host. Standard library only."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from typing import NoReturn

from etude.sandbox.command import Command, spawn


def keep(control: socket.socket, command: Command, own_pids: int) -> NoReturn:
    """Keep a process that runs on between commands.

    A "?" from the host is answered with "?" and a newline. "k", or the end of the host's side,
    kills the process and all its descendants. The last line is the exit status, or "!" and the
    reason why the process could not be started.
    """
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
    """Send the last line and stay until the host has closed its side: if a socket closes with a
    question unread, or is asked after it has closed, the line is lost."""
    with contextlib.suppress(ConnectionError):
        control.sendall(f"{word}\n".encode())
        while control.recv(64):
            pass


def _attend(control: socket.socket, child: int) -> None:
    """Answer the host until the child has ended, or is to be ended."""
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
    """The exit status of the child. Process 1 of a namespace is reaped only after every other
    process in it is gone."""
    if kill:
        os.kill(child, signal.SIGKILL)  # without effect on one that has ended
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def raise_if_broken(broken: int) -> None:
    reason = os.read(broken, 1000)
    os.close(broken)
    if reason:
        raise OSError(reason.decode())
