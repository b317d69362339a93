# SPDX-License-Identifier: Apache-2.0
"""The exception tree. Every class is also the matching builtin; class names travel on the wire."""

from __future__ import annotations


class TransferQueueError(Exception):
    """Base of every exception that this package raises deliberately."""

    def __str__(self) -> str:
        # KeyError.__str__ would show the repr of the text; ours are sentences.
        return str(self.args[0]) if self.args else ""


class NotInitializedError(TransferQueueError, AssertionError, RuntimeError):
    """The process has no client yet: call ``init()`` first."""


class InvalidRequestError(TransferQueueError, ValueError, RuntimeError):
    """The request is wrong whatever the state of the queue: a bad size, rank, name or count."""


class UnknownPartitionError(InvalidRequestError):
    """There is no such partition."""


class SchemaConflictError(InvalidRequestError):
    """A field's dtype differs from what the partition already has; the text names both."""


class SamplerError(InvalidRequestError):
    """A sampler can't be built, isn't allowed, or refused its input."""


class SampleClearedError(TransferQueueError, KeyError, RuntimeError):
    """The metadata names samples that have been cleared."""


class StorageKeyNotFoundError(SampleClearedError):
    """The storage has no value for this sample and field."""


class FieldNotReadyError(TransferQueueError, RuntimeError):
    """Some of the samples don't have a requested field yet."""


class BatchTimeoutError(TransferQueueError, TimeoutError, RuntimeError):
    """No batch was complete before the deadline; the text says what was missing."""


class KeysTimeoutError(TransferQueueError, TimeoutError, RuntimeError):
    """Too few keys matched before the deadline, or none changed; the text says how many matched of how many."""


class EndOfPartitionError(TransferQueueError, EOFError):
    """The stream has ended: sealed and fully read, or cleared. This differs from "nothing yet"."""


class LeaseLostError(TransferQueueError, RuntimeError):
    """The lease has ended, or was never this client's; nothing was written. The text says who has the work now."""


class GroupStateError(InvalidRequestError):
    """The group, its part, or the task that trains it is in another state than the call needs."""


class GateStarvedError(TransferQueueError, RuntimeError):
    """A gate rejected group after group; the text has what it saw."""


class ProducersGoneError(TransferQueueError, RuntimeError):
    """Every producer that a consumer waits for has died, so the wait would never end."""


class StorageFullError(TransferQueueError, TimeoutError, ValueError, RuntimeError):
    """Storage capacity exceeded, and nothing was cleared before the deadline."""


class UnsupportedValueError(TransferQueueError, TypeError, ValueError):
    """A value that can't be stored as configured; the text names the type and the switch."""


class QueueUnreachableError(TransferQueueError, ConnectionError, TimeoutError, RuntimeError):
    """The controller or a storage unit doesn't answer: wrong address, or it has ended."""


class UnitLostError(QueueUnreachableError):
    """A storage unit has ended, and the values that it held are lost."""


class SessionEndedError(TransferQueueError, ConnectionError, RuntimeError):
    """A client was silent for too long, or was evicted, so what it held is undone. It goes on in a new session."""


class CheckpointError(TransferQueueError, ValueError, RuntimeError):
    """A checkpoint could not be written, or the one found can't be restored here."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint, or a file of it is missing; the text names it."""


class ProtocolError(TransferQueueError, RuntimeError):
    """The receiver couldn't decode a message, or didn't expect it."""


class ConfigError(TransferQueueError, ValueError):
    """The configuration has an unknown key or an impossible value."""


class UnknownBackendError(ConfigError, AssertionError):
    """No storage backend, or no client of one, has this name."""


class BackendUnavailableError(ConfigError, ImportError):
    """The chosen storage backend needs something that is not installed; the text says what."""


class LaunchError(TransferQueueError, RuntimeError):
    """A server process did not start; the text contains its output."""


class ClosedError(TransferQueueError, RuntimeError):
    """This client was closed."""


class RemoteError(TransferQueueError, RuntimeError):
    """An internal error of a server: please report it with the text."""


def _tree(cls: type[TransferQueueError]) -> list[type[TransferQueueError]]:
    return [cls, *(sub for child in cls.__subclasses__() for sub in _tree(child))]


def to_wire(error: BaseException) -> tuple[str, str]:
    """(code, text) of an error for the wire: our classes by name, bad input as InvalidRequestError, others as
    RemoteError.
    """
    if isinstance(error, TransferQueueError):
        return type(error).__name__, str(error)
    if isinstance(error, (ValueError, TypeError)):
        return InvalidRequestError.__name__, str(error)
    return RemoteError.__name__, f"{type(error).__name__}: {error}"


def from_wire(code: str, text: str) -> TransferQueueError:
    """The error that ``to_wire`` described; an unknown code (a newer server) becomes RemoteError."""
    by_name = {cls.__name__: cls for cls in _tree(TransferQueueError)}
    return by_name.get(code, RemoteError)(text)
